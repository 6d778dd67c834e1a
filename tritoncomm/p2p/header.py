"""Message headers and their exchange: number of tensors, shapes, dtypes and requires-grad flags, as int64.

Received headers are not trusted: counts and sizes are bounded before they are used, the encoding of given contents is
unique, and a checksum detects messages that are not headers.

Every rank posts everything it sends before it waits, and receives the headers of two different neighbours in two
threads, so that neither delays the other. The threads do nothing else: tensors are allocated in the caller's thread,
because a thread has a current device, a current stream and a grad mode of its own. Between the same two ranks the order
is header, message, header, message, activation first, however the transfers are grouped into calls.
"""

import math
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import groups, record
from tritoncomm.core.memory import empty_on
from tritoncomm.errors import MismatchError, UnsupportedError
from tritoncomm.p2p.message import Spec, spec_of
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.p2p.transport import Posted, post, post_one

__all__ = [
    "MAX_DIMS",
    "MAX_WORDS",
    "WORDS",
    "Contents",
    "decode",
    "describe_tensors",
    "encode",
    "exchange_headers",
    "length",
    "recv_header",
    "send_header",
]

WORDS = 32
"""Words of the first part of a header; the rest of a longer one is sent as a second part."""
MAX_WORDS = 1 << 20
"""Words of the longest header (8 MiB)."""
MAX_DIMS = 64
"""Dims of a tensor."""

_cpu = torch.device("cpu")
_ACTIVATION_FIRST = (("send_next", "recv_prev"), ("send_prev", "recv_next"))
_ALL = (("send_prev", "recv_prev", "send_next", "recv_next"),)
_MAGIC = 0x74636F6D6D0002  # "tcomm", format 2
_FIXED, _PER_TENSOR = 4, 3  # words ahead of the tensors, and of a tensor ahead of its sizes
_MAX_BYTES, _MAX_ITEM = 2**63 - 1, 16
_NAMES = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
_DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _NAMES.split()]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


class Contents(NamedTuple):
    """The tensors of a message, without their values."""

    specs: tuple[Spec, ...]
    requires_grad: tuple[bool, ...]


def describe_tensors(tensors: Sequence[Tensor]) -> Contents:
    """Shapes, dtypes and requires-grad flags of ``tensors``."""
    if len(tensors) == 1:
        (x,) = tensors
        return Contents((spec_of(x),), (x.requires_grad,))
    return Contents(tuple([spec_of(x) for x in tensors]), tuple([x.requires_grad for x in tensors]))


@lru_cache(maxsize=1024)
def encode(contents: Contents) -> Tensor:
    """``[magic, words, checksum, count, (dtype, requires_grad, dims, sizes...)...]``, padded to ``WORDS``; read-only.

    Raises:
        UnsupportedError: a dtype, a number of dims or a number of tensors that a header cannot describe.
    """
    count = _FIXED + sum([_PER_TENSOR + len(shape) for shape, _ in contents.specs])
    if count > MAX_WORDS:
        raise UnsupportedError(
            f"a header cannot announce {len(contents.specs)} tensors: {count} words, {MAX_WORDS} fit"
        )
    words = [_MAGIC, count, 0, len(contents.specs)]
    for (shape, dtype), flag in zip(contents.specs, contents.requires_grad, strict=True):
        if dtype not in _CODES:
            raise UnsupportedError(f"a header cannot announce tensors of {dtype}")
        if len(shape) > MAX_DIMS:
            raise UnsupportedError(f"a header cannot announce a tensor of {len(shape)} dims, only up to {MAX_DIMS}")
        if not _is_possible(shape):
            raise UnsupportedError(f"a header cannot announce the shape {list(shape)}: its bytes overflow 64 bits")
        words += [_CODES[dtype], int(flag), len(shape), *shape]
    words[2] = _checksum(words)
    words += [0] * (WORDS - count)
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _checksum(words: Sequence[int]) -> int:
    return zlib.crc32(array("q", words[3:]), words[1])


def length(words: Sequence[int]) -> int:
    """Words of the header that begins with ``words``.

    Raises:
        MismatchError: the words are not a header, or announce one that is too long.
    """
    if len(words) < _FIXED or words[0] != _MAGIC:
        raise MismatchError("no header came first: both sides have to send one (TRITONCOMM_CHECK on all ranks)")
    if not _FIXED <= words[1] <= MAX_WORDS:
        raise MismatchError(f"a header of {words[1]} words arrived, {_FIXED} to {MAX_WORDS} are possible")
    return words[1]


def decode(words: Sequence[int]) -> Contents:
    """The contents that ``encode`` wrote.

    Args:
        words: all of the header, padding included.

    Raises:
        MismatchError: the words were not written by ``encode``.
    """
    return _decode_known(tuple(words)) if len(words) == WORDS else _decode(words)


