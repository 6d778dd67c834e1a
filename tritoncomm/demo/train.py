"""One process of the demo: trains, reports every step, hands over losses and counters."""

import os
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tritoncomm import collective, launchers, record, runtime
from tritoncomm.core.backend import is_nccl
from tritoncomm.core.plan import chunk_sizes
from tritoncomm.demo.data import batches
from tritoncomm.demo.model import Transformer
from tritoncomm.demo.pipeline import Pipeline
from tritoncomm.demo.plain_model import PlainTransformer, sharded
from tritoncomm.demo.settings import Settings
from tritoncomm.groups import ParallelMode
from tritoncomm.tensor import ProcessGroup

__all__ = ["rank_main"]


def rank_main(
    role: str, settings: Settings, rank: int, port: int, queue: Any, prepare: Callable[[], None] | None
) -> None:
    """Train as rank ``rank``; steps, results and failures go into ``queue`` as (role, rank, kind, value)."""
    try:
        if prepare is not None:
            prepare()
        losses, seconds = _train(settings, rank, port, lambda *step: queue.put((role, rank, "step", step)))
        queue.put((role, rank, "done", (losses, seconds, record.counters())))
    except BaseException:
        queue.put((role, rank, "failed", traceback.format_exc()))
        raise SystemExit(1) from None


def _train(settings: Settings, rank: int, port: int, report: Callable[[int, float], None]) -> tuple[list[float], float]:
    torch.set_num_threads(1)
    device = _join(settings, rank, port)
    model = _model(settings, rank, device)
    pipeline = Pipeline(model, device) if settings.pipeline > 1 and isinstance(model, Transformer) else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses: list[float] = []
    record.timing(True)
    record.reset()
    started = time.perf_counter()
    for step, (inputs, targets) in enumerate(batches(settings)):
        optimizer.zero_grad(set_to_none=False)
        inputs, targets = inputs.to(device), targets.to(device)
        if pipeline is None:
            loss = model(inputs, targets)
            loss.backward()
        else:
            loss = pipeline.step(inputs, targets)
        if isinstance(model, Transformer):
            _sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    seconds = time.perf_counter() - started
    runtime.destroy()
    return losses, seconds


def _model(settings: Settings, rank: int, device: torch.device) -> Transformer | PlainTransformer:
    if not settings.tensor_layer:
        model = Transformer(settings, rank % settings.tensor, rank // settings.tensor)
        return model.to(device, settings.torch_dtype)
    plain = PlainTransformer(settings).to(device, settings.torch_dtype)
    return sharded(plain, ProcessGroup(tp_degree=settings.tensor)) if settings.tensor > 1 else plain


def _join(settings: Settings, rank: int, port: int) -> torch.device:
    """Enter the job; a rank's GPU is its own with NCCL and the first one otherwise."""
    launchers.forget(os.environ)  # of the job that the demo itself may be a rank of
    if settings.ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.ranks), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )  # fmt: skip
    runtime.initialize(
        tensor=settings.tensor,
        pipeline=settings.pipeline,
        virtual_pipeline=settings.virtual if settings.virtual > 1 else None,
        backend=settings.backend(),
        timeout=settings.timeout,
    )
    if not settings.on_gpu():
        return torch.device("cpu")
    return torch.device("cuda", rank if is_nccl(settings.backend()) else 0)


def _sum_gradients(model: Transformer) -> None:
    """Sum the gradients of replicated parameters over the tensor ranks: one reduce-scatter, one all-gather."""
    parameters = model.replicated()
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    shard = collective.split_reduce_scatter(flat, 0, ParallelMode.TENSOR)
    sizes = chunk_sizes(flat.numel(), model.settings.tensor)
    summed = collective.all_gather(shard, 0, ParallelMode.TENSOR, sizes=sizes)
    for p, part in zip(parameters, summed.split([p.numel() for p in parameters]), strict=True):
        assert p.grad is not None
        p.grad.copy_(part.view_as(p))
