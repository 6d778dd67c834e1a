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
from tritoncomm.integrations import changes, recurrent_layers, rotary_tables, switching
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.changes import Change, Changes

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
        ("post", recurrent_layers.leave_model),
    ],
    "hybrid": [("pre", recurrent_layers._enter), ("post", ours._Untraced(recurrent_layers._leave))],
    "rotary": [("pre", rotary_tables._append), ("post", rotary_tables._cut)],
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
            with pytest.raises(UnsupportedError, match="is a part of a model that was switched to"):
                ours.switch(part, "sdpa")
        assert torch.equal(model(**ours.shard_batch({"input_ids": ids}, group)).logits, wanted)
        ours.switch(model, "sdpa")
        ours.switch(model.model, name)
        ours.switch(model, "sdpa")
        assert list(switching.switches_of(model)) == []
    finally:
        ours.unregister()


@has_transformers
@pytest.mark.ranks(2)
def test_a_model_that_was_switched_for_one_rank(group: ProcessGroup) -> None:
    from tiny_models import tiny  # imports transformers

    model, batch = tiny("llama"), {"input_ids": torch.arange(3, 19)[None]}
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
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
        assert [switch.name for switch in switching.switches_of(layer)] == [name]
        handle.remove()
        for each in (copied, model):
            ours.switch(each, "sdpa")
            assert switching.switches_of(each) == []
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
        assert switching.switches_of(model) == []
    finally:
        ours.unregister()
