"""An exchange: a pass into a wire, one all-to-all, and a pass out of the wire that arrives."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import backend
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.ops import SplitPass, contiguous
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import Ints
from tritoncomm.record import CopyPath, Span

__all__ = ["Exchange", "StartedExchange"]


_Started = tuple[Tensor, backend.Work, Tensor, CopyPath, int]
"""The fields of ``StartedExchange``."""


class StartedExchange(NamedTuple):
    """An exchange in flight.

    Attributes:
        received: wire that arrives.
        work: the backend's work; None if the exchange is over.
        sent: wire that is sent, which has to live until then.
        path, copied: way of the pack, and the bytes that it copied.
    """

    received: Tensor
    work: backend.Work
    sent: Tensor
    path: CopyPath
    copied: int


_Pack = TypeVar("_Pack", bound=Pass | SplitPass | None)
_Unpack = TypeVar("_Unpack", bound=Pass | SplitPass | None)


class Exchange(NamedTuple, Generic[_Pack, _Unpack]):
    """Value of a planner: which blocks go to which ranks, and which arrive.

    Attributes:
        pack: pass from the tensors to the wire; None: send the single input as is, made contiguous.
        unpack: pass from the received wire to the results; None where the wire is the one result.
        shapes: of the results; needed unless the caller has memory for what arrives.
        send_counts, recv_counts: elements to and from each rank, or rows without ``pack``; empty if all are equal.
        bytes_sent: bytes to other ranks, where nobody else counts them.
    """

    pack: _Pack = None  # pyright: ignore[reportAssignmentType]
    unpack: _Unpack = None  # pyright: ignore[reportAssignmentType]
    shapes: Sequence[Ints] = ()
    send_counts: Ints = ()
    recv_counts: Ints = ()
    bytes_sent: int = 0

    def run(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup,
        span: Span,
        outs: Sequence[Tensor] | None = None,
        asynchronous: bool = False,
    ) -> Sequence[Tensor]:
        """Exchange tensors, end the span of the call, and return the results.

        Args:
            outs: tensors to fill; new contiguous ones by default.
            asynchronous: run the all-to-all on the backend's own stream. The results are waited for in any case.
        """
        received, work, sent, path, copied = self._send(tensors, group, span.name, None, asynchronous)
        if work is not None:
            work.wait()
        del sent  # freed before the results are allocated
        if self.unpack is None:
            span.end(path, copied, self.bytes_sent)
            return [received]
        if outs is None and isinstance(self.unpack, SplitPass):
            outs, way, unpacked = self.unpack.results(received)
        else:
            if outs is None:
                outs = []
                for shape in self.shapes:
                    outs.append(empty(received, shape, contiguous_stride(shape), received.dtype))
            _, way, unpacked = self.unpack.unpack(received, outs)
        span.end(way if path == "view" else path, copied + unpacked, self.bytes_sent)
        return outs

    def start(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup,
        name: str,
        received: Tensor | None = None,
        asynchronous: bool = True,
    ) -> StartedExchange:
        """Pack the tensors and start the all-to-all; the caller waits for its work and unpacks.

        Args:
            received: memory for what arrives, flat with ``pack``; new memory by default.
        """
        return StartedExchange(*self._send(tensors, group, name, received, asynchronous))

    def _send(
        self, tensors: Sequence[Tensor], group: ProcessGroup, name: str, received: Tensor | None, asynchronous: bool
    ) -> _Started:
        """Start as ``start``, and return a plain tuple: a ``StartedExchange`` takes a third of a small pass to make."""
        if self.pack is None:
            wire, copied = contiguous(tensors[0])
            path = "torch" if copied else "view"
        else:
            wire, path, copied = self.pack.pack(tensors)
        if received is None:
            if self.unpack is None:  # what arrives is the result, and a result is no view of another tensor
                shape = self.shapes[0]
            else:
                shape = (self.unpack.elements,) if self.send_counts else wire.shape
            # Strides are cached by shape. They do not depend on the number of rows, which may be new in every call.
            received = empty(wire, shape, contiguous_stride((1, *shape[1:])), wire.dtype)
        out = received
        # The backend counts along dim 0: elements of flat wires, or rows as they are where nothing was packed. Equal
        # counts need two tensors of one shape.
        if self.pack is not None and self.send_counts:
            wire, out = wire.view(-1), received.view(-1)
        elif self.pack is not None and received.shape != wire.shape:
            out = received.view(wire.shape)
        work = backend.all_to_all(out, wire, self.recv_counts, self.send_counts, group, name, asynchronous)
        return received, work, wire, path, copied
