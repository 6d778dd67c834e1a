"""What a message holds, sent ahead of it: number of tensors, shapes, dtypes and requires-grad flags, as int64."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncomm.errors import MismatchError
from tritoncomm.p2p.shapes import Spec, spec_of

__all__ = ["WORDS", "Contents", "decode", "describe_tensors", "encode", "length"]

WORDS = 32
"""Words of the first part of a header; one that does not fit goes on in a second part."""

_MAGIC = 0x74636F6D6D0001  # "tcomm", format 1
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
    """``[magic, words, count, (dtype, requires_grad, dims, sizes...)...]``, padded to ``WORDS``; to be read only."""
    words = [_MAGIC, 0, len(contents.specs)]
    for (shape, dtype), wanted in zip(contents.specs, contents.requires_grad, strict=True):
        words += [_CODES[dtype], int(wanted), len(shape), *shape]
    words[1] = len(words)
    words += [0] * (WORDS - len(words))
    return torch.tensor(words, dtype=torch.int64)


def length(words: Sequence[int]) -> int:
    """Words of the header that begins with ``words``.

    Raises:
        MismatchError: this is no header; the sender sent something else.
    """
    if words[0] != _MAGIC:
        raise MismatchError("the sender sent no header: both sides have to send one (TRITONCOMM_CHECK on all ranks)")
    return int(words[1])


def decode(words: Sequence[int]) -> Contents:
    """The contents that ``encode`` wrote."""
    at, specs, flags = 3, [], []
    for _ in range(words[2]):
        code, wanted, dims = words[at : at + 3]
        at += 3
        dtype = _DTYPES[code]
        if dtype is None:
            raise MismatchError(f"the sender sent a dtype that this torch does not know: {_NAMES.split()[code]}")
        specs.append((tuple(words[at : at + dims]), dtype))
        flags.append(bool(wanted))
        at += dims
    return Contents(tuple(specs), tuple(flags))
