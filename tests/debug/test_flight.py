"""The flight record: what it keeps, when it is written, and what the merged records of ranks say."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from disagreement_rows import ROWS
from jobs import run_job
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tritoncomm
from tritoncomm import PeerError, ShapeError, cli, p2p, record, variables
from tritoncomm import collective as c
from tritoncomm import mappings as m
from tritoncomm.debug import signals, trace
from tritoncomm.debug.flight import Call, flight, open_calls
from tritoncomm.debug.sites import call_site, located
from tritoncomm.integrations.megatron_functions import _FrozenLinear
from tritoncomm.p2p import transport

T = torch.ones


@pytest.fixture
def _kept() -> Iterator[None]:
    variables.FLIGHT.assign((100, ""))
    yield
    variables.FLIGHT.assign((0, ""))


def run_record(group: ProcessGroup, folder: str) -> Any:
    tritoncomm.destroy()
    variables.FLIGHT.assign((8, folder))
    try:
        first = sum(flight.counts.values())
        x = T(4, 4, requires_grad=True)
        y = m.reduce_scatter_dim(x, 1, group)
        y.sum().backward()
        line = sys._getframe().f_lineno - 2
        with pytest.raises(ShapeError):
            m.reduce_scatter_dim(T(3, 3), 0, group)
        tritoncomm.p2p.P2PCommunicator(group, _Config()).send_forward(T(3), group.rank() == 1)
        if group.rank():
            tritoncomm.p2p.P2PCommunicator(group, _Config()).recv_forward([3], False)
        data = json.loads(tritoncomm.dump().read_text())
        calls = [call for call in data["calls"] if call["number"] > first]
        for _ in range(20):
            c.all_reduce(T(2), group)
        assert len(flight.calls) == 8
        big = T(1000)
        seen = weakref.ref(big)
        c.all_reduce(big, group)
        del big
        gc.collect()
        end = time.monotonic() + 10
        while seen() is not None and time.monotonic() < end:
            time.sleep(0.01)  # Gloo's thread lets go of a tensor after its waiter went on
        assert seen() is None, "the record keeps no tensor"
    finally:
        variables.FLIGHT.assign((0, ""))
    assert not flight.calls
    return calls, data, line


def _is_here(site: Any) -> bool:
    """Whether a call is recorded where its backward was called, and not its forward, which is in the table of rows."""
    return site[0].co_filename == __file__


def run_sites(group: ProcessGroup) -> dict[str, Any]:
    """By function: sites of its calls that are not those of a walk over all frames, nor of its forward."""
    tritoncomm.destroy()
    sites: list[tuple[Any, Any]] = []

    def compare(entry: Any, *_: Any) -> None:
        call = Call._make(entry)
        sites.append((call.site, call_site()))

    variables.FLIGHT.assign((8, ""))
    c.all_reduce(T(2), group)  # this file is one of the program's
    flight.before, before = compare, flight.before
    wrong: dict[str, Any] = {}
    try:
        for name, row in ROWS.items():
            for wants_grad in (False, row.is_backward):
                sites.clear()
                x = T(row.shape(group.size())).requires_grad_(wants_grad)
                out = row.call(group, x * 1 if wants_grad else x, **row.options(group.size()))
                if wants_grad:
                    out.sum().backward()
                differ = [(located(a), located(b)) for a, b in sites if a != b or _is_here(a)]
                if differ or not (sites or row.is_backward):
                    wrong[name] = differ or "no call"
    finally:
        flight.before = before
        variables.FLIGHT.assign((0, ""))
    return wrong


def test_a_call_is_where_the_program_called(pool: Pool) -> None:
    assert pool.run(run_sites) == [{}, {}]


def run_backwards(group: ProcessGroup) -> list[tuple[str, int]]:
    """Name and line, from that of the forwards on, of what autograd calls in ways that are not ``backward()``."""
    tritoncomm.destroy()
    made: Any = torch.autograd.Variable
    x, weight = T(4, 4, requires_grad=True), T(4, 4)
    variables.FLIGHT.assign((100, ""))
    try:
        c.all_reduce(T(2), group)  # this file is one of the program's
        flight.entries.clear()
        first = sys._getframe().f_lineno + 1
        sent = m.reduce_scatter_to_sequence_parallel_region(x, group)
        frozen = _FrozenLinear.apply(x, weight, None, group)
        again = checkpoint(_twice, x, group, use_reentrant=True)
        replayed = checkpoint(_twice, x, group, use_reentrant=False)
        (once,) = torch.autograd.grad(m.all_gather_dim(x, 0, group).pow(3).sum(), x, create_graph=True)
        for out in (sent, frozen, again, replayed, once):  # as Megatron's schedules call the engine
            made._execution_engine.run_backward((out,), (torch.ones_like(out),), False, False, (), True, True)
        return [(call.name, located(call.site)[1] - first) for call in flight.calls]
    finally:
        variables.FLIGHT.assign((0, ""))


def _twice(x: Tensor, group: ProcessGroup) -> Tensor:
    return m.reduce_from_tensor_model_parallel_region(m.all_to_all_dims(x * 2, 0, 1, group) * 1.0, group)


def test_what_autograd_calls_is_where_the_forward_was_called(pool: Pool) -> None:
    """Also where a program calls the engine itself, recomputes a block, or differentiates a gradient."""
    for calls in pool.run(run_backwards):
        name = "reduce_scatter_to_sequence_parallel_region"
        recomputed = [("all_to_all_dims", 13), ("reduce_from_tensor_model_parallel_region", 13)]
        forwards = [(name, 0), *recomputed, *recomputed, ("all_gather_dim", 4), ("reduce_scatter_dim", 4)]
        backwards = [(f"{name}.backward", 0), ("linear_with_frozen_weight.backward", 1), *recomputed]
        backwards += [("all_to_all_dims", 13)] * 2 + [("all_gather_dim", 4), ("reduce_scatter_dim", 4)]
        assert calls == forwards + backwards


class _Config:
    pipeline_dtype = torch.float32


def test_a_call_has_its_group_shape_path_bytes_times_and_line(pool: Pool, tmp_path: Path) -> None:
    for rank, (calls, data, line) in enumerate(pool.run(run_record, str(tmp_path))):
        forward, backward, refused, hop = calls
        assert (data["rank"], data["reason"]) == (rank, "dump()")
        assert data["groups"][forward["group"]] == [0, 1]
        assert (forward["name"], forward["kind"]) == ("reduce_scatter_dim", "reduce_scatter")
        assert (forward["shape"], forward["dtype"], forward["path"]) == ([4, 4], "float32", "torch")
        assert forward["arguments"] == {"dim": 1, "sizes": None, "op": "SUM"}
        assert (forward["bytes_copied"], forward["bytes_sent"]) == (128, 32)
        assert 0 < forward["start"] <= forward["end"] <= backward["start"]
        assert (backward["name"], backward["count"]) == ("all_gather_dim", forward["count"] + 1)
        assert [forward["line"]] * 2 == [line, backward["line"]], "a backward has the line of its forward"
        assert forward["file"] == backward["file"] == __file__
        assert (refused["end"], refused["error"]) == (0, "raised before anything was sent")
        assert hop["kind"] == "hop"
        assert f"[3] float32 {'from' if rank else 'to'} rank {1 - rank}" in str(hop["arguments"])
        assert hop["end"]
    assert json.loads((tmp_path / "tritoncomm-flight-1.json").read_text())["rank"] == 1


def test_off_costs_one_check_and_keeps_nothing() -> None:
    assert record.switch is torch.autograd.profiler
    assert record.add is record.count_call
    assert record.begin is record._begin
    assert record._observer is None
    assert not flight.calls


@pytest.mark.usefixtures("_kept")
def test_the_last_calls_are_kept() -> None:
    assert record.switch._is_profiler_enabled
    for index in range(150):
        record.begin("f", "all_reduce", None, T(2), (None,))
        record.add("f", "view", 0, index, 0.0)
    assert [call.bytes_sent for call in flight.calls] == list(range(50, 150))


def _settled(path: Path, seconds: float = 20) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return json.loads(path.read_text())


def _blocking(kind: str) -> Callable[[], Any]:
    """A call of rank 0 that blocks, or an asynchronous one that has returned and is waited for."""
    group = dist.group.WORLD
    config = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False)
    stages = p2p.P2PCommunicator(group, config)
    if kind == "all_gather_dim":
        return lambda: m.all_gather_dim(T(2), 0, group)
    if kind == "all_gather":
        handle = c.all_gather(T(2), 0, group, async_op=True)[1]
    else:
        handle = stages.send_backward_recv_backward(None, True, (2,), overlap_p2p_comm=True)[1]["recv_next"]
    c.all_reduce(T(2), group, async_op=True)  # is the last call, and not the one that is waited for
    return handle.wait


def block_and_signal(folder: str, kind: str) -> Any:
    """Rank 0 waits for rank 1, which sends it a signal, and leaves without coming."""
    rank = int(os.environ["RANK"])
    os.environ |= {"TRITONCOMM_FLIGHT": folder, "TRITONCOMM_FLIGHT_SIGNALS": "1"}
    store = dist.FileStore(f"{folder}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_seconds(4))
    signals.WATCHDOG_SECONDS = 1.0
    variables.read()
    c.all_reduce(T(2), dist.group.WORLD)
    mine = Path(folder) / "tritoncomm-flight-0.json"
    if not rank:
        block = _blocking(kind)
        store.set("pid", str(os.getpid()))
        started = time.monotonic()
        with pytest.raises(PeerError) as caught:
            block()
        return str(caught.value), time.monotonic() - started, json.loads(mine.read_text())
    pid = int(store.get("pid"))
    time.sleep(0.3)
    os.kill(pid, signal.SIGUSR1)
    on_signal = _settled(mine)
    mine.unlink()
    on_watchdog = _settled(mine)
    tritoncomm.dump()
    time.sleep(4)
    return on_signal, on_watchdog


def _seconds(count: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=count)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("all_gather_dim", marks=pytest.mark.slow),
        "all_gather",
        pytest.param("send_backward_recv_backward", marks=pytest.mark.slow),
    ],
)
def test_a_blocked_rank_writes_its_record_on_a_signal_by_the_watchdog_and_on_the_error(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "records"
    (text, seconds, on_error), answer = run_job(block_and_signal, [{"RANK": "0"}, {"RANK": "1"}], str(folder), name)
    on_signal, on_watchdog = answer
    failed = f"{name}: the all-gather over ranks [0, 1] failed on rank 0"
    if name not in ("all_gather_dim", "all_gather"):
        failed = f"{name}: stage 0 of 2 (rank 0) could not receive 8 bytes from rank 1"
    assert failed in text
    assert seconds < 4 + 5
    assert on_signal["reason"] == "signal SIGUSR1"
    assert on_watchdog["reason"].startswith(f"watchdog: {name} is under way for ")
    later = [("all_reduce", True, "")] * (name != "all_gather_dim")
    for data in (on_signal, on_watchdog):
        assert [(call["name"], bool(call["end"]), call["error"]) for call in data["calls"]] == [
            ("all_reduce", True, ""), (name, False, ""), *later
        ]  # fmt: skip
    assert on_error["reason"] == f"{name}: PeerError"
    assert on_error["calls"][1]["error"].startswith(f"PeerError: {failed}")
    line = next(line for line in trace.story(trace.read([folder])) if line.startswith("rank 0"))
    assert f"{name}(" in line
    if name == "all_gather_dim":
        assert line.startswith("rank 0 made as its last call all_gather_dim(float32 [2], dim=0) at ")
        assert "which failed: PeerError" in line
        assert line.endswith("rank 1 did not come to it")


def test_the_watchdog_looks_at_no_frames_while_no_call_is_late() -> None:
    """A frame that it held would keep the tensors of the call that it watches."""
    entries = {1: [1, _entry(start=100, end=200), 0], 2: [2, _entry(start=900), 0], 3: [3, None, 0]}
    with mock.patch.object(flight, "last", entries):
        with mock.patch.object(sys, "_current_frames", side_effect=AssertionError("frames were looked at")):
            assert open_calls(800) == []
        with mock.patch.object(sys, "_current_frames", return_value={}) as frames:
            assert open_calls(900) == open_calls(900) == []
        assert frames.call_count == 1, "a call that was refused is looked for once"


def run_destroyed(group: ProcessGroup, folder: str) -> None:
    tritoncomm.destroy()
    variables.FLIGHT.assign((8, folder))
    try:
        c.all_reduce(T(2), group)
        with mock.patch.object(dist, "is_initialized", return_value=False):
            tritoncomm.dump()
    finally:
        variables.FLIGHT.assign((0, ""))


def test_the_rank_is_known_after_its_groups_were_destroyed(pool: Pool, tmp_path: Path) -> None:
    """The record of a rank that has ended before the others is not written in the place of rank 0's."""
    pool.run(run_destroyed, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"tritoncomm-flight-{rank}.json" for rank in range(2)]


