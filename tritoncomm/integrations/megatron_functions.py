"""Replacements of Megatron-core's linear layers, overwriting all-reduces, cross entropy and fp32 sum of gradients.

Megatron's column-parallel linear calls torch.distributed itself. Here it is one autograd function whose collectives run
while the products do: backward starts the all-gather of the input before the product for the input's gradient, and the
reduction of that gradient before the product for the weight's.
"""

import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn import Parameter

from tritoncomm import mappings
from tritoncomm.core import eager, wire_sum
from tritoncomm.core.autograd import direct
from tritoncomm.core.call import compare_arguments
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError
from tritoncomm.mappings.tensor_parallel import copy_to, reduce_from

__all__ = [
    "FrozenLinear",
    "ReduceScatterWithFP32Accumulation",
    "TrainedLinear",
    "VocabParallelCrossEntropy",
    "copy_to_tensor_model_parallel_region",
    "frozen_linear_functions",
    "linear_functions",
    "reduce_from_tensor_model_parallel_region",
]

Buffers = Callable[[], Any]  # Megatron's global memory buffer
ResolveGroup = Callable[[Any], Any]
Options = tuple[bool, bool, Any, Buffers | None]  # bias, allreduce_dgrad, group; buffers with sequence parallelism

_LINEAR = "linear_with_grad_accumulation_and_async_allreduce"
_FROZEN = "linear_with_frozen_weight"
_ASYNC = "async_grad_allreduce"  # up to 0.16.1
# By name, arguments of later releases with the value that earlier ones mean: from 0.19 on, from 0.20 on.
_LATER: dict[str, Any] = {"gtp_remat_size": 1, "output_dtype": None}
_matmul = torch.nn.functional.linear  # without bias: one call instead of `t` and `matmul`
_is_autocast = torch._C._is_any_autocast_enabled


def _all_gather(x: Tensor, group: ProcessGroup, buffers: Buffers, name: str, asynchronous: bool) -> Any:
    """All-gather dim 0 into Megatron's global memory buffer: ``eager.all_gather``."""

    def shared(shape: Ints, dtype: torch.dtype) -> Tensor:
        return buffers().get_tensor(shape, dtype, "mpu")  # Megatron's name for this buffer, which calls share

    return eager.all_gather(x, 0, group, None, name, asynchronous, shared)


@direct
class _Linear(Function):
    """Forward: ``x @ weight.t() + bias``; with ``buffers`` x is all-gathered along dim 0 first.

    Backward: with ``buffers`` the gradient of x is reduce-scattered, else with ``allreduce_dgrad`` all-reduced.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        group: ProcessGroup | None,
        buffers: Buffers | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.allreduce_dgrad, ctx.group, ctx.buffers = bias is not None, allreduce_dgrad, group, buffers
        return _product(x, weight, bias, group, buffers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        options = ctx.has_bias, ctx.allreduce_dgrad, ctx.group, ctx.buffers
        if _is_autocast():  # the forward ran without autocast
            with torch.autocast(grad.device.type, enabled=False):
                return *_gradients(x, weight, grad, options), None, None, None  # none for the last three arguments
        return *_gradients(x, weight, grad, options), None, None, None


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, buffers: Buffers | None
) -> Tensor:
    """Return ``x @ weight.t() + bias``; with ``buffers`` and a group x is all-gathered along dim 0 first."""
    if buffers is None or group is None:
        out = _matmul(x, weight)
    elif is_compiling():
        out = _matmul(eager.all_gather(x, 0, group, None, _LINEAR), weight)
    else:
        out = _matmul(_all_gather(x, group, buffers, _LINEAR, asynchronous=False), weight)
    return out if bias is None else out + bias  # not the fused sum of `linear`, which rounds once


def _gradients(x: Tensor, weight: Tensor, grad: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and bias; collectives run while the products do."""
    if torch.is_grad_enabled() or is_compiling():
        return _recorded_gradients(x, weight, grad, options)
    has_bias, allreduce_dgrad, group, buffers = options
    name, handle = f"{_LINEAR}.backward", None
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if buffers is not None:
        # Order matters: the all-gather starts before the product for the input's gradient, and the reduction of that
        # gradient before the product for the weight's. Each collective runs beside a product that does not need it.
        x, gathering = _all_gather(x, group, buffers, name, asynchronous=True)
        grad_x = grad.matmul(weight)
        if gathering is not None:
            gathering.wait()
        grad_x, handle = eager.reduce_scatter(grad_x, 0, group, None, name, asynchronous=True)
    else:
        grad_x = grad.matmul(weight)
        if allreduce_dgrad:
            grad_x, handle = eager.all_reduce(grad_x, group, name, in_place=True, asynchronous=True)
    if grad.dim() != 2:
        grad, x = grad.view(-1, grad.shape[-1]), x.contiguous().view(-1, x.shape[-1])
    grad_weight = grad.t().mm(x)
    grad_bias = grad.sum(dim=0) if has_bias else None
    if handle is not None:
        handle.wait()
    return grad_x, grad_weight, grad_bias


