"""One message per peer: tensors packed into one contiguous buffer, and what a receiver expects.

A single contiguous tensor is sent in place. Several tensors are packed into one buffer of bytes, each at a multiple of
16 bytes; both sides compute the offsets from shapes and dtypes. Received tensors share the buffer's memory, so each of
them keeps the whole buffer alive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from tritoncomm import record
from tritoncomm.core import ops
from tritoncomm.core.backend import carrier, is_device_error
from tritoncomm.core.cached import resolved
from tritoncomm.core.memory import contiguous_stride, empty_on
from tritoncomm.core.segments import full_tensors, gather
from tritoncomm.debug.hops import Content
from tritoncomm.errors import ArgumentError, MismatchError, ShapeError
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.record import CopyPath

__all__ = [
    "Incoming",
    "Message",
    "Shape",
    "Spec",
    "Specs",
    "allocate",
    "as_shape",
    "as_shapes",
    "begin",
    "contents_of",
    "describe",
    "is_one_shape",
    "is_single_shape",
    "no_memory",
    "pack",
    "spec_of",
    "specs_of",
]

_BelowAutograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", torch.no_grad)  # a fifth of its time

Shape = list[int] | torch.Size
Spec = tuple[tuple[int, ...], torch.dtype]
Specs = tuple[Spec, ...]

_ALIGNMENT = 16
_MAX_SHOWN = 8  # tensors in an error message
_MAX_REFUSED = 1 << 30  # bytes of a mismatching message that is still received, so that the group stays usable
_MAX_BYTES = 1 << 48  # of any message; more than a device can address


def is_single_shape(x: Any) -> bool:
    """Whether ``x`` is one shape and not a list of shapes.

    True for any ``torch.Size``, even an empty one, and for a non-empty list or tuple of ints.
    """
    if isinstance(x, torch.Size):
        return True
    if not isinstance(x, (list, tuple)) or not x:
        return False
    for size in x:  # noqa: SIM110
        if not isinstance(size, int):
            return False
    return True


def as_shape(x: Any, name: str) -> tuple[int, ...]:
    """One shape as a tuple; ``()`` is a 0-dim tensor.

    Raises:
        ArgumentError: not a sequence of ints.
        ShapeError: a negative size.
    """
    if type(x) is tuple or type(x) is list:
        for size in x:
            if type(size) is not int or size < 0:
                break
        else:
            return tuple(x)
    try:
        shape = tuple(int(size.__index__()) for size in x)
    except (TypeError, AttributeError):
        raise ArgumentError(f"{name}: a shape must be a sequence of ints, not {x!r}") from None
    if any(size < 0 for size in shape):
        raise ShapeError(f"{name}: shape {list(shape)} has a negative size")
    return shape


def is_one_shape(x: Any) -> bool:
    """``is_single_shape`` of arguments that may also be ``()``, a 0-dim tensor, or hold other integers than ints."""
    return isinstance(x, list | tuple) and (x == () or (len(x) > 0 and hasattr(x[0], "__index__")))


def as_shapes(x: Any, name: str) -> list[tuple[int, ...]]:
    """A shape or a list of shapes as a list."""
    if not isinstance(x, list | tuple):
        raise ArgumentError(f"{name}: expected a shape or a list of shapes, not {x!r}")
    return [as_shape(shape, name) for shape in ([x] if is_one_shape(x) else x)]


def spec_of(x: Tensor) -> Spec:
    """Shape and dtype of a tensor."""
    return x.shape, x.dtype


def specs_of(tensors: Sequence[Tensor]) -> Specs:
    """Shapes and dtypes of tensors."""
    return tuple([spec_of(x) for x in tensors])


def describe(specs: Sequence[Spec]) -> str:
    """Text for an error message: ``[2, 3] float32, [4] int64``."""
    shown = [f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in specs[:_MAX_SHOWN]]
    more = [f"and {len(specs) - _MAX_SHOWN} more"] if len(specs) > _MAX_SHOWN else []
    return ", ".join(shown + more) or "nothing"


def no_memory(specs: Sequence[Spec], name: str, error: Exception) -> ShapeError:
    """The error of tensors that cannot be allocated."""
    return ShapeError(f"{name}: there is no memory for {describe(specs)}, {_bytes(specs)} bytes: {error}")


@dataclass(slots=True)
class Message:
    """Tensors for one peer, or from one.

    Attributes:
        wire: the buffer that is sent or received: contiguous, in a dtype the backend moves.
        tensors: the tensors themselves.
        path: view, torch or triton: how the wire was packed.
        bytes_copied: bytes read plus written for it.
    """

    wire: Tensor
    tensors: list[Tensor]
    path: CopyPath = "view"
    bytes_copied: int = 0


@lru_cache(maxsize=4096)
def _offsets(specs: Specs) -> tuple[tuple[int, ...], int]:
    """Offset of each tensor in the buffer and size of the buffer, in bytes."""
    starts, end = [], 0
    for shape, dtype in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    return tuple(starts), end


@lru_cache(maxsize=4096)
def _is_dense(specs: Specs) -> bool:
    """Whether the tensors are packed without a gap, in one dtype."""
    ends = [math.prod(shape) * dtype.itemsize for shape, dtype in specs[:-1]]
    return len({dtype for _, dtype in specs}) == 1 and not any(end % _ALIGNMENT for end in ends)


def pack(tensors: Sequence[Tensor]) -> Message:
    """The tensors as one message: no copy for one contiguous tensor, one pass otherwise."""
    if len(tensors) == 1:
        x = resolved(tensors[0].detach())  # the caller may set x.data while a handle is pending
        if x.is_contiguous():
            return Message(carrier(x), [x])
        if ops.path_for(x) == "torch":
            return Message(carrier(x.contiguous()), [x], "torch", 2 * x.nbytes)
        wire, path, copied = ops.pack(x, 0, 1)
        return Message(carrier(wire.view(x.shape)), [x], path, copied)
    with _BelowAutograd():  # a detach() of each takes longer
        return _pack_several(tensors)


def _pack_several(tensors: Sequence[Tensor]) -> Message:
    on_torch = ops.path_for(tensors[0]) == "torch"
    specs = tuple([spec_of(x) for x in tensors])
    if on_torch and _is_dense(specs) and all(map(Tensor.is_contiguous, tensors)):
        flat = _flatten_dense_tensors(tensors)  # lazy bits are resolved by the copy
        return Message(flat.view(torch.uint8), list(tensors), "torch", 2 * flat.nbytes)
    tensors = [resolved(x) for x in tensors]
    starts, size = _offsets(specs)
    wire = empty_on(tensors[0].device, (size,), torch.uint8)
    slots = _views(wire, tensors, starts)
    if on_torch:
        torch._foreach_copy_(slots, tensors)  # pyright: ignore[reportPrivateImportUsage]
        return Message(wire, slots, "torch", 2 * sum([x.nbytes for x in tensors]))
    table = full_tensors(tuple([(x.shape, x.stride(), x.dtype) for x in tensors]), starts)
    if table is not None and table.segments:
        return Message(wire, slots, *gather(tensors, wire, table))
    message = Message(wire, slots)
    for x, slot in zip(tensors, slots, strict=True):
        if x.numel():
            _, message.path, copied = ops.pack(x if x.dim() else x.view(1), 0, 1, out=slot.view(1, 1, -1))
            message.bytes_copied += copied
    return message


def _views(wire: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Views of the buffer with the tensors' shapes and dtypes."""
    by_dtype: dict[torch.dtype, Tensor] = {}
    views = []
    for x, start in zip(tensors, starts, strict=True):
        dtype = x.dtype
        typed = by_dtype.get(dtype)
        if typed is None:
            typed = by_dtype[dtype] = wire[: len(wire) // dtype.itemsize * dtype.itemsize].view(dtype)
        views.append(typed.as_strided(x.shape, contiguous_stride(x.shape), start // dtype.itemsize))
    return views


def allocate(specs: Sequence[Spec], device: torch.device | str, out: Tensor | None = None) -> Message:
    """A message to receive into; ``out`` is a buffer for one tensor, of its shape and dtype."""
    if len(specs) == 1:
        ((shape, dtype),) = specs
        x = empty_on(device, shape, dtype) if out is None else out
        return Message(carrier(x), [x])
    starts, size = _offsets(tuple(specs))
    wire = empty_on(device, (size,), torch.uint8)
    storage = wire.untyped_storage()
    tensors = []
    for (shape, dtype), start in zip(specs, starts, strict=True):
        x = empty_on(device, (0,), dtype)
        tensors.append(x.set_(storage, start // dtype.itemsize, shape, contiguous_stride(shape)))  # type: ignore[arg-type]
    return Message(wire, tensors)


@dataclass(slots=True)
class Incoming:
    """What a receiver expects from one neighbour.

    Attributes:
        specs: shapes and dtypes, or None where only the header has them.
        dtype: of every tensor, where only the header has the shapes.
        count: number of tensors.
        is_single: whether the caller gets a tensor and not a list.
        out: a buffer to receive a single tensor into.
    """

    specs: Specs | None
    dtype: torch.dtype | None = None
    count: int = 1
    is_single: bool = True
    out: Tensor | None = None

    @classmethod
    def of(cls, expected: Any, dtype: torch.dtype | None, variable: bool, name: str) -> "Incoming":
        """From an argument of ``exchange``."""
        if isinstance(expected, Tensor):
            return cls((spec_of(expected),), expected.dtype, out=expected)
        is_single = is_one_shape(expected)
        if variable:
            if not isinstance(expected, list | tuple):
                raise ArgumentError(f"{name}: expected a shape or a list of shapes, not {expected!r}")
            return cls(None, dtype, 1 if is_single else len(expected), is_single)
        if dtype is None:
            raise ArgumentError(f"{name}: the dtype of what is received must be given")
        shapes = as_shapes(expected, name)
        return cls(tuple([(shape, dtype) for shape in shapes]), dtype, len(shapes), is_single)

    def problem(self, neighbours: Neighbours, name: str, key: str, specs: Specs) -> str | None:
        """Why ``specs`` are not what is expected, with both sides' shapes and dtypes; None where they match."""
        if self.specs is not None:
            if specs == self.specs:
                return None
            expected = describe(self.specs)
        else:
            wrong = [dtype for _, dtype in specs if dtype is not self.dtype]
            if len(specs) == self.count and not wrong:
                return None
            count = "one tensor" if self.count == 1 else f"{self.count} tensors"
            expected = f"{count} of {str(self.dtype).removeprefix('torch.')}"
        return f"{name}: {neighbours} expects {expected}, but rank {neighbours.peer(key)} sent {describe(specs)}"

    def allocate(self, specs: Specs, device: torch.device) -> Message:
        """Memory for tensors of ``specs``, in the thread, the stream and the grad mode of the caller."""
        buffers = allocate(specs, device, self.out)
        if self.out is None:
            for x, (_, dtype) in zip(buffers.tensors, specs, strict=True):
                if dtype.is_floating_point or dtype.is_complex:
                    x.requires_grad_()
        return buffers

    def allocate_expected(self, name: str, device: torch.device) -> Message:
        """Memory for what is expected.

        Raises:
            ShapeError: there is not as much; before anything is sent.
        """
        assert self.specs is not None
        try:
            return self.allocate(self.specs, device)
        except (RuntimeError, TypeError) as error:  # a size beyond 64 bits is a TypeError
            if is_device_error(error):
                raise
            raise no_memory(self.specs, name, error) from error

    def allocate_from_header(
        self, neighbours: Neighbours, name: str, key: str, specs: Specs, device: torch.device
    ) -> tuple[Message, str | None]:
        """Memory for the tensors that a header announces, and why they have to be refused once received.

        Raises:
            MismatchError: they are refused unreceived, because they are larger than what is expected, or than can be
                allocated. The group is unusable from then on.
        """
        problem, size, limit = self.problem(neighbours, name, key, specs), _bytes(specs), _MAX_BYTES
        if problem:
            limit = max(_MAX_REFUSED, _bytes(self.specs or ()))
        if size > limit:
            problem = problem or f"{name}: rank {neighbours.peer(key)} announces {describe(specs)} to {neighbours}"
            raise MismatchError(f"{problem}; {size} bytes are not received, and the group is unusable from now on")
        try:
            return allocate(specs, device) if problem else self.allocate(specs, device), problem
        except RuntimeError as error:
            if is_device_error(error):
                raise
            text = f"{name}: {neighbours} has no memory for {describe(specs)}, {size} bytes: {error}"
            raise MismatchError(text) from error


def _bytes(specs: Sequence[Spec]) -> int:
    return sum([math.prod(shape) * dtype.itemsize for shape, dtype in specs])


_SENDS, _RECEIVES = ("send_next", "send_prev"), ("recv_prev", "recv_next")

Raw = tuple[Any, ...]
Pair = tuple[Any, Any]
"""For the next and the previous stage, or from the previous and the next one, as ``hop.exchange`` takes them."""


def begin(neighbours: Neighbours, name: str, sent: Pair, received: Pair, depth: int, variable: bool = False) -> Any:
    """``record.begin`` with what goes where, of which nothing keeps a tensor alive; words are made of it by a dump.

    Args:
        neighbours: of this stage.
        name: the function that was called.
        sent: tensors.
        received: shapes, or tensors.
        depth: frames from this one to the program's, or fewer.
        variable: shapes of what is received are not known.
    """
    (to_next, to_prev), (from_prev, from_next) = sent, received
    transfers = (
        _arguments, neighbours, variable,
        None if to_next is None else _raw(to_next, True), None if to_prev is None else _raw(to_prev, True),
        None if from_prev is None else _raw(from_prev), None if from_next is None else _raw(from_next),
    )  # fmt: skip
    return record.begin(name, "hop", neighbours.group(), None, transfers, depth + 1)


def _arguments(neighbours: Neighbours, variable: bool, *transfers: Raw | None) -> tuple[str, str, list[Any]]:
    """What goes to the other stages, and what comes from them, in words; and both by key, for ``debug.transfers``."""
    given = {key: raw for key, raw in zip(_SENDS + _RECEIVES, transfers, strict=True) if raw}
    sent, received = (
        ", ".join(f"{_in_words(given[key])} {where} rank {neighbours.peer(key)}" for key in keys if key in given)
        for keys, where in ((_SENDS, "to"), (_RECEIVES, "from"))
    )
    listed = [
        [key, neighbours.peer(key), None if variable and key in _RECEIVES else [_spec(each) for each in raw]]
        for key, raw in given.items()
    ]
    return sent, received, listed


def _spec(each: Any) -> list[Any]:
    """Shape and dtype; None for what is not known."""
    if isinstance(each, str) or not all(hasattr(size, "__index__") for size in each[0]):
        return [None, None]
    return [[index(size) for size in each[0]], each[1]]


def _raw(x: Any, is_sent: bool = False) -> Raw:
    """Shape and dtype of every tensor, or the shapes, of any caller, before they are checked."""
    kind = type(x)
    if kind is torch.Size:
        return ((x, None),)
    if isinstance(x, Tensor):
        return (_of_tensor(x),)
    if not isinstance(x, list | tuple):
        return (str(x),)
    if not is_sent and is_one_shape(x):
        return ((tuple(x), None),)
    return tuple(
        _of_tensor(each) if isinstance(each, Tensor)
        else (tuple(each), None) if isinstance(each, list | tuple) else str(each)
        for each in x
    )  # fmt: skip


def _of_tensor(x: Tensor) -> Any:
    try:
        return x.shape, x.dtype
    except RuntimeError:  # a nested tensor, which is refused
        return type(x).__name__


def _in_words(raw: Raw) -> str:
    def word(each: Any) -> str:
        if isinstance(each, str):
            return each
        return f"{list(each[0])}" if each[1] is None else describe([each])

    shown = [word(each) for each in raw[:_MAX_SHOWN]]
    return ", ".join(shown + [f"and {len(raw) - _MAX_SHOWN} more"] * (len(raw) > _MAX_SHOWN)) or "nothing"


def _of_any_shapes(count: int, dtype: torch.dtype | None) -> Content:
    return Content(f"{count} of {str(dtype).removeprefix('torch.')}, any shapes", None, count, str(dtype))


def contents_of(sends: dict[str, Specs], receives: dict[str, Incoming]) -> dict[str, Content]:
    """What both ends of every transfer compare in check mode."""

    def listed(specs: Sequence[Spec]) -> list[Any]:
        return [[list(shape), str(dtype)] for shape, dtype in specs]

    contents = {key: Content(describe(specs), listed(specs)) for key, specs in sends.items()}
    for key, each in receives.items():
        if each.specs is not None:
            contents[key] = Content(describe(each.specs), listed(each.specs), each.count)
        else:
            contents[key] = _of_any_shapes(each.count, each.dtype)
    return contents
