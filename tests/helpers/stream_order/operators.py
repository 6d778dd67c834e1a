"""ATen operators as operations of streams, or of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stream_order.capture import Copy
from stream_order.memory import Region, Space
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from stream_order.gpu import Gpu
    from stream_order.simulator import Simulator

__all__ = ["Operators"]

_UNWRITTEN = ("aten.empty", "aten.new_empty")
_BLOCKING = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero", "aten.masked_select")
_COPIES = ("aten.copy_", "aten._to_copy")


class Operators(TorchDispatchMode):
    """Every ATen operator of the thread that entered it."""

    def __init__(self, simulator: Simulator, gpu: Gpu) -> None:
        super().__init__()
        self._simulator, self._gpu = simulator, gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        simulator, kwargs = self._simulator, kwargs or {}
        if simulator.is_muted:
            return func(*args, **kwargs)
        simulator.sweep()
        name, schema = str(func), func._schema
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for argument, value in given:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(x for x in tree_leaves(value) if isinstance(x, Tensor))
        inputs = [*reads, *writes]
        known = {x.untyped_storage()._cdata for x in inputs}
        space = self._gpu.space_of_new(inputs)
        is_on_device = Space.DEVICE in {space, *map(simulator.space_of, inputs)}
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known]
        for x in made:
            simulator.block_of(x, name, space)
        if not name.startswith(_UNWRITTEN):
            writes += made
        if not writes and not name.startswith(_BLOCKING):
            return out  # a view, or memory that nothing was written to
        if is_on_device:
            self._on_device(name, reads, writes, kwargs.get("non_blocking", len(args) > 2 and args[2] is True))
        else:
            self._on_host(name, reads, writes)
        return out

    def _on_device(self, name: str, reads: list[Tensor], writes: list[Tensor], non_blocking: bool) -> None:
        simulator, copy, blocks = self._simulator, None, name.startswith(_BLOCKING)
        if name.startswith(_COPIES):
            source, target = reads[0], writes[0]
            spaces = simulator.space_of(source), simulator.space_of(target)
            if spaces[1] is Space.HOST:
                blocks = True
            elif spaces[0] is not spaces[1] and source.dim():
                copy = _copy(simulator.region_of(source), simulator.region_of(target))
                blocks = not non_blocking
        # Memory that is not pinned is read before the call returns, but by a graph at every replay.
        ignores = Space.HOST if copy is None or not simulator.is_capturing else None
        reads, writes = ([x for x in each if simulator.space_of(x) is not ignores] for each in (reads, writes))
        simulator.operate(reads, writes, name, copy=copy)
        if blocks:
            simulator.block_host(simulator.current.lane.clock, name)

    def _on_host(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """The host reads and writes pinned memory as soon as it comes to it."""
        regions = [(x, False) for x in reads] + [(x, True) for x in writes]
        pinned = [(x, is_write) for x, is_write in regions if self._simulator.space_of(x) is Space.PINNED and x.numel()]
        if pinned:
            self._simulator.run_on_host([(self._simulator.region_of(x), is_write) for x, is_write in pinned], name)


def _copy(source: Region, target: Region) -> Copy:
    return Copy((source[0], source[1]), (target[0], target[1]), min(source[2] - source[1], target[2] - target[1]))
