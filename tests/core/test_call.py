"""The prologue of a collective, and what an observer hears of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tritoncomm import record
from tritoncomm.core.call import enter
from tritoncomm.errors import ArgumentError, MismatchError


class Group:
    """A process group that torch never registered."""

    group_name = ""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Listener:
    """An observer that lists its reports; ``error`` is raised where a call begins."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reports: list[Any] = []
        self.error = error

    def begin(self, name: str, kind: str, group: Any, x: Any, arguments: tuple[Any, ...] = (), depth: int = 4) -> None:
        self.reports.append(("begin", name, kind, arguments))
        if self.error is not None:
            raise self.error

    def end(self, name: str, path: str, bytes_copied: int, bytes_sent: int, calls: int) -> None:
        self.reports.append(("end", name, path, bytes_copied, bytes_sent, calls))

    def failed(self, name: str, error: BaseException) -> None:
        self.reports.append(("failed", name, error))

    def current(self, name: str) -> Any:
        return f"token of {name}"

    def wait(self, call: Any, work: Any) -> None:
        self.reports.append(("wait", call))
        work.wait()

    def note_forward(self, node: Any) -> None:
        self.reports.append(("forward", node))


class Work:
    waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def listener() -> Iterator[Listener]:
    before, observer = record.hooks.observer, Listener()
    record.observe(observer)
    yield observer
    record.observe(before)


def _enter(size: int, x: Any = None) -> Any:
    group: Any = Group(size)
    return enter("f", "all_reduce", group, torch.ones(2) if x is None else x, (None,))


def test_a_group_of_one_rank_has_no_call(listener: Listener) -> None:
    assert _enter(1) is None
    assert listener.reports == []


def test_a_call_is_reported_and_counted_once(listener: Listener) -> None:
    record.reset()
    span = _enter(4)
    assert (span.name, span.world) == ("f", 4)
    span.end("view", 1, 2)
    assert listener.reports == [("begin", "f", "all_reduce", (None,)), ("end", "f", "view", 1, 2, 1)]
    assert record.counters() == {("f", "view"): record.Count(1, 1, 2)}


def test_an_observer_stops_a_call_before_its_tensor_is_checked(listener: Listener) -> None:
    listener.error = MismatchError("ranks differ")
    with pytest.raises(MismatchError):
        _enter(4, torch.ones(2).to_sparse())
    listener.error = None
    with pytest.raises(ArgumentError, match="strided"):
        _enter(4, torch.ones(2).to_sparse())


def test_several_tensors_are_left_to_the_caller(listener: Listener) -> None:
    assert _enter(2, [torch.ones(2).to_sparse()]).world == 2


def test_waits_and_failures_go_through_the_observer(listener: Listener) -> None:
    work, error = Work(), ValueError()
    record.wait(record.current("f"), work)
    record.failed("f", error)
    assert listener.reports == [("wait", "token of f"), ("failed", "f", error)]
    assert work.waits == 1


def test_without_an_observer_nothing_is_reported(listener: Listener) -> None:
    record.observe(None)
    work, token = Work(), record.current("f")
    assert token is None
    record.wait(token, work)
    record.wait("token of an observer that has gone", work)
    record.failed("f", ValueError())
    _enter(2).end("view", 0, 0)
    assert work.waits == 2
    assert listener.reports == []


def test_names_that_were_imported_report_to_the_next_observer(listener: Listener) -> None:
    from tritoncomm.record import add, begin

    later = Listener()
    record.observe(later)
    begin("g", "hop", None, None)
    add("g", "view", 0, 0)
    assert [each[0] for each in later.reports] == ["begin", "end"]
    assert listener.reports == []
