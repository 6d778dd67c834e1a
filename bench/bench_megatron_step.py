"""Host time of a training step of megatron-core's GPT, with and without ``integrations.megatron.patch()``.

Four layers of hidden size 32 on 16 tokens, tensor parallel over a no-op process group of two ranks: a step is all host
work, and everything but the collectives is Megatron's. Rounds alternate, and Megatron is also timed against itself: a
control that is off by more than ``CONTROL`` means that the machine was not quiet. Thread CPU time; medians of ratios
within a round.
``python bench/bench_megatron_step.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import guard
from bench.harness import Clock, Part, Row, Samples
from bench.hosts import missing_megatron, no_op_group
from bench.timing import quiet_host

WORLD, TOKENS = 2, 16
CONTROL = 0.03  # of Megatron's time, between it and itself


@dataclass(frozen=True)
class Case:
    """A step of the model, or of one column-parallel and one row-parallel layer."""

    what: str
    sequence_parallel: bool
    inner: int

    @property
    def label(self) -> str:
        return f"{self.what}{', sequence parallel' if self.sequence_parallel else ''}"


CASES = [
    Case("GPT step", False, 3),
    Case("GPT step", True, 3),
    Case("column + row linear", False, 20),
    Case("column + row linear", True, 20),
]


def _helpers() -> Any:
    """Megatron on the CPU, as the tests have it."""
    folder = str(Path(__file__).resolve().parents[1] / "tests" / "helpers")
    if folder not in sys.path:
        sys.path.append(folder)
    import megatron_cpu

    return megatron_cpu


@contextmanager
def host() -> Iterator[None]:
    """A no-op process group of which every group of Megatron's is one, and the CPU as its GPU."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron warns at every call without
    new_group, helpers = dist.new_group, _helpers()

    def without_backend(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": None})

    with ExitStack() as stack:
        stack.enter_context(no_op_group(WORLD))
        stack.enter_context(helpers.on_cpu(factories=False))
        dist.new_group = without_backend
        stack.callback(setattr, dist, "new_group", new_group)
        stack.enter_context(helpers.groups(tensor_model_parallel_size=WORLD))
        yield


def _gpt_step(config: Any) -> Callable[[], Any]:
    helpers = _helpers()
    (model,) = helpers.gpt_chunks(config, helpers.core("parallel_state"))
    ids, positions = torch.randint(helpers.VOCABULARY, (1, TOKENS)), torch.arange(TOKENS).expand(1, TOKENS)
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)
    return lambda: model(ids, positions, mask, labels=ids).mean().backward()


def _linear_pair(config: Any) -> Callable[[], Any]:
    layers, size = _helpers().core("tensor_parallel.layers"), config.hidden_size
    common = {"config": config, "init_method": torch.nn.init.normal_, "bias": False}
    column = layers.ColumnParallelLinear(size, 4 * size, gather_output=False, **common)
    row = layers.RowParallelLinear(4 * size, size, input_is_parallel=True, skip_bias_add=True, **common)
    x = torch.randn(TOKENS // WORLD if config.sequence_parallel else TOKENS, 1, size, requires_grad=True)
    return lambda: row(column(x)[0])[0].sum().backward()


def _alternate(step: Callable[[], Any], rounds: int, inner: int) -> Samples:
    """Microseconds of thread CPU time per step; every provider is warmed up before it is timed."""
    from tritoncomm.integrations import megatron  # after Megatron's own imports, with their warnings off

    samples: Samples = {"ours": [], "megatron": [], "control": []}
    order = list(samples)
    for _ in range(rounds):
        for provider in order:
            megatron.patch()
            if provider != "ours":
                megatron.unpatch()
            for _ in range(2 * inner):  # names have been rebound: Python's caches of them are cold
                step()
            started = time.thread_time()
            for _ in range(inner):
                step()
            samples[provider].append((time.thread_time() - started) / inner * 1e6)
            megatron.unpatch()
        order.reverse()
    return samples


def measure(case: Case, _: None, clock: Clock) -> Iterator[Row]:
    """One row, measured once more where the machine was not quiet; its ratios are medians of those of a round."""
    config = _helpers().transformer_config(
        {"tensor_model_parallel_size": WORLD}, sequence_parallel=case.sequence_parallel
    )
    step = (_gpt_step if case.what == "GPT step" else _linear_pair)(config)
    for _ in range(20):
        step()

    samples: list[Samples] = []

    def sample() -> Samples:
        with quiet_host():
            samples.append(_alternate(step, clock.rounds, case.inner))
        return samples[-1]

    target = {"limit": guard.STEP} if case.what == "GPT step" else guard.row_target()
    for _ in range(2):
        row = clock.row(case.label, sample, **target)
        row["ratio"] = {"megatron": _ratio(samples[-1], "ours")}
        row["spread"] = {"megatron": row["spread"]["megatron"]}
        row["control"] = {"control": _ratio(samples[-1], "control")}
        if not unquiet(row):
            break
    yield row


def _ratio(samples: Samples, provider: str) -> float:
    """Median of the ratios to Megatron within a round: a machine that changes its speed changes both."""
    pairs = zip(samples[provider], samples["megatron"], strict=True)
    return round(statistics.median(one / other for one, other in pairs), 3)


def unquiet(row: Row) -> list[str]:
    """Megatron against itself, where that is off."""
    control = row["control"]["control"]
    return [f"{row['row']}: Megatron against itself is {control:.2f}"] if abs(control - 1) > CONTROL else []


PART = Part(
    name="megatron_step",
    unit="microseconds of thread CPU time per step",
    cases=CASES,
    measure=measure,
    host=host,
    rounds=60,
    peer="megatron",
    missing=missing_megatron,
    packages=("megatron-core",),
    targets=unquiet,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
