"""Preferences over log-probabilities of whole sequences, whose shards the ranks have, against one process.

tritoncomm verify examples/verify_log_probs.py:build --ranks 2
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor

from tritoncomm import verify
from tritoncomm.integrations.transformers import register, switch
from tritoncomm.integrations.transformers.log_probabilities import log_probs


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    dist.init_process_group()
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    model: Any = transformers.LlamaForCausalLM(config)
    if whole is not None:
        model.model.load_state_dict(whole)
    ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(1))  # chosen and rejected
    labels = ids.masked_fill(torch.arange(24) < 9, -100)  # of the answers, not of the prompt
    switch(model, register(group := group or dist.group.WORLD))

    def step() -> Tensor:
        chosen, rejected = log_probs(model, {"input_ids": ids, "labels": labels}, group).log_probs.sum(1)
        loss = -F.logsigmoid(0.1 * (chosen - rejected))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)  # gradients of the ranks add up
        return loss

    return verify.Case(model.model, step)  # the head, which is tied, is called on chunks of a rank's labels
