"""Process groups on the device: of this process alone, and of two."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from pool import Pool
from torch.distributed import ProcessGroup

if TYPE_CHECKING:  # they import Triton: too early here, see the conftest.py above
    from devices import Device


@pytest.fixture
def one_rank(device: "Device") -> Iterator[ProcessGroup]:
    """A group of this process alone whose calls go through the backend."""
    from single_rank import force_single_rank_collectives  # imports Triton

    bound = {"device_id": device.at} if device.backend == "nccl" else {}
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(device.backend, store=store, rank=0, world_size=1, **bound)
    try:
        assert dist.group.WORLD is not None
        with force_single_rank_collectives():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _refuse_a_stub(request: pytest.FixtureRequest) -> None:
    """Skip a test of processes where a stub stands for the driver: it is of one process."""
    if request.config.getoption("device").startswith("sm"):
        pytest.skip("ranks in processes of their own need a GPU, and the driver is a stub")


@pytest.fixture(scope="session")
def gloo_pair(made_device: "Device", request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Two ranks over Gloo; on the CPU, of the pool that all tests share."""
    _refuse_a_stub(request)
    if made_device.at.type == "cpu":
        yield request.getfixturevalue("pool")
        return
    ranks = made_device.ranks("gloo")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def nccl_pair(made_device: "Device", request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Two ranks over NCCL, on one GPU too; on the CPU over Gloo, of the pool that all tests share."""
    yield from _over_nccl(made_device, request, 2)


@pytest.fixture(scope="session")
def nccl_four(made_device: "Device", request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Four ranks over NCCL, as ``nccl_pair``."""
    yield from _over_nccl(made_device, request, 4)


def _over_nccl(made_device: "Device", request: pytest.FixtureRequest, size: int) -> Iterator[Pool]:
    _refuse_a_stub(request)
    if made_device.at.type == "cpu":
        yield request.getfixturevalue("pool")
        return
    ranks = made_device.ranks("nccl", size)
    yield ranks
    ranks.stop()
