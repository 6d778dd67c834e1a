"""`verify` of transformers' tensor parallelism: as silent as gradients alone are, or naming the same parameters."""

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from outside.cases.families import FAMILIES, run_family


@pytest.fixture(scope="session", autouse=True)
def _job() -> Iterator[None]:
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family(kind: str, micro_batches: int) -> None:
    assert dist.group.WORLD is not None
    report, wrong = run_family(dist.group.WORLD, kind, micro_batches)
    assert report.equal == (not wrong), f"plain torch: {wrong}\n{report}"
    assert all(f"gradient of {name} " in str(report) for name in wrong), f"plain torch: {wrong}\n{report}"
    assert bool(report.first) == bool(wrong)
    print(kind, micro_batches, wrong)