def run_mismatch(group: ProcessGroup) -> str:
    tritoncomm.destroy()
    stages = tritoncomm.p2p.P2PCommunicator(group, _Config())
    with tritoncomm.p2p.check():
        with pytest.raises(tritoncomm.MismatchError):
            stages.recv_forward([3], False) if group.rank() else stages.send_forward(T(2, 2), False)
        return flight.calls[-1].error


def run_steps(group: ProcessGroup) -> None:
    """Every p2p function is recorded where the program called it, whatever is between it and the exchange."""
    tritoncomm.destroy()
    is_last, x = group.rank() == 1, T(2)
    stages = p2p.P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False))
    four = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"))
    neighbours: dict[str, Any] = {"group": group, "prev_pipeline_rank": 1 - group.rank()}
    neighbours["next_pipeline_rank"] = neighbours["prev_pipeline_rank"]
    raw: dict[str, Any] = four | ({"tensor_recv_prev": T(2)} if is_last else {"tensor_send_next": x}) | neighbours
    calls: dict[str, Callable[[], Any]] = {
        "recv_forward": lambda: stages.recv_forward([2], not is_last),
        "send_forward": lambda: stages.send_forward(x, is_last),
        "recv_backward": lambda: stages.recv_backward([2], is_last),
        "send_backward": lambda: stages.send_backward(x, not is_last),
        "send_forward_recv_backward": lambda: stages.send_forward_recv_backward(x, [2], is_last),
        "send_backward_recv_forward": lambda: stages.send_backward_recv_forward([x], [[2]], not is_last),
        "send_forward_recv_forward": lambda: stages.send_forward_recv_forward(x, True, (2,)),
        "send_backward_recv_backward": lambda: stages.send_backward_recv_backward(x, True, (2,)),
        "_p2p_ops": lambda: [each.wait() for each in p2p.communicator._p2p_ops(**raw).values()],
        "_batched_p2p_ops": lambda: [each.wait() for each in p2p.communicator._batched_p2p_ops(**raw)],
    }
    variables.FLIGHT.assign((8, ""))
    try:
        for name, call in calls.items():
            flight.entries.clear()
            call()
            for each in flight.calls:
                assert (each.name, each.code) == (name, call.__code__)
        too_large = [2**62]
        with pytest.raises(ShapeError):
            stages.recv_forward(too_large, False)
        assert flight.calls[-1].as_json(1, {})["arguments"]["transfers"][0][2] == [[[2**62], "float32"]]
    finally:
        variables.FLIGHT.assign((0, ""))


