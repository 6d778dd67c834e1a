"""Headers between neighbours: sent ahead of the messages, read in both directions at the same time.

Everything a rank sends is posted before it waits for anything, and two different neighbours are waited for in two
threads: neither keeps the other waiting. Between the same two ranks the order is header, message, header, message,
activation first, whatever calls they are grouped into.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from tritoncomm import groups, record
from tritoncomm.p2p import header
from tritoncomm.p2p.exchange import Line, Posted, post, start
from tritoncomm.p2p.header import WORDS, Contents

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
        wanted = [key for key in keys if key in receives]
        _each(wanted, lambda key: take(key, read(side, name, key)))
    return posted


def _transfer(line: Line, name: str, tensors: dict[str, Tensor]) -> dict[str, Posted]:
    for key, words in tensors.items():
        wire = words.nbytes if key.startswith("send") else 0
        record.add(f"{name}.header", "device" if words.is_cuda else "cpu", 0, wire, 0.0)
    return post(line, name, tensors, True)


def say(line: Line, name: str, key: str, contents: Contents) -> list[Posted]:
    """Tell what follows."""
    words = header.encode(contents)
    record.add(f"{name}.header", "cpu", 0, words.nbytes, 0.0)
    if words.numel() == WORDS:
        return [start(line, name, key, words, True)]
    return [start(line, name, key, part, True) for part in (words[:WORDS], words[WORDS:])]


def read(line: Line, name: str, key: str) -> Contents:
    """Hear what follows."""
    record.add(f"{name}.header", "cpu", 0, 0, 0.0)
    words = torch.empty(WORDS, dtype=torch.int64)
    start(line, name, key, words, True).wait()
    found = words.tolist()
    more = header.length(found) - WORDS
    if more > 0:
        rest = torch.empty(more, dtype=torch.int64)
        start(line, name, key, rest, True).wait()
        found += rest.tolist()
    return header.decode(found)


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
    words = {key: header.encode(sends[key]).to(device) for key in keys if key in sends}
    wanted = [key for key in keys if key in receives]
    first = {key: torch.empty(WORDS, dtype=torch.int64, device=device) for key in wanted}
    posted = _transfer(line, name, {key: x[:WORDS] for key, x in words.items()} | first)
    found: dict[str, list[int]] = {}
    for key in wanted:
        posted[key].wait()
        found[key] = first[key].tolist()
    long = {key: x[WORDS:] for key, x in words.items() if len(x) > WORDS}
    for key in wanted:
        if (more := header.length(found[key]) - WORDS) > 0:
            long[key] = torch.empty(more, dtype=torch.int64, device=device)
    later = _transfer(line, name, long) if long else {}
    for key in wanted:
        if key in later:
            later[key].wait()
            found[key] += long[key].tolist()
        take(key, header.decode(found[key]))
    return [handles[key] for handles in (posted, later) for key in handles if key in sends]


def _each(keys: list[str], call: Callable[[str], None]) -> None:
    """``call`` for each key, at the same time where there are two."""
    if len(keys) < 2:
        for key in keys:
            call(key)
        return
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call(keys[1])
        except BaseException as error:
            failures.append(error)  # raised again below, in the caller's thread

    helper = threading.Thread(target=run, name="tritoncomm-header", daemon=True)
    helper.start()
    try:
        call(keys[0])
    finally:
        helper.join()
    if failures:
        raise failures[0]


def _side(line: Line, device: torch.device) -> Line | None:
    """The same neighbours over a group that carries CPU tensors; None where there is none."""
    if device.type == "cpu" or any(kind.type == "cpu" for kind in line.group._device_types):
        return line
    if "side" not in line.sides:
        line.sides["side"] = _side_group(line)
    return line.sides["side"]


def _side_group(line: Line) -> Line | None:
    for entry in groups.groups.values():
        if entry.group is line.group and entry.cpu_group is not line.group:
            return Line.of(entry.cpu_group, line.prev, line.next)
    return None
