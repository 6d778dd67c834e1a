"""Replacements of Megatron-core's linear layers, of its overwriting all-reduces and of its cross entropy.

Megatron's column-parallel linear calls torch.distributed itself. Here it is one autograd function whose collectives run
while the products do: backward starts the all-gather of the input before the product for the input's gradient, and the
reduction of that gradient before the product for the weight's.
"""

import inspect
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, ReduceOp
from torch.nn import Parameter

from tritoncomm import mappings
from tritoncomm.core import backend, eager, ops
from tritoncomm.core.autograd import direct
from tritoncomm.core.call import enter
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.plan import all_reduce_bytes, cached_all_gather, cached_reduce_scatter, located
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.mappings.tensor_parallel import copy_to, reduce_from

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "cross_entropy_function",
    "frozen_linear_functions",
    "linear_functions",
    "reduce_from_tensor_model_parallel_region",
]

Buffers = Callable[[], Any]  # Megatron's global memory buffer
Options = tuple[bool, bool, Any, Buffers | None]  # bias, allreduce_dgrad, group; buffers with sequence parallelism

_LINEAR = "linear_with_grad_accumulation_and_async_allreduce"
_FROZEN = "linear_with_frozen_weight"
_ASYNC, _GTP = "async_grad_allreduce", "gtp_remat_size"  # up to 0.16.1, and from 0.19 on
_SUM = ReduceOp.SUM
_matmul = torch.nn.functional.linear  # without bias: one call instead of `t` and `matmul`
_is_autocast = torch._C._is_any_autocast_enabled


def _all_gather(
    x: Tensor, group: ProcessGroup, buffers: Buffers, name: str, asynchronous: bool
) -> tuple[Tensor, backend.Work, Tensor]:
    """All-gather dim 0 into Megatron's global memory buffer; (result, work, what is being sent)."""
    span = enter(name, "all_gather", group, x, (0, None))
    if span is None:
        return x, None, x
    try:
        plan = cached_all_gather(x.shape, x.itemsize, 0, span.world, 0)
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    x, copied = ops.contiguous(x)
    out = buffers().get_tensor(plan.shape, x.dtype, "mpu")
    work = backend.all_gather(out, x, group, name, asynchronous)
    span.end("torch" if copied else "view", copied, plan.bytes_sent)
    return out, work, x


def _reduce(x: Tensor, group: ProcessGroup, name: str) -> backend.Work:
    """Start an all-reduce of ``x`` in place."""
    span = enter(name, "all_reduce", group, x, (_SUM,))
    if span is None:
        return None
    work = backend.all_reduce(x, _SUM, group, name, True)
    span.end("view", 0, all_reduce_bytes(x.nbytes, span.world))
    return work


def _reduce_scatter(x: Tensor, group: ProcessGroup, name: str) -> tuple[Tensor, backend.Work]:
    """Start a reduce-scatter of dim 0 of ``x``, which is contiguous; (result, work)."""
    span = enter(name, "reduce_scatter", group, x, (0, None, _SUM))
    if span is None:
        return x, None
    plan = cached_reduce_scatter(x.shape, x.itemsize, 0, span.world, 0)
    out = empty(x, plan.shape, contiguous_stride(plan.shape), x.dtype)
    work = backend.reduce_scatter(out, x, _SUM, group, name, True)
    span.end("view", 0, plan.bytes_sent)
    return out, work


