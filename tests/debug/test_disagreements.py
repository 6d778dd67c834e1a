"""Every public function that ranks call together, with every kind of disagreement, in check mode."""

import importlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from disagreement_hops import ELSEWHERE, HOP_KINDS, HOP_ROWS, hop_steps, is_named
from disagreement_rows import KINDS, ROWS, SILENT, named, reason_against, steps_of
from disagreements import synchronise
from pool import Pool
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import MismatchError, debug, experts, mappings, p2p, recurrent, reshard, ulysses
from tritoncomm import collective as c
from tritoncomm.debug import check, comparison
from tritoncomm.groups import ParallelMode, get_group

CELLS = [(name, kind) for name in ROWS for kind in KINDS if not reason_against(name, kind)]
T = torch.ones
LIMIT = 5.0  # seconds until a call whose other ranks do not come ends


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    ranks = Pool(2)
    yield ranks
    ranks.stop()


def run_cells(group: ProcessGroup, cells: list[tuple[str, str]]) -> dict[str, str]:
    """By cell, what is wrong with its error on this rank; the last rank is the one that differs."""
    importlib.import_module("torch._dynamo")  # as parallelize_module does, which takes seconds on a busy machine

    tritoncomm.destroy()
    comparison.PATIENCE, patience = 0.02, comparison.PATIENCE
    other = dist.group.WORLD
    assert other is not None
    assert other is not group
    problems = {}
    try:
        with p2p.check():
            for name, kind in cells:
                both = kind == "group" or ROWS[name].is_backward
                _synchronise((group, other) if both else (group,), f"{name}: {kind}")
                steps = steps_of(name, kind, (group, other), group.rank() == group.size() - 1)
                if problem := _problem(steps, name, kind):
                    problems[f"{name}: {kind}"] = problem
    finally:
        comparison.PATIENCE = patience
    for each in (group, other):
        synchronise(each)
    return problems


def _synchronise(groups: tuple[Any, ...], what: str) -> None:
    try:
        for each in groups:
            synchronise(each)
            check._members[each].timeout = LIMIT
    except RuntimeError as error:
        raise AssertionError(f"the ranks are not in step before {what}") from error


def _problem(steps: list[Any], name: str, kind: str) -> str:
    text = _text(steps)
    if not named(text, name, kind):
        return text
    callers = len(re.findall(r"disagreement_\w+\.py:", text))
    return "" if kind == "group" or name.endswith("check_replicas") or callers >= 2 else f"no callers: {text}"


def test_every_disagreement_is_named_on_both_ranks(pair: Pool) -> None:
    assert pair.run(run_cells, CELLS, timeout=200) == [{}, {}]


@pytest.mark.slow
def test_every_disagreement_is_named_on_four_ranks() -> None:
    ranks = Pool(4)
    try:
        assert ranks.run(run_cells, CELLS, world=4, timeout=400) == [{}] * 4
    finally:
        ranks.stop()


def run_hops(group: ProcessGroup, names: list[str], pipeline: bool) -> dict[str, str]:
    """By cell, what is wrong with its error on this rank; each rank is the one that differs once."""
    tritoncomm.destroy()
    other = dist.group.WORLD
    assert other is not None
    if pipeline:
        tritoncomm.initialize(pipeline=2)
        group = get_group(ParallelMode.PIPELINE)
    comparison.PATIENCE, patience = 0.02, comparison.PATIENCE
    rank, problems = group.rank(), {}
    try:
        with p2p.check():
            for name in names:
                for kind in HOP_KINDS:
                    if kind == "group" and pipeline:
                        continue  # these take no group
                    for differs in range(2):
                        _synchronise((group, other), f"{name}: {kind}")
                        steps = hop_steps(name, kind, (group, other), rank, rank == differs)
                        text = _text(steps)
                        if not is_named(text, kind) or "disagreement_hops.py:" not in text:
                            problems[f"{name}: {kind} on rank {differs}"] = text
    finally:
        comparison.PATIENCE = patience
    for each in (group, other):
        synchronise(each)
    tritoncomm.destroy()
    return problems


def _text(steps: list[Any]) -> str:
    started = time.monotonic()
    try:
        for step in steps:
            step()
    except MismatchError as error:
        return "late" if time.monotonic() - started > LIMIT / 2 else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("api", ["P2PCommunicator", "p2p"])
def test_every_disagreement_of_p2p_steps_is_named_on_both_ranks(pair: Pool, api: str) -> None:
    names = [name for name in HOP_ROWS if name.startswith(f"{api}:")]
    assert pair.run(run_hops, names, api == "p2p") == [{}, {}]


def test_every_p2p_step_has_a_row() -> None:
    methods = [
        name for name, value in vars(p2p.P2PCommunicator).items() if not name.startswith("_") and callable(value)
    ]
    rows = {api: {name for row in HOP_ROWS if row.startswith(f"{api}:") for name in row.split(": ")[1].split(", ")}
            for api in ("P2PCommunicator", "p2p")}  # fmt: skip
    assert set(methods) <= rows["P2PCommunicator"]
    assert set(p2p.__all__) <= rows["p2p"] | rows["P2PCommunicator"] | set(ELSEWHERE)


MODULES = {
    "collective": c, "experts": experts, "mappings": mappings, "ulysses": ulysses, "recurrent": recurrent,
    "reshard": reshard, "debug": debug,
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_has_a_row(module: str) -> None:
    """Or stands among those that send nothing, with the reason."""
    names = {f"{module}.{name}" for name in MODULES[module].__all__}
    assert names <= {*ROWS, *SILENT}, "a new public function needs a row in disagreement_rows.py"
    mine = {name for name in (*ROWS, *SILENT) if name.startswith(f"{module}.") and "," not in name}
    assert mine <= names


def run_own_size(group: ProcessGroup) -> list[str]:
    """The last rank's tensor has another size than it says itself: it would refuse that, and the others would wait."""
    tritoncomm.destroy()
    more, texts = group.rank() == 1, []
    calls = [
        lambda: c.all_gather(T(4 if more else 2, 2), 0, group, sizes=[2, 3]),
        lambda: c.all_to_all(T(5 if more else 4, 2), group, [1, 3] if more else [3, 1], [1, 3] if more else [3, 1]),
        lambda: mappings.all_to_all_dims(T(4, 4 if more else 2), 0, 1, group, gather_sizes=[2, 3]),
    ]
    with p2p.check():
        for call in calls:
            _synchronise((group,), "a call")
            texts.append(_text([call]))
    synchronise(group)
    return texts


def test_a_tensor_without_its_own_size_is_named_on_both_ranks(pair: Pool) -> None:
    for texts in pair.run(run_own_size):
        for text in texts:
            assert "differ in shape" in text


def run_uneven(group: ProcessGroup) -> None:
    tritoncomm.destroy()
    rank = group.rank()
    _synchronise((group,), "a call")
    with p2p.check():
        c.all_gather(T(2 + rank, 2), 0, group, sizes=[2, 3])
        c.all_to_all(T(4, 2), group, [3, 3] if rank else [1, 1], [1, 3])
        mappings.all_to_all_dims(T(4, 2 + rank), 0, 1, group, gather_sizes=[2, 3])
        mappings.all_to_all_dims(T(3, 2), 0, 1, group, scatter_sizes=[1, 2])
    synchronise(group)


def test_uneven_calls_agree(pair: Pool) -> None:
    pair.run(run_uneven)
