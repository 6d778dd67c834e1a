"""Memory of tables: none is allocated in a capture, what a graph reads stays, what nothing needs goes."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from captures import CapturingDevice
from torch import Tensor
from tritoncomm_kernels import device_table
from tritoncomm_kernels.device_table import Table

STREAM = 1


@pytest.fixture
def gpu() -> Iterator[CapturingDevice]:
    device = CapturingDevice()
    with device.current():
        yield device


def table(first: int, count: int) -> Table:
    return Table(np.arange(first, first + count), 0)


def read(each: Table, into: Tensor) -> Tensor:
    return into.copy_(each.on(STREAM))


def replayed(gpu: CapturingDevice, call: Any) -> Tensor:
    out = gpu.capture(call)
    for _ in range(3):  # for which slabs without tables go
        read(table(0, 1 << 16), torch.empty(1 << 16, dtype=torch.int64))
    for _ in range(2):
        out.zero_()
        gpu.replay()
    return out


def captured(tables: list[Table], count: int) -> Tensor:
    out = torch.empty(len(tables), count, dtype=torch.int64)
    for row, each in zip(out, tables, strict=True):
        row.copy_(each.on(STREAM))
    return out


@pytest.mark.parametrize(
    ("warm", "many", "count", "pinned"),
    [(0, 3, 40, 0), (2, 3, 40, 3), (2, 40, 4096, 16), (2, 2, 1 << 17, 0)],
    ids=["first-use", "reserve", "more-than-the-reserve", "one-that-is-too-long"],
)
def test_tables_of_a_capture(gpu: CapturingDevice, warm: int, many: int, count: int, pinned: int) -> None:
    """They read the same bytes in every replay, whatever else is copied before; nothing is pinned for them."""
    for i in range(warm):
        read(table(i, (device_table._SLAB - device_table._RESERVE) // 8), torch.empty(1 << 16, dtype=torch.int64))
    tables = [table(i, count) for i in range(many)]
    out = replayed(gpu, lambda: captured(tables, count))
    assert torch.equal(out, torch.stack([torch.arange(i, i + count) for i in range(many)]))
    assert gpu.from_slabs == pinned
    after = torch.empty(count, dtype=torch.int64)
    assert torch.equal(read(tables[-1], after), torch.arange(many - 1, many - 1 + count)), "a copy of its own"


def test_a_table_that_was_there_before_stays(gpu: CapturingDevice) -> None:
    """The graph has its address: neither dropping it nor making others gives its memory away."""
    out = torch.empty(9, dtype=torch.int64)
    kept = [table(5, 9)]
    read(kept[0], out)
    replayed(gpu, lambda: read(kept.pop(), out))
    assert out.tolist() == [*range(5, 14)]


def test_slabs_go_with_their_tables(gpu: CapturingDevice) -> None:
    """Thousands of layouts, each used and dropped: as many slabs as those that are left need."""
    kept, out = [], torch.empty(5000, dtype=torch.int64)
    for i in range(500):
        each = table(i, 5000)  # 13 in a slab
        read(each, out)
        if i % 100 == 0:
            kept.append(each)
    assert len(device_table._slabs[0]) <= len(kept) + 1
    for each in kept:
        read(each, out)
        assert torch.equal(out, torch.from_numpy(each.content))


def test_slabs_are_allocated_in_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a warm-up asks for in its own thread is its private pool's."""
    threads, streams = [], []
    ordinary = torch.empty

    def empty(nbytes: int, **options: Any) -> Tensor:
        threads.append(threading.get_ident())
        del options["device"]
        options.pop("pin_memory", None)
        return ordinary(nbytes, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: streams.append(stream) or nullcontext())
    stream = SimpleNamespace(cuda_stream=7)
    memory = device_table._allocated(64, 0, stream)  # pyright: ignore[reportArgumentType]
    assert [x.numel() for x in memory] == [64, 64]
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert streams == [stream], "memory that torch takes for this stream's"
