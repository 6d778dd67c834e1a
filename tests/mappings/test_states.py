"""Drawn cases: every mapping, over memory that others see, under every state of autograd, against closed forms.

A case is a mapping, the memory of its input and of its gradient, whether the input is a temporary, and what is active
around the call. Whatever the case: values and gradients are the closed form's, and nothing that anybody else refers to
has changed.
"""

import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mapping_cases import MAPPINGS, all_held, expected, expected_gradient, run, same
from memory import EXTERNAL, Keep, KeepFunctions, kept, traced
from pool import Pool
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from tritoncomm import UnsupportedError
from tritoncomm import mappings as m

SHAPE = (8, 16)
MEMORY = ["plain", "view", "slice", *(name for name in EXTERNAL if name not in ("subclass", "wrapper", "parameter"))]
STATES: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch mode": Keep,
    "function mode": KeepFunctions,
    "settrace": lambda: traced(sys.settrace, threading.settrace),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    "kept by hooks": lambda: torch.autograd.graph.saved_tensors_hooks(remember, remember),
    "save on cpu": torch.autograd.graph.save_on_cpu,
}
RECOMPUTED = {"none": None, "reentrant": True, "not reentrant": False}


def remember(x: Tensor) -> Tensor:
    kept.append(x)
    return x


