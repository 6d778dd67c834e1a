"""`integrations.megatron`: Megatron-core trains to the same bits, and unpatched it is what it was."""

import gc
import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import run_job
from megatron_cpu import core
from megatron_jobs import CASES, compare, compile_linear, quick
from torch import Tensor

from tritoncomm import mappings
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations import megatron, megatron_functions
from tritoncomm.p2p import P2PCommunicator

try:
    _installed = metadata.version("megatron-core")
except metadata.PackageNotFoundError:
    _installed = ""

pytestmark = pytest.mark.skipif(not _installed, reason="megatron-core is not installed (make test installs it)")

MODULES = (
    "tensor_parallel.mappings", "tensor_parallel.layers", "tensor_parallel.cross_entropy", "tensor_parallel",
    "pipeline_parallel.p2p_communication", "pipeline_parallel.schedules", "transformer.moe.token_dispatcher",
    "models.gpt.gpt_model", "parallel_state", "package_info",
)  # fmt: skip
LINEAR = "linear_with_grad_accumulation_and_async_allreduce"


@pytest.fixture
def theirs() -> Iterator[SimpleNamespace]:
    """Megatron's modules by the last part of their name; whatever a test did, every name is restored after it."""
    loaded = {name: core(name) for name in MODULES}
    before = _bindings()
    yield SimpleNamespace(**{name.rpartition(".")[2]: module for name, module in loaded.items()})
    megatron.unpatch()
    after = _bindings()
    assert {place: after[place] for place in before} == before


def _bindings() -> dict[tuple[str, str], int]:
    modules = [
        (name, m) for name, m in sys.modules.items() if name.startswith("megatron") and isinstance(m, ModuleType)
    ]
    return {(name, key): id(value) for name, module in modules for key, value in vars(module).items()}


def _jobs(function: Any, ranks: int, *args: Any) -> list[Any]:
    results = run_job(function, [{"RANK": str(rank)} for rank in range(ranks)], *args, timeout=500)
    assert not any(isinstance(result, str | None) for result in results), results
    return results


# --- training


def _check_training(name: str, results: list[dict[str, Any]], steps: int) -> None:
    case = CASES[name]
    losses = [result["losses"] for result in results if result["losses"]]
    assert all(len(each) == 4 * steps for each in losses)
    assert losses
    assert len(set(losses[0])) > steps, "the model was trained"
    for result in results:
        assert result["gradients"] > 20
        assert result["nonzero"] == result["gradients"]
        assert result["copied"][1] <= result["copied"][0]
        assert result["messages"][1] <= result["messages"][0]
        if case.cross_entropy:
            assert 0 < result["distance"] < 1e-5
            assert result["messages"][1] == result["messages"][0] - 8  # three all-reduces are one all-gather
        else:
            assert result["differing"] == []
        if case.sizes.get("tensor_model_parallel_size"):
            assert result["calls"][f"{LINEAR}.backward"] > 0
            # Ours keeps two numbers a row and the gradient, Megatron's works in the logits.
            assert case.cross_entropy or result["allocated"][1] <= result["allocated"][0]
        if case.sizes.get("pipeline_model_parallel_size"):
            assert any(call.startswith(("send", "recv")) for call in result["calls"])
        if case.sizes.get("expert_model_parallel_size"):
            assert result["calls"]["gather_from_sequence_parallel_region"] > 0


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return _jobs(quick, 2, str(tmp_path_factory.mktemp("quick")))


@pytest.mark.timeout(600)
def test_a_gpt_trains_to_the_same_bits(quick_results: list[Any]) -> None:
    _check_training("tensor-2-sequence", [training for training, _ in quick_results], 5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["bits", "messages", "copied", "reductions", "second derivatives"])