def _recorded_gradients(
    x: Tensor, weight: Tensor, grad: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients by mappings, which autograd can record (``create_graph``) and torch.compile can trace."""
    has_bias, allreduce_dgrad, group, buffers = options
    grad_x = grad.matmul(weight)
    if buffers is not None:
        x = mappings.gather_from_sequence_parallel_region(x, group=group)
        grad_x = mappings.reduce_scatter_to_sequence_parallel_region(grad_x, group=group)
    elif allreduce_dgrad:
        # Forward: identity. A second backward all-reduces the gradient of x, as this one does.
        x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        grad_x = mappings.reduce_from_tensor_model_parallel_region(grad_x, group=group)
    rows = grad.reshape(-1, grad.shape[-1])
    grad_weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
    return grad_x, grad_weight, rows.sum(dim=0) if has_bias else None


@direct
class _FrozenLinear(Function):
    """Forward: ``x @ weight.t() + bias``. Backward: the gradient of x, all-reduced with a ``group``; none of weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.group = group
        return _product(x, weight, bias, None, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,), group = ctx.saved_tensors, ctx.group
        with torch.autocast(grad.device.type, enabled=False):  # the forward ran without autocast
            grad_x = grad.matmul(weight)
        if group is not None and (torch.is_grad_enabled() or is_compiling()):
            grad_x = mappings.reduce_from_tensor_model_parallel_region(grad_x, group=group)
        elif group is not None:
            grad_x = eager.all_reduce(grad_x, group, f"{_FROZEN}.backward", in_place=True)
        return grad_x, None, None, None


def _is_ours(
    input: Tensor, weight: Tensor, gtp_remat_size: int, output_dtype: torch.dtype | None, is_deferred: bool
) -> bool:
    """Whether our linear functions take a call: plain tensors, no autocast, and an own gradient of the weight.

    Args:
        gtp_remat_size: ranks over which Megatron gathers the weight along a further axis.
        output_dtype: of the product, which Megatron leaves to TransformerEngine if it is not the input's.
        is_deferred: the gradient of the weight is fused into Megatron's buffer, or computed later.
    """
    if is_deferred or gtp_remat_size != 1 or output_dtype not in (None, input.dtype):
        return False
    autocast = torch.is_autocast_enabled(input.device.type) if is_compiling() else _is_autocast()
    # Subclasses of tensors stay Megatron's; a ``Parameter`` counts as plain.
    return not autocast and type(input) is Tensor and (type(weight) is Parameter or type(weight) is Tensor)


def _takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter ``name``, by which releases of Megatron differ."""
    return name in inspect.signature(function).parameters


class TrainedLinear:
    """Linear function of a trained weight with the arguments of Megatron 0.17 and newer.

    Forward: ``input @ weight.t() + bias``; with ``sequence_parallel`` the input is all-gathered first. Backward: the
    input's gradient is reduce-scattered with ``sequence_parallel``, all-reduced with ``allreduce_dgrad``.

    Args:
        resolve_group: Megatron's rule for a group that is None.
        buffers: returns Megatron's global memory buffer.

    Attributes:
        warned: whether the environment was warned about; Megatron's function keeps it on the object with its name.
    """

    _frames: ClassVar[int] = 1  # of this class between the warning and the caller

    def __init__(self, theirs: Any, resolve_group: ResolveGroup, buffers: Buffers) -> None:
        self._theirs, self._resolve_group, self.buffers = theirs, resolve_group, buffers
        self.warned: bool = getattr(theirs, "warned", False)

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: int | None = 0,
        tp_group: ProcessGroup | None = None,
        gtp_remat_size: int = 1,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return ``input @ weight.t() + bias``, by our autograd function or by Megatron's."""
        # Megatron's function runs fused gradient accumulation, deferred weight gradients, weights that are gathered
        # over a further axis (``gtp_remat_size``), products of another dtype, autocast, and subclasses of tensors.
        is_deferred = gradient_accumulation_fusion or grad_output_buffer is not None
        if not _is_ours(input, weight, gtp_remat_size, output_dtype, is_deferred):
            return self._theirs(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
                grad_output_buffer, wgrad_deferral_limit, tp_group=tp_group, **_given(gtp_remat_size, output_dtype),
            )  # fmt: skip
        if not (allreduce_dgrad or sequence_parallel):
            if bias is None and input.is_contiguous():
                return _matmul(input, weight)  # autograd's own derivative has the same products, and no Python in it
            return _Linear.apply(input, weight, bias, False, None, None)  # no collectives: no group, no buffers
        if allreduce_dgrad and sequence_parallel:
            raise ArgumentError(f"{_LINEAR}: allreduce_dgrad and sequence_parallel exclude each other")
        if tp_group is None:
            tp_group = self._resolve_group(None)
        if not self.warned and not is_compiling():
            self.warned = True
            _warn_of_connections(self._frames)
        buffers = self.buffers if sequence_parallel else None
        if torch.is_grad_enabled():
            return _Linear.apply(input, weight, bias, allreduce_dgrad, tp_group, buffers)
        return _product(input, weight, bias, tp_group, buffers)


class TrainedLinear016(TrainedLinear):
    """``TrainedLinear`` with the arguments of Megatron 0.16, which warns of ``async_grad_allreduce`` itself."""

    _frames: ClassVar[int] = 2

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: int | None = 0,
        async_grad_allreduce: bool | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return ``input @ weight.t() + bias``, by Megatron's function if ``async_grad_allreduce`` is given."""
        arguments = (
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer,
            wgrad_deferral_limit,
        )  # fmt: skip
        if async_grad_allreduce is not None:
            return self._theirs(*arguments, async_grad_allreduce, tp_group)
        return super().__call__(*arguments, tp_group)


class LinearWithGradAccumulationAndAsyncCommunication:
    """Base of the classes that stand where Megatron's autograd class of this name stands.

    Attributes:
        later: the arguments of ``_LATER`` that Megatron's ``apply`` takes.
        function: our linear function of a trained weight.
    """

    theirs: ClassVar[Any]
    later: ClassVar[tuple[str, ...]]
    function: ClassVar[TrainedLinear]

    @classmethod
    def over(cls, theirs: Any, function: TrainedLinear) -> type:
        """Return a subclass for one class of Megatron's."""
        return type(cls.__name__, (cls,), {"theirs": theirs, "later": _later(theirs), "function": function})

    @classmethod
    def apply(
        cls, input: Tensor, weight: Tensor, bias: Tensor | None, gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool, sequence_parallel: bool, grad_output_buffer: Any, wgrad_deferral_limit: Any,
        tp_group: Any, gtp_remat_size: int = 1, output_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``input @ weight.t() + bias``, by our autograd function or by Megatron's."""
        is_deferred = gradient_accumulation_fusion or grad_output_buffer is not None
        if _is_ours(input, weight, gtp_remat_size, output_dtype, is_deferred):
            buffers = cls.function.buffers if sequence_parallel else None
            return _Linear.apply(input, weight, bias, allreduce_dgrad, tp_group, buffers)
        more = _positional(cls.later, gtp_remat_size, output_dtype)
        return cls.theirs.apply(
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer,
            wgrad_deferral_limit, tp_group, *more,
        )  # fmt: skip


def linear_functions(
    theirs: Any, linear_class: Any, resolve_group: ResolveGroup, buffers: Buffers
) -> tuple[TrainedLinear, type]:
    """Return our linear function of a trained weight and our autograd class, for a release of Megatron's."""
    function = (TrainedLinear016 if _takes(theirs, _ASYNC) else TrainedLinear)(theirs, resolve_group, buffers)
    return function, LinearWithGradAccumulationAndAsyncCommunication.over(linear_class, function)


class FrozenLinear:
    """Linear function of a frozen weight with the arguments of Megatron 0.17 and newer.

    Neither the weight nor, as in Megatron, ``bias`` gets a gradient. Calls stay Megatron's as in ``TrainedLinear``.
    """

    def __init__(self, theirs: Any, resolve_group: ResolveGroup) -> None:
        self._theirs, self._resolve_group = theirs, resolve_group

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: None = None,
        gtp_remat_size: int = 1,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return ``input @ weight.t() + bias``, by our autograd function or by Megatron's."""
        is_deferred = grad_output_buffer is not None or wgrad_deferral_limit is not None
        if not _is_ours(input, weight, gtp_remat_size, output_dtype, is_deferred):
            return self._theirs(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
                grad_output_buffer, wgrad_deferral_limit, **_given(gtp_remat_size, output_dtype),
            )  # fmt: skip
        if sequence_parallel:
            input = mappings.gather_from_sequence_parallel_region(input, group=self._resolve_group(tp_group))
        if torch.is_grad_enabled():
            group = self._resolve_group(tp_group) if allreduce_dgrad else None
            return _FrozenLinear.apply(input, weight, bias, group)
        return _product(input, weight, bias, None, None)


class FrozenLinear016(FrozenLinear):
    """``FrozenLinear`` with the arguments of Megatron 0.16, which warns of ``async_grad_allreduce`` itself."""

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        grad_output_buffer: list[Tensor] | None = None,
        wgrad_deferral_limit: None = None,
        async_grad_allreduce: bool | None = None,
    ) -> Tensor:
        """Return ``input @ weight.t() + bias``, by Megatron's function if ``async_grad_allreduce`` is given."""
        arguments = (
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
            grad_output_buffer, wgrad_deferral_limit,
        )  # fmt: skip
        if async_grad_allreduce is not None:
            return self._theirs(*arguments, async_grad_allreduce)
        return super().__call__(*arguments)


class LinearWithFrozenWeight:
    """Base of the classes that stand where Megatron's autograd class of this name stands; ``later`` as there."""

    theirs: ClassVar[Any]
    later: ClassVar[tuple[str, ...]]
    function: ClassVar[FrozenLinear]

    @classmethod
    def over(cls, theirs: Any, function: FrozenLinear) -> type:
        """Return a subclass for one class of Megatron's."""
        return type(cls.__name__, (cls,), {"theirs": theirs, "later": _later(theirs), "function": function})

    @classmethod
    def apply(
        cls, input: Tensor, weight: Tensor, bias: Tensor | None, allreduce_dgrad: bool, tp_group: Any,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``input @ weight.t() + bias``, by our autograd function or by Megatron's."""
        if not _is_ours(input, weight, 1, output_dtype, is_deferred=False):
            return cls.theirs.apply(
                input, weight, bias, allreduce_dgrad, tp_group, *_positional(cls.later, 1, output_dtype)
            )
        return cls.function(
            input, weight, bias, gradient_accumulation_fusion=False, allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=False, tp_group=tp_group,
        )  # fmt: skip


def frozen_linear_functions(theirs: Any, linear_class: Any, resolve_group: ResolveGroup) -> tuple[FrozenLinear, type]:
    """Return our linear function of a frozen weight and our autograd class, for a release of Megatron's."""
    function = (FrozenLinear016 if _takes(theirs, _ASYNC) else FrozenLinear)(theirs, resolve_group)
    return function, LinearWithFrozenWeight.over(linear_class, function)


def _later(linear_class: Any) -> tuple[str, ...]:
    """Return the arguments of ``_LATER`` that an autograd class takes, in order."""
    return tuple(name for name in _LATER if _takes(linear_class.forward, name))


def _given(gtp_remat_size: int, output_dtype: torch.dtype | None) -> dict[str, Any]:
    """Return arguments of ``_LATER`` by keyword, unless earlier releases mean these values: they do not take them."""
    values = dict(zip(_LATER, (gtp_remat_size, output_dtype), strict=True))
    return {name: value for name, value in values.items() if value != _LATER[name]}


def _positional(later: tuple[str, ...], gtp_remat_size: int, output_dtype: torch.dtype | None) -> list[Any]:
    """Return arguments of ``_LATER`` by position: those that ``apply`` takes, and values that only it can refuse."""
    values, given = dict(zip(_LATER, (gtp_remat_size, output_dtype), strict=True)), _given(gtp_remat_size, output_dtype)
    return [value for name, value in values.items() if name in later or name in given]


def _warn_of_connections(frames: int) -> None:
    """Warn unless CUDA starts kernels in the order of their launches; ``frames`` are between here and the caller."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        warnings.warn(
            f"{_LINEAR}: set CUDA_DEVICE_MAX_CONNECTIONS=1, so that collectives start before the products that they "
            "overlap with",
            stacklevel=2 + frames,
        )


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: identity. Backward: all-reduce into the gradient that it receives, as Megatron-LM's contract says."""
    # Tensors that ``tritoncomm.mappings.overwrite_inputs`` excludes are copied. Autograd notices the write.
    return copy_to(input_, group, in_place=True)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: all-reduce into ``input_``, as Megatron-LM's contract says. Backward: identity."""
    # As above: excluded tensors are copied, and autograd notices the write.
    return reduce_from(input_, group, in_place=True)


class VocabParallelCrossEntropy:
    """Vocabulary-parallel cross entropy with the arguments of Megatron's ``vocab_parallel_cross_entropy``."""

    def __init__(self, tensor_group: Callable[[], ProcessGroup]) -> None:
        # The tensor package takes longer to import than everything else here, and this function is opt-in.
        from tritoncomm.tensor.vocab_parallel import cross_entropy_rows

        self._tensor_group, self._rows = tensor_group, cross_entropy_rows

    def __call__(
        self,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Return the loss of every position in fp32; sends one all-gather of two numbers a row."""
        if not 0 <= label_smoothing < 1:
            raise ArgumentError(f"vocab_parallel_cross_entropy: label_smoothing={label_smoothing} needs 0 <= a < 1")
        group = self._tensor_group() if tp_group is None else tp_group
        compare_arguments("vocab_parallel_cross_entropy", group, label_smoothing=label_smoothing)
        size = vocab_parallel_logits.shape[-1]
        bounds = group.rank() * size, size
        classes = size * group.size()
        logits = vocab_parallel_logits.float()
        # Every class but the target gets a/(C - 1), of all C classes; Megatron takes C of this rank's part. Written as
        # (1 - e) nll + e mean(-log p), e is a C/(C - 1).
        smoothing = label_smoothing * classes / (classes - 1) if label_smoothing else 0.0
        # Without class weights. Targets of -100 are ignored; [1] is the divisor of a mean.
        return self._rows(logits, target, None, bounds, classes, -100, smoothing, group)[0]


class ReduceScatterWithFP32Accumulation:
    """Reduce-scatter with the arguments of Megatron's ``reduce_scatter_with_fp32_accumulation``.

    The exchange is Megatron's. What arrives is summed in fp32, in rank order, and rounded into the output in one pass;
    Megatron writes the sum in fp32 first. Tensors that are not contiguous or not in 16 bits stay Megatron's.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any,
        group: ProcessGroup | None,
        async_op: bool,
        all_to_all_output_tensor: Tensor | None = None,
    ) -> Any:
        """Sum shards into ``output_tensor``, which may lie in the input; with ``async_op`` return a handle to wait on.

        Args:
            all_to_all_output_tensor: as large as the input, for what arrives; new memory by default.
        """
        assert op == ReduceOp.SUM
        ranks = dist.group.WORLD if group is None else group
        assert ranks is not None
        assert input_tensor.numel() % ranks.size() == 0
        scratch = all_to_all_output_tensor
        tensors = output_tensor, input_tensor, *(() if scratch is None else (scratch,))
        if input_tensor.dtype not in wire_sum.WIRES or not all(x.is_contiguous() for x in tensors):
            more = {} if scratch is None else {"all_to_all_output_tensor": scratch}
            return self._theirs(output_tensor, input_tensor, op, group, async_op, **more)
        name, asked = "reduce_scatter_with_fp32_accumulation", (input_tensor.dtype, None, "flat")
        if scratch is not None and (scratch.dtype, scratch.shape) != (input_tensor.dtype, input_tensor.shape):
            raise ArgumentError(f"{name}: all_to_all_output_tensor must be like the input, not {list(scratch.shape)}")
        _, handle = wire_sum.reduce_scatter(
            input_tensor.view(-1), 0, ranks, None, name, asked, asynchronous=True, out=output_tensor.view(-1),
            scratch=None if scratch is None else scratch.view(-1),
        )  # fmt: skip
        if async_op:
            return handle
        handle.wait()
        return None
