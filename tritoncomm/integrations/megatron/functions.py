"""Replacements of Megatron-core's functions: linear layers, overwriting all-reduces, cross entropy, fp32 sums."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm.core import wire_sum
from tritoncomm.core.call import compare_arguments
from tritoncomm.errors import ArgumentError
from tritoncomm.integrations.megatron.frozen_linear import FrozenLinear, FrozenLinear016, frozen_linear_functions
from tritoncomm.integrations.megatron.trained_linear import TrainedLinear, TrainedLinear016, linear_functions
from tritoncomm.mappings.tensor_parallel import copy_to, reduce_from

__all__ = [
    "FrozenLinear",
    "FrozenLinear016",
    "ReduceScatterWithFP32Accumulation",
    "TrainedLinear",
    "TrainedLinear016",
    "VocabParallelCrossEntropy",
    "copy_to_tensor_model_parallel_region",
    "frozen_linear_functions",
    "linear_functions",
    "reduce_from_tensor_model_parallel_region",
]


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
        first_and_size = group.rank() * size, size  # of this rank's classes
        classes = size * group.size()
        logits = vocab_parallel_logits.float()
        # Every class but the target gets a/(C - 1), of all C classes; Megatron takes C of this rank's part. The rows
        # want e of (1 - e) nll + e mean(-log p), which is a C/(C - 1).
        smoothing = label_smoothing * classes / (classes - 1) if label_smoothing else 0.0
        # Without class weights. Targets of -100 are ignored; [1] is the divisor of a mean.
        return self._rows(logits, target, None, first_and_size, classes, -100, smoothing, group)[0]


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
        name = "reduce_scatter_with_fp32_accumulation"
        options = wire_sum.WireOptions(input_tensor.dtype, exchange="flat")
        if scratch is not None and (scratch.dtype, scratch.shape) != (input_tensor.dtype, input_tensor.shape):
            raise ArgumentError(f"{name}: all_to_all_output_tensor must be like the input, not {list(scratch.shape)}")
        _, handle = wire_sum.reduce_scatter(
            input_tensor.view(-1), 0, ranks, name, options, asynchronous=True, out=output_tensor.view(-1),
            scratch=None if scratch is None else scratch.view(-1),
        )  # fmt: skip
        if async_op:
            return handle
        handle.wait()
        return None
