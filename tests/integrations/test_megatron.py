"""`integrations.megatron`: Megatron-core trains to the same bits, and unpatched it is what it was."""

import functools
import gc
import importlib
import inspect
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import run_job
from megatron_calls import attributes, calls
from megatron_cpu import core
from megatron_jobs import CASES, QUICK_STEPS, compare, compile_linear, quick
from megatron_verify import WAYS, verified

import tritoncomm
from tritoncomm import mappings, variables
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations import changes, megatron
from tritoncomm.integrations.megatron import (
    frozen_linear,
    functions,
    patching,
    replacements,
    signatures,
    trained_linear,
)
from tritoncomm.p2p import P2PCommunicator

try:
    _installed = metadata.version("megatron-core")
except metadata.PackageNotFoundError:
    _installed = ""

pytestmark = pytest.mark.skipif(not _installed, reason="megatron-core is not installed (make test-rest installs it)")

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
    replacements._warned.clear()
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
    variables = [{"RANK": str(rank)} for rank in range(ranks)]
    modules = [f"megatron.core.{name}" for name in MODULES]
    results = run_job(function, variables, *args, timeout=500, preload=modules)
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
    return _jobs(quick, 4, str(tmp_path_factory.mktemp("quick")))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["tensor-2", "tensor-2-sequence", "pipeline-2", "interleaved-4", "experts-allgather", "experts-alltoall"]
)
def test_a_gpt_trains_to_the_same_bits(quick_results: list[Any], name: str) -> None:
    results = [trained[name] for trained, _ in quick_results if name in trained]
    assert len(results) == CASES[name].ranks
    _check_training(name, results, QUICK_STEPS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["bits", "messages", "copied", "reductions", "second derivatives", "cross entropy"])
def test_linear_layers(quick_results: list[Any], what: str) -> None:
    assert [wrong[what] for _, wrong in quick_results[:2]] == [[], []]


@pytest.mark.timeout(600)
def test_modules_with_pipelines_of_their_own(quick_results: list[Any]) -> None:
    """Megatron's communicator of several modules makes one of ours for the pipeline of each."""
    for _, found in quick_results:
        theirs, ours, used = found["modules"]
        assert ours == theirs
        assert ours
        assert used == "tritoncomm.p2p.communicator"


@pytest.mark.timeout(600)
def test_a_gpt_is_that_of_one_process(quick_results: list[Any]) -> None:
    """Module by module, sequence parallel and with experts."""
    for _, found in quick_results[:2]:
        assert found["verify"] == dict.fromkeys(["sequence", "experts, all-to-all"], "")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ours", [False, True], ids=["alone", "ours"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_is_that_of_one_process(ours: bool, ranks: int, tmp_path: Path) -> None:
    names = [name for name, way in WAYS.items() if way.ranks == ranks]
    for found in _jobs(verified, ranks, str(tmp_path / "store"), names, ours):
        assert found == dict.fromkeys(names, "")


@pytest.mark.timeout(600)
def test_gradients_are_summed_in_fp32_in_one_pass(quick_results: list[Any]) -> None:
    """In rank order, ten steps of Megatron's wrapper; its own sum is within a rounding of each rank's part."""
    for _, found in quick_results:
        result = found["gradients"]
        assert result["wrong"] == result["alone"] == result["kept"] == []
        assert result["same as alone"]
        calls = result["calls"]
        # Both read all that arrives, 4 x 64 numbers, and write the shard; Megatron's sum goes through fp32 in memory.
        assert calls["bytes"] == (4 * 64 * 2 + 64 * (4 + 4 + 2), 4 * 64 * 2 + 64 * 2)
        assert calls["equal"]
        assert calls["scratch is used"]
        assert calls["other dtypes"] == [True, True]
        assert calls["asserts"] == [True] * 4


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


OVERWRITING = {"copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"}


