"""Changes to objects of others are undone, in any order, also after an exception; what others replaced since stays."""

import copy
import importlib
import importlib.util
import inspect
import io
import os
import re
import subprocess
import sys
import threading
import warnings
import weakref
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from caches import caches
from jobs import run_job
from torch import nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.groups import make_group
from tritoncomm.integrations import changes
from tritoncomm.integrations import recurrent_layers as earlier_layers
from tritoncomm.integrations import rotary_tables as earlier_tables
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.changes import Change, Changes
from tritoncomm.integrations.transformers import hooks, recurrent_layers

ROOT = Path(__file__).parents[2]
has_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


class Holder:
    """Object with attributes."""

    value = "of the class"


class Failing(dict[str, Any]):
    """Mapping that refuses to lose a key."""

    def __delitem__(self, key: str) -> None:
        raise KeyboardInterrupt


def test_undo_puts_back_what_there_was() -> None:
    holder, mapping, layer = Holder(), {"kept": 1}, nn.Linear(1, 1)
    holder.first = "before"  # type: ignore[attr-defined]
    made = Changes()
    made.set_attribute(holder, "first", "ours")
    made.set_attribute(holder, "first", "ours again")
    made.set_attribute(holder, "value", "ours")
    made.set_entry(mapping, "added", 2)
    made.add(layer.register_forward_hook(lambda *_: None).remove)
    assert [(change.name, change.value) for change in made.values()] == [
        ("first", "ours"), ("first", "ours again"), ("value", "ours"), ("added", 2)
    ]  # fmt: skip
    assert made.undo() == made.undo() == []
    assert vars(holder) == {"first": "before"}
    assert mapping == {"kept": 1}
    assert not layer._forward_hooks


class Descriptors:
    """A property with a setter, and a slot, of which an instance's ``vars`` know nothing."""

    __slots__ = ("__weakref__", "slot", "under")

    @property
    def reduce(self) -> Any:
        return self.under

    @reduce.setter
    def reduce(self, value: Any) -> None:
        self.under = value


def test_attributes_that_are_not_in_vars() -> None:
    """Parameters, buffers and parts of a module, properties, slots, and attributes of an object that is a mapping."""
    module, described, mapping = nn.Sequential(nn.Linear(2, 2)), Descriptors(), UserDict({"reduce": "key"})
    module.register_parameter("weight", nn.Parameter(torch.ones(1)))
    module.register_buffer("table", torch.ones(1))
    described.reduce = described.slot = "theirs"
    mapping.reduce = "theirs"  # pyright: ignore[reportAttributeAccessIssue]
    cases: list[tuple[Any, str, Any]] = [
        (module, "0", nn.Identity()), (module, "weight", nn.Parameter(torch.zeros(1))),
        (module, "table", torch.zeros(1)), (described, "reduce", "ours"), (described, "slot", "ours"),
        (mapping, "reduce", "ours"),
    ]  # fmt: skip
    before = [getattr(holder, name) for holder, name, _ in cases]
    made = Changes()
    for holder, name, value in cases:
        made.set_attribute(holder, name, value)
        assert getattr(holder, name) is value
    described.slot = "somebody's"
    assert [(left.name, left.value) for left in made.undo()] == [("slot", "somebody's")]
    described.slot = "theirs"
    assert all(getattr(holder, name) is value for (holder, name, _), value in zip(cases, before, strict=True))
    assert dict(mapping) == {"reduce": "key"}
    assert list(module.state_dict()) == ["weight", "table", "0.weight", "0.bias"]


def test_what_somebody_has_replaced_since_stays() -> None:
    holder, mapping, made = Holder(), {}, Changes()
    made.set_attribute(holder, "value", "ours")
    made.set_entry(mapping, "added", "ours")
    holder.value = mapping["added"] = "theirs"
    assert made.undo() == [Change(mapping, "added", "theirs"), Change(holder, "value", "theirs")]
    assert (holder.value, mapping) == ("theirs", {"added": "theirs"})
    made.set_attribute(holder, "value", "ours")
    del holder.value
    assert made.undo() == [Change(holder, "value", None)]


