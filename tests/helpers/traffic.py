"""Counts the bytes that local operators read and write, and those of memory that is held."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FREE", "Held", "Traffic"]

FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "detach"}


class Traffic(TorchDispatchMode):
    """Sums the bytes that every op reads and writes, and the bytes of new memory; views and collectives are free."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            return result
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in inputs}
        for x in outputs:
            if x.untyped_storage()._cdata not in known and name != "_unsafe_view":
                self.allocated += x.nbytes
        aliases = [value.alias_info for value in schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if is_view or name in FREE:
            return result
        if name == "copy_":  # writes its first argument, reads the second
            self.moved += args[0].nbytes + args[1].nbytes
        else:
            self.moved += sum(x.nbytes for x in inputs) + sum(x.nbytes for x in outputs)
        return result


class Held:
    """Memory of tensors while somebody holds it: bytes now, and the most so far."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._storages: set[int] = set()

    def add(self, x: Tensor) -> None:
        """Count the memory of a tensor until it is released; memory that counts already is not counted again."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.live -= size
