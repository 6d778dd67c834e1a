"""Pipelines that break: a rank that dies, one that never comes, a sender of something else. Gloo, on its own ranks."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from leftovers import nothing_left

import tritoncomm
from tritoncomm import groups, p2p
from tritoncomm.debug import p2p_check
from tritoncomm.errors import ArgumentError
from tritoncomm.p2p import MismatchError, PeerError

TIMEOUT = 4.0
SLACK = TIMEOUT + 8  # seconds until a lost peer is noticed, on a busy machine
SHAPE = (256, 256)
ROUNDS = 6


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


def communicator(**settings: Any) -> p2p.P2PCommunicator:
    import torch.distributed as dist

    config = SimpleNamespace(**({"pipeline_dtype": torch.float32} | settings))
    return p2p.P2PCommunicator(dist.group.WORLD, config)  # type: ignore[arg-type]


def story_of_rank(story: Callable[[int], Any]) -> Any:
    import torch.distributed as dist

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=TIMEOUT)
    store = dist.FileStore(os.environ["STORE"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    dist.barrier()  # all are connected: a rank that ends now fails none that still connect
    return story(rank)


def ranks_of(story: Callable[[int], Any], folder: Path, lost: Sequence[int] = ()) -> list[Any]:
    """What two ranks return; None of those that are lost."""
    ranks = [{"RANK": str(rank), "STORE": str(folder / "store")} for rank in range(2)]
    return run_job(story_of_rank, ranks, story, lost=lost)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refused(call: Callable[[], Any]) -> tuple[str, float]:
    """Text of the expected ``PeerError``, and the seconds until it was raised."""
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        call()
    return str(caught.value), time.monotonic() - started


def dies_before(rank: int) -> Any:
    c = communicator()
    if rank == 1:
        die()
    time.sleep(0.5)
    return refused(lambda: c.recv_backward(SHAPE, False))


def dies_under_a_handle(rank: int) -> Any:
    c = communicator(batch_p2p_comm=False)
    if rank == 1:
        time.sleep(0.5)
        die()
    _, handles = c.send_forward_recv_forward(torch.ones(SHAPE), True, SHAPE, overlap_p2p_comm=True)
    return refused(handles["recv_prev"].wait)


def dies_afterwards(rank: int) -> Any:
    c = communicator()
    x = c.recv_forward(SHAPE, rank == 0)
    c.send_forward(torch.full(SHAPE, 3.0), rank == 1)
    if rank == 0:
        time.sleep(0.2)
        die()
    assert x is not None
    return float(x.detach().sum())


def dies_before_its_header(rank: int) -> Any:
    c = communicator(variable_seq_lengths=True)
    if rank == 1:
        die()
    time.sleep(0.5)
    return refused(lambda: c.send_forward_recv_backward(torch.ones(SHAPE), SHAPE, False))


def never_comes(rank: int) -> Any:
    c = communicator()
    if rank == 1:
        time.sleep(TIMEOUT + 2)
        return None
    return refused(lambda: c.send_forward(torch.ones(SHAPE), False))


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (dies_before, "recv_backward: stage 0 of 2 (rank 0) could not receive 262144 bytes from rank 1"),
        (dies_under_a_handle, "send_forward_recv_forward: stage 0 of 2 (rank 0) could not receive"),
        (dies_before_its_header, "send_forward_recv_backward: stage 0 of 2 (rank 0) could not"),
        (never_comes, "send_forward: stage 0 of 2 (rank 0) could not send 262144 bytes to rank 1"),
    ],
    ids=["dies-before", "dies-under-a-handle", "dies-before-its-header", "never-comes"],
)
def test_a_lost_peer_is_named(tmp_path: Path, story: Callable[[int], Any], words: str) -> None:
    text, took = ranks_of(story, tmp_path, lost=(1,))[0]
    assert words in text, text
    assert took < SLACK, took


def test_a_rank_may_die_afterwards(tmp_path: Path) -> None:
    assert ranks_of(dies_afterwards, tmp_path, lost=(0,)) == [None, 3.0 * SHAPE[0] * SHAPE[1]]


def overlapped_hop(rank: int, group: Any, wait: bool) -> None:
    """A hop whose send may never be waited for."""
    import torch.distributed as dist

    c = p2p.P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False))
    x, handles = c.send_forward_recv_forward(torch.full((4,), float(rank)), True, [4], overlap_p2p_comm=True)
    handles["recv_prev"].wait()
    assert x.tolist() == [1.0 - rank] * 4
    if wait:
        handles["send_next"].wait()
    if groups.groups:
        p2p.send_forward_recv_forward(torch.ones(3), (3,))
    dist.barrier()


def resources() -> tuple[int, int]:
    """Open file descriptors and threads of this process, once threads of the store have closed their connections."""
    gc.collect()
    looks = []
    for _ in range(5):
        time.sleep(0.05)
        looks.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return min(looks)


def rounds_of_initialize(rank: int, shared: Any) -> list[tuple[int, int]]:
    """Our initialize() and destroy(), by the variables of a launcher that serves the ranks' store."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
    counted = []
    for i in range(ROUNDS):
        if rank == 0:
            served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared.set(f"port {i}", str(served.port))
        os.environ["MASTER_PORT"] = shared.get(f"port {i}").decode()
        tritoncomm.initialize(pipeline=2, timeout=TIMEOUT)
        overlapped_hop(rank, groups.get_group(groups.ParallelMode.PIPELINE), i % 2 == 1)
        tritoncomm.destroy()
        counted.append(resources())
    shared.set(f"initialize {rank}", "")
    shared.wait([f"initialize {1 - rank}"])  # rank 0 serves until then
    return counted


