"""Megatron-LM's underscore helpers: one collective along the first or last dim, not differentiable."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tritoncomm.core import eager
from tritoncomm.core.autograd import without_graph
from tritoncomm.core.plan import normalize_sizes
from tritoncomm.groups import GroupLike
from tritoncomm.mappings.general import checked

__all__ = [
    "_gather_along_first_dim",
    "_gather_along_last_dim",
    "_reduce",
    "_reduce_scatter_along_first_dim",
    "_reduce_scatter_along_last_dim",
    "_split_along_first_dim",
    "_split_along_last_dim",
]


def _reduce(input_: Tensor, group: GroupLike) -> Tensor:
    """All-reduce; a contiguous input is overwritten and returned."""
    name = "_reduce"
    return eager.all_reduce(input_, checked(input_, group, name), name, in_place=True)


def _split_along_last_dim(input_: Tensor, group: GroupLike) -> Tensor:
    """Return this rank's chunk of the last dim, contiguous: ``[..., H] -> [..., H/W]``."""
    return _run_split(input_, -1, group, "_split_along_last_dim")


def _split_along_first_dim(input_: Tensor, group: GroupLike) -> Tensor:
    """Return this rank's chunk of dim 0, a view of a contiguous input: ``[S, ...] -> [S/W, ...]``."""
    return _run_split(input_, 0, group, "_split_along_first_dim")


def _gather_along_last_dim(input_: Tensor, group: GroupLike) -> Tensor:
    """All-gather along the last dim: ``[..., h] -> [..., h*W]``."""
    return _run(eager.all_gather, input_, -1, group, "_gather_along_last_dim")


def _reduce_scatter_along_last_dim(input_: Tensor, group: GroupLike) -> Tensor:
    """Reduce-scatter along the last dim: ``[..., H] -> [..., H/W]``."""
    return _run(eager.reduce_scatter, input_, -1, group, "_reduce_scatter_along_last_dim")


def _gather_along_first_dim(
    input_: Tensor,
    group: GroupLike,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All-gather along dim 0: ``[s, ...] -> [s*W, ...]``, or ``[sum(output_split_sizes), ...]``."""
    return _run(eager.all_gather, input_, 0, group, "_gather_along_first_dim", output_split_sizes)


def _reduce_scatter_along_first_dim(
    input_: Tensor,
    group: GroupLike,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Reduce-scatter along dim 0: ``[S, ...] -> [S/W, ...]``, or ``[input_split_sizes[rank], ...]``."""
    return _run(eager.reduce_scatter, input_, 0, group, "_reduce_scatter_along_first_dim", input_split_sizes)


def _run_split(input_: Any, dim: int, group: Any, name: str) -> Tensor:
    """Check the arguments, and return this rank's chunk of ``dim``."""
    group = checked(input_, group, name)
    return eager.split(input_, dim, group, name)


def _run(collective: Callable[..., Tensor], input_: Any, dim: int, group: Any, name: str, sizes: Any = None) -> Tensor:
    """Check the arguments, and run a collective of ``eager`` along ``dim`` on the input without its graph."""
    group = checked(input_, group, name)
    return collective(without_graph(input_), dim, group, name, normalize_sizes(sizes, name))