def test_an_undo_that_raises_keeps_none_from_running_and_runs_again() -> None:
    holder, mapping, made = Holder(), Failing(), Changes()
    made.set_attribute(holder, "value", "ours")
    made.set_entry(mapping, "added", "ours")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            made.undo()
        assert vars(holder) == {}
        assert mapping == {"added": "ours"}
    dict.clear(mapping)
    assert made.undo() == []


@pytest.mark.parametrize("is_block", [False, True])
def test_an_interrupt_at_any_line_of_an_undo_loses_no_change(is_block: bool) -> None:
    """In a block there is no second call, but for one that the block makes."""

    class InterruptError(BaseException):
        pass

    def interrupted(line: int) -> bool:
        holder, mapping, made, lines = Holder(), dict[str, Any](), Changes(), 0
        made.set_entry(mapping, "added", "ours")
        made.set_attribute(holder, "value", "ours")

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != changes.__file__:
                return None
            lines += event == "line"
            if event == "line" and lines == line:
                raise InterruptError
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            if is_block:
                made.__exit__(ValueError, ValueError(), None)
            else:
                made.undo()
        except InterruptError:
            pass
        finally:
            sys.settrace(before)
        if not is_block:
            made.undo()
        # The line before the first try of a block is not covered: nothing was begun.
        assert (vars(holder), mapping) == ({}, {}) or (is_block and line < 3), line
        return lines >= line

    line = 1
    while interrupted(line):
        line += 1
    assert line > 20


def test_a_block_that_raises_undoes_its_changes() -> None:
    holder = Holder()

    def change(error: int) -> None:
        with Changes() as block:
            block.set_attribute(holder, "value", "ours")
            1 / error

    with pytest.raises(ZeroDivisionError):
        change(0)
    assert vars(holder) == {}
    change(1)
    assert holder.value == "ours"


def test_an_owner_keeps_no_object() -> None:
    holder, made = Holder(), Changes()
    made.set_attribute(holder, "value", "ours")
    with pytest.raises(TypeError, match="value is set on one object"):
        copy.deepcopy(made)
    reference = weakref.ref(holder)
    del holder
    assert reference() is None
    assert list(made.values()) == made.undo() == []


@pytest.fixture
def module() -> Iterator[Any]:
    made: Any = ModuleType("module_with_a_function")
    made.function = lambda: ["theirs"]
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]
    changes._shared.pop((made.__name__, "function"), None)


def wrapper(name: str, inner: Any) -> Any:
    return lambda: [name, *inner()]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_shared_function_goes_with_its_last_owner(module: Any, order: tuple[int, ...], is_dropped: bool) -> None:
    """A list that is undone from the last to the first would put the function of the first owner back, for ever."""
    original, owners = module.function, [Holder() for _ in order]
    for owner in owners:
        changes.share(owner, module.__name__, "function", partial(wrapper, "ours"))
    del owner
    for index in order:
        assert module.function() == ["ours", "theirs"]
        if is_dropped:
            owners[index] = Holder()
        else:
            assert changes.release(owners[index], module.__name__, "function") == []
    assert module.function is original
    assert changes.release(Holder(), module.__name__, "function") == []


def test_a_function_that_somebody_has_wrapped_since(module: Any) -> None:
    share, release = (
        lambda owner: changes.share(owner, module.__name__, "function", partial(wrapper, "ours")),
        lambda owner: changes.release(owner, module.__name__, "function"),
    )
    original, owners = module.function, [Holder(), Holder()]
    share(owners[0])
    inner = module.function
    module.function = wrapper("wrapped", inner)
    wrapped = module.function
    assert [change.value for change in release(owners[0])] == [wrapped]
    assert module.function is wrapped
    share(owners[0])
    share(owners[1])
    assert module.function() == ["ours", "wrapped", "ours", "theirs"]
    module.function = inner  # as the end of a patch for a while does
    release(owners[1])
    release(owners[0])
    module.function = original
    # A patch that was there when a second owner came, and ended before both went.
    share(owners[0])
    inner = module.function
    module.function = wrapper("wrapped", inner)
    share(owners[1])
    module.function = inner
    for owner in owners:
        release(owner)
    assert module.function is original


