"""The merged trace of flight records: its words, and its Perfetto trace."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tritoncomm
from tritoncomm import cli
from tritoncomm.debug import story, texts, trace

AGREE = "the records agree, and no call was under way when they were written"


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
    missing = "of group 'g' of ranks 0-2; rank 2 did not join it"
    assert max(len(line) for line in result.output.splitlines() if str(out) not in line) <= 80
    assert result.output.split() == " ".join([
        "group 'g' of ranks 0-2: call 3 is the first that differs, in shape:",
        "  rank 0: f(float32 [4], op=SUM) at train.py:13",
        "  rank 1: f(float32 [5], op=SUM) at train.py:13",
        "no record of rank 3 of 4",
        f"rank 0: in g(float32 [4], op=SUM) at train.py:14, call 4 {missing}",
        f"rank 1: in h(float32 [5], op=SUM) at train.py:14, call 4 {missing}",
        f"wrote {out}: 9 calls of 3 ranks",
    ]).split()  # fmt: skip
    events = json.loads(out.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["pid"], event["name"], event["ts"], event["dur"]) for event in slices][:4] == [
        (0, "f", 0.0, 0.5), (0, "f", 1.0, 0.5), (0, "f", 2.0, 0.5), (0, "g", 3.0, 5.0)
    ]  # fmt: skip
    arrows = [(event["ph"], event["pid"]) for event in events if event.get("id") == "g/2"]
    assert arrows == [("s", 0), ("t", 1), ("f", 2)]


def _story(folder: Path) -> list[str]:
    return story.story(trace.read([folder]))


def _change(path: Path, **more: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def test_ranks_that_wait_in_one_call_share_a_line(tmp_path: Path) -> None:
    for rank in range(3):
        _write(tmp_path, rank, [_call("f", 1, [4]), _call("g", 2, [4], end=0)][: 1 + (rank != 1)], world=3)
    assert _story(tmp_path) == [
        "ranks 0, 2: in g(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-2; rank 1 did not join it"
    ]


def test_a_backward_that_a_rank_does_not_join_has_its_likely_cause(tmp_path: Path) -> None:
    backward, cause = "f.backward(float32 [4], op=SUM)", "no backward runs on a rank whose input needed no gradient"
    for rank in range(3):
        calls = [_call("f", 1, [4]), _call("f.backward", 2, [4], end=0)]
        _write(tmp_path, rank, calls[: 1 + (rank != 1)], world=3)
    line, advice = _story(tmp_path)
    assert line.startswith(f"ranks 0, 2: in {backward} at train.py:12")
    assert line.endswith("rank 1 did not join it")
    assert advice.startswith(cause)
    _write(tmp_path, 1, [_call("f", 1, [4]), _call("g", 2, [4], end=0)], world=3)  # it is elsewhere
    assert any(line.startswith(cause) for line in _story(tmp_path))
    for rank in range(3):  # all are in the backward, with different tensors
        _write(tmp_path, rank, [_call("f.backward", 1, [4 + rank], end=0)], world=3)
    assert not any(line.startswith(cause) for line in _story(tmp_path))
    # A rank that an error has ended says itself why it is not there.
    assert not texts.of_backward([f"rank 0: {backward}", "rank 1 has ended with ValueError: no such layer"])
    assert texts.of_backward([f"rank 0: {backward}", "rank 1: g(float32 [4])"]).startswith(cause)


def test_asynchronous_calls_that_other_ranks_did_not_make(tmp_path: Path) -> None:
    """They have ended where they were issued, and nothing is under way."""
    for rank in range(3):
        _write(tmp_path, rank, [_call("f", count, [4]) for count in (1, 2, 3)][: 3 - rank], world=3)
    call = "f(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-2"
    assert _story(tmp_path) == [f"rank 2 did not join {call}, which rank 0 issued"]
    _write(tmp_path, 2, [], world=3)
    assert _story(tmp_path)[0].startswith("rank 2 did not join f(float32 [4], op=SUM) at train.py:11, call 1 of")
    for rank in range(3):  # stages of a pipeline make different numbers of steps
        _write(tmp_path, rank, [_call("send_forward", count, [4], kind="hop") for count in (1, 2, 3)][rank:], world=3)
    assert _story(tmp_path) == [AGREE]


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
        "rank 1 did not send message 3 to rank 2, whose receive is posted by recv() at train.py:13",
        "rank 1: in recv() at train.py:13, call 3 of group 'g' of ranks 0-2; rank 0 did not join it",
    ]

    trace.write_perfetto(trace.read([tmp_path]), tmp_path / "job.json")
    events = json.loads((tmp_path / "job.json").read_text())["traceEvents"]
    arrows = [each for each in events if each["name"] == "message"]
    assert [(each["id"], each["ph"], each["pid"], each["ts"]) for each in arrows] == [
        ("g/0-1/1", "s", 0, 0.0), ("g/0-1/1", "f", 1, 0.0), ("g/0-1/2", "s", 0, 1.0), ("g/0-1/2", "f", 1, 1.0),
        ("g/1-2/1", "s", 1, 0.0), ("g/1-2/1", "f", 2, 0.0), ("g/1-2/2", "s", 1, 1.0), ("g/1-2/2", "f", 2, 1.0),
    ]  # fmt: skip


def test_p2p_steps_that_cannot_be_paired(tmp_path: Path) -> None:
    """Their first messages are not in the record any more, no end knows the shapes, or nothing was sent."""
    _write(tmp_path, 0, [_hop("send", count, ["send_next", 1, [2]]) for count in (2, 3)], world=2)
    _write(tmp_path, 1, [_hop("recv", 2, ["recv_prev", 0, [3]]), _hop("recv", 3, ["recv_prev", 0, [3]], end=0)], 2)
    assert _story(tmp_path) == ["rank 1: in recv() at train.py:13, call 3 of group 'g' of ranks 0-2"]
    refused = _hop("send", 1, ["send_next", 1, [7]], error="raised before anything was sent", end=0)
    _write(tmp_path, 0, [refused, _hop("send", 2, ["send_next", 1, [2]])], world=2)
    unknown = _hop("recv", 1, ["recv_prev", 0, [2]])
    unknown["arguments"]["transfers"][0][2] = None
    _write(tmp_path, 1, [unknown, _hop("recv", 2, ["recv_prev", 0, [2]], ["recv_next", 2, [2]], end=0)], world=3)
    assert _story(tmp_path)[-1].endswith("; rank 0 did not join it; no record of rank 2")
    for listed in (None, 3, [3], [[3]], [["send_next", 1, 3]], [["send_next", "1", None]], [[[], 1, None]]):
        _write(tmp_path, 0, [_hop("send", 1) | {"arguments": {"transfers": listed}}], world=2)
        assert "no record of rank 2" in _story(tmp_path)[-1]
    twice = [_hop("recv", 1, ["recv_prev", 0, [2]], end=0), _hop("recv", 1, ["send_next", 2, [2]])]
    _write(tmp_path, 1, twice, world=2)  # of one count, as no rank writes them
    assert _story(tmp_path)[-1] == "rank 1: in recv() at train.py:11, call 1 of group 'g' of ranks 0-2"


def test_errors_that_ended_ranks(tmp_path: Path) -> None:
    """Those of the program; that of a call is beside the call, with all of its lines."""
    first, then = _call("f", 1, [4]), _call("f", 2, [4], end=0, error="MismatchError: f:\n  rank 0: a\n  rank 1: b")
    _change(_write(tmp_path, 0, [first, then], world=2), reason=f"uncaught {then['error']}")
    _change(_write(tmp_path, 1, [first], world=2), reason="uncaught ValueError: out of\nmemory")
    call = "f(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-2"
    assert _story(tmp_path) == [
        "rank 1: ended by an uncaught ValueError: out of; memory",
        f"rank 0: failed in {call}: MismatchError: f: rank 0: a; rank 1: b; rank 1 did not join it; no record of "
        "rank 2",
    ]


def test_the_text_of_a_backend_is_one_line(tmp_path: Path) -> None:
    """Without places in C++ files and stacks, and without advice for a run that is over."""
    error = (
        "PeerError: f: the all_reduce over ranks [0, 1] failed on rank 0: [/pytorch/third_party/gloo/pair.cc:547] "
        "Connection closed by peer [127.0.0.1]:5\nException raised from f at x.cpp:1 (most recent call first):\n"
        "frame #0\nrun again with TRITONCOMM_CHECK=1, which names the rank and its call"
    )
    _write(tmp_path, 0, [_call("f", 1, [4], end=0, error=error)], world=1)
    (line,) = _story(tmp_path)
    assert "over ranks [0, 1] failed on rank 0: Connection closed by peer [127.0.0.1]:5;" in line
    assert not any(word in line for word in ("pair.cc", "frame", "run again"))


def test_a_circle_of_groups_comes_first(tmp_path: Path) -> None:
    """As check mode names it; ``initialize()`` names groups by their axis, ranks and a hash, which is not shown."""
    named = {"tensor.0-1.8fab6abc70df.1": [0, 1], "data.0-1.8fab6abc70df.2": [0, 1]}
    for rank in range(2):
        mine = _call("f", 1, [4], end=0, group=list(named)[rank])
        _change(_write(tmp_path, rank, [mine], world=2), groups=named, counts={mine["group"]: 1})
    assert _story(tmp_path)[:3] == [
        "ranks [0, 1] wait for each other in different calls:",
        "  rank 0: f(float32 [4], op=SUM) at train.py:11, call 1 of group 'tensor' of ranks 0-1",
        "  rank 1: f(float32 [4], op=SUM) at train.py:11, call 1 of group 'data.2' of ranks 0-1",
    ]


def test_a_call_of_another_thread_may_be_under_way(tmp_path: Path) -> None:
    _write(tmp_path, 0, [_call("f", 1, [4], end=0), _call("g", 2, [4])], world=1)
    assert _story(tmp_path)[-1].startswith("rank 0: in f(float32 [4], op=SUM) at train.py:11, call 1 of group 'g'")


def test_records_of_several_runs_are_noticed(tmp_path: Path) -> None:
    _write(tmp_path, 0, [_call("f", 1, [4])], world=2)
    _change(_write(tmp_path, 1, [_call("f", 1, [4], start=10**12, end=10**12 + 1)], world=3), time=10**12 + 2)
    _write(tmp_path, 2, [_call("f", 1, [4])], world=3)
    assert _story(tmp_path) == [
        "the records are of different runs: the world size is 2 on rank 0, 3 on ranks 1-2",
        "ranks 0, 2 wrote before the first call in the record of rank 1: rank 1 started late, or the records are of "
        "different runs",
    ]


def test_groups_of_one_name_and_other_ranks_are_not_compared(tmp_path: Path) -> None:
    for rank in range(4):
        path = _write(tmp_path, rank, [_call("f" if rank < 2 else "g", 1, [rank // 2])])
        _change(path, groups={"g": [0, 1] if rank < 2 else [2, 3]})
    assert _story(tmp_path) == [AGREE]
    _change(_write(tmp_path, 3, [_call("h", 1, [1])]), groups={})  # and its group is gone since
    _change(_write(tmp_path, 0, [_call("f", 1, [0])]), groups={"g": [0, 1]})
    assert _story(tmp_path)[0] == AGREE
    for rank in range(2):
        (tmp_path / f"tritoncomm-flight-{rank}.json").unlink()
    assert _story(tmp_path)[0] == "group 'g' of ranks 2-3: call 1 is the first that differs, in name:"


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
    assert _story(tmp_path) == [AGREE]


def test_sizes_that_are_even_are_none(tmp_path: Path) -> None:
    for rank in range(2):
        more = {"dim": 0, "sizes": [4, 4] if rank else None}
        _write(tmp_path, rank, [_call("f", 1, [4], kind="all_gather", arguments=more)], world=2)
    assert _story(tmp_path) == [AGREE]


def test_a_story_has_no_control_characters_and_no_endless_lines(tmp_path: Path) -> None:
    _write(tmp_path, 0, [_call("\x1b[2Jf", 1, list(range(10_000)), end=0)], world=1)
    (line,) = _story(tmp_path)
    assert line.startswith("rank 0: in \\x1b[2Jf(float32 [0, 1, 2, ")
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
        path = _write(tmp_path, rank, [*calls[:-1], calls[-1] | last], world=64)
        _change(path, time=10**9, counts={call["group"]: call["count"] for call in calls})
    started = time.monotonic()
    result = CliRunner().invoke(cli.app, ["trace", str(tmp_path), "--out", str(tmp_path / "job.json")])
    assert result.exit_code == 0, result.output
    story_lines, _, _ = result.output.partition("wrote ")  # the path that follows may break the line
    assert len(story_lines.splitlines()) == 5, result.output
    assert time.monotonic() - started < 60


_MEMORY = """
import resource, sys
from tritoncomm.debug import story, trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*story.story(trace.read([sys.argv[1]])), sep="\\n")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) // 1024)
"""


@pytest.mark.parametrize(
    ("world", "added"),
    [
        pytest.param(64, 25, marks=pytest.mark.slow),
        pytest.param(4096, 500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_records_are_not_all_in_memory(tmp_path: Path, world: int, added: int) -> None:
    """MiB that a process adds to its imports' as it traces records of 1,000 calls, 0.8 MiB each as objects.

    Pairs of ranks have p2p steps.
    """
    same = json.dumps([_call("f", count, [4]) for count in range(1, 996)])[1:-1]  # encoded once
    for rank in range(world):
        pair = [rank - rank % 2, rank + 1 - rank % 2]
        step = ["recv_prev", rank - 1, [2]] if rank % 2 else ["send_next", rank + 1, [2]]
        mine = [_hop("step", count, step, group="pair") for count in range(1, 5)]
        mine.append(_call("h" if rank == world - 1 else "f", 996, [4], end=0))
        head = {
            "format": 1, "rank": rank, "world": world, "host": "h", "pid": 1, "time": 10**9, "reason": "",
            "groups": {"g": list(range(world)), "pair": pair}, "counts": {"g": 996, "pair": 4},
        }  # fmt: skip
        calls = f'"calls": [{same}, {json.dumps(mine)[1:]}'
        (tmp_path / f"tritoncomm-flight-{rank}.json").write_text(f"{json.dumps(head)[:-1]}, {calls}}}")
    run = [sys.executable, "-c", _MEMORY, str(tmp_path)]
    *lines, memory = subprocess.run(run, check=True, capture_output=True, text=True, timeout=3500).stdout.splitlines()
    assert lines[0] == f"group 'g' of ranks 0-{world - 1}: call 996 is the first that differs, in name:"
    assert len(lines) == 5
    assert int(memory) < added


def test_a_record_that_is_written_again_meanwhile_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        _write(tmp_path, rank, [_call("f", 1, [4 + rank])], world=2)
    records = trace.read([tmp_path])
    _change(records[1].path, time=9001)
    with pytest.raises(tritoncomm.ArgumentError, match="was written again while it was read"):
        story.story(records)


def test_records_that_agree_say_so_and_other_files_are_refused(tmp_path: Path) -> None:
    files = [_write(tmp_path, rank, [_call("f", 1, [2])], world=3) for rank in range(3)]
    assert story.story(trace.read(files)) == [AGREE]
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
        (lambda data: data.update(calls=[3]), r"calls\[0\] is 3"),
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
    assert story.story(trace.read([path]))
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
        f"rank 0: the device has not completed {call} (issued, not started); rank 2 did not join it",
        f"rank 1: the device has not completed {call} (started, not completed); rank 2 did not join it",
    ]
    assert _story(tmp_path)[1:] == hangs
    _change(tmp_path / "tritoncomm-flight-0.json", active=[_active(2100)])
    assert _story(tmp_path)[1] == (
        "rank 0: the device has not completed nccl:all_reduce, torch's collective 5 of group 'g' of ranks 0-2, of no "
        "call in the record (issued, not started)"
    )
    for bad in ({}, [3], [{"created": 1}]):
        _change(tmp_path / "tritoncomm-flight-0.json", active=bad)
        with pytest.raises(tritoncomm.ArgumentError, match=r"is no flight record: record\.active"):
            _story(tmp_path)


def test_a_periodic_record_from_before_a_call_does_not_say_that_its_rank_did_not_come(tmp_path: Path) -> None:
    groups = {"g": [0, 1]}
    first, second = _call("f", 1, [4]), _call("f", 2, [4])
    _change(_write(tmp_path, 0, [first, second | {"end": 0}], world=2), groups=groups)
    path = _write(tmp_path, 1, [first], world=2)
    call = "f(float32 [4], op=SUM) at train.py:12, call 2 of group 'g' of ranks 0-1"
    _change(path, reason="periodic", time=1999, groups=groups)
    assert _story(tmp_path) == [f"rank 0: in {call}; rank 1 wrote the record before it"]
    _change(path, time=2001)
    assert _story(tmp_path) == [f"rank 0: in {call}; rank 1 did not join it"]
    _change(_write(tmp_path, 0, [first, second], world=2), groups=groups)
    assert _story(tmp_path) == [f"rank 1 did not join {call}, which rank 0 issued"]
    _change(path, time=1999)
    assert _story(tmp_path) == [AGREE]
    _write(tmp_path, 0, [_hop("recv", 1, ["recv_prev", 1, [2]])], world=2)
    path = _write(tmp_path, 1, [_hop("send", 1, ["send_next", 2, [2]])], world=2)
    for written, is_told in ((999, False), (1001, True)):
        _change(path, reason="periodic", time=written)
        assert any("rank 1 did not send" in line for line in _story(tmp_path)) is is_told