def _decode(words: Sequence[int]) -> Contents:
    end = length(words)
    if len(words) != max(end, WORDS) or any(words[end:]):
        raise MismatchError(f"a header of {end} words arrived in {len(words)}, or with non-zero padding")
    if words[2] != _checksum(words[:end]):
        raise MismatchError("a damaged header arrived: its checksum is wrong")
    count, at = words[3], _FIXED
    if not 0 <= count <= (end - _FIXED) // _PER_TENSOR:
        raise MismatchError(f"a header of {end} words cannot announce {count} tensors")
    specs, flags = [], []
    for i in range(count):
        if at + _PER_TENSOR > end:
            raise MismatchError(f"a header ends before tensor {i} of {count}")
        code, flag, dims = words[at : at + _PER_TENSOR]
        at += _PER_TENSOR + dims
        if not 0 <= dims <= MAX_DIMS or at > end:
            raise MismatchError(f"a header announces {dims} dims for tensor {i}, more than it has words for")
        specs.append((_shape(words[at - dims : at], i), _dtype(code, i)))
        if flag not in (0, 1):
            raise MismatchError(f"a header has the requires-grad flag {flag} for tensor {i}")
        flags.append(bool(flag))
    if at != end:
        raise MismatchError(f"a header of {end} words describes {count} tensors in {at}")
    return Contents(tuple(specs), tuple(flags))


_decode_known = lru_cache(maxsize=1024)(_decode)  # short headers only: long tuples are slow to hash


def _dtype(code: int, i: int) -> torch.dtype:
    known = 0 <= code < len(_DTYPES)
    dtype = _DTYPES[code] if known else None
    if dtype is None:
        what = _NAMES.split()[code] if known else f"number {code}"
        raise MismatchError(f"a header announces a dtype for tensor {i} that this torch does not know: {what}")
    return dtype


def _shape(sizes: Sequence[int], i: int) -> tuple[int, ...]:
    if not _is_possible(sizes):
        raise MismatchError(f"a header announces the shape {list(sizes)} for tensor {i}, which no tensor has")
    return tuple(sizes)


def _is_possible(sizes: Sequence[int]) -> bool:
    """Whether strides and bytes of such a tensor fit in 64 bits for any dtype."""
    smallest = min(sizes, default=1)
    if smallest <= 0:
        sizes = [size for size in sizes if size]
    return smallest >= 0 and _MAX_ITEM * math.prod(sizes) <= _MAX_BYTES


def exchange_headers(
    neighbours: Neighbours,
    name: str,
    sends: dict[str, Contents],
    receives: Sequence[str],
    device: torch.device,
    posted: list[Posted],
    on_sent: Callable[[str], None] | None = None,
    before_recv: Callable[[str, bool], None] = lambda key, in_helper: None,
) -> Iterator[tuple[str, Contents]]:
    """Send headers and yield the received ones in the order of arrival; nothing is sent before the first ``next()``.

    Args:
        neighbours: of this stage.
        name: the public function, for errors and counters.
        sends: contents by ``send_prev`` and ``send_next``.
        receives: ``recv_prev``, ``recv_next``, in this order.
        device: of the messages. Headers use CPU tensors where a group carries them, else tensors on this device.
        posted: takes the headers sent, to be waited for after the messages.
        on_sent: called after each header is posted, where headers are CPU tensors.
        before_recv: called before a header is received, once those to send are posted; with True in a helper thread.
    """
    shares_peer = neighbours.prev == neighbours.next
    link = _cpu_neighbours(neighbours, device)
    if link is None:
        for keys in _ACTIVATION_FIRST if shares_peer else _ALL:
            yield from _exchange_on_device(neighbours, name, keys, sends, receives, device, posted, before_recv)
        return
    for direction in link.batch:
        key = direction.key
        if key in sends:
            posted += send_header(link, name, key, sends[key])
            if on_sent is not None:
                on_sent(key)
    if len(receives) == 2 and not shares_peer:
        yield from _recv_both(link, name, receives, before_recv)
        return
    for key in receives:
        before_recv(key, False)
        yield key, recv_header(link, name, key)


def send_header(neighbours: Neighbours, name: str, key: str, contents: Contents) -> list[Posted]:
    """Send the header of the message that follows."""
    words, direction = _encode_for(neighbours, name, key, contents), neighbours.directions[True][key]
    record.add(f"{name}.header", "cpu", 0, words.nbytes, 0.0)
    if words.numel() == WORDS:
        return [post_one(direction, name, words)]
    return [post_one(direction, name, part) for part in (words[:WORDS], words[WORDS:])]