def test_p2p_functions_are_recorded_where_the_program_called_them(pool: Pool) -> None:
    pool.run(run_steps, world=2)


def lost_peer(folder: Path) -> str:
    end, x = SimpleNamespace(is_send=True, stage="stage 0 of 2 (rank 0)", peer=1), T(2)
    variables.FLIGHT.assign((8, str(folder)))
    try:
        record.begin("send_forward", "hop", None, None, ("", ""))
        failure: Any = transport._failure
        error = failure(end, "send_forward", x, RuntimeError("closed"))
        assert isinstance(error, PeerError)
        return flight.calls[-1].error
    finally:
        variables.FLIGHT.assign((0, ""))


def test_p2p_steps_that_fail_have_their_errors(pool: Pool, tmp_path: Path) -> None:
    """And were not "raised before anything was sent"."""
    for error in pool.run(run_mismatch):
        assert error.startswith("MismatchError: ")
    assert lost_peer(tmp_path).startswith("PeerError: send_forward: stage 0 of 2")


def test_frames_that_were_looked_at_keep_nothing() -> None:
    """Groups among it: a forked process that collects the garbage of its parent hangs in the end of a group of Gloo."""

    def called() -> "weakref.ref[torch.Tensor]":
        x = T(1)
        with mock.patch.object(flight, "last", {0: [threading.get_ident(), _entry(start=1), 0]}):
            assert open_calls(1) == []
        return weakref.ref(x)

    gc.disable()
    try:
        assert called()() is None
    finally:
        gc.enable()


