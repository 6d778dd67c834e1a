"""Hop: one p2p step of a rank, up to four transfers with its two neighbours. Both APIs make their steps here.

Everything that is sent is posted before anything is waited for, and the directions progress independently. So a rank
never waits for a neighbour that waits for this rank.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import DistNetworkError

from tritoncomm import record, variables
from tritoncomm.core.validation import check_data
from tritoncomm.debug.hops import CheckedHop
from tritoncomm.errors import ArgumentError, MismatchError, PeerError
from tritoncomm.p2p import header
from tritoncomm.p2p.message import Incoming, Message, contents_of, describe_hop, pack, specs_of
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.p2p.transport import Posted, keep_alive, post, post_one
from tritoncomm.record import CopyPath

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
    to_next: Any,
    to_prev: Any,
    from_prev: Any,
    from_next: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None = None,
    batched: bool = True,
    variable: bool = False,
    wait: bool = True,
) -> tuple[Any, Any, Any]:
    """Make one hop: up to four transfers at once.

    Args:
        neighbours: of this stage.
        name: the public function, for errors and counters.
        to_next: a tensor or a sequence of tensors for the next stage, any strides; None for nothing.
        to_prev: a tensor or a sequence of tensors for the previous stage; None for nothing.
        from_prev: the shape of the tensor from the previous stage, a list of shapes, or a contiguous tensor to receive
            into; None for nothing.
        from_next: the shape, the shapes or the tensor for the transfer from the next stage; None for nothing.
        dtype: of received tensors.
        device: of received tensors; None for the device of the tensors sent, else the group's.
        batched: post all transfers as one batch, or in the order that single blocking calls need.
        variable: only the number of tensors and their dtype are known; a header announces the shapes. The neighbours
            have to agree.
        wait: wait for all transfers; else return handles.

    Returns:
        (from the previous stage, from the next stage, handles): a tensor for a shape, a list for a list, None for
        nothing. The handles are None once waited for, an empty dict where nothing was posted, else by key.

    Raises:
        PeerError: a neighbour died, or did not post its side within the group's timeout.
        MismatchError: a neighbour sent something else than was expected.
    """
    started, _range = record.now(), None
    if device is not None:
        device = real_device(device, name)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"{name}: the dtype must be a torch.dtype, not {dtype!r:.80}")
    sends: dict[str, list[Tensor]] = {}
    receives: dict[str, Incoming] = {}
    for key, x in (("send_next", to_next), ("send_prev", to_prev)):
        if x is not None and (tensors := _tensors(x, name)):
            sends[key] = tensors
    for key, x in (("recv_prev", from_prev), ("recv_next", from_next)):
        if x is not None:
            receives[key] = Incoming.of(x, dtype, variable, name)
    if record.switch._is_profiler_enabled:
        transfers = {key: specs_of(tensors) for key, tensors in sends.items()}
        transfers |= {key: each.specs for key, each in receives.items() if each.count}
        _range = record.begin(name, "hop", neighbours.group(), None, (describe_hop, neighbours, transfers), 3)
    hop = Hop(neighbours, name, device or _device_of(sends, receives) or neighbours.default_device())
    try:
        hop.start(sends, receives, batched, variable)
        handles = hop.finish(wait)
    except MismatchError as error:
        record.failed(name, error)
        raise
    record.add(name, hop.path, hop.bytes_copied, hop.bytes_sent, started)
    return hop.result("recv_prev", receives), hop.result("recv_next", receives), handles


def real_device(device: torch.device | str, name: str) -> torch.device:
    """Return a caller's device as a ``torch.device``.

    Raises:
        ArgumentError: it is no device, or has no memory to receive into.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{name}: {device!r} is no device: {error}") from None
    if device.type == "meta":
        raise ArgumentError(f"{name}: a meta tensor has no memory to receive into")
    return device


def _tensors(x: Any, name: str) -> list[Tensor]:
    """Return a caller's tensor, list or tuple of tensors as a list.

    Raises:
        ArgumentError: ``x`` is something else, or a tensor has no strided data of this rank.
    """
    tensors = [x] if isinstance(x, Tensor) else x
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(x).__name__}")
    for each in tensors:
        if not isinstance(each, Tensor):
            raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(each).__name__}")
        check_data(each, name)
    return list(tensors)


def _device_of(sends: Mapping[str, list[Tensor]], receives: Mapping[str, Incoming]) -> torch.device | None:
    """Return the device of the first tensor that is sent, else of the first tensor to receive into, else None."""
    for tensors in sends.values():
        return tensors[0].device
    return next((each.out.device for each in receives.values() if each.out is not None), None)


