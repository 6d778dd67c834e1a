"""Owners of full tensors: shards to the full tensor on one rank and back, for optimizers such as Muon and Shampoo."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm import variables
from tritoncomm.core.memory import share_memory, version_of
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import check_data, checked_ints
from tritoncomm.errors import ArgumentError, CommError, ShapeError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.api import BUCKET_BYTES, ReshardPlan, reshard_plan
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.names import named
from tritoncomm.reshard.request import is_dtensor, local_of, participants_of, raise_together, refusing, source_of

__all__ = ["OwnedExchange", "balanced_owners", "exchange_owned"]


def balanced_owners(
    shapes: Mapping[str, Sequence[int]], ranks: Sequence[int], cost: Callable[[Ints], float] = math.prod
) -> dict[str, int]:
    """Assign every tensor to an owner: the most costly tensor first, each to the rank with the least cost so far.

    Args:
        shapes: global shapes by name.
        ranks: global ranks that may own tensors.
        cost: returns the cost of a tensor from its shape; by default its number of elements.

    Returns:
        The global rank of every tensor's owner, by name.

    Raises:
        ArgumentError: ``shapes`` or ``ranks`` is of another kind, or there are no ranks.
    """
    if not isinstance(shapes, Mapping):
        raise ArgumentError(f"balanced_owners: shapes must be a mapping by name, not {shapes!r:.80}")
    shapes = {name: checked_ints(shape, "balanced_owners: a shape") for name, shape in shapes.items()}
    loads = dict.fromkeys(checked_ints(ranks, "balanced_owners: ranks"), 0.0)
    if shapes and not loads:
        raise ArgumentError("balanced_owners: there are no ranks to own anything")
    owners = {}
    # Ties go by name and by rank, so that every rank assigns the same owners.
    for name in sorted(shapes, key=lambda name: (-cost(shapes[name]), name)):
        owners[name] = min(loads, key=lambda rank: (loads[rank], rank))
        loads[owners[name]] += cost(shapes[name])
    return {name: owners[name] for name in shapes}


def _layouts(tensors: Any, owners: Any, source: Any) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Return the layouts of sharded tensors and the layouts of the full tensors on their owners, each by name."""
    by_name = named(tensors, "exchange_owned")
    if not isinstance(tensors, Mapping) or list(by_name) != list(tensors):
        raise ArgumentError("exchange_owned: tensors must be a mapping by name, and names must be strings")
    for name, x in by_name.items():
        if not isinstance(x, Tensor):
            raise ArgumentError(f"exchange_owned: {name} must be a tensor, not {type(x).__name__}")
    if not isinstance(owners, Mapping):
        raise ArgumentError(f"exchange_owned: owners must be a mapping by name, not {type(owners).__name__}")
    missing = [name for name in by_name if name not in owners]
    if missing:
        raise ArgumentError(f"exchange_owned: {missing} have no owner")
    checked_ints([owners[name] for name in by_name], "exchange_owned: owners")
    sources = source if isinstance(source, Mapping) else dict.fromkeys(by_name, source)
    layouts = {name: source_of(x, sources.get(name), "exchange_owned", name) for name, x in by_name.items()}
    return layouts, {name: Layout.replicated(each.shape, [owners[name]]) for name, each in layouts.items()}


