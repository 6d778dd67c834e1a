"""Check mode: every kind of disagreement is named on all ranks, with the line of each caller; what agrees passes."""

import gc
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from disagreements import COLLECTIVES, HOPS, MAPPINGS, layouts, synchronise
from pool import Pool
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup, ReduceOp

import tritoncomm
from tritoncomm import ArgumentError, MismatchError, UnsupportedError, groups, p2p, variables
from tritoncomm import collective as c
from tritoncomm import mappings as m
from tritoncomm.debug import check, p2p_check, store
from tritoncomm.debug.flight import FlightCall
from tritoncomm.p2p import header
from tritoncomm.p2p.neighbours import Neighbours

T = torch.ones
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


def run_cases(group: ProcessGroup, kind: str) -> dict[str, str]:
    tritoncomm.destroy()
    rank, texts = group.rank(), {}
    cases = layouts(group) if kind == "layouts" else CASES[kind]
    with p2p.check():
        for name, (call, words) in cases.items():
            synchronise(group)
            texts[name] = text_of(lambda call=call: call(group, rank))
            assert words in texts[name], (name, texts[name])
    synchronise(group)
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


def _stages(group: ProcessGroup) -> Any:
    return p2p.P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))


def _checked(group: ProcessGroup, name: str, **shapes: list[int]) -> p2p_check.CheckedHop:
    """A step of which nothing is transferred: where senders do not wait for their receivers, as on a GPU's stream."""
    contents = {key: p2p_check.Content(f"{shape}", [[shape, "float32"]]) for key, shape in shapes.items()}
    return p2p_check.CheckedHop(Neighbours.of(group), name, contents)


def run_late_receiver(group: ProcessGroup) -> str:
    """Rank 1 comes to the first transfer after rank 0 went on, so rank 0 learns of it at its next step."""
    tritoncomm.destroy()
    synchronise(group)
    p2p_check.LONGEST_WAIT, longest = 0.05, p2p_check.LONGEST_WAIT
    try:
        if not group.rank():
            assert not _checked(group, "first", send_next=[2, 2]).problem("send_next")
            assert not _checked(group, "second", send_next=[4]).earlier()
        dist.barrier(group)
        texts = [_checked(group, "g", recv_prev=[4]).problem("recv_prev") for _ in range(2)] if group.rank() else []
        dist.barrier(group)
        if not group.rank():
            later = _checked(group, "third", send_prev=[1])
            texts = [later.earlier(), later.earlier()]
        dist.barrier(group)
        assert texts[1] == "", "each is named once"
    finally:
        p2p_check.LONGEST_WAIT = longest
    return texts[0]


def test_a_sender_whose_receiver_comes_late_is_named_at_its_next_step(pair: Pool) -> None:
    sender, receiver = pair.run(run_late_receiver)
    assert sender.startswith("in an earlier step, third: stage 0 of 2 (rank 0) and rank 1 do not agree")
    for text in (sender, receiver):
        assert "first: send_next [2, 2] at" in text
        assert "g: recv_prev [4] at" in text


def run_one_sided(group: ProcessGroup) -> list[str]:
    """Rank 0 fails before its hop; rank 1, which waits in it, is told at once."""
    tritoncomm.destroy()
    synchronise(group)
    stages, rank = _stages(group), group.rank()
    # Behind this wait a receive is in the backend, which tells it nothing; on a busy machine rank 0 comes late.
    with p2p.check(), mock.patch.object(p2p_check, "LONGEST_WAIT", 30.0):
        if rank:
            texts = [text_of(lambda: stages.recv_forward([2], False))]
        else:
            with pytest.raises(ArgumentError):
                stages.send_forward([T(2), "no tensor"], False)
            texts = [text_of(lambda: stages.send_forward(T(2), False))]
        c.all_reduce(T(2), group)
    return texts


def test_an_error_before_a_hop_is_named_at_both_ends_and_closes_their_channel(pair: Pool) -> None:
    for texts in pair.run(run_one_sided):
        for text in texts:
            assert "ranks 0 and 1 are out of step since rank 0 gave up its send_forward: send_next" in text
            assert "ArgumentError: send_forward: expected a tensor or a list of tensors, not str" in text
            assert text.endswith("make their process group again, as by destroy() and initialize()")


