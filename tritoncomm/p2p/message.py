"""Message: the tensors that one transfer carries, as one contiguous buffer, the wire.

A single contiguous tensor is its own wire. Several tensors are packed into a wire of bytes, each at a multiple of 16
bytes; sender and receiver compute these offsets from the specs, the tensors' shapes and dtypes. Received tensors share
the memory of their wire, so each of them keeps the whole wire alive.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncomm.core import ops
from tritoncomm.core.backend import carrier, is_device_error, special
from tritoncomm.core.memory import contiguous_stride, empty_on
from tritoncomm.core.passes import whole_tensors
from tritoncomm.core.validation import check_data
from tritoncomm.debug.p2p_check import Content
from tritoncomm.errors import ArgumentError, MismatchError, ShapeError
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.record import CopyPath

__all__ = [
    "Buffers",
    "Incoming",
    "Packed",
    "Shape",
    "Specs",
    "allocate",
    "allocate_one",
    "as_shapes",
    "contents_of",
    "describe",
    "describe_hop",
    "is_one_shape",
    "is_single_shape",
    "no_memory",
    "pack",
    "specs_of",
]

Shape = list[int] | torch.Size
Specs = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each tensor of a message."""

_SHAPES = (tuple, list, torch.Size)
_ALIGNMENT = 16
_MAX_SHOWN = 8  # tensors in a text
_MAX_REFUSED = 1 << 30  # bytes of a mismatching message that is still received, so that the group stays usable
_MAX_BYTES = 1 << 48  # of any message; more than a device can address


def is_single_shape(x: Any) -> bool:
    """Whether ``x`` is one shape and not a list of shapes.

    True for any ``torch.Size``, even an empty one, and for a non-empty list or tuple of ints.
    """
    if isinstance(x, torch.Size):
        return True
    return isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(size, int) for size in x)


def is_one_shape(x: Any) -> bool:
    """Whether ``x`` is one shape and not a list of shapes, where ``()`` is a shape and sizes may be any integers."""
    # ``is_single_shape`` has Megatron's rule instead: ``()`` is no shape there, and sizes are ints.
    return isinstance(x, (list, tuple)) and (x == () or (len(x) > 0 and hasattr(x[0], "__index__")))


def as_shapes(x: Any, name: str) -> list[tuple[int, ...]]:
    """Convert one shape or a list of shapes, as a caller passed it, to a list of shapes; ``()`` is a 0-dim tensor."""
    if not isinstance(x, (list, tuple)):
        raise ArgumentError(f"{name}: expected a shape or a list of shapes, not {x!r}")
    return [as_shape(shape, name) for shape in ([x] if is_one_shape(x) else x)]


def as_shape(x: Any, name: str) -> tuple[int, ...]:
    """Convert one shape, as a caller passed it, to a tuple of ints."""
    try:
        shape = tuple(map(index, x))
    except TypeError:
        raise ArgumentError(f"{name}: a shape must be a sequence of ints, not {x!r}") from None
    if shape and min(shape) < 0:
        raise ShapeError(f"{name}: shape {list(shape)} has a negative size")
    return shape


def specs_of(tensors: Sequence[Tensor]) -> Specs:
    """Return the shape and dtype of each tensor."""
    return tuple([(x.shape, x.dtype) for x in tensors])


def describe(specs: Specs) -> str:
    """Write specs as text: ``[2, 3] float32, [4] int64``, at most 8 of them; ``nothing`` for none."""
    shown = [f"{list(shape)} {_name_of(dtype)}" for shape, dtype in specs[:_MAX_SHOWN]]
    more = [f"and {len(specs) - _MAX_SHOWN} more"] if len(specs) > _MAX_SHOWN else []
    return ", ".join(shown + more) or "nothing"


