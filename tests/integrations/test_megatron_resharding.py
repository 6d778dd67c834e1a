"""Copies that Megatron's planner submits, in one message per pair of ranks and bucket."""

import importlib.util
import random
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend
from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.integrations.megatron.resharding import PackedCopyService

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="no Megatron is installed")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool)
Task = tuple[int, int, int, tuple[int, ...], torch.dtype]  # id, from, to, shape, dtype


def service(group: ProcessGroup, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own, of packages that are not installed
        return PackedCopyService(group, **options)


def drawn(world: int, seed: int) -> list[Task]:
    """Some pairs of ranks have no tensor, others many; ranks have own copies, too."""
    generator = random.Random(seed)
    pairs = [(a, b) for a in range(world) for b in range(world) if (a, b) == (0, 0) or generator.random() < 0.7]
    return [
        (
            number,
            *pairs[number % len(pairs)],
            (generator.randrange(5), generator.randrange(1, 40)),
            generator.choice(DTYPES),
        )
        for number in range(40)
    ]


def value(task: Task, turn: int = 0) -> Tensor:
    number, _, _, shape, dtype = task
    return (torch.arange(torch.Size(shape).numel()) % 7 + number + turn).remainder(100).view(shape).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.ranks(2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 4)))  # each rank imports Megatron