def test_a_function_that_cannot_be_made_is_not_replaced(module: Any) -> None:
    original, owner = module.function, Holder()
    with pytest.raises(ZeroDivisionError):
        changes.share(owner, module.__name__, "function", lambda function: 1 / 0)
    assert module.function is original
    assert not changes._shared[module.__name__, "function"]._owners


EXIT = """
import math
from tritoncomm.integrations import changes
class Owner: pass
changes.owner = Owner()
changes.share(changes.owner, "math", "floor", lambda function: lambda x: function(x))
"""


def test_the_end_of_a_process_is_silent() -> None:
    """Names of modules are gone before the owners are."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def run_sequences(examples: int, steps: int) -> int:
    from switch_machine import draw  # imports transformers

    return draw(examples, steps)


@has_transformers
@pytest.mark.parametrize("examples", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_drawn_sequences_leave_nothing(examples: int) -> None:
    assert run_job(run_sequences, [{}], examples, 20, timeout=1200) == [examples]


# Hooks of an earlier release, under the names that are in the models that it saved.
EARLIER: dict[str, list[tuple[str, Any]]] = {
    "model": [
        ("pre", partial(ours._check_call, "tritoncomm_ulysses", True, True, True)),
        ("pre", partial(ours._begin, "tritoncomm_ulysses", True)),
        ("post", earlier_layers.leave_model),
    ],
    "hybrid": [("pre", earlier_layers._enter), ("post", ours._Untraced(earlier_layers._leave))],
    "rotary": [("pre", earlier_tables._append), ("post", earlier_tables._cut)],
}


@has_transformers
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", list(EARLIER))
def test_a_model_that_an_earlier_release_saved_is_switched_again(group: ProcessGroup, kind: str) -> None:
    from tiny_models import tiny  # imports transformers

    model: Any = tiny("qwen3_next")
    module = {"model": model, "hybrid": model.model.layers[0].linear_attn, "rotary": model.model.rotary_emb}[kind]
    ids = torch.arange(3, 19)[None]
    wanted, before = model(input_ids=ids, use_cache=False).logits, dict(vars(module))
    module.tritoncomm_registered = "tritoncomm_ulysses"
    for place, hook in EARLIER[kind]:
        if place == "pre":
            module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            module.register_forward_hook(hook, always_call=True)
    torch.save(model, saved := io.BytesIO())
    for name in ("tritoncomm_ulysses", "sdpa"):
        loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
        with pytest.raises(UnsupportedError, match=r"an earlier release of tritoncomm.*call switch\(model, name\)"):
            loaded(input_ids=ids, use_cache=False)
        registered = ours.register(group)
        try:
            ours.switch(loaded, name)
            if name == registered:
                own = wanted.chunk(2, 1)[group.rank()]
                assert (loaded(**ours.shard_batch({"input_ids": ids}, group)).logits - own).abs().max() < 2e-5
                ours.switch(loaded, "sdpa")
            assert torch.equal(loaded(input_ids=ids, use_cache=False).logits, wanted)
        finally:
            ours.unregister()
        of_loaded = dict(loaded.named_modules())[next(path for path, part in model.named_modules() if part is module)]
        assert vars(of_loaded).keys() == before.keys()
        assert not any(value for name, value in vars(of_loaded).items() if "hooks" in name)


def import_all() -> None:
    for path in (ROOT / "tritoncomm").rglob("*.py"):
        if path.stem != "__main__":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            importlib.import_module(name)


def test_no_cache_has_a_group_or_a_module_among_its_keys() -> None:
    """It would keep them alive; torch's destroy_process_group frees a group, and a user drops a model."""
    import_all()
    found = dict(caches())
    keys = {name: str(inspect.signature(cache)) for name, cache in found.items()}
    assert len(keys) > 60
    kept = r"ProcessGroup|\bModel\b|(?<!type\[)torch\.nn\.modules\.module\.Module"
    assert [name for name, signature in keys.items() if re.search(kept, signature)] == []