class Passed(torch.autograd.Function):
    """Identity; its gradient is the one that ``make`` returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return ctx.make(), None


class Memory:
    """Makes tensors over memory that others see, and knows what is to be found there."""

    def __init__(self, folder: str) -> None:
        self._folder, self._looks, self._count = folder, [], 0

    def tensor(self, kind: str, values: Tensor) -> Tensor:
        array = values.numpy()
        if kind == "plain":
            return values.clone()
        if kind in ("view", "slice"):
            wide = torch.full((3, *values.shape), 99.0)
            wide[1] = values
            self._looks.append((wide.numpy, wide.numpy().copy()))
            return wide[1] if kind == "view" else wide[1:2].squeeze(0)
        self._count += 1
        x, look = EXTERNAL[kind](array, f"{self._folder}/{self._count}")
        self._looks.append((look, array.copy()))
        return x

    def watch(self, x: Tensor) -> None:
        """A tensor that the test refers to must not change either."""
        self._looks.append((lambda: x.detach().numpy(), x.detach().numpy().copy()))

    def unchanged(self) -> bool:
        return all(np.array_equal(look(), values) for look, values in self._looks)


@contextmanager
def memory() -> Iterator[Memory]:
    with tempfile.TemporaryDirectory() as folder:
        yield Memory(folder)
        kept.clear()


def run_case(group: ProcessGroup, rng: random.Random) -> tuple[Any, ...]:
    name, state, recompute = rng.choice(list(MAPPINGS)), rng.choice(list(STATES)), rng.choice(list(RECOMPUTED))
    of_input, of_grad = rng.choice(MEMORY), rng.choice(MEMORY)
    grad, temporary, hook = rng.random() < 0.7, rng.random() < 0.6, rng.random() < 0.3
    what = (name, state, recompute, of_input, of_grad, grad, temporary, hook)
    call = MAPPINGS[name]
    parts = all_held(group, SHAPE, rng.randrange(1000))
    wanted = expected(call, parts, group.rank())
    grads = all_held(group, tuple(wanted.shape), rng.randrange(1000))
    with memory() as outside:
        leaf = outside.tensor(of_input, parts[group.rank()]).requires_grad_(grad)
        outside.watch(leaf)
        mapped = (lambda x: run(call, x, group)) if not temporary else (lambda x: run(call, x.view_as(x) * 1, group))
        with ExitStack() as stack:
            stack.enter_context(STATES[state]())
            if temporary and rng.random() < 0.5:  # the memory itself, as a temporary that only the mapping refers to
                out = run(call, outside.tensor(of_input, parts[group.rank()]), group)
                same(out.detach().contiguous(), wanted, what)
            if RECOMPUTED[recompute] is None or not torch.is_grad_enabled() or not grad:
                out = mapped(leaf)
            else:
                out = checkpoint(mapped, leaf, use_reentrant=RECOMPUTED[recompute])
            recorded = grad and torch.is_grad_enabled()
        assert out.requires_grad == recorded, what
        same(out.detach().contiguous(), wanted, what)
        if recorded:
            if hook:
                out.register_hook(rng.choice([remember, lambda g: kept.append(g.untyped_storage())]))
            gradient = grads[group.rank()]
            if rng.random() < 0.5:
                Passed.apply(out, lambda: outside.tensor(of_grad, gradient)).sum().backward()
            else:
                passed = outside.tensor(of_grad, gradient)
                outside.watch(passed)
                out.backward(passed)
            assert leaf.grad is not None, what
            of_leaf = expected_gradient(call, grads, group.rank()).reshape(SHAPE)
            same(leaf.grad.contiguous(), of_leaf, ("backward", *what))
        assert outside.unchanged(), what
    return what


def run_cases(group: ProcessGroup, seed: int, count: int) -> int:
    rng = random.Random(seed)
    return len({run_case(group, rng) for _ in range(count)})


@pytest.mark.parametrize(("world", "count"), [(1, 100), (2, 120), (4, 60)])
def test_drawn_cases(pool: Pool, world: int, count: int) -> None:
    distinct = pool.run(run_cases, 7, count, world=world)
    assert min(distinct) > 0.9 * count


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_drawn_cases(pool: Pool, seed: int) -> None:
    pool.run(run_cases, seed, 3000, world=2, timeout=600)


@pytest.mark.ranks(1, 2)
def test_a_target_computed_under_no_grad_is_not_trained(group: ProcessGroup) -> None:
    """A target computed under no_grad is a constant: d/dw (f(w) - target)^2 sees f(w) alone."""
    for name, call in MAPPINGS.items():
        w = torch.arange(1.0, 129.0).view(SHAPE).requires_grad_()
        with torch.no_grad():
            target = run(call, w, group)
            handed_back = run(call, w.detach(), group)
        assert not target.requires_grad, name
        assert not handed_back.requires_grad, name
        ((run(call, w, group) - 2 * target) * target).sum().backward()
        expected = torch.zeros_like(w).requires_grad_()
        (grad,) = torch.autograd.grad(run(call, expected, group), expected, target.clone())
        same(w.grad, grad, name)  # pyright: ignore[reportArgumentType]


@pytest.mark.ranks(1, 2)
def test_an_input_that_is_handed_back_without_grad_is_the_same_object(group: ProcessGroup) -> None:
    x = torch.ones(SHAPE)
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            assert m.copy_to_tensor_model_parallel_region(x, group) is x
            if group.size() == 1:
                for name, call in MAPPINGS.items():
                    if "hp" not in name:
                        assert run(call, x, group) is x, name


@pytest.mark.ranks(1, 2)
def test_forward_mode_ad_is_refused(group: ProcessGroup) -> None:
    for name, call in MAPPINGS.items():
        for requires_grad in (False, True):
            with forward_ad.dual_level():
                x = forward_ad.make_dual(torch.ones(SHAPE, requires_grad=requires_grad), torch.ones(SHAPE))
                with pytest.raises(UnsupportedError, match="forward-mode AD"):
                    run(call, x, group)
                run(call, torch.ones(SHAPE), group)  # without a tangent there is nothing to lose
        with pytest.raises(UnsupportedError, match="forward-mode AD"):
            torch.func.jvp(lambda x, call=call: run(call, x, group), (torch.ones(SHAPE),), (torch.ones(SHAPE),))
        with forward_ad.dual_level():  # forward over reverse: the gradient has the tangent
            out = run(call, torch.ones(SHAPE, requires_grad=True), group)
            tangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
            if group.size() > 1 and name != "reduce_from_tensor_model_parallel_region":
                with pytest.raises(UnsupportedError, match="forward-mode AD"):
                    out.backward(tangent)
        same(run(call, torch.ones(SHAPE), group).contiguous(), run(call, torch.ones(SHAPE), group).contiguous(), name)
