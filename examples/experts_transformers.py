"""A Qwen3-MoE of transformers whose experts are on two ranks: training, a checkpoint, and training from it.

    torchrun --nproc-per-node 2 examples/experts_transformers.py

One process also trains on both batches; the losses are the same. The checkpoint is loaded with whole experts.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from tritoncomm.integrations.transformers.experts import register_experts

CONFIG = Qwen3MoeConfig(vocab_size=96, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_experts=8,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0)  # fmt: skip


def clip(parameters: Any, limit: float) -> Tensor:
    """Clip by the norm of all gradients, which are on two meshes: that of the experts, and that of all else."""
    by_mesh: dict[Any, list[Any]] = {}
    for p in (p for p in parameters if p.grad is not None):
        by_mesh.setdefault(getattr(p, "device_mesh", None), []).append(p)
    norms = [get_total_norm([p.grad for p in group]) for group in by_mesh.values()]
    norm = get_total_norm([x.full_tensor() if isinstance(x, DTensor) else x for x in norms])
    for group in by_mesh.values():
        clip_grads_with_norm_(group, limit, norm)
    return norm


def load(folder: str, ranks: int, experts_ranks: int) -> tuple[Any, torch.optim.Optimizer]:
    """The model with its weights over all ranks, the experts over some of them, and a new optimizer."""
    config = DistributedConfig(fsdp_size=ranks, ep_size=experts_ranks, ep_implementation=register_experts())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).train()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def step(model: Any, optimizer: torch.optim.Optimizer, batches: list[Tensor], clip: Any) -> float:
    """Train on these batches, whose losses are averaged."""
    losses = [model(input_ids=ids, labels=ids).loss / len(batches) for ids in batches]
    torch.stack(losses).sum().backward()
    clip(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum().item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks, shared = dist.get_rank(), dist.get_world_size(), [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(f"{shared[0]}/start")  # rank 0 writes
    dist.barrier()
    single = AutoModelForCausalLM.from_pretrained(f"{shared[0]}/start").train()
    alone = torch.optim.SGD(single.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = load(f"{shared[0]}/start", ranks, ranks)
    for number in range(6):
        if number == 3:  # a checkpoint, and other ranks for the experts
            model.save_pretrained(f"{shared[0]}/saved", distributed_checkpoint=True)
            save_optimizer_distributed(model, optimizer, f"{shared[0]}/optimizer")
            model, optimizer = load(f"{shared[0]}/saved", ranks, 1)
            load_optimizer_distributed(model, optimizer, f"{shared[0]}/optimizer")
        batches = list(torch.randint(1, 96, (ranks, 2, 12), generator=torch.Generator().manual_seed(number % 2)))
        expected = step(single, alone, batches, clip_grad_norm_)
        loss = torch.tensor(step(model, optimizer, [batches[rank]], clip) / ranks)  # each rank has a batch of its own
        dist.all_reduce(loss)
        print(f"step {number}: loss {loss:.6f} on {ranks} ranks, {expected:.6f} on one\n" * (not rank), end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