def _name_of(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _as_lists(specs: Specs) -> list[list[Any]]:
    """Convert specs to ``[[sizes, dtype name], ...]``, which JSON can hold."""
    return [[list(shape), _name_of(dtype)] for shape, dtype in specs]


def describe_hop(neighbours: Neighbours, transfers: Mapping[str, Specs | None]) -> tuple[str, str, list[Any]]:
    """Describe a hop for the flight record: (text of the sends, text of the receives, list of transfers).

    ``transfers`` has None for specs that a header announces. ``debug.transfers`` reads the list, ``[key, global rank of
    the peer, [[sizes, dtype name], ...] or None]`` of each transfer.
    """
    texts: dict[str, list[str]] = {"to": [], "from": []}
    listed = []
    for key, specs in transfers.items():
        peer, where = neighbours.peer(key), "to" if key.startswith("send") else "from"
        texts[where].append(f"{'any shapes' if specs is None else describe(specs)} {where} rank {peer}")
        listed.append([key, peer, None if specs is None else _as_lists(specs)])
    return ", ".join(texts["to"]), ", ".join(texts["from"]), listed


def contents_of(sends: Mapping[str, Specs], receives: Mapping[str, "Incoming"]) -> dict[str, Content]:
    """Return the content that both ends of a transfer compare in check mode: specs sent, or specs expected."""
    contents = {key: Content(describe(specs), _as_lists(specs)) for key, specs in sends.items()}
    for key, each in receives.items():
        if each.specs is not None:
            contents[key] = Content(describe(each.specs), _as_lists(each.specs), each.count)
        else:
            dtype = _name_of(each.dtype)
            words = f"{each.count} of {dtype}, any shapes"
            contents[key] = Content(words, specs=None, count=each.count, dtype=dtype)
    return contents


def no_memory(specs: Specs, name: str, error: Exception) -> ShapeError:
    """Return the error of tensors that cannot be allocated; the text has ``name``, specs, bytes and ``error``."""
    return ShapeError(f"{name}: there is no memory for {describe(specs)}, {_bytes(specs)} bytes: {error}")


def _bytes(specs: Specs) -> int:
    """Return the number of bytes of all tensors, gaps between them excluded."""
    return sum([math.prod(shape) * dtype.itemsize for shape, dtype in specs])


Packed = tuple[Tensor, list[Tensor], CopyPath, int]
"""A message to send: its wire, its tensors, how the wire was packed, and the bytes read plus written for that."""
Buffers = tuple[Tensor, list[Tensor]]
"""A message to receive: its wire, and the tensors in the memory of the wire."""


def pack(x: Any, name: str, dtype: torch.dtype | None = None) -> Packed | None:
    """Pack a caller's tensor, or a list or tuple of tensors on one device, into one message.

    Args:
        dtype: of the tensors that the receiver allocates; floating-point tensors are cast to it. None sends any dtypes.

    Returns:
        The wire, the tensors that lie in it, the path of the copy and the bytes copied; None of an empty list.
    """
    if isinstance(x, Tensor):
        check_data(x, name)
        if dtype is not None and x.dtype is not dtype:
            wire = _cast(x, dtype, name)
            return carrier(wire), [wire], "torch", x.nbytes + wire.nbytes
        if x.dtype not in special and not x.is_neg():
            # One contiguous tensor is its own wire. Other tensors are copied in one pass over memory.
            if x.is_contiguous():
                return x, [x], "view", 0
            if ops.path_for(x) == "torch":
                wire = x.detach().contiguous()  # a copy needs no node of autograd
                return wire, [x], "torch", 2 * wire.nbytes
        x = [x]
    if not isinstance(x, (list, tuple)):
        raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(x).__name__}")
    for each in x:
        if not isinstance(each, Tensor):
            raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(each).__name__}")
        check_data(each, name)
    if not x:
        return None
    tensors = [each.detach() for each in x]
    if dtype is not None:
        tensors = [each if each.dtype is dtype else _cast(each, dtype, name) for each in tensors]
    if len(tensors) == 1:
        (only,) = tensors
        if only.is_contiguous() and not ops.has_lazy(tensors):
            return carrier(only), tensors, "view", 0
        wire, path, bytes_copied = ops.pack(only, dim=0, world=1)  # a contiguous copy
        return carrier(wire.view(only.shape)), tensors, path, bytes_copied
    specs = specs_of(tensors)
    wire, slots = allocate(specs, tensors[0].device)
    layouts = tuple([(*spec, each.stride()) for spec, each in zip(specs, tensors, strict=True)])
    _, path, bytes_copied = whole_tensors(layouts, _places(specs).starts).pack(tensors, wire, slots=slots)
    return wire, slots, path, bytes_copied


