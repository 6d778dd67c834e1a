"""One hop: stage what is sent, exchange it with both neighbours, hand out what was received.

Without a header both sides know shapes and dtypes. With one (variable lengths, check mode) the receiver learns them
first: the header goes over the CPU side group where there is one, and otherwise costs one stream wait per received
header. Everything that is sent is posted before anything is waited for, and the two directions progress independently,
so that no rank waits for a neighbour that waits for it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tritoncomm import record, variables
from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.p2p import header, message
from tritoncomm.p2p.announce import announce, read, say
from tritoncomm.p2p.incoming import Incoming
from tritoncomm.p2p.message import Message
from tritoncomm.p2p.neighbours import Line
from tritoncomm.p2p.transport import Posted, post, start

__all__ = ["Hop", "Incoming", "check", "checking", "exchange", "exchange_headers"]

_check = variables.CHECK


def checking() -> bool:
    """Whether every message is announced by a header and compared with what its receiver expects."""
    return _check.value


def check(on: bool = True) -> AbstractContextManager[None]:
    """Turn check mode (``TRITONCOMM_CHECK=1``) on or off for a block; all ranks have to agree."""
    return _check.override(on)


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
    if line.is_alone:
        _to_self(hop, messages, sends, receives)
    elif announced:
        _announced(hop, messages, sends, receives, device, batched)
    else:
        for key, incoming in receives.items():
            if incoming.specs:
                messages[key] = _receive_into(hop, key, incoming.allocate(name, incoming.specs, device))
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


def _receive_into(hop: Hop, key: str, taken: Message) -> Message:
    hop.received[key] = taken.pieces
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
            problem = incoming.problem(hop.line, hop.name, taken, contents.specs)
            if problem:
                raise MismatchError(problem)
            device = tensors[0].device
            hop.received[taken] = incoming.allocate(hop.name, contents.specs, device, contents.requires_grad).pieces
            for received, x in zip(hop.received[taken], tensors, strict=True):
                received.detach().copy_(x.detach())


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
        taken = _allocate_announced(hop, key, receives[key], found, device)
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
        _begin(hop, key, _allocate_announced(hop, key, incoming, read(hop.line, hop.name, key), device), batched)


def _begin(hop: Hop, key: str, each: Message, batched: bool) -> None:
    if each.wire.numel():
        hop.posted[key] = start(hop.line.ways[batched][key], hop.name, each.wire)


def _allocate_announced(
    hop: Hop, key: str, incoming: Incoming, contents: header.Contents, device: torch.device | str
) -> Message:
    """Buffers for what a header announces."""
    taken, problem = incoming.announced(hop.line, hop.name, key, contents, device)
    if problem:
        hop.problems[key] = problem
    return _receive_into(hop, key, taken)


def exchange_headers(
    line: Line, name: str, sends: dict[str, Sequence[Tensor]], receives: tuple[str, ...], device: torch.device | str
) -> dict[str, header.Contents]:
    """Only the headers: what each neighbour is about to send, by ``recv_prev`` and ``recv_next``."""
    found: dict[str, header.Contents] = {}
    contents = {key: header.describe_tensors(tensors) for key, tensors in sends.items()}
    for posted in announce(line, name, contents, receives, device, lambda key: None, found.__setitem__):
        posted.wait()
    return found
