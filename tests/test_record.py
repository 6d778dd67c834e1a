"""The counters, and the ranges that a profiler sees."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from tritoncomm import ShapeError, collective, mappings, record
from tritoncomm.p2p import P2PCommunicator


def test_add_and_total() -> None:
    record.reset()
    started = record.now()
    record.add("f", "view", 0, 8, started)
    record.add("f", "torch", 16, 8, started)
    record.add("g", "torch", 4, 0, started, calls=0)
    counts = record.counters()
    assert set(counts) == {("f", "view"), ("f", "torch"), ("g", "torch")}
    assert counts["f", "torch"] == record.Count(1, 16, 8)
    both = record.total("f")
    assert (both.calls, both.bytes_copied, both.bytes_sent) == (2, 16, 16)
    assert both.seconds == 0.0
    assert counts["g", "torch"].calls == 0
    record.reset()
    assert record.counters() == {}
    assert record.total("f") == record.Count()


def test_counters_are_a_copy() -> None:
    record.reset()
    record.add("f", "view", 1, 1, record.now())
    record.counters()["f", "view"].calls = 99
    assert record.total("f").calls == 1


def test_recording_sees_only_its_block() -> None:
    record.reset()
    record.add("f", "view", 1, 2, record.now())
    record.add("old", "view", 1, 2, record.now())
    with record.recording() as inside:
        record.add("f", "view", 10, 20, record.now())
        record.add("new", "torch", 3, 4, record.now())
        assert inside == {}
    record.add("f", "view", 5, 5, record.now())
    assert set(inside) == {("f", "view"), ("new", "torch")}
    assert (inside["f", "view"].calls, inside["f", "view"].bytes_copied, inside["f", "view"].bytes_sent) == (1, 10, 20)


def test_recording_survives_an_error() -> None:
    record.reset()
    try:
        with record.recording() as inside:
            record.add("f", "view", 1, 1, record.now())
            raise KeyError
    except KeyError:
        pass
    assert inside["f", "view"].calls == 1


def test_time_is_taken_only_on_demand() -> None:
    record.reset()
    record.add("f", "view", 0, 0, record.now())
    assert record.total("f").seconds == 0.0
    record.timing(True)
    try:
        started = record.now()
        record.add("f", "view", 0, 0, started)
        assert started > 0
        assert record.total("f").seconds > 0
    finally:
        record.timing(False)


def _ranges(prof: Any) -> list[tuple[str, str]]:
    """Our ranges in the order of their starts, each with the range of ours around it."""
    ours = sorted((e for e in prof.events() if e.name.startswith("tritoncomm::")), key=lambda e: e.time_range.start)

    def outer(event: Any) -> str:
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith("tritoncomm::"):
            parent = parent.cpu_parent
        return "" if parent is None else parent.name.removeprefix("tritoncomm::")

    return [(event.name.removeprefix("tritoncomm::"), outer(event)) for event in ours]


def test_a_profiler_sees_the_mappings(group: ProcessGroup) -> None:
    x = torch.ones(4, 8, requires_grad=True)
    communicator = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        mappings.all_to_all_sp2hp(x, group).sum().backward()
        with pytest.raises(ShapeError):
            mappings.all_to_all_sp2hp(torch.ones(3, 3), group)
        mappings.reduce_scatter_dim(x.detach(), 1, group)
        mappings.all_gather_dim(x.detach(), 0, group, sizes=[4] * group.size())
        collective.all_reduce(x.detach(), group)
        mappings.all_gather_dim(x.detach()[group.rank() :], 0, group, sizes=[4, 3])
        if group.rank():
            communicator.recv_forward([4, 8], False)
        else:
            communicator.send_forward(x.detach(), False)
    exchange = "all_to_all_sp2hp"
    assert _ranges(prof) == [
        (exchange, ""),
        ("pack", exchange),
        (f"{exchange}.backward", ""),
        ("pack", f"{exchange}.backward"),
        ("unpack", f"{exchange}.backward"),
        ("reduce_scatter_dim", ""),
        ("pack", "reduce_scatter_dim"),
        ("all_gather_dim", ""),
        ("all_reduce", ""),
        ("all_gather_dim", ""),
        ("recv_forward" if group.rank() else "send_forward", ""),
    ]
    for event in prof.events():
        if event.name == f"tritoncomm::{exchange}":
            inside = [e.name for e in prof.events() if e.cpu_parent is event]
            assert "c10d::alltoall_base_" in inside, inside
    with mock.patch.object(torch.autograd.profiler, "record_function") as opened:
        mappings.all_to_all_sp2hp(x, group).sum().backward()
    assert not opened.called, "without a profiler no range is opened"
