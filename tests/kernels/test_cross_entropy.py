"""The kernels of the vocabulary-parallel cross entropy, in the interpreter, against plain torch in fp64."""

import math

import pytest
import torch
from operator_cases import run_case
from pool import Pool
from torch.distributed import ProcessGroup as TorchGroup
from tritoncomm_kernels import softmax

from tritoncomm import record
from tritoncomm.core import ops

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(1, 1), (3, 5), (4, 16), (5, 130), (2, 64)]


def case(shape: tuple[int, int], dtype: torch.dtype, strided: bool) -> dict[str, torch.Tensor]:
    rows, cols = shape
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    logits = (torch.randn(rows, cols + 3 * strided, generator=generator, dtype=torch.float64) * 4).to(dtype)[:, :cols]
    place = torch.randint(-1, cols, (rows,), generator=generator)
    hard = torch.rand(rows, generator=generator).to(wide) * (place >= 0)
    flat = torch.rand(cols, generator=generator).to(wide)
    total = torch.rand(rows, generator=generator).to(wide)
    upstream = torch.randn(rows, generator=generator).to(wide)
    return {"logits": logits, "place": place, "hard": hard, "flat": flat, "total": total, "upstream": upstream}


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    scale = max(float(wanted.abs().max()), 1.0)
    assert float((found.double() - wanted).abs().max()) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_and_gradient(shape: tuple[int, int], strided: bool, smooth: bool, dtype: torch.dtype) -> None:
    x = case(shape, dtype, strided)
    flat = x["flat"] if smooth else None
    numbers = torch.full((2, shape[0]), math.nan, dtype=x["hard"].dtype)
    softmax.statistics(x["logits"], x["place"], x["hard"], flat, numbers)
    logits = x["logits"].double()
    lse = logits.logsumexp(1)
    at = logits.gather(1, x["place"].clamp(min=0).unsqueeze(1)).squeeze(1)
    told = at * x["hard"].double() + (logits @ x["flat"].double() if smooth else 0)
    accuracy = torch.float64 if dtype is torch.float64 else torch.float32
    near(numbers[0], lse, accuracy)
    near(numbers[1], told, accuracy)
    out = torch.full(shape, math.nan, dtype=dtype)
    softmax.gradient(x["logits"], x["place"], x["hard"], flat, x["total"], lse.to(numbers.dtype), x["upstream"], out)
    wanted = (logits - lse.unsqueeze(1)).exp() * x["total"].double().unsqueeze(1)
    wanted -= x["flat"].double() if smooth else 0
    hard = torch.zeros_like(wanted).scatter_(1, x["place"].clamp(min=0).unsqueeze(1), x["hard"].double().unsqueeze(1))
    near(out, (wanted - hard) * x["upstream"].double().unsqueeze(1), dtype)


def test_edges() -> None:
    logits = torch.tensor([[-math.inf, 2.0, -math.inf], [-math.inf] * 3, [3e38, 3e38, -3e38], [math.nan, 0, 0]])
    place, hard, numbers = torch.tensor([1, -1, 0, 1]), torch.ones(4), torch.empty(2, 4)
    hard[1] = 0
    softmax.statistics(logits, place, hard, None, numbers)
    assert numbers[0, :2].tolist() == [2.0, -math.inf]
    assert float(numbers[0, 2]) == pytest.approx(3e38)
    assert math.isnan(numbers[0, 3])
    assert numbers[1].tolist() == [2.0, 0.0, pytest.approx(3e38), 0.0]
    out = torch.empty(4, 3)
    total = torch.tensor([1.0, 0.0, 0.0, 0.0])  # rows that do not count
    softmax.gradient(logits, place, hard, None, total, numbers[0].contiguous(), torch.ones(4), out)
    assert torch.equal(out, torch.zeros(4, 3))
    assert softmax.statistics(torch.empty(0, 3), place[:0], hard[:0], None, torch.empty(2, 0)) == 0


def run_on_kernels(group: TorchGroup, name: str) -> None:
    with ops.path("triton"), record.recording() as counted:
        assert run_case(group, name, 12) > 1
    cut = {path for (what, path), _ in counted.items() if what == "cross_entropy.rows"}
    assert cut == {"triton"}, counted
    assert ("cross_entropy.backward", "triton") in counted


NAMES = [
    "cross_entropy",
    "cross_entropy sum",
    "cross_entropy ignored",
    "cross_entropy smooth",
    "cross_entropy weighted",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_operator_on_kernels(pool: Pool, name: str) -> None:
    pool.run(run_on_kernels, name, world=2)
    pool.run(run_on_kernels, name, world=4)
