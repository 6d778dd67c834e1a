"""Order and groups of posted transfers: no ring and no named neighbour can deadlock."""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritoncomm.p2p import transport
from tritoncomm.p2p.neighbours import Direction, Neighbours

Transfer = tuple[int, int, str]  # sender and receiver, activation or gradient
Step = list[Transfer]  # one call: a single transfer, or the transfers of a batch
KEYS = ("send_prev", "recv_prev", "send_next", "recv_next")


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """A no-op process group, seen from one rank; it carries CPU and CUDA tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def transfer(neighbours: Neighbours, key: str) -> Transfer:
    ends = (
        (neighbours.rank, neighbours.peer(key)) if key.startswith("send") else (neighbours.peer(key), neighbours.rank)
    )
    return (*ends, "activation" if key in ("send_next", "recv_prev") else "gradient")


def completes(programs: Sequence[Sequence[Step]]) -> bool:
    """Whether all ranks finish if each step blocks until every peer of its transfers has reached the same transfer."""
    done: set[Transfer] = set()
    at = [0] * len(programs)
    while True:
        offered = [set(steps[i]) - done if i < len(steps) else set() for steps, i in zip(programs, at, strict=True)]
        met = {each for each in set().union(*offered) if each in offered[each[0]] and each in offered[each[1]]}
        if not met:
            return all(i == len(steps) for steps, i in zip(programs, at, strict=True))
        done |= met
        for rank, steps in enumerate(programs):
            while at[rank] < len(steps) and done.issuperset(steps[at[rank]]):
                at[rank] += 1


def steps_of(directions: Sequence[Direction], neighbours: Neighbours, wanted: set[Transfer]) -> list[Step]:
    """What a rank posts to a backend of CUDA tensors: batches and single transfers, in order."""
    steps: list[Step] = []
    together = [transfer(neighbours, direction.key) for direction in directions if direction.modes[1] == "batched"]
    if batch := [each for each in together if each in wanted]:
        steps.append(batch)
    singles = [transfer(neighbours, direction.key) for direction in directions if direction.modes[1] != "batched"]
    return steps + [[each] for each in singles if each in wanted]


def ring_of(world: int) -> list[Neighbours]:
    ring = []
    for rank in range(world):
        with rank_of(rank, world):
            assert dist.group.WORLD is not None
            ring.append(Neighbours.of(dist.group.WORLD))
    return ring


def subsets(world: int) -> Iterator[set[Transfer]]:
    """Which transfers of a ring take place: every choice for few stages, some for many."""
    ring = [(r, (r + 1) % world, "activation") for r in range(world)]
    ring += [((r + 1) % world, r, "gradient") for r in range(world)]
    if world <= 4:
        for chosen in itertools.product((False, True), repeat=len(ring)):
            yield {each for each, taken in zip(ring, chosen, strict=True) if taken}
        return
    yield set(ring)
    draw = random.Random(world)
    for _ in range(150):
        yield {each for each in ring if draw.random() < draw.choice((0.3, 0.7, 0.95))}


@pytest.mark.parametrize("world", range(2, 9))
def test_blocking_transfers_on_a_ring_complete(world: int) -> None:
    ring = ring_of(world)
    for wanted in subsets(world):
        assert completes([steps_of(neighbours.singles, neighbours, wanted) for neighbours in ring]), wanted
    full = {transfer(neighbours, key) for neighbours in ring for key in KEYS}
    naive = [
        [[transfer(neighbours, key)] for key in ("send_next", "recv_prev", "send_prev", "recv_next")]
        for neighbours in ring
    ]
    assert not completes(naive), "every rank sends first: this has to be seen as a deadlock"
    assert completes([steps_of(neighbours.batch, neighbours, full) for neighbours in ring])


@pytest.mark.parametrize("world", range(2, 9))
def test_a_ring_is_posted_in_megatrons_order(world: int) -> None:
    for neighbours in ring_of(world):
        even = ["send_next", "recv_prev", "send_prev", "recv_next"]
        odd = ["recv_prev", "send_next", "recv_next", "send_prev"]
        assert [direction.key for direction in neighbours.singles] == (odd if neighbours.stage % 2 else even)
        assert [direction.key for direction in neighbours.batch] == (even if world == 2 else [*KEYS])
        assert {direction.modes for direction in neighbours.batch} == {("direct", "batched")}
        assert {direction.modes for direction in neighbours.singles} == {("direct", "direct")}


def named(world: int, stages: int, draw: random.Random) -> tuple[list[Neighbours], set[Transfer]]:
    """Pipelines of ``stages`` ranks side by side, in which ranks name any rank of the job as a neighbour, or none."""
    order = draw.sample(range(world), world)
    after = {rank: order[(i + 1) % world] for i, rank in enumerate(order)}
    before = {rank: order[i - 1] for i, rank in enumerate(order)}
    made, wanted = [], set()
    for rank in range(world):
        with rank_of(rank, world):
            parts = [dist.new_group([*range(start, start + stages)]) for start in range(0, world, stages)]
            neighbours = Neighbours.of(parts[rank // stages], before[rank], after[rank], dist.group.WORLD)
        made.append(neighbours)
        wanted |= {transfer(neighbours, key) for key in KEYS}
    return made, {each for each in sorted(wanted) if draw.random() < 0.8}


@pytest.mark.parametrize(("world", "stages"), [(2, 2), (3, 3), (4, 2), (6, 3), (6, 2), (8, 4), (8, 2), (8, 8), (7, 7)])
def test_named_neighbours_cannot_deadlock(world: int, stages: int) -> None:
    draw = random.Random(world * stages)
    for _ in range(4):
        made, wanted = named(world, stages, draw)
        for directions in ("batch", "singles"):
            assert completes([steps_of(getattr(neighbours, directions), neighbours, wanted) for neighbours in made]), (
                directions,
                wanted,
            )
        for neighbours in made:
            for direction in neighbours.batch:
                inside = neighbours.peer(direction.key) // stages == neighbours.rank // stages
                near = (neighbours.peer(direction.key) - neighbours.rank) % stages in (0, 1, stages - 1)
                assert direction.modes[1] == ("batched" if inside and near else "direct"), (neighbours, direction)
                assert (direction.group is neighbours.group) == inside or neighbours.outside is neighbours.group


class Recorder:
    """Records the calls of a backend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []

        def batch(transfers: list[Any], group: ProcessGroup) -> list[Any]:
            self.calls.append([("send" if each.is_send else "recv", each.peer, group) for each in transfers])
            return [self]

        for verb in ("send", "recv"):

            def single(group: ProcessGroup, x: Any, peer: int, tag: int, verb: str = verb) -> Any:
                self.calls.append((verb, peer, group))
                return self

            monkeypatch.setattr(ProcessGroup, verb, single)
        monkeypatch.setattr(transport, "batch", batch)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)

    def wait(self) -> None:
        pass


