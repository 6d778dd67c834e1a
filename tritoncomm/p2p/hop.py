"""Hop: one p2p step of a rank, up to four transfers with its two neighbours. Both APIs make their steps here.

Each send is posted before a wait for a message, and the directions progress independently. So a rank never waits for a
neighbour that waits for this rank. On a device the headers of both sides come first.
"""

from collections.abc import Mapping, Sized
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import DistNetworkError

from tritoncomm import record, variables
from tritoncomm.debug.p2p_check import CheckedHop, Content
from tritoncomm.errors import ArgumentError, CommError, MismatchError, PeerError
from tritoncomm.p2p import header
from tritoncomm.p2p.message import Incoming, allocate_one, contents_of, describe_hop, pack, specs_of
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.p2p.transport import Posted, keep_alive, post, post_and_wait, post_one
from tritoncomm.record import hooks

__all__ = ["Handle", "Hop", "check", "checking", "exchange", "real_device"]

_check = variables.CHECK


def checking() -> bool:
    """Whether check mode is on: each message has a header, and both ends compare what they send and expect."""
    return _check.value


def check(on: bool = True) -> AbstractContextManager[None]:
    """Turn check mode (``TRITONCOMM_CHECK=1``) on or off for a block; all ranks have to agree."""
    return _check.override(on)


def exchange(
    neighbours: Neighbours,
    name: str,
    outgoing: Mapping[str, Any],
    expected: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    batched: bool = True,
    variable: bool = False,
    wait: bool = True,
    casts: bool = False,
) -> tuple[dict[str, Any], Any]:
    """Make one hop, up to four transfers at once; return (received, handles).

    Args:
        outgoing: a tensor or a sequence of tensors of any strides; None for nothing.
        expected: a shape, a list of shapes, or a contiguous tensor to receive into; None for nothing.
        device: of received tensors; None for the device of the tensors sent, else the group's.
        batched: post all transfers as one batch, or in the order that single blocking calls need.
        variable: a header announces the shapes, and ``expected`` their number; the neighbours have to agree.
        casts: cast the tensors sent to ``dtype``, which the receivers allocate too.

    Returns:
        The received tensors by key of ``expected``, a tensor for a shape and a list for a list. Handles by key without
        ``wait``, None once waited for, an empty dict where nothing was posted.
    """
    start_time, transfers, _range = hooks.clock(), None, None  # a profiler shows the hop until ``_range`` is dropped
    if record.is_observed():
        transfers = {}
        _range = hooks.begin(name, "hop", neighbours.group(), None, (describe_hop, neighbours, transfers), depth=3)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"{name}: the dtype must be a torch.dtype, not {dtype!r:.80}")
    # By key of ``outgoing`` and ``expected``: tensors that are sent, buffers of transfers that can be posted, messages
    # that are allocated later (by their specs, or by a header), and what the caller gets.
    sends: dict[str, list[Tensor]] = {}
    wires: dict[str, Tensor] = {}
    receives: dict[str, Incoming] = {}
    results: dict[str, Any] = {}
    has_headers = variable or _check.value
    try:
        path, copied, bytes_sent = _pack_sends(outgoing, name, dtype if casts else None, wait, sends, wires)
        for key, x in expected.items():
            if x is None:
                continue
            if device is None:
                device = _device_of(sends) or (x.device if isinstance(x, Tensor) else neighbours.default_device())
            # One tensor of one shape, the usual case, needs no Incoming.
            is_posted_now = not (has_headers or neighbours.is_single_rank)
            tensor = allocate_one(x, dtype, device) if is_posted_now else None
            if tensor is not None:
                wires[key] = results[key] = tensor
                continue
            incoming = Incoming.of(x, dtype, variable, name)
            if incoming.count:
                receives[key] = incoming
            else:  # its sender sends no message, not even a header
                results[key] = []
    except CommError as error:
        if _check.value and not neighbours.is_single_rank:
            _refuse(neighbours, name, {**outgoing, **expected}, error)
        raise
    if transfers is not None:
        # ``hooks.begin`` has this dict, which was empty: shapes are known only here.
        transfers |= {key: specs_of(tensors) for key, tensors in sends.items()}
        transfers |= {key: specs_of([x]) for key, x in results.items() if key in wires}
        transfers |= {key: incoming.specs for key, incoming in receives.items()}
    handles: Any = None
    posted: Sized = wires
    # A ring of one stage sends nothing. Messages with headers are allocated as headers arrive; others are allocated now
    # and posted at once.
    if neighbours.is_single_rank:
        path, copied, bytes_sent = "torch", copied + _copy_to_self(neighbours, name, sends, receives, results), 0
        posted = ()
    elif has_headers and (device := device or _device_of(sends)) is not None:
        hop = Hop(neighbours, name, results)
        try:
            hop.start(sends, wires, receives, device, batched)
            handles = hop.wait() if wait else hop.handles()
        except MismatchError as error:
            record.failed(name, error)
            raise
        posted = hop.posted
    else:
        if receives:
            assert device is not None
            _allocate(receives, name, device, wires, results)
        if wait:
            post_and_wait(neighbours, name, wires, batched)
        else:
            handles = post(neighbours, name, wires, batched)
            keep_alive(handles.values())
    # Where nothing was posted there is nothing to wait for: the handles are an empty dict, even after ``wait``.
    record.add(name, path, copied, bytes_sent, start_time)
    return results, handles if posted else {}