def run_empty_send(group: ProcessGroup, overlapped: bool) -> list[str]:
    """A send without elements has a header only; its receiver expects some. Then both are in step."""
    tritoncomm.destroy()
    synchronise(group)
    config = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False)
    stages, rank, texts = p2p.P2PCommunicator(group, config), group.rank(), []

    def step(x: torch.Tensor, size: int) -> None:
        """Each stage sends ``x`` to the other one, and expects ``size`` elements."""
        for handle in stages.send_backward_recv_backward(x, True, (size,), overlap_p2p_comm=True)[1].values():
            handle.wait()

    with p2p.check():
        for x in (T(0), T(0, 2)):
            if overlapped:
                texts.append(text_of(lambda x=x: step(x, 2)))
            elif rank:
                texts.append(text_of(lambda: stages.recv_forward([2], False)))
            else:
                texts.append(text_of(lambda x=x: stages.send_forward(x, False)))
            if rank:
                stages.recv_forward([0], False)
                assert torch.equal(stages.recv_forward([2], False), T(2))
            else:
                stages.send_forward(T(0), False)
                stages.send_forward(T(2), False)
    return texts


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_send_without_elements_is_compared(pair: Pool, overlapped: bool) -> None:
    for texts in pair.run(run_empty_send, overlapped):
        for text, shape in zip(texts, ("[0]", "[0, 2]"), strict=True):
            assert "do not agree on a transfer" in text
            assert f" {shape} float32 at " in text


def run_fails_inside(group: ProcessGroup) -> list[str]:
    """Rank 1 fails in its step of two directions, before rank 0 comes to it."""
    tritoncomm.destroy()
    synchronise(group)
    stages, rank, texts = _stages(group), group.rank(), []
    with p2p.check():
        if rank:
            failing = mock.patch.object(header, "exchange_headers", side_effect=MemoryError("no room"))
            with failing, pytest.raises(MemoryError):
                stages.recv_forward([2], False)
        dist.barrier(group)
        for _ in range(2):
            texts.append(text_of(lambda: stages.recv_forward([2], False) if rank else stages.send_forward(T(2), False)))
        got = None if rank else stages.recv_backward([2], False)
        if rank:
            stages.send_backward(T(2), False)
        assert rank or torch.equal(got, T(2)), "the other direction is in step"
    return texts


def test_a_step_that_fails_inside_is_refused_to_both_ends_from_then_on(pair: Pool) -> None:
    for texts in pair.run(run_fails_inside):
        for text in texts:
            assert "ranks 1 and 0 are out of step since rank 1 gave up its recv_forward: recv_prev [2] float32" in text
            assert "MemoryError: no room" in text
            assert "make their process group again" in text


def run_out_of_step_made_again(group: ProcessGroup) -> None:
    """The remedy that the error names helps, also where the group that is made again has the same name."""
    tritoncomm.destroy()
    synchronise(group)
    rank, names = group.rank(), set[str]()
    for _ in range(3):
        made = _local_group()
        names.add(made.group_name)
        with p2p.check():
            stages = _stages(made)
            if rank:
                stages.send_backward(T(2), False)
            else:
                assert torch.equal(stages.recv_backward([2], False), T(2))
        if rank:
            _checked(made, "f", send_prev=[2])
        dist.barrier(group)
        if not rank:
            _checked(made, "g", recv_next=[2]).give_up("a mistake")
        dist.barrier(group)
        for _ in range(2):
            key = "send_prev" if rank else "recv_next"
            step = _checked(made, "f", **{key: [2]})
            assert "are out of step" in text_of(lambda step=step, key=key: step.meet(key))
        _destroy(made, group)
    assert len(names) == 1


def test_a_channel_that_is_out_of_step_is_open_for_the_next_group_of_its_name(pair: Pool) -> None:
    pair.run(run_out_of_step_made_again)