def _entry(**fields: Any) -> list[Any]:
    return list(Call(1, "f", "all_reduce", "g", (2,), torch.float32, (), None, 0, 1, 0)._replace(**fields))


def _call(name: str, count: int, shape: list[int], **more: Any) -> dict[str, Any]:
    return {
        "number": count, "count": count, "name": name, "kind": "all_reduce", "group": "g", "shape": shape,
        "dtype": "float32", "arguments": {"op": "SUM"}, "path": "view", "bytes_copied": 0, "bytes_sent": 8,
        "start": 1000 * count, "end": 1000 * count + 500, "file": "train.py", "line": 10 + count, "thread": 1,
        "error": "",
    } | more  # fmt: skip


def _write(folder: Path, rank: int, calls: list[dict[str, Any]], world: int = 4) -> Path:
    path = folder / f"tritoncomm-flight-{rank}.json"
    counts = {"g": max((call["count"] for call in calls), default=0)}
    data = {
        "format": 1, "rank": rank, "world": world, "host": "h", "pid": 1, "time": 9000, "reason": "",
        "groups": {"g": [0, 1, 2]}, "counts": counts, "calls": calls,
    }  # fmt: skip
    path.write_text(json.dumps(data))
    return path


def test_records_merge_into_words_and_one_trace(tmp_path: Path) -> None:
    same = [_call("f", count, [4]) for count in (1, 2)]
    _write(tmp_path, 0, [*same, _call("f", 3, [4]), _call("g", 4, [4], end=0)])
    _write(tmp_path, 1, [*same[1:], _call("f", 3, [5]), _call("h", 4, [5], end=0)])
    _write(tmp_path, 2, same)
    out = tmp_path / "job.json"
    result = CliRunner().invoke(cli.app, ["trace", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 0, result.output
    missing = "of group 'g' of ranks 0-2; rank 2 did not come to it"
    assert result.output.splitlines() == [
        "no record of rank 3 of 4",
        "group 'g' of ranks 0-2: call 3 is the first that differs, in shape:",
        "  rank 0: f(float32 [4], op=SUM) at train.py:13",
        "  rank 1: f(float32 [5], op=SUM) at train.py:13",
        f"rank 0 is in g(float32 [4], op=SUM) at train.py:14, call 4 {missing}",
        f"rank 1 is in h(float32 [5], op=SUM) at train.py:14, call 4 {missing}",
        f"wrote {out}: 9 calls of 3 ranks",
    ]
    events = json.loads(out.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"]) for event in slices][:4] == [
        (0, "f", 0.0, 0.5), (0, "f", 1.0, 0.5), (0, "f", 2.0, 0.5), (0, "g", 3.0, 5.0)
    ]  # fmt: skip
    arrows = [(event["ph"], event["pid"]) for event in events if event.get("id") == "g/2"]
    assert arrows == [("s", 0), ("t", 1), ("f", 2)]


def _story(folder: Path) -> list[str]:
    return trace.story(trace.read([folder]))


def _change(path: Path, **more: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def test_ranks_that_wait_in_one_call_share_a_line(tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path, rank, [_call("f", 1, [4]), _call("g", 2, [4], end=0)][: 1 + (rank != 1)], world=3)
    assert _story(tmp_path) == [
        "ranks 0, 2 are in g(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-2; "
        "rank 1 did not come to it"
    ]


def test_asynchronous_calls_that_other_ranks_did_not_make(tmp_path: Path) -> None:
    """They have ended where they were issued, and nothing is under way."""
    for rank in range(3):
        _write(tmp_path, rank, [_call("f", count, [4]) for count in (1, 2, 3)][: 3 - rank], world=3)
    call = "f(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-2"
    assert _story(tmp_path) == [f"rank 2 had not come to {call}, which rank 0 had issued"]
    _write(tmp_path, 2, [], world=3)
    assert _story(tmp_path)[0].startswith("rank 2 had not come to f(float32 [4], op=SUM) at train.py:11, call 1 of")
    for rank in range(3):  # stages of a pipeline make different numbers of steps
        _write(tmp_path, rank, [_call("send_forward", count, [4], kind="hop") for count in (1, 2, 3)][rank:], world=3)
    assert _story(tmp_path) == ["the records agree, and no call was under way when they were written"]


def _hop(name: str, count: int, *transfers: list[Any], **more: Any) -> dict[str, Any]:
    """A p2p step: of each transfer key, rank and the sizes of a tensor."""
    listed = [[key, rank, [[shape, "float32" if key.startswith("send") else None]]] for key, rank, shape in transfers]
    return _call(name, count, [], kind="hop", arguments={"send": "", "transfers": listed}) | {"shape": None} | more


def test_p2p_steps_are_paired(tmp_path: Path) -> None:
    """The second message from rank 0 has two ends that differ, the third was not sent, and rank 2 did not wait."""
    _write(tmp_path, 0, [_hop("send", 1, ["send_next", 1, [2]]), _hop("send", 2, ["send_next", 1, [2, 2]])], world=3)
    from_first = [_hop("recv", count, ["recv_prev", 0, [2]], ["send_next", 2, [count]]) for count in (1, 2)]
    _write(tmp_path, 1, [*from_first, _hop("recv", 3, ["recv_prev", 0, [2]], end=0)], world=3)
    taken = [_hop("recv", count, ["recv_prev", 1, [count]], ["send_next", 2, [2]]) for count in (1, 2, 3)]
    _write(tmp_path, 2, taken, world=3)  # what it sends to itself has no other end
    assert _story(tmp_path) == [
        "message 2 from rank 0 to rank 1 is the first whose ends differ:",
        "  rank 0: send() at train.py:12",
        "  rank 1: recv() at train.py:12",
        "rank 1 had not sent message 3 to rank 2, which that had issued: recv() at train.py:13",
        "rank 1 is in recv() at train.py:13, call 3 of group 'g' of ranks 0-2; rank 0 did not come to it",
    ]

    arrows = [each for each in trace.perfetto(trace.read([tmp_path]))["traceEvents"] if each["name"] == "message"]
    assert [(each["id"], each["ph"], each["pid"], each["ts"]) for each in arrows] == [
        ("g/0-1/1", "s", 0, 0.0), ("g/0-1/1", "f", 1, 0.0), ("g/0-1/2", "s", 0, 1.0), ("g/0-1/2", "f", 1, 1.0),
        ("g/1-2/1", "s", 1, 0.0), ("g/1-2/1", "f", 2, 0.0), ("g/1-2/2", "s", 1, 1.0), ("g/1-2/2", "f", 2, 1.0),
    ]  # fmt: skip


def test_p2p_steps_that_cannot_be_paired(tmp_path: Path) -> None:
    """Their first messages are not in the record any more, no end knows the shapes, or nothing was sent."""
    _write(tmp_path, 0, [_hop("send", count, ["send_next", 1, [2]]) for count in (2, 3)], world=2)
    _write(tmp_path, 1, [_hop("recv", 2, ["recv_prev", 0, [3]]), _hop("recv", 3, ["recv_prev", 0, [3]], end=0)], 2)
    assert _story(tmp_path) == ["rank 1 is in recv() at train.py:13, call 3 of group 'g' of ranks 0-2"]
    refused = _hop("send", 1, ["send_next", 1, [7]], error="raised before anything was sent", end=0)
    _write(tmp_path, 0, [refused, _hop("send", 2, ["send_next", 1, [2]])], world=2)
    unknown = _hop("recv", 1, ["recv_prev", 0, [2]])
    unknown["arguments"]["transfers"][0][2] = None
    _write(tmp_path, 1, [unknown, _hop("recv", 2, ["recv_prev", 0, [2]], ["recv_next", 2, [2]], end=0)], world=3)
    assert _story(tmp_path)[-1].endswith("; rank 0 did not come to it; of rank 2 there is no record")
    for listed in (None, 3, [3], [[3]], [["send_next", 1, 3]], [["send_next", "1", None]], [[[], 1, None]]):
        _write(tmp_path, 0, [_hop("send", 1) | {"arguments": {"transfers": listed}}], world=2)
        assert "of rank 2 there is no record" in _story(tmp_path)[-1]
    twice = [_hop("recv", 1, ["recv_prev", 0, [2]], end=0), _hop("recv", 1, ["send_next", 2, [2]])]
    _write(tmp_path, 1, twice, world=2)  # of one count, as no rank writes them
    assert _story(tmp_path)[-1] == "rank 1 is in recv() at train.py:11, call 1 of group 'g' of ranks 0-2"


def test_errors_that_ended_ranks(tmp_path: Path) -> None:
    """Those of the program; that of a call is beside the call, with all of its lines."""
    first, then = _call("f", 1, [4]), _call("f", 2, [4], end=0, error="MismatchError: f:\n  rank 0: a\n  rank 1: b")
    _change(_write(tmp_path, 0, [first, then], world=2), reason=f"uncaught {then['error']}")
    _change(_write(tmp_path, 1, [first], world=2), reason="uncaught ValueError: out of\nmemory")
    call = "f(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-2"
    assert _story(tmp_path) == [
        f"rank 0 made as its last call {call}, which failed: MismatchError: f: rank 0: a; rank 1: b; rank 1 did not "
        "come to it; of rank 2 there is no record",
        "rank 1 ended by an uncaught ValueError: out of; memory",
    ]


def test_a_call_of_another_thread_may_be_under_way(tmp_path: Path) -> None:
    _write(tmp_path, 0, [_call("f", 1, [4], end=0), _call("g", 2, [4])], world=1)
    assert _story(tmp_path)[-1].startswith("rank 0 is in f(float32 [4], op=SUM) at train.py:11, call 1 of group 'g'")


def test_records_of_several_runs_are_noticed(tmp_path: Path) -> None:
    _write(tmp_path, 0, [_call("f", 1, [4])], world=2)
    _change(_write(tmp_path, 1, [_call("f", 1, [4], start=10**12, end=10**12 + 1)], world=3), time=10**12 + 2)
    _write(tmp_path, 2, [_call("f", 1, [4])], world=3)
    assert _story(tmp_path) == [
        "these records are not of one run: the number of ranks is 2 on rank 0, 3 on ranks 1-2",
        "ranks 0, 2 wrote before all calls that another record has: they came later, or these are of several runs",
    ]


def test_groups_of_one_name_and_other_ranks_are_not_compared(tmp_path: Path) -> None:
    for rank in range(4):
        path = _write(tmp_path, rank, [_call("f" if rank < 2 else "g", 1, [rank // 2])])
        _change(path, groups={"g": [0, 1] if rank < 2 else [2, 3]})
    assert _story(tmp_path) == ["the records agree, and no call was under way when they were written"]
    _change(_write(tmp_path, 3, [_call("h", 1, [1])]), groups={})  # and its group is gone since
    _change(_write(tmp_path, 0, [_call("f", 1, [0])]), groups={"g": [0, 1]})
    assert _story(tmp_path)[0] == "the records agree, and no call was under way when they were written"
    for rank in range(2):
        (tmp_path / f"tritoncomm-flight-{rank}.json").unlink()
    assert _story(tmp_path)[1] == "group 'g' of ranks 2-3: call 1 is the first that differs, in name:"


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("reshard", [{"plan": "p"}] * 2),
        ("to_heads", [{"layout": "l"}] * 2),
        ("all_gather", [{"dim": 0, "sizes": [1, 2]}] * 2),
        ("all_to_all_single", [{"out_sizes": [1, 2]}, {"out_sizes": [2, 1]}]),
    ],
)
def test_ranks_may_have_other_shapes_in_uneven_calls(tmp_path: Path, kind: str, arguments: list[Any]) -> None:
    for rank in range(2):
        _write(tmp_path, rank, [_call("f", 1, [1 + rank], kind=kind, arguments=arguments[rank])], world=2)
    assert _story(tmp_path) == ["the records agree, and no call was under way when they were written"]


def test_sizes_that_are_even_are_none(tmp_path: Path) -> None:
    for rank in range(2):
        more = {"dim": 0, "sizes": [4, 4] if rank else None}
        _write(tmp_path, rank, [_call("f", 1, [4], kind="all_gather", arguments=more)], world=2)
    assert _story(tmp_path) == ["the records agree, and no call was under way when they were written"]


def test_a_story_has_no_control_characters_and_no_endless_lines(tmp_path: Path) -> None:
    _write(tmp_path, 0, [_call("\x1b[2Jf", 1, list(range(10_000)), end=0)], world=1)
    (line,) = _story(tmp_path)
    assert line.startswith("rank 0 is in \\x1b[2Jf(float32 [0, 1, 2, ")
    assert len(line) < 500


def test_a_record_that_was_not_written_to_its_end_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, 0, [_call("f", 1, [4])])
    content = path.read_bytes()
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(tritoncomm.ArgumentError, match="is no flight record: JSONDecodeError"):
            trace.read([path])
    path.write_bytes(b"\xff" + content)
    with pytest.raises(tritoncomm.ArgumentError, match="is no flight record: UnicodeDecodeError"):
        trace.read([path])


@pytest.mark.slow
def test_records_of_sixty_four_ranks_take_seconds(tmp_path: Path) -> None:
    calls = [_call("f", count // 50, [4]) | {"group": f"g{count % 50}", "start": count} for count in range(50, 4146)]
    for rank in range(64):
        last = {"end": 0} if rank else {"name": "h", "end": 0}
        _change(_write(tmp_path, rank, [*calls[:-1], calls[-1] | last], world=64), time=10**9)
    started = time.monotonic()
    result = CliRunner().invoke(cli.app, ["trace", str(tmp_path), "--out", str(tmp_path / "job.json")])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 6, result.output
    assert time.monotonic() - started < 60


def test_records_that_agree_say_so_and_other_files_are_refused(tmp_path: Path) -> None:
    files = [_write(tmp_path, rank, [_call("f", 1, [2])], world=3) for rank in range(3)]
    assert trace.story(trace.read(files)) == [
        "the records agree, and no call was under way when they were written"
    ]  # fmt: skip
    (tmp_path / "other.json").write_text("[]")
    for bad, words in ((tmp_path / "other.json", "is no flight record"), (tmp_path / "none", "none")):
        result = CliRunner().invoke(cli.app, ["trace", str(bad)])
        assert (result.exit_code, words in result.output) == (2, True), result.output
    result = CliRunner().invoke(cli.app, ["trace", str(files[0]), str(files[0])])
    assert "is a second record of rank 0" in result.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("groups"), "groups is missing"),
        (lambda data: data.update(world=10**12), "world is 1000000000000"),
        (lambda data: data.update(rank=None), "rank is None"),
        (lambda data: data.update(calls=[3]), r"calls is \[3\]"),
        (lambda data: data["calls"][0].pop("kind"), r"calls\[0\].kind is missing"),
        (lambda data: data["calls"][0].update(start=10**400), r"calls\[0\].start is 1000"),
        (lambda data: data["calls"][0].update(arguments=[]), r"calls\[0\].arguments is \[\]"),
    ],
)
def test_a_damaged_record_is_refused_by_name(tmp_path: Path, change: Any, words: str) -> None:
    call = {
        "name": "all_gather_dim", "kind": "all_gather", "group": "0", "count": 1, "shape": [4], "dtype": "float32",
        "arguments": {"dim": 0}, "path": "view", "bytes_copied": 0, "bytes_sent": 0, "start": 1, "end": 2, "thread": 1,
        "file": "train.py", "line": 3, "error": "",
    }  # fmt: skip
    data: Any = {
        "format": trace.FORMAT, "rank": 0, "world": 1, "host": "node", "pid": 1, "time": 3, "groups": {"0": [0]},
        "counts": {"0": 1}, "calls": [call],
    }  # fmt: skip
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    assert trace.story(trace.read([path]))
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(tritoncomm.ArgumentError, match=words):
        trace.read([path])


def test_a_deep_record_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(tritoncomm.ArgumentError, match="nested too deeply"):
        trace.read([path])


@pytest.mark.parametrize("kind", ["folder", "named pipe", "socket", "device"])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """A named pipe without a writer, or a device, would be read for ever."""
    path = tmp_path / "tritoncomm-flight-0.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as end:
        if kind == "socket":
            end.bind(os.path.relpath(path))  # whose length is limited
        words = f"tritoncomm-flight-0.json is no flight record: it is a {kind}"
        with pytest.raises(tritoncomm.ArgumentError, match=words):
            trace.read([tmp_path])
    if kind == "named pipe":
        command = [sys.executable, "-m", "tritoncomm", "trace", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/{words}\n"), done.stdout


def _active(created: int, **more: Any) -> dict[str, Any]:
    return {
        "created": created, "group": "g", "name": "nccl:all_reduce", "sequence": 5, "state": "issued, not started",
        "number": None,
    } | more  # fmt: skip


def test_collectives_that_the_device_has_not_completed(tmp_path: Path) -> None:
    """The oldest of each rank, with the call that issued it, or as torch calls it."""
    calls = [_call("f", count, [4]) for count in (1, 2, 3)]
    late, last = _active(2100, number=2), _active(3100, number=3)
    _change(_write(tmp_path, 0, calls, world=3), active=[last, late])
    _change(_write(tmp_path, 1, calls, world=3), active=[late | {"state": "started, not completed"}])
    _write(tmp_path, 2, calls[:1], world=3)
    call = "f(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-2"
    hangs = [
        f"on the device of rank 0: {call}, issued, not started; rank 2 did not come to it",
        f"on the device of rank 1: {call}, started, not completed; rank 2 did not come to it",
    ]
    assert _story(tmp_path)[1:] == hangs
    _change(tmp_path / "tritoncomm-flight-0.json", active=[_active(2100)])
    assert _story(tmp_path)[1] == (
        "on the device of rank 0: nccl:all_reduce, torch's collective 5 of group 'g' of ranks 0-2, of no call in the "
        "record, issued, not started"
    )
    for bad in ({}, [3], [{"created": 1}], [_active(1, number="2")]):
        _change(tmp_path / "tritoncomm-flight-0.json", active=bad)
        with pytest.raises(tritoncomm.ArgumentError, match="is no flight record: active"):
            _story(tmp_path)


def test_a_periodic_record_from_before_a_call_does_not_say_that_its_rank_did_not_come(tmp_path: Path) -> None:
    groups = {"g": [0, 1]}
    first, second = _call("f", 1, [4]), _call("f", 2, [4])
    _change(_write(tmp_path, 0, [first, second | {"end": 0}], world=2), groups=groups)
    path = _write(tmp_path, 1, [first], world=2)
    call = "f(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-1"
    _change(path, reason="periodic", time=1999, groups=groups)
    assert _story(tmp_path) == [f"rank 0 is in {call}; the record of rank 1 came before it"]
    _change(path, time=2001)
    assert _story(tmp_path) == [f"rank 0 is in {call}; rank 1 did not come to it"]
    _change(_write(tmp_path, 0, [first, second], world=2), groups=groups)
    assert _story(tmp_path) == [f"rank 1 had not come to {call}, which rank 0 had issued"]
    _change(path, time=1999)
    assert _story(tmp_path) == ["the records agree, and no call was under way when they were written"]
    _write(tmp_path, 0, [_hop("recv", 1, ["recv_prev", 1, [2]])], world=2)
    path = _write(tmp_path, 1, [_hop("send", 1, ["send_next", 2, [2]])], world=2)
    for written, is_told in ((999, False), (1001, True)):
        _change(path, reason="periodic", time=written)
        assert any("rank 1 had not sent" in line for line in _story(tmp_path)) is is_told
