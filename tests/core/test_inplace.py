"""A sum may overwrite its input only where nothing else refers to the tensor or its memory."""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from memory import EXTERNAL, TYPES, VIEWS, Keep, KeepFunctions, kept, traced
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tritoncomm.core import inplace
from tritoncomm.core.function import direct

ROOT = Path(__file__).parents[2]


def mapping(x: Tensor) -> bool:
    """Called like a mapping."""
    return inplace.temporary_is_exclusive(sys.getrefcount(x), x)


def test_a_temporary_is_exclusive() -> None:
    answers = [mapping(torch.ones(3) * 2), mapping(torch.ones(3, 3))]  # an assert would refer to the temporaries
    assert answers == [True, True]


def test_the_counts_of_this_version() -> None:
    """What the decision rests on, pinned so that a version of Python or torch that counts otherwise is noticed."""
    inplace._measure_gradients()
    counts = (inplace._temporary, inplace._gradient, inplace._view, inplace._view_base)
    if sys.version_info >= (3, 14):
        assert counts == ((0, 0, 0, 0),) * 4
    else:
        old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # its engine refers to a gradient once more
        python, tensor = (4, 2) if old else (3, 1)
        assert counts == ((2, 1, 2, 3), (python, tensor, 2, 3), (python, tensor, 3, 3), (3, 2, 3, 3))


def test_what_somebody_refers_to_is_not_exclusive() -> None:
    held = torch.ones(3, 3)
    assert not mapping(held)
    assert not mapping(held.view(-1)), "its base is referenced"
    assert not mapping(held[0])
    assert not mapping(held.detach())
    assert not mapping([held][0])
    owner = torch.nn.Linear(2, 2)
    assert not mapping(owner.weight)
    assert not mapping(owner.weight.data)
    storage = torch.ones(3).untyped_storage()
    assert not mapping(torch.empty(0).set_(storage))  # pyright: ignore[reportArgumentType]


WEAK: dict[str, Callable[[Tensor], Any]] = {
    "ref": weakref.ref,
    "proxy": weakref.proxy,
    "finalize": lambda x: weakref.finalize(x, str),
    "values": lambda x: weakref.WeakValueDictionary({"x": x}),
    "tensor keys": lambda x: WeakTensorKeyDictionary({x: 1}),
    "storage": lambda x: weakref.ref(x.untyped_storage()),
}


def weakly_held(x: Tensor, how: str) -> Tensor:
    kept.append(WEAK[how](x))
    return x


@pytest.mark.parametrize("how", WEAK)
def test_what_somebody_refers_to_weakly_is_not_exclusive(how: str) -> None:
    """Its owner may be the backend until the sum has finished, and then the weak reference gives the changed values."""
    answer = mapping(weakly_held(torch.ones(3) * 2, how))
    kept.clear()
    assert not answer


@pytest.mark.parametrize("how", WEAK)
@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_that_somebody_refers_to_weakly_is_not_exclusive(how: str, view: bool) -> None:
    seen: list[bool] = []
    y = Watch.apply(torch.ones(3, requires_grad=True), seen)
    z = y.view(3, 1) if view else y
    FromOutside.apply(z, lambda: weakly_held(torch.ones(z.shape) * 2, how)).sum().backward()
    kept.clear()
    assert seen == [False]


@pytest.mark.parametrize("how", WEAK)
def test_a_gradient_whose_view_somebody_refers_to_weakly_is_not_exclusive(how: str) -> None:
    seen: list[bool] = []
    y = Watch.apply(torch.ones(3, requires_grad=True), seen)
    FromOutside.apply(y, lambda: weakly_held((torch.ones(3, 1) * 2).view(3), how)).sum().backward()
    kept.clear()
    assert seen == [False]


def test_what_autograd_saved_is_not_exclusive() -> None:
    x = torch.ones(3, requires_grad=True)
    saved: list[bool] = []
    y = x.exp()
    saved.append(mapping(y))
    saved.append(mapping(y * 1.0 + y))
    assert saved[0] is False