def run_agreed(group: ProcessGroup) -> None:
    tritoncomm.destroy()
    synchronise(group)  # other tests of these ranks end calls on one side only
    world, rank = group.size(), group.rank()
    with p2p.check():
        x = T(4, 4 * world, requires_grad=True)
        y = m.all_gather_dim(m.all_to_all_dims(x, 1, 0, group), -1, group)
        (m.reduce_scatter_dim(y, 1, group).sum() + m.copy_to_tensor_model_parallel_region(x, group).sum()).backward()
        sizes = list(range(1, world + 1))
        c.all_gather(T(rank + 1, 2), 0, group, sizes=sizes)
        c.all_gather(T(2, 2), 0, group, sizes=[2] * world if rank else None)  # both are the even collective
        c.all_reduce(T(2), group, ReduceOp(ReduceOp.SUM) if rank else ReduceOp.SUM)
        c.all_to_all(T(sum(range(world))), group, [rank] * world, list(range(world)))
        c.split_reduce_scatter([T(2 * world)], 0, group, scale=2 if rank else 2.0)
        c.reduce_scatter(T(2 * world), 0, group, wire=torch.bfloat16, scale=2 if rank else 2.0)
        out, handle = c.all_gather(T(2, 2), -1, group, True)
        assert out is handle.wait()
        stages = p2p.P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))
        first, last = stages.is_pp_first_stage, stages.is_pp_last_stage
        for _ in range(3):
            got = stages.recv_forward([2], first)
            grad = stages.send_forward_recv_backward(T(2) if got is None else got, [2], last)
            stages.send_backward(T(2) if grad is None else grad, first)
    assert not any(store.job_store().blocked(rank) for rank in range(world))


@pytest.mark.parametrize("world", [2, 4])
def test_what_agrees_passes(pool: Pool, world: int) -> None:
    pool.run(run_agreed, world=world)


def run_many(group: ProcessGroup) -> list[int]:
    tritoncomm.destroy()
    synchronise(group)
    keys: list[int] = []
    with p2p.check():
        for calls in (5, 40):
            for _ in range(calls):
                c.all_reduce(T(2), group)
            dist.barrier(group)
            keys.append(dist.distributed_c10d._get_default_store().num_keys())
            dist.barrier(group)
    return keys


def test_the_store_does_not_grow(pair: Pool) -> None:
    for before, after in pair.run(run_many):
        assert after <= before + 2


def run_odd_file(group: ProcessGroup) -> str:
    names: dict[str, Any] = {"c": c, "T": T}
    exec(compile("def call(n, group):\n    return c.all_reduce(T(n), group)\n", "/tr\udc80in.py", "exec"), names)
    tritoncomm.destroy()
    with p2p.check():
        names["call"](2, group)
        return text_of(lambda: names["call"](1 + group.rank(), group))


def test_a_file_whose_name_is_not_utf_8_is_named(pair: Pool) -> None:
    for text in pair.run(run_odd_file):
        assert "at /tr\\udc80in.py:2" in text
        text.encode()


def run_groups_destroyed(group: ProcessGroup) -> list[int]:
    """Keys that this rank has set and nobody deleted, after some groups that had calls, and after as many more."""
    tritoncomm.destroy()
    synchronise(group)
    counts: list[int] = []
    left, set_once, delete = set[str](), store.JobStore.set_once, store.JobStore.delete

    def noted(self: store.JobStore, key: str, value: str | bytes) -> bytes:
        left.add(key)
        return set_once(self, key, value)

    def forgotten(self: store.JobStore, key: str) -> None:
        left.discard(key)
        delete(self, key)

    patched = mock.patch.multiple(store.JobStore, set_once=noted, delete=forgotten)
    with p2p.check(), patched:
        for _ in range(3):
            for calls in (1, 3, 1, 2):
                numbered = dist.new_group([0, 1])
                named = groups.make_group("named", (0, 1), "gloo")
                for each in (numbered, named):
                    for _ in range(calls):
                        c.all_reduce(T(2), each)
                    dist.destroy_process_group(each)
                del each, numbered, named
            for _ in range(3):
                c.all_reduce(T(2), group)
            counts.append(sum("verdict" in key for key in left))
    return counts


def test_destroyed_groups_leave_no_keys(pair: Pool) -> None:
    for _, before, after in pair.run(run_groups_destroyed):
        assert after <= before


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


