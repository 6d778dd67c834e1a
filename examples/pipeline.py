"""A model of one stage per rank trains with one forward, one backward (1F1B), as on one process.

    torchrun --nproc-per-node 2 examples/pipeline.py

Activations go to the next stage, gradients back to the previous one, micro-batch by micro-batch.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tritoncomm
from tritoncomm.p2p import P2PCommunicator, schedules

STAGES, HIDDEN, BATCH, MICROBATCHES, STEPS = 2, 32, 4, 6, 5


def stages(count: int, device: torch.device) -> list[nn.Module]:
    """The model, the same on every rank; each trains one stage of it."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()).to(device) for _ in range(count)]


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean() / MICROBATCHES


def train_stage(communicator: P2PCommunicator, stage: nn.Module, x: Tensor, target: Tensor) -> list[float]:
    """The losses of a few steps, on the last stage; x and target are ``[microbatches, batch, hidden]``."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)

    def chunk(received: Tensor | None, microbatch: int) -> Tensor:
        y = stage(x[microbatch] if received is None else received)
        return loss_of(y, target[microbatch]) if communicator.is_pp_last_stage else y

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = schedules.one_forward_one_backward(chunk, MICROBATCHES, communicator, (BATCH, HIDDEN))
        optimizer.step()
        losses.append(float(sum(parts)))
    return losses


def train_model(model: nn.Module, x: Tensor, target: Tensor) -> list[float]:
    """The same on one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = [loss_of(model(each), wanted) for each, wanted in zip(x, target, strict=True)]
        torch.stack(parts).sum().backward()
        optimizer.step()
        losses.append(float(sum(part.detach() for part in parts)))
    return losses


if __name__ == "__main__":
    mesh = tritoncomm.initialize(pipeline=STAGES, data=1)  # NCCL and the GPU of this rank, or Gloo
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    communicator = P2PCommunicator(mesh["pipeline"], SimpleNamespace(pipeline_dtype=torch.float32))
    x, target = torch.randn(2, MICROBATCHES, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)
    rank, count = communicator.current_stage, communicator.total_stages
    losses = train_stage(communicator, stages(count, device)[rank], x, target)
    if communicator.is_pp_last_stage:
        expected = train_model(nn.Sequential(*stages(count, device)), x, target)
        for step, (ours, plain) in enumerate(zip(losses, expected, strict=True)):
            print(f"step {step}: loss {ours:.6f} on {count} ranks, {plain:.6f} on one")
        sent = sum(each.bytes_sent for each in tritoncomm.counters().values())
        print(f"stage {rank} sent {sent} bytes to its neighbours in {STEPS} steps of {MICROBATCHES} micro-batches")
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    dist.barrier()
    tritoncomm.destroy()
