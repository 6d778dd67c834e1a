"""An exchange: a pass into a wire, one all-to-all, and a pass out of the wire that arrives."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import backend
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import Ints
from tritoncomm.record import CopyPath, Span

__all__ = ["Exchange", "StartedExchange"]


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


class Exchange(NamedTuple):
    """Value of a planner: which blocks go to which ranks, and which arrive.

    Attributes:
        pack: pass from the tensors to the wire.
        unpack: pass from the received wire to the results; None where the wire is the one result.
        shapes: of the results.
        send_counts, recv_counts: elements to and from each rank; empty if all are equal.
        bytes_sent: bytes to other ranks.
    """

    pack: Pass
    unpack: Pass | None
    shapes: Sequence[Ints]
    send_counts: Ints
    recv_counts: Ints
    bytes_sent: int

    def run(
        self, tensors: Sequence[Tensor], group: ProcessGroup, span: Span, outs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Exchange tensors, end the span of the call, and return the results.

        Args:
            outs: tensors to fill; new contiguous ones by default.
        """
        received, _, sent, path, copied = self.start(tensors, group, span.name, asynchronous=False)
        del sent  # freed before the results are allocated
        if self.unpack is None:
            span.end(path, copied, self.bytes_sent)
            return [received]
        if outs is None:
            outs = []
            for shape in self.shapes:
                outs.append(empty(received, shape, contiguous_stride(shape), received.dtype))
        _, path, unpacked = self.unpack.unpack(received, outs)
        span.end(path, copied + unpacked, self.bytes_sent)
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
            received: flat memory for what arrives; new memory by default.
        """
        wire, path, copied = self.pack.pack(tensors)
        if received is None:
            # A wire that is the result gets its shape at once: a result is no view of another tensor.
            shape = self.shapes[0] if self.unpack is None else (self.unpack.elements,)
            received = empty(wire, shape, contiguous_stride(shape), wire.dtype)
        out = received if self.unpack is not None else received.view(-1)
        work = backend.all_to_all(out, wire, self.recv_counts, self.send_counts, group, name, asynchronous)
        return StartedExchange(received, work, wire, path, copied)
