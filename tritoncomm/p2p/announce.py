"""Headers between neighbours: sent ahead of the messages, read in both directions at the same time.

Everything a rank sends is posted before it waits for anything, and two different neighbours are waited for in two
threads: neither keeps the other waiting. These threads do nothing else. What a header leads to (memory above all) is
done in the caller's thread, because a thread has a current device, a current stream and a grad mode of its own.
Between the same two ranks the order is header, message, header, message, activation first, whatever calls they are
grouped into.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import groups, record
from tritoncomm.errors import MismatchError, UnsupportedError
from tritoncomm.p2p import header
from tritoncomm.p2p.header import WORDS, Contents
from tritoncomm.p2p.neighbours import Line
from tritoncomm.p2p.transport import Posted, post, start

__all__ = ["announce", "read", "say"]

_ACTIVATION_FIRST = (("send_next", "recv_prev"), ("send_prev", "recv_next"))
_EVERYTHING = (("send_prev", "recv_prev", "send_next", "recv_next"),)


def announce(
    line: Line,
    name: str,
    sends: dict[str, Contents],
    receives: tuple[str, ...],
    device: torch.device | str,
    sent: Callable[[str], None],
    take: Callable[[str, Contents], None],
) -> list[Posted]:
    """Exchange headers: ``sent(key)`` follows each one posted, ``take(key, contents)`` each one read.

    Returns:
        The headers sent, to be waited for after the messages.
    """
    rounds = _ACTIVATION_FIRST if line.prev == line.next else _EVERYTHING
    side = _side(line, torch.device(device))
    if side is None:
        return [handle for keys in rounds for handle in _on_device(line, name, keys, sends, receives, device, take)]
    posted: list[Posted] = []
    for key in (key for keys in rounds for key in keys if key in sends):
        posted += say(side, name, key, sends[key])
        sent(key)
    for keys in rounds:
        _read_each(side, name, [key for key in keys if key in receives], take)
    return posted


def _transfer(line: Line, name: str, tensors: dict[str, Tensor]) -> dict[str, Posted]:
    for key, words in tensors.items():
        wire = words.nbytes if key.startswith("send") else 0
        record.add(f"{name}.header", "device" if words.is_cuda else "cpu", 0, wire, 0.0)
    return post(line, name, tensors, True)


def say(line: Line, name: str, key: str, contents: Contents) -> list[Posted]:
    """Send the header of what follows."""
    words, way = _words(line, name, key, contents), line.ways[True][key]
    record.add(f"{name}.header", "cpu", 0, words.nbytes, 0.0)
    if words.numel() == WORDS:
        return [start(way, name, words)]
    return [start(way, name, part) for part in (words[:WORDS], words[WORDS:])]


def read(line: Line, name: str, key: str) -> Contents:
    """Receive the header of what follows.

    Raises:
        MismatchError: what came is no header.
    """
    record.add(f"{name}.header", "cpu", 0, 0, 0.0)
    way = line.ways[True][key]
    words = torch.empty(WORDS, dtype=torch.int64, device="cpu")
    start(way, name, words).wait()
    values = words.tolist()
    try:
        if (more := header.length(values) - WORDS) > 0:
            rest = torch.empty(more, dtype=torch.int64, device="cpu")
            start(way, name, rest).wait()
            values += rest.tolist()
        return header.decode(values)
    except MismatchError as error:
        raise _refused(line, name, key, error) from None


def _words(line: Line, name: str, key: str, contents: Contents) -> Tensor:
    try:
        return header.encode(contents)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {line} cannot send to rank {line.peer(key)}: {error}") from None


def _checked(line: Line, name: str, key: str, call: Callable[[list[int]], Any], words: list[int]) -> Any:
    try:
        return call(words)
    except MismatchError as error:
        raise _refused(line, name, key, error) from None


def _refused(line: Line, name: str, key: str, error: MismatchError) -> MismatchError:
    return MismatchError(f"{name}: {line} cannot read the header from rank {line.peer(key)}: {error}")


def _on_device(
    line: Line,
    name: str,
    keys: tuple[str, ...],
    sends: dict[str, Contents],
    receives: tuple[str, ...],
    device: torch.device | str,
    take: Callable[[str, Contents], None],
) -> list[Posted]:
    """No group carries CPU tensors: both directions in one batch, and one stream wait per header received."""
    words = {key: _words(line, name, key, sends[key]).to(device) for key in keys if key in sends}
    wanted = [key for key in keys if key in receives]
    first = {key: torch.empty(WORDS, dtype=torch.int64, device=device) for key in wanted}
    posted = _transfer(line, name, {key: x[:WORDS] for key, x in words.items()} | first)
    found: dict[str, list[int]] = {}
    for key in wanted:
        posted[key].wait()
        found[key] = first[key].tolist()
    long = {key: x[WORDS:] for key, x in words.items() if len(x) > WORDS}
    for key in wanted:
        if (more := _checked(line, name, key, header.length, found[key]) - WORDS) > 0:
            long[key] = torch.empty(more, dtype=torch.int64, device=device)
    later = _transfer(line, name, long) if long else {}
    for key in wanted:
        if key in later:
            later[key].wait()
            found[key] += long[key].tolist()
        take(key, _checked(line, name, key, header.decode, found[key]))
    return [handles[key] for handles in (posted, later) for key in handles if key in sends]


def _read_each(line: Line, name: str, keys: list[str], take: Callable[[str, Contents], None]) -> None:
    """``take(key, read(key))`` for each key, in the order in which the headers come."""
    if len(keys) < 2:
        for key in keys:
            take(key, read(line, name, key))
        return
    arrived: SimpleQueue[tuple[str, Contents | BaseException]] = SimpleQueue()

    def run(key: str) -> None:
        try:
            arrived.put((key, read(line, name, key)))
        except BaseException as error:
            arrived.put((key, error))  # raised again below, in the caller's thread

    helpers = [threading.Thread(target=run, args=(key,), name="tritoncomm-header", daemon=True) for key in keys]
    failures: list[BaseException] = []
    for helper in helpers:
        helper.start()
    try:
        for _ in keys:
            key, contents = arrived.get()
            if isinstance(contents, BaseException):
                failures.append(contents)
            else:
                take(key, contents)
    finally:
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]


def _side(line: Line, device: torch.device) -> Line | None:
    """The same neighbours over groups that carry CPU tensors; None where there are none."""
    if device.type == "cpu" or all(map(_moves_cpu, filter(None, (line.group, line.outside)))):
        return line
    if "side" not in line.sides:
        line.sides["side"] = _side_of(line)
    return line.sides["side"]


def _side_of(line: Line) -> Line | None:
    group, outside = _twin(line.group), line.outside and _twin(line.outside)
    if group is None or (line.outside is not None and outside is None):
        return None
    return Line.of(group, line.prev, line.next, outside)


def _moves_cpu(group: ProcessGroup) -> bool:
    return any(kind.type == "cpu" for kind in group._device_types)


def _twin(group: ProcessGroup) -> ProcessGroup | None:
    """The group of the same ranks that carries CPU tensors."""
    for entry in groups.groups.values():
        if entry.group is group and _moves_cpu(entry.cpu_group):
            return entry.cpu_group
    return None