def test_every_name_is_replaced_by_identity(theirs: SimpleNamespace) -> None:
    originals = {name: getattr(theirs.mappings, name) for name in mappings.__all__ if hasattr(theirs.mappings, name)}
    communicator = theirs.p2p_communication.P2PCommunicator
    report = megatron.patch()
    replaced = set(report.replaced)
    assert len(originals) >= 29
    for name in originals:
        own = functions if name in OVERWRITING else mappings
        assert getattr(theirs.mappings, name) is getattr(own, name)
        assert ("megatron.core.tensor_parallel.mappings", name) in replaced
    assert theirs.schedules.P2PCommunicator is theirs.p2p_communication.P2PCommunicator is P2PCommunicator
    assert theirs.token_dispatcher.all_to_all is mappings.all_to_all
    assert theirs.gpt_model.gather_from_sequence_parallel_region is mappings.gather_from_sequence_parallel_region
    values = {id(value) for value in (*originals.values(), communicator)}
    assert [place for place, value in _bindings().items() if value in values] == []
    assert report.version == theirs.package_info.__version__
    assert report.version.partition("+")[0] == _installed
    head, *rest = str(report).splitlines()
    assert head.startswith(f"megatron-core {report.version}: {len(replaced)} names in ")
    listed = " ".join(line.strip() for line in takewhile(lambda line: not line.startswith("  kept: "), rest))
    assert max(map(len, rest)) <= 80
    assert listed.removeprefix("ours: ").split(", ") == sorted({name for _, name in replaced})


