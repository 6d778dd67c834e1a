"""A tiny Qwen3-Next on packed documents over sequence shards.

    torchrun --nproc-per-node 2 examples/hybrid_packed_documents.py

One rank also trains on each document by itself; the losses are the same.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import tritoncomm
from tritoncomm.integrations.transformers import register, shard_batch, switch

STEPS, RATE, LENGTHS = 4, 0.3, (11, 14, 7)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
HEADS = {"num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2}
WIDTHS = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4}
IDS = torch.randint(96, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))


def model_of(seed: int) -> Qwen3NextForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3NextConfig(**SIZES, **HEADS, **WIDTHS, num_experts_per_tok=2, num_hidden_layers=4, vocab_size=96)
    return Qwen3NextForCausalLM(config)


def loss_of_documents(model: Qwen3NextForCausalLM) -> torch.Tensor:
    """The mean over labels; the first token of a document is none."""
    sums = [
        cross_entropy(model(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum")
        for ids in IDS.split(LENGTHS, 1)
    ]
    return torch.stack(sums).sum() / (sum(LENGTHS) - len(LENGTHS))


def main() -> None:
    group = tritoncomm.initialize(tensor=2).get_group("tensor")
    model, alone = model_of(0), model_of(0)
    switch(model, register(group))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]  # they start again at each document
    for step in range(STEPS):
        loss = model(**shard_batch({"input_ids": IDS, "labels": IDS, "position_ids": positions}, group)).loss
        wanted = loss_of_documents(alone)
        for each, value in ((model, loss), (alone, wanted)):
            each.zero_grad()
            value.backward()
        for parameter in model.parameters():  # losses and gradients of the ranks add up
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
        for each in (model, alone):
            torch.optim.SGD(each.parameters(), RATE).step()
        dist.all_reduce(loss := loss.detach(), group=group)
        if group.rank() == 0:
            print(f"step {step}: loss {loss:.6f} on 2 ranks, {wanted:.6f} on one")
    tritoncomm.destroy()


if __name__ == "__main__":
    main()
