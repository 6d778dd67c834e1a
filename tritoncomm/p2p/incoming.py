"""What a receiver expects from a neighbour, and the memory for what comes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.p2p import message
from tritoncomm.p2p.header import Contents
from tritoncomm.p2p.message import Message
from tritoncomm.p2p.neighbours import Line
from tritoncomm.p2p.shapes import Spec, describe

__all__ = ["Incoming"]

_MAX_REFUSED = 1 << 30  # bytes of a message that is received only to be refused
_MAX_BYTES = 1 << 48  # of any message; more than a device can address


@dataclass(slots=True)
class Incoming:
    """What a receiver expects from one neighbour.

    Attributes:
        specs: shapes and dtypes, or None where only the header knows them.
        dtype: the dtype of every tensor, where only the header knows the shapes.
        requires_grad: of the received tensors, where their dtype allows it; None: as the header says.
        out: a buffer to receive a single tensor into.
    """

    specs: tuple[Spec, ...] | None
    dtype: torch.dtype | None = None
    requires_grad: bool | None = True
    out: Tensor | None = None

    def problem(self, line: Line, name: str, key: str, specs: tuple[Spec, ...]) -> str | None:
        """Why ``specs`` are not what is expected, in words for both sides; None where they are."""
        if self.specs is None:
            if self.dtype is None or all([dtype is self.dtype for _, dtype in specs] or [False]):
                return None
            expected = f"tensors of {str(self.dtype).removeprefix('torch.')}"
        else:
            if specs == self.specs:
                return None
            expected = describe(self.specs)
        return f"{name}: {line} expects {expected}, but rank {line.peer(key)} sent {describe(specs)}"

    def allocate(
        self, name: str, specs: tuple[Spec, ...], device: torch.device | str, flags: tuple[bool, ...] | None = None
    ) -> Message:
        """Memory for tensors of ``specs``, in the thread, the stream and the grad mode of whoever waits for them."""
        out = self.out
        if out is not None and ((tuple(out.shape), out.dtype),) != specs:
            raise ArgumentError(f"{name}: out is {describe([(tuple(out.shape), out.dtype)])}, not {describe(specs)}")
        made = message.allocate(specs, device, out)
        for i, x in enumerate(made.pieces):
            wanted = self.requires_grad if self.requires_grad is not None else flags is None or flags[i]
            if wanted and out is None and (x.dtype.is_floating_point or x.dtype.is_complex):
                x.requires_grad_()
        return made

    def announced(
        self, line: Line, name: str, key: str, contents: Contents, device: torch.device | str
    ) -> tuple[Message, str | None]:
        """Memory for what a header announces, and why it has to be refused once it has come.

        Raises:
            MismatchError: it is refused unreceived, because it is not what is expected and larger than that, or more
                than can be allocated. The group cannot be used any further.
        """
        specs = contents.specs
        problem, size, most = self.problem(line, name, key, specs), _bytes(specs), _MAX_BYTES
        if problem:
            most = max(_MAX_REFUSED, _bytes(self.specs or ()))
        if size > most:
            problem = problem or f"{name}: rank {line.peer(key)} announces {describe(specs)} to {line}"
            raise MismatchError(f"{problem}; {size} bytes are not received, and the group is unusable from now on")
        taker = Incoming(None, requires_grad=False) if problem else self
        try:
            return taker.allocate(name, specs, device, contents.requires_grad), problem
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MismatchError(f"{name}: {line} has no memory for {describe(specs)}, {size} bytes: {error}") from error


def _bytes(specs: tuple[Spec, ...]) -> int:
    return sum([math.prod(shape) * dtype.itemsize for shape, dtype in specs])