@has_transformers
@pytest.mark.ranks(2)
def test_a_model_that_is_switched_back_is_judged_again(group: ProcessGroup) -> None:
    """``set_attn_implementation`` gives it the attention alone: not the functions, nor the tables."""
    from tiny_models import tiny  # imports transformers

    model, batch = tiny("qwen3_next"), {"input_ids": torch.arange(3, 19)[None]}
    name = ours.register(group)
    try:
        ours.switch(model, name)
        model(**ours.shard_batch(batch, group))
        ours.switch(model, "sdpa")
        model.set_attn_implementation(name)
        with pytest.raises(UnsupportedError, match="linear_attention are not known to be right"):
            model(**ours.shard_batch(batch, group))
    finally:
        ours.unregister()


@has_transformers
@pytest.mark.ranks(2)
def test_a_part_of_a_switched_model_is_not_switched(group: ProcessGroup) -> None:
    """The whole would compute over shards without its hooks, or with attention alone."""
    from tiny_models import tiny  # imports transformers

    model, other, ids = tiny("llama"), tiny("llama"), torch.arange(3, 19)[None]
    other.model = model.model
    name = ours.register(group)
    try:
        ours.switch(model, name)
        wanted = model(**ours.shard_batch({"input_ids": ids}, group)).logits
        for part in (model.model, other):
            with pytest.raises(UnsupportedError, match="a part of a model that was switched to"):
                ours.switch(part, "sdpa")
        assert torch.equal(model(**ours.shard_batch({"input_ids": ids}, group)).logits, wanted)
        ours.switch(model, "sdpa")
        ours.switch(model.model, name)
        ours.switch(model, "sdpa")
        assert list(hooks.switches_of(model)) == []
    finally:
        ours.unregister()


@has_transformers
@pytest.mark.ranks(2)
def test_a_model_that_was_switched_for_one_rank(group: ProcessGroup) -> None:
    from tiny_models import tiny  # imports transformers

    model, batch = tiny("llama"), {"input_ids": torch.arange(3, 19)[None]}
    alone = make_group("alone", [dist.get_rank()])
    try:
        with warnings.catch_warnings(action="ignore"):  # a sequence group of one rank of two
            name = ours.register(alone)
        ours.switch(model, name)
        ours.unregister()
        ours.register(group)
        with pytest.raises(UnsupportedError, match="was switched for one rank; call switch"):
            model(**ours.shard_batch(batch, group))
        ours.switch(model, name)
        model(**ours.shard_batch(batch, group))
    finally:
        ours.unregister()
        dist.destroy_process_group(alone)


@has_transformers
@pytest.mark.ranks(2)
def test_a_text_model_with_another_attention(group: ProcessGroup) -> None:
    """Recurrent layers would compute over shards, and attention alone."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "linear_num_key_heads": 2}
    text |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    model: Any = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    batch = {"input_ids": torch.arange(3, 19)[None]}
    name = ours.register(group)
    try:
        for part, attention in ((model, {"text_config": "sdpa"}), (model.model.language_model, "sdpa")):
            ours.switch(model, name)
            model(**ours.shard_batch(batch, group))
            part.set_attn_implementation(attention)
            with pytest.raises(UnsupportedError, match=r"and its text model 'sdpa'; call switch\(model, name\)"):
                model(**ours.shard_batch(batch, group))
    finally:
        ours.unregister()


class WithLock(nn.Linear):
    """Owner of a hook that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.lock = threading.Lock()

    def hook(self, *_: Any) -> None:
        """Do nothing."""


