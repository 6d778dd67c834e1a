"""Check mode: every kind of disagreement is named on all ranks, with the line of each caller; what agrees passes."""

import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disagreements import COLLECTIVES, HOPS, MAPPINGS, layouts
from pool import Pool
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import MismatchError, UnsupportedError, p2p, variables
from tritoncomm import collective as c
from tritoncomm import mappings as m
from tritoncomm.debug import check, exchange
from tritoncomm.debug.flight import Call

T = torch.ones
RECEIVERS = ("shape", "dtype", "count")  # of hops that the receiver alone refuses
CASES = {"collectives": COLLECTIVES, "mappings": MAPPINGS, "hops": HOPS}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Ranks of their own: transfers without another end stay posted, and would meet those of later tests."""
    ranks = Pool(2)
    yield ranks
    ranks.stop()


def text_of(call: Callable[[], Any]) -> str:
    """Text of the expected ``MismatchError``."""
    with pytest.raises(MismatchError) as caught:
        call()
    return str(caught.value)


def _synchronised(group: ProcessGroup) -> None:
    """The ranks go on with equal counts of calls on the group, whatever they missed."""
    dist.barrier(group)
    over, ranks = exchange.exchange(), dist.get_process_group_ranks(group)
    for channel in (f"{group.group_name}/{a}-{b}" for a in ranks for b in ranks):
        over.counts[channel] = (over.counts.get(channel, 0) // 1000 + 1) * 1000
    member = check._members.setdefault(group, check._Member(group, group.group_name))
    member.count, member.window = (member.count // 1000 + 1) * 1000, []
    dist.barrier(group)


def run_cases(group: ProcessGroup, kind: str) -> dict[str, str]:
    tritoncomm.destroy()
    rank, texts = group.rank(), {}
    cases = layouts(group) if kind == "layouts" else CASES[kind]
    with p2p.check():
        for name, (call, words) in cases.items():
            _synchronised(group)
            if kind == "hops" and not rank and name in RECEIVERS:
                call(group, rank)
                continue
            texts[name] = text_of(lambda call=call: call(group, rank))
            assert words in texts[name], (name, texts[name])
    _synchronised(group)
    return texts


@pytest.mark.parametrize("kind", ["collectives", "mappings", "hops", "layouts"])
def test_each_disagreement_is_named_on_both_ranks(pair: Pool, kind: str) -> None:
    ranks = pair.run(run_cases, kind)
    for name in ranks[1]:
        for texts in [each for each in ranks if name in each]:
            same = "ranks 0-1:" in texts[name]  # of calls that are the same, and do not fit together
            assert same or ("rank 0:" in texts[name] and "rank 1:" in texts[name]), texts[name]
            assert texts[name].count("disagreements.py:") == 2 - same, texts[name]


def test_there_are_forty_kinds() -> None:
    assert len(COLLECTIVES) + len(MAPPINGS) + len(HOPS) + 4 >= 40


def run_agreed(group: ProcessGroup) -> None:
    tritoncomm.destroy()
    _synchronised(group)  # other tests of these ranks end calls on one side only
    world, rank = group.size(), group.rank()
    with p2p.check():
        x = T(4, 4 * world, requires_grad=True)
        y = m.all_gather_dim(m.all_to_all_dims(x, 1, 0, group), -1, group)
        (m.reduce_scatter_dim(y, 1, group).sum() + m.copy_to_tensor_model_parallel_region(x, group).sum()).backward()
        sizes = list(range(1, world + 1))
        c.all_gather(T(rank + 1, 2), 0, group, sizes=sizes)
        c.all_gather(T(2, 2), 0, group, sizes=[2] * world if rank else None)  # both are the even collective
        c.all_to_all(T(sum(range(world))), group, [rank] * world, list(range(world)))
        out, handle = c.all_gather(T(2, 2), -1, group, True)
        assert out is handle.wait()
        stages = p2p.P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))
        first, last = stages.is_pp_first_stage, stages.is_pp_last_stage
        for _ in range(3):
            got = stages.recv_forward([2], first)
            grad = stages.send_forward_recv_backward(T(2) if got is None else got, [2], last)
            stages.send_backward(T(2) if grad is None else grad, first)
    over = exchange.exchange()
    assert not any(over.store.check([f"{over.prefix}/blocked/{rank}"]) for rank in range(world))


@pytest.mark.parametrize("world", [2, 4])
def test_what_agrees_passes(pool: Pool, world: int) -> None:
    pool.run(run_agreed, world=world)


def run_many(group: ProcessGroup) -> list[int]:
    tritoncomm.destroy()
    _synchronised(group)
    store, keys = exchange.exchange().store, []
    with p2p.check():
        for calls in (5, 40):
            for _ in range(calls):
                c.all_reduce(T(2), group)
            dist.barrier(group)
            keys.append(store.num_keys())
            dist.barrier(group)
    return keys


def test_the_store_does_not_grow(pair: Pool) -> None:
    for before, after in pair.run(run_many):
        assert after <= before + 2


def run_groups(group: ProcessGroup) -> str:
    tritoncomm.destroy()
    rank, other = group.rank(), dist.group.WORLD
    with p2p.check():
        text = text_of(lambda: c.all_reduce(T(2), group if rank else other))
        # Each is also refused the call that it missed; from then on the two agree again.
        assert "wait for each other" in text_of(lambda: c.all_reduce(T(2), other if rank else group))
        for each in (group, other):
            c.all_reduce(T(2), each)
    return text


def test_ranks_that_call_on_different_groups_are_named(tmp_path: Any) -> None:
    ranks = Pool(size=2)  # whose default group has the same two ranks as the one that it makes
    try:
        for text in ranks.run(run_groups):
            assert "ranks [0, 1] wait for each other in different calls" in text
            assert text.count("all_reduce(float32 [2], op=SUM) at") == 2
    finally:
        ranks.stop()


def run_late(group: ProcessGroup) -> tuple[str, float]:
    tritoncomm.destroy()
    _synchronised(group)
    started = time.monotonic()
    with p2p.check():
        c.all_reduce(T(2), group)
        for member in check._members.values():
            member.timeout = 1.5
        if group.rank():
            time.sleep(2.5)
        text = text_of(lambda: c.all_gather(T(2), 0, group))
    return text, time.monotonic() - started


def test_a_rank_that_does_not_come_is_named_within_the_timeout(pair: Pool) -> None:
    (text, seconds), (late, _) = pair.run(run_late)
    assert seconds < 5
    assert re.search(r"rank 1 did not come to call \d+002 of group", text)
    assert "rank 1: no call" in text
    assert "within 1.5 s" in text
    assert "rank 1 did not come" in late, "a rank that comes too late is refused at once"


def run_hash(group: ProcessGroup, place: int) -> str:
    tritoncomm.destroy()
    _synchronised(group)
    variables.HASH.assign(10)
    try:
        for _ in range(20):
            c.all_reduce(T(2), group)

        def differ() -> None:
            for index in range(10):
                x = T(2, 2) if index == place and group.rank() else T(4)  # as many bytes: nothing else notices
                c.all_reduce(x, group)

        return text_of(differ)
    finally:
        variables.HASH.assign(0)


def test_digests_name_the_first_difference(pair: Pool) -> None:
    for text in pair.run(run_hash, 3):
        assert re.search(r"call \d+024 of group", text), text
        assert "rank 0: all_reduce(float32 [4], op=SUM) at" in text
        assert "rank 1: all_reduce(float32 [2, 2], op=SUM) at" in text


def run_compiled(group: ProcessGroup) -> str:
    tritoncomm.destroy()
    with p2p.check(), pytest.raises(Exception) as caught:
        torch.compile(lambda x: m.all_gather_dim(x, 0, group), backend="eager", fullgraph=True)(T(2, 2))
    return str(caught.value)


def test_compiled_calls_are_refused_by_name(pair: Pool) -> None:
    for text in pair.run(run_compiled):
        assert "all_gather_dim: check mode" in text


def test_a_graph_that_is_captured_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = list(Call(1, "f", "all_reduce", "g", (), None, (), None, 0, 0, 0))
    with pytest.raises(UnsupportedError, match="f: check mode cannot compare calls that a CUDA graph replays"):
        check.check_call(call, None, type("OnGpu", (), {"is_cuda": True})())