def test_first_calls_of_several_threads_have_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two with prefixes of their own would wait for ranks that compare over the other one."""
    job, made = HashStore(), []

    class Slow(store.JobStore):
        def __init__(self, store: Any, rank: int) -> None:
            time.sleep(0.05)
            super().__init__(store, rank)

    monkeypatch.setattr(store, "JobStore", Slow)
    monkeypatch.setattr(store, "_current", [])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: job)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    threads = [threading.Thread(target=lambda: made.append(store.job_store())) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(made) == 4
    assert len(set(map(id, made))) == 1


@contextmanager
def impatient() -> Iterator[None]:
    """Within: ranks wait 1.5 s for each other, and as long as before in later tests."""
    with ExitStack() as stack:
        for member in check._members.values():
            stack.enter_context(mock.patch.object(member, "timeout", 1.5))
        yield


def run_late(group: ProcessGroup) -> tuple[str, float]:
    tritoncomm.destroy()
    synchronise(group)
    started = time.monotonic()
    with p2p.check():
        c.all_reduce(T(2), group)
        with impatient():
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


def run_backward(group: ProcessGroup, mapping: str, elsewhere: bool) -> str:
    """One rank's input needs no gradient, so that it goes on, to another call or to none."""
    tritoncomm.destroy()
    synchronise(group)
    with p2p.check():
        y = getattr(m, mapping)(T(2, 2).requires_grad_(group.rank() == 0), group=group)
        with impatient():
            if group.rank() == 0:
                return text_of(lambda: (y.sum() * 2).backward())
            if elsewhere:
                return text_of(lambda: c.all_reduce(T(2), group))
            time.sleep(2)
    return ""


@pytest.mark.parametrize(
    ("mapping", "elsewhere"),
    [
        ("gather_from_sequence_parallel_region", True),
        ("copy_to_tensor_model_parallel_region", True),
        ("all_to_all_sp2hp", True),
        ("all_to_all_sp2hp", False),
    ],
)
def test_a_backward_that_waits_names_the_rank_whose_input_needs_no_gradient(
    pair: Pool, mapping: str, elsewhere: bool
) -> None:
    text, other = pair.run(run_backward, mapping, elsewhere)
    assert f"rank 0: {mapping}.backward(float32" in text
    assert f"rank 1: {'all_reduce(' if elsewhere else 'no call'}" in text
    for each in (text, other)[: 1 + elsewhere]:
        assert each.endswith("it has to need one on every rank of the group, or on none")


def run_hash(group: ProcessGroup, place: int) -> str:
    tritoncomm.destroy()
    synchronise(group)
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
        assert re.search(r"call \d+024 of their group", text), text
        assert "rank 0: all_reduce(float32 [4], op=SUM) at" in text
        assert "rank 1: all_reduce(float32 [2, 2], op=SUM) at" in text


def run_hash_on_a_group_that_goes(group: ProcessGroup) -> bool:
    tritoncomm.destroy()
    made = dist.new_group([0, 1])
    with variables.HASH.override(1000):
        c.all_reduce(T(2), made)
    kept = weakref.ref(check._members[made])
    dist.destroy_process_group(made)
    del made
    gc.collect()
    return kept() is None


def _local_group(name: str = "0fb7e2c5") -> ProcessGroup:
    """A group whose name is a hash of its ranks: made again after it was destroyed, it has the same name.

    The number of the rank's groups is in the hash too, and differs between ranks of a pool; then torch would hang.
    """
    with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", return_value=name):
        return dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=20))


def _destroy(made: ProcessGroup, group: ProcessGroup) -> None:
    """Destroy a group of ``_local_group``, and where its ranks met: torch itself may read that of before, and hang."""
    name, store = made.group_name, dist.distributed_c10d._get_default_store()
    dist.barrier(group)
    dist.destroy_process_group(made)
    assert store.delete_key(f"{name}//cpu//0/{group.rank()}"), "torch has these keys elsewhere"
    dist.barrier(group)


def _differ(group: ProcessGroup, rank: int) -> str:
    return text_of(lambda: c.all_reduce(T(2), group, ReduceOp.MAX if rank else ReduceOp.SUM))


def _end_agreed(made: ProcessGroup, group: ProcessGroup, rank: int) -> None:
    c.all_reduce(T(2), made)


def _end_different(made: ProcessGroup, group: ProcessGroup, rank: int) -> None:
    _differ(made, rank)


def _end_later(made: ProcessGroup, group: ProcessGroup, rank: int) -> None:
    c.all_reduce(T(2), made)
    _differ(made, rank)


def _end_one_sided(made: ProcessGroup, group: ProcessGroup, rank: int, alone: int = 1) -> None:
    """Rank ``alone`` calls on the group, the other one on another group."""
    assert "wait for each other" in text_of(lambda: c.all_reduce(T(2), made if rank == alone else group))
    if rank == alone:
        assert "wait for each other" in text_of(lambda: c.all_reduce(T(2), group)), "the call that it missed"