def test_linear_layers(quick_results: list[Any], what: str) -> None:
    assert [wrong[what] for _, wrong in quick_results] == [[], []]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_training(name: str, tmp_path: Path) -> None:
    _check_training(name, _jobs(compare, CASES[name].ranks, name, str(tmp_path / "store")), 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_are_as_in_eager_mode(backend: str, tmp_path: Path) -> None:
    assert _jobs(compile_linear, 2, str(tmp_path / "store"), backend) == [[], []]


# --- names


def test_every_name_is_replaced_by_identity(theirs: SimpleNamespace) -> None:
    originals = {name: getattr(theirs.mappings, name) for name in mappings.__all__ if hasattr(theirs.mappings, name)}
    communicator = theirs.p2p_communication.P2PCommunicator
    report = megatron.patch()
    replaced = set(report.replaced)
    assert len(originals) >= 29
    for name in originals:
        own = megatron_functions if name == "reduce_from_tensor_model_parallel_region" else mappings
        assert getattr(theirs.mappings, name) is getattr(own, name)
        assert ("megatron.core.tensor_parallel.mappings", name) in replaced
    assert theirs.schedules.P2PCommunicator is theirs.p2p_communication.P2PCommunicator is P2PCommunicator
    assert theirs.token_dispatcher.all_to_all is mappings.all_to_all
    assert theirs.gpt_model.gather_from_sequence_parallel_region is mappings.gather_from_sequence_parallel_region
    values = {id(value) for value in (*originals.values(), communicator)}
    assert [place for place, value in _bindings().items() if value in values] == []
    assert report.version == _installed
    assert str(report).startswith(f"megatron-core {_installed}: {len(replaced)} names in ")


def test_no_other_reference_to_an_original_is_left(theirs: SimpleNamespace) -> None:
    """Class attributes, default arguments, partials and tables that hold a function would go on calling Megatron's."""
    names = [name for name in theirs.mappings.__dict__ if name.endswith("_region") or name.startswith("all_to_all")]
    originals = [getattr(theirs.mappings, name) for name in names] + [getattr(theirs.layers, LINEAR)]
    megatron.patch()
    gc.collect()
    assert len(originals) > 12
    for original in originals:
        holders = [each for each in gc.get_referrers(original) if each is not originals and not inspect.isframe(each)]
        own = [each for each in holders if _is_of_the_patch(each)]
        cells = [each for each in holders if type(each).__name__ == "cell"]  # of ours, which falls back
        assert [str(each)[:200] for each in holders if each not in own + cells] == []
        assert len(cells) == (original.__name__ == LINEAR)


def _is_of_the_patch(holder: Any) -> bool:
    """Pairs (original, replacement) and arguments of what made the replacement, or the table of originals by id."""
    return isinstance(holder, tuple) or (isinstance(holder, dict) and all(map(_is_id, holder)))


def _is_id(key: Any) -> bool:
    return isinstance(key, int)


def test_patching_twice_is_patching_once(theirs: SimpleNamespace) -> None:
    before = _bindings()
    first, patched = megatron.patch(), _bindings()
    assert megatron.patch() == first
    assert _bindings() == patched != before
    megatron.unpatch()
    assert _bindings() == before
    megatron.unpatch()
    assert _bindings() == before


def test_nested_blocks(theirs: SimpleNamespace) -> None:
    own = theirs.cross_entropy.vocab_parallel_cross_entropy
    before = _bindings()
    with megatron.patched() as outer:
        inside = _bindings()
        with megatron.patched(cross_entropy=True) as inner:
            assert theirs.tensor_parallel.vocab_parallel_cross_entropy is not own
            assert set(inner.replaced) > set(outer.replaced)
            with megatron.patched():
                assert theirs.tensor_parallel.vocab_parallel_cross_entropy is own
            assert theirs.tensor_parallel.vocab_parallel_cross_entropy is not own
        assert _bindings() == inside
        assert theirs.schedules.P2PCommunicator is P2PCommunicator
    assert _bindings() == before


def test_a_block_inside_a_patch_leaves_it(theirs: SimpleNamespace) -> None:
    before = _bindings()
    megatron.patch(cross_entropy=True)
    with megatron.patched():
        pass
    assert theirs.schedules.P2PCommunicator is P2PCommunicator
    assert theirs.cross_entropy.vocab_parallel_cross_entropy.__module__ == megatron_functions.__name__
    with megatron.patched():
        megatron.unpatch()
        assert _bindings() == before
    assert _bindings() == before


def test_a_block_that_raises_is_undone(theirs: SimpleNamespace) -> None:
    before = _bindings()
    with pytest.raises(KeyError), megatron.patched():
        raise KeyError
    assert _bindings() == before


def test_blocks_of_two_threads_may_overlap(theirs: SimpleNamespace) -> None:
    """A enters, B enters, A leaves: B still has it; B leaves: nobody has."""
    before, entered, left = _bindings(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        with megatron.patched():
            entered.set()
            left.wait(10)
            seen.append(theirs.schedules.P2PCommunicator is P2PCommunicator)

    thread = threading.Thread(target=second)
    with megatron.patched():
        thread.start()
        assert entered.wait(10)
    left.set()
    thread.join()
    assert seen == [True]
    assert _bindings() == before


def test_a_module_imported_later_has_the_new_names_and_loses_them(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = theirs.mappings.all_to_all
    megatron.patch()
    late = ModuleType("megatron.late")
    exec("from megatron.core.tensor_parallel.mappings import all_to_all as exchange", vars(late))
    monkeypatch.setitem(sys.modules, "megatron.late", late)
    assert vars(late)["exchange"] is mappings.all_to_all
    assert ("megatron.late", "exchange") not in megatron.patch().replaced  # it was bound by its own import
    megatron.unpatch()
    assert vars(late)["exchange"] is original


def test_own_packages(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    script, original = ModuleType("trainer.model"), theirs.mappings.all_to_all
    vars(script).update(exchange=original, ours=mappings.all_to_all)
    monkeypatch.setitem(sys.modules, "trainer.model", script)
    megatron.patch()
    assert vars(script)["exchange"] is original
    assert ("trainer.model", "exchange") in megatron.patch(packages=["megatron", "trainer"]).replaced
    assert vars(script)["exchange"] is mappings.all_to_all
    megatron.unpatch()
    assert vars(script)["exchange"] is original
    assert vars(script)["ours"] is mappings.all_to_all, "the script had imported this one by itself"


def test_a_name_that_somebody_else_has_rebound_stays_theirs(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs.token_dispatcher, "all_to_all", theirs.token_dispatcher.all_to_all)
    megatron.patch()
    theirs.token_dispatcher.all_to_all = wrapper = object()
    megatron.unpatch()
    assert theirs.token_dispatcher.all_to_all is wrapper


class _Stubborn(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "exchange":
            raise RuntimeError("read only")
        super().__setattr__(name, value)


def test_a_patch_that_fails_halfway_is_undone(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = _Stubborn("megatron.stubborn")
    vars(stubborn)["exchange"] = theirs.mappings.all_to_all
    monkeypatch.setitem(sys.modules, "megatron.stubborn", stubborn)
    before = _bindings()
    with pytest.raises(RuntimeError, match="read only"):
        megatron.patch()
    assert _bindings() == before
    with pytest.raises(RuntimeError, match="read only"), megatron.patched():
        pass
    assert _bindings() == before
    monkeypatch.delitem(sys.modules, "megatron.stubborn")
    megatron.patch(cross_entropy=True)
    monkeypatch.setitem(sys.modules, "megatron.stubborn", stubborn)
    patched = _bindings()
    for cross_entropy in (False, True):  # other arguments, and the same ones
        with pytest.raises(RuntimeError, match="read only"):
            megatron.patch(cross_entropy=cross_entropy)
        assert _bindings() == patched
    assert theirs.cross_entropy.vocab_parallel_cross_entropy.__module__ == megatron_functions.__name__


def test_a_package_that_is_not_imported_is_refused(theirs: SimpleNamespace) -> None:
    with pytest.raises(ArgumentError, match="nothing of 'trainre' is imported yet"):
        megatron.patch(packages=["megatron", "trainre"])


@pytest.mark.parametrize("packages", ["megatron", []])
def test_packages_are_a_list(theirs: SimpleNamespace, packages: Any) -> None:
    with pytest.raises(ArgumentError, match="packages must be a list"):
        megatron.patch(packages=packages)
    with pytest.raises(ArgumentError, match="packages must be a list"), megatron.patched(packages=packages):
        pass


# --- versions and signatures


def test_an_untested_version_is_patched_with_a_warning(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs.package_info, "__version__", "0.99.0")
    with pytest.warns(UserWarning, match=r"tested with megatron-core 0\.16\.1; this is 0\.99\.0") as caught:
        report = megatron.patch()
    assert caught[0].filename == __file__
    assert report.version == "0.99.0"
    assert theirs.schedules.P2PCommunicator is P2PCommunicator


def _renamed(group: Any, tensor: Any, output_split_sizes_: Any = None, input_split_sizes: Any = None) -> Any: ...
def _default(group: Any, input_: Any, output_split_sizes_: Any = (), input_split_sizes: Any = None) -> Any: ...
def _added(
    group: Any, input_: Any, output_split_sizes_: Any = None, input_split_sizes: Any = None, stream: Any = None
) -> Any: ...
def _removed(group: Any, input_: Any) -> Any: ...


@pytest.mark.parametrize("changed", [_renamed, _default, _added])
def test_a_function_with_other_arguments_is_refused(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    monkeypatch.setattr(theirs.mappings, "all_to_all", changed)
    before = _bindings()
    with pytest.raises(UnsupportedError, match=rf"\.{changed.__name__} takes \(.*\), ours takes \(group, input_, "):
        megatron.patch()
    assert _bindings() == before


def test_fewer_arguments_are_fine(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.mappings, "all_to_all", _removed)
    megatron.patch()
    assert theirs.mappings.all_to_all is mappings.all_to_all


def test_a_missing_name_is_refused(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(theirs.layers, "LinearWithFrozenWeight")
    before = _bindings()
    with pytest.raises(UnsupportedError, match=r"layers\.LinearWithFrozenWeight is missing"):
        megatron.patch()
    assert _bindings() == before


def test_a_changed_class_is_refused(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Communicator(theirs.p2p_communication.P2PCommunicator):
        def recv_forward(self, tensor_shapes: Any, is_first_stage: bool, timeout: float) -> Any: ...

    monkeypatch.setattr(theirs.p2p_communication, "P2PCommunicator", Communicator)
    with pytest.raises(UnsupportedError, match=r"Communicator\.recv_forward takes .*timeout"):
        megatron.patch()

    class Forward:
        def probe(self) -> None: ...

    monkeypatch.setattr(theirs.p2p_communication, "P2PCommunicator", Forward)
    with pytest.raises(UnsupportedError, match=r"Forward\.probe: tritoncomm has no such method"):
        megatron.patch()


def test_changed_autograd_classes_are_refused(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input_: Tensor, group: Any, stream: Any) -> Tensor: ...

    monkeypatch.setattr(theirs.mappings, "_CopyToModelParallelRegion", Copy)
    with pytest.raises(UnsupportedError, match=r"Copy\.apply takes \(input_, group, stream\), ours takes"):
        megatron.patch()


def test_the_report_says_what_is_kept(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = "\n".join(megatron.patch().kept)
    assert "gradient_accumulation_fusion" in kept
    assert "cross_entropy=True" in kept
    assert "TransformerEngine" not in kept
    megatron.unpatch()
    extension = SimpleNamespace(HAVE_TE=True)
    monkeypatch.setitem(sys.modules, "megatron.core.extensions.transformer_engine", extension)  # type: ignore
    _removed.__module__ = theirs.mappings.__name__
    monkeypatch.setattr(theirs.mappings, "all_to_some", _removed, raising=False)
    report = megatron.patch(cross_entropy=True)
    kept = "\n".join(report.kept)
    assert "TransformerEngine's layers" in kept
    assert "label smoothing" in kept
    assert "cross_entropy=True" not in kept
    assert "megatron.core.tensor_parallel.mappings.all_to_some: tritoncomm has no counterpart" in report.kept
    assert "  kept: TransformerEngine's layers" in str(report)


def test_megatron_is_imported_at_the_first_call_only() -> None:
    source = inspect.getsource(megatron) + inspect.getsource(megatron_functions)
    assert "import megatron" not in source.replace("import megatron_functions", "")


# --- single functions, without ranks


def test_fused_and_deferred_gradients_stay_megatrons(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Recorder:
        @staticmethod
        def forward(
            ctx: Any, input: Any, weight: Any, bias: Any, gradient_accumulation_fusion: Any, allreduce_dgrad: Any,
            sequence_parallel: Any, grad_output_buffer: Any, wgrad_deferral_limit: Any, tp_group: Any,
        ) -> None: ...  # fmt: skip

        @staticmethod
        def apply(*args: Any) -> str:
            calls.append(args)
            return "Megatron's"

    monkeypatch.setattr(theirs.layers, "LinearWithGradAccumulationAndAsyncCommunication", Recorder)
    megatron.patch()
    x, weight = torch.randn(3, 2), torch.nn.Parameter(torch.randn(4, 2))
    linear = getattr(theirs.layers, LINEAR)
    assert linear(x, weight, None, True, False, False) == "Megatron's"
    assert calls.pop()[3] is True
    assert linear(x, weight, None, False, False, False, grad_output_buffer=[]) == "Megatron's"
    assert calls.pop()[6] == []
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, None, False, False, False) == "Megatron's"
    calls.clear()
    with pytest.warns(UserWarning, match="async_grad_allreduce"):  # its warning is Megatron's, its product ours
        linear(x, weight, None, False, False, False, async_grad_allreduce=True)
    own = theirs.layers.LinearWithGradAccumulationAndAsyncCommunication
    assert own.apply(x, weight, None, True, False, False, None, 0, None) == "Megatron's"
    calls.clear()
    assert torch.equal(linear(x, weight, None, False, False, False), torch.matmul(x, weight.t()))
    assert torch.equal(own.apply(x, weight, None, False, False, False, None, 0, None), torch.matmul(x, weight.t()))
    assert calls == []


def test_frozen_weights_keep_megatrons_refusals(theirs: SimpleNamespace) -> None:
    megatron.patch()
    x, weight = torch.randn(3, 2), torch.randn(4, 2)
    for arguments in ({"grad_output_buffer": []}, {"wgrad_deferral_limit": 1}):
        with pytest.raises(AssertionError):
            theirs.layers.linear_with_frozen_weight(x, weight, None, False, False, False, None, **arguments)


def test_both_ways_to_reduce_exclude_each_other(theirs: SimpleNamespace) -> None:
    megatron.patch()
    x, weight = torch.randn(3, 2), torch.nn.Parameter(torch.randn(4, 2))
    with pytest.raises(ArgumentError, match="exclude each other"):
        getattr(theirs.layers, LINEAR)(x, weight, None, False, True, True, tp_group=object())


def test_backward_under_autocast_has_the_dtype_of_forward(theirs: SimpleNamespace) -> None:
    megatron.patch()
    x, weight = torch.randn(3, 2, requires_grad=True), torch.nn.Parameter(torch.randn(4, 2))
    bias = torch.nn.Parameter(torch.randn(4))
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).sum(), (x, weight, bias))
    out = getattr(theirs.layers, LINEAR)(x, weight, bias, False, False, False)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(out.sum(), (x, weight, bias))
    for ours, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, wanted)


def test_the_module_is_reached_as_an_attribute() -> None:
    assert importlib.import_module("tritoncomm.integrations.megatron") is megatron


def test_warnings_of_connections_come_once(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(getattr(theirs.layers, LINEAR), "warned", False)
    megatron.patch()
    x, weight = torch.randn(3, 2), torch.nn.Parameter(torch.randn(4, 2))
    linear = getattr(theirs.layers, LINEAR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with torch.no_grad():
                linear(x, weight, None, False, True, False, tp_group=object())
    assert [str(each.message).split(":")[0] for each in caught] == [LINEAR]
    assert caught[0].filename == __file__
