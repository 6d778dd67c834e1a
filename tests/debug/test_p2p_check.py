"""Races of check mode's p2p steps, played out between two ends in one process: who gives up, and who learns of it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tritoncomm import MismatchError
from tritoncomm.debug import comparison, p2p_check
from tritoncomm.debug.p2p_check import CheckedHop, Content
from tritoncomm.debug.store import JobStore

CIRCLE = "ranks [0, 1, 2] wait for each other in different calls"


class Group:
    """Stands for a process group."""


class Ends:
    """Two ranks over one store: rank 0 sends to rank 1."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        store = HashStore()
        self.stores = [JobStore(store, rank) for rank in range(2)]
        self._patch = patch
        self.group = Group()
        patch.setattr(p2p_check, "LONGEST_WAIT", 0.1)
        patch.setattr(comparison, "others_may_call", lambda *_: True)  # no circles: the tests say what is one

    def step(self, rank: int, words: str = "step") -> CheckedHop:
        """The transfer as rank ``rank`` makes it: its keys are set, and nothing is looked at yet."""
        self._patch.setattr(p2p_check, "job_store", lambda: self.stores[rank])
        neighbours = SimpleNamespace(peer=lambda key: 1 - rank, channel=lambda key: "g", group=lambda: self.group)
        content = Content(words, [[[2], "float32"]])
        return CheckedHop(neighbours, words, {"recv_prev" if rank else "send_next": content})

    def circle(self) -> None:
        """What a third rank does that has seen one end here, and the other one blocked elsewhere."""
        self.stores[0].set_once("g/0-1@0/verdict", CIRCLE)


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


@pytest.mark.parametrize("comes", ["before", "at the same time", "after"])
@pytest.mark.parametrize("first", [0, 1], ids=["sender", "receiver"])
def test_a_circle_closes_the_channel_for_both_ends(ends: Ends, first: int, comes: str) -> None:
    """Whenever the other end comes: one that goes on before the verdict is a message ahead."""
    waits = ends.step(first)
    others = [ends.step(1 - first)] if comes != "after" else []
    if comes == "before":
        others[0].meet(KEYS[1 - first])  # the other end is here, and there is no verdict
    ends.circle()
    assert CIRCLE in refused(waits, first)
    if comes == "at the same time":
        assert CIRCLE in refused(others[0], 1 - first)
    for _ in range(2):
        steps = [ends.step(rank) for rank in range(2)]
        for rank in range(2):
            text = refused(steps[rank], rank)
            assert CIRCLE in text
            assert text.count("make their process group again") == 1


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_end_that_fails_closes_the_channel(ends: Ends, goes_on: bool) -> None:
    sends = ends.step(0)
    if goes_on:
        sends.meet("send_next")  # nobody comes for a moment, and the message is posted
    sends.give_up("PeerError: timeout")
    sends.give_up("another error")  # of no transfer any more
    for _ in range(2):
        steps = [ends.step(rank) for rank in range(2)]
        for rank in range(2):
            text = refused(steps[rank], rank)
            assert "ranks 0 and 1 are out of step since rank 0 gave up its step: send_next step at" in text
            assert "PeerError: timeout\n" in text
            assert "another error" not in text


def test_steps_that_fit_go_on_over_a_channel_of_the_next_group(ends: Ends) -> None:
    ends.step(1)
    ends.step(0).give_up("a mistake")
    ends.group = Group()
    for _ in range(2):
        agree(ends)


def test_a_closed_channel_is_seen_before_the_end_that_closed_it(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks of one end, the other closes the channel and comes to the next transfer."""
    ends.stores[1].counts["g/0-1@0"] = 1  # this end is in the next transfer already
    waits, store = ends.step(1), ends.stores[1]
    get = store.get

    def meanwhile() -> None:
        ends.step(0).give_up("a mistake")
        ends.step(0)

    todo: list[Callable[[], Any]] = [meanwhile]

    def interrupted(key: str) -> bytes | None:
        content = get(key)
        if todo:
            todo.pop()()
        return content

    monkeypatch.setattr(store, "get", interrupted)
    assert "out of step" in refused(waits, 1)