def _refuse(neighbours: Neighbours, name: str, sides: Mapping[str, Any], error: CommError) -> None:
    """Tell the neighbours in check mode that this rank refuses its arguments; they would wait for the timeout."""
    # ``give_up`` closes the channels to the neighbours, whose transfers fail with this error then.
    contents = {key: Content("refused arguments", specs=None) for key, x in sides.items() if x is not None}
    CheckedHop(neighbours, name, contents, refused=True).give_up(f"{type(error).__name__}: {error}")


def _allocate(
    receives: Mapping[str, Incoming],
    name: str,
    device: torch.device,
    wires: dict[str, Tensor],
    results: dict[str, Any],
) -> None:
    """Allocate messages of expected shapes: their buffers go into ``wires``, their tensors into ``results``."""
    for key, incoming in receives.items():
        wire, tensors = incoming.allocate_expected(name, device)
        if wire.numel():
            wires[key] = wire
        results[key] = incoming.form(tensors)


_Packed = tuple[record.CopyPath, int, int]
"""Path of the packs of a hop, the bytes that they copied, and the bytes that it sends."""


def _pack_sends(
    outgoing: Mapping[str, Any],
    name: str,
    dtype: torch.dtype | None,
    waits: bool,
    sends: dict[str, list[Tensor]],
    wires: dict[str, Tensor],
) -> _Packed:
    """Pack what is sent: its tensors go into ``sends``, its buffers into ``wires``; cast to ``dtype`` unless None."""
    path: record.CopyPath = "view"
    copied = sent = 0
    for key, x in outgoing.items():
        if x is None or (message := pack(x, name, dtype)) is None:
            continue
        wire, sends[key], message_path, message_copied = message
        if message_copied:
            path, copied = message_path, copied + message_copied
        if size := wire.nbytes:  # a wire without elements is not sent
            wires[key] = wire if waits else wire.detach()  # the caller may set x.data while a handle is pending
            sent += size
    return path, copied, sent


def _copy_to_self(
    neighbours: Neighbours,
    name: str,
    sends: Mapping[str, list[Tensor]],
    receives: Mapping[str, Incoming],
    received: dict[str, Any],
) -> int:
    """Make the hop of a ring of one stage: copy sends into ``received``; return the bytes read plus written."""
    copied = 0
    # Tensors for the next stage come from the previous one, and tensors for the previous stage from the next one.
    for source, target in (("send_next", "recv_prev"), ("send_prev", "recv_next")):
        if (source in sends) != (target in receives):
            raise ArgumentError(f"{name}: the only stage of a pipeline has to receive just what it sends")
        if target not in receives:
            continue
        tensors, incoming = sends[source], receives[target]
        specs = specs_of(tensors)
        if problem := incoming.problem(neighbours, name, target, specs):
            raise MismatchError(problem)
        _, copies = incoming.allocate(specs, tensors[0].device)
        for copy, x in zip(copies, tensors, strict=True):
            copy.detach().copy_(x.detach())
            copied += 2 * x.nbytes
        received[target] = incoming.form(copies)
    return copied


def _device_of(sends: Mapping[str, list[Tensor]]) -> torch.device | None:
    """Return the device of the first tensor that is sent; None if nothing is sent."""
    return next(iter(sends.values()))[0].device if sends else None


