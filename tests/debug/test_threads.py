"""Which threads may still make a call while one waits: those that run or sleep, not those that wait for threads."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ProcessGroup

from tritoncomm import collective, groups, p2p
from tritoncomm.debug import sites, threads
from tritoncomm.debug.threads import others_may_call


@pytest.fixture
def begin() -> Iterator[Callable[..., threading.Thread]]:
    """Starts a thread that ``work`` holds up, until the end of the test."""
    go_on, started = threading.Event(), []

    def start(daemon: bool, work: Callable[[threading.Event], object]) -> threading.Thread:
        thread = threading.Thread(target=work, args=(go_on,), daemon=daemon)
        thread.start()
        started.append(thread)
        time.sleep(0.1)
        return thread

    yield start
    go_on.set()
    for each in started:
        each.join()


def sleeps(go_on: threading.Event) -> None:
    while not go_on.is_set():
        time.sleep(0.01)


def waits_at_most(go_on: threading.Event) -> None:
    go_on.wait(60)


def test_alone() -> None:
    assert not others_may_call({threading.get_ident()}, False)


@pytest.mark.parametrize("work", [sleeps, waits_at_most])
@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_that_goes_on_by_itself(begin: Callable[..., threading.Thread], work: object, daemon: bool) -> None:
    """A daemon counts once it has made a call."""
    thread = begin(daemon, work)
    assert others_may_call(set(), False) is not daemon
    assert thread.ident is not None
    assert others_may_call({thread.ident}, False)


def test_threads_that_wait_for_another_one(begin: Callable[..., threading.Thread]) -> None:
    """In a lock without a timeout, in ``join``, and idle in a pool of threads."""
    begin(False, lambda go_on: go_on.wait())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        time.sleep(0.1)
        assert not others_may_call(set(), False)
        found: list[bool] = []
        caller = threading.Thread(target=lambda: found.append(time.sleep(0.1) or others_may_call(set(), False)))
        caller.start()
        caller.join()  # the main thread waits here
    assert found == [False]


def test_the_main_thread_in_backward_waits_for_its_hooks() -> None:
    code = torch.autograd.graph._engine_run_backward.__code__
    assert threads._awaits_a_thread(SimpleNamespace(f_code=code))


def test_a_helper_counts_no_thread_that_waits_inside_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[bool]] = []

    def main_waits() -> None:
        caller = threading.Thread(
            target=lambda: found.append([time.sleep(0.1) or others_may_call(set(), helper) for helper in (True, False)])
        )
        caller.start()
        while caller.is_alive():
            time.sleep(0.01)

    main_waits()
    monkeypatch.setattr(threads, "source_of", lambda file: sites.OURS if file == __file__ else 0)
    main_waits()
    assert found == [[True, True], [False, True]]


@pytest.mark.ranks(2)
def test_a_correct_program_with_threads_ends(group: ProcessGroup) -> None:
    """Two threads, each on its own group, whose first calls come in another order on the two ranks."""
    made = [groups.make_group(f"threads {name}", (0, 1), "gloo") for name in "ab"]
    results: dict[int, object] = {}

    def job(which: int, delay: float) -> None:
        try:
            time.sleep(delay)
            results[which] = collective.all_reduce(torch.ones(2), made[which]).tolist()
        except Exception as error:
            results[which] = error

    delays = (0.0, 1.2) if group.rank() == 0 else (1.2, 0.0)
    jobs = [threading.Thread(target=job, args=each) for each in enumerate(delays)]
    with p2p.check():
        for each in jobs:
            each.start()
        for each in jobs:
            each.join()
    assert results == {0: [2.0, 2.0], 1: [2.0, 2.0]}
