"""Beside torch's own parallelism: FSDP2, pipelining and activation checkpointing around our layers and mappings."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from tritoncomm import mappings, parallel, record

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


SEQUENCE = {
    "0": parallel.SequenceParallel(),
    "1": parallel.ColwiseParallel(input_layouts=Shard(1)),
    "3": parallel.RowwiseParallel(output_layouts=Shard(1)),
}
TENSOR = {"1": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}


@pytest.mark.ranks(8)
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_fsdp_around_our_styles(group: ProcessGroup, sequence: bool) -> None:
    """Batches over 4 ranks, layers over 2: a step of SGD is that of one process on the global batch."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    plain = mlp()
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], SEQUENCE if sequence else TENSOR)
    fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, model)]
    torch.manual_seed(4)
    for _ in range(2):
        batch = torch.randn(4, 3, 4, 8)
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(batch).square().mean().backward()
        x = batch[mesh["dp"].get_local_rank()]
        out = model(x.chunk(2, 1)[mesh["tp"].get_local_rank()] if sequence else x)
        share = 2 if sequence else 1  # of the mean that is this rank's; the gradients of all ranks add up
        (out.square().mean() / share).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, mine), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(mine), wanted, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


class TensorParallel(nn.Module):
    """A column- and a row-parallel product by the mappings."""

    def __init__(self, up: Tensor, down: Tensor, group: ProcessGroup) -> None:
        super().__init__()
        rank, world = group.rank(), group.size()
        self.group = group
        self.up, self.down = (nn.Parameter(w.chunk(world, d)[rank].clone()) for w, d in ((up, 0), (down, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = mappings.copy_to_tensor_model_parallel_region(x, self.group)
        x = F.gelu(F.linear(x, self.up))
        return mappings.reduce_from_tensor_model_parallel_region(F.linear(x, self.down), self.group)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipelining_around_the_mappings(group: ProcessGroup, schedule: Any) -> None:
    """4 stages of layers over 2 ranks each: losses and gradients are those of one process."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))
    stage, stages, tensor = mesh["pp"].get_local_rank(), 4, mesh.get_group("tp")
    torch.manual_seed(5)
    weights = [(torch.randn(16, 8) / 4, torch.randn(8, 16) / 4) for _ in range(stages)]
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    leaves = [tuple(w.clone().requires_grad_() for w in pair) for pair in weights]
    out = x
    for up, down in leaves:
        out = F.linear(F.gelu(F.linear(out, up)), down)
    (F.mse_loss(out, target)).backward()
    own = TensorParallel(*weights[stage], tensor)
    pipeline = schedule(
        PipelineStage(own, stage, stages, torch.device("cpu"), group=mesh.get_group("pp")), 4, loss_fn=F.mse_loss
    )
    losses: list[Tensor] = []
    if stage == 0:
        pipeline.step(x)
    elif stage == stages - 1:
        torch.testing.assert_close(pipeline.step(target=target, losses=losses), out.detach(), **CLOSE)
        torch.testing.assert_close(torch.stack(losses).mean(), F.mse_loss(out, target).detach(), **CLOSE)
    else:
        pipeline.step()
    for mine, wanted, dim in ((own.up, leaves[stage][0], 0), (own.down, leaves[stage][1], 1)):
        assert wanted.grad is not None
        torch.testing.assert_close(mine.grad, wanted.grad.chunk(2, dim)[tensor.rank()], **CLOSE)
    dist.barrier()


def test_activation_checkpointing(group: ProcessGroup) -> None:
    """Recomputed layers give the same bits and send once more."""
    torch.manual_seed(6)
    layer = TensorParallel(torch.randn(16, 8), torch.randn(8, 16), group)
    x = torch.randn(4, 8, requires_grad=True)
    results = []
    for kind in ("plain", "reentrant", "non-reentrant"):
        record.reset()
        layer.zero_grad()
        y = layer(x * 1) if kind == "plain" else checkpoint(layer, x * 1, use_reentrant=kind == "reentrant")
        (dx,) = torch.autograd.grad(y.square().sum(), x, retain_graph=False) if kind != "reentrant" else (None,)
        if dx is None:
            x.grad = None
            y.square().sum().backward()
            dx = x.grad
        results.append((y.detach(), dx, record.total("reduce_from_tensor_model_parallel_region").calls))
    for y, dx, _ in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(dx, results[0][1])
    assert [calls for *_, calls in results][:2] == [1, 2], "the reentrant kind runs the whole forward again"
