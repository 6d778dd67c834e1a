"""One p2p step: send to and receive from both neighbours. The only exchange path of both APIs.

Most calls move one tensor of known shape each way: those take ``_exchange_plain``, at a fraction of the host time.
Several tensors per neighbour, headers (variable lengths, check mode), single-rank groups and dtypes that no backend
moves take ``_exchange_messages``. Everything that is sent is posted before anything is waited for, and both directions
progress independently, so that a rank never waits for a neighbour that waits for it.
"""

from contextlib import AbstractContextManager, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import DistNetworkError

from tritoncomm import record, variables
from tritoncomm.core.backend import special
from tritoncomm.core.memory import empty_on
from tritoncomm.core.ops import path_for
from tritoncomm.core.validation import check_data
from tritoncomm.debug.hops import CheckedHop
from tritoncomm.errors import ArgumentError, MismatchError, PeerError
from tritoncomm.p2p import header, message
from tritoncomm.p2p.message import Incoming, Message, begin, contents_of, specs_of
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.p2p.transport import Posted, keep_alive, post, post_and_wait, post_one

__all__ = ["Handle", "Hop", "check", "checking", "exchange", "real_device"]

_check = variables.CHECK
_SHAPES = frozenset((tuple, list, torch.Size))

Result = tuple[Any, Any, Any]


def checking() -> bool:
    """Whether every message has a header that is compared with what its receiver expects."""
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
) -> Result:
    """Up to four transfers at once.

    Args:
        neighbours: of this stage.
        name: the public function, for errors and counters.
        to_next: a tensor or a sequence of tensors for the next stage, any strides; None for nothing.
        to_prev: the same for the previous stage.
        from_prev: the shape of the tensor from the previous stage, a list of shapes, or a contiguous tensor to receive
            into; None for nothing.
        from_next: the same for the next stage.
        dtype: of received tensors.
        device: of received tensors; None for that of the tensors sent, else the group's.
        batched: post all transfers as one batch, or in the order that single blocking calls need.
        variable: only the number of tensors and their dtype are known; a header announces the shapes. The neighbours
            have to agree.
        wait: for all transfers; else return handles.

    Returns:
        (from the previous stage, from the next stage, handles): a tensor for a shape, a list for a list. The handles
        are None once waited for, and an empty dict where nothing was posted.

    Raises:
        PeerError: a neighbour died, or did not post its side within the group's timeout.
        MismatchError: a neighbour sent something else than was expected.
    """
    _range = None
    if record.switch._is_profiler_enabled:
        _range = begin(neighbours, name, (to_next, to_prev), (from_prev, from_next), 4, variable)
    result = None
    if not (variable or _check.value or neighbours.is_single_rank):
        try:
            result = _exchange_plain(
                neighbours, name, to_next, to_prev, from_prev, from_next, dtype, device, batched, wait
            )  # fmt: skip
        except RuntimeError:  # looked at only now: each property of a tensor takes 50 ns
            _refuse(name, to_next, to_prev)
            raise
    if result is None:
        sends: dict[str, list[Tensor]] = {}
        receives: dict[str, Incoming] = {}
        if device is not None:
            device = real_device(device, name)
        for key, x in (("send_next", to_next), ("send_prev", to_prev)):
            if x is not None and (tensors := _tensors(x, name)):
                sends[key] = tensors
                device = tensors[0].device if device is None else device
        if not isinstance(dtype, torch.dtype | None):
            raise ArgumentError(f"{name}: the dtype must be a torch.dtype, not {dtype!r:.80}")
        for key, x in (("recv_prev", from_prev), ("recv_next", from_next)):
            if x is not None:
                receives[key] = Incoming.of(x, dtype, variable, name)
        if device is None:
            device = neighbours.default_device()
        try:
            result = _exchange_messages(neighbours, name, sends, receives, device, batched, variable, wait)
        except MismatchError as error:  # of messages that both ends have transferred
            record.failed(name, error)
            raise
    return result


