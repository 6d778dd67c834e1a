"""Process groups whose size and rank change in place, as torch 2.14's ``reconfigure()`` changes them."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritoncomm import GroupError, collective, mappings
from tritoncomm.core import call, validation
from tritoncomm.core.validation import PerGroup, ranks_of, world_of
from tritoncomm.debug import check
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.reshard import Layout, reshard

T = torch.ones


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """Four ranks that move nothing, seen from the first; their group can change in place."""
    for module in (validation, call):
        monkeypatch.setattr(module, "keeps_size", False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        made = dist.group.WORLD
        assert made is not None
        yield made
    finally:
        dist.destroy_process_group()


def reconfigure(monkeypatch: pytest.MonkeyPatch, size: int, rank: int = 0) -> None:
    monkeypatch.setattr(ProcessGroup, "size", lambda _: size)
    monkeypatch.setattr(ProcessGroup, "rank", lambda _: rank)


def test_the_size_of_every_call_is_that_of_now(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    x = T(4, 4)
    for name in ("all_gather_single", "_allgather_base"):
        monkeypatch.setattr(ProcessGroup, name, lambda *_: None, raising=False)
    assert world_of(group, "f") == 4
    assert collective.all_gather(x, 0, group).shape == (16, 4)
    assert mappings.scatter_to_sequence_parallel_region(x, group).shape == (1, 4)
    reconfigure(monkeypatch, 2)
    assert world_of(group, "f") == 2
    assert collective.all_gather(x, 0, group).shape == (8, 4)
    assert mappings.scatter_to_sequence_parallel_region(x, group).shape == (2, 4)
    reconfigure(monkeypatch, 1)
    assert collective.all_gather(x, 0, group) is x


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (4, 1), (8, 0)])
def test_values_of_a_group_are_forgotten(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch, size: int, rank: int
) -> None:
    values: PerGroup[list[int]] = PerGroup()
    kept = values.set(group, [1])
    assert values.get(group) is kept
    reconfigure(monkeypatch, size, rank)
    assert values.get(group) is None
    assert values.set(group, [2]) == values.get(group) == [2]


def test_global_ranks_that_torch_does_not_know_are_refused(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table still has the ranks of before."""
    before, after = Layout.split((4, 8), 0, [1] * 4), Layout.split((4, 8), 1, [2] * 4)
    calls: dict[str, Any] = {
        "p2p": lambda: Neighbours.of(group),
        "broadcast": lambda: collective.broadcast(T(2), 3, group),
        "reshard": lambda: reshard(T(1, 8), before, after, group=group),
    }
    first = calls["p2p"]()
    for made in calls.values():
        made()
    assert calls["p2p"]() is first
    assert ranks_of(group, "f") == [0, 1, 2, 3]
    reconfigure(monkeypatch, 2)
    for name, made in calls.items():
        with pytest.raises(GroupError, match=f"{name}: the process group .* was reconfigured to 2 ranks"):
            made()


def test_check_mode_begins_anew(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: Any = check.FlightCall(1, "f", "all_reduce", group.group_name, None, None, (), None, 0, 0, 0)
    member = check._member_of(group, noted)
    assert check._member_of(group, noted) is member
    monkeypatch.setattr(validation, "ranks_of", lambda *_: [0, 1])
    monkeypatch.setattr(check, "ranks_of", lambda *_: [0, 1])
    reconfigure(monkeypatch, 2)
    again = check._member_of(group, noted)
    assert again is not member
    assert again.ranks == [0, 1]


def _shrink(rank: int, folder: str) -> None:
    """Three ranks of Gloo; the last one leaves, and the others go on over the same group."""
    store = dist.FileStore(f"{folder}/store", 3)
    options: Any = {"enable_reconfigure": True}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30), **options)
    group: Any = dist.group.WORLD
    handles = dist.FileStore(f"{folder}/handles", 3)
    x = T(4, 2)
    for turn, size in enumerate((3, 2)):
        if rank >= size:
            break
        handles.set(f"{turn}/{rank}", dist._get_reconfigure_handle(group))  # type: ignore[attr-defined]
        every = [handles.get(f"{turn}/{each}").decode() for each in range(size)]
        dist._reconfigure(uuid=turn + 1, handles=every, group=group).wait()  # type: ignore[attr-defined]
        assert collective.all_reduce(x.clone(), group)[0, 0].item() == size
        assert collective.all_gather(x, 0, group).shape == (4 * size, 2)
    handles.set(f"over/{rank}", "")
    handles.wait([f"over/{each}" for each in range(3)])


@pytest.mark.skipif(
    not hasattr(ProcessGroup, "reconfigure"), reason=f"torch {torch.__version__} has no groups that change in place"
)
def test_gloo_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    spawn(_shrink, (str(tmp_path),), nprocs=3)
