"""`tritoncomm.verify` where a module does not show the fault: nothing unchecked is equal, and the culprit is named."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from verify_steps import judged

from tritoncomm import verify
from tritoncomm.verify.names import partners
from tritoncomm.verify.relations import find

RANKS = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])

# By program: its faults, with the first wrong module and words of the report; "" is the right program.
FIRST: dict[str, dict[str, tuple[str | None, str]]] = {
    "wrapped": {
        "": (None, "compared 18 of 18"), "compiled": (None, "compared 18 of 18"),
        "twice": ("3", "times the whole one"), "compiled twice": ("3", "times the whole one"),
    },
    "frozen": {"": (None, ""), "image": ("image", "2 times"), "text": ("text", "2 times")},
    "tables": {"": (None, ""), "local": ("tables", "its output is no part")},
    "optimized": {
        "sgd": (None, "changes"), "adam": (None, "changes"), "adafactor": (None, "changes"), "own": (None, "changes"),
        "sgd local": ("value", "never averaged"), "adam local": ("value", "never averaged"),
        "own local": ("query", "its change was never averaged"), "own rate": ("query", "its change is 2 times"),
        "sgd rate": ("query", "its change is 1/2 of"), "adam rate": ("query", "its change is 1/2 of"),
        "sgd buffer": ("", "buffer seen after the step"),
    },
    "behind": {
        "": (None, "compared 18 of 18"), "labels": ("the step", "between the model and the loss"),
        "clip": ("the step", "after the last module"), "clip keys": ("the step", "after the last module"),
    },
}  # fmt: skip


@RANKS
@pytest.mark.parametrize("name", FIRST)
def test_the_culprit_is_named(pool: Pool, world: int, name: str) -> None:
    reports = pool.run(judged, name, tuple(FIRST[name]), world=world, timeout=120)
    assert all(report == reports[0] for report in reports)
    for fault, (first, words) in FIRST[name].items():
        report = reports[0][fault]
        assert report.problem == "", f"{fault}: {report}"
        assert report.first == first, f"{fault}: {report}"
        assert words in str(report), f"{fault}: {report}"


ROUNDED = {
    "policy": {
        "": "", "bf16": "", "own": "", "zero": "is 0 on all ranks", "half": "is 1/{} of", "sign": "has the other sign",
    },
    "autocast": {"": "", "zero": "is 0 on all ranks"},
}  # fmt: skip


@RANKS
@pytest.mark.parametrize("name", ROUNDED)
def test_a_step_in_16_bits_is_compared_in_float64(pool: Pool, world: int, name: str) -> None:
    """What is smaller than the rounding of 16 bits is seen there, and the step as it is written is compared, too."""
    (reports, *_) = pool.run(judged, name, tuple(ROUNDED[name]), True, world=world, timeout=120)
    for fault, words in ROUNDED[name].items():
        report = reports[fault]
        assert report.problem == "", f"{fault}: {report}"
        assert report.equal == (not words), f"{fault}: {report}"
        assert words.format(world) in str(report), f"{fault}: {report}"
        assert ("in bfloat16, too" in str(report)) == report.equal, f"{fault}: {report}"


def test_names_without_partners_are_not_comparable(pool: Pool) -> None:
    (reports, *_) = pool.run(judged, "wrapped", ("names",))
    report = reports["names"]
    assert not report.equal
    assert "no rank has the parameter 0.weight of one process" in report.problem
    assert "one process has no inner.0.weight, which ranks have: Case.rename" in report.problem


@pytest.mark.parametrize(
    ("whole", "names", "expected"),
    [
        (["", "0", "0.weight"], ["", "module", "module.0", "module.0.weight"], [None, "", "0", "0.weight"]),
        (["", "module", "module.a"], ["", "module", "module.module", "module.module.a"],
         [None, "", "module", "module.a"]),
        (["", "module", "module.a"], ["", "module", "module.a"], ["", "module", "module.a"]),
        (["_orig_mod.0"], ["0"], ["_orig_mod.0"]),
        (["a.b"], ["_orig_mod.module.a._checkpoint_wrapped_module.b"], ["a.b"]),
        (["q.weight"], ["base_model.model.q.base_layer.weight", "base_model.model.q.lora_A.default.weight"],
         ["q.weight", "base_model.model.q.lora_A.default.weight"]),
        (["head.weight"], ["base_model.model.head.modules_to_save.default.weight"], ["head.weight"]),
        (["x"], ["module.y"], ["module.y"]),  # no partner
        (["submodule.x"], ["module.submodule.x", "module_list.x"], ["submodule.x", "module_list.x"]),
        (["a", "module.a"], ["a"], ["a"]),
    ],
)  # fmt: skip
def test_wrappers_are_taken_off_names(whole: list[str], names: list[str], expected: list[str | None]) -> None:
    assert [partners(whole, names)[name] for name in names] == expected


def test_ranks_that_hold_a_part_together_fit_no_layout() -> None:
    whole = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).double()
    blocks = [whole.chunk(2, 0)[i].chunk(2, 1)[j] for i in range(2) for j in range(2)]
    assert find(whole, blocks, 1e-12).relation is not None
    found = find(whole, [blocks[0], blocks[3]] * 2, 1e-12)
    assert found.relation is None
    assert found.partial is not None
    assert (found.partial.covered(4), found.partial.blocks) == (2, 4)
    found = find(whole, blocks[:2] * 2, 1e-12)  # ranks 2 and 3 have the rows of 0 and 1
    assert found.relation is None
    assert found.nearest is not None
    wrong = [k for k in range(4) if not torch.equal(blocks[k % 2], found.nearest.of(whole, k))]  # pyright: ignore
    assert wrong == [2, 3]


def recorded(model: nn.Module, *args: Any, **kwargs: Any) -> verify.Recording:
    def step() -> Tensor:
        out = model(*args, **kwargs)
        return out.loss if dataclasses.is_dataclass(out) else out.abs().sum()

    return verify.record(verify.Case(model, step))


def test_a_part_of_the_tensor_is_not_comparable() -> None:
    """Four ranks with two of four blocks: each is right, and half of the output was nowhere."""
    model = nn.Linear(8, 8, bias=False).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    whole = recorded(model, x)
    ranks = [copy.deepcopy(whole) for _ in range(4)]
    (index,) = whole.calls[0].outputs
    for k, rank in enumerate(ranks):
        rank.tensors[index] = whole.tensors[index].chunk(2, 0)[k % 2].chunk(2, 1)[k % 2].clone()
    report = verify.compare(whole, ranks)
    assert report.problem.startswith("not comparable: of the output of the model the ranks hold 16 of 32 values")


@pytest.mark.parametrize(("size", "world"), [(7, 2), (7, 4), (5, 4)])
def test_samples_that_a_sampler_repeats_are_told(size: int, world: int) -> None:
    model, x = nn.Linear(8, 8).double(), torch.randn(size, 8, dtype=torch.float64)
    samplers = [DistributedSampler(range(size), world, rank, shuffle=False) for rank in range(world)]  # pyright: ignore
    report = verify.compare(recorded(model, x), [recorded(model, x[list(each)]) for each in samplers])
    assert report.first == ""
    held, again = len(samplers[0]) * world, len(samplers[0]) * world - size
    words = f"the ranks hold {held} of {size} along dim 0: DistributedSampler repeats the first {again} sample"
    assert words in str(report), str(report)


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor


class Filtered(nn.Module):
    """A complex output, and one in a dataclass; its inputs come by place or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.scale = Spectrum(), 1.0

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Output:
        y = self.spectrum(x) * self.scale
        return Output(y, y.abs().sum())


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


