"""What ranks run to compare Megatron's sum of gradients in fp32 with ours: its data-parallel wrapper for ten steps."""

import contextlib
import inspect
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron_cpu import core, groups, join, on_cpu, transformer_config
from torch import Tensor, nn
from traffic import Traffic

from tritoncomm import record
from tritoncomm.integrations import megatron

__all__ = ["sums_of_gradients"]

NAME = "reduce_scatter_with_fp32_accumulation"
STEPS = 10


def _wrapped(overlap: bool) -> Any:
    """A model in bf16 with several buckets, in Megatron's wrapper."""
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).bfloat16()
    distributed = core("distributed")
    config = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, bucket_size=600, **{NAME: True}
    )  # fmt: skip
    return distributed.DistributedDataParallel(transformer_config({}), config, module)


def _steps(wrapped: Any) -> tuple[list[Tensor], list[str]]:
    """Gradients of every step after the sum, and what differs from the sum by hand where it can be seen before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found, wrong = [], []
    buckets = [bucket for group in wrapped.bucket_groups for bucket in group.buckets]
    overlap = wrapped.ddp_config.overlap_grad_reduce
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()
        wrapped(x).float().square().mean().backward()
        expected = []
        for bucket in [] if overlap else buckets:
            parts = torch.empty(world, bucket.grad_data.numel(), dtype=torch.bfloat16)
            dist.all_gather(list(parts), bucket.grad_data * bucket.gradient_scaling_factor)
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            distance = (parts.sum(0, dtype=torch.float32) - total).abs()
            if bool((distance > world * torch.finfo(torch.float32).eps * parts.float().abs().sum(0)).any()):
                wrong.append(f"step {step}: Megatron's order is off by more than {world} roundings")
            expected.append(total.bfloat16())
        wrapped.finish_grad_sync()
        for bucket, total in zip(buckets, expected or buckets, strict=True):  # every rank gets all shards, for SGD
            shards = list(bucket.grad_data.chunk(world))
            dist.all_gather(shards, shards[rank].clone())
            if expected and not torch.equal(bucket.grad_data, total):
                wrong.append(f"step {step}")
        # By parameter: calls that wait have one bucket, others several.
        found += [p.main_grad.clone() for p in wrapped.module.parameters()]
        with torch.no_grad():
            for p in wrapped.module.parameters():
                p.sub_(0.05 * p.main_grad)  # pyright: ignore
    return found, wrong


def sums_of_gradients(store: str) -> dict[str, Any]:
    """Train with and without ours, patched before and after the wrapper was made; what differs, by what it is."""
    rank, result = int(os.environ["RANK"]), {"wrong": [], "kept": []}
    with join(rank, 4, store), on_cpu(), groups():
        buffers = core("distributed.param_and_grad_buffer")
        unset = buffers.dist_reduce_scatter_func
        theirs = buffers.reduce_scatter_with_fp32_accumulation
        alone, result["alone"] = _steps(_wrapped(False))
        reference: list[Tensor] = []
        for overlap, when in itertools.product((False, True), ("before", "after")):
            label = f"{overlap=} patched {when}"
            with contextlib.ExitStack() as stack:
                if when == "before":
                    buffers.dist_reduce_scatter_func = unset
                    stack.enter_context(megatron.patched())
                wrapped = _wrapped(overlap)
                if when == "after":
                    assert buffers.dist_reduce_scatter_func is theirs
                    stack.enter_context(megatron.patched())
                ours = buffers.dist_reduce_scatter_func
                assert ours is not theirs
                with record.recording() as counted:
                    found, wrong = _steps(wrapped)
                if not any(name == NAME for name, _ in counted):
                    result["wrong"].append(f"{label}: not called")
                result["wrong"] += [f"{label}: {each}" for each in wrong]
                if overlap and not all(map(torch.equal, found, reference)):
                    result["wrong"].append(f"{label}: differs from the calls that wait")
                reference = found
            if buffers.dist_reduce_scatter_func is not theirs:
                result["kept"].append(label)
        # On this CPU torch.sum adds few rows in their order, so that even Megatron's bits are ours.
        result["same as alone"] = len(alone) == len(reference) and all(map(torch.equal, alone, reference))
        result["calls"] = _calls(theirs, ours)
    return result


def _calls(theirs: Any, ours: Any) -> dict[str, Any]:
    """Single calls: bytes that are read and written, memory of the caller's, and what stays Megatron's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group, op, found = dist.group.WORLD, dist.ReduceOp.SUM, {}
    x = torch.randn(world * 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    results = []
    for function in (theirs, ours):
        buffer = x.clone()
        with Traffic() as traffic, record.recording() as counted:
            function(buffer.view(world, -1)[rank], buffer, op, group, False)
        copied = sum(count.bytes_copied for count in counted.values())
        results.append((buffer.view(world, -1)[rank].clone(), copied or traffic.moved))
        out, scratch = torch.empty(64, dtype=torch.bfloat16), torch.full_like(x, 7)
        given = {"all_to_all_output_tensor": scratch} if _names(function) >= NAMES else {}
        handle = function(out, x, op, group, True, **given)
        handle.wait()
        results.append((out, not torch.equal(scratch, torch.full_like(x, 7)) if given else None))
    found["equal"] = all(torch.equal(each, results[0][0]) for each, _ in results)
    found["bytes"] = results[0][1], results[2][1]
    found["scratch is used"] = results[3][1]
    kept = []
    for dtype in (torch.float32, torch.float64):
        a, b = (torch.empty(64, dtype=dtype) for _ in range(2))
        theirs(a, x.to(dtype), op, group, False)
        ours(b, x.to(dtype), op, group, False)
        kept.append(torch.equal(a, b))
    found["other dtypes"] = kept
    found["asserts"] = []
    for bad in ((x[:64], x, dist.ReduceOp.MAX), (x[:64], x[:-1], op)):
        for function in (theirs, ours):
            try:
                function(*bad, group, False)
            except AssertionError:
                found["asserts"].append(True)
    return found


NAMES = {"all_to_all_output_tensor"}


def _names(function: Any) -> set[str]:
    """Names of the arguments of a function, or of an object's call."""
    return set(inspect.signature(function).parameters)
