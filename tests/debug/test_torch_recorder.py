"""Collectives that hang on the device: what torch's recorder says of them, in the flight record and its trace."""

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_job

from tritoncomm import collective, record, variables
from tritoncomm.debug import flight, signals, story, torch_recorder, trace
from tritoncomm.debug.torch_recorder import Active, Recorder

MODULE: Any = torch._C._distributed_c10d
STEP = 10**9


def entry(created: int, **more: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it."""
    return {
        "collective_seq_id": 3, "input_dtypes": ["Float"], "input_sizes": [[3]], "is_p2p": False, "op_id": 3,
        "output_dtypes": ["Float"], "output_sizes": [[3]], "p2p_seq_id": 7, "pg_id": 0, "profiling_name": "nccl:f",
        "process_group": ["0", "default_pg"], "record_id": 0, "retired": False, "state": "scheduled",
        "thread_id": "140238643018624", "thread_name": "python", "time_created_ns": created, "timeout_ms": 1800000,
        "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0,
    } | more  # fmt: skip


def dump_of(*entries: Any) -> bytes:
    return json.dumps({"version": "2.10", "pg_config": {}, "entries": entries}).encode()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Takes the place of torch's function; returns the arguments that it is called with."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_recorder, "_allow_queries", lambda: None)
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_ENABLE_TIMING", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.delattr(MODULE, name, raising=False)

    def place(content: bytes, name: str = "_dump_nccl_trace_json", text: str = "") -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def dump(**options: Any) -> bytes:
            calls.append(options)
            return content

        dump.__doc__ = text
        monkeypatch.setattr(MODULE, name, dump, raising=False)
        return calls

    return place


def test_what_has_not_completed_is_read_oldest_first(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    new = entry(30, state="started", process_group=["1", "x"], unknown={"a": [1]})
    step = entry(20, is_p2p=True, profiling_name="nccl:send 0->1")
    calls = fake(dump_of(new, entry(5, retired=True), step, entry(10)))
    expected = [
        Active(10, "0", "nccl:f", 3, "issued, not completed"),
        Active(20, "0", "nccl:send 0->1", 7, "issued, not completed"),
        Active(30, "1", "nccl:f", 3, "started, not completed"),
    ]
    recorder = Recorder()
    assert recorder.active() == expected
    assert calls == [{"includeCollectives": True, "onlyActive": True}]
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")
    assert [each.state for each in recorder.active()] == ["issued, not started"] * 2 + ["started, not completed"]
    assert not recorder.problem


def test_a_recorder_without_collectives_has_no_entries(fake: Any) -> None:
    fake(b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}')
    recorder = Recorder()
    assert recorder.active() == []
    assert not recorder.problem


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "JSONDecodeError"),
        (b"\xff", "UnicodeDecodeError"),
        (b"[]", "AttributeError"),
        (b"null", "AttributeError"),
        (dump_of({"state": "scheduled"}), "KeyError: 'process_group'"),
        (dump_of(entry(1, process_group=[])), "IndexError"),
        (dump_of(entry(1, time_created_ns=None)), "TypeError"),
        (dump_of("entry"), "AttributeError"),
    ],
)
def test_a_format_that_is_not_known_ends_the_questions(fake: Any, content: bytes, words: str) -> None:
    calls, recorder = fake(content), Recorder()
    assert recorder.active() == recorder.active() == []
    assert recorder.problem.startswith(f"torch's recorder cannot be read: {words}")
    assert len(calls) == 1


def test_builds_without_the_recorder_and_a_recorder_that_is_off(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Recorder().problem == "this build of torch has no recorder of NCCL"
    assert Recorder().active() == []
    calls = fake(dump_of(entry(1)))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert Recorder().problem == "torch's recorder is off, as TORCH_FR_BUFFER_SIZE is 0"
    assert Recorder().active() == []
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert Recorder().active() == []
    assert not calls


def test_nccl2_is_asked_where_the_recorder_knows_backends(fake: Any) -> None:
    calls = fake(
        dump_of(entry(1, profiling_name="nccl2:f")), "_dump_fr_trace_json", "(includeCollectives: bool | None)"
    )
    assert Recorder().problem, "the recorder of CPU groups has no collectives of NCCL"
    calls = fake(
        dump_of(entry(1, profiling_name="nccl2:f")), "_dump_fr_trace_json", "(onlyActive: bool, backend: str | None)"
    )
    assert [each.name for each in Recorder().active()] == ["nccl2:f"]
    fake(dump_of(entry(0)))
    assert [each.name for each in Recorder().active()] == ["nccl:f", "nccl2:f"]
    assert calls == [{"backend": "nccl2", "includeCollectives": True, "onlyActive": True}] * 2


def test_a_query_does_not_end_the_capture_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread asks only after the runtime has taken its capture mode; where it cannot, nothing is asked."""
    order: list[str] = []
    threads: set[int] = set()

    def exchange(mode: Any) -> int:
        assert mode._obj.value == 1, "cudaStreamCaptureModeThreadLocal"
        order.append("mode")
        threads.add(threading.get_ident())
        return status.pop()

    def dump(**_: Any) -> bytes:
        order.append("dump")
        threads.add(threading.get_ident())
        return dump_of()

    status, runtime = [0], SimpleNamespace(cudaThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(MODULE, "_dump_nccl_trace_json", dump, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: runtime if name == "libcudart.so.13" else object())
    recorder = Recorder()
    assert recorder.active() == recorder.active() == []
    assert (order, recorder.problem, len(threads)) == (["mode", "dump", "dump"], "", 1)
    status.append(35)
    recorder = Recorder()
    recorder.active()
    assert "cudaThreadExchangeStreamCaptureMode failed with status 35" in recorder.problem
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    recorder = Recorder()
    recorder.active()
    assert "cudaThreadExchangeStreamCaptureMode is not found" in recorder.problem
    assert order == ["mode", "dump", "dump", "mode"]


def test_the_call_is_the_last_of_its_group_that_had_begun(tmp_path: Path) -> None:
    variables.FLIGHT.assign((100, ""))
    try:
        for _ in range(4):
            record.begin("f", "all_reduce", None, torch.ones(2), (None,))
            record.add("f", "view", 0, 8, 0.0)
        record.begin("g", "all_reduce", None, torch.ones(2), (None,))
        group = flight.flight.calls[0].group
        for place, each in enumerate(flight.flight.entries):
            each[flight._START], each[flight._END] = 10 * place + 10, (10 * place + 15) * (place < 4)
        asked = [
            Active(created, name, "nccl:f", 1, "s") for created, name in
            ((5, group), (12, group), (17, group), (35, group), (99, group), (12, "other"))
        ]  # fmt: skip
        flight.flight.active = asked
        data = json.loads(flight.dump(tmp_path).read_text())
    finally:
        flight.flight.active = []
        flight.flight.counts.clear()
        variables.FLIGHT.assign((0, ""))
    numbers = [call["number"] for call in data["calls"]]
    assert [each["number"] for each in data["active"]] == [None, numbers[0], None, numbers[2], numbers[4], None]


def hang(folder: str) -> Any:
    """Rank 0 issues a collective to which rank 1 does not come, and does not wait for it.

    torch's recorder of CPU groups takes the place of that of NCCL: its entries have the same format.
    """
    rank = int(os.environ["RANK"])
    signals.PERIOD, signals.WATCHDOG_SECONDS = 0.2, 1.0
    MODULE._dump_nccl_trace_json = MODULE._dump_fr_trace_json
    torch.cuda.is_initialized = lambda: True
    torch_recorder._allow_queries = lambda: None
    variables.FLIGHT.assign((100, folder))
    store = dist.FileStore(f"{folder}.store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    group, file = dist.new_group([0, 1]), Path(folder) / f"tritoncomm-flight-{rank}.json"
    dist.all_reduce(torch.ones(2), group=group)  # which is torch's own
    collective.all_reduce(torch.ones(2), group)
    if rank:
        store.wait(["written"], timedelta(seconds=30))
        flight.dump()
        return None
    _, handle = collective.all_gather(torch.ones(3), 0, group, async_op=True)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if file.exists() and (data := json.loads(file.read_text()))["reason"].startswith("watchdog"):
            break
        time.sleep(0.05)
    store.set("written", "1")
    time.sleep(1)
    del handle
    return data


def test_a_hang_on_the_device_ends_in_a_record_that_names_the_call(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    data, _ = run_job(hang, [{"RANK": "0"}, {"RANK": "1"}], str(folder))
    assert data["reason"].startswith("watchdog: gloo:"), data
    assert " of group '1' was issued, not completed for " in data["reason"]
    (active,) = data["active"]
    assert (active["sequence"], active["number"]) == (3, 2), "its second call, and the group's third collective"
    call = data["calls"][-1]
    assert (call["number"], call["name"], bool(call["end"])) == (2, "all_gather", True)
    (folder / "tritoncomm-flight-0.json").write_text(json.dumps(data))  # of before rank 1 ended, which ends the hang
    (line,) = [each for each in story.story(trace.read([folder])) if "the device" in each]
    assert line.startswith("rank 0: the device has not completed all_gather(float32 [3], dim=0) at ")
    assert line.endswith("call 2 of group '1' of ranks 0-1 (issued, not completed); rank 1 did not join it")
