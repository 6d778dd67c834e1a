"""Linear layer of a frozen weight in the place of Megatron's."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm import mappings
from tritoncomm.core import eager
from tritoncomm.core.autograd import direct
from tritoncomm.integrations.megatron.linear import (
    ASYNC,
    ResolveGroup,
    has_parameter,
    is_ours,
    later_arguments,
    later_keywords,
    later_positionals,
    product,
)

__all__ = ["FrozenLinear", "FrozenLinear016", "frozen_linear_functions"]

_FROZEN = "linear_with_frozen_weight"


@direct
class _FrozenLinear(Function):
    """Forward: ``x @ weight.t() + bias``. Backward: the gradient of x, all-reduced with a ``group``; none of weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.group = group
        return product(x, weight, bias)

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


class FrozenLinear:
    """Linear function of a frozen weight with the arguments of Megatron 0.17 and newer.

    Neither the weight nor, as in Megatron, ``bias`` gets a gradient. Calls stay Megatron's as in ``TrainedLinear``.
    """

    def __init__(self, theirs: Any, resolve_group: ResolveGroup) -> None:
        self._megatron_function, self._resolve_group = theirs, resolve_group

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
        if not is_ours(input, weight, gtp_remat_size, output_dtype, is_deferred):
            return self._megatron_function(
                input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
                grad_output_buffer, wgrad_deferral_limit, **later_keywords(gtp_remat_size, output_dtype),
            )  # fmt: skip
        if sequence_parallel:
            input = mappings.gather_from_sequence_parallel_region(input, group=self._resolve_group(tp_group))
        if torch.is_grad_enabled():
            group = self._resolve_group(tp_group) if allreduce_dgrad else None
            return _FrozenLinear.apply(input, weight, bias, group)
        return product(input, weight, bias)


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
        """Return ``input @ weight.t() + bias``, always by Megatron's function if ``async_grad_allreduce`` is given."""
        arguments = (
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group,
            grad_output_buffer, wgrad_deferral_limit,
        )  # fmt: skip
        if async_grad_allreduce is not None:  # deprecated: Megatron's own function warns of it
            return self._megatron_function(*arguments, async_grad_allreduce)
        return super().__call__(*arguments)


class LinearWithFrozenWeight:
    """Base of the classes that stand where Megatron's autograd class of this name stands; ``later`` as there."""

    theirs: ClassVar[Any]
    later: ClassVar[tuple[str, ...]]
    function: ClassVar[FrozenLinear]

    @classmethod
    def over(cls, theirs: Any, function: FrozenLinear) -> type:
        """Return a subclass for one class of Megatron's."""
        return type(cls.__name__, (cls,), {"theirs": theirs, "later": later_arguments(theirs), "function": function})

    @classmethod
    def apply(
        cls, input: Tensor, weight: Tensor, bias: Tensor | None, allreduce_dgrad: bool, tp_group: Any,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """Return ``input @ weight.t() + bias``, by our autograd function or by Megatron's."""
        if not is_ours(input, weight, 1, output_dtype, is_deferred=False):
            return cls.theirs.apply(
                input, weight, bias, allreduce_dgrad, tp_group, *later_positionals(cls.later, 1, output_dtype)
            )
        return cls.function(
            input, weight, bias, gradient_accumulation_fusion=False, allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=False, tp_group=tp_group,
        )  # fmt: skip


def frozen_linear_functions(theirs: Any, linear_class: Any, resolve_group: ResolveGroup) -> tuple[FrozenLinear, type]:
    """Return our linear function of a frozen weight and our autograd class, for a release of Megatron's."""
    function = (FrozenLinear016 if has_parameter(theirs, ASYNC) else FrozenLinear)(theirs, resolve_group)
    return function, LinearWithFrozenWeight.over(linear_class, function)