def _wait(handles: Any) -> None:
    for each in (handles or {}).values():
        each.wait()


@pytest.mark.parametrize("waits", [False, True], ids=["post", "post_and_wait"])
def test_cuda_tensors_are_posted_in_the_order_of_the_directions(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    with rank_of(1, 4):
        world, pair = dist.group.WORLD, dist.new_group([0, 1])
        assert world is not None
        call = transport.post_and_wait if waits else transport.post
        memory = SimpleNamespace(is_cuda=True, device="cuda:0", record_stream=lambda stream: None)
        tensors: Any = dict.fromkeys(KEYS, memory)
        ring, outer = Neighbours.of(world), Neighbours.of(pair, 3, 0, world)
        recorder = Recorder(monkeypatch)
        _wait(call(ring, "hop", tensors, True))
        assert recorder.calls.pop() == [("send", 0, world), ("recv", 0, world), ("send", 2, world), ("recv", 2, world)]
        _wait(call(ring, "hop", tensors, False))
        assert recorder.calls == [("recv", 0, world), ("send", 2, world), ("recv", 2, world), ("send", 0, world)]
        recorder.calls.clear()
        _wait(call(outer, "hop", tensors, True))
        assert recorder.calls == [[("send", 0, pair), ("recv", 0, pair)], ("recv", 3, world), ("send", 3, world)]
        monkeypatch.setattr("tritoncomm.p2p.neighbours.cuda_backend", lambda group: "gloo")
        assert {direction.modes for direction in Neighbours.of(dist.new_group([0, 1, 2])).batch} == {("direct", "host")}
