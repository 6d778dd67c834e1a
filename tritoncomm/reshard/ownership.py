"""Full tensors on their owners and back: what optimizers of matrices (Muon, Shampoo) need of sharded parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import check_data, checked_ints
from tritoncomm.errors import ArgumentError, CommError, ShapeError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.api import BUCKET_BYTES, ReshardPlan, reshard_plan
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.request import members_of, refuse
from tritoncomm.reshard.specs import is_dtensor, local_of, named, source_of

__all__ = ["OwnedExchange", "balanced_owners", "exchange_owned"]


def balanced_owners(
    shapes: Mapping[str, Sequence[int]], ranks: Sequence[int], cost: Callable[[Ints], float] = math.prod
) -> dict[str, int]:
    """An owner for every tensor: the largest first, each to the rank with the least so far.

    Args:
        shapes: global shapes by name.
        ranks: global ranks that may own.
        cost: of a shape, its elements by default.

    Raises:
        ArgumentError: what is no shape or rank, or no ranks.
    """
    if not isinstance(shapes, Mapping):
        raise ArgumentError(f"balanced_owners: shapes must be a mapping by name, not {shapes!r:.80}")
    shapes = {name: checked_ints(shape, "balanced_owners: a shape") for name, shape in shapes.items()}
    loads = dict.fromkeys(checked_ints(ranks, "balanced_owners: ranks"), 0.0)
    if shapes and not loads:
        raise ArgumentError("balanced_owners: there are no ranks to own anything")
    owners = {}
    for name in sorted(shapes, key=lambda each: (-cost(shapes[each]), each)):
        owners[name] = min(loads, key=lambda rank: (loads[rank], rank))
        loads[owners[name]] += cost(shapes[name])
    return {name: owners[name] for name in shapes}


def _layouts(tensors: Any, owners: Any, source: Any) -> tuple[dict[str, Any], dict[str, Layout], dict[str, Layout]]:
    """The tensors by name, their layouts, and those of the full tensors on their owners."""
    given = named(tensors, "exchange_owned")
    if not isinstance(tensors, Mapping) or list(given) != list(tensors):
        raise ArgumentError("exchange_owned: tensors must be a mapping by name, and names must be strings")
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"exchange_owned: {name} must be a tensor, not {type(x).__name__}")
    if not isinstance(owners, Mapping):
        raise ArgumentError(f"exchange_owned: owners must be a mapping by name, not {type(owners).__name__}")
    missing = [name for name in given if name not in owners]
    if missing:
        raise ArgumentError(f"exchange_owned: {missing} have no owner")
    checked_ints([owners[name] for name in given], "exchange_owned: owners")
    sources = source if isinstance(source, Mapping) else dict.fromkeys(given, source)
    layouts = {name: source_of(x, sources.get(name), "exchange_owned", name) for name, x in given.items()}
    return given, layouts, {name: Layout.replicated(each.shape, [owners[name]]) for name, each in layouts.items()}


class OwnedExchange:
    """Two plans: shards to the full tensor on its owner, and back. Every rank of the group calls each method.

    Per bucket and direction there is one exchange with one pack and one unpack: four launches for both.

    Args:
        tensors: by name: DTensors, ColoTensors, or local shards with ``source``; only their layouts are kept.
        owners: the global rank of every name; see ``balanced_owners``.
        source, group, bucket_bytes: as for ``reshard``.

    Raises:
        ArgumentError: a tensor without an owner.
        CommError: as ``reshard_plan``.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        owners: Mapping[str, int],
        source: Any = None,
        *,
        group: GroupLike | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        members = members_of(group, "exchange_owned")
        try:
            given, layouts, full = _layouts(tensors, owners, source)
        except CommError as error:
            refuse(error, members, "exchange_owned")
        options: dict[str, Any] = {"group": members.group, "bucket_bytes": bucket_bytes}
        dtypes = {name: x.dtype for name, x in given.items()}
        home = {name: (x.device_mesh, x.placements) if is_dtensor(x) else layouts[name] for name, x in given.items()}
        self.owned = [name for name in given if owners[name] == dist.get_rank()]
        self.shapes = {name: layout.shape for name, layout in layouts.items()}
        self.there: ReshardPlan = reshard_plan(dtypes, layouts, full, **options)
        self.back: ReshardPlan = reshard_plan(dtypes, full, home, **options)
        self._dtypes = dtypes

    @torch.no_grad()
    def collect(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """The full tensors that this rank owns, by name, from the shards of all ranks."""
        results = self.there.execute(tensors)
        return {name: results[name] for name in self.owned}

    @torch.no_grad()
    def distribute(self, full: Mapping[str, Tensor], device: torch.device | str = "cpu") -> dict[str, Any]:
        """Shards of this rank in the layouts of the original tensors, from the full tensors of their owners.

        Args:
            full: those that this rank owns.
            device: of a rank that owns nothing.

        Raises:
            ShapeError: other tensors than this rank owns, or of other shapes.
        """
        if sorted(full) != sorted(self.owned):
            raise ShapeError(f"exchange_owned: this rank owns {self.owned}, not {list(full)}")
        device = next((x.device for x in full.values()), torch.device(device))
        given = {
            name: full[name] if name in full else torch.empty(0, dtype=dtype, device=device)
            for name, dtype in self._dtypes.items()
        }
        return self.back.execute(given)

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Any], compute: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        """``compute(name, full)`` on the owner of every tensor; returns this rank's shards of the results."""
        device = next((x.device for x in tensors.values()), torch.device("cpu"))
        return self.distribute({name: compute(name, x) for name, x in self.collect(tensors).items()}, device)


def exchange_owned(
    tensors: Mapping[str, Any],
    owners: Mapping[str, int],
    compute: Callable[[str, Tensor], Tensor],
    source: Any = None,
    *,
    group: GroupLike | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Any]:
    """``compute(name, full)`` of every sharded tensor on its owner; returns the shards of the results.

    Makes an ``OwnedExchange`` and calls it once; a training loop keeps one. Arguments, results and errors as there.
    """
    made = OwnedExchange(tensors, owners, source, group=group, bucket_bytes=bucket_bytes)
    for name, x in named(tensors, "exchange_owned").items():  # ranks with nothing to send would wait for the others
        check_data(local_of(x), f"exchange_owned: {name}")
    return made(tensors, compute)