def recv_header(neighbours: Neighbours, name: str, key: str) -> Contents:
    """Receive the header of the message that follows.

    Raises:
        MismatchError: a message arrived that is not a header.
    """
    record.add(f"{name}.header", "cpu", 0, 0, 0.0)
    direction = neighbours.directions[True][key]
    words = empty_on(_cpu, (WORDS,), torch.int64)
    post_one(direction, name, words).wait()
    values = words.tolist()
    if values[1] > WORDS and (more := _parse(neighbours, name, key, length, values) - WORDS) > 0:
        rest = torch.empty(more, dtype=torch.int64, device="cpu")
        post_one(direction, name, rest).wait()
        values += rest.tolist()
    return _parse(neighbours, name, key, decode, values)


def _encode_for(neighbours: Neighbours, name: str, key: str, contents: Contents) -> Tensor:
    try:
        return encode(contents)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {neighbours} cannot send to rank {neighbours.peer(key)}: {error}") from None


def _parse(neighbours: Neighbours, name: str, key: str, parse: Callable[[list[int]], Any], words: list[int]) -> Any:
    try:
        return parse(words)
    except MismatchError as error:
        text = f"{name}: {neighbours} cannot read the header from rank {neighbours.peer(key)}: {error}"
        raise MismatchError(text) from None


def _post_on_device(neighbours: Neighbours, name: str, tensors: dict[str, Tensor]) -> dict[str, Posted]:
    for key, words in tensors.items():
        sent = words.nbytes if key.startswith("send") else 0
        record.add(f"{name}.header", "device" if words.is_cuda else "cpu", 0, sent, 0.0)
    return post(neighbours, name, tensors, True)


def _exchange_on_device(
    neighbours: Neighbours,
    name: str,
    keys: tuple[str, ...],
    sends: dict[str, Contents],
    receives: Sequence[str],
    device: torch.device,
    posted: list[Posted],
    before_recv: Callable[[str, bool], None],
) -> Iterator[tuple[str, Contents]]:
    """No group carries CPU tensors: both directions in one batch, and one stream wait per header received."""
    words = {key: _encode_for(neighbours, name, key, sends[key]).to(device) for key in keys if key in sends}
    buffers = {key: torch.empty(WORDS, dtype=torch.int64, device=device) for key in keys if key in receives}
    first = _post_on_device(neighbours, name, {key: x[:WORDS] for key, x in words.items()} | buffers)
    rest = {key: x[WORDS:] for key, x in words.items() if len(x) > WORDS}
    values: dict[str, list[int]] = {}
    for key, buffer in buffers.items():
        before_recv(key, False)
        first[key].wait()
        values[key] = buffer.tolist()
    for key in buffers:
        if (more := _parse(neighbours, name, key, length, values[key]) - WORDS) > 0:
            rest[key] = torch.empty(more, dtype=torch.int64, device=device)
    later = _post_on_device(neighbours, name, rest) if rest else {}
    posted += [handles[key] for handles in (first, later) for key in handles if key in sends]
    for key in buffers:
        if key in later:
            later[key].wait()
            values[key] += rest[key].tolist()
        yield key, _parse(neighbours, name, key, decode, values[key])


def _recv_both(
    neighbours: Neighbours, name: str, keys: Sequence[str], before_recv: Callable[[str, bool], None]
) -> Iterator[tuple[str, Contents]]:
    """``recv_header`` from two neighbours at the same time."""
    arrived: SimpleQueue[tuple[str, Contents | BaseException]] = SimpleQueue()

    def receive(key: str) -> None:
        try:
            before_recv(key, True)
            arrived.put((key, recv_header(neighbours, name, key)))
        except BaseException as error:
            arrived.put((key, error))  # raised again below, in the caller's thread

    threads = [threading.Thread(target=receive, args=(key,), name="tritoncomm-header", daemon=True) for key in keys]
    failures: list[BaseException] = []
    for thread in threads:
        thread.start()
    try:
        for _ in keys:
            key, contents = arrived.get()
            if isinstance(contents, BaseException):
                failures.append(contents)
            else:
                yield key, contents
    finally:
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def _cpu_neighbours(neighbours: Neighbours, device: torch.device) -> Neighbours | None:
    """The same neighbours over groups that carry CPU tensors; None where there are none."""
    if device.type == "cpu":
        return neighbours
    key = "p2p.cpu_neighbours", neighbours
    if key not in groups.derived:
        groups.derived[key] = _find_cpu_neighbours(neighbours)
    return groups.derived[key]


def _find_cpu_neighbours(neighbours: Neighbours) -> Neighbours | None:
    own, outside = neighbours.group(), neighbours.outside and neighbours.outside()
    group, outer = own and _cpu_group(own), outside and _cpu_group(outside)
    if group is None or (outside is not None and outer is None):
        return None
    return Neighbours.of(group, neighbours.prev, neighbours.next, outer)


def _cpu_group(group: ProcessGroup) -> ProcessGroup | None:
    """The group of the same ranks that carries CPU tensors."""
    twins = [entry.cpu_group for entry in groups.groups.values() if entry.group is group]
    return next((each for each in (group, *twins) if torch.device("cpu") in each._device_types), None)