def _end_one_sided_first(made: ProcessGroup, group: ProcessGroup, rank: int) -> None:
    _end_one_sided(made, group, rank, alone=0)


def _end_one_sided_later(made: ProcessGroup, group: ProcessGroup, rank: int) -> None:
    c.all_reduce(T(2), made)
    _end_one_sided(made, group, rank)


def _end_uncalled(made: ProcessGroup, group: ProcessGroup, rank: int) -> None:
    pass


ENDS = (
    _end_agreed, _end_different, _end_later, _end_one_sided, _end_one_sided_first, _end_one_sided_later, _end_uncalled,
)  # fmt: skip


def run_made_again(group: ProcessGroup, first: int) -> None:
    """Every end of a group is followed by every other, and by calls that agree or differ."""
    tritoncomm.destroy()
    synchronise(group)
    rank, names, kept = group.rank(), set[str](), []
    with p2p.check():
        for end in ENDS[first:] + ENDS[:first]:
            for agrees_first in (True, False):
                for ends_before in (True, False):
                    made = _local_group()
                    names.add(made.group_name)
                    kept.append(made)  # a program may hold a group that it has destroyed
                    if ends_before:
                        end(made, group, rank)
                    else:
                        for agrees in (agrees_first, not agrees_first):
                            c.all_reduce(T(2), made) if agrees else _differ(made, rank)
                    _destroy(made, group)
    assert len(names) == 1
    assert not any(store.job_store().has(f"{names.copy().pop()}/{count}/verdict") for count in range(9))


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(ENDS)))])
def test_a_group_that_is_made_again_under_its_name_does_not_read_old_verdicts(pair: Pool, first: int) -> None:
    pair.run(run_made_again, first)


def run_slow_to_leave(group: ProcessGroup) -> None:
    """Rank 1 returns from a failed comparison a second after rank 0, which has made its next call by then."""
    tritoncomm.destroy()
    synchronise(group)
    rank, read, made = group.rank(), store.JobStore.read, [_local_group(name) for name in ("5f1c", "c4d8")]

    def slow(*arguments: Any, **options: Any) -> Any:
        value = read(*arguments, **options)
        time.sleep(rank)
        return value

    with p2p.check():
        with mock.patch.object(store.JobStore, "read", slow):
            for each in (made[rank], made[1 - rank]):
                assert "wait for each other" in text_of(lambda each=each: c.all_reduce(T(2), each))
        for each in made:
            c.all_reduce(T(2), each)
    for each in made:
        _destroy(each, group)


def test_an_incarnation_that_failed_is_closed_before_a_rank_leaves_it(pair: Pool) -> None:
    pair.run(run_slow_to_leave)


def run_windows_made_again(group: ProcessGroup) -> list[str]:
    tritoncomm.destroy()
    synchronise(group)
    rank, texts = group.rank(), []
    with variables.HASH.override(3):
        for place in (None, 1, None, 2, 1):
            made = _local_group()
            for index in range(3):
                x = T(2, 2) if index == place and rank else T(4)
                if place is not None and index == 2:
                    texts.append(text_of(lambda x=x, made=made: c.all_reduce(x, made)))
                else:
                    c.all_reduce(x, made)
            _destroy(made, group)
    return [re.findall(r"call (\d+) of their group", text)[0] for text in texts]


def test_digests_of_a_group_that_is_made_again_are_compared(pair: Pool) -> None:
    assert pair.run(run_windows_made_again) == [["2", "3", "2"]] * 2


def test_calls_of_a_group_that_is_gone_are_not_kept(pair: Pool) -> None:
    assert pair.run(run_hash_on_a_group_that_goes) == [True, True]


def test_digests_at_different_intervals_are_named() -> None:
    member: Any = SimpleNamespace(name="g", ranks=[0, 3])
    text = check._first_difference([[[{}, "f", [], []]] * calls for calls in (2, 3)], member, 1)
    assert text.splitlines() == [
        "ranks compare their digests of group 'g' at different intervals:", "  rank 0: 2 calls", "  rank 3: 3 calls"
    ]  # fmt: skip


def run_hash_of_hops(group: ProcessGroup) -> str:
    tritoncomm.destroy()
    synchronise(group)
    stages, rank = _stages(group), group.rank()
    with variables.HASH.override(2):
        for _ in range(4):  # as many bytes in other shapes
            stages.recv_forward([2, 2], False) if rank else stages.send_forward(T(4), False)
        c.all_reduce(T(2), group)
        stages.recv_backward([3], False) if rank == 0 else stages.send_backward(T(3), False)
        return text_of(lambda: c.all_reduce(T(2, 2) if rank else T(4), group))