class Hop:
    """A p2p step of this rank, from the first transfer that is posted to the last one that is waited for.

    Attributes:
        neighbours: of this stage.
        name: the public function, for errors and counters.
        device: of received tensors.
        posted: the transfers of messages in flight, by key.
        headers: the sends of headers in flight.
        received: the received tensors by key; they have values once their transfer was waited for.
        problems: by key, the mismatch of a message, raised after its transfer; "" has the mismatches of earlier hops.
        checked: in check mode, the comparison with the other ends of the transfers.
        empty: in check mode, keys of sends without elements: their headers are posted, and no message.
        path: view, torch or triton: how messages were packed.
        bytes_copied: bytes read plus written to pack them.
        bytes_sent: bytes of the messages sent.
    """

    __slots__ = (
        "bytes_copied", "bytes_sent", "checked", "device", "empty", "headers", "name", "neighbours", "path", "posted",
        "problems", "received",
    )  # fmt: skip

    def __init__(self, neighbours: Neighbours, name: str, device: torch.device) -> None:
        self.neighbours, self.name, self.device = neighbours, name, device
        self.posted: dict[str, Posted] = {}
        self.headers: list[Posted] = []
        self.received: dict[str, list[Tensor]] = {}
        self.problems: dict[str, str] = {}
        self.checked: CheckedHop | None = None
        self.empty: list[str] = []
        self.path: CopyPath = "view"
        self.bytes_copied = self.bytes_sent = 0

    def start(
        self, sends: Mapping[str, list[Tensor]], receives: Mapping[str, Incoming], batched: bool, variable: bool
    ) -> None:
        """Pack the tensors to send, allocate memory for the tensors to receive, and post all transfers.

        In check mode, and for ``variable`` shapes, each message has a header ahead of it. A single rank copies from
        its sends to its receives instead.
        """
        # Nothing, not even a header, is received for a list of no shapes: the sender has a list of no tensors.
        receives = {key: each for key, each in receives.items() if each.count}
        if self.neighbours.is_single_rank:
            self._copy_to_self(sends, receives)
            return
        messages = {key: pack(tensors) for key, tensors in sends.items()}
        for each in messages.values():
            if each.bytes_copied:
                self.path = each.path
                self.bytes_copied += each.bytes_copied
            self.bytes_sent += each.wire.nbytes
        if variable or _check.value:
            try:
                self._start_with_headers(messages, receives, batched)
            except BaseException as error:
                self._give_up(error)
                raise
            return
        for key, each in receives.items():
            messages[key] = buffers = each.allocate_expected(self.name, self.device)
            self.received[key] = buffers.tensors
        self._post(messages, batched)

    def _copy_to_self(self, sends: Mapping[str, list[Tensor]], receives: Mapping[str, Incoming]) -> None:
        """Make the hop of a ring of one stage: copy sends to the next stage into receives from the previous one.

        Sends to the previous stage are received from the next one.

        Raises:
            ArgumentError: a send has no receive, or a receive no send.
            MismatchError: shapes or dtypes of a send and its receive differ.
        """
        self.path = "torch"
        for source, target in (("send_next", "recv_prev"), ("send_prev", "recv_next")):
            if (source in sends) != (target in receives):
                raise ArgumentError(f"{self.name}: the only stage of a pipeline has to receive just what it sends")
            if target in receives:
                specs = specs_of(sends[source])
                if problem := receives[target].problem(self.neighbours, self.name, target, specs):
                    raise MismatchError(problem)
                self.received[target] = receives[target].allocate(specs, sends[source][0].device).tensors
                for copy, x in zip(self.received[target], sends[source], strict=True):
                    copy.detach().copy_(x.detach())
                    self.bytes_copied += 2 * x.nbytes

    def _start_with_headers(
        self, messages: dict[str, Message], receives: Mapping[str, Incoming], batched: bool
    ) -> None:
        """Exchange headers, allocate memory for the tensors that they announce, and post the messages.

        A message between CPUs, where a send occupies no stream, is posted right behind its header. In check mode both
        ends of each transfer compare specs first, and mismatches go into ``problems``.
        """
        directions = self.neighbours.directions[batched]

        def start(key: str) -> None:
            """Post the message of ``key`` if it is between CPUs."""
            if self.device.type == "cpu" and (each := messages.pop(key)).wire.numel():
                self.posted[key] = post_one(directions[key], self.name, each.wire)

        sent = {key: specs_of(each.tensors) for key, each in messages.items()}
        self.empty = [key for key, each in messages.items() if not each.wire.numel()]
        if _check.value:
            self.checked = CheckedHop(self.neighbours, self.name, contents_of(sent, receives))
            self._note(next(iter((*sent, *receives)), ""), self.checked.earlier())
            for key in sent:
                self._meet(key)
        arrivals = header.exchange_headers(
            self.neighbours, self.name, sent, tuple(receives), self.device, self.headers, start, self._meet
        )
        while True:
            try:
                key, specs = next(arrivals, ("", None))
            except PeerError as error:
                self.explain(error)
            if specs is None:
                break
            buffers, problem = receives[key].allocate_from_header(self.neighbours, self.name, key, specs, self.device)
            self._note(key, problem)
            self.compare(key)
            self.received[key], messages[key] = buffers.tensors, buffers
            start(key)
        if messages:
            self._post(messages, batched)

    def _post(self, messages: Mapping[str, Message], batched: bool) -> None:
        """Post the transfers of all messages that have elements."""
        wires = {key: each.wire for key, each in messages.items() if each.wire.numel()}
        self.posted.update(post(self.neighbours, self.name, wires, batched))

    def finish(self, wait: bool) -> dict[str, "Handle"] | None:
        """Wait for all transfers and return None, or return a handle for each by key, and keep the sends alive.

        An empty dict is returned where nothing was posted.

        Raises:
            MismatchError: a message differs from the expected one, and has no handle that would raise.
            PeerError: as ``Handle.wait``.
        """
        if wait:
            handles = None if self.posted else {}
            self.wait()
            return handles
        keep_alive((*self.headers, *self.posted.values()))
        for key in self.empty:
            self.compare(key)
        if any(key not in self.posted for key in self.problems):
            self.wait()
        return {key: Handle(self, key) for key in self.posted}

    def wait(self) -> None:
        """Wait for all transfers; in check mode compare the sends with what their receivers expected.

        Raises:
            MismatchError: a message differs from the expected one.
            PeerError: a neighbour died, or did not post its side within the group's timeout.
        """
        try:
            for posted in self.posted.values():
                posted.wait()
            for posted in self.headers:
                posted.wait()
        except PeerError as error:
            self.explain(error)
        if self.checked is not None:
            for key in [*(each for each in self.posted if each.startswith("send")), *self.empty]:
                self.compare(key)
        if self.problems:
            raise MismatchError("; ".join(self.problems.values()))

    def result(self, key: str, receives: Mapping[str, Incoming]) -> Any:
        """Return the tensors received for ``key`` in the form that the caller expects: a tensor, a list, or None."""
        incoming = receives.get(key)
        if incoming is None:
            return None
        tensors = self.received.get(key, [])
        if incoming.is_single:
            return tensors[0] if tensors else None
        return tensors

    def _meet(self, key: str, in_helper: bool = False) -> None:
        """In check mode wait up to 1 s for the other end of the transfer ``key``; ``in_helper``: in a helper thread."""
        if self.checked is not None:
            self.checked.meet(key, in_helper)

    def compare(self, key: str) -> None:
        """In check mode compare this rank's end of the transfer ``key`` with the other one; keep their difference."""
        if self.checked is not None:
            self._note(key, self.checked.problem(key))

    def _note(self, key: str, problem: str | None) -> None:
        """Append the text of a mismatch, unless there is none, to ``problems`` of the transfer ``key``."""
        if problem:
            self.problems[key] = f"{self.problems[key]}; {problem}" if key in self.problems else problem

    def explain(self, error: PeerError) -> NoReturn:
        """Raise ``error`` of a transfer; in check mode raise the cause that another rank published, if there is one."""
        explained = error if self.checked is None else self.checked.explained(error)
        try:
            if explained is error:
                raise error
            raise explained from error
        finally:
            del error, explained  # their traceback has this frame

    def _give_up(self, error: BaseException) -> None:
        """In check mode publish that ``error`` ends this hop, so that its other ends do not wait for the timeout."""
        if self.checked is not None:
            with suppress(DistNetworkError):  # the error that is being raised matters more
                self.checked.give_up(f"{type(error).__name__}: {error}")


class Handle:
    """One transfer of a hop in flight."""

    __slots__ = ("_hop", "_key")

    def __init__(self, hop: Hop, key: str) -> None:
        self._hop, self._key = hop, key

    def wait(self) -> None:
        """Wait for the transfer: a sent tensor may be reused then, a received one has its values.

        Raises:
            MismatchError: the message differs from the expected one.
            PeerError: the neighbour died, or did not post its side within the group's timeout.
        """
        is_checked_send = self._hop.checked is not None and self._key.startswith("send")
        try:
            self._hop.posted[self._key].wait()
        except PeerError as error:
            if is_checked_send:
                self._hop.explain(error)
            raise
        if is_checked_send:
            self._hop.compare(self._key)
        if self._key in self._hop.problems:
            raise MismatchError(self._hop.problems[self._key])

    def is_completed(self) -> bool:
        """Whether ``wait`` returns without waiting for the backend."""
        return self._hop.posted[self._key].is_completed()
