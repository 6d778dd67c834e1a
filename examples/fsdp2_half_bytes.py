"""FSDP2 that sends gradients in bf16 and sums them in fp32, beside FSDP2's own sum in fp32.

    torchrun --nproc-per-node 2 examples/fsdp2_half_bytes.py

On two ranks both sums have the same bits, and so have the losses.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tritoncomm
from tritoncomm.integrations import fsdp2

STEPS, HIDDEN, TOKENS = 5, 64, 32


def sharded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)]
    model = nn.Sequential(*layers).to(mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(model: nn.Module, x: Tensor, target: Tensor) -> list[float]:
    """Return the mean losses of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    tritoncomm.initialize()  # NCCL and the GPU of this rank, or Gloo
    ranks, device = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    mesh = dist.init_device_mesh(device, (ranks,))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x, target = torch.randn(2, TOKENS, HIDDEN, generator=generator).to(device)
    expected = train(sharded(mesh), x, target)

    model = sharded(mesh)
    fsdp2.use(model)  # the one line
    with tritoncomm.recording() as counts:
        losses = train(model, x, target)

    sent = sum(count.bytes_sent for (name, _), count in counts.items() if name == "reduce_scatter")
    in_fp32 = STEPS * 4 * sum(weight.numel() for weight in model.parameters()) * (ranks - 1) // ranks
    if dist.get_rank() == 0:
        for step, (loss, own) in enumerate(zip(losses, expected, strict=True)):
            print(f"step {step}: loss {loss:.6f} on {ranks} ranks, {own:.6f} with FSDP2's own sum")
        print(f"gradients: {sent} bytes sent by each rank, {in_fp32} in fp32")
    tritoncomm.destroy()


if __name__ == "__main__":
    main()