@has_transformers
@pytest.mark.ranks(2)
def test_copies(group: ProcessGroup) -> None:
    """A copied layer takes no hooks of others along; a model is copied also after an interrupt."""
    from tiny_models import tiny  # imports transformers

    model, batch = tiny("qwen3_next"), {"input_ids": torch.arange(3, 19)[None], "labels": torch.arange(3, 19)[None]}
    name = ours.register(group)
    try:
        ours.switch(model, name)
        with pytest.raises(KeyboardInterrupt), mock.patch.object(type(model), "loss_function", interrupted):
            model(**ours.shard_batch(batch, group))
        copied = copy.deepcopy(model)
        loss = model(**ours.shard_batch(batch, group)).loss
        assert torch.equal(copied(**ours.shard_batch(batch, group)).loss, loss)
        handle = model.register_forward_hook(WithLock().hook)
        layer = copy.deepcopy(model.model.layers[0])
        assert [switch.name for switch in hooks.switches_of(layer)] == [name]
        handle.remove()
        for each in (copied, model):
            ours.switch(each, "sdpa")
            assert hooks.switches_of(each) == []
    finally:
        ours.unregister()


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@has_transformers
@pytest.mark.ranks(2)
def test_a_compiled_model_is_switched(group: ProcessGroup) -> None:
    from tiny_models import tiny  # imports transformers

    model, batch = tiny("llama"), {"input_ids": torch.arange(3, 19)[None]}
    compiled: Any = torch.compile(model, backend="eager")
    try:
        ours.switch(compiled, ours.register(group))
        wanted = model(**ours.shard_batch(batch, group)).logits
        assert torch.equal(compiled(**ours.shard_batch(batch, group)).logits, wanted)
        ours.switch(compiled, "sdpa")
        assert hooks.switches_of(model) == []
    finally:
        ours.unregister()


class _ShortMLP(nn.Module):
    """MLP that mixes positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)


class _NoConfig:
    """Attribute of a class that gives all of its objects a config."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __get__(self, *_: Any) -> Any:
        return self.config


@has_transformers
@pytest.mark.ranks(2)
def test_parts_that_are_replaced_in_a_switched_model(group: ProcessGroup) -> None:
    """Right where they are, and else refused until the model is switched again; compared with one process."""
    from tiny_models import tiny  # imports transformers
    from transformers.models.llama import modeling_llama

    alone = make_group("alone", [dist.get_rank()])
    with warnings.catch_warnings(action="ignore"):  # a sequence group of one rank of two
        name, single = ours.register(group, name="n"), ours.register(alone, name="single")
    ids = torch.arange(32)[None] % 40

    def shard(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(2, 1)[group.rank()]

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**ours.shard_batch({"input_ids": ids}, group)).logits

    def dynamic(model: Any) -> None:
        model.config.rope_parameters = {
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8
        }  # fmt: skip
        model.config.max_position_embeddings = 8
        model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(model.config)

    def layer_of(kind: str, other: str | None) -> Any:
        donor = tiny(kind)
        if other is not None:
            ours.switch(donor, other)
        return donor.model.layers[0] if kind == "llama" else donor.backbone.layers[0]

    def shared(model: Any) -> None:
        other = tiny("llama")
        other.model.layers[0] = model.model.layers[0]
        ours.switch(other, "sdpa")

    def set_llama(layer: Any) -> Any:
        return lambda model: model.model.layers.__setitem__(0, layer)

    def set_mamba(layer: Any) -> Any:
        return lambda model: model.backbone.layers.__setitem__(0, layer)

    again = "call switch\\(model, name\\) again"
    cases: list[tuple[str, str, Any]] = [
        ("llama", again, set_llama(layer_of("llama", None))),
        ("llama", again, set_llama(layer_of("llama", single))),
        ("llama", "", set_llama(layer_of("llama", name))),
        ("llama", again, shared),
        ("llama", again, dynamic),
        ("llama", "Conv1d in its layers mixes", lambda model: setattr(model.model.layers[0], "mlp", _ShortMLP())),
        ("llama", "", lambda model: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[1].mlp))),
        ("mamba2", again, set_mamba(layer_of("mamba2", None))),
        ("mamba2", again, set_mamba(layer_of("mamba2", single))),
        ("mamba2", "", set_mamba(layer_of("mamba2", name))),
    ]
    try:
        for kind, problem, replace in cases:
            model, whole = tiny(kind), tiny(kind)
            ours.switch(model, name)
            with torch.no_grad():
                torch.testing.assert_close(logits(model), shard(whole(ids).logits), atol=1e-4, rtol=0)
            replace(model)
            if problem:
                with pytest.raises(UnsupportedError, match=problem):
                    logits(model)
            if problem in ("", again):
                if problem and any(owner.name == single for owner in hooks.switches_of(model)):
                    with pytest.raises(UnsupportedError, match="has, a part of a model that was switched to 'single'"):
                        ours.switch(model, name)
                    continue
                if problem:
                    ours.switch(model, name)
                result = logits(model)
                if kind == "llama":
                    ours.switch(model, "sdpa")
                    whole = model  # else the layer has the same weights
                with torch.no_grad():
                    torch.testing.assert_close(result, shard(whole(ids).logits), atol=1e-4, rtol=0)
    finally:
        ours.unregister()
        dist.destroy_process_group(alone)


