"""Memory that something besides a tensor sees, and tools that keep what they see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EXTERNAL", "TYPES", "VIEWS", "Keep", "KeepFunctions", "kept", "trace", "traced"]


class Subclass(torch.Tensor):
    """May keep anything anywhere."""


class Wrapper(torch.Tensor):
    """A tensor around another, as DTensor is."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*(x.inner if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))


kept: list[Any] = []
Look = Callable[[], np.ndarray]


def _array(values: np.ndarray, make: Callable[[np.ndarray], Tensor]) -> tuple[Tensor, Look]:
    seen = values.copy()
    return make(seen), lambda: seen


def _tensor(values: np.ndarray, make: Callable[[Tensor], Tensor]) -> tuple[Tensor, Look]:
    seen = torch.tensor(values)
    return make(seen), seen.numpy


def _storage(values: np.ndarray) -> tuple[Tensor, Look]:
    """Only the Python object of the storage is kept."""
    storage = torch.tensor(values).untyped_storage()
    x = torch.empty(0).set_(storage, 0, values.shape, [n // 4 for n in values.strides])  # pyright: ignore
    return x, lambda: torch.frombuffer(bytearray(storage.tolist()), dtype=torch.float32).numpy().reshape(values.shape)


def _file(values: np.ndarray, path: str, shared: bool) -> tuple[Tensor, Look]:
    values.tofile(path)
    x = torch.from_file(path, shared=shared, size=values.size).view(values.shape)
    return x, lambda: np.fromfile(path, np.float32).reshape(values.shape)


def _memmap(values: np.ndarray, path: str) -> tuple[Tensor, Look]:
    values.tofile(path)
    mapped = torch.from_numpy(np.memmap(path, np.float32, "r+", shape=values.shape))
    return mapped, lambda: np.fromfile(path, np.float32).reshape(values.shape)


def _shared(values: np.ndarray) -> tuple[Tensor, Look]:
    """Memory that another process may have open; a second mapping of it is the other process."""
    x = torch.tensor(values).share_memory_()
    handle = x.untyped_storage()._share_filename_cpu_()  # pyright: ignore[reportAttributeAccessIssue]
    other = torch.UntypedStorage._new_shared_filename_cpu(*handle)  # pyright: ignore[reportAttributeAccessIssue]
    return x, lambda: torch.empty(0).set_(other).view(values.shape).numpy()  # pyright: ignore


# A tensor over memory that something else sees, and a look at it from there. Arguments: its values, a file's name.
EXTERNAL: dict[str, Callable[[np.ndarray, str], tuple[Tensor, Look]]] = {
    "from_numpy": lambda values, _: _array(values, torch.from_numpy),
    "as_tensor": lambda values, _: _array(values, torch.as_tensor),
    "asarray": lambda values, _: _array(values, torch.asarray),
    "frombuffer": lambda values, _: _array(
        values, lambda array: torch.frombuffer(memoryview(array).cast("B"), dtype=torch.float32).view(array.shape)
    ),
    "from_dlpack-numpy": lambda values, _: _array(values, torch.from_dlpack),
    "from_dlpack-torch": lambda values, _: _tensor(values, torch.from_dlpack),
    "numpy of a tensor": lambda values, _: _tensor(values, lambda x: torch.as_tensor(x.numpy())),
    "from_file-shared": lambda values, path: _file(values, path, True),
    "from_file-private": lambda values, path: _file(values, path, False),
    "memmap": _memmap,
    "share_memory_": lambda values, _: _shared(values),
    "storage": lambda values, _: _storage(values),
    "subclass": lambda values, _: _tensor(values, lambda x: x.clone().as_subclass(Subclass)),
    "wrapper": lambda values, _: _tensor(values, Wrapper),
    "parameter": lambda values, _: _tensor(values, lambda x: torch.nn.Parameter(x.clone(), requires_grad=False)),
}
TYPES = ("subclass", "wrapper", "parameter")  # it is their type that is refused, not their memory
# Ways to another tensor over the same memory.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "view": lambda x: x.view(2, -1),
    "slice": lambda x: x[2:6],
    "detach": lambda x: x.detach(),
    "alias": lambda x: x.detach().view(-1, 2)[1:].view(-1),
    "bits": lambda x: x.view(torch.int32),
    "as_strided": lambda x: x.as_strided((4,), (1,), 2),
}


class Keep(TorchDispatchMode):
    """Keeps every result, as a debugger's recording mode does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.kept.append(result)
        return result


class KeepFunctions(TorchFunctionMode):
    """The same for functions of torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        kept.append(result)
        return result


def trace(frame: Any, event: str, arg: Any) -> Any:
    """Keeps every local variable, as a debugger may."""
    kept.append(frame.f_locals)
    return trace


@contextmanager
def traced(install: Callable[[Any], None], threads: Callable[[Any], None]) -> Iterator[None]:
    threads(trace)
    install(trace)
    try:
        yield
    finally:
        install(None)
        threads(None)  # pyright: ignore[reportArgumentType]
