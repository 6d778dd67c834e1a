"""Train a small GPT of Megatron-core twice, with its own communication and with tritoncomm's, and compare the losses.

    pip install --no-deps megatron-core==0.16.1
    torchrun --nproc-per-node 2 examples/megatron_patched.py [--sequence-parallel]

Tensor parallel over all ranks; sequence parallelism needs apex on GPUs, for its layer norm. Without a GPU the ranks are
CPU processes, on which Megatron runs only with the stand-ins of ``tests/helpers/megatron_cpu.py``.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # lets collectives start before the products they overlap

VOCABULARY, LENGTH, STEPS = 64, 16, 10


def build(tensor_size: int) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor_size,
        sequence_parallel="--sequence-parallel" in sys.argv,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(0)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    return model.to(torch.cuda.current_device())


def train(tensor_size: int) -> list[float]:
    model, losses = build(tensor_size), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.cuda.current_device()
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


def stand_ins() -> Any:
    """What Megatron needs on a machine without CUDA."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    from megatron_cpu import on_cpu

    return on_cpu()


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from tritoncomm.integrations import megatron

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    with contextlib.nullcontext() if gpu else stand_ins():
        tensor_size = dist.get_world_size()
        parallel_state.initialize_model_parallel(tensor_size, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(0)
        own = train(tensor_size)
        report = megatron.patch()
        patched = train(tensor_size)
        megatron.unpatch()
    if dist.get_rank() == 0:
        print(report)
        for step, (ours, theirs) in enumerate(zip(patched, own, strict=True)):
            print(f"step {step}: {theirs:.6f} by Megatron, {ours:.6f} with tritoncomm")
    assert patched == own
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