def _cast(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a contiguous copy of ``x`` in the dtype that its receiver allocates, without a graph."""
    if not (x.is_floating_point() and dtype.is_floating_point):
        raise ArgumentError(
            f"{name}: a tensor {describe(specs_of([x]))} for a receiver of {_name_of(dtype)} (pipeline_dtype): only "
            "floating point is cast to floating point"
        )
    return x.detach().to(dtype, memory_format=torch.contiguous_format)


class _Places(NamedTuple):
    """Byte of the wire at which each tensor of a message starts, and the end of the last one."""

    starts: tuple[int, ...]
    end: int


@lru_cache(maxsize=1024)
def _places(specs: Specs) -> _Places:
    """Place tensors one after the other, each at a multiple of 16 bytes."""
    starts, end = [], 0
    for shape, dtype in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    return _Places(tuple(starts), end)


def allocate(specs: Specs, device: torch.device | str) -> Buffers:
    """Allocate an uninitialised message for tensors of these specs; several tensors share the memory of one wire."""
    if len(specs) == 1:
        ((shape, dtype),) = specs
        x = empty_on(device, shape, dtype)
        wire = carrier(x) if dtype in special else x
        return wire, [x]
    starts, end = _places(specs)
    wire = empty_on(device, (end,), torch.uint8)
    storage = wire.untyped_storage()
    tensors = []
    for (shape, dtype), start in zip(specs, starts, strict=True):
        # ``set_`` makes no view: no tensor is a view of another one, and each has _base None.
        x = empty_on(device, (0,), dtype)
        tensors.append(x.set_(storage, start // dtype.itemsize, shape, contiguous_stride(shape)))  # type: ignore[arg-type]
    return wire, tensors


def allocate_one(shape: Any, dtype: torch.dtype | None, device: torch.device) -> Tensor | None:
    """Allocate a tensor to receive into, which is its own wire; None leaves all but one plain shape to ``Incoming``."""
    # The detour over Incoming costs the host 4 us, a third of a hop that receives one tensor.
    if type(shape) not in _SHAPES or not shape or 0 in shape or dtype is None or dtype in special:
        return None
    try:
        x = empty_on(device, shape, dtype)
    except (RuntimeError, TypeError, ValueError):  # ``Incoming`` fails too, with an error in words
        return None
    if dtype.is_floating_point:
        x.requires_grad_()
    return x


class Incoming(NamedTuple):
    """The message that a receiver expects from one neighbour.

    Attributes:
        specs: None where only a header has the shapes.
        dtype: of every tensor, where only a header has the shapes.
        count: number of tensors.
        is_single: whether the caller gets a tensor and not a list.
        out: the caller's tensor to receive into, or None.
    """

    specs: Specs | None
    dtype: torch.dtype | None = None
    count: int = 1
    is_single: bool = True
    out: Tensor | None = None

    @classmethod
    def of(cls, expected: Any, dtype: torch.dtype | None, variable: bool, name: str) -> "Incoming":
        """Parse a caller's description of the tensors to receive: a shape, a list of shapes, or a contiguous tensor.

        Args:
            variable: a header announces the shapes, so that only their number counts.
        """
        is_single = is_one_shape(expected)  # no tensor, and no list of shapes
        if is_single and not variable and dtype is not None:  # the usual case comes first
            return cls(specs=((as_shape(expected, name), dtype),), dtype=dtype)
        if isinstance(expected, Tensor):
            if not expected.is_contiguous():
                strides = expected.stride()
                raise ShapeError(f"{name}: a tensor to receive into must be contiguous, not of strides {strides}")
            return cls(specs=specs_of([expected]), dtype=expected.dtype, out=expected)
        if variable:
            if not isinstance(expected, (list, tuple)):
                raise ArgumentError(f"{name}: expected a shape or a list of shapes, not {expected!r}")
            return cls(specs=None, dtype=dtype, count=1 if is_single else len(expected), is_single=is_single)
        if dtype is None:
            raise ArgumentError(f"{name}: the dtype of received tensors must be given")
        specs = tuple([(shape, dtype) for shape in as_shapes(expected, name)])
        return cls(specs, dtype, count=len(specs), is_single=is_single)

    def form(self, tensors: list[Tensor]) -> Any:
        """Return received tensors as the caller expects them: as a list, or the only tensor (None if there is none)."""
        if self.is_single:
            return tensors[0] if tensors else None
        return tensors

    def problem(self, neighbours: Neighbours, name: str, key: str, specs: Specs) -> str | None:
        """Return a text that compares ``specs``, as the peer of ``key`` sent them, with the expected ones, or None."""
        if self.specs is not None:
            if specs == self.specs:
                return None
            expected = describe(self.specs)
        else:
            wrong = [dtype for _, dtype in specs if dtype is not self.dtype]
            if len(specs) == self.count and not wrong:
                return None
            count = "one tensor" if self.count == 1 else f"{self.count} tensors"
            expected = f"{count} of {_name_of(self.dtype)}"
        return f"{name}: {neighbours} expects {expected}, but rank {neighbours.peer(key)} sent {describe(specs)}"

    def allocate(self, specs: Specs, device: torch.device) -> Buffers:
        """Return a message of these specs to receive into: the caller's tensor ``out``, or new memory."""
        if self.out is not None:
            return carrier(self.out.detach()), [self.out]
        wire, tensors = allocate(specs, device)
        # Memory belongs to the calling thread's stream and grad mode.
        for x in tensors:
            if x.is_floating_point() or x.is_complex():
                x.requires_grad_()
        return wire, tensors

    def allocate_expected(self, name: str, device: torch.device) -> Buffers:
        """Return a message to receive into, of the specs that this receiver expects."""
        assert self.specs is not None
        try:
            return self.allocate(self.specs, device)
        except (RuntimeError, TypeError) as error:  # a size beyond 64 bits is a TypeError
            if is_device_error(error):
                raise
            raise no_memory(self.specs, name, error) from error

    def allocate_from_header(
        self, neighbours: Neighbours, name: str, key: str, specs: Specs, device: torch.device
    ) -> tuple[Tensor, list[Tensor], str | None]:
        """Allocate a message for the specs that a header announced: (wire, tensors, text of ``problem`` or None)."""
        problem, size, limit = self.problem(neighbours, name, key, specs), _bytes(specs), _MAX_BYTES
        if problem:  # received nevertheless, up to a smaller limit, so that the group stays usable
            limit = max(_MAX_REFUSED, _bytes(self.specs or ()))
        if size > limit:
            problem = problem or f"{name}: rank {neighbours.peer(key)} announces {describe(specs)} to {neighbours}"
            raise MismatchError(f"{problem}; {size} bytes are not received, and the group is unusable from now on")
        try:
            # With a problem the message goes into memory of its own, not into that of the caller.
            wire, tensors = allocate(specs, device) if problem else self.allocate(specs, device)
            return wire, tensors, problem
        except RuntimeError as error:
            if is_device_error(error):
                raise
            text = f"{name}: {neighbours} has no memory for {describe(specs)}, {size} bytes: {error}"
            raise MismatchError(text) from error
