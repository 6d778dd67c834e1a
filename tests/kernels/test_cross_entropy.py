"""The kernels of the vocabulary-parallel cross entropy against plain torch in fp64."""

import inspect
import math

import pytest
import torch
from devices import Device
from operator_cases import run_case
from torch.distributed import ProcessGroup as TorchGroup
from tritoncomm_kernels import cross_entropy, torch_path

from tritoncomm import record
from tritoncomm.core import ops

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(1, 1), (3, 5), (1, 16), (2, 130), (2, 64)]  # in the interpreter every row and block of 64 is a program
LARGE = [(1, 1), (7, 5), (64, 129), (33, 16384), (8, 38016), (4, 128_256)]


def case(
    shape: tuple[int, int], dtype: torch.dtype, strided: bool, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    rows, cols = shape
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    logits = (torch.randn(rows, cols + 3 * strided, generator=generator, dtype=torch.float64) * 4).to(dtype)[:, :cols]
    target_col = torch.randint(-1, cols, (rows,), generator=generator)
    inputs = {
        "logits": logits,
        "target_col": target_col,
        "target_weight": torch.rand(rows, generator=generator).to(wide) * (target_col >= 0),
        "smoothing_weights": torch.rand(cols, generator=generator).to(wide),
        "row_weight": torch.rand(rows, generator=generator).to(wide),
        "upstream": torch.randn(rows, generator=generator).to(wide),
    }
    pitch = cols + 3 * strided
    padded = torch.empty(rows, pitch, dtype=dtype, device=device)[:, :cols].copy_(logits)
    return {name: value.to(device) for name, value in inputs.items()} | {"logits": padded}


def near(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    scale = max(float(expected.abs().max()), 1.0)
    assert float((result.double() - expected).abs().max()) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_statistics_and_gradient(device: Device, strided: bool, smooth: bool, dtype: torch.dtype) -> None:
    for shape in device.pick(SHAPES, LARGE):
        x = case(shape, dtype, strided, device.at)
        wide = {name: value if name == "target_col" else value.double() for name, value in x.items()}
        names = ("logits", "target_col", "target_weight", "smoothing_weights")
        first, exact = ([one[name] if smooth or name != names[3] else None for name in names] for one in (x, wide))
        numbers = x["target_weight"].new_full((2, shape[0]), math.nan)
        expected = numbers.double()
        moved = cross_entropy.statistics(*first, numbers)
        assert moved == torch_path.statistics(*first, torch.empty_like(numbers))
        torch_path.statistics(*exact, expected)
        near(numbers, expected, numbers.dtype)
        out = torch.full(shape, math.nan, dtype=dtype, device=device.at)
        expected_out, lse = out.double(), expected[0].to(numbers.dtype)
        moved = cross_entropy.gradient(*first, x["row_weight"], lse, x["upstream"], out)
        assert moved == torch_path.gradient(*first, x["row_weight"], lse, x["upstream"], torch.empty_like(out))
        torch_path.gradient(*exact, wide["row_weight"], expected[0], wide["upstream"], expected_out)
        near(out, expected_out, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
def test_the_twin_is_what_autograd_gives(smooth: bool, dtype: torch.dtype) -> None:
    x = case((4, 16), dtype, False)
    weights = x["smoothing_weights"] if smooth else torch.zeros(16, dtype=dtype)
    logits = x["logits"].requires_grad_()
    row_weight = x["target_weight"] + weights.sum()
    at_target = logits.gather(1, x["target_col"].clamp(min=0).unsqueeze(1)).squeeze(1) * x["target_weight"]
    loss = row_weight * logits.logsumexp(1) - at_target - logits @ weights
    (expected,) = torch.autograd.grad(loss, logits, x["upstream"])
    out, lse, first = torch.empty_like(expected), logits.detach().logsumexp(1), (x["target_col"], x["target_weight"])
    torch_path.gradient(logits.detach(), *first, weights if smooth else None, row_weight, lse, x["upstream"], out)
    near(out, expected.double(), dtype)


@pytest.mark.parametrize("name", ["statistics", "gradient"])
def test_signatures_are_those_of_the_twins(name: str) -> None:
    assert inspect.signature(getattr(cross_entropy, name)) == inspect.signature(getattr(torch_path, name))


UNIT = {torch.float64: 2.0**-53}  # of the arithmetic's rounding; that of the other dtypes is fp32
EXTREMES = {
    "around-zero": lambda z: 4 * z,
    "one-hot": lambda z: torch.where(z == z.amax(1, keepdim=True), 80.0, z),
    "offset": lambda z: z + 1e4,
    "negative-offset": lambda z: z - 1e4,
    "wide": lambda z: 3000 * z,
    "rising": lambda z: z.sort(1).values * 30,
    "largest": lambda z: z.sign() * 6e4,
    "some-infinite": lambda z: torch.where(z < 0.5, -math.inf, z),
    "equal": lambda z: torch.full_like(z, -7.25),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
def test_the_bound_of_both_kernels(device: Device, kind: str, dtype: torch.dtype) -> None:
    """The log-sum-exp and every exponential of the gradient are within the bound that the module states."""
    unit = UNIT.get(dtype, 2.0**-24)
    for shape in device.pick([(2, 130), (1, 7)], [(5, 38016), (3, 16385), (2, 100)]):
        z = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]), dtype=torch.float64)
        logits = EXTREMES[kind](z).to(dtype).to(device.at)
        rows = shape[0]
        target_col = torch.full((rows,), -1, device=device.at)
        ones = torch.ones(rows, dtype=torch.promote_types(dtype, torch.float32), device=device.at)
        numbers = ones.new_full((2, rows), math.nan)
        cross_entropy.statistics(logits, target_col, 0 * ones, None, numbers)
        exact = logits.double().logsumexp(1)
        assert bool(((numbers[0].double() - exact).abs() <= unit * (64 + 2 * exact.abs())).all()), (shape, exact)
        out = torch.full(shape, math.nan, dtype=dtype, device=device.at)
        lse = numbers[0].contiguous()
        cross_entropy.gradient(logits, target_col, 0 * ones, None, ones, lse, ones, out)
        distance = logits.double() - lse.double().unsqueeze(1)
        softmax, limits = distance.exp(), torch.finfo(dtype)
        relative = torch.where(distance.isinf(), 0.0, 8 + 4 * distance.abs()) * unit + limits.eps / 2
        absolute = max(2.0**-126, limits.smallest_normal * limits.eps / 2)
        assert bool(((out.double() - softmax).abs() <= relative * softmax + absolute).all()), shape


def test_edges(device: Device) -> None:
    """Rows of -inf, of the largest numbers, with NaN; rows that do not count; no rows."""
    logits = torch.tensor([[-math.inf, 2.0, -math.inf], [-math.inf] * 3, [3e38, 3e38, -3e38], [math.nan, 0, 0]])
    logits, numbers = logits.to(device.at), torch.empty(2, 4, device=device.at)
    target_col, target_weight = torch.tensor([1, -1, 0, 1], device=device.at), torch.ones(4, device=device.at)
    target_weight[1] = 0
    cross_entropy.statistics(logits, target_col, target_weight, None, numbers)
    assert numbers[0, :2].tolist() == [2.0, -math.inf]
    assert float(numbers[0, 2]) == pytest.approx(3e38)
    assert math.isnan(numbers[0, 3])
    assert numbers[1].tolist() == [2.0, 0.0, pytest.approx(3e38), 0.0]
    out = torch.empty(4, 3, device=device.at)
    row_weight = torch.tensor([1.0, 0.0, 0.0, 0.0], device=device.at)  # rows that do not count
    lse, upstream = numbers[0].contiguous(), torch.ones(4, device=device.at)
    cross_entropy.gradient(logits, target_col, target_weight, None, row_weight, lse, upstream, out)
    assert torch.equal(out, torch.zeros_like(out))
    lowest, one = torch.full((1, 200), torch.finfo(torch.float32).min, device=device.at), torch.empty(2, 1)
    one = one.to(device.at)
    cross_entropy.statistics(lowest, target_col[1:2], target_weight[1:2], None, one)
    assert one.flatten().tolist() == [float(lowest[0, 0]), 0.0]
    assert cross_entropy.statistics(torch.empty(0, 3), target_col[:0], target_weight[:0], None, torch.empty(2, 0)) == 0


NAMES = [
    "cross_entropy",
    "cross_entropy sum",
    "cross_entropy ignored",
    "cross_entropy smooth",
    "cross_entropy weighted",
]


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_the_operator_on_kernels(group: TorchGroup) -> None:
    for name in NAMES:
        with ops.path("triton"), record.recording() as counted:
            assert run_case(group, name, 12) > 1, name
        paths = {path for (what, path), _ in counted.items() if what == "cross_entropy.rows"}
        assert paths == {"triton"}, (name, counted)
        assert ("cross_entropy.backward", "triton") in counted, name