def test_leaves_strides_and_lazy_bits_are_not_exclusive() -> None:
    assert not mapping(torch.ones(3, requires_grad=True))
    assert not mapping(torch.ones(3, 4).t())
    assert not mapping(torch.ones(3, dtype=torch.complex64).conj())
    assert not mapping(torch.ones(3, dtype=torch.complex64).conj().imag)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "memory")


@pytest.mark.parametrize("external", EXTERNAL)
def test_memory_seen_from_elsewhere_is_not_exclusive(external: str, path: str) -> None:
    answers = {}
    for name, view in VIEWS.items():
        if external in TYPES and name != "itself":
            continue
        made = list(EXTERNAL[external](np.arange(8, dtype=np.float32), path))
        look = made.pop()
        answers[name] = mapping(view(made.pop()))
        assert look().tolist() == list(range(8))  # which keeps the memory until here
    assert not any(answers.values()), answers


@direct
class Watch(torch.autograd.Function):
    """Identity that asks whether its gradient may be overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        ctx.seen.append(inplace.gradient_is_exclusive(sys.getrefcount(grad_output), grad_output, ctx, Watch))
        return grad_output, None


def test_a_fresh_gradient_is_exclusive() -> None:
    seen: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    (Watch.apply(x, seen) * 2).backward(torch.ones(3))
    assert seen == [True]


def test_the_gradient_of_a_linear_layers_input_is_exclusive() -> None:
    """It is a view of a tensor that nothing else refers to."""
    seen: list[bool] = []
    x, weight = torch.ones(2, 3, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    torch.nn.functional.linear(Watch.apply(x, seen), weight, torch.ones(5)).pow(2).sum().backward()
    assert seen == [True]


@pytest.mark.parametrize("how", ["add", "add-swapped", "caller", "hook", "two views"])
def test_a_view_of_a_shared_gradient_is_not_exclusive(how: str) -> None:
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
def test_a_shared_gradient_is_not_exclusive(how: str) -> None:
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


class FromOutside(torch.autograd.Function):
    """Identity whose gradient is the tensor that ``make`` returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return ctx.make(), None


GRADIENTS = [
    (name, view) for name in EXTERNAL for view in (False, True) if name != "wrapper" and not (view and name in TYPES)
]


@pytest.mark.parametrize(("external", "view"), GRADIENTS)
def test_a_gradient_seen_from_elsewhere_is_not_exclusive(external: str, view: bool, path: str) -> None:
    """A custom function returns memory of numpy, a file, another process; as it is, or below a view."""
    seen: list[bool] = []
    y = Watch.apply(torch.ones(8, requires_grad=True), seen)
    if view:
        y = y.view(2, 4).view(8)
    looks: list[Any] = []

    def make() -> Tensor:
        x, look = EXTERNAL[external](np.arange(8, dtype=np.float32), path)
        looks.append(look)
        return x

    FromOutside.apply(y, make).sum().backward()
    assert seen == [False]
    assert looks[0]().tolist() == list(range(8))


@pytest.mark.parametrize("keep", ["storage", "detach", "view", "object"])
@pytest.mark.parametrize("view", [False, True])
def test_what_a_hook_keeps_is_not_exclusive(keep: str, view: bool) -> None:
    keepers: dict[str, Callable[[Tensor], Any]] = {
        "storage": Tensor.untyped_storage,
        "detach": Tensor.detach,
        "view": lambda grad: grad.view(-1),
        "object": lambda grad: grad,
    }
    seen: list[bool] = []
    y = Watch.apply(torch.ones(3, requires_grad=True), seen)
    z = y.view(3, 1) if view else y
    z.register_hook(lambda grad: kept.append(keepers[keep](grad)))
    (z * 2).backward(torch.ones_like(z))
    kept.clear()
    assert seen == [False]


def test_a_view_whose_base_was_given_other_memory_is_not_exclusive() -> None:
    """The view keeps the first memory, which ``kept`` sees; its base is referenced by nothing but the view."""

    def make() -> Tensor:
        base = torch.zeros(8)
        view = base.view(2, 4)
        kept.append(base.detach())
        base.set_(torch.zeros(8))
        return view

    seen: list[bool] = []
    FromOutside.apply(Watch.apply(torch.ones(2, 4, requires_grad=True), seen), make).sum().backward()
    kept.clear()
    assert seen == [False]


