"""Drawn bytes and texts that come from outside: headers of messages, tables, flight records, variables."""

import json
import math
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fuzz_calls import named, problem_of
from hostile import spoiled
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from table_cases import mutated, outcomes_of

from tritoncomm import parsing, variables
from tritoncomm.debug import story, trace
from tritoncomm.errors import MismatchError
from tritoncomm.p2p import header
from tritoncomm.p2p.message import Incoming

__all__ = [
    "ODD_SIZES", "check_records", "check_table", "check_variable", "check_words", "records", "tables_of",
    "variables_of", "words",
]  # fmt: skip

ODD_SIZES = st.sampled_from(
    [torch.tensor([2, 2]), torch.ones(2), torch.tensor(2), np.array([2, 2]), np.ones(2), range(2), (4, 0), {2: 2}, "22"]
)
"""Split sizes that are not a list."""
_INTS = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**20, 2**31, 2**48, 2**62, 2**63 - 1, -(2**63)]),
    st.integers(-(2**63), 2**63 - 1),
)  # fmt: skip


# ---- headers ----


@st.composite
def words(draw: Any) -> list[int]:
    """The words of a header with something wrong: contents that nobody has, other words, or another length."""
    codes, sizes = st.one_of(st.integers(0, len(header._DTYPES)), _INTS), st.one_of(st.integers(0, 9), _INTS)
    body: list[int] = []
    count = draw(st.integers(0, 9))
    for _ in range(count):
        shape = draw(st.lists(sizes, max_size=draw(st.sampled_from([2, 5, 70]))))
        body += [draw(codes), draw(mostly_right(len(shape))), *shape]
    made = [draw(mostly_right(header._MAGIC)), draw(mostly_right(len(body) + 3)), draw(mostly_right(count)), *body]
    made += [draw(mostly_right(0))] * (header.WORDS - len(made))
    for at in draw(st.lists(st.integers(0, len(made) - 1), max_size=draw(st.sampled_from([0, 0, 2])))):
        made[at] = draw(_INTS)
    return made[: draw(mostly_right(len(made)))] if draw(st.booleans()) else made


def mostly_right(right: int) -> SearchStrategy[int]:
    """``right`` in most draws."""
    return st.one_of(st.just(right), st.just(right), st.just(right), st.just(right), _INTS)


class _Neighbours:
    """A stage that gets its header from ``recv_header``'s transport."""

    def __init__(self) -> None:
        self.directions = {True: {"recv_prev": None}}

    def peer(self, key: str) -> int:
        return 1

    def __str__(self) -> str:
        return "rank 0 of 2"


def check_words(case: list[int]) -> None:
    """A header is refused by name, or is what would be written in the same words; memory only for what is right."""
    sent = list(case)

    def arrive(neighbours: Any, name: str, wires: dict[str, torch.Tensor], batched: bool) -> None:
        (buffer,) = wires.values()
        assert buffer.nbytes <= 8 * header.MAX_WORDS
        part = (sent + [0] * buffer.numel())[: buffer.numel()]
        del sent[: buffer.numel()]
        buffer.copy_(torch.tensor(part, dtype=torch.int64))

    for read in (header.decode, header.length):
        with suppress(MismatchError):
            read(case)
    neighbours: Any = _Neighbours()
    try:
        with mock.patch.object(header, "post_and_wait", arrive):
            specs = header.recv_header(neighbours, "recv_forward", "recv_prev")
    except MismatchError:
        return
    assert header.encode(specs).tolist()[: len(case)] == case[: header.encode(specs).numel()]
    for incoming in (
        Incoming(None, torch.float32, len(specs), False),
        Incoming((((2, 3), torch.float32),), torch.float32),
        Incoming(specs, None, len(specs), False),
    ):
        if sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs) > 2**26 and incoming.specs == specs:
            continue  # what is announced as expected is allocated, whatever it takes
        try:
            _, tensors, _ = incoming.allocate_from_header(neighbours, "f", "recv_prev", specs, torch.device("cpu"))
        except MismatchError:
            continue
        assert [(tuple(x.shape), x.dtype) for x in tensors] == list(specs)


# ---- files ----


def tables_of() -> SearchStrategy[bytes]:
    """Tuned tables with something wrong."""
    return st.integers(0, 2**32).map(lambda number: mutated(random.Random(number)))


def check_table(case: bytes) -> None:
    assert list(outcomes_of(case))