@direct
class _Linear(Function):
    """Forward: ``x @ weight.t() + bias``, x all-gathered along dim 0 where ``buffers`` are given.

    Backward: the gradient of x is reduce-scattered there, else all-reduced where ``allreduce_dgrad`` says so.
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
        if _is_autocast():  # the forward ran without
            with torch.autocast(grad.device.type, enabled=False):
                return *_gradients(x, weight, grad, options), None, None, None
        return *_gradients(x, weight, grad, options), None, None, None


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, buffers: Buffers | None
) -> Tensor:
    if buffers is None or group is None:
        out = _matmul(x, weight)
    elif is_compiling():
        out = _matmul(eager.all_gather(x, 0, group, None, _LINEAR), weight)
    else:
        out = _matmul(_all_gather(x, group, buffers, _LINEAR, False)[0], weight)
    return out if bias is None else out + bias  # not the fused sum of `linear`, which rounds once


def _gradients(x: Tensor, weight: Tensor, grad: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and bias."""
    if torch.is_grad_enabled() or is_compiling():
        return _recorded_gradients(x, weight, grad, options)
    has_bias, allreduce_dgrad, group, buffers = options
    name, work = f"{_LINEAR}.backward", None
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if buffers is not None:
        x, gathering, _sent = _all_gather(x, group, buffers, name, True)  # what is sent lives until the end
        grad_x = grad.matmul(weight)
        if gathering is not None:
            gathering.wait()
        grad_x, work = _reduce_scatter(grad_x, group, name)
    else:
        grad_x = grad.matmul(weight)
        if allreduce_dgrad:
            work = _reduce(grad_x, group, name)
    if grad.dim() != 2:
        grad, x = grad.view(-1, grad.shape[-1]), x.contiguous().view(-1, x.shape[-1])
    grad_weight = grad.t().mm(x)
    grad_bias = grad.sum(dim=0) if has_bias else None
    if work is not None:
        work.wait()
    return grad_x, grad_weight, grad_bias


