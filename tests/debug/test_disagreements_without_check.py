"""Every public function and p2p step with every kind of disagreement, without check mode: each rank ends in time.

In an error, or by completing: only check mode promises that a difference is noticed. Where a message is larger than the
buffer that its receiver has for it, Gloo ends the receiving process from a thread of its own (``gloo::EnforceNotMet``),
if it comes to reading the message before the call times out. No rank knows the sizes of the others without asking them,
as check mode does, so that this is Gloo's alone to change; the other rank ends in time all the same.
"""

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disagreement_hops import HOP_KINDS, HOP_ROWS, hop_steps
from disagreement_row import Row
from disagreement_rows import KINDS, ROWS, reason_against, steps_of
from disagreements import COLLECTIVES, HOPS, MAPPINGS
from pool import Pool, WorkerError
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import variables
from tritoncomm.groups import Group, ParallelMode, register

START, TIMEOUT, SLACK = 60.0, 1.0, 5.0  # seconds: until ranks run, of the groups, and how late a rank may end
LIMIT = timedelta(seconds=TIMEOUT)  # of the group of all ranks, too: _p2p_ops uses it for one of two directions
PAIRS = 4
ABORTS = "gloo::EnforceNotMet", "Received data size doesn't match expected size"
SAME_BYTES = ("op", "group")  # kinds in which all messages have the sizes that their receivers expect
CASES = {"collectives": COLLECTIVES, "mappings": MAPPINGS, "hops": HOPS}

Cell = tuple[str, str, int]  # a row, or a table of CASES; a kind, or a case of the table; the rank that differs

CELLS: list[Cell] = [(name, kind, 1) for name in ROWS for kind in KINDS if not reason_against(name, kind)]
HOP_CELLS: list[Cell] = [
    (name, kind, differs) for name in HOP_ROWS for kind in HOP_KINDS for differs in range(2)
    if kind != "group" or name.startswith("P2PCommunicator: ")  # the others take no group
]  # fmt: skip
CASE_CELLS: list[Cell] = [(table, name, 1) for table, cases in CASES.items() for name in cases]


def run_cell(group: ProcessGroup, cell: Cell, errors: str) -> tuple[str, float, list[str]]:
    """How the steps of a cell end on this rank, after how many seconds, and which threads of its groups stay."""
    with open(errors, "a") as file:
        os.dup2(file.fileno(), 2)  # what Gloo says last
    variables.CHECK.assign(False)
    tritoncomm.destroy()
    _meet(group, ROWS[cell[0]] if cell[0].startswith(("tensor.", "parallel.")) else None)
    threads, rank = _group_threads(), group.rank()
    with _groups_of(cell, group) as groups:
        started = time.monotonic()
        outcome = _outcome(cell, groups, rank)
        del groups
    seconds = time.monotonic() - started
    end = time.monotonic() + SLACK
    while (left := _group_threads() - threads) and time.monotonic() < end:
        time.sleep(0.02)
    return outcome, seconds, sorted(left)


def _meet(group: ProcessGroup, row: Row | None) -> None:
    """Wait for the other rank, whose imports take longer than the timeout where others run; make a first call.

    That makes groups of one rank, and DTensor's caches keep its mesh.
    """
    made: Any = dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=START))
    if row is not None:
        row.call(made, torch.ones(row.shape(made.size())), **row.options(made.size()))
    dist.barrier(made)
    dist.destroy_process_group(made)


@contextmanager
def _groups_of(cell: Cell, group: ProcessGroup) -> Iterator[list[Any]]:
    """Two groups of the ranks, connected; stage functions use the first, as their pipeline."""
    ranks = dist.get_process_group_ranks(group)
    made = [dist.new_group(ranks, timeout=LIMIT) for _ in range(2)]
    pipeline = Group(made[0], ParallelMode.PIPELINE)
    register({ParallelMode.GLOBAL: pipeline, ParallelMode.PIPELINE: pipeline})
    del pipeline
    for each in made:
        dist.monitored_barrier(each, timeout=timedelta(seconds=START))  # longer than the group's own
    yield made
    tritoncomm.destroy()
    while made:
        dist.destroy_process_group(made.pop())


