"""Functions entered directly behave as torch's own do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tritoncomm.core.autograd import direct


@direct
class Scale(torch.autograd.Function):
    """x * factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 2.0) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * ctx.factor, None


def gradient(function: Any, *args: Any) -> Tensor:
    x = torch.ones(3, requires_grad=True)
    function.apply(x, *args).sum().backward()
    assert x.grad is not None
    return x.grad


def test_values_gradients_and_defaults() -> None:
    assert torch.equal(gradient(Scale), torch.full((3,), 2.0))
    assert torch.equal(gradient(Scale, 5.0), torch.full((3,), 5.0))
    assert not Scale.apply(torch.ones(3)).requires_grad


def test_the_node_runs_backward_without_going_through_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("went through the ordinary path")

    if hasattr(torch.autograd.Function.apply, "__func__"):  # before torch 2.15; now it is the C++ entry itself
        monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(refuse))
    monkeypatch.setattr(torch.autograd.function.BackwardCFunction, "apply", refuse)
    assert torch.equal(gradient(Scale), torch.full((3,), 2.0))


def test_a_subclass_runs_its_own_code() -> None:
    class Wrong(Scale):
        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            return grad_output * 7, None

    assert torch.equal(gradient(Wrong), torch.full((3,), 7.0))
    assert torch.equal(gradient(Scale), torch.full((3,), 2.0))


def test_inside_a_transform_torch_explains_itself() -> None:
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: Scale.apply(x).sum())(torch.ones(3))


def test_a_tensor_that_outlived_a_transform_is_taken() -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    torch.func.grad(keep)(torch.ones(3))
    assert torch.equal(Scale.apply(kept[0]), torch.full((3,), 2.0))