def _recorded_gradients(
    x: Tensor, weight: Tensor, grad: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``_gradients`` by mappings, which autograd can record (``create_graph``) and torch.compile can trace."""
    has_bias, allreduce_dgrad, group, buffers = options
    grad_x = grad.matmul(weight)
    if buffers is not None:
        x = mappings.gather_from_sequence_parallel_region(x, group=group)
        grad_x = mappings.reduce_scatter_to_sequence_parallel_region(grad_x, group=group)
    elif allreduce_dgrad:
        x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        grad_x = mappings.reduce_from_tensor_model_parallel_region(grad_x, group=group)
    rows = grad.reshape(-1, grad.shape[-1])
    grad_weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
    return grad_x, grad_weight, rows.sum(dim=0) if has_bias else None


@direct
class _FrozenLinear(Function):
    """Forward: ``x @ weight.t() + bias``. Backward: the gradient of x alone, all-reduced where ``group`` is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.group = group
        return _product(x, weight, bias, None, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,), group = ctx.saved_tensors, ctx.group
        with torch.autocast(grad.device.type, enabled=False):  # the forward ran without
            grad_x = grad.matmul(weight)
        if group is not None and (torch.is_grad_enabled() or is_compiling()):
            grad_x = mappings.reduce_from_tensor_model_parallel_region(grad_x, group=group)
        elif group is not None:
            work = _reduce(grad_x, group, f"{_FROZEN}.backward")
            if work is not None:
                work.wait()
        return grad_x, None, None, None


def _is_plain(input: Tensor, weight: Tensor) -> bool:
    """Whether both are tensors of torch itself, and no autocast chooses the dtype of their product."""
    autocast = torch.is_autocast_enabled(input.device.type) if is_compiling() else _is_autocast()
    return not autocast and type(input) is Tensor and (type(weight) is Parameter or type(weight) is Tensor)


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


@lru_cache(maxsize=1)
def linear_functions(theirs: Any, linear_class: Any, resolve_group: Callable[[Any], Any], buffers: Buffers) -> Any:
    """Ours of the linear function of a trained weight and of its autograd class; cached by the arguments.

    Args:
        theirs: Megatron's ``linear_with_grad_accumulation_and_async_allreduce``.
        linear_class: its autograd class.
        resolve_group: Megatron's rule for a group that is None.
        buffers: returns Megatron's global memory buffer.
    """
    takes_gtp = _takes(linear_class.forward, _GTP)

    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: ProcessGroup | None,
        gtp_remat_size: int,
    ) -> Tensor:
        if (
            gradient_accumulation_fusion
            or grad_output_buffer is not None
            or gtp_remat_size != 1
            or not _is_plain(input, weight)
        ):
            return theirs(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
                grad_output_buffer, wgrad_deferral_limit, tp_group=tp_group, **_rematerialized(gtp_remat_size),
            )  # fmt: skip
        if not (allreduce_dgrad or sequence_parallel):
            if bias is None and input.is_contiguous():
                return _matmul(input, weight)  # autograd's own derivative has the same products, and no Python in it
            return _Linear.apply(input, weight, bias, False, None, None)
        if allreduce_dgrad and sequence_parallel:
            raise ArgumentError(f"{_LINEAR}: allreduce_dgrad and sequence_parallel exclude each other")
        if tp_group is None:
            tp_group = resolve_group(None)
        if not function.warned and not is_compiling():
            function.warned = True
            _warn_of_connections()
        used = buffers if sequence_parallel else None
        if torch.is_grad_enabled():
            return _Linear.apply(input, weight, bias, allreduce_dgrad, tp_group, used)
        return _product(input, weight, bias, tp_group, used)

    if _takes(theirs, _ASYNC):

        def linear_with_grad_accumulation_and_async_allreduce(  # pyright: ignore[reportRedeclaration]
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
            """Forward: ``input @ weight.t() + bias``, as below. Megatron warns of ``async_grad_allreduce``."""
            arguments = (
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
                grad_output_buffer, wgrad_deferral_limit,
            )  # fmt: skip
            if async_grad_allreduce is not None:
                return theirs(*arguments, async_grad_allreduce, tp_group)
            return run(*arguments, tp_group, 1)

    else:

        def linear_with_grad_accumulation_and_async_allreduce(
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
        ) -> Tensor:
            """Forward: ``input @ weight.t() + bias``, all-gathered first with ``sequence_parallel``. Backward: reduced.

            Megatron's own runs with fused gradient accumulation, deferred weight gradients, weights that are gathered
            over a further axis (``gtp_remat_size``), autocast, and for subclasses of tensors.
            """
            return run(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
                grad_output_buffer, wgrad_deferral_limit, tp_group, gtp_remat_size,
            )  # fmt: skip

    class LinearWithGradAccumulationAndAsyncCommunication:
        """Stands where Megatron's autograd class of this name stands."""

        @staticmethod
        def apply(
            input: Tensor, weight: Tensor, bias: Tensor | None, gradient_accumulation_fusion: bool,
            allreduce_dgrad: bool, sequence_parallel: bool, grad_output_buffer: Any, wgrad_deferral_limit: Any,
            tp_group: Any, gtp_remat_size: int = 1,
        ) -> Tensor:  # fmt: skip
            """Ours, or Megatron's for the cases that it keeps."""
            if (
                gradient_accumulation_fusion
                or grad_output_buffer is not None
                or gtp_remat_size != 1
                or not _is_plain(input, weight)
            ):
                more = (gtp_remat_size,) if gtp_remat_size != 1 or takes_gtp else ()
                return linear_class.apply(
                    input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
                    grad_output_buffer, wgrad_deferral_limit, tp_group, *more,
                )  # fmt: skip
            return _Linear.apply(input, weight, bias, allreduce_dgrad, tp_group, buffers if sequence_parallel else None)

    function: Any = linear_with_grad_accumulation_and_async_allreduce
    # Megatron's function, where it runs, keeps this flag on whatever has its name.
    function.warned = getattr(theirs, "warned", False)
    return function, LinearWithGradAccumulationAndAsyncCommunication


@lru_cache(maxsize=1)
def frozen_linear_functions(theirs: Any, linear_class: Any, resolve_group: Callable[[Any], Any]) -> Any:
    """Ours of the linear function of a frozen weight and of its autograd class; cached by the arguments.

    Args:
        theirs: Megatron's ``linear_with_frozen_weight``.
        linear_class: its autograd class.
        resolve_group: Megatron's rule for a group that is None.
    """

    def run(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        grad_output_buffer: list[Tensor] | None,
        wgrad_deferral_limit: None,
        gtp_remat_size: int,
    ) -> Tensor:
        refused = grad_output_buffer is not None or wgrad_deferral_limit is not None
        if refused or gtp_remat_size != 1 or not _is_plain(input, weight):
            return theirs(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
                grad_output_buffer, wgrad_deferral_limit, **_rematerialized(gtp_remat_size),
            )  # fmt: skip
        if sequence_parallel:
            input = mappings.gather_from_sequence_parallel_region(input, group=resolve_group(tp_group))
        if torch.is_grad_enabled():
            return _FrozenLinear.apply(input, weight, bias, resolve_group(tp_group) if allreduce_dgrad else None)
        return _product(input, weight, bias, None, None)

    if _takes(theirs, _ASYNC):

        def linear_with_frozen_weight(  # pyright: ignore[reportRedeclaration]
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
            """The linear function for a frozen weight, as below. Megatron warns of ``async_grad_allreduce``."""
            arguments = (
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
                grad_output_buffer, wgrad_deferral_limit,
            )  # fmt: skip
            if async_grad_allreduce is not None:
                return theirs(*arguments, async_grad_allreduce)
            return run(*arguments, 1)

    else:

        def linear_with_frozen_weight(
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
        ) -> Tensor:
            """The linear function without a gradient of the weight; as in Megatron, ``bias`` gets none either."""
            return run(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
                grad_output_buffer, wgrad_deferral_limit, gtp_remat_size,
            )  # fmt: skip

    class LinearWithFrozenWeight:
        """Stands where Megatron's autograd class of this name stands."""

        @staticmethod
        def apply(input: Tensor, weight: Tensor, bias: Tensor | None, allreduce_dgrad: bool, tp_group: Any) -> Tensor:
            """Ours, or Megatron's for the cases that it keeps."""
            if not _is_plain(input, weight):
                return linear_class.apply(input, weight, bias, allreduce_dgrad, tp_group)
            return run(input, weight, bias, False, allreduce_dgrad, False, tp_group, None, None, 1)

    return linear_with_frozen_weight, LinearWithFrozenWeight


def _rematerialized(gtp_remat_size: int) -> dict[str, int]:
    """The argument that versions before 0.19 do not have, where a caller passes it."""
    return {} if gtp_remat_size == 1 else {_GTP: gtp_remat_size}


def _warn_of_connections() -> None:
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        warnings.warn(
            f"{_LINEAR}: set CUDA_DEVICE_MAX_CONNECTIONS=1, so that collectives start before the products that they "
            "overlap with",
            stacklevel=4,
        )


def copy_to_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: identity. Backward: all-reduce into the gradient that it receives, as Megatron-LM's contract says.

    The tensors that ``tritoncomm.mappings.overwrite_inputs`` excludes are copied. Autograd notices the write.
    """
    return copy_to(input_, group, in_place=True)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Forward: all-reduce into ``input_``, as Megatron-LM's contract says. Backward: identity.

    The tensors that ``tritoncomm.mappings.overwrite_inputs`` excludes are copied. Autograd notices the write.
    """
    return reduce_from(input_, group, in_place=True)


@lru_cache(maxsize=1)
def cross_entropy_function(theirs: Any, tensor_group: Callable[[], ProcessGroup]) -> Any:
    """Our vocabulary-parallel cross entropy with the arguments of Megatron's ``theirs``."""
    # The tensor package takes longer to import than everything else here, and this function is opt-in.
    from tritoncomm.tensor.vocab_parallel import cross_entropy_rows

    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        tp_group: ProcessGroup | None = None,
    ) -> Tensor:
        """Loss of every position, fp32; one all-gather of two numbers a row, and the logits stay as they are."""
        if label_smoothing:
            more = {} if tp_group is None else {"tp_group": tp_group}  # from 0.19 on
            return theirs(vocab_parallel_logits, target, label_smoothing, **more)
        group = tensor_group() if tp_group is None else tp_group
        size = vocab_parallel_logits.shape[-1]
        bounds = group.rank() * size, size
        classes = size * group.size()
        return cross_entropy_rows(vocab_parallel_logits.float(), target, None, bounds, classes, -100, 0.0, group)[0]

    return vocab_parallel_cross_entropy
