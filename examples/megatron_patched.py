"""Train a small GPT of Megatron-core twice, with its own communication and with tritoncomm's, and compare the losses.

    pip install --no-deps megatron-core==0.16.1
    torchrun --nproc-per-node 2 examples/megatron_patched.py [--sequence-parallel]

Tensor parallel over all ranks; sequence parallelism needs apex on GPUs, for its layer norm. Without a GPU the ranks are
CPU processes, on which Megatron runs only with the stand-ins of ``tests/helpers/megatron_cpu.py``.
"""

import contextlib
import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # lets collectives start before the products they overlap

VOCABULARY, LENGTH, STEPS = 64, 16, 10
GPU, SEQUENCE_PARALLEL = torch.cuda.is_available(), "--sequence-parallel" in sys.argv


def build() -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    size = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "use_cpu_initialization": True}
    plain = {"hidden_dropout": 0, "attention_dropout": 0, "bias_dropout_fusion": False, "masked_softmax_fusion": False}
    ranks = {"tensor_model_parallel_size": dist.get_world_size(), "sequence_parallel": SEQUENCE_PARALLEL}
    torch.manual_seed(0)
    config = TransformerConfig(**size, **ranks, **plain)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    return model.to(torch.cuda.current_device())


def train() -> list[float]:
    model, losses, device = build(), [], torch.cuda.current_device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(2 * LENGTH, device=device).view(2, LENGTH) % VOCABULARY
    positions = torch.arange(LENGTH, device=device).expand(2, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device), 1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(ids, positions, mask, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        for parameter in model.parameters():  # what Megatron's data-parallel wrapper would do
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    assert "RANK" in os.environ, f"started without torchrun:\n\n{__doc__}"
    from megatron.core import parallel_state, tensor_parallel

    import tritoncomm.integrations.megatron as tc_megatron

    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    device = contextlib.nullcontext() if GPU else importlib.import_module("megatron_cpu").on_cpu()
    dist.init_process_group("nccl" if GPU else "gloo")
    with device:
        parallel_state.initialize_model_parallel(dist.get_world_size(), create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        expected = train()
        with tc_megatron.patched() as report:
            patched = train()
    if dist.get_rank() == 0:
        print(report)
        for step, (ours, theirs) in enumerate(zip(patched, expected, strict=True)):
            print(f"step {step}: loss {ours:.6f} on {dist.get_world_size()} ranks, {theirs:.6f} by Megatron alone")
    assert patched == expected
    dist.destroy_process_group()
