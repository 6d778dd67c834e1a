"""What describes a layout besides ``Layout``: DTensors, meshes with placements, and specs that bring their own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError, CommError, ShapeError
from tritoncomm.reshard.layout import Layout

__all__ = ["Wrap", "check_own_layout", "is_dtensor", "local_of", "named", "source_of", "target_of"]

Wrap = Callable[[Tensor], Any]


def is_dtensor(x: Any) -> bool:
    """Whether ``x`` is a DTensor; nothing is imported for that."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def named(tensors: Any, name: str) -> dict[str, Any]:
    """Tensors, or their dtypes, by name: a mapping as it is, a sequence by index, one alone as ``tensor``.

    Raises:
        ArgumentError: none of these, or names that are equal as text.
    """
    if isinstance(tensors, Tensor | torch.dtype):
        return {"tensor": tensors}
    if isinstance(tensors, Mapping):
        names = {str(key): x for key, x in tensors.items()}
        if len(names) < len(tensors):
            texts = [str(key) for key in tensors]
            raise ArgumentError(
                f"{name}: several names are {sorted({key for key in texts if texts.count(key) > 1})} as text"
            )
        return names
    if isinstance(tensors, list | tuple):
        return {str(index): x for index, x in enumerate(tensors)}
    raise ArgumentError(f"{name}: expected a tensor, a mapping or a sequence of tensors, not {type(tensors).__name__}")


def source_of(tensor: Any, given: Any, name: str, key: str) -> Layout:
    """The layout of a tensor: the one given, or its own.

    Raises:
        ArgumentError: a plain tensor without a layout.
        UnsupportedError: a DTensor with partial placements.
    """
    if isinstance(given, Layout):
        return given
    if given is None and is_dtensor(tensor):
        try:
            return Layout.of_dtensor(tensor)
        except CommError as error:
            raise type(error)(f"{name}: {key}: {error}") from None
    if given is None and hasattr(tensor, "reshard_layout"):
        return tensor.reshard_layout()
    what = "a plain tensor, which needs a Layout" if given is None else f"given {type(given).__name__}, not a Layout"
    raise ArgumentError(f"{name}: the source of {key} is {what}")


def check_own_layout(tensor: Any, layout: Layout, name: str, key: str) -> None:
    """Refuse a DTensor or a ColoTensor that is laid out otherwise.

    Raises:
        ShapeError: its layout is another one, though the local shape may be the same.
        UnsupportedError: it has partial placements.
    """
    own = source_of(tensor, None, name, key)
    if own != layout:
        raise ShapeError(f"{name}: {key} is laid out as {own}, not as {layout}")


def target_of(given: Any, shape: Ints, name: str, key: str) -> tuple[Layout, Wrap | None]:
    """The layout that something describes for a shape, and what makes a local tensor of it into a result.

    Args:
        given: a ``Layout``; ``(mesh, placements)``, for a DTensor; or an object with ``reshard_layout(shape)`` and
            ``reshard_wrap(local, shape)``, such as a ``ColoTensorSpec``.
        shape: of the global tensor.
        name: the function.
        key: of the tensor.

    Raises:
        ArgumentError: none of these.
    """
    if isinstance(given, Layout):
        return given, None
    if hasattr(given, "reshard_layout"):
        return given.reshard_layout(shape), lambda local: given.reshard_wrap(local, shape)
    if isinstance(given, tuple) and len(given) == 2 and hasattr(given[0], "get_coordinate"):
        mesh, placements = given
        layout = Layout.on_mesh(shape, mesh, placements)
        return layout, lambda local: _as_dtensor(local, mesh, placements, shape)
    raise ArgumentError(
        f"{name}: the target of {key} must be a Layout, (mesh, placements) or a ColoTensorSpec, not "
        f"{type(given).__name__}"
    )


def _as_dtensor(local: Tensor, mesh: Any, placements: Any, shape: Ints) -> Any:
    """A DTensor on the ranks of its mesh; elsewhere the empty local tensor, which backward has to go through."""
    if mesh.get_coordinate() is None:
        return local
    # Imported here because it takes as long as everything else, and only users of DTensors have it anyway.
    from torch.distributed.tensor import DTensor

    stride = contiguous_stride(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def local_of(tensor: Any) -> Tensor:
    """The local tensor of anything."""
    if tensor.__class__ is Tensor:  # looking for what it does not have takes a microsecond
        return tensor
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor.reshard_local() if hasattr(tensor, "reshard_local") else tensor