def _exchange_plain(
    neighbours: Neighbours,
    name: str,
    to_next: Any,
    to_prev: Any,
    from_prev: Any,
    from_next: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    batched: bool,
    wait: bool,
) -> Result | None:
    """``exchange`` of at most one tensor each way, without a header.

    Returns None, with nothing sent, for everything else: several tensors, dtypes that no backend moves, single
    elements, empty tensors, invalid arguments.
    """
    started, tensors, sent, path, copied = record.now(), {}, 0, "view", 0
    for key, x in (("send_next", to_next), ("send_prev", to_prev)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            if type(x) is not list or len(x) != 1 or not isinstance(x[0], Tensor):
                return None
            x = x[0]
        if type(x) is not Tensor or x.is_meta or x.is_nested:  # which a backend takes, or refuses after a receive
            check_data(x, name)
        if x.dtype in special or (nbytes := x.nbytes) <= 8:
            return None  # one element may carry a lazy negative bit
        if x.is_contiguous():
            if not wait:
                x = x.detach()  # the caller may set x.data while a handle is pending
        elif path_for(x) == "torch" and not x.is_neg():
            x, path, copied = x.detach().contiguous(), "torch", copied + 2 * nbytes
        else:
            packed = message.pack([x])
            x, path, copied = packed.wire, packed.path, copied + packed.bytes_copied
        tensors[key] = x
        sent += nbytes
    before = after = None
    if from_prev is not None or from_next is not None:
        if type(dtype) is not torch.dtype or dtype in special:
            return None
        is_given = device is not None  # and may have no memory
        if device is None:
            device = next(iter(tensors.values())).device if tensors else neighbours.default_device()
        with_grad = dtype.is_floating_point
        for key, expected in (("recv_prev", from_prev), ("recv_next", from_next)):
            if expected is None:
                continue
            shape = expected
            if type(shape) is list and len(shape) == 1 and type(shape[0]) is not int:
                shape = shape[0]
            if type(shape) not in _SHAPES or not shape or 0 in shape:
                return None
            try:
                x = empty_on(device, shape, dtype)
            except (RuntimeError, TypeError, ValueError):
                return None  # Incoming names what is wrong with a shape
            if is_given and x.is_meta:
                return None
            if with_grad:
                x.requires_grad_()
            tensors[key] = x
            if shape is not expected:
                x = [x]
            if key == "recv_prev":
                before = x
            else:
                after = x
    handles: Any = None
    if not wait:
        handles = post(neighbours, name, tensors, batched)
        keep_alive(handles.values())
    elif tensors:
        post_and_wait(neighbours, name, tensors, batched)
    else:
        handles = {}
    record.add(name, path, copied, sent, started)
    return before, after, handles


class Hop:
    """A p2p step in flight.

    Attributes:
        posted: the transfers by key.
        headers: the headers sent.
        received: the tensors by key, defined once waited for.
        problems: by key, why a message is refused; raised once it has been transferred.
        checked: in check mode, the comparison with the other ends.
        empty: keys of sends without elements, which are not posted; in check mode their headers are sent.
    """

    __slots__ = ("checked", "empty", "headers", "posted", "problems", "received")

    def __init__(self, checked: CheckedHop | None = None) -> None:
        self.posted: dict[str, Posted] = {}
        self.headers: list[Posted] = []
        self.received: dict[str, list[Tensor]] = {}
        self.problems: dict[str, str] = {}
        self.checked = checked
        self.empty: list[str] = []

    def meet(self, key: str, in_helper: bool = False) -> None:
        """In check mode: see whether the other end of a transfer comes, before it is waited for."""
        if self.checked is not None:
            self.checked.meet(key, in_helper)

    def compare(self, key: str) -> None:
        """In check mode: compare a transfer with what its other end did, and note what is wrong."""
        if self.checked is not None:
            self.note(key, self.checked.problem(key))

    def note(self, key: str, problem: str | None) -> None:
        """A transfer has a problem, where there is a text."""
        if problem:
            self.problems[key] = f"{self.problems[key]}; {problem}" if key in self.problems else problem

    def explain(self, error: PeerError) -> NoReturn:
        """Raise ``error``; in check mode with what the other end does instead, where that is known."""
        explained = error if self.checked is None else self.checked.explained(error)
        try:
            if explained is error:
                raise error
            raise explained from error
        finally:
            del error, explained  # their traceback has this frame

    def give_up(self, error: BaseException) -> None:
        """In check mode: the other ends learn that their transfers will not be completed because of ``error``."""
        if self.checked is not None:
            with suppress(DistNetworkError):  # the error that is being raised matters more
                self.checked.give_up(f"{type(error).__name__}: {error}")

    def wait(self) -> None:
        """Wait for every transfer."""
        if self.checked is None:
            self._wait()
            return
        try:
            self._wait()
        except PeerError as error:
            self.explain(error)
        for key in [*(each for each in self.posted if each.startswith("send")), *self.empty]:
            self.compare(key)
        if self.problems:
            raise MismatchError("; ".join(self.problems.values()))

    def complete_empty(self) -> None:
        """Compare the sends without elements; where a message that has no handle to wait for is wrong, end the step."""
        for key in self.empty:
            self.compare(key)
        if any(key not in self.posted for key in self.problems):
            self.wait()

    def _wait(self) -> None:
        for posted in self.posted.values():
            posted.wait()
        for posted in self.headers:
            posted.wait()
        if self.problems and self.checked is None:
            raise MismatchError("; ".join(self.problems.values()))


class Handle:
    """One transfer of a hop; ``wait()`` raises its mismatch."""

    __slots__ = ("_hop", "_key")

    def __init__(self, hop: Hop, key: str) -> None:
        self._hop, self._key = hop, key

    def wait(self) -> None:
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
        return self._hop.posted[self._key].is_completed()


def real_device(device: torch.device | str, name: str) -> torch.device:
    """A device that has memory to receive into."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"{name}: {device!r} is no device: {error}") from None
    if device.type == "meta":
        raise ArgumentError(f"{name}: a meta tensor has no memory to receive into")
    return device


def _refuse(name: str, *sent: Any) -> None:
    """Name what cannot be sent."""
    for x in sent:
        _tensors(() if x is None else x, name)


def _tensors(x: Any, name: str) -> list[Tensor]:
    if not isinstance(x, Tensor | list | tuple):
        raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(x).__name__}")
    tensors = [x] if isinstance(x, Tensor) else list(x)
    for each in tensors:
        if not isinstance(each, Tensor):
            raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(each).__name__}")
        check_data(each, name)
    return tensors


def _exchange_messages(
    neighbours: Neighbours,
    name: str,
    sends: dict[str, list[Tensor]],
    receives: dict[str, Incoming],
    device: torch.device,
    batched: bool,
    variable: bool,
    wait: bool,
) -> Result:
    """``exchange`` with one message per neighbour, and a header where shapes vary or are checked."""
    started, hop = record.now(), Hop()
    path, copied, sent = "view", 0, 0
    # Of a list of no shapes nothing comes, not even a header: lists of no tensors are not sent.
    expected = {key: each for key, each in receives.items() if each.count}
    if neighbours.is_single_rank:
        path, copied = "torch", _copy_to_self(hop, neighbours, name, sends, expected)
    else:
        messages = {key: message.pack(tensors) for key, tensors in sends.items()}
        for each in messages.values():
            path = path if each.path == "view" else each.path
            copied, sent = copied + each.bytes_copied, sent + each.wire.nbytes
        hop.empty = [key for key, each in messages.items() if not each.wire.numel()]
        if variable or _check.value:
            try:
                _post_with_headers(hop, neighbours, name, sends, messages, expected, device, batched)
            except BaseException as error:
                hop.give_up(error)
                raise
        else:
            buffers = {key: each.allocate_expected(name, device) for key, each in expected.items()}
            hop.received = {key: each.tensors for key, each in buffers.items()}
            _post(hop, neighbours, name, messages | buffers, batched)
    handles: Any = None if hop.posted else {}
    if wait:
        hop.wait()
    else:
        keep_alive((*hop.headers, *hop.posted.values()))
        hop.complete_empty()
        handles = {key: Handle(hop, key) for key in hop.posted}
    record.add(name, path, copied, sent, started)
    received: dict[str, Any] = {}
    for key, incoming in receives.items():
        tensors = hop.received.get(key, [])
        received[key] = (tensors[0] if tensors else None) if incoming.is_single else tensors
    return received.get("recv_prev"), received.get("recv_next"), handles


def _post(hop: Hop, neighbours: Neighbours, name: str, messages: dict[str, Message], batched: bool) -> None:
    wires = {key: each.wire for key, each in messages.items() if each.wire.numel()}
    hop.posted.update(post(neighbours, name, wires, batched))


def _copy_to_self(
    hop: Hop, neighbours: Neighbours, name: str, sends: dict[str, list[Tensor]], receives: dict[str, Incoming]
) -> int:
    """A ring of one stage: what goes to the next stage comes from the previous one; the bytes read plus written."""
    copied = 0
    for source, target in (("send_next", "recv_prev"), ("send_prev", "recv_next")):
        if (source in sends) != (target in receives):
            raise ArgumentError(f"{name}: the only stage of a pipeline has to receive just what it sends")
        if target in receives:
            tensors, incoming = sends[source], receives[target]
            specs = specs_of(tensors)
            if problem := incoming.problem(neighbours, name, target, specs):
                raise MismatchError(problem)
            hop.received[target] = incoming.allocate(specs, tensors[0].device).tensors
            for buffer, x in zip(hop.received[target], tensors, strict=True):
                buffer.detach().copy_(x.detach())
                copied += 2 * x.nbytes
    return copied


def _post_with_headers(
    hop: Hop,
    neighbours: Neighbours,
    name: str,
    sends: dict[str, list[Tensor]],
    messages: dict[str, Message],
    receives: dict[str, Incoming],
    device: torch.device,
    batched: bool,
) -> None:
    """Headers ahead of the messages; on the CPU, where a send occupies no stream, each message follows its header."""
    directions = neighbours.directions[bool(batched)]

    def start(key: str) -> None:
        if device.type == "cpu" and (each := messages.pop(key)).wire.numel():
            hop.posted[key] = post_one(directions[key], name, each.wire)

    contents = {key: specs_of(tensors) for key, tensors in sends.items()}
    if _check.value:
        hop.checked = CheckedHop(neighbours, name, contents_of(contents, receives))
        hop.note(next(iter((*sends, *receives)), ""), hop.checked.earlier())
        for key in sends:
            hop.meet(key)
    announcements = header.exchange_headers(
        neighbours, name, contents, tuple(receives), device, hop.headers, start, hop.meet
    )
    while True:
        try:
            key, announced = next(announcements, ("", None))
        except PeerError as error:
            hop.explain(error)
        if announced is None:
            break
        buffers, problem = receives[key].allocate_from_header(neighbours, name, key, announced, device)
        if problem or hop.checked is not None:
            hop.note(key, problem)
            hop.compare(key)
        hop.received[key], messages[key] = buffers.tensors, buffers
        start(key)
    if messages:
        _post(hop, neighbours, name, messages, batched)
