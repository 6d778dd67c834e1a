"""The autograd classes of the all-to-all mappings; their backward is an all-to-all too."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import eager, ops
from tritoncomm.core.autograd import direct, wants_grad, without_graph
from tritoncomm.core.plan import Ints, normalize_sizes
from tritoncomm.core.validation import check_kind
from tritoncomm.mappings.general import checked

__all__ = [
    "_AllToAll",
    "_HiddenToSequence",
    "_RowExchange",
    "_SequenceToHidden",
    "all_to_all_single",
    "exchange_rows",
    "to_hidden",
    "to_sequence",
]


@direct
class _AllToAll(Function):
    """Forward: all-to-all along dim 0. Backward: all-to-all with the split sizes swapped."""

    @staticmethod
    def forward(
        ctx: Any,
        group: ProcessGroup,
        input: Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        use_nccl_stream: bool = False,
    ) -> Tensor:
        ctx.group = group = checked(input, group, "all_to_all")
        ctx.output_split_sizes = output_split_sizes
        ctx.input_split_sizes = input_split_sizes
        ctx.use_nccl_stream = use_nccl_stream
        return all_to_all_single(input, group, output_split_sizes, input_split_sizes, use_nccl_stream, "all_to_all")

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        grad, group = grad_output[0], ctx.group
        sizes = (ctx.input_split_sizes, ctx.output_split_sizes)
        on_stream = getattr(ctx, "use_nccl_stream", False)
        if grad.requires_grad:
            return None, _AllToAll.apply(group, grad, *sizes, on_stream), None, None, None
        return None, all_to_all_single(grad, group, *sizes, on_stream, "all_to_all.backward"), None, None, None


def all_to_all_single(x: Tensor, group: ProcessGroup, out: Any, into: Any, on_stream: bool, name: str) -> Tensor:
    """Exchange rows by a caller's split sizes: ``out`` come from each rank, ``into`` go to each."""
    out_sizes, in_sizes = normalize_sizes(out, name), normalize_sizes(into, name)
    if on_stream and not is_compiling():
        result, handle = eager.all_to_all_single(x, group, out_sizes, in_sizes, name, asynchronous=True)
        return result if handle is None else handle.wait()  # None over one rank
    return eager.all_to_all_single(x, group, out_sizes, in_sizes, name)


def to_hidden(x: Tensor, group: ProcessGroup, name: str, shape: Ints | None = None, on_stream: bool = False) -> Tensor:
    """Exchange ``[t.., H] -> [t*W, H/W]``, or to ``shape``."""
    if shape is None:
        shape = (math.prod(x.shape[:-1]) * group.size(), x.shape[-1] // group.size())
    return eager.all_to_all(x, -1, 0, group, name, shape=shape, asynchronous=on_stream)


def _flattened(x: Tensor, name: str) -> Tensor:
    """Flatten ``[T.., h] -> [T, h]``; a copy, which is counted, where one stride cannot walk the leading dims."""
    if not is_compiling() and (type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.is_quantized):
        check_kind(x, name)  # DTensors, sparse and nested tensors answer what follows with errors of their own
    flat = math.prod(x.shape[:-1]), x.shape[-1]
    if is_compiling() or x.is_contiguous():
        return x.reshape(flat)
    try:
        return x.view(flat)
    except (RuntimeError, ValueError):  # no view has these strides; fake tensors raise a ValueError
        started = record.now()
        rows, path, copied = ops.pack(x, dim=0, world=1)  # a contiguous copy
        # The exchange that follows counts the call, so that this adds its bytes only.
        record.add(name, path, copied, 0, started, calls=0)
        return rows.view(flat)


def to_sequence(
    x: Tensor, group: ProcessGroup, name: str, shape: Ints | None = None, on_stream: bool = False
) -> Tensor:
    """Exchange ``[T.., h] -> [T/W, h*W]``, or to ``shape``."""
    if x.dim() != 2:
        x = _flattened(x, name)
    return eager.all_to_all(x, 0, 1, group, name, shape=shape, asynchronous=on_stream)


@direct
class _SequenceToHidden(Function):
    """Forward: every rank's rows, this rank's columns. Backward: this rank's rows, every rank's columns."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, shape: Ints | None, on_stream: bool) -> Tensor:
        ctx.group, ctx.shape, ctx.on_stream = group, input_.shape, on_stream
        return to_hidden(input_, group, "all_to_all_sp2hp", shape, on_stream)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        how = ctx.shape, ctx.on_stream
        if grad_output.requires_grad:
            return _HiddenToSequence.apply(grad_output, ctx.group, *how), None, None, None
        return to_sequence(grad_output, ctx.group, "all_to_all_sp2hp.backward", *how), None, None, None


@direct
class _HiddenToSequence(Function):
    """Forward: this rank's rows, every rank's columns. Backward: every rank's rows, this rank's columns."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup, shape: Ints | None, on_stream: bool) -> Tensor:
        ctx.group, ctx.shape, ctx.on_stream = group, input_.shape, on_stream
        return to_sequence(input_, group, "all_to_all_hp2sp", shape, on_stream)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        how = ctx.shape, ctx.on_stream
        if grad_output.requires_grad:
            return _SequenceToHidden.apply(grad_output, ctx.group, *how), None, None, None
        return to_hidden(grad_output, ctx.group, "all_to_all_hp2sp.backward", *how), None, None, None


@direct
class _RowExchange(Function):
    """Forward: all-to-all of rows by their numbers. Backward: with both lists swapped."""

    @staticmethod
    def forward(ctx: Any, wire: Tensor, recv: Ints, send: Ints, group: ProcessGroup, names: tuple[str, str]) -> Tensor:
        ctx.counts, ctx.group, ctx.names = (send, recv), group, (names[1], names[1])
        return eager.all_to_all_single(wire, group, recv, send, names[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _RowExchange.apply(grad.contiguous(), *ctx.counts, ctx.group, ctx.names), None, None, None, None


def exchange_rows(x: Tensor, recv: Ints, send: Ints, group: ProcessGroup, names: tuple[str, str]) -> Tensor:
    """Forward: all-to-all of the rows of dim 0, by numbers from and to each rank. Backward: the rows go back."""
    if wants_grad(x):
        return _RowExchange.apply(x, recv, send, group, names)
    return eager.all_to_all_single(without_graph(x), group, recv, send, names[0])