def test_complex_outputs_dataclasses_and_inputs_by_name() -> None:
    x, bias = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    model = Filtered()
    whole = recorded(model, x, None, bias)
    assert list(whole.calls[-1].inputs) == ["x", "bias"]
    assert verify.compare(whole, [recorded(model, bias=bias, x=x, mask=x)]).equal
    wrong = Filtered()
    wrong.scale = 2.0
    assert verify.compare(whole, [recorded(wrong, x, bias=bias)]).first == ""
    wrong = Filtered()
    wrong.spectrum.register_forward_hook(lambda module, args, y: y.conj().resolve_conj())
    report = verify.compare(whole, [recorded(wrong, x, bias=bias)])
    assert report.first == "spectrum", str(report)


def test_nothing_of_outputs_or_of_gradients_is_not_equal() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)).double(), torch.randn(2, 4).double()

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    whole = verify.record(verify.Case(model, step))
    kept = {"0.weight": None, "0.bias": None}
    report = verify.compare(whole, [verify.record(verify.Case(model, step, rename=kept))])  # pyright: ignore
    assert report.problem == "not comparable: no gradient was compared, and one process has gradients"
    names = {"": None, "0.weight": "0.weight", "0.bias": "0.bias", "0": None}
    report = verify.compare(whole, [verify.record(verify.Case(model, step, rename=names))])  # pyright: ignore
    assert report.problem == "not comparable: no output was compared, and one process has outputs"
    report = verify.compare(whole, [whole])
    assert report.equal
    assert report.not_compared == {}
