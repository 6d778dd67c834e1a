"""Over process groups on the device: one rank of its backend, two processes of Gloo, two of NCCL where it can."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import bits, random_bits
from devices import Device
from kernel_cases import COPIED, FLOATS
from mapping_cases import FUNCTIONS, MAPPINGS, run, value
from pool import Pool
from rank_runs import TIMEOUT, run_checked, run_compiled, run_mappings, run_p2p, run_reshardings, run_ulysses
from single_rank import force_single_rank_collectives
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import collective, mappings

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_initialize_and_destroy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times in one process: groups, a collective through each of them, and nothing left behind."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    x = value((8, 16), "float32", 1).to(device.at)
    for _ in range(3):
        mesh = tritoncomm.initialize()
        assert mesh.device_type == device.at.type
        with force_single_rank_collectives():
            out = mappings.gather_from_tensor_model_parallel_region(x)
            summed = collective.all_reduce(x.clone(), tritoncomm.ParallelMode.DATA)
            on_cpu = collective.all_reduce(torch.ones(3), tritoncomm.ParallelMode.GLOBAL)
        assert torch.equal(out, x)
        assert torch.equal(summed, x)
        assert torch.equal(on_cpu, torch.ones(3)), "a CPU tensor over the same mode"
        tritoncomm.destroy()
        assert not dist.is_initialized()
        assert x.new_empty(0, device=device.at.type).device == x.device, "another current device"


def test_one_rank(device: Device, one_rank: ProcessGroup) -> None:
    """Every mapping is the identity there, up to the shape, in both directions and in every dtype."""
    for dtype in COPIED:
        small = random_bits((8, 2, 16), torch.int8, 1, device.at)
        for name, call in MAPPINGS.items():
            adds = FUNCTIONS[call.function].adds
            if adds and not (dtype in FLOATS or dtype in (torch.int32, torch.int64)):
                continue
            x = small.to(dtype) if adds else random_bits((8, 2, 16), dtype, 2, device.at)
            out = run(call, x, one_rank)
            assert torch.equal(bits(out.flatten()), bits(x.flatten())), (name, dtype)
            if dtype in FLOATS:
                leaf = small.to(dtype).requires_grad_()
                result = run(call, leaf, one_rank)
                gradient = random_bits(tuple(result.shape), torch.int8, 3, device.at).to(dtype)
                result.backward(gradient)
                assert leaf.grad is not None, (name, dtype)
                assert torch.equal(leaf.grad.flatten(), gradient.flatten()), (name, dtype, "backward")


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_handles_on_a_side_stream(device: Device, one_rank: ProcessGroup, name: str) -> None:
    """The inputs are overwritten right after the call has been waited for."""
    dims = () if name == "all_reduce" else (1,)
    for n in device.pick((64,), (64, 4096, 1_000_000)):
        x = random_bits((2, n), torch.int8, n, device.at).float()
        expected = x.clone()
        with device.side_stream():
            out, handle = getattr(collective, name)(x, *dims, one_rank, async_op=True)
            assert tuple(out.shape) == (2, n), "before wait()"
            kept = handle.wait().clone()
            x.fill_(-1)
        assert torch.equal(kept, expected), n


def test_mappings_of_two_processes(device: Device, gloo_pair: Pool) -> None:
    gloo_pair.run(run_mappings, device, timeout=TIMEOUT)


def test_p2p_of_two_processes(device: Device, gloo_pair: Pool) -> None:
    gloo_pair.run(run_p2p, device, timeout=TIMEOUT)


@pytest.mark.parametrize("function", [run_checked, run_reshardings, run_ulysses])
def test_two_processes(device: Device, gloo_pair: Pool, function: Any) -> None:
    gloo_pair.run(function, device, timeout=TIMEOUT)


@pytest.mark.slow
def test_compile_of_two_processes(device: Device, gloo_pair: Pool) -> None:
    gloo_pair.run(run_compiled, device, timeout=TIMEOUT)


@pytest.mark.parametrize("function", [run_mappings, run_p2p, run_compiled, run_checked, run_reshardings, run_ulysses])
def test_two_processes_over_nccl(device: Device, nccl_pair: Pool, function: Any) -> None:
    nccl_pair.run(function, device, timeout=TIMEOUT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("name", "dim"), [("gather_from_sequence_parallel_region", 0), ("gather_from_tensor_model_parallel_region", 1)]
)
def test_cuda_graphs(device: Device, name: str, dim: int) -> None:
    """``mode="reduce-overhead"`` around mappings of a no-op group: none is skipped, and replays are right.

    The fake group's all-gather concatenates this rank's own tensor with itself.
    """
    from torch._dynamo.utils import counters
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        norm, group = nn.LayerNorm(16).to(device.at), dist.group.WORLD
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(partial(gathered, name, norm, group), fullgraph=True, **device.compiled[1])
        for turn in range(5):
            x = torch.randn(8, 16, device=device.at)
            leaf = x.clone().requires_grad_()
            device.begin_step()
            out = compiled(leaf)
            torch.testing.assert_close(out, torch.cat([norm(x).relu()] * 2, dim).detach(), rtol=1e-4, atol=1e-5)
            out.sum().backward()
            norm.zero_grad()  # gradients that add up over the steps of a graph live in its memory
            assert leaf.grad is not None, turn
            assert leaf.grad.isfinite().all(), turn
        assert not counters["inductor"]["cudagraph_skips"]
    finally:
        dist.destroy_process_group()


def gathered(name: str, norm: nn.Module, group: Any, x: Tensor) -> Tensor:
    return getattr(mappings, name)(norm(x), group=group).relu()
