"""One hop: stage what is sent, exchange it with both neighbours, hand out what was received.

Without a header both sides know shapes and dtypes. With one (variable lengths, check mode) the receiver learns them
first: the header goes over the CPU side group where there is one, and otherwise costs one stream wait per received
header. Everything that is sent is posted before anything is waited for, and the two directions progress independently,
so that no rank waits for a neighbour that waits for it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritoncomm import record, variables
from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.p2p import header, message
from tritoncomm.p2p.announce import announce, read, say
from tritoncomm.p2p.exchange import Line, Posted, post, start
from tritoncomm.p2p.message import Message
from tritoncomm.p2p.shapes import Spec, describe

__all__ = ["Hop", "Incoming", "check", "checking", "exchange", "exchange_headers"]

_check = variables.CHECK


def checking() -> bool:
    """Whether every message is announced by a header and compared with what its receiver expects."""
    return _check.value


def check(on: bool = True) -> AbstractContextManager[None]:
    """Turn check mode (``TRITONCOMM_CHECK=1``) on or off for a block; all ranks have to agree."""
    return _check.override(on)


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


class Hop:
    """A hop under way.

    Attributes:
        line: the neighbours.
        name: the function a caller knows.
        path: how what is sent was staged: view, torch or triton.
        posted: the transfers by key.
        received: the tensors by key, defined after ``wait()``.
        problems: what a receiver has to refuse, by key; raised once its message has been taken.
    """

    __slots__ = ("headers", "line", "name", "path", "posted", "problems", "received")

    def __init__(self, line: Line, name: str) -> None:
        self.line, self.name, self.path = line, name, "view"
        self.posted: dict[str, Any] = {}
        self.received: dict[str, list[Tensor]] = {}
        self.problems: dict[str, str] = {}
        self.headers: list[Posted] = []

    def wait(self) -> None:
        """Wait for every transfer.

        Raises:
            PeerError: a neighbour died, or did not come within the group's timeout.
            MismatchError: a neighbour sent something else than was expected.
        """
        started = record.now()
        for posted in (*self.posted.values(), *self.headers):
            posted.wait()
        if started:
            record.add(self.name, self.path, 0, 0, started, calls=0)
        if self.problems:
            raise MismatchError("; ".join(self.problems.values()))

    def handles(self) -> dict[str, Any]:
        """One waitable per transfer; a mismatch is raised by the first that is waited for."""
        return {key: _Handle(self, key) for key in self.posted}


class _Handle:
    """One transfer of a hop."""

    __slots__ = ("_hop", "_key")

    def __init__(self, hop: Hop, key: str) -> None:
        self._hop, self._key = hop, key

    def wait(self) -> None:
        self._hop.posted[self._key].wait()
        if self._key in self._hop.problems:
            raise MismatchError(self._hop.problems[self._key])

    def is_completed(self) -> bool:
        return self._hop.posted[self._key].is_completed()


def exchange(
    line: Line,
    name: str,
    sends: dict[str, Sequence[Tensor]],
    receives: dict[str, Incoming],
    device: torch.device | str,
    *,
    batched: bool = True,
    with_header: bool = False,
) -> Hop:
    """Start one hop.

    Args:
        line: the neighbours.
        name: the function a caller knows, for errors and the record.
        sends: tensors by ``send_prev`` and ``send_next``; any strides, one or several per neighbour.
        receives: what is expected by ``recv_prev`` and ``recv_next``.
        device: where received tensors live.
        batched: post all transfers as one batch, or in the order that single blocking calls need.
        with_header: announce the contents (always so in check mode); the neighbours have to do the same.
    """
    started = record.now()
    messages = {key: message.stage(tensors) for key, tensors in sends.items() if len(tensors)}
    hop = Hop(line, name)
    announced = with_header or _check.value
    if line.prev == line.next == line.rank:
        _to_self(hop, messages, sends, receives)
    elif announced:
        _announced(hop, messages, sends, receives, device, batched)
    else:
        for key, incoming in receives.items():
            if incoming.specs:
                messages[key] = _taken(hop, key, incoming, incoming.specs, None, device)
        _post(hop, messages, batched)
    wire = moved = 0
    for key in sends:
        if key in messages:
            each = messages[key]
            wire, moved = wire + each.wire.nbytes, moved + each.moved
            if each.path != "view":
                hop.path = each.path
    record.add(name, hop.path, moved, wire, started)
    return hop


def _post(hop: Hop, messages: dict[str, Message], batched: bool) -> None:
    tensors = {key: m.wire for key, m in messages.items() if m.wire.numel()}
    hop.posted.update(post(hop.line, hop.name, tensors, batched))


def _taken(
    hop: Hop,
    key: str,
    incoming: Incoming,
    specs: tuple[Spec, ...],
    flags: tuple[bool, ...] | None,
    device: torch.device | str,
) -> Message:
    """Buffers for what arrives."""
    out = incoming.out
    if out is not None and ((tuple(out.shape), out.dtype),) != specs:
        raise ArgumentError(f"{hop.name}: out is {describe([(tuple(out.shape), out.dtype)])}, not {describe(specs)}")
    taken = message.allocate(specs, device, out)
    hop.received[key] = []
    for i, piece in enumerate(taken.pieces):
        wanted = incoming.requires_grad if incoming.requires_grad is not None else flags is None or flags[i]
        differentiable = piece.dtype.is_floating_point or piece.dtype.is_complex
        hop.received[key].append(piece.requires_grad_() if wanted and differentiable and out is None else piece)
    return taken


def _to_self(
    hop: Hop, messages: dict[str, Message], sends: dict[str, Sequence[Tensor]], receives: dict[str, Incoming]
) -> None:
    """A ring of one stage: what goes to the next comes from the one before."""
    for sent, taken in (("send_next", "recv_prev"), ("send_prev", "recv_next")):
        if (sent in messages) != (taken in receives):
            raise ArgumentError(f"{hop.name}: the only stage of a pipeline has to receive just what it sends")
        if taken in receives:
            tensors, incoming = sends[sent], receives[taken]
            contents = header.describe_tensors(tensors)
            problem = _problem(hop, taken, incoming, contents.specs)
            if problem:
                raise MismatchError(problem)
            _taken(hop, taken, incoming, contents.specs, contents.requires_grad, tensors[0].device)
            for piece, x in zip(hop.received[taken], tensors, strict=True):
                piece.detach().copy_(x.detach())


def _problem(hop: Hop, key: str, incoming: Incoming, specs: tuple[Spec, ...]) -> str | None:
    """Why ``specs`` are not what is expected, in words for both sides."""
    if incoming.specs is None:
        wrong = incoming.dtype is not None and {dtype for _, dtype in specs} != {incoming.dtype}
        if not wrong:
            return None
        expected = f"tensors of {str(incoming.dtype).removeprefix('torch.')}"
    else:
        if specs == incoming.specs:
            return None
        expected = describe(incoming.specs)
    return f"{hop.name}: {hop.line} expects {expected}, but rank {hop.line.peer(key)} sent {describe(specs)}"


def _announced(
    hop: Hop,
    messages: dict[str, Message],
    sends: dict[str, Sequence[Tensor]],
    receives: dict[str, Incoming],
    device: torch.device | str,
    batched: bool,
) -> None:
    """Headers ahead of the messages; on the CPU, where a send takes up no stream, messages right behind them."""
    at_once = str(device) == "cpu"
    if at_once and len(receives) < 2:
        _one_by_one(hop, messages, sends, receives, device, batched)
        return
    contents = {key: header.describe_tensors(sends[key]) for key in messages}
    outgoing = dict(messages)

    def send(key: str) -> None:
        if at_once:
            _begin(hop, key, outgoing.pop(key), batched)

    def take(key: str, found: header.Contents) -> None:
        taken = _told(hop, key, receives[key], found, device)
        if at_once:
            _begin(hop, key, taken, batched)
        else:
            outgoing[key] = taken

    hop.headers += announce(hop.line, hop.name, contents, tuple(receives), device, send, take)
    if outgoing:
        _post(hop, outgoing, batched)


def _one_by_one(
    hop: Hop,
    messages: dict[str, Message],
    sends: dict[str, Sequence[Tensor]],
    receives: dict[str, Incoming],
    device: torch.device | str,
    batched: bool,
) -> None:
    """``_announced`` on the CPU with one neighbour at most to hear from."""
    for key, *_ in hop.line.batch:
        if key in messages:
            hop.headers += say(hop.line, hop.name, key, header.describe_tensors(sends[key]))
            _begin(hop, key, messages[key], batched)
    for key, incoming in receives.items():
        _begin(hop, key, _told(hop, key, incoming, read(hop.line, hop.name, key), device), batched)


def _begin(hop: Hop, key: str, each: Message, batched: bool) -> None:
    if each.wire.numel():
        hop.posted[key] = start(hop.line, hop.name, key, each.wire, batched)


def _told(hop: Hop, key: str, incoming: Incoming, found: header.Contents, device: torch.device | str) -> Message:
    """Buffers for what a header announces."""
    problem = _problem(hop, key, incoming, found.specs)
    if problem:
        hop.problems[key] = problem
        incoming = Incoming(None, requires_grad=False)
    return _taken(hop, key, incoming, found.specs, found.requires_grad, device)


def exchange_headers(
    line: Line, name: str, sends: dict[str, Sequence[Tensor]], receives: tuple[str, ...], device: torch.device | str
) -> dict[str, header.Contents]:
    """Only the headers: what each neighbour is about to send, by ``recv_prev`` and ``recv_next``."""
    found: dict[str, header.Contents] = {}
    contents = {key: header.describe_tensors(tensors) for key, tensors in sends.items()}
    for posted in announce(line, name, contents, receives, device, lambda key: None, found.__setitem__):
        posted.wait()
    return found