def test_a_gradient_passed_by_a_plain_call_is_not_exclusive() -> None:
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


def test_a_mode_that_keeps_results_during_the_call() -> None:
    with Keep():
        answers = [mapping(torch.ones(3) * 2)]
    assert answers == [False]


def keep(x: Tensor) -> Tensor:
    kept.append(x)
    return x


MODES: dict[str, Callable[[], Any]] = {
    "settrace": lambda: traced(sys.settrace, threading.settrace),
    "setprofile": lambda: traced(sys.setprofile, threading.setprofile),
    "dispatch mode": Keep,
    "function mode": KeepFunctions,
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "default device": lambda: torch.device("meta"),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(keep, keep),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_what_runs_beside_the_measurement_does_not_change_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts taken under a tool that keeps what it sees would let referenced tensors be overwritten ever after."""
    inplace._measure_gradients()
    names = ("_gradient", "_view", "_view_base", "max_references")
    clean = (inplace._temporary, *(getattr(inplace, name) for name in names))
    for name in names:
        monkeypatch.setattr(inplace, name, None)
    with MODES[mode]():
        temporary = inplace._in_new_thread(inplace._temporary_counts)
        inplace._measure_gradients()
    kept.clear()
    assert (temporary, *(getattr(inplace, name) for name in names)) == clean


UNDER_A_TOOL = """
import sys, threading, torch
kept = []
def trace(frame, event, arg):
    kept.append(frame.f_locals)
    return trace
def watch(*_):
    kept.append(sys._getframe(1).f_locals)
TOOL
from tritoncomm.core import inplace
inplace._measure_gradients()
sys.settrace(None)
print((inplace._temporary, inplace._gradient, inplace._view, inplace._view_base))
"""
TOOLS = {"settrace": "threading.settrace(trace); sys.settrace(trace)"}
if sys.version_info >= (3, 12):  # which has sys.monitoring
    TOOLS["monitoring"] = (
        "m = sys.monitoring; m.use_tool_id(3, 'keeper'); m.set_events(3, m.events.PY_START | m.events.PY_RETURN);"
        "m.register_callback(3, m.events.PY_START, watch); m.register_callback(3, m.events.PY_RETURN, watch)"
    )


def run(program: str) -> str:
    """What a program prints in a process of its own."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    out = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_is_active_at_import(tool: str) -> None:
    inplace._measure_gradients()
    clean = (inplace._temporary, inplace._gradient, inplace._view, inplace._view_base)
    wanted = ((0, 0, 0, 0),) * 4 if tool == "monitoring" else clean
    assert run(UNDER_A_TOOL.replace("TOOL", TOOLS[tool])) == str(wanted)


def test_never_where_references_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not inplace._hidden_references() or sys.version_info >= (3, 14)
    tool = SimpleNamespace(get_tool=lambda number: "coverage" if number == 1 else None)
    monkeypatch.setattr(sys, "monitoring", tool, raising=False)
    assert inplace._hidden_references()
    monkeypatch.setattr(sys, "monitoring", SimpleNamespace(get_tool=lambda _: None), raising=False)
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert inplace._hidden_references()


def test_a_thread_that_is_none_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Green threads run on the caller's, with its tracers and modes."""
    monkeypatch.setattr(inplace._thread, "start_new_thread", lambda run, args: run(*args))
    assert inplace._in_new_thread(lambda: 1) is None


def test_first_called_in_inference_mode() -> None:
    """The first call of a process may be one that records nothing; the measurement is not spoiled, nor does it fail."""
    program = """
import torch, torch.distributed as dist
from tritoncomm import mappings
from tritoncomm.core import inplace
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
group = dist.group.WORLD
with torch.inference_mode():
    mappings._CopyToModelParallelRegion.apply(torch.ones(3), group)
    mappings.reduce_from_tensor_model_parallel_region(torch.ones(3), group)
x = torch.ones(3, requires_grad=True)
(mappings.copy_to_tensor_model_parallel_region(x, group) * 2).sum().backward()
print(inplace._temporary, inplace._gradient)
"""
    program = "import torch.testing._internal.distributed.fake_pg" + program
    assert run(program) == f"{inplace._temporary} {inplace._gradient}"
