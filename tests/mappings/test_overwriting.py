"""``overwrite_inputs``: when a sum is written into its input or its gradient, and when the switch has no effect."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mapping_cases import all_held, same, summed
from memory import EXTERNAL, TYPES, VIEWS, kept
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from tritoncomm import ArgumentError, record
from tritoncomm import mappings as m
from tritoncomm.mappings.overwriting import is_overwriting, may_overwrite, may_overwrite_gradient

SHAPE = (4, 3)
NO_VIEWS = ("itself", "detach", "bits")  # to autograd
SAVED = "modified by an inplace operation"
reduce_from, copy_to = m.reduce_from_tensor_model_parallel_region, m.copy_to_tensor_model_parallel_region


# --- the switch


def states(switch: Any, is_on: Callable[[], bool]) -> list[bool]:
    """States of a switch in and after blocks: nested ones, one left by an exception, one entered late or twice."""
    seen: list[bool] = []
    switch(False)
    seen.append(is_on())
    with switch(True):
        seen.append(is_on())
        with switch(False):
            seen.append(is_on())
        seen.append(is_on())
        switch(False)
        seen.append(is_on())
    seen.append(is_on())
    with pytest.raises(KeyError), switch(True):
        raise KeyError
    seen.append(is_on())
    late = switch(True)
    seen.append(is_on())
    for _ in range(2):
        with late:
            seen.append(is_on())
        seen.append(is_on())
    switch(True)
    with switch(False):
        switch(True)
    seen.append(is_on())
    return seen


def test_it_switches_as_torch_set_grad_enabled() -> None:
    try:
        wanted = states(torch.set_grad_enabled, torch.is_grad_enabled)
        assert states(m.overwrite_inputs, is_overwriting) == wanted
    finally:
        torch.set_grad_enabled(True)
        m.overwrite_inputs(False)


def test_it_is_off_by_default_and_per_thread() -> None:
    seen: list[bool] = [is_overwriting()]

    def run() -> None:
        seen.append(is_overwriting())
        m.overwrite_inputs(True)
        seen.append(is_overwriting())

    with m.overwrite_inputs(True):
        seen.append(is_overwriting())
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        seen.append(is_overwriting())
    assert seen == [False, True, False, True, True]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not is_overwriting()


@pytest.mark.parametrize("mode", [None, 1, "on"])
def test_a_mode_that_is_no_bool_is_refused(mode: Any) -> None:
    with pytest.raises(ArgumentError, match="overwrite_inputs: mode must be a bool"):
        m.overwrite_inputs(mode)
    assert not is_overwriting()


# --- excluded tensors


@pytest.mark.parametrize("external", EXTERNAL)
def test_memory_that_is_not_torchs_is_excluded(external: str, tmp_path: Path) -> None:
    """Torch allocated the memory of ``storage``, which only another object refers to as well."""
    for name, view in VIEWS.items():
        if external in TYPES and name != "itself":
            continue
        x, look = EXTERNAL[external](np.arange(8, dtype=np.float32), str(tmp_path / "memory"))
        assert may_overwrite(view(x)) == (external == "storage" and name in NO_VIEWS), name
        assert not may_overwrite_gradient(view(x)) or external == "storage", name
        assert look().tolist() == list(range(8))


def test_other_excluded_tensors() -> None:
    leaf, wide = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, dtype=torch.complex64)
    with torch.inference_mode():
        of_inference = torch.ones(4)
        assert may_overwrite(of_inference)
    excluded: dict[str, Tensor] = {
        "leaf": leaf,
        "view": (leaf * 1).view(16),
        "slice": torch.ones(4, 4)[:2],
        "not contiguous": (leaf * 1).t().contiguous().t(),
        "expanded": torch.ones(1).expand(4),
        "conjugate": wide.conj(),
        "negative": wide.conj().imag,
        "inference": of_inference,
        "sparse": torch.ones(4).to_sparse(),
    }
    assert [name for name, x in excluded.items() if may_overwrite(x)] == []
    product = leaf * 1
    with torch.no_grad():
        assert not may_overwrite(product)
    views = {"view", "leaf"}
    assert {name for name, x in excluded.items() if may_overwrite_gradient(x)} == views
    assert may_overwrite(leaf * 1)
    assert may_overwrite(leaf.detach())


# --- forward


@pytest.mark.ranks(1, 2)
def test_a_sum_overwrites_its_input(group: ProcessGroup) -> None:
    world = group.size()
    for overwrite in (False, True):
        for requires_grad in (False, True):
            leaf = torch.full(SHAPE, 2.0, requires_grad=requires_grad)
            inputs = {
                "result": (leaf * 1.0, True),
                "leaf": (leaf, not requires_grad),
                "view": ((leaf * 1.0).view(12), False),
                "slice": ((leaf * 1.0)[:2], False),
                "not contiguous": ((leaf * 1.0).t().contiguous().t(), False),
                "numpy": (torch.from_numpy(np.full(SHAPE, 2.0, np.float32)), False),
            }
            for name, (x, can_be) in inputs.items():
                before, version = x.requires_grad, x._version
                with m.overwrite_inputs(overwrite):
                    y = reduce_from(x, group)
                written = overwrite and can_be and world > 1
                what = (name, overwrite, requires_grad)
                same(x.detach(), torch.full(x.shape, 2.0 * world if written else 2.0), what)
                same(y.detach(), torch.full(x.shape, 2.0 * world), what)
                assert (x._version > version) == written, what
                assert y.requires_grad == before, what
    with m.overwrite_inputs(True), torch.no_grad():
        leaf = torch.full(SHAPE, 2.0, requires_grad=True)
        assert not reduce_from(leaf, group).requires_grad
        same(leaf.detach(), torch.full(SHAPE, 2.0), "a leaf without grad mode")


@pytest.mark.ranks(1, 2)
def test_autograd_notices_the_write(group: ProcessGroup) -> None:
    """Autograd notices the write; a group of one rank writes nothing."""
    for plain in (False, True):
        leaf, saved = torch.ones(SHAPE, requires_grad=True), torch.ones(SHAPE)
        out, other = (saved, leaf * saved) if plain else (torch.sigmoid(leaf), leaf * 1)
        with m.overwrite_inputs(True):
            total = reduce_from(out, group).sum() + other.sum()
        if group.size() == 1:
            total.backward()
        else:
            with pytest.raises(RuntimeError, match=SAVED):
                total.backward()


# --- backward


def arrived(group: ProcessGroup, forward: bool, backward: bool, grad: Tensor, threaded: bool = False) -> bool:
    """Whether a gradient was overwritten; the switch in forward and in backward, which a thread may run."""
    leaf = torch.ones(grad.shape, requires_grad=True)
    with m.overwrite_inputs(forward):
        out = copy_to(leaf, group)
    before, version = grad.clone(), grad._version

    def run() -> None:
        m.overwrite_inputs(backward)
        out.backward(grad)

    with m.overwrite_inputs(backward):
        if threaded:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
    assert leaf.grad is not None
    same(leaf.grad, before * group.size(), "the sum")
    written = not torch.equal(grad, before)
    assert (grad._version > version) == written
    return written


@pytest.mark.ranks(1, 2)
def test_the_switch_of_the_forward_counts(group: ProcessGroup) -> None:
    """The switch of the forward counts, and excluded gradients stay as they are."""
    overwrites = group.size() > 1
    for threaded in (False, True):
        for backward in (False, True):
            assert arrived(group, True, backward, torch.ones(SHAPE), threaded) == overwrites, (threaded, backward)
            assert not arrived(group, False, backward, torch.ones(SHAPE), threaded), (threaded, backward)
    assert arrived(group, True, False, torch.ones(12).view(SHAPE)) == overwrites
    whole = torch.ones(8, 3)
    assert not arrived(group, True, False, whole[:4])
    assert not arrived(group, True, False, torch.ones(3, 4).t())
    array = np.ones(SHAPE, np.float32)
    assert not arrived(group, True, False, torch.from_numpy(array))
    same(whole, torch.ones(8, 3), "a gradient inside of another")
    leaf = torch.ones(2, 4, 3, requires_grad=True)
    with m.overwrite_inputs(True), record.recording() as counted:
        torch.nn.functional.linear(copy_to(leaf, group), torch.ones(5, 3)).sum().backward()
    assert sum(count.bytes_copied for count in counted.values()) == 0, "the gradient of a linear layer is a view"


def test_one_gradient_of_two_branches(group: ProcessGroup) -> None:
    """A sum hands one gradient tensor to both branches: overwritten, it reaches the other branch as a sum, too."""
    grads = all_held(group, SHAPE, 30)
    own = grads[group.rank()]
    for overwrite in (False, True):
        a, b = (torch.ones(SHAPE, requires_grad=True) for _ in range(2))
        right = b * 1
        with m.overwrite_inputs(overwrite):
            left = copy_to(a, group)
        (left + right).backward(own.clone())
        assert a.grad is not None
        assert b.grad is not None
        same(a.grad, summed(grads), "copied branch")
        same(b.grad, summed(grads) if overwrite else own, "other branch")


# --- with the rest of torch


def test_second_derivatives_and_recomputation(group: ProcessGroup) -> None:
    """Second derivatives and recomputed chains are equal with and without the switch."""
    weight = all_held(group, (3, 3), 1)[0]

    def chain(x: Tensor) -> Tensor:
        return reduce_from(copy_to(x * x, group) @ weight, group) * 1.0

    def second(x: Tensor) -> Tensor:
        (first,) = torch.autograd.grad((chain(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    seconds: list[Tensor] = []
    for overwrite in (False, True):
        x = all_held(group, SHAPE, 2)[group.rank()].clone().requires_grad_()
        with m.overwrite_inputs(overwrite):
            seconds.append(second(x))
    same(*seconds, "second derivative")

    for use_reentrant in (False, True):
        gradients: list[Tensor] = []
        for overwrite in (False, True):
            x = all_held(group, SHAPE, 2)[group.rank()].clone().requires_grad_()
            with m.overwrite_inputs(overwrite):
                out = checkpoint(chain, x * 1.0, use_reentrant=use_reentrant)
            (out**2).sum().backward()  # recomputes without the switch
            assert x.grad is not None
            gradients.append(x.grad)
        same(*gradients, ("recomputed", use_reentrant))


def test_transforms(group: ProcessGroup) -> None:
    """Transforms of torch.func fail or work as they do without the switch."""
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(lambda x: reduce_from(x * 2, group).sum())(torch.ones(SHAPE)),
        "vmap": lambda: torch.func.vmap(lambda x: reduce_from(x * 2, group))(torch.ones(SHAPE)),
        "functionalize": lambda: torch.func.functionalize(lambda x: reduce_from(x * 2, group))(torch.ones(SHAPE)),
    }
    for name, call in calls.items():
        outcomes: list[Any] = []
        for overwrite in (False, True):
            with m.overwrite_inputs(overwrite):
                try:
                    outcomes.append(call().tolist())
                except Exception as error:
                    outcomes.append(str(error))
        assert outcomes[0] == outcomes[1], name


@pytest.mark.ranks(timeout=240)
@pytest.mark.timeout(300)
def test_no_effect_in_a_compiled_region(group: ProcessGroup) -> None:
    """No effect in a compiled region, be it switched on around the region or inside of it."""

    def around(x: Tensor) -> tuple[Tensor, Tensor]:
        product = copy_to(x, group) * 1.0
        return product, reduce_from(product, group)

    def inside(x: Tensor) -> tuple[Tensor, Tensor]:
        with m.overwrite_inputs(True):
            return around(x)

    for function, overwrite in ((inside, False), (around, True)):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        x, grad = torch.ones(SHAPE, requires_grad=True), torch.ones(SHAPE)
        with m.overwrite_inputs(overwrite):
            product, total = compiled(x)
            assert is_overwriting() == overwrite
            total.backward(grad)
        world = float(group.size())
        same(product.detach(), torch.ones(SHAPE), "the input")
        same(total.detach(), torch.full(SHAPE, world), "the sum")
        same(grad, torch.ones(SHAPE), "the gradient")
        assert x.grad is not None
        same(x.grad, torch.full(SHAPE, world), "the sum of gradients")


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    kept.clear()
