"""Functions entered directly behave as torch's own do."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tritoncomm.core.autograd import called, direct


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

    monkeypatch.setattr(torch.autograd.function.BackwardCFunction, "apply", refuse)
    entered: list[Any] = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code) if event == "call" else None)
    try:
        result = gradient(Scale)
    finally:
        sys.setprofile(None)
    assert torch.equal(result, torch.full((3,), 2.0))
    ordinary = getattr(torch.autograd.Function.apply, "__func__", None)  # None from torch 2.15 on: the C++ entry itself
    assert ordinary is None or ordinary.__code__ not in entered


def test_who_replaces_apply_sees_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As spmd_types does, which torchtitan turns on; and no longer once it is put back."""
    if not hasattr(torch.autograd.Function.apply, "__func__"):
        pytest.skip("torch enters every function by itself")
    seen: list[Any] = []
    torchs = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, *args: Any) -> Any:
        seen.append(cls)
        return torchs(cls, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.Function, "apply", classmethod(watched))
        assert torch.equal(gradient(Scale, 5.0), torch.full((3,), 5.0))
    assert seen == [Scale]
    assert torch.equal(gradient(Scale), torch.full((3,), 2.0))
    assert seen == [Scale]


class ByAny(torch.autograd.Function):
    """x * factor, whose backward enters another function."""

    nodes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        ByAny.nodes += isinstance(ctx, torch.autograd.function.BackwardCFunction)
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return called(ByAny, grad_output, ctx.factor), None


def test_where_nothing_is_recorded_the_forward_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    monkeypatch.setattr(ByAny, "nodes", 0)
    (grad,) = torch.autograd.grad(called(ByAny, x, 3.0).square().sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(grad.sum(), x)[0], torch.full((3,), 18.0))
    assert ByAny.nodes == 2, "one of each forward, and none of the last backward"
    with torch.no_grad():
        assert torch.equal(called(ByAny, x, 3.0), torch.full((3,), 3.0))
    assert ByAny.nodes == 2
    apply: Any = torch.autograd.Function.apply
    if not hasattr(apply, "__func__"):
        return  # torch enters every function by itself
    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(lambda cls, *given: apply.__func__(cls, *given)))
    with torch.no_grad():
        called(ByAny, x, 3.0)
    assert ByAny.nodes == 3, "who replaced apply sees the call"


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