@pytest.mark.parametrize("bucket_bytes", [64, 4096, 2**20])
def test_drawn_copies(group: ProcessGroup, bucket_bytes: int) -> None:
    """Every tensor arrives, however tasks are ordered on each rank; nothing else changes; twice."""
    rank, world = group.rank(), group.size()
    copies = service(group, bucket_bytes=bucket_bytes)
    for seed in range(4):
        tasks = drawn(world, seed)
        for turn in range(2):
            received = {}
            for task in random.Random(rank + turn).sample(tasks, len(tasks)):
                number, source, target, shape, dtype = task
                if source == rank:
                    copies.submit_send(value(task, turn), target, task_id=number)
                if target == rank:
                    received[task] = torch.zeros(shape, dtype=dtype)
                    copies.submit_recv(received[task], source, task_id=number)
            copies.run()
            for task, x in received.items():
                assert torch.equal(bits(x), bits(value(task, turn))), task
    copies.run()  # nothing was submitted


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 2**20], ids=["many buckets", "one bucket"])
def test_what_is_sent_and_overwritten(group: ProcessGroup, bucket_bytes: int) -> None:
    """Sources have the values from before ``run``: in a swap, in ranges that overlap, between buckets."""
    rank, copies = group.rank(), service(group, bucket_bytes=bucket_bytes)

    def submit(task: int, source: torch.Tensor, target: torch.Tensor, sender: int, receiver: int) -> None:
        if rank == sender:
            copies.submit_send(source, receiver, task_id=task)
        if rank == receiver:
            copies.submit_recv(target, sender, task_id=task)

    for first, second in ((rank, rank), (0, 1)):  # within each rank, and between ranks
        x = torch.arange(24.0) + 100 * rank
        a, b, *_ = parts = x.split(6)
        if first == second:
            submit(0, a, b, rank, rank)
            submit(1, b, a, rank, rank)
            submit(2, x[12:20], x[14:22], rank, rank)
            copies.run()
            before = torch.arange(24.0) + 100 * rank
            assert torch.equal(x, torch.cat([before[6:12], before[:6], before[12:14], before[12:20], before[22:]]))
            continue
        for i, part in enumerate(parts):  # each rank's part i goes to part i + 1 of the other
            for sender in (first, second):
                submit(10 * i + sender, part, parts[(i + 1) % 4], sender, 1 - sender)
        copies.run()
        assert torch.equal(x, (torch.arange(24.0) + 100 * (1 - rank)).roll(6))


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_messages_and_bytes(group: ProcessGroup) -> None:
    """One message per pair and bucket, one pack and one unpack per bucket; own copies do not travel."""
    rank, world, tensors = group.rank(), group.size(), 24
    for bucket_bytes, buckets in ((2**20, 1), (world * 4096, 6)):
        copies = service(group, bucket_bytes=bucket_bytes)
        targets = [torch.zeros(1024 // 4) for _ in range(world * tensors)]
        for number in range(world * tensors):
            turn, peer = divmod(number, world)
            copies.submit_send(torch.full((1024 // 4,), float(rank)), peer, task_id=16 * turn + 4 * rank + peer)
            copies.submit_recv(targets[number], peer, task_id=16 * turn + 4 * peer + rank)
        with (
            mock.patch.object(backend, "batch", wraps=backend.batch) as batch,
            record.recording() as counts,
        ):
            copies.run()
        assert [len(call.args[0]) for call in batch.call_args_list] == [2 * (world - 1)] * buckets
        (count,) = (each for (name, _), each in counts.items() if name == "PackedCopyService.run")
        assert count.bytes_sent == (world - 1) * tensors * 1024
        assert count.bytes_copied == 2 * 1024 * tensors * (1 + 2 * (world - 1))
        assert [x[0].item() for x in targets[:world]] == list(range(world))


@pytest.mark.ranks(2)
def test_parameters_and_tasks_without_ids(group: ProcessGroup) -> None:
    rank, copies = group.rank(), service(group)
    mine, target = torch.nn.Parameter(torch.full((3, 4), float(rank))), torch.nn.Parameter(torch.zeros(3, 4))
    more, own = torch.zeros(5), torch.zeros(2)
    copies.submit_send(mine, 1 - rank)
    copies.submit_send(torch.arange(5.0) + rank, 1 - rank)
    copies.submit_send_with_id(7, torch.ones(2), rank)
    copies.submit_recv(target, 1 - rank)
    copies.submit_recv(more, 1 - rank)
    copies.submit_recv_with_id(7, own, rank)
    copies.run()
    assert torch.equal(target, torch.full((3, 4), 1.0 - rank))
    assert torch.equal(more, torch.arange(5.0) + 1 - rank)
    assert torch.equal(own, torch.ones(2))
    assert target.requires_grad
    assert target.grad_fn is None


@pytest.mark.ranks(2)
def test_refusals_leave_the_group_usable(group: ProcessGroup) -> None:
    """Sizes, dtypes and tasks that differ, and a tensor that cannot be sent, raise on both ranks before any message."""
    rank, copies = group.rank(), service(group)
    told = r"rank 0 sends 1 tensors of 16 bytes to rank 1, which expects "
    for there, task, text in (
        (torch.zeros(5), 0, told + "1 of 20"), (torch.zeros(4).int(), 0, told + "1 of 16 bytes, or others"),
        (torch.zeros(4), 3, told + "1 of 16 bytes, or others by task_id"), (None, 0, told + "0 of 0"),
    ):  # fmt: skip
        if rank == 0:
            copies.submit_send(torch.ones(4), 1, task_id=0)
        elif there is not None:
            copies.submit_recv(there, 0, task_id=task)
        with pytest.raises(MismatchError, match=text):
            copies.run()
    for wrong, text in ((torch.zeros(4, device="meta"), "no data"), (torch.zeros(4, 2)[:, 0], "strides")):
        if rank == 0:
            copies.submit_send(wrong, 1, task_id=0)
        else:
            copies.submit_recv(torch.zeros(4), 0, task_id=0)
        with pytest.raises(MismatchError if rank else ArgumentError, match="refused on another rank" if rank else text):
            copies.run()
    x = torch.zeros(4)
    copies.submit_send(torch.full((4,), rank + 1.0), 1 - rank)
    copies.submit_recv(x, 1 - rank)
    copies.run()
    assert torch.equal(x, torch.full((4,), 2.0 - rank))
    assert isinstance(copies, importlib.import_module("megatron.core.resharding.copy_services.base").CopyService)
    with pytest.raises(ArgumentError, match="bucket_bytes"):
        service(group, bucket_bytes=0)