def _call(count: int, **changes: Any) -> dict[str, Any]:
    call = {
        "number": count, "name": "all_gather_dim", "kind": "all_gather", "group": "0", "count": count, "shape": [4, 8],
        "dtype": "float32", "arguments": {"dim": 0, "sizes": None}, "path": "view", "bytes_copied": 0, "bytes_sent": 64,
        "start": 1000 * count, "end": 1000 * count + 500, "thread": 7, "file": "train.py", "line": 3, "error": "",
    }  # fmt: skip
    return call | changes


def _record(rank: int) -> dict[str, Any]:
    """What a rank wrote that stands in a call of its own."""
    transfers = [[("send_next", "recv_prev")[rank], 1 - rank, [[[4, 8], ("float32", None)[rank]]]]]
    hop = {"kind": "hop", "arguments": {"send": "", "receive": "", "transfers": transfers}}
    calls = [_call(1), _call(2), _call(3, name="send_forward", **hop)]
    calls.append(_call(4, end=0, name=("all_gather_dim", "split_dim")[rank], error="PeerError: gone"))
    calls.append(_call(5, end=0, name="recv_forward", **hop))
    return {
        "format": trace.FORMAT, "rank": rank, "world": 3, "host": "node", "pid": 1, "time": 10**6, "reason": "dump()",
        "groups": {"0": [0, 1, 2]}, "counts": {"0": 5 - rank}, "calls": calls,
    }  # fmt: skip


def records() -> SearchStrategy[list[bytes]]:
    """The flight records of two ranks, one or both with something wrong."""
    names = ("rank", "calls", "group", "count", "groups", "arguments", "transfers")

    def made(numbers: tuple[int, int], one: bool) -> list[bytes]:
        first, second = (spoiled(_record(rank), random.Random(n), names) for rank, n in enumerate(numbers))
        return [first, json.dumps(_record(1)).encode() if one else second]

    return st.builds(made, st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)), st.booleans())


def check_records(case: list[bytes]) -> None:
    """Records are refused by name, or give a story, a trace and dumps."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for rank, text in enumerate(case):
            (Path(folder) / f"tritoncomm-flight-{rank}.json").write_bytes(text)
        _named_only(lambda: _read_all(folder))


def _read_all(folder: str) -> None:
    read = trace.read([folder])
    assert all(isinstance(line, str) for line in story.story(read))
    perfetto = Path(folder) / "trace"
    trace.write_perfetto(read, perfetto)
    json.loads(perfetto.read_text())


def _named_only(call: Callable[[], Any], *documented: type[Exception]) -> Any:
    """The result of a call, or None where it is refused by name."""
    try:
        return call()
    except documented:
        return None
    except Exception as error:
        if not named(error):
            raise AssertionError(problem_of(error)) from error
        return None


# ---- texts ----


def variables_of() -> SearchStrategy[tuple[str, str]]:
    """Variables of the environment, and arguments of commands."""
    parts = st.sampled_from(
        ["hash", ":", "1", "0", "-", "off", "on", "/tmp", "x", ",", " ", "²", "٣", "9" * 5000, "fp32"]
    )
    text = st.one_of(st.lists(parts, max_size=4).map("".join), st.text(max_size=8))
    return st.tuples(st.sampled_from([*_READERS]), text.filter(lambda each: "\0" not in each))


_READERS: dict[str, Callable[[str], Any]] = {
    "hash": lambda text: variables.hash_interval(text),
    "check": lambda text: variables.set_check(text),
    "flight": lambda text: variables.flight_of(text),
    "dtype": lambda text: parsing.parse_dtype(text),
    "ints": lambda text: parsing.parse_ints(text, "--shape", 0),
}


def check_variable(case: tuple[str, str]) -> None:
    """A text sets something, or is refused as documented; a variable sets something whatever it is."""
    reader, text = case
    before = {name: os.environ.get(name) for name in (variables.CHECK.name,)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            refusals = (ValueError,) if reader in ("check", "dtype", "ints") else ()
            value = _named_only(lambda: _READERS[reader](text), *refusals)
        if reader == "hash":
            assert type(value) is int, value
            assert 0 <= value < 2**63, value
        if reader == "flight":
            assert 0 <= value[0] < 2**63, value
    finally:
        variables.set_check(False)
        assert before == {name: os.environ.get(name) for name in before}