def rounds_of_torch(rank: int, shared: Any) -> list[tuple[int, int]]:
    """torch's own calls, on a group beside the default one."""
    import torch.distributed as dist

    counted = []
    for i in range(ROUNDS):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"torch {i}", shared), rank=rank, world_size=2)
        overlapped_hop(rank, dist.new_group([0, 1]), i % 2 == 1)
        dist.destroy_process_group()
        counted.append(resources())
    return counted


def outlived(rank: int, shared: Any) -> list[float]:
    """Handles waited for after their group was destroyed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.PrefixStore("outlived", shared), rank=rank, world_size=2)
    c = communicator(batch_p2p_comm=False)
    x, handles = c.send_forward_recv_forward(torch.full((4,), float(rank)), True, [4], overlap_p2p_comm=True)
    dist.barrier()
    del c
    dist.destroy_process_group()
    gc.collect()
    for handle in handles.values():
        handle.wait()
    return x.tolist()


def lives(rank: int) -> Any:
    import torch.distributed as dist

    shared = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    return {story.__name__: story(rank, shared) for story in (rounds_of_initialize, rounds_of_torch, outlived)}


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks_of(lives, tmp_path_factory.mktemp("lives"))


@pytest.mark.parametrize("rounds", [rounds_of_initialize.__name__, rounds_of_torch.__name__])
def test_destroyed_groups_leave_no_descriptors_and_threads(lived: list[Any], rounds: str) -> None:
    for rank in (0, 1):
        counted = lived[rank][rounds]
        assert len(set(counted[2:])) == 1, (rank, counted)


def test_handles_outlive_their_group(lived: list[Any]) -> None:
    assert [lived[rank]["outlived"] for rank in (0, 1)] == [[1.0] * 4, [0.0] * 4]


def kinds_of_numbers(rank: int, settings: dict[str, Any], checked: bool) -> tuple[str, float]:
    """Rank 0 has an integer tensor for a receiver of floats; the text of each rank's error, and its seconds."""
    c, whole = communicator(**settings), torch.ones(3, 2, dtype=torch.int32)
    with p2p.check(checked), mock.patch.object(p2p_check, "LONGEST_WAIT", 30.0):  # a busy machine may be later than 1 s
        dist.barrier()  # a rank that starts late would be waited for, too
        started = time.monotonic()
        try:
            if rank == 0:
                c.send_forward([torch.ones(3, 2), whole] if settings.get("several") else whole, False)
            else:
                c.recv_forward([(3, 2)] * 2 if settings.get("several") else (3, 2), False)
        except (PeerError, MismatchError, ArgumentError) as error:
            seconds = time.monotonic() - started
            if rank == 0:
                time.sleep(TIMEOUT + 2)  # a rank that has ended would be noticed at once
            return f"{type(error).__name__}: {error}", seconds
        return "no error", 0.0


def every_kind_of_numbers(rank: int) -> list[tuple[str, float]]:
    return [kinds_of_numbers(rank, {"several": True, "batch_p2p_comm": False}, checked=False)]


def every_kind_of_numbers_in_check_mode(rank: int) -> list[tuple[str, float]]:
    return [kinds_of_numbers(rank, {}, checked=True)]


def every_kind_of_varying_numbers(rank: int) -> list[tuple[str, float]]:
    return [kinds_of_numbers(rank, {"variable_seq_lengths": True}, checked=False)]


@pytest.mark.parametrize(
    ("story", "error", "within"),
    [
        pytest.param(every_kind_of_numbers, "PeerError: recv_forward", SLACK, id="fixed"),
        pytest.param(
            every_kind_of_varying_numbers, "PeerError: recv_forward", SLACK, marks=pytest.mark.slow, id="varying"
        ),
        pytest.param(
            every_kind_of_numbers_in_check_mode,
            "MismatchError: recv_forward: ranks 0 and 1 are out of step",
            TIMEOUT,
            id="check-mode",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_integers_for_a_receiver_of_floats_are_refused(
    tmp_path: Path, story: Callable[[int], Any], error: str, within: float
) -> None:
    """The sender raises before anything is posted; its neighbour waits, and in check mode is told at once."""
    (sent,), (received,) = ranks_of(story, tmp_path)
    assert sent[0].startswith("ArgumentError: send_forward: a tensor [3, 2] int32 for a receiver of float32"), sent
    assert received[0].startswith(error), received
    assert sent[1] < 1, "before anything was posted"
    assert received[1] < within
    if within == TIMEOUT:
        assert "gave up its send_forward: send_next refused arguments" in received[0]
