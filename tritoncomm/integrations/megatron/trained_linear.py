"""Linear layer of a trained weight in the place of Megatron's.

Megatron's column-parallel linear calls torch.distributed itself. Here it is one autograd function whose collectives run
while the products do: backward starts the all-gather of the input before the product for the input's gradient, and the
reduction of that gradient before the product for the weight's.
"""

import os
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm import mappings
from tritoncomm.core import eager
from tritoncomm.core.autograd import direct
from tritoncomm.errors import ArgumentError
from tritoncomm.integrations.megatron.linear import (
    ASYNC,
    LINEAR,
    Buffers,
    ResolveGroup,
    all_gather_shared,
    has_parameter,
    is_autocast,
    is_ours,
    later_arguments,
    later_keywords,
    later_positionals,
    matmul,
    product,
)

__all__ = ["TrainedLinear", "TrainedLinear016", "linear_functions"]

Options = tuple[bool, bool, Any, Buffers | None]  # bias, allreduce_dgrad, group; buffers with sequence parallelism


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
        ctx.has_bias = bias is not None
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.group = group
        ctx.buffers = buffers
        return product(x, weight, bias, group, buffers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        options = ctx.has_bias, ctx.allreduce_dgrad, ctx.group, ctx.buffers
        if is_autocast():  # the forward ran without autocast
            with torch.autocast(grad.device.type, enabled=False):
                return *_gradients(x, weight, grad, options), None, None, None  # none for the last three arguments
        return *_gradients(x, weight, grad, options), None, None, None


def _gradients(x: Tensor, weight: Tensor, grad: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and bias; collectives run while the products do."""
    if torch.is_grad_enabled() or is_compiling():
        return _recorded_gradients(x, weight, grad, options)
    has_bias, allreduce_dgrad, group, buffers = options
    name = f"{LINEAR}.backward"
    handle = None
    if not grad.is_contiguous():
        grad = grad.contiguous()
    if buffers is not None:  # x is a shard of the sequence
        # Order matters: the all-gather starts before the product for the input's gradient, and the reduction of that
        # gradient before the product for the weight's. Each collective runs beside a product that does not need it.
        x, gathering = all_gather_shared(x, group, buffers, name, asynchronous=True)
        grad_x = grad.matmul(weight)
        if gathering is not None:
            gathering.wait()
        grad_x, handle = eager.reduce_scatter(grad_x, 0, group, name, asynchronous=True)
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
    if buffers is not None:  # x is a shard of the sequence
        x = mappings.gather_from_sequence_parallel_region(x, group=group)
        grad_x = mappings.reduce_scatter_to_sequence_parallel_region(grad_x, group=group)
    elif allreduce_dgrad:
        # Forward: identity. A second backward all-reduces the gradient of x, as this one does.
        x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        grad_x = mappings.reduce_from_tensor_model_parallel_region(grad_x, group=group)
    rows = grad.reshape(-1, grad.shape[-1])
    grad_weight = rows.t().mm(x.reshape(-1, x.shape[-1]))
    return grad_x, grad_weight, rows.sum(dim=0) if has_bias else None


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
        self._megatron_function, self._resolve_group, self.buffers = theirs, resolve_group, buffers
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
        if not is_ours(input, weight, gtp_remat_size, output_dtype, is_deferred):
            return self._megatron_function(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
                grad_output_buffer, wgrad_deferral_limit, tp_group=tp_group,
                **later_keywords(gtp_remat_size, output_dtype),
            )  # fmt: skip
        if not (allreduce_dgrad or sequence_parallel):
            if bias is None and input.is_contiguous():
                return matmul(input, weight)  # autograd's own derivative has the same products, and no Python in it
            group = buffers = None  # no collectives
            return _Linear.apply(input, weight, bias, allreduce_dgrad, group, buffers)
        if allreduce_dgrad and sequence_parallel:
            raise ArgumentError(f"{LINEAR}: allreduce_dgrad and sequence_parallel exclude each other")
        if tp_group is None:
            tp_group = self._resolve_group(None)
        if not self.warned and not is_compiling():
            self.warned = True
            _warn_of_launch_order(self._frames)
        buffers = self.buffers if sequence_parallel else None
        if torch.is_grad_enabled():
            return _Linear.apply(input, weight, bias, allreduce_dgrad, tp_group, buffers)
        return product(input, weight, bias, tp_group, buffers)


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
        """Return ``input @ weight.t() + bias``, always by Megatron's function if ``async_grad_allreduce`` is given."""
        arguments = (
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer,
            wgrad_deferral_limit,
        )  # fmt: skip
        if async_grad_allreduce is not None:  # deprecated: Megatron's own function warns of it
            return self._megatron_function(*arguments, async_grad_allreduce, tp_group)
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
        return type(cls.__name__, (cls,), {"theirs": theirs, "later": later_arguments(theirs), "function": function})

    @classmethod
    def apply(
        cls, input: Tensor, weight: Tensor, bias: Tensor | None, gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool, sequence_parallel: bool, grad_output_buffer: Any, wgrad_deferral_limit: Any,
        tp_group: Any, gtp_remat_size: int = 1, output_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``input @ weight.t() + bias``, by our autograd function or by Megatron's."""
        is_deferred = gradient_accumulation_fusion or grad_output_buffer is not None
        if is_ours(input, weight, gtp_remat_size, output_dtype, is_deferred):
            # Only with buffers ``_Linear`` gathers its input over the ranks.
            buffers = cls.function.buffers if sequence_parallel else None
            return _Linear.apply(input, weight, bias, allreduce_dgrad, tp_group, buffers)
        more = later_positionals(cls.later, gtp_remat_size, output_dtype)  # arguments that later releases added
        return cls.theirs.apply(
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, grad_output_buffer,
            wgrad_deferral_limit, tp_group, *more,
        )  # fmt: skip


def linear_functions(
    theirs: Any, linear_class: Any, resolve_group: ResolveGroup, buffers: Buffers
) -> tuple[TrainedLinear, type]:
    """Return our linear function of a trained weight and our autograd class, for a release of Megatron's."""
    function = (TrainedLinear016 if has_parameter(theirs, ASYNC) else TrainedLinear)(theirs, resolve_group, buffers)
    return function, LinearWithGradAccumulationAndAsyncCommunication.over(linear_class, function)


def _warn_of_launch_order(frames: int) -> None:
    """Warn unless CUDA starts kernels in the order of their launches; ``frames`` are between here and the caller."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        warnings.warn(
            f"{LINEAR}: set CUDA_DEVICE_MAX_CONNECTIONS=1, so that collectives start before the products that they "
            "overlap with",
            stacklevel=2 + frames,
        )
