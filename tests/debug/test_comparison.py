"""Ranks agree on a call up a tree: requests and bytes of a rank, differences, circles, ends and timeouts."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from bench.check_scale import Counted
from tritoncomm.debug import comparison
from tritoncomm.debug.comparison import Comparison, combine, fail_circle
from tritoncomm.debug.store import Blocked, JobStore

DIGEST = b"fields of"[:8] + bytes(8)
OTHER = b"something"[:8] + bytes(8)


class Job:
    """Ranks in threads of this process, each with a client of one store."""

    def __init__(self, world: int, store: Any = None, timeout: float = 60.0) -> None:
        self.requests: list[list[tuple[str, int]]] = [[] for _ in range(world)]
        store = store or HashStore()
        self.stores = [JobStore(Counted(store, requests), rank) for rank, requests in enumerate(self.requests)]
        self.stale: list[list[str]] = [[] for _ in range(world)]
        self.timeout = timeout

    def call(self, count: int, digests: Sequence[bytes | None], judge: Callable[[list[Any]], str] = str) -> list[Any]:
        """The result of every rank of one call; a rank without a digest does not come."""
        results: list[Any] = [None] * len(digests)

        def rank(place: int, digest: bytes) -> None:
            which = f", call {count} of group 'g'"
            ranks, store = range(len(digests)), self.stores[place]
            comparison = Comparison(
                store, f"g/{count}", ranks, place, self.timeout, f"f({place}) at a.py:1", which, self.stale[place]
            )  # fmt: skip
            results[place] = comparison.compare(digest, lambda: place, judge)

        threads = [
            threading.Thread(target=rank, args=(place, digest)) for place, digest in enumerate(digests)
            if digest is not None
        ]  # fmt: skip
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
            assert not each.is_alive()
        return results


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "others_may_call", lambda callers, in_helper: False)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank looks for a reason: hundreds of threads of one process take long."""
    monkeypatch.setattr(comparison, "PATIENCE", 100.0)
    monkeypatch.setattr(comparison, "_FIRST_PAUSE", 100.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("world", [2, 17, 18, 512])
def test_a_rank_sends_four_requests_however_many_ranks_there_are(world: int) -> None:
    job = Job(world)
    for count in (1, 2):
        for each in job.requests:
            each.clear()
        assert job.call(count, [DIGEST] * world) == [""] * world
    for place, requests in enumerate(job.requests):
        children = max(0, min(16 * place + 17, world) - (16 * place + 1))
        own = [(name, size) for name, size in requests if name != "multi_get" and (name, size) != ("get", 16)]
        assert len(own) <= 4, requests
        assert len(requests) - len(own) == (children > 0), requests
        assert sum(size for _, size in own) <= 64
        assert sum(size for _, size in requests) <= 64 + 16 * children


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("place", [0, 1, 16, 17, 39])
def test_a_difference_anywhere_is_judged_from_all_contents(place: int) -> None:
    job, digests = Job(40), [DIGEST] * 40
    digests[place] = OTHER
    assert job.call(1, digests) == [str(list(range(40)))] * 40
    assert job.call(2, [DIGEST] * 40) == [""] * 40
    assert job.call(3, digests, lambda _: "") == [""] * 40, "the contents fit together after all"
    assert job.call(4, [DIGEST] * 40) == [""] * 40


def test_sums_that_do_not_cancel_differ() -> None:
    one, less = [DIGEST[:8] + sum_.to_bytes(8, "little") for sum_ in (1, 2**64 - 1)]
    assert combine([one, less]) == DIGEST
    assert combine([one, DIGEST]) == one
    assert combine([DIGEST, OTHER])[:8] == combine([combine([DIGEST, OTHER]), DIGEST])[:8] == b"\xff" * 8
    job = Job(3)
    assert job.call(1, [one, DIGEST, less]) == [""] * 3
    assert job.call(2, [one, DIGEST, one]) == ["[0, 1, 2]"] * 3


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_the_store_does_not_grow(kind: str) -> None:
    store: Any = HashStore() if kind == "hash" else TCPStore("localhost", 0, is_master=True)
    job, keys = Job(20, store), []
    for count in range(1, 7):
        job.call(count, [DIGEST if count % 3 or place else OTHER for place in range(20)])
        keys.append(store.num_keys())
    assert keys[3] == keys[0]
    assert max(keys[3:]) <= max(keys[:3])


@pytest.mark.parametrize("absent", [0, 1, 17, 19])
def test_a_rank_that_does_not_come_is_named_by_all(absent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after its parent in the tree; one rank makes the table, and then the group is usable."""
    tables, fail_late = [], Comparison._fail_late

    def counted(self: Comparison, base: str) -> None:
        tables.append(base)
        fail_late(self, base)

    monkeypatch.setattr(Comparison, "_fail_late", counted)
    job = Job(20, timeout=1.0)
    digests: list[bytes | None] = [DIGEST] * 20
    digests[absent] = None
    texts = [text for text in job.call(1, digests) if text is not None]
    assert len(texts) == 19
    assert len(set(texts)) == 1
    assert f"rank {absent} did not come to call 1 of group 'g' within 1 s" in texts[0]
    assert texts[0].count("at a.py:1") == 19
    assert tables == ["g/1"]
    job.timeout = 60.0
    late: list[bytes | None] = [None] * 20
    late[absent] = DIGEST
    assert job.call(1, late)[absent] == texts[0], "whoever comes later is refused at once"
    assert job.call(2, [DIGEST] * 20) == [""] * 20


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1, 300])
def test_a_rank_of_hundreds_that_does_not_come_is_named_by_all(absent: int) -> None:
    job, digests = Job(512, timeout=10.0), [DIGEST] * 512
    texts = job.call(1, [None if place == absent else digest for place, digest in enumerate(digests)])
    named = {text for text in texts if text is not None}
    assert len(named) == 1
    assert f"rank {absent} did not come to call 1 of group 'g' within 10 s" in named.pop()
    assert sum(map(len, job.requests)) < 512 * 100, "one rank makes the table, and few ranks search"
    job.timeout = 60.0
    job.call(1, [digest if place == absent else None for place, digest in enumerate(digests)])
    assert job.call(2, digests) == [""] * 512


@pytest.mark.parametrize("ended", [0, 18])
def test_a_rank_that_has_ended_is_named_before_the_timeout(ended: int) -> None:
    job = Job(20)
    digests: list[bytes | None] = [DIGEST] * 20
    digests[ended] = None
    job.stores[ended].leave("has ended with ValueError: x")
    for place, text in enumerate(job.call(1, digests)):
        assert place == ended or f"rank {ended} will not come to this call" in text


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError, RuntimeError])
@pytest.mark.parametrize("place", [0, 1])
def test_a_thread_that_is_interrupted_ends_the_call_for_the_others(
    place: int, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any exception: a handler of SIGALRM may raise its own."""
    monkeypatch.setattr(comparison, "PATIENCE", 0.1)
    job, looked = Job(3), threading.Event()

    def interrupted(*_: Any) -> None:
        if not looked.is_set():
            looked.set()
            raise kind

    monkeypatch.setattr(comparison, "_fail_ended", interrupted)
    results = []

    def rank() -> None:
        with pytest.raises(kind):
            Comparison(job.stores[place], "g/1", range(3), place, 60.0, "f", ", call 1", []).compare(DIGEST, list, str)
        results.append("ended")

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join(20)
    assert results == ["ended"]
    digests: list[bytes | None] = [DIGEST] * 3
    digests[place] = None
    assert job.call(1, digests).count(f"rank {place} has left this call") == 2


def _blocked(base: str, awaited: list[list[Any]]) -> Blocked:
    return Blocked(base, f"call {base}", awaited)


@pytest.mark.parametrize("goes_on", ["no", "leaves", "comes"])
def test_a_rank_that_goes_on_while_it_is_looked_at_is_in_no_circle(
    goes_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits for rank 0 in a transfer, and rank 0 for rank 1 in a collective, or so it seems to rank 0."""
    store = HashStore()
    here, there = [JobStore(store, rank) for rank in range(2)]
    mine, theirs = _blocked("c/1", [["c/1/1", 1]]), _blocked("g/0-1/1", [["g/0-1/1/0", 0]])
    there.publish(theirs)
    missing = comparison._missing

    def interrupted(store: JobStore, each: Blocked) -> list[int]:
        found = missing(store, each)
        if each == theirs and goes_on == "leaves":
            there.withdraw()
        if each == mine and goes_on == "comes":  # to the collective, and publishes before the next look that it waits
            there.set("c/1/1", "x")
            there.publish(theirs)
        return found

    monkeypatch.setattr(comparison, "_missing", interrupted)
    assert fail_circle(here, mine) is (goes_on == "no")
    assert here.has("c/1/verdict") is (goes_on == "no")


def test_ranks_that_wait_for_the_first_ranks_of_their_groups_are_in_a_circle() -> None:
    """Each is the last rank of the group that it calls on, and the first rank of the other one."""
    job, texts = Job(2), dict[int, str]()

    def rank(place: int) -> None:
        ranks = [1 - place, place]
        call = Comparison(job.stores[place], f"{place}/1", ranks, 1, 60.0, "f()", ", call 1", [])
        texts[place] = call.compare(DIGEST, list, str)

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    text = "ranks [0, 1] wait for each other in different calls:\n  ranks 0-1: f(), call 1"
    assert texts == dict.fromkeys(range(2), text)


def test_a_rank_whose_verdict_is_set_is_in_no_circle() -> None:
    """Its reading thread is slow: the first rank is in the report already, and waits there for this rank."""
    store = HashStore()
    first, here = [JobStore(store, rank) for rank in range(2)]
    first.publish(_blocked("c/1/report", [["c/1/report/1", 1]]))
    mine = _blocked("c/1", [["", 0]])
    here.set("c/1/verdict", "?")
    assert not fail_circle(here, mine)
    here.delete("c/1/verdict")
    assert fail_circle(here, mine)


def test_threads_of_a_rank_are_in_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread may make the call that another one waits for; whoever does not come is named after the timeout."""
    job = Job(3, timeout=1.0)
    monkeypatch.setattr(comparison, "others_may_call", lambda callers, _: callers is job.stores[0].callers)
    job.stores[1].publish(_blocked("other/1", [["other/1/0", 0]]))
    text = job.call(1, [DIGEST, None, DIGEST])[0]
    assert text.startswith("rank 1 did not come")
    assert text.count("at a.py:1") == 2
    assert "no call; blocked in call other/1" in text