@has_transformers
@pytest.mark.ranks(2)
def test_a_model_is_not_switched_in_its_forward_or_without_a_config_of_its_own(group: ProcessGroup) -> None:
    from tiny_models import tiny  # imports transformers

    name = ours.register(group)
    try:
        model, batch = tiny("llama"), ours.shard_batch({"input_ids": torch.arange(16)[None]}, group)
        ours.switch(model, name)
        for part in (model, model.model):
            hook = model.model.layers[0].register_forward_hook(lambda *_, part=part: ours.switch(part, "sdpa"))
            with pytest.raises(UnsupportedError, match=r"a forward of Llama\w+ is running"):
                model(**batch)
            hook.remove()
        model(**batch)
        model = tiny("llama")
        attention = model.model.layers[0].self_attn
        kind = type("Configured", (type(attention),), {"config": _NoConfig(attention.config)})
        del attention.config
        attention.__class__ = kind
        with pytest.raises(UnsupportedError, match="the config of Configured is no attribute of its own"):
            ours.switch(model, name)
        assert model.config._attn_implementation != name
        model(input_ids=torch.arange(16)[None])
    finally:
        ours.unregister()


@has_transformers
@pytest.mark.ranks(2)
def test_forwards_of_other_classes(group: ProcessGroup) -> None:
    """A subclass that names no arguments; a layer of which ``parametrize`` has made a subclass."""
    from tiny_models import tiny  # imports transformers

    class Unnamed(type(tiny("opt"))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    def shard(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(2, 1)[group.rank()]

    name, ids = ours.register(group), torch.arange(3, 19)[None]
    mask = (torch.arange(16) > 4).long()[None]
    try:
        model, batch = tiny("opt"), {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            wanted = model(**batch).logits
            ours.switch(model, name)
            model.__class__ = Unnamed
            result = model(**ours.shard_batch(batch, group)).logits
        torch.testing.assert_close(result[shard(mask) > 0], shard(wanted)[shard(mask) > 0], atol=1e-4, rtol=0)
        model = tiny("qwen3_next")
        with torch.no_grad():
            wanted = model(ids, use_cache=False).logits
            ours.switch(model, name)
            for layer in recurrent_layers.recurrent_layers(model):
                nn.utils.parametrize.register_parametrization(layer, "dt_bias", nn.Identity())
            result = model(**ours.shard_batch({"input_ids": ids}, group)).logits
        torch.testing.assert_close(result, shard(wanted), atol=1e-4, rtol=0)
    finally:
        ours.unregister()
