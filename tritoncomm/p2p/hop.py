"""One p2p step: send to and receive from both neighbours. The only exchange path of both APIs.

Most calls move one tensor of known shape each way: those take ``_exchange_plain``, at a fraction of the host time.
Several tensors per neighbour, headers (variable lengths, check mode), single-rank groups and dtypes that no backend
moves take ``_exchange_messages``. Everything that is sent is posted before anything is waited for, and both directions
progress independently, so that a rank never waits for a neighbour that waits for it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritoncomm import record, variables
from tritoncomm.core.backend import special
from tritoncomm.core.ops import path_for
from tritoncomm.core.validation import check_data
from tritoncomm.debug.hops import CheckedHop
from tritoncomm.errors import ArgumentError, MismatchError, PeerError
from tritoncomm.p2p import header, message
from tritoncomm.p2p.message import Incoming, Message
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.p2p.report import begin, contents_of
from tritoncomm.p2p.transport import Posted, keep_alive, post, post_and_wait, post_one

__all__ = ["Hop", "check", "checking", "exchange"]

_check = variables.CHECK

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
        for x in (to_next, to_prev):
            if x is not None:
                _tensors(x, name)  # their shapes are about to be read
        _range = begin(neighbours, name, to_next, to_prev, from_prev, from_next)
    if not (variable or _check.value or neighbours.is_single_rank):
        result = _exchange_plain(
            neighbours, name, to_next, to_prev, from_prev, from_next, dtype, device, batched, wait
        )  # fmt: skip
        if result is not None:
            return result
    sends: dict[str, list[Tensor]] = {}
    receives: dict[str, Incoming] = {}
    for key, x in (("send_next", to_next), ("send_prev", to_prev)):
        if x is not None and (tensors := _tensors(x, name)):
            sends[key] = tensors
            device = tensors[0].device if device is None else device
    for key, x in (("recv_prev", from_prev), ("recv_next", from_next)):
        if x is not None:
            receives[key] = Incoming.of(x, dtype, variable, name)
    device = neighbours.default_device() if device is None else torch.device(device)
    return _exchange_messages(neighbours, name, sends, receives, device, batched, variable, wait)


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
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.is_meta:
            check_data(x, name)
        if x.dtype in special or x.numel() < 2:
            return None  # one element may carry a lazy negative bit
        if x.is_contiguous():
            if not wait:
                x = x.detach()  # the caller may set x.data while a handle is pending
        elif path_for(x) == "torch" and not x.is_neg():
            x, path, copied = x.detach().contiguous(), "torch", copied + 2 * x.nbytes
        else:
            packed = message.pack([x])
            x, path, copied = packed.wire, packed.path, copied + packed.bytes_copied
        tensors[key] = x
        sent += x.nbytes
    before = after = None
    if from_prev is not None or from_next is not None:
        if dtype is None or dtype in special:
            return None
        if device is None:
            device = next(iter(tensors.values())).device if tensors else neighbours.default_device()
        received: list[Any] = []
        for key, expected in (("recv_prev", from_prev), ("recv_next", from_next)):
            if expected is None:
                received.append(None)
                continue
            shape = _plain_shape(expected)
            if shape is None:
                return None
            try:
                x = torch.empty(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)
            except (RuntimeError, TypeError):
                return None  # Incoming names what is wrong with a shape
            tensors[key] = x
            received.append(x if shape is expected else [x])
        before, after = received
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


def _plain_shape(expected: Any) -> Any:
    """The shape, alone or in a list, of one non-empty tensor that is not 0-dim; None for other expectations."""
    is_list = type(expected) is list and len(expected) == 1 and not isinstance(expected[0], int)
    shape = expected[0] if is_list else expected
    kind = type(shape)
    if kind is not torch.Size and kind is not tuple and kind is not list:
        return None
    return shape if shape and isinstance(shape[0], int) and 0 not in shape else None


def _tensors(x: Any, name: str) -> list[Tensor]:
    if not isinstance(x, Tensor | list | tuple):
        raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(x).__name__}")
    tensors = [x] if isinstance(x, Tensor) else list(x)
    for each in tensors:
        if not isinstance(each, Tensor):
            raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(each).__name__}")
        if type(each) is not Tensor or each.layout is not torch.strided or each.is_nested or each.is_meta:
            check_data(each, name)
    return tensors


@dataclass(slots=True, eq=False)
class Hop:
    """A p2p step in flight.

    Attributes:
        posted: the transfers by key.
        headers: the headers sent.
        received: the tensors by key, defined once waited for.
        problems: by key, why a message is refused; raised once it has been transferred.
        checked: in check mode, the comparison with the other ends.
    """

    posted: dict[str, Posted] = field(default_factory=dict)
    headers: list[Posted] = field(default_factory=list)
    received: dict[str, list[Tensor]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    checked: CheckedHop | None = None

    def meet(self, key: str, in_helper: bool = False) -> None:
        """In check mode: see whether the other end of a transfer comes, before it is waited for."""
        if self.checked is not None:
            self.checked.meet(key, in_helper)

    def compare(self, key: str) -> None:
        """In check mode: compare a transfer with what its other end did, and note what is wrong."""
        if self.checked is not None and (problem := self.checked.problem(key)):
            self.problems[key] = f"{self.problems[key]}; {problem}" if key in self.problems else problem

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """In check mode: an error of a transfer says what its other end does instead, where that is known."""
        try:
            yield
        except PeerError as error:
            explained = error if self.checked is None else self.checked.explained(error)
            if explained is error:
                raise
            raise explained from error

    def wait(self) -> None:
        """Wait for every transfer."""
        if self.checked is None:
            self._wait()
            return
        sends = [key for key in ("send_next", "send_prev") if key in self.posted]
        with self.explaining():
            self._wait()
        for key in sends:
            self.compare(key)
        if self.problems:
            raise MismatchError("; ".join(self.problems.values()))

    def _wait(self) -> None:
        for posted in self.posted.values():
            posted.wait()
        for posted in self.headers:
            posted.wait()
        if self.problems and self.checked is None:
            raise MismatchError("; ".join(self.problems.values()))


class _Handle:
    """One transfer of a hop; ``wait()`` raises its mismatch."""

    __slots__ = ("_hop", "_key")

    def __init__(self, hop: Hop, key: str) -> None:
        self._hop, self._key = hop, key

    def wait(self) -> None:
        is_checked_send = self._hop.checked is not None and self._key.startswith("send")
        with self._hop.explaining() if is_checked_send else nullcontext():
            self._hop.posted[self._key].wait()
        if is_checked_send:
            self._hop.compare(self._key)
        if self._key in self._hop.problems:
            raise MismatchError(self._hop.problems[self._key])

    def is_completed(self) -> bool:
        return self._hop.posted[self._key].is_completed()


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
    if neighbours.is_single_rank:
        path, copied = "torch", _copy_to_self(hop, neighbours, name, sends, receives)
    else:
        messages = {key: message.pack(tensors) for key, tensors in sends.items()}
        for each in messages.values():
            path = path if each.path == "view" else each.path
            copied, sent = copied + each.bytes_copied, sent + each.wire.nbytes
        if variable or _check.value:
            _post_with_headers(hop, neighbours, name, sends, messages, receives, device, batched)
        else:
            buffers = {key: each.allocate(each.specs, device) for key, each in receives.items() if each.specs}
            hop.received = {key: each.tensors for key, each in buffers.items()}
            _post(hop, neighbours, name, messages | buffers, batched)
    handles: Any = None if hop.posted else {}
    if wait:
        hop.wait()
    else:
        keep_alive((*hop.headers, *hop.posted.values()))
        handles = {key: _Handle(hop, key) for key in hop.posted}
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
            specs = header.describe_tensors(tensors).specs
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

    contents = {key: header.describe_tensors(tensors) for key, tensors in sends.items()}
    if _check.value:
        hop.checked = CheckedHop(neighbours, name, contents_of(contents, receives))
        for key in sends:
            hop.meet(key)
    announcements = header.exchange_headers(
        neighbours, name, contents, tuple(receives), device, hop.headers, start, hop.meet
    )
    while True:
        with hop.explaining():
            key, announced = next(announcements, ("", None))
        if announced is None:
            break
        buffers, problem = receives[key].allocate_from_header(neighbours, name, key, announced.specs, device)
        if problem:
            hop.problems[key] = problem
        hop.compare(key)
        hop.received[key], messages[key] = buffers.tensors, buffers
        start(key)
    if messages:
        _post(hop, neighbours, name, messages, batched)
