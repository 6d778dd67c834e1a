"""Snapshots: gathered copies of shards whose views can be written back.

An operator for which torch returns a view runs on a gathered copy if the dim is sharded. Its results that share the
storage of the copy are such views; their strides determine which elements of the shard they show.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.box import Box, Slices, box_of
from tritoncomm.tensor.distspec import ReplicaSpec, shard_bounds
from tritoncomm.tensor.layout import is_colo, plain, shares_storage, wrap
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = [
    "Snapshot",
    "is_view",
    "of_gathered",
    "refuse_graph",
    "refuse_sharing",
    "register_view",
    "track",
    "write_shard",
]

Write = Callable[[Tensor, Slices], Any]
Sources = Sequence[tuple[Tensor, "Snapshot"]]

_NAMES = """
    __getitem__ select narrow split split_with_sizes chunk unbind tensor_split hsplit vsplit dsplit view view_as
    unflatten squeeze unsqueeze transpose swapaxes swapdims t adjoint permute movedim moveaxis expand expand_as
    broadcast_to diagonal alias detach
"""
_GETTERS = [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")]
_VIEWS = frozenset(
    [getattr(owner, name) for name in _NAMES.split() for owner in (Tensor, torch) if hasattr(owner, name)] + _GETTERS
)
"""Operators that return views for any strides; ``reshape`` and others copy depending on the strides."""

_view: Any = ()


def register_view(cls: Any) -> Any:
    """Class decorator of ShardView, whose module imports this one."""
    global _view
    _view = cls
    return cls


def is_view(x: Any) -> bool:
    """Whether ``x`` is a view of a sharded dim, whose memory is a copy."""
    return isinstance(x, _view)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Source of the elements of a gathered copy.

    Attributes:
        base: the sharded ColoTensor.
        memory: its local tensor, detached.
        parts: its sharding at the time.
        offset: storage offset of the copy.
        exact: whether torch would return a view, and the strides are those of a contiguous copy.
    """

    base: Any
    memory: Tensor
    parts: tuple[tuple[int, int], ...]
    offset: int
    exact: bool

    def box(self, view: Tensor, name: str) -> Box | None:
        """The elements of the base that ``view`` shows; None for no elements.

        Raises:
            UnsupportedError: a write cannot be mapped to them.
        """
        if not shares_storage(plain(self.base), self.memory) or self.base.partitions != self.parts:
            raise UnsupportedError(f"{name}: the shard that this is a view of has other memory now; index it again")
        same = view.dtype == self.memory.dtype and not view.is_conj() and not view.is_neg()
        box = box_of(self.base.global_shape, view, self.offset) if self.exact and same else None
        if box is None and view.numel():
            raise UnsupportedError(
                f"{name}: this may be a view of {self.base.dist_spec} by more than integers and slices of its dims, "
                "and then no write can be mapped to the shard; clone() it, or write by index"
            )
        return box


def of_gathered(result: Any, gathered: Sequence[tuple[Any, Tensor]], func: Callable[..., Any]) -> Any:
    """The result of ``func`` on gathered shards, with views of them tracked.

    Args:
        result: tensors in any structure.
        gathered: pairs of a sharded ColoTensor and its gathered copy, which was passed to ``func``.
        func: the operator.
    """
    shared = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    sources = [
        (copy, Snapshot(base, plain(base).detach(), base.partitions, int(copy.storage_offset()), copy.is_contiguous()))
        for base, copy in gathered
        if any(shares_storage(x, copy) for x in shared)
    ]
    return track(result, sources, func) if sources or _is_array(result) else result


def track(result: Any, sources: Sources, func: Callable[..., Any]) -> Any:
    """The result of ``func``, in which every tensor that shares memory with a source becomes a ``ShardView``."""

    def tracked(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_view(x):
            return x
        for copy, snapshot in sources:
            if shares_storage(x, copy):
                return _as_view(x, replace(snapshot, exact=snapshot.exact and func in _VIEWS))
        return x

    if _is_array(result):
        if not result.flags.owndata:
            result.setflags(write=False)  # writes to an array over a gathered copy would not reach the shard
        return result
    return tracked(result) if isinstance(result, Tensor) else tree_map(tracked, result)


def _is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and hasattr(x, "setflags")


def _as_view(x: Tensor, snapshot: Snapshot) -> Any:
    like = x if is_colo(x) else wrap(x, snapshot.base.process_group, ReplicaSpec(), x.shape)
    with torch._C.DisableTorchFunctionSubclass():
        made = like.as_subclass(_view)
    vars(made).update(vars(like))
    made._snapshot = snapshot
    return made


def write_shard(
    name: str, memory: Tensor, shape: Sequence[int], parts: Any, pg: ProcessGroup, box: Box | None, write: Write
) -> None:
    """Call ``write(region, slices)`` with the part of a box in this rank's shard, and its place in the box.

    A rank without such a part bumps the version of its memory nevertheless, so that autograd's check of saved tensors
    has the same outcome on all ranks.

    Raises:
        UnsupportedError: elements of the shard share memory, or it was made in inference mode and this is outside.
    """
    sharded = dict(parts)
    shared = any(not memory.stride(dim) and size > 1 for dim, size in enumerate(shape) if dim not in sharded)
    if shared or (memory.is_inference() and not torch.is_inference_mode_enabled()):
        why = "elements of the shard share memory" if shared else "the shard was made in inference mode"
        raise UnsupportedError(f"{name}: {why}; clone() it first")
    part = None if box is None else box.within(shard_bounds(tuple(shape), parts, pg.tp_local_rank()))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if part is None:
            memory.narrow(next(iter(sharded)), 0, 0).zero_()
        else:
            write(part[0].select(memory), part[1])


def refuse_graph(name: str, tensors: Iterable[Any]) -> None:
    """Refuse a write that autograd would have to record.

    Raises:
        UnsupportedError: a tensor requires grad and grad mode is on.
    """
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise UnsupportedError(
            f"{name}: a write into a part of a sharded dim has no gradient; use torch.no_grad(), or redistribute first"
        )


def refuse_sharing(name: str, x: Any) -> None:
    """Refuse to share the memory of a view, which is a copy.

    Raises:
        UnsupportedError: ``x`` is a view of a sharded dim.
    """
    if is_view(x):
        raise UnsupportedError(f"{name}: this is a view of a sharded dim, whose memory is a copy; clone() it first")
