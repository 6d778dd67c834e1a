"""One process of the demo, which trains, reports every step, and hands over losses and counters."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

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

__all__ = ["Trained", "rank_main"]


class Trained(NamedTuple):
    """Losses by step, seconds and counters of a process that has trained."""

    losses: list[float]
    seconds: float
    counters: dict[tuple[str, str], record.Count]


def rank_main(rank: int, settings: Settings, port: int, queue: Any, prepare: Callable[[], None] | None) -> None:
    """Train as rank ``rank``, or behind the last rank as the single process."""
    role = "ranks" if rank < settings.ranks else "single process"
    if role == "single process":
        settings, rank = replace(settings, ranks=1, pipeline=1, virtual=1), 0
    elif prepare is not None:
        prepare()

    # Rank 0 and the single process put (role, (step, loss)) into the queue, and (role, Trained) at the end.
    def report(news: Any) -> None:
        """Put a step or the result into the queue, on rank 0."""
        if rank == 0:
            queue.put((role, news))

    report(Trained(*_train(settings, rank, port, report), record.counters()))


def _train(
    settings: Settings, rank: int, port: int, report: Callable[[tuple[int, float]], None]
) -> tuple[list[float], float]:
    torch.set_num_threads(1)
    device = _join(settings, rank, port)
    model = _model(settings, rank, device)
    pipeline = Pipeline(model, device) if settings.pipeline > 1 and isinstance(model, Transformer) else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    losses: list[float] = []
    record.timing(on=True)
    record.reset()
    started = time.perf_counter()
    for step, (inputs, targets) in enumerate(batches(settings)):
        optimizer.zero_grad()
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
        report((step, losses[-1]))
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
