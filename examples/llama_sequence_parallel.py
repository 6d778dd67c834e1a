"""A Llama of transformers on sequence shards.

    torchrun --nproc-per-node 2 examples/llama_sequence_parallel.py

The model is small and random; with ``from_pretrained(..., attn_implementation=name)`` nothing else changes.
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import tritoncomm
from tritoncomm.integrations.transformers import register, shard_batch, switch, unregister

STEPS = 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def one_batch() -> dict[str, torch.Tensor]:
    """What a data loader gives to every rank: two samples, the second one padded; the same ones every step."""
    ids = torch.randint(128, (2, 61), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 50:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def train(group: dist.ProcessGroup, device: torch.device) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device)
    switch(model, register(group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        batch = {key: value.to(device) for key, value in one_batch().items()}
        loss = model(**shard_batch(batch, group), use_cache=False).loss  # this rank's part of the mean
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    unregister()
    return losses


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tritoncomm.initialize()  # the device of this rank, NCCL or Gloo
    group = dist.group.WORLD
    assert group is not None
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    losses, of_one_process = train(group, device), train(alone, device)
    if group.rank() == 0:
        for step, pair in enumerate(zip(losses, of_one_process, strict=True)):
            print(f"step {step}: loss {pair[0]:.6f} on {group.size()} ranks, {pair[1]:.6f} on one")
    torch.testing.assert_close(losses, of_one_process, rtol=1e-4, atol=0)
    tritoncomm.destroy()


if __name__ == "__main__":
    main()
