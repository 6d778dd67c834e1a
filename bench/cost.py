"""Costs of a call besides time: collective calls, passes over memory, and the most new memory held at once."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.harness import Part
from bench.hosts import no_op_group, real_ranks
from tritoncomm.tensor import ProcessGroup
from tritoncomm.tensor.dispatch import plain

__all__ = [
    "PROVIDERS", "WORLD", "Cost", "Counts", "dtensor_part", "least", "local", "min_of", "more_than",
    "over_ranks",
]  # fmt: skip

Counts = tuple[int, int, int]  # messages, bytes read and written, peak bytes

WORLD = 4
PROVIDERS = ("ours", "dtensor")
REPEATS = 5
MESSAGES = ("c10d", "_c10d_functional", "_dtensor")  # where the collectives are
AROUND = ("wait_tensor", "_wrap_tensor_autograd")  # neither messages nor memory
WRITING = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_")
ARITHMETIC = ("add", "sub", "mul", "div")
COMPOSED = {"logsumexp": (5, 1)}  # amax, sub, exp, sum: what it moves beyond its input, and holds; in inputs


class Cost(TorchDispatchMode):
    """Collective calls, bytes that local ops read and write, and the most bytes of new memory held at once.

    What a backend does by itself is not counted. What an op does inside is, where it is more than it shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages = self.moved = self.live = self.peak = 0
        self._held: set[int] = set()
        self._received: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it comes again with the pieces
        with torch._C.DisableTorchFunctionSubclass():  # the operators have been chosen already
            result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if name in AROUND:
            return result
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in inputs}
        new = [x for x in outputs if x.untyped_storage()._cdata not in known]
        for x in new:
            self._hold(x.untyped_storage())
        if namespace in MESSAGES:
            self.messages += 1
            self._received = tuple(_place(x) for x in inputs)
            if name == "all_reduce":
                self.moved += _bytes(inputs) + _bytes(outputs)  # it sums in a copy that it makes
        elif name == "copy_" and _place(args[0]) in self._received:
            self._received = ()  # Gloo hands over what has come, while the caller waits
        elif new or not _is_view(func):
            read = [x for x in inputs if x is not (kwargs or {}).get("out")]
            self.moved += _moved(name, args, read, outputs)
            if name in COMPOSED:
                reads_and_writes, memory = COMPOSED[name]
                self.moved += reads_and_writes * inputs[0].nbytes
                self.peak = max(self.peak, self.live + memory * inputs[0].nbytes)
        return result

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held:
            self._held.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.live -= size


def _is_view(func: Any) -> bool:
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _place(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.nbytes


def _bytes(tensors: list[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def _moved(name: str, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that an op reads and writes."""
    if "empty" in name or name in ("detach", "_unsafe_view", "set_"):
        return 0
    if name in WRITING:
        return _bytes(outputs)
    if name == "gather":  # as many elements as it has indices
        return _bytes(inputs[1:]) + 2 * _bytes(outputs)
    if name in ("index_put_", "scatter_add_"):
        return _bytes(inputs[1:]) + 2 * inputs[-1].nbytes
    if name == "index_fill_":
        return inputs[1].nbytes + inputs[0].nbytes // inputs[0].shape[args[1]] * inputs[1].numel()
    moved = _bytes(inputs) + (0 if name == "copy_" else _bytes(outputs))
    if name.rstrip("_") in ARITHMETIC:  # on CPUs another dtype is converted first, in memory
        wide = max(x.element_size() for x in (*inputs, *outputs))
        moved += sum(2 * x.numel() * wide for x in inputs if x.dim() and x.dtype is not outputs[0].dtype)
    return moved


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else plain(x)


def least(call: Callable[[], Any]) -> Counts:
    """Least costs of several calls, because Gloo's threads release tensors at any time."""
    runs = []
    for _ in range(REPEATS):
        with Cost() as cost:
            call()
        runs.append((cost.messages, cost.moved, cost.peak))
    return min_of(runs)


def min_of(runs: Sequence[Counts]) -> Counts:
    messages, moved, peak = (min(counts) for counts in zip(*runs, strict=True))
    return messages, moved, peak


def over_ranks(ranks: Sequence[Counts], size: float) -> dict[str, float]:
    """Messages, passes (mean over the ranks) and peak memory (of the rank that holds most), in units of ``size``."""
    messages, moved, peak = zip(*ranks, strict=True)
    passes = sum(moved) / len(ranks) / (2 * size)
    return {"messages": max(messages), "passes": round(passes, 3), "peak": round(max(peak) / size, 3)}


def more_than(label: str, ours: dict[str, float], theirs: dict[str, float], peer: str) -> list[str]:
    """Describe the counts that exceed the peer's."""
    return [f"{label}: {what} {n:g}, {peer}'s {theirs[what]:g}" for what, n in ours.items() if n > theirs[what]]


@contextmanager
def dtensor_host() -> Iterator[tuple[Any, ProcessGroup]]:
    """Four real ranks to count on, and this process as a rank of a no-op group to time in."""
    with no_op_group(WORLD), real_ranks() as pool:
        yield pool, ProcessGroup(tp_degree=WORLD)


# A part against DTensor.
dtensor_part = partial(Part, host=dtensor_host, rounds=30, peer="dtensor")