class OwnedExchange:
    """Two plans: shards to the full tensor on its owner, and back. Every rank of the group calls each method.

    Per bucket and direction there is one exchange with one pack and one unpack: four launches for both.

    Args:
        tensors: DTensors, ColoTensors, or local shards with ``source``, by name; only their layouts are kept.
        owners: the global rank of every tensor's owner, by name; see ``balanced_owners``.
        source, group, bucket_bytes: as for ``reshard``.

    Attributes:
        owned: names of the tensors that this rank owns.
        shapes: global shapes by name.
        there, back: the plans from shards to full tensors, and back.

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
        participants = participants_of(group, "exchange_owned")
        group = participants.group
        self._group = (lambda: None) if group is None else weakref.ref(group)  # a program may destroy it
        self._has_agreed = False
        with refusing(participants, "exchange_owned"):
            layouts, full = _layouts(tensors, owners, source)
        options: dict[str, Any] = {"group": group, "bucket_bytes": bucket_bytes}
        self._dtypes = {name: x.dtype for name, x in tensors.items()}
        # What shards go back to: a DTensor's own mesh and placements, so that it returns as a DTensor, or a layout.
        home = {name: (x.device_mesh, x.placements) if is_dtensor(x) else layouts[name] for name, x in tensors.items()}
        self.owned = [name for name in tensors if owners[name] == dist.get_rank()]
        self.shapes = {name: layout.shape for name, layout in layouts.items()}
        self.there: ReshardPlan = reshard_plan(self._dtypes, layouts, full, **options)
        self.back: ReshardPlan = reshard_plan(self._dtypes, full, home, **options)

    @torch.no_grad()
    def collect(self, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
        """Exchange the shards of all ranks; return the full tensors that this rank owns, by name.

        Args:
            tensors: this rank's shards by name, laid out as those that the exchange was made for.
        """
        results = self.there.execute(tensors)
        return {name: results[name] for name in self.owned}

    @torch.no_grad()
    def distribute(self, full: Mapping[str, Tensor], device: torch.device | str = "cpu") -> dict[str, Any]:
        """Exchange full tensors from their owners; return this rank's shards in the original layouts, by name.

        Args:
            full: the full tensors that this rank owns, by name.
            device: device of the shards on a rank that owns nothing.

        Raises:
            ShapeError: other names than this rank owns, or a tensor of another shape.
            ArgumentError: a tensor of another dtype, or no tensor.
            MismatchError: another rank has raised, in the first call of this exchange; with ``TRITONCOMM_CHECK=1`` in
                any. Otherwise later calls compare nothing, which would let the host wait for the device in every step:
                if one rank raises there, the others wait for it until the group's timeout.
        """
        with self._telling():  # if this rank raises, the others raise the same error in ``_agree``
            self._check(full)
        self._agree()
        device = next((x.device for x in full.values()), torch.device(device))
        sources = {
            name: full[name] if name in full else torch.empty(0, dtype=dtype, device=device)
            for name, dtype in self._dtypes.items()
        }
        return self.back.execute(sources)

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Any], compute: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
        """Call ``compute(name, full)`` on the owner of every tensor; return this rank's shards of the results, by name.

        Args:
            tensors: this rank's shards by name.
            compute: returns a full tensor of the same shape. Where nothing was exchanged, as over one rank, it gets the
                caller's own memory, which must not change.

        Raises:
            ArgumentError: ``compute`` has changed the caller's memory in place.
            CommError: ``distribute`` refuses a result of ``compute``. After this, as after an exception of ``compute``,
                the other ranks raise in the calls in which they would raise for ``distribute``.
        """
        device, results = next((x.device for x in tensors.values()), torch.device("cpu")), {}
        full = self.collect(tensors)
        with self._telling():
            for name, x in full.items():
                before = version_of(x)
                results[name] = compute(name, x)
                if version_of(x) != before and share_memory([x], [local_of(tensors[name])]):
                    raise ArgumentError(
                        f"exchange_owned: compute has changed {name} in place, which is the caller's tensor here, as "
                        "nothing was exchanged; return a new tensor"
                    )
        return self.distribute(results, device)

    def _check(self, full: Mapping[str, Any]) -> None:
        """Reject other tensors than the owner of these names has."""
        if sorted(full) != sorted(self.owned):
            raise ShapeError(f"exchange_owned: this rank owns {self.owned}, not {list(full)}")
        for name, x in full.items():
            if not isinstance(x, Tensor) or x.dtype != self._dtypes[name]:
                got = f"{str(x.dtype).removeprefix('torch.')} tensor" if isinstance(x, Tensor) else type(x).__name__
                wanted = str(self._dtypes[name]).removeprefix("torch.")
                raise ArgumentError(f"exchange_owned: {name} must be a {wanted} tensor on its owner, not a {got}")
            if x.shape != self.shapes[name]:
                shapes = f"{list(self.shapes[name])} on its owner, not {list(x.shape)}"
                raise ShapeError(f"exchange_owned: {name} must have the shape {shapes}")
            check_data(x, f"exchange_owned: {name}")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Raise an exception of this rank on the other ranks, too, where they compare; see ``_agree``."""
        try:
            yield
        except Exception as failure:
            text = f"exchange_owned: {type(failure).__name__}: {failure}"
            with suppress(CommError):  # this rank raises its own
                self._agree(failure if isinstance(failure, CommError) else ArgumentError(text))
            raise

    def _agree(self, error: CommError | None = None) -> None:
        """Raise an error of any rank on all of them, until a call was without one; in check mode in every call."""
        group = self._group()
        if group is not None and (not self._has_agreed or variables.CHECK.value or variables.HASH.value):
            raise_together("exchange_owned", group, error)
            self._has_agreed = True


def exchange_owned(
    tensors: Mapping[str, Any],
    owners: Mapping[str, int],
    compute: Callable[[str, Tensor], Tensor],
    source: Any = None,
    *,
    group: GroupLike | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> dict[str, Any]:
    """Call ``compute(name, full)`` for every sharded tensor on its owner; return this rank's shards of the results.

    Makes an ``OwnedExchange`` and calls it once. A training loop makes one and calls it in every step.

    Args:
        tensors, owners, source, group, bucket_bytes: as for ``OwnedExchange``.
        compute: returns a full tensor of the same shape.

    Raises:
        CommError: as ``OwnedExchange``; a tensor without data.
    """
    exchange = OwnedExchange(tensors, owners, source, group=group, bucket_bytes=bucket_bytes)
    # Before anything is sent, as the others would wait for a rank that raises there.
    for name, x in tensors.items():
        check_data(local_of(x), f"exchange_owned: {name}")
    return exchange(tensors, compute)