def real_device(device: torch.device | str, name: str) -> torch.device:
    """Return a caller's device as a ``torch.device``; reject a device without memory to receive into."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{name}: {device!r} is no device: {error}") from None
    if device.type == "meta":
        raise ArgumentError(f"{name}: a meta tensor has no memory to receive into")
    return device


class Hop:
    """A hop whose messages have headers, from its first header to the last transfer that is waited for.

    Attributes:
        posted: the transfers of messages in flight.
        headers: the sends of headers in flight.
        received: the received tensors, in the form that the caller expects.
        problems: the mismatch of a message, raised after its transfer; also the mismatches of earlier hops.
        checked: in check mode, the comparison with the other ends of the transfers.
        empty: keys of sends without elements, which have a header and no message.
    """

    __slots__ = ("checked", "empty", "headers", "name", "neighbours", "posted", "problems", "received")

    def __init__(self, neighbours: Neighbours, name: str, received: dict[str, Any]) -> None:
        self.neighbours, self.name, self.received = neighbours, name, received
        self.posted: dict[str, Posted] = {}
        self.headers: list[Posted] = []
        self.problems: dict[str, str] = {}
        self.checked: CheckedHop | None = None
        self.empty: list[str] = []

    def start(
        self,
        sends: Mapping[str, list[Tensor]],
        wires: dict[str, Tensor],
        receives: Mapping[str, Incoming],
        device: torch.device,
        batched: bool,
    ) -> None:
        """Exchange headers, allocate memory for the tensors that they announce, and post the messages.

        Args:
            wires: the packed sends that have elements; emptied here.
            batched: post messages that occupy a stream as one batch.
        """
        # Between CPUs and through the host, where a send occupies no stream, a message follows right behind its header.
        directions, on_cpu = self.neighbours.directions[bool(batched)], device.type == "cpu"

        def post_behind_header(key: str) -> None:
            """Post the message of ``key`` if it occupies no stream and has elements."""
            if key in wires and (on_cpu or directions[key].modes[True] == "host"):
                self.posted[key] = post_one(directions[key], self.name, wires.pop(key))

        try:
            specs = {key: specs_of(tensors) for key, tensors in sends.items()}
            self.empty = [key for key in sends if key not in wires]
            # In check mode both ends of each transfer compare specs first.
            if _check.value:
                self.checked = CheckedHop(self.neighbours, self.name, contents_of(specs, receives))
                # A mismatch of earlier hops is reported under the first key of this one.
                self._note(next(iter((*sends, *receives)), ""), self.checked.earlier())
                for key in sends:
                    self._meet(key)
            # ``_meet`` waits for a sender before its header arrives.
            arrivals = header.exchange_headers(
                self.neighbours, self.name, specs, tuple(receives), device, self.headers, post_behind_header, self._meet
            )
            while True:
                try:
                    key, announced = next(arrivals, ("", None))
                except PeerError as error:
                    self.explain(error)  # raises
                if announced is None:  # all headers have arrived
                    break
                incoming = receives[key]
                wire, tensors, problem = incoming.allocate_from_header(
                    self.neighbours, self.name, key, announced, device
                )
                self._note(key, problem)
                self.compare(key)
                self.received[key] = incoming.form(tensors)
                if wire.numel():
                    wires[key] = wire
                post_behind_header(key)
            if wires:
                self.posted.update(post(self.neighbours, self.name, wires, batched))
        except BaseException as error:
            if self.checked is not None:  # else the other ends would wait for the timeout
                with suppress(DistNetworkError):  # the error that is being raised matters more
                    self.checked.give_up(f"{type(error).__name__}: {error}")
            raise

    def wait(self) -> None:
        """Wait for all transfers; in check mode compare the sends with the expectations of their receivers."""
        try:
            for posted in (*self.posted.values(), *self.headers):
                posted.wait()
        except PeerError as error:
            self.explain(error)  # raises
        for key in [*(each for each in self.posted if each.startswith("send")), *self.empty]:
            self.compare(key)
        if self.problems:
            raise MismatchError("; ".join(self.problems.values()))

    def handles(self) -> dict[str, "Handle"]:
        """Return a handle of each message in flight; keep its sends alive when a handle is dropped."""
        keep_alive((*self.headers, *self.posted.values()))
        for key in self.empty:
            self.compare(key)
        # No handle would raise this mismatch, so ``wait`` does, after all transfers.
        if any(key not in self.posted for key in self.problems):
            self.wait()
        return {key: Handle(self, key) for key in self.posted}

    def _meet(self, key: str, in_helper: bool = False) -> None:
        """In check mode wait up to 1 s for the other end of the transfer ``key``; ``in_helper``: in a helper thread."""
        if self.checked is not None:
            self.checked.meet(key, in_helper)

    def compare(self, key: str) -> None:
        """In check mode compare both ends of the transfer ``key``, and add their difference to ``problems``."""
        if self.checked is not None:
            self._note(key, self.checked.problem(key))

    def _note(self, key: str, problem: str | None) -> None:
        """Append the text of a mismatch of the transfer ``key`` to ``problems``, unless there is none."""
        if problem:
            self.problems[key] = f"{self.problems[key]}; {problem}" if key in self.problems else problem

    def explain(self, error: PeerError) -> NoReturn:
        """Raise the error of a transfer, or in check mode the cause of it that another rank has published."""
        # In check mode the hop is abandoned first, which tells its other ends through the store. Without a published
        # cause the text names the peers that have ended.
        explained = error if self.checked is None else self.checked.explained(error)
        try:
            if explained is error:
                raise error
            raise explained from error
        finally:
            del error, explained  # their traceback has this frame


class Handle:
    """One transfer of a message that has a header, in flight."""

    __slots__ = ("_hop", "_key")

    def __init__(self, hop: Hop, key: str) -> None:
        self._hop, self._key = hop, key

    def wait(self) -> None:
        """Wait for the transfer: a sent tensor may be reused then, and a received one has its values."""
        is_send = self._key.startswith("send")
        try:
            self._hop.posted[self._key].wait()
        except PeerError as error:
            if is_send:
                self._hop.explain(error)  # raises
            raise
        if is_send:
            self._hop.compare(self._key)
        if self._key in self._hop.problems:
            raise MismatchError(self._hop.problems[self._key])

    def is_completed(self) -> bool:
        """Whether ``wait`` returns without waiting for the backend."""
        return self._hop.posted[self._key].is_completed()