@pytest.mark.parametrize("call", ["patch", "patched"])
def test_a_variable_leaves_everything_to_megatron(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The other half of an A/B run; the launch script is the same."""
    before = _bindings()
    monkeypatch.setenv("TRITONCOMM_MEGATRON", "off")
    variables.read()
    try:
        with megatron.patched() if call == "patched" else nullcontext(tritoncomm.patch_megatron()) as report:
            assert _bindings() == before
            assert str(report) == (
                f"megatron-core {theirs.package_info.__version__}: 0 names in 0 modules replaced\n"
                "  kept: all names: TRITONCOMM_MEGATRON is off"
            )
            assert variables.effective()["TRITONCOMM_MEGATRON"] == "off", "ranks compare it"
        assert tritoncomm.unpatch_megatron() == ()
    finally:
        monkeypatch.undo()
        variables.read()
    assert megatron.patch().replaced


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
        ours = theirs.layers.linear_with_grad_accumulation_and_async_allreduce
        falling_back = [each for each in holders if each is ours or each is vars(ours)]
        assert [str(each)[:200] for each in holders if each not in own + falling_back] == []
        assert len(falling_back) == (original.__name__ == LINEAR)


def _is_of_the_patch(holder: Any) -> bool:
    """Pairs (original, replacement), the tables of originals, and changes, which put them back."""
    if isinstance(holder, changes._Entry) or any(holder is each for each in patching._state.originals.history.values()):
        return True
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
    assert theirs.cross_entropy.vocab_parallel_cross_entropy.__module__ == functions.__name__
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
    theirs.token_dispatcher.all_to_all = wrapper = _wraps(mappings.all_to_all)
    assert megatron.unpatch() == ((theirs.token_dispatcher.__name__, "all_to_all"),)
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
    assert theirs.cross_entropy.vocab_parallel_cross_entropy.__module__ == functions.__name__


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
    with pytest.warns(UserWarning, match=r"tested with megatron-core 0\.16\.1, .*; this is 0\.99\.0") as caught:
        report = megatron.patch()
    assert caught[0].filename == __file__
    assert report.version == "0.99.0"
    assert theirs.schedules.P2PCommunicator is P2PCommunicator


def test_this_version_is_tested_and_replaced_without_exception(theirs: SimpleNamespace) -> None:
    assert _installed in megatron.TESTED
    kept = megatron.patch(cross_entropy=True).kept
    assert [line for line in kept if "megatron.core" in line] == []


def test_every_call_in_megatrons_source_is_one_that_ours_takes(theirs: SimpleNamespace) -> None:
    """Calls of replaced names bind to the signature of their replacements, whichever module makes them."""
    megatron.patch(cross_entropy=True)
    names = {name for name in mappings.__all__ if hasattr(theirs.mappings, name)}
    replaced: dict[str, Any] = {name: getattr(theirs.mappings, name) for name in names}
    replaced |= {name: getattr(theirs.layers, name) for name in replacements.LINEAR + replacements.FROZEN}
    replaced["vocab_parallel_cross_entropy"] = theirs.cross_entropy.vocab_parallel_cross_entropy
    replaced["P2PCommunicator"] = P2PCommunicator
    seen = set()
    for call in calls(Path(theirs.package_info.__file__).parent, replaced.keys()):
        if call.owner == "functional":  # torch.distributed.nn.functional has an all_to_all too
            continue
        called = replaced[call.name]
        if call.is_apply:
            called = signatures.forward_of(called)
        signature = inspect.signature(called)
        parameters = [p for p in signature.parameters.values() if p.name != "ctx"]
        assert call.binds(signature.replace(parameters=parameters)), f"{call}: {signature}"
        seen.add(call.name)
    uncalled = {"all_to_all_hp2sp", "all_to_all_sp2hp", "reduce_scatter_last_dim_to_tensor_parallel_region"}
    assert replaced.keys() - seen <= uncalled, "in some version there is no call of these"


def test_every_use_of_a_communicator_in_megatrons_source_is_one_of_ours(theirs: SimpleNamespace) -> None:
    folder = Path(theirs.package_info.__file__).parent
    in_constructor = {"pp_group", "config", "next_rank", "prev_rank", "virtual_pipeline_model_parallel_size"}
    used = set(attributes(folder, "p2p_communicator"))
    assert [each for each in used if each[0] not in {*dir(P2PCommunicator), *in_constructor}] == []
    methods = {name for name, _ in used if inspect.isfunction(getattr(P2PCommunicator, name, None))}
    assert len(methods) == 9
    for call in calls(folder, methods):
        if call.owner == "p2p_communicator":
            signature = inspect.signature(getattr(P2PCommunicator, call.name).__get__(object()))
            assert call.binds(signature), f"{call}: {signature}"


def _renamed(group: Any, tensor: Any, output_split_sizes_: Any = None, input_split_sizes: Any = None) -> Any: ...
def _default(group: Any, input_: Any, output_split_sizes_: Any = (), input_split_sizes: Any = None) -> Any: ...
def _added(
    group: Any, input_: Any, output_split_sizes_: Any = None, input_split_sizes: Any = None, stream: Any = None
) -> Any: ...
def _removed(group: Any, input_: Any) -> Any: ...


def _own(value: Any) -> Any:
    """A stand-in for one of Megatron's own: what is of another module counts as somebody's wrapper."""
    value.__module__ = "megatron.core.tests"
    return value


for _each in (_renamed, _default, _added, _removed):
    _own(_each)


@pytest.mark.parametrize("changed", [_renamed, _default, _added])
def test_a_function_with_other_arguments_stays_megatrons_alone(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    expected = {place for place in megatron.patch().replaced if place[1] != "all_to_all"}
    megatron.unpatch()
    monkeypatch.setattr(theirs.package_info, "__version__", "0.99.0")
    monkeypatch.setattr(theirs.mappings, "all_to_all", changed)
    before = _bindings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = megatron.patch()
        megatron.unpatch()
        assert megatron.patch() == report, "the name is warned of once"
    assert any("the report has the others" in str(each.message) for each in caught)
    told = [str(each.message) for each in caught if "these names stay Megatron's" in str(each.message)]
    assert len(told) == 1
    assert "mappings.all_to_all takes (" in told[0]
    assert {each.filename for each in caught} == {__file__}
    with pytest.raises(UnsupportedError, match=r"these names stay Megatron's.*\n.*all_to_all takes"):
        megatron.patch(strict=True)
    assert set(report.replaced) == expected
    (line,) = [each for each in report.kept if "all_to_all" in each]
    signature = "group, input_, output_split_sizes_=None, input_split_sizes=None, use_nccl_stream=False"
    assert line.startswith("megatron.core.tensor_parallel.mappings.all_to_all takes (group, ")
    assert line.endswith(f"), ours takes ({signature})")
    after = _bindings()
    assert {place for place in before if after[place] != before[place]} == expected


def test_fewer_arguments_are_fine(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.mappings, "all_to_all", _removed)
    megatron.patch()
    assert theirs.mappings.all_to_all is mappings.all_to_all


def _patch_with_a_warning(**options: Any) -> Any:
    with pytest.warns(UserWarning, match="these names stay Megatron's"):
        return megatron.patch(**options)


def _wraps(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return wrapper


def _same_arguments(original: Any) -> Any:
    def wrapper(input_: Any, group: Any = None, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        return original(input_, group, input_split_sizes, use_global_buffer)

    return wrapper


@pytest.mark.parametrize("wrap", [_wraps, _same_arguments])
@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "in one module"])
def test_what_somebody_has_wrapped_stays_theirs(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, wrap: Any, everywhere: bool
) -> None:
    name = "reduce_scatter_to_sequence_parallel_region"
    wrapper = wrap(getattr(theirs.mappings, name))
    modules = (theirs.mappings, theirs.layers, theirs.tensor_parallel) if everywhere else (theirs.layers,)
    for module in modules:
        monkeypatch.setattr(module, name, wrapper)
    before = _bindings()
    report = megatron.patch(strict=True)
    assert all(vars(module)[name] is wrapper for module in modules)
    assert (theirs.mappings.__name__, name) in report.replaced or everywhere
    assert any(f"{name} is " in line and line.endswith(": it stays") for line in report.kept)
    assert megatron.unpatch() == ()
    assert _bindings() == before


def test_a_subclass_of_the_communicator_stays_its_owner_s(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(theirs.p2p_communication.P2PCommunicator): ...

    monkeypatch.setattr(theirs.p2p_communication, "P2PCommunicator", Mine)
    report = megatron.patch()
    assert theirs.p2p_communication.P2PCommunicator is Mine
    (line,) = [each for each in report.kept if "P2PCommunicator" in each]
    assert line.endswith("Mine, which is not Megatron's: it stays")


def _with_output_dtype(function: Any, default: bool, like: Any = None) -> Any:
    """The function with the last argument that Megatron 0.20 adds; ``like`` is a method that has its arguments."""
    signature = inspect.signature(like or function)
    signature = signature.replace(
        parameters=[p for p in signature.parameters.values() if not (like and p.name == "ctx")]
    )
    last = inspect.Parameter("output_dtype", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    last = last.replace(default=None) if default else last

    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.replace(parameters=[*signature.parameters.values(), last]).bind(*args, **kwargs)
        output_dtype = bound.arguments.pop("output_dtype", None)
        return function(*bound.args, **bound.kwargs) if output_dtype is None else ("Megatron's", output_dtype)

    called.__signature__ = signature.replace(parameters=[*signature.parameters.values(), last])  # pyright: ignore
    return _own(called)


def test_the_linear_functions_of_the_next_release(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """``output_dtype``: None and the input's are ours, any other value is Megatron's."""
    plain = inspect.signature(getattr(theirs.layers, LINEAR)).parameters
    if "gtp_remat_size" not in plain:
        pytest.skip("0.20 follows 0.19")
    for function, linear_class in (replacements.LINEAR, replacements.FROZEN):
        monkeypatch.setattr(theirs.layers, function, _with_output_dtype(getattr(theirs.layers, function), True))
        original = getattr(theirs.layers, linear_class)
        forward = _with_output_dtype(original.forward, False)
        apply = _with_output_dtype(original.apply, True, like=original.forward)
        fake = type(linear_class, (), {"forward": staticmethod(forward), "apply": staticmethod(apply)})
        monkeypatch.setattr(theirs.layers, linear_class, _own(fake))
    assert not [line for line in megatron.patch(strict=True).kept if "megatron.core" in line]
    x, weight = torch.randn(3, 2), torch.randn(4, 2)
    for function in (replacements.LINEAR[0], replacements.FROZEN[0]):
        ours = getattr(theirs.layers, function)
        for same in (None, torch.float32):
            out = ours(x, weight, None, False, False, False, tp_group=None, output_dtype=same)
            assert torch.equal(out, x @ weight.t())
        other = ours(x, weight, None, False, False, False, tp_group=None, output_dtype=torch.bfloat16)
        assert other == ("Megatron's", torch.bfloat16)
    frozen = theirs.layers.LinearWithFrozenWeight
    assert torch.equal(frozen.apply(x, weight, None, False, None, None), x @ weight.t())
    assert frozen.apply(x, weight, None, False, None, torch.float16) == ("Megatron's", torch.float16)
    trained = theirs.layers.LinearWithGradAccumulationAndAsyncCommunication
    flags = (False, False, False, None, 0, None, 1)
    assert torch.equal(trained.apply(x, weight, None, *flags, None), x @ weight.t())
    assert trained.apply(x, weight, None, *flags, torch.float16) == ("Megatron's", torch.float16)


def _fake_class(name: str, **members: Any) -> Any:
    methods = {each: staticmethod(member) for each, member in members.items()}
    return _own(type(name, (torch.autograd.Function,), methods))


@pytest.mark.parametrize("pair", [replacements.LINEAR, replacements.FROZEN])
@pytest.mark.parametrize("what", ["missing class", "missing function", "changed class", "changed function"])
def test_a_linear_function_and_its_class_stay_together(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], what: str
) -> None:
    function, linear_class = pair
    expected = {place for place in megatron.patch().replaced if place[1] not in pair}
    megatron.unpatch()
    name = linear_class if what.endswith("class") else function
    if what.startswith("missing"):
        monkeypatch.delattr(theirs.layers, name)
    elif what == "changed class":
        monkeypatch.setattr(theirs.layers, name, _fake_class(name, forward=lambda ctx, input, weight, scale: None))
    else:
        monkeypatch.setattr(theirs.layers, name, _own(lambda input, weight, scale: None))
    report = _patch_with_a_warning()
    assert set(report.replaced) == expected
    (line,) = [each for each in report.kept if name in each]
    called = f"{name}.apply" if what.endswith("class") else name
    problem = "is missing" if what.startswith("missing") else "takes (input, weight, scale), ours takes (input, "
    shown = name if what.startswith("missing") else called
    assert line.startswith(f"megatron.core.tensor_parallel.layers.{shown} {problem}")
    assert line.endswith(f" ({function} and {linear_class} are replaced together or not at all)")


@pytest.mark.parametrize("what", ["argument", "method", "property", "kind"])
def test_a_changed_communicator_stays_megatrons(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    expected = {place for place in megatron.patch().replaced if place[1] != "P2PCommunicator"}
    megatron.unpatch()

    class Argument(theirs.p2p_communication.P2PCommunicator):
        def recv_forward(self, tensor_shapes: Any, is_first_stage: bool, timeout: float) -> Any: ...

    class Method:
        def probe(self) -> None: ...

    class Property:
        @property
        def depth(self) -> int: ...

    class Kind:
        @property
        def recv_forward(self) -> Any: ...

    cases = {
        "argument": (Argument, r"\.recv_forward takes \(self, tensor_shapes, is_first_stage, timeout\), ours takes"),
        "method": (Method, r"\.probe: tritoncomm has no such method"),
        "property": (Property, r"\.depth: tritoncomm has no such property"),
        "kind": (Kind, r"\.recv_forward: tritoncomm has no such property"),
    }
    changed, message = cases[what]
    monkeypatch.setattr(theirs.p2p_communication, "P2PCommunicator", _own(changed))
    report = _patch_with_a_warning()
    assert set(report.replaced) == expected
    (line,) = [each for each in report.kept if "P2PCommunicator" in each]
    assert re.match(r"megatron\.core\.pipeline_parallel\.p2p_communication\.P2PCommunicator" + message, line)


def test_a_changed_autograd_class_stays_megatrons_alone(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = _fake_class("_CopyToModelParallelRegion", forward=lambda ctx, input_, group, stream: None)
    monkeypatch.setattr(theirs.mappings, "_CopyToModelParallelRegion", copy)
    report = _patch_with_a_warning()
    (line,) = [each for each in report.kept if "_CopyToModelParallelRegion" in each]
    assert "_CopyToModelParallelRegion.apply takes (input_, group, stream), ours takes (input_, group)" in line
    assert theirs.mappings._CopyToModelParallelRegion is copy
    own = functions.copy_to_tensor_model_parallel_region
    assert theirs.mappings.copy_to_tensor_model_parallel_region is own


def test_a_name_that_is_no_function_stays_megatrons(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.mappings, "all_to_all", 7)
    monkeypatch.setattr(theirs.cross_entropy, "vocab_parallel_cross_entropy", _removed)
    kept = _patch_with_a_warning(cross_entropy=True).kept
    assert "megatron.core.tensor_parallel.mappings.all_to_all is an object of int" in kept
    assert any("vocab_parallel_cross_entropy takes (group, input_), ours takes" in line for line in kept)
    assert not any("label smoothing" in line for line in kept), "no call of it is ours"


def test_a_version_of_which_nothing_can_be_replaced_is_refused(
    theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in mappings.__all__:
        if hasattr(theirs.mappings, name):
            monkeypatch.setattr(theirs.mappings, name, _own(lambda unknown: None))
    monkeypatch.delattr(theirs.p2p_communication, "P2PCommunicator")
    for function, _ in (replacements.LINEAR, replacements.FROZEN):
        monkeypatch.delattr(theirs.layers, function)
    monkeypatch.setitem(sys.modules, f"megatron.core.distributed.{replacements.FP32_SUM}", None)  # no such module
    before = _bindings()
    with pytest.raises(UnsupportedError, match=r"nothing of megatron-core .* can be replaced:") as caught:
        megatron.patch()
    assert "p2p_communication.P2PCommunicator is missing" in str(caught.value)
    assert "mappings.all_to_all takes (unknown), ours takes (group" in str(caught.value)
    assert _bindings() == before


@contextmanager
def _reloading(*modules: ModuleType) -> Iterator[None]:
    """Names of the modules are restored in the end, whatever has been reloaded."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        megatron.unpatch()
        for module, names in zip(modules, before, strict=True):
            vars(module).update(names)


def test_a_reloaded_module_is_patched_again_and_restored(theirs: SimpleNamespace) -> None:
    """``importlib.reload`` binds a module's names to new objects of Megatron's; other modules keep the old ones."""
    modules = (theirs.mappings, theirs.layers, theirs.p2p_communication)
    before = _bindings()
    with _reloading(*modules):
        first = megatron.patch()
        for module in modules:
            importlib.reload(module)
        communicator = theirs.p2p_communication.P2PCommunicator
        new = {name: getattr(theirs.mappings, name) for name in mappings.__all__ if hasattr(theirs.mappings, name)}
        assert communicator is not P2PCommunicator
        assert theirs.schedules.P2PCommunicator is P2PCommunicator
        for _ in range(2):
            assert megatron.patch() == first
            assert theirs.p2p_communication.P2PCommunicator is theirs.schedules.P2PCommunicator is P2PCommunicator
            assert theirs.mappings.all_to_all is theirs.token_dispatcher.all_to_all is mappings.all_to_all
            for name in replacements.LINEAR + replacements.FROZEN:
                assert getattr(theirs.layers, name).__module__ in (trained_linear.__name__, frozen_linear.__name__)
            own = {id(value) for value in (*new.values(), communicator)}
            assert [place for place, value in _bindings().items() if value in own] == []
            megatron.unpatch()
            after, names = _bindings(), {module.__name__ for module in modules}
            assert [place for place in before if place[0] not in names and after[place] != before[place]] == []
            assert {name: getattr(theirs.mappings, name) for name in new} == new
            assert theirs.p2p_communication.P2PCommunicator is communicator
    assert _bindings() == before


def test_a_name_that_was_reloaded_is_not_reported(theirs: SimpleNamespace) -> None:
    with _reloading(theirs.mappings), megatron.patched() as outer:
        importlib.reload(theirs.mappings)
        own = {place for place in outer.replaced if place[0] == theirs.mappings.__name__}
        assert set(patching._report().replaced) == set(outer.replaced) - own
        with megatron.patched() as inner:
            assert inner == outer
            assert theirs.mappings.all_to_all is mappings.all_to_all


def test_the_report_says_what_is_kept(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = "\n".join(megatron.patch().kept)
    megatron.unpatch()
    taken = inspect.signature(getattr(theirs.layers, LINEAR)).parameters
    for name in ("gradient_accumulation_fusion", "grad_output_buffer", "gtp_remat_size", "output_dtype"):
        assert (name in kept) is (name in taken), "only arguments of this release"
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
    sources = [path.read_text() for path in Path(inspect.getfile(megatron)).parent.glob("*.py")]
    assert len(sources) > 5
    assert not any(re.search(r"^\s*(import|from) megatron", source, re.MULTILINE) for source in sources)


# --- single functions, without ranks


def _recorder(arguments: str, seen: list[dict[str, Any]]) -> Any:
    """A function of these arguments that notes with what it is called, and returns "Megatron's"."""
    parameters = inspect.signature(eval(f"lambda {arguments}: 0"))

    def record(*args: Any, **kwargs: Any) -> str:
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        seen.append(dict(bound.arguments))
        return "Megatron's"

    record.__signature__ = parameters  # pyright: ignore
    record.warned = True  # pyright: ignore
    return record


_FLAGS = "input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel"
_DEFERRED = "grad_output_buffer=None, wgrad_deferral_limit"
_TRAINED = {
    "0.16": f"{_FLAGS}, {_DEFERRED}=0, async_grad_allreduce=None, tp_group=None",
    "0.17": f"{_FLAGS}, {_DEFERRED}=0, tp_group=None",
    "0.19": f"{_FLAGS}, {_DEFERRED}=0, tp_group=None, gtp_remat_size=1",
    "0.20": f"{_FLAGS}, {_DEFERRED}=0, tp_group=None, gtp_remat_size=1, output_dtype=None",
}
_FROZEN = {
    "0.16": f"{_FLAGS}, tp_group, {_DEFERRED}=None, async_grad_allreduce=None",
    "0.17": f"{_FLAGS}, tp_group, {_DEFERRED}=None",
    "0.19": f"{_FLAGS}, tp_group, {_DEFERRED}=None, gtp_remat_size=1",
    "0.20": f"{_FLAGS}, tp_group, {_DEFERRED}=None, gtp_remat_size=1, output_dtype=None",
}


def _functions(version: str, frozen: bool, seen: list[dict[str, Any]]) -> tuple[Any, Any, Any]:
    """Our linear function and class for fakes of a version's, and the fake function."""
    more = ", gtp_remat_size" if version in ("0.19", "0.20") and not frozen else ""
    more += ", output_dtype" if version == "0.20" else ""
    frozen_flags = "input, weight, bias, allreduce_dgrad, tp_group"
    forward = (frozen_flags if frozen else f"{_FLAGS}, grad_output_buffer, wgrad_deferral_limit, tp_group") + more
    members = {"forward": _recorder(f"ctx, {forward}", []), "apply": _recorder(forward, seen)}
    fake = type("Fake", (), {name: staticmethod(member) for name, member in members.items()})
    theirs = _recorder((_FROZEN if frozen else _TRAINED)[version], seen)
    if frozen:
        return *frozen_linear.frozen_linear_functions(theirs, fake, lambda group: group), theirs
    return *trained_linear.linear_functions(theirs, fake, lambda group: group, lambda: None), theirs


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("version", ["0.16", "0.17", "0.19", "0.20"])
def test_linear_functions_have_the_arguments_of_each_version(version: str, frozen: bool) -> None:
    seen: list[dict[str, Any]] = []
    ours, own_class, theirs = _functions(version, frozen, seen)
    shown = [str(p.replace(annotation=p.empty)) for p in inspect.signature(ours).parameters.values()]
    wanted_names = [str(p) for p in inspect.signature(theirs).parameters.values()]
    later = ["gtp_remat_size=1", "output_dtype=None"]
    assert shown == wanted_names + {"0.16": [], "0.17": later, "0.19": later[1:], "0.20": []}[version]
    x, weight = torch.randn(3, 2), torch.randn(4, 2)
    subclass = x.as_subclass(type("Subclass", (torch.Tensor,), {}))
    arguments: dict[str, Any] = {
        "weight": weight, "bias": None, "gradient_accumulation_fusion": False, "allreduce_dgrad": False,
        "sequence_parallel": False, "tp_group": "group", "grad_output_buffer": None, "wgrad_deferral_limit": None,
    }  # fmt: skip
    names = [p.name for p in inspect.signature(ours).parameters.values()]
    unset = {"async_grad_allreduce": None, "gtp_remat_size": 1, "output_dtype": None}
    by_position = [(arguments | unset | {"input": x})[name] for name in names]
    for out in (ours(*by_position), ours(input=x, **arguments)):
        assert torch.equal(out, x @ weight.t())
    assert seen == []
    changes: list[dict[str, Any]] = [{"input": subclass}, {"grad_output_buffer": []}]
    changes += [{"async_grad_allreduce": True}] if version == "0.16" else []
    changes += [{"gtp_remat_size": 2}] if version in ("0.19", "0.20") else []
    changes += [{"output_dtype": torch.bfloat16}] if version == "0.20" else []
    for change in changes:
        wanted = {"input": x, **arguments, **change}
        by_position = [{**unset, **wanted}[name] for name in names]
        for out in (ours(**wanted), ours(*by_position)):
            call = seen.pop()
            assert out == "Megatron's"
            assert all(call[name] is value for name, value in wanted.items()), change
    flags = (False,) if frozen else (False, False, False, None, 0)
    more = (1,) if version in ("0.19", "0.20") and not frozen else ()
    more += (None,) if version == "0.20" else ()
    assert own_class.apply(subclass, weight, None, *flags, "group", *more) == "Megatron's"
    assert seen.pop()["tp_group"] == "group"
    assert torch.equal(own_class.apply(x, weight, None, *flags, None), x @ weight.t())
    if version in ("0.16", "0.17"):
        with pytest.raises(TypeError, match="gtp_remat_size"):
            ours(input=x, **arguments, gtp_remat_size=2)
    elif not frozen:
        assert own_class.apply(x, weight, None, *flags, "group", 2) == "Megatron's"
        assert seen.pop()["gtp_remat_size"] == 2
    assert seen == []


@pytest.mark.parametrize("kind", ["TrainedLinear", "TrainedLinear016", "FrozenLinear", "FrozenLinear016"])
def test_a_linear_function_is_an_object_that_can_be_pickled(kind: str) -> None:
    more = () if "Frozen" in kind else (os.getcwd,)
    made = getattr(trained_linear if kind in vars(trained_linear) else frozen_linear, kind)(os.fspath, os.fspath, *more)
    x, weight, group = torch.randn(3, 2), torch.randn(4, 2), (None,) if "Frozen" in kind else ()
    for linear in (made, pickle.loads(pickle.dumps(made))):
        assert torch.equal(linear(x, weight, None, False, False, False, *group), x @ weight.t())


def test_fused_and_deferred_gradients_stay_megatrons(theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    original = theirs.layers.LinearWithGradAccumulationAndAsyncCommunication

    @_own
    class Recorder:
        forward = staticmethod(original.forward)

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
    if "async_grad_allreduce" in inspect.signature(linear).parameters:
        with pytest.warns(UserWarning, match="async_grad_allreduce"):  # its warning is Megatron's, its product ours
            linear(x, weight, None, False, False, False, async_grad_allreduce=True)
    own = theirs.layers.LinearWithGradAccumulationAndAsyncCommunication
    assert own.apply(x, weight, None, True, False, False, None, 0, None) == "Megatron's"
    calls.clear()
    assert torch.equal(linear(x, weight, None, False, False, False), torch.matmul(x, weight.t()))
    assert torch.equal(own.apply(x, weight, None, False, False, False, None, 0, None), torch.matmul(x, weight.t()))
    assert calls == []


def test_weights_that_are_gathered_further_stay_megatrons(theirs: SimpleNamespace) -> None:
    """``gtp_remat_size`` other than 1 asks the weight itself for its parts, which only Megatron's function does."""
    is_known = "gtp_remat_size" in inspect.signature(getattr(theirs.layers, LINEAR)).parameters
    megatron.patch()
    x = torch.randn(3, 2)
    functions = (getattr(theirs.layers, LINEAR), theirs.layers.linear_with_frozen_weight)
    if not is_known:
        for function in functions:
            with pytest.raises(TypeError, match="gtp_remat_size"):
                function(x, torch.randn(4, 2), None, False, False, False, tp_group=None, gtp_remat_size=2)
        return
    whole = torch.randn(4, 2)
    for function in functions:
        weight = torch.nn.Parameter(whole[:2].clone(), requires_grad=function is functions[0])
        weight.all_gather_and_prefetch = lambda fwd: whole  # pyright: ignore
        out = function(x, weight, None, False, False, False, tp_group=object(), gtp_remat_size=2)
        assert torch.equal(out, x @ whole.t())


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