def test_hash_mode_compares_collectives_only(pair: Pool) -> None:
    """P2p steps that differ pass; they do not count towards the collectives between two comparisons."""
    for text in pair.run(run_hash_of_hops):
        assert "rank 0: all_reduce(float32 [4], op=SUM) at" in text
        assert "rank 1: all_reduce(float32 [2, 2], op=SUM) at" in text


MAPPED: tuple[Callable[[torch.Tensor, ProcessGroup], torch.Tensor], ...] = (
    lambda x, group: m.all_gather_dim(x, 1, group),
    m.copy_to_tensor_model_parallel_region,
    lambda x, group: m.all_to_all(group, x, *[([3, 1], [1, 3])[group.rank()]] * 2),
    m.reduce_from_tensor_model_parallel_region,
    lambda x, group: m.reduce_scatter_dim(x, 1, group),
    lambda x, group: m.split_dim(x, 0, group),
    lambda x, group: m.all_to_all_dims(x, 0, 1, group),
    m.all_to_all_sp2hp,
    m.all_to_all_hp2sp,
    m.scatter_to_tensor_model_parallel_region,
    m.gather_from_tensor_model_parallel_region,
    m.scatter_to_sequence_parallel_region,
    lambda x, group: m.gather_from_sequence_parallel_region(x, group=group),
    m.reduce_scatter_to_sequence_parallel_region,
    m.all_gather_last_dim_from_tensor_parallel_region,
    m.reduce_scatter_last_dim_to_tensor_parallel_region,
)


def run_compiled(group: ProcessGroup, count: int, setting: bool) -> None:
    """Values and gradients of a compiled program of ``count`` mappings, as without a compiler."""
    warnings.filterwarnings("ignore", message=r"The \.grad attribute")  # torch hides it where warnings are no errors
    tritoncomm.destroy()

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [mapped(x * 2, group).sin() for mapped in MAPPED[:count]]

    with variables.CHECK.override(True) if setting else variables.HASH.override(1):
        results = []
        for run in (program, torch.compile(program, backend="aot_eager")):
            x = torch.arange(16.0).view(4, 4).add(group.rank()).requires_grad_()
            outputs = run(x)
            torch.stack([y.square().sum() for y in outputs]).sum().backward()
            results.append([*outputs, x.grad])
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)


def run_compiled_differently(group: ProcessGroup) -> str:
    tritoncomm.destroy()
    torch._dynamo.reset()
    with p2p.check():
        return text_of(
            lambda: torch.compile(lambda x: m.all_gather_dim(x, group.rank(), group).sin(), backend="eager")(T(2, 2))
        )


def run_as_one_graph(group: ProcessGroup) -> str:
    tritoncomm.destroy()
    torch._dynamo.reset()
    with p2p.check(), pytest.raises(Exception) as caught:
        torch.compile(lambda x: m.all_gather_dim(x, 0, group), backend="eager", fullgraph=True)(T(2, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("count", "setting"),
    [(4, False), *(pytest.param(count, True, marks=pytest.mark.slow) for count in (4, len(MAPPED)))],
)
def test_compiled_programs_are_checked_outside_of_their_graphs(pair: Pool, count: int, setting: bool) -> None:
    """Torch compiles the frames of a mapping up to the break in each, so that a program of all takes 40 s."""
    pair.run(run_compiled, count, setting)


def test_compiled_programs_that_differ_are_named(pair: Pool) -> None:
    for text in pair.run(run_compiled_differently):
        assert "dim=0" in text
        assert "dim=1" in text
        assert text.count("test_check.py:") == 2


def test_one_graph_is_refused_by_name(pair: Pool) -> None:
    for text in pair.run(run_as_one_graph):
        assert "all_gather_dim: check mode" in text


def test_a_graph_that_is_captured_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    call = list(FlightCall(1, "f", "all_reduce", "g", (), None, (), None, 0, 0, 0))
    with pytest.raises(UnsupportedError, match="f: check mode cannot compare calls that a CUDA graph replays"):
        check.check_call(call, None, type("OnGpu", (), {"is_cuda": True})())
