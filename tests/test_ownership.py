"""Who may write into a tensor: yes only where nobody else can see it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritoncomm import ownership
from tritoncomm.autograd import direct


def mapping(x: Tensor) -> bool:
    """Called like a mapping."""
    return ownership.temporary_is_ours(sys.getrefcount(x), x)


def test_a_temporary_is_ours() -> None:
    answers = [mapping(torch.ones(3) * 2), mapping(torch.ones(3, 3))]  # an assert would hold the temporaries
    assert answers == [True, True]


def test_what_somebody_holds_is_not_ours() -> None:
    held = torch.ones(3, 3)
    assert not mapping(held)
    assert not mapping(held.view(-1)), "its base is held"
    assert not mapping(held[0])
    assert not mapping(held.detach())
    assert not mapping([held][0])
    owner = torch.nn.Linear(2, 2)
    assert not mapping(owner.weight)
    assert not mapping(owner.weight.data)


def test_what_autograd_saved_is_not_ours() -> None:
    x = torch.ones(3, requires_grad=True)
    saved: list[bool] = []
    y = x.exp()
    saved.append(mapping(y))
    saved.append(mapping(y * 1.0 + y))
    assert saved[0] is False


def test_leaves_strides_and_lazy_bits_are_not_ours() -> None:
    assert not mapping(torch.ones(3, requires_grad=True))
    assert not mapping(torch.ones(3, 4).t())
    assert not mapping(torch.ones(3, dtype=torch.complex64).conj())
    assert not mapping(torch.ones(3, dtype=torch.complex64).conj().imag)


@direct
class Watch(torch.autograd.Function):
    """Identity that asks whether its gradient may be overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[bool]) -> Tensor:
        ownership.measure_gradients()
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        ctx.seen.append(ownership.gradient_is_ours(sys.getrefcount(grad_output), grad_output, ctx, Watch))
        return grad_output, None


def test_a_fresh_gradient_is_ours() -> None:
    seen: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    (Watch.apply(x, seen) * 2).backward(torch.ones(3))
    assert seen == [True]


def test_the_gradient_of_a_linear_layers_input_is_ours() -> None:
    """It is a view of a tensor that nobody else holds."""
    seen: list[bool] = []
    x, weight = torch.ones(2, 3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    torch.nn.functional.linear(Watch.apply(x, seen), weight, torch.ones(5)).pow(2).sum().backward()
    assert seen == [True]


@pytest.mark.parametrize("how", ["add", "add-swapped", "caller", "hook", "two views"])
def test_a_view_of_a_shared_gradient_is_not_ours(how: str) -> None:
    seen: list[bool] = []
    kept: list[Tensor] = []
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    gradient = torch.ones(3, 1)
    y = Watch.apply(x, seen).view(3, 1)
    if how == "add":
        (y + other * 1).backward(gradient.clone())
    elif how == "add-swapped":
        (other * 1 + y).backward(gradient.clone())
    elif how == "caller":
        y.backward(gradient)
    elif how == "hook":
        y.register_hook(kept.append)
        (y * 2).backward(gradient)
    else:
        (y + (other.view(3) * 1).view(3, 1)).backward(gradient.clone())
    assert seen == [False]


@pytest.mark.parametrize("how", ["add", "add-swapped", "caller", "hook", "retain", "expanded", "view"])
def test_a_shared_gradient_is_not_ours(how: str) -> None:
    seen: list[bool] = []
    kept: list[Tensor] = []
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    gradient = torch.ones(3)
    y = Watch.apply(x, seen)
    if how == "add":
        (y + other * 1).backward(gradient.clone())
    elif how == "add-swapped":
        (other * 1 + y).backward(gradient.clone())
    elif how == "caller":
        y.backward(gradient)
    elif how == "hook":
        y.register_hook(kept.append)
        (y * 2).backward(gradient)
    elif how == "retain":
        y.retain_grad()
        (y * 2).backward(gradient)
    elif how == "expanded":
        y.sum().backward()
    else:
        (y.view(3, 1) * 1).view(3).backward(gradient)
    if how == "retain":
        assert y.grad is not None
        assert y.grad.data_ptr() != gradient.data_ptr()  # a clone of its own, so either answer is safe
        return
    if how in ("retain", "view"):
        return  # either answer is safe: retain_grad keeps a copy, and nobody else reads the memory of the view
    assert seen == [False]


def test_a_gradient_passed_by_a_plain_call_is_not_ours() -> None:
    seen: list[bool] = []
    node = Watch.apply(torch.ones(3, requires_grad=True), seen).grad_fn
    gradient = torch.ones(3)
    Watch.backward(SimpleNamespace(seen=seen), gradient)
    Watch.backward(node, gradient)
    node.apply(gradient)

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> Any:
            ctx.seen, mine = seen, grad_output * 2
            return Watch.backward(ctx, mine)[0] + mine

    (Outer.apply(torch.ones(3, requires_grad=True)) * 2).backward(torch.ones(3))
    assert seen == [False] * 4
