"""An exchange: a pass into a wire, one all-to-all, and a pass out of the wire that arrives."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import backend
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.ops import SplitPass
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import Ints
from tritoncomm.record import CopyPath, Span

__all__ = ["Exchange", "StartedExchange", "all_to_all"]


class StartedExchange(NamedTuple):
    """An exchange in flight.

    Attributes:
        recv_wire: wire that arrives.
        work: the backend's work; None if the exchange is over.
        send_wire: wire that is sent, which has to live until then.
        path, copied: way of the pack, and the bytes that it copied.
    """

    recv_wire: Tensor
    work: backend.Work
    send_wire: Tensor
    path: CopyPath = "view"
    copied: int = 0


def all_to_all(
    wire: Tensor,
    send_counts: Ints,
    recv_counts: Ints,
    group: ProcessGroup,
    name: str,
    recv_wire: Tensor | None = None,
    asynchronous: bool = False,
    shape: Ints | None = None,
) -> StartedExchange:
    """Start to send the rows of dim 0 of a contiguous wire to the ranks; the caller counts its bytes.

    Over one rank the wire itself is what arrives, unless there is a ``shape``.

    Args:
        send_counts, recv_counts: rows to and from each rank; empty if all are equal.
        recv_wire: contiguous memory for what arrives from several ranks; new memory by default.
        asynchronous: return while the all-to-all runs; the caller waits for its work.
        shape: of new memory for what arrives, which is a result; by default that of the rows.
    """
    if shape is None and group.size() == 1:
        return StartedExchange(wire, work=None, send_wire=wire)
    is_given = recv_wire is not None or shape is not None
    if recv_wire is None:
        if shape is None:
            shape = (sum(recv_counts), *wire.shape[1:]) if recv_counts else wire.shape
        # Strides are cached by shape. They do not depend on the number of rows, which may be new in every call.
        recv_wire = empty(wire, shape, contiguous_stride((1, *shape[1:])), wire.dtype)
    target = recv_wire
    if is_given:  # by counts the backend wants tensors of as many dims, without counts of one shape
        if not send_counts and recv_wire.shape != wire.shape:
            target = recv_wire.view(wire.shape)
        elif recv_wire.dim() != wire.dim():
            target = recv_wire.view(-1)
    work = backend.all_to_all(target, wire, recv_counts, send_counts, group, name, asynchronous)
    return StartedExchange(recv_wire, work, wire)


_Pack = TypeVar("_Pack", bound=Pass | SplitPass)
_Unpack = TypeVar("_Unpack", bound=Pass | SplitPass | None)


class Exchange(NamedTuple, Generic[_Pack, _Unpack]):
    """Value of a planner: which blocks go to which ranks, and which arrive.

    Attributes:
        pack: pass from the tensors to the wire.
        unpack: pass from the received wire to the results; None where the wire is the one result.
        send_counts, recv_counts: elements to and from each rank; empty if all are equal.
        bytes_sent: bytes to other ranks.
        shapes: of the results; needed unless the caller has memory for what arrives.
    """

    pack: _Pack
    unpack: _Unpack
    send_counts: Ints
    recv_counts: Ints
    bytes_sent: int
    shapes: Sequence[Ints] = ()

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
        wire, pack_path, copied = self.pack.pack(tensors)
        if self.send_counts:
            wire = wire.view(-1)  # counts are of elements
        shape = self.shapes[0] if self.unpack is None else None  # the result itself arrives, in its own shape
        flight = all_to_all(
            wire, self.send_counts, self.recv_counts, group, span.name, asynchronous=asynchronous, shape=shape
        )
        if flight.work is not None:
            flight.work.wait()
        recv_wire = flight.recv_wire
        del wire, flight  # the sent bytes are freed before the results are allocated
        if self.unpack is None:
            span.end(pack_path, copied, self.bytes_sent)
            return [recv_wire]
        if outs is None and isinstance(self.unpack, SplitPass):  # whose kernel or torch.cat makes the result
            outs, unpack_path, unpacked = self.unpack.results(recv_wire)
        else:
            if outs is None:
                outs = []
                for out_shape in self.shapes:
                    outs.append(empty(recv_wire, out_shape, contiguous_stride(out_shape), recv_wire.dtype))
            _, unpack_path, unpacked = self.unpack.unpack(recv_wire, outs)
        path = unpack_path if pack_path == "view" else pack_path  # of a pass that copies
        span.end(path, copied + unpacked, self.bytes_sent)
        return outs

    def start(
        self,
        tensors: Sequence[Tensor],
        group: ProcessGroup,
        name: str,
        recv_wire: Tensor | None = None,
        asynchronous: bool = True,
    ) -> StartedExchange:
        """Pack the tensors and start the all-to-all; the caller waits for its work and unpacks.

        Args:
            recv_wire: flat memory for what arrives; new memory by default.
        """
        wire, path, copied = self.pack.pack(tensors)
        if self.send_counts:
            wire = wire.view(-1)
        flight = all_to_all(wire, self.send_counts, self.recv_counts, group, name, recv_wire, asynchronous)
        return StartedExchange(flight.recv_wire, flight.work, wire, path, copied)
