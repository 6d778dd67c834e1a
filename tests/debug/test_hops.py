"""Races of check mode's p2p steps, played out between two ends in one process: who gives up, and who learns of it."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from tritoncomm import MismatchError
from tritoncomm.debug import exchange, hops
from tritoncomm.debug.exchange import Blocked, Exchange
from tritoncomm.debug.hops import CheckedHop, Content

CIRCLE = "ranks [0, 1, 2] wait for each other in different calls"


class Ends:
    """Two ranks over one store: rank 0 sends to rank 1."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        store = HashStore()
        self.over = [Exchange(store, rank) for rank in range(2)]
        self._patch = patch
        patch.setattr(hops, "MOMENT", 0.1)
        for each in self.over:
            patch.setattr(each, "_has_threads", True)  # no circles: the tests say what is one

    def step(self, rank: int, words: str = "step") -> CheckedHop:
        """The transfer as rank ``rank`` makes it: its keys are set, and nothing is looked at yet."""
        self._patch.setattr(hops, "exchange", lambda: self.over[rank])
        neighbours = SimpleNamespace(peer=lambda key: 1 - rank, channel=lambda key: "g", group=lambda: self)
        content = Content(words, [[[2], "float32"]])
        return CheckedHop(neighbours, words, {"recv_prev" if rank else "send_next": content})

    def circle(self, count: int) -> None:
        """What a third rank does that has seen one end here, and the other one blocked elsewhere."""
        over = self.over[0]
        over.store.compare_set(f"{over.prefix}/g/0-1/{count}/verdict", "", CIRCLE)


KEYS = "send_next", "recv_prev"


def refused(step: CheckedHop, rank: int) -> str:
    with pytest.raises(MismatchError) as caught:
        step.meet(KEYS[rank])
    return str(caught.value)


def agree(ends: Ends) -> None:
    """Both ends make the next transfer, and it belongs together."""
    steps = [ends.step(rank) for rank in range(2)]
    for rank in range(2):
        steps[rank].meet(KEYS[rank])
    assert [steps[rank].problem(KEYS[rank]) for rank in (1, 0)] == ["", ""]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    return Ends(monkeypatch)


@pytest.mark.parametrize("first", [0, 1], ids=["sender", "receiver"])
def test_an_end_that_comes_while_a_circle_is_judged_closes_the_channel(ends: Ends, first: int) -> None:
    """It has seen no verdict and goes on, and the other end is refused: from then on they are a message apart."""
    waits = ends.step(first)
    comes = ends.step(1 - first)
    comes.meet(KEYS[1 - first])  # the other end is here, and there is no verdict
    ends.circle(1)
    assert CIRCLE in refused(waits, first)
    for _ in range(2):
        steps = [ends.step(rank) for rank in range(2)]
        for rank in range(2):
            assert f"ranks {first} and {1 - first} are out of step" in refused(steps[rank], rank)


@pytest.mark.parametrize("first", [0, 1], ids=["sender", "receiver"])
def test_an_end_that_comes_after_the_circle_is_refused_too_and_both_go_on(ends: Ends, first: int) -> None:
    waits = ends.step(first)
    ends.circle(1)
    assert CIRCLE in refused(waits, first)
    assert CIRCLE in refused(ends.step(1 - first), 1 - first)
    agree(ends)


def test_ends_that_are_refused_at_the_same_time_go_on(ends: Ends) -> None:
    steps = [ends.step(rank) for rank in range(2)]
    ends.circle(1)
    threads = [threading.Thread(target=refused, args=(steps[rank], rank)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    agree(ends)


def test_an_end_that_has_gone_on_alone_closes_the_channel_when_it_fails(ends: Ends) -> None:
    sends = ends.step(0)
    sends.meet("send_next")  # nobody comes for a moment, and the message is posted
    sends.give_up("PeerError: timeout")
    assert "gave this transfer up" in refused(ends.step(1), 1)
    assert "out of step" in refused(ends.step(1), 1)


def test_a_closed_channel_is_seen_before_the_end_that_closed_it(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks of one end, the other closes the channel and comes to the next transfer."""
    ends.step(1)
    ends.step(0).give_up("a mistake")
    waits, over = ends.step(1), ends.over[1]
    get, verdict = over.get, f"{over.prefix}/g/0-1/2/verdict"
    closed = get(verdict)
    assert closed is not None
    over.store.delete_key(verdict)
    meanwhile: list[Callable[[], Any]] = [lambda: (over.store.set(verdict, closed), ends.step(0))]

    def interrupted(key: str) -> bytes | None:
        content = get(key)
        if meanwhile:
            meanwhile.pop()()
        return content

    monkeypatch.setattr(over, "get", interrupted)
    assert "out of step" in refused(waits, 1)


def _blocked(over: Exchange, base: str, ranks: list[int]) -> Blocked:
    return Blocked(f"{over.prefix}/{base}", ranks, f"call {base}")


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_rank_that_goes_on_while_it_is_looked_at_is_in_no_circle(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Rank 1 leaves a step with rank 0, whose key it takes away; rank 0 waits for it in a collective."""
    here, there = ends.over
    mine, theirs = _blocked(here, "c/1", [0, 1]), _blocked(here, "g/0-1/1", [0, 1])
    here.store.set(f"{mine.base}/0", "[]")
    there.publish(theirs)
    here.store.set(f"{theirs.base}/1", "[]")
    if goes_on:
        here.store.set(f"{theirs.base}/0", "[]")
    missing = exchange._missing

    def interrupted(over: Exchange, own: int, each: Blocked) -> list[int]:
        if goes_on and own == 1:
            there.withdraw()
            there.store.delete_key(f"{theirs.base}/0")
        return missing(over, own, each)

    monkeypatch.setattr(exchange, "_missing", interrupted)
    verdict = exchange.fail_circle(here, mine)
    assert (verdict is None) is goes_on
    assert here.store.check([f"{mine.base}/verdict"]) is not goes_on
