"""Header: a message of int64 words that announces the shapes and dtypes of the tensors in the message after it.

Its words are ``[magic, length, tensors, (dtype code, dims, sizes...) of each tensor]``, then zeros up to ``WORDS``. A
longer header is two messages: the first has ``WORDS`` words. A receiver bounds each count and size before use.

Each rank posts all its sends before it waits for a header. Between the same two ranks the order is header, message,
header, message, activations first, however calls group the transfers.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from tritoncomm import groups, record
from tritoncomm.core.memory import empty_on
from tritoncomm.errors import MismatchError, UnsupportedError
from tritoncomm.p2p.message import Specs
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.p2p.transport import Posted, post, post_and_wait, post_one

__all__ = ["MAX_DIMS", "MAX_WORDS", "WORDS", "decode", "encode", "exchange_headers", "length", "recv_header"]

WORDS = 32
"""Words of the first message of a header."""
MAX_WORDS = 1 << 20
"""Words of the longest header (8 MiB)."""
MAX_DIMS = 64
"""Dims of a tensor."""

_cpu = torch.device("cpu")
_ACTIVATION_FIRST = (("send_next", "recv_prev"), ("send_prev", "recv_next"))
_ALL = (("send_prev", "recv_prev", "send_next", "recv_next"),)
_MAGIC = 0x74636F6D6D0003  # "tcomm", format 3
_FIXED, _PER_TENSOR = 3, 2  # words ahead of the tensors, and of a tensor ahead of its sizes
_MAX_BYTES, _MAX_ITEM = 2**63 - 1, 16
_NAMES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip
_DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _NAMES]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}

_Parsed = TypeVar("_Parsed")


@lru_cache(maxsize=256)  # 10 us of the 80 us of a step with headers
def encode(specs: Specs) -> Tensor:
    """Encode specs as the int64 words of a header, in CPU memory, with zeros up to ``WORDS`` words."""
    count = _FIXED + sum([_PER_TENSOR + len(shape) for shape, _ in specs])
    if count > MAX_WORDS:
        raise UnsupportedError(f"a header cannot announce {len(specs)} tensors: {count} words, {MAX_WORDS} fit")
    words = [_MAGIC, count, len(specs)]
    for shape, dtype in specs:
        if dtype not in _CODES:
            raise UnsupportedError(f"a header cannot announce tensors of {dtype}")
        if len(shape) > MAX_DIMS:
            raise UnsupportedError(f"a header cannot announce a tensor of {len(shape)} dims, only up to {MAX_DIMS}")
        if not _is_possible(shape):
            raise UnsupportedError(f"a header cannot announce the shape {list(shape)}: its bytes overflow 64 bits")
        words += [_CODES[dtype], len(shape), *shape]
    words += [0] * (WORDS - count)  # none in a longer header, whose words from WORDS on are a message of their own
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def length(words: Sequence[int]) -> int:
    """Return the number of words of a header, padding excluded, as the first words of the header state it."""
    if len(words) < _FIXED or words[0] != _MAGIC:
        raise MismatchError("no header came first: both sides have to send one (TRITONCOMM_CHECK on all ranks)")
    if not _FIXED <= words[1] <= MAX_WORDS:
        raise MismatchError(f"a header of {words[1]} words arrived, {_FIXED} to {MAX_WORDS} are possible")
    return words[1]


def decode(words: Sequence[int]) -> Specs:
    """Decode all words of a header, padding included, into the shapes and dtypes that ``encode`` wrote."""
    end, position = length(words), _FIXED  # words of the header, and how many of them are decoded
    if len(words) != max(end, WORDS) or any(words[end:]):
        raise MismatchError(f"a header of {end} words arrived in {len(words)}, or with non-zero padding")
    count = words[2]
    if not 0 <= count <= (end - _FIXED) // _PER_TENSOR:
        raise MismatchError(f"a header of {end} words cannot announce {count} tensors")
    specs = []
    for i in range(count):
        if position + _PER_TENSOR > end:
            raise MismatchError(f"a header ends before tensor {i} of {count}")
        code, dims = words[position : position + _PER_TENSOR]
        first = position + _PER_TENSOR
        if not 0 <= dims <= MAX_DIMS or first + dims > end:
            raise MismatchError(f"a header announces {dims} dims for tensor {i}, more than it has words for")
        position = first + dims
        shape = tuple(words[first:position])
        if not _is_possible(shape):
            raise MismatchError(f"a header announces the shape {list(shape)} for tensor {i}, which no tensor has")
        dtype = _DTYPES[code] if 0 <= code < len(_DTYPES) else None
        if dtype is None:
            dtype_name = _NAMES[code] if 0 <= code < len(_NAMES) else f"number {code}"
            raise MismatchError(
                f"a header announces a dtype for tensor {i} that this torch does not know: {dtype_name}"
            )
        specs.append((shape, dtype))
    if position != end:
        raise MismatchError(f"a header of {end} words describes {count} tensors in {position}")
    return tuple(specs)


def _is_possible(shape: Sequence[int]) -> bool:
    """Whether no size is negative, and strides and bytes of a tensor of this shape fit in 64 bits for any dtype."""
    smallest = min(shape, default=1)
    sizes = shape if smallest > 0 else [size for size in shape if size]
    return smallest >= 0 and _MAX_ITEM * math.prod(sizes) <= _MAX_BYTES


def exchange_headers(
    neighbours: Neighbours,
    name: str,
    sends: dict[str, Specs],
    receives: Sequence[str],
    device: torch.device,
    posted: list[Posted],
    on_sent: Callable[[str], None] = lambda key: None,
    before_recv: Callable[..., None] = lambda key, in_helper=False: None,
) -> Iterator[tuple[str, Specs]]:
    """Send headers to the neighbours and receive theirs; yield (key, specs) as each arrives.

    Args:
        receives: keys of the expected headers, ``recv_prev`` before ``recv_next``.
        device: of the tensors that follow. Headers are CPU tensors where a group carries them, else on this device.
        posted: a list to which the sends of headers in flight are appended; the caller waits for them.
        on_sent: called with the key after each header is posted, where headers are CPU tensors.
        before_recv: called with the key before each wait for a header, in a helper thread with ``in_helper=True``.
    """
    # This is a generator: nothing is sent before the first next().
    has_one_peer, keys = neighbours.prev == neighbours.next, (*sends, *receives)
    link, on_cpu = _cpu_link(neighbours, device, keys)  # the keys whose headers are CPU tensors: ``keys`` itself if all
    for key, direction in link.directions[True].items():  # in the order of a batch
        if key not in sends or key not in on_cpu:
            continue
        words = _encode_for(neighbours, name, key, sends[key])
        record.add(f"{name}.header", "cpu", 0, words.nbytes, 0.0)
        for part in (words,) if words.numel() == WORDS else (words[:WORDS], words[WORDS:]):
            posted.append(post_one(direction, name, part))
        on_sent(key)
    if on_cpu is not keys:
        # With one peer the header and the message of the activations come before the header of the gradients.
        for batch in _ACTIVATION_FIRST if has_one_peer else _ALL:
            if on_device := tuple(key for key in batch if key not in on_cpu and key in keys):
                yield from _exchange_on_device(
                    neighbours, name, on_device, sends, receives, device, posted, before_recv
                )
        receives = [key for key in receives if key in on_cpu]
    if len(receives) == 2 and not has_one_peer:
        yield from _recv_both(link, name, receives, before_recv)
        return
    for key in receives:
        before_recv(key)
        yield key, recv_header(link, name, key)


def recv_header(neighbours: Neighbours, name: str, key: str) -> Specs:
    """Wait for a header in CPU memory from the neighbour of ``key``; return the shapes and dtypes that it announces."""
    record.add(f"{name}.header", "cpu", 0, 0, 0.0)
    first = empty_on(_cpu, (WORDS,), torch.int64)
    post_and_wait(neighbours, name, {key: first}, batched=True)
    words = first.tolist()
    if words[1] > WORDS:  # a long header, or none, which ``length`` rejects
        rest = empty_on(_cpu, (_parse(neighbours, name, key, length, words) - WORDS,), torch.int64)
        post_and_wait(neighbours, name, {key: rest}, batched=True)
        words += rest.tolist()
    return _parse(neighbours, name, key, decode, words)


def _encode_for(neighbours: Neighbours, name: str, key: str, specs: Specs) -> Tensor:
    """Return ``encode(specs)``, a header to the peer of ``key``; an error names the stage and the receiver."""
    try:
        return encode(specs)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {neighbours} cannot send to rank {neighbours.peer(key)}: {error}") from None


def _parse(
    neighbours: Neighbours, name: str, key: str, parse: Callable[[list[int]], _Parsed], words: list[int]
) -> _Parsed:
    """Return ``parse(words)`` of a header from the peer of ``key``; an error names the stage and the sender."""
    try:
        return parse(words)
    except MismatchError as error:
        text = f"{name}: {neighbours} cannot read the header from rank {neighbours.peer(key)}: {error}"
        raise MismatchError(text) from None


def _post_on_device(neighbours: Neighbours, name: str, parts: dict[str, Tensor]) -> dict[str, Posted]:
    """Count words of headers that lie on a device, and start their transfers as one batch; return these by key."""
    for key, words in parts.items():
        sent = words.nbytes if key.startswith("send") else 0
        record.add(f"{name}.header", "device" if words.is_cuda else "cpu", 0, sent, 0.0)
    return post(neighbours, name, parts, batched=True)


def _exchange_on_device(
    neighbours: Neighbours,
    name: str,
    keys: tuple[str, ...],
    sends: dict[str, Specs],
    receives: Sequence[str],
    device: torch.device,
    posted: list[Posted],
    before_recv: Callable[..., None],
) -> Iterator[tuple[str, Specs]]:
    """Exchange the headers of ``keys`` on ``device``, where groups carry no CPU tensors; yield (key, specs).

    The first ``WORDS`` words of all headers are one batch, and what longer ones have behind these another.
    """
    words = {key: _encode_for(neighbours, name, key, sends[key]).to(device) for key in keys if key in sends}
    buffers = {key: torch.empty(WORDS, dtype=torch.int64, device=device) for key in keys if key in receives}
    first = _post_on_device(neighbours, name, {key: x[:WORDS] for key, x in words.items()} | buffers)
    further = {key: x[WORDS:] for key, x in words.items() if len(x) > WORDS}
    arrived: dict[str, list[int]] = {}
    for key, buffer in buffers.items():
        before_recv(key)
        first[key].wait()
        # Each received header costs one wait for the stream, here.
        arrived[key] = buffer.tolist()
        num_words = _parse(neighbours, name, key, length, arrived[key])
        if num_words > WORDS:
            further[key] = torch.empty(num_words - WORDS, dtype=torch.int64, device=device)
    later = _post_on_device(neighbours, name, further) if further else {}
    posted += [handles[key] for handles in (first, later) for key in handles if key in sends]
    for key in buffers:
        if key in later:
            later[key].wait()
            arrived[key] += further[key].tolist()
        yield key, _parse(neighbours, name, key, decode, arrived[key])


def _recv_both(
    neighbours: Neighbours, name: str, keys: Sequence[str], before_recv: Callable[..., None]
) -> Iterator[tuple[str, Specs]]:
    """Receive the headers of two neighbours in a thread each; yield (key, specs) in the order of arrival."""
    # A neighbour's message has to be received as soon as its header is there, or stages wait for each other in a
    # circle. Gloo has no call that tells which of two receives completed first, so each has a thread. The threads do
    # nothing else, because a device, a stream and a grad mode belong to the caller's thread.
    arrivals: SimpleQueue[tuple[str, Specs | BaseException]] = SimpleQueue()

    def receive(key: str) -> None:
        """Put the header of ``key``, or the error of its receive, into the queue of arrivals."""
        try:
            before_recv(key, in_helper=True)
            arrivals.put((key, recv_header(neighbours, name, key)))
        except BaseException as error:
            arrivals.put((key, error))

    threads = [threading.Thread(target=receive, args=(key,), name="tritoncomm-header", daemon=True) for key in keys]
    failures: list[BaseException] = []
    for thread in threads:
        thread.start()
    try:
        for _ in keys:
            key, specs = arrivals.get()
            if isinstance(specs, BaseException):
                failures.append(specs)
            else:
                yield key, specs
    finally:
        for thread in threads:
            thread.join()
    # An error of a thread is raised after the other header has arrived.
    if failures:
        raise failures[0]


def _cpu_link(
    neighbours: Neighbours, device: torch.device, keys: Collection[str]
) -> tuple[Neighbours, Collection[str]]:
    """Return neighbours over groups that carry CPU tensors, and the keys of ``keys`` that are served over them."""
    group, outside = neighbours.group(), neighbours.outside and neighbours.outside()
    if device.type == "cpu" or all(_cpu in each._device_types for each in (group, outside) if each is not None):
        return neighbours, keys
    # The CPU group of a pipeline of initialize() serves adjacent stages. All stages make it at their first header, as
    # they make NCCL's communicator at their first batch. Both ends choose identically, from their places on the ring.
    entry = next((entry for entry in groups.groups.values() if entry.group is group), None)
    near = neighbours.adjacent.intersection(keys)
    if entry is None or not near:
        return neighbours, ()
    return Neighbours.of(entry.cpu_group, neighbours.prev, neighbours.next, outside), near