def _outcome(cell: Cell, groups: Sequence[Any], rank: int) -> str:
    try:
        for step in _steps(cell, (groups[0], groups[1]), rank):
            step()
    except (RuntimeError, ValueError):  # ours are either
        return "error"
    return "completes"


def _steps(cell: Cell, groups: tuple[Any, Any], rank: int) -> list[Callable[[], Any]]:
    name, kind, differs = cell
    if name in CASES:
        call, _ = CASES[name][kind]
        return [lambda: call(groups[0], rank)]
    if name in ROWS:
        return steps_of(name, kind, groups, rank == differs)
    return hop_steps(name, kind, groups, rank, rank == differs)


def _group_threads() -> set[str]:
    """Threads of Gloo and of its process groups, by number."""
    threads = set()
    for each in Path("/proc/self/task").iterdir():
        try:
            if "gloo" in (each / "comm").read_text():
                threads.add(each.name)
        except OSError:  # it has ended
            continue
    return threads


def _end(pair: Pool, cell: Cell, errors: Path) -> str:
    """How a cell ends, in the order of its ranks; a text that begins with ``problem`` otherwise."""
    errors.write_text("")
    try:
        ends = pair.run(run_cell, cell, str(errors), timeout=START + TIMEOUT + 2 * SLACK)
    except WorkerError as error:
        _, died, code = str(error).rpartition(":\ndied with exit code ")
        is_gloo = bool(died) and code == "-6" and all(words in errors.read_text() for words in ABORTS)
        return "Gloo aborts" if is_gloo and cell[1] not in SAME_BYTES else f"problem: {error}\n{errors.read_text()}"
    if cell[0].endswith(": _p2p_ops"):
        pair.stop()  # which fails over the group of all ranks
    if late := [seconds for _, seconds, _ in ends if seconds > TIMEOUT + SLACK]:
        return f"problem: {late} seconds"
    if any(threads for *_, threads in ends):
        return f"problem: threads {[threads for *_, threads in ends]} of destroyed groups"
    return ", ".join(outcome for outcome, *_ in ends)


def _problems(cells: Sequence[Cell], count: int = PAIRS) -> dict[Cell, str]:
    """Cells that end in another way than they may; several pairs of ranks run them at once."""
    pairs: Queue[tuple[Pool, Path]] = Queue()

    def end(cell: Cell) -> str:
        pair, errors = pairs.get()
        try:
            return _end(pair, cell, errors)
        finally:
            pairs.put((pair, errors))

    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            pairs.put((Pool(2, env={"OMP_NUM_THREADS": "1"}, limit=LIMIT), Path(folder, f"{number}")))
        try:
            with ThreadPoolExecutor(count) as workers:
                ends = dict(zip(cells, workers.map(end, cells), strict=True))
        finally:
            while not pairs.empty():
                pairs.get()[0].stop()
    print(len(cells), "cells:", dict(Counter(each.split(":")[0] for each in ends.values())))
    problems = {cell: each for cell, each in ends.items() if each.startswith("problem")}
    for cell, each in problems.items():
        print(cell, each)  # all of it, which an assertion does not show
    return problems


@pytest.mark.slow
def test_a_drawn_cell_of_every_kind_ends_in_time() -> None:
    draw = random.Random(1)
    cells = [draw.choice([cell for cell in CELLS if cell[1] == kind]) for kind in KINDS]
    cells += [draw.choice([cell for cell in HOP_CELLS if cell[1] == kind]) for kind in HOP_KINDS]
    assert _problems(cells) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_disagreement_ends_in_time(kind: str) -> None:
    assert _problems([cell for cell in CELLS if cell[1] == kind]) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", HOP_KINDS)
def test_every_disagreement_of_p2p_steps_ends_in_time(kind: str) -> None:
    assert _problems([cell for cell in HOP_CELLS if cell[1] == kind]) == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_case_ends_in_time() -> None:
    assert _problems(CASE_CELLS) == {}
