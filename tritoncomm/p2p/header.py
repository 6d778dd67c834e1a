"""The header of a message, sent ahead of it: number of tensors, shapes, dtypes and requires-grad flags, as int64.

Nothing in a received header is believed: counts and sizes are bounded before they are used, there is one way to write
the same contents, and a checksum shows a header that is none.
"""

import math
import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncomm.errors import MismatchError, UnsupportedError
from tritoncomm.p2p.shapes import Spec, spec_of

__all__ = ["MAX_DIMS", "MAX_WORDS", "WORDS", "Contents", "decode", "describe_tensors", "encode", "length"]

WORDS = 32
"""Words of the first part of a header; one that does not fit goes on in a second part."""
MAX_WORDS = 1 << 20
"""Words of the longest header, 8 MiB."""
MAX_DIMS = 64
"""Dims of a tensor."""

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
    """What ``tensors`` are."""
    return Contents(tuple([spec_of(x) for x in tensors]), tuple([x.requires_grad for x in tensors]))


@lru_cache(maxsize=1024)
def encode(contents: Contents) -> Tensor:
    """``[magic, words, checksum, count, (dtype, requires_grad, dims, sizes...)...]``, padded to ``WORDS``; read-only.

    Raises:
        UnsupportedError: a dtype, a number of dims or a number of tensors that no header holds.
    """
    count = _FIXED + sum([_PER_TENSOR + len(shape) for shape, _ in contents.specs])
    if count > MAX_WORDS:
        raise UnsupportedError(
            f"a header cannot announce {len(contents.specs)} tensors: {count} words, {MAX_WORDS} fit"
        )
    words = [_MAGIC, count, 0, len(contents.specs)]
    for (shape, dtype), wanted in zip(contents.specs, contents.requires_grad, strict=True):
        if dtype not in _CODES:
            raise UnsupportedError(f"a header cannot announce tensors of {dtype}")
        if len(shape) > MAX_DIMS:
            raise UnsupportedError(f"a header cannot announce a tensor of {len(shape)} dims, only up to {MAX_DIMS}")
        if not _is_possible(shape):
            raise UnsupportedError(f"a header cannot announce the shape {list(shape)}: its bytes overflow 64 bits")
        words += [_CODES[dtype], int(wanted), len(shape), *shape]
    words[2] = _checksum(words)
    words += [0] * (WORDS - count)
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _checksum(words: Sequence[int]) -> int:
    return zlib.crc32(array("q", words[3:]), words[1])


def length(words: Sequence[int]) -> int:
    """Words of the header that begins with ``words``.

    Raises:
        MismatchError: this is no header, or a longer one than there are.
    """
    if len(words) < _FIXED or words[0] != _MAGIC:
        raise MismatchError("no header came first: both sides have to send one (TRITONCOMM_CHECK on all ranks)")
    if not _FIXED <= words[1] <= MAX_WORDS:
        raise MismatchError(f"a header of {words[1]} words came, {_FIXED} to {MAX_WORDS} are possible")
    return words[1]


def decode(words: Sequence[int]) -> Contents:
    """The contents that ``encode`` wrote.

    Args:
        words: all of the header, padding included.

    Raises:
        MismatchError: ``encode`` did not write this.
    """
    return _decode_known(tuple(words)) if len(words) == WORDS else _decode(words)


def _decode(words: Sequence[int]) -> Contents:
    end = length(words)
    if len(words) != max(end, WORDS) or any(words[end:]):
        raise MismatchError(f"a header of {end} words came in {len(words)}, or with something behind it")
    if words[2] != _checksum(words[:end]):
        raise MismatchError("a damaged header came: its checksum is wrong")
    count, at = words[3], _FIXED
    if not 0 <= count <= (end - _FIXED) // _PER_TENSOR:
        raise MismatchError(f"a header of {end} words cannot announce {count} tensors")
    specs, flags = [], []
    for i in range(count):
        if at + _PER_TENSOR > end:
            raise MismatchError(f"a header ends before tensor {i} of {count}")
        code, wanted, dims = words[at : at + _PER_TENSOR]
        at += _PER_TENSOR + dims
        if not 0 <= dims <= MAX_DIMS or at > end:
            raise MismatchError(f"a header announces {dims} dims for tensor {i}, which it does not hold")
        specs.append((_shape(words[at - dims : at], i), _dtype(code, i)))
        if wanted not in (0, 1):
            raise MismatchError(f"a header has the requires-grad flag {wanted} for tensor {i}")
        flags.append(bool(wanted))
    if at != end:
        raise MismatchError(f"a header of {end} words describes {count} tensors in {at}")
    return Contents(tuple(specs), tuple(flags))


_decode_known = lru_cache(maxsize=1024)(_decode)  # short headers only: a long one is no key for a cache


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
    """Whether strides and bytes of such a tensor fit in 64 bits, whatever its dtype."""
    smallest = min(sizes, default=1)
    if smallest <= 0:
        sizes = [size for size in sizes if size]
    return smallest >= 0 and _MAX_ITEM * math.prod(sizes) <= _MAX_BYTES
