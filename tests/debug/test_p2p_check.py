"""Races of check mode's p2p steps, played out between two ends in one process: who gives up, and who learns of it."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tritoncomm import MismatchError
from tritoncomm.debug import p2p_check
from tritoncomm.debug.p2p_check import CheckedHop, Content
from tritoncomm.debug.store import JobStore

CIRCLE = "ranks [0, 1, 2] wait for each other in different calls"


class Ends:
    """Two ranks over one store: rank 0 sends to rank 1."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        store = HashStore()
        self.stores = [JobStore(store, rank) for rank in range(2)]
        self._patch = patch
        patch.setattr(p2p_check, "LONGEST_WAIT", 0.1)
        for each in self.stores:
            patch.setattr(each, "has_threads", True)  # no circles: the tests say what is one

    def step(self, rank: int, words: str = "step") -> CheckedHop:
        """The transfer as rank ``rank`` makes it: its keys are set, and nothing is looked at yet."""
        self._patch.setattr(p2p_check, "job_store", lambda: self.stores[rank])
        neighbours = SimpleNamespace(peer=lambda key: 1 - rank, channel=lambda key: "g", group=lambda: self)
        content = Content(words, [[[2], "float32"]])
        return CheckedHop(neighbours, words, {"recv_prev" if rank else "send_next": content})

    def circle(self, count: int) -> None:
        """What a third rank does that has seen one end here, and the other one blocked elsewhere."""
        self.stores[0].set_once(f"g/0-1/{count}/verdict", CIRCLE)


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
    waits, store = ends.step(1), ends.stores[1]
    get, verdict = store.get, "g/0-1/2/verdict"
    closed = get(verdict)
    assert closed is not None
    store.delete(verdict)
    meanwhile: list[Callable[[], Any]] = [lambda: (store.set(verdict, closed), ends.step(0))]

    def interrupted(key: str) -> bytes | None:
        content = get(key)
        if meanwhile:
            meanwhile.pop()()
        return content

    monkeypatch.setattr(store, "get", interrupted)
    assert "out of step" in refused(waits, 1)
