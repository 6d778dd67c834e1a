"""Drawn sequences of changes to models of transformers, FSDP2 and Megatron, with exceptions in them; all undone.

Two ranks of the fake backend: what is compared are owners, attributes, hooks, functions, registries and groups.
"""

import builtins
import copy
import gc
import importlib
import importlib.util
import io
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from caches import caches, kept_by
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny_models import tiny
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from tritoncomm.errors import CommError
from tritoncomm.integrations import changes, fsdp2
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import hooks, model_parts, recurrent_layers, registration

__all__ = ["draw"]

FAMILIES = ("qwen3_next", "qwen3_next", "mamba2")
NAMES = ("first", "second")
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
REGISTRIES = ALL_ATTENTION_FUNCTIONS._global_mapping, ALL_MASK_ATTENTION_FUNCTIONS._global_mapping


class Planted(BaseException):
    """As an interrupt comes: in the middle of a change."""


@contextmanager
def planted(place: str | None, count: int, is_once: bool = False) -> Iterator[None]:
    """Raise in the calls of a function that changes something behind the first ones, or in one of them alone."""
    owner, name = {
        "hook": (nn.Module, "register_forward_hook"),
        "pre hook": (nn.Module, "register_forward_pre_hook"),
        "remove": (RemovableHandle, "remove"),
        "attention": (PreTrainedModel, "set_attn_implementation"),
        "config": (ours, "deepcopy"),
        "attribute": (changes, "setattr"),
        "attribute back": (changes, "delattr"),
        "function": (recurrent_layers, "_over_shards"),
        "judge": (model_parts, "wrong_part"),
        None: (changes, "nothing"),
    }[place]
    function, calls, is_over = getattr(owner, name, vars(builtins).get(name)), 0, False

    def raises(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if (
            calls > count and not is_over and not (is_once and calls > count + 1)
        ):  # somebody may keep it, as a method of a handle
            raise Planted(place)
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, raises, create=True), suppress(Planted):
        yield
    is_over = True


@lru_cache
def template(family: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its logits, and its state."""
    logging.set_verbosity_error()
    model = tiny(family, 0, 4)
    if family != "mamba2":  # with a table that is chosen by the largest position
        config = copy.deepcopy(model.config)
        config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
        weights, model = model.state_dict(), type(model)(config)
        model.load_state_dict(weights)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    model = model.eval()
    return model, model(input_ids=IDS, use_cache=False).logits, state_of(model)


IDS = torch.arange(3, 11)[None]


def state_of(model: nn.Module) -> dict[str, Any]:
    """Names of attributes and numbers of hooks of every module, but for copied configs."""
    found = {}
    for path, module in model.named_modules():
        names = {name for name, value in vars(module).items() if not isinstance(value, PreTrainedConfig)}
        hooks = (len(value) for name, value in vars(module).items() if name.endswith("_hooks") or "_hooks_" in name)
        found[path] = names, sum(hooks)
    return found


def shared_state() -> dict[Any, int]:
    """Functions of the modules of models, and entries of registries, by identity."""
    folders = ("transformers.models.", "megatron.core.")
    holders = {name: vars(module) for name, module in sys.modules.items() if name.startswith(folders)}
    holders |= dict(zip(("attentions", "masks"), REGISTRIES, strict=True))
    return {
        (place, name): id(value)
        for place, holder in holders.items()
        for name, value in holder.items()
        if callable(value)
    }


class Model:
    """A model, and whether it should have logits of one process."""

    def __init__(self, family: str, model: Any) -> None:
        self.family, self.model = family, model

    @property
    def active(self) -> list[hooks.Switch]:
        return [found for found in hooks.switches_of(self.model) if found.is_on]


class Sequences(RuleBasedStateMachine):
    """Sequences of changes."""

    @initialize(order=st.sampled_from(["switch", "unregister", "drop"]))
    def begin(self, order: str) -> None:
        """Make the models and the groups."""
        self.order = order
        self.models = [Model(family, copy.deepcopy(template(family)[0])) for family in FAMILIES]
        self.before = shared_state()
        self.groups = [dist.new_group([0, 1]) for _ in range(2)]
        for name, group in zip(NAMES, self.groups, strict=True):
            ours.register(group, name=name)
        del group
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # torch keeps the groups of meshes
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        self.sharded: Any = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
        self.parameters = self.sharded._get_fsdp_state()._fsdp_param_groups[0]
        self.of_parameters = dict(vars(self.parameters))

    place = st.sampled_from(
        [*[None] * 9, "hook", "pre hook", "remove", "attention", "config", "attribute", "attribute back"]
        + ["function", "judge"]
    )
    number = st.integers(0, 12)

    @rule(name=st.sampled_from(NAMES), group=st.integers(0, 1), place=place, number=number)
    def register(self, name: str, group: int, place: str | None, number: int) -> None:
        with planted(place, number), suppress(CommError):
            ours.register(self.groups[group], name=name)

    @rule(name=st.none() | st.sampled_from(NAMES), place=place, number=number)
    def unregister(self, name: str | None, place: str | None, number: int) -> None:
        with planted(place, number), suppress(CommError):
            ours.unregister(name)

    @rule(index=st.integers(0, 2), name=st.sampled_from((*NAMES, "sdpa", "eager")), place=place, number=number)
    def switch(self, index: int, name: str, place: str | None, number: int) -> None:
        if self.models:
            with planted(place, number), suppress(CommError, ValueError):
                ours.switch(self.models[index % len(self.models)].model, name)
            self.run(index, False, None)

    @rule(index=st.integers(0, 9), labels=st.booleans(), interrupted=st.sampled_from([None, "lm_head", "out_proj"]))
    def run(self, index: int, labels: bool, interrupted: str | None) -> None:
        """Run a model: alone as one process does, over shards, or refused where its name is not registered."""
        if not self.models:
            return
        entry = self.models[index % len(self.models)]
        model = entry.model
        part = next(part for path, part in model.named_modules() if path.endswith(interrupted or "lm_head"))
        interrupt = mock.patch.object(part, "forward", side_effect=Planted) if interrupted else nullcontext()
        with planted(None, 0), interrupt:
            if not entry.active:
                if model.config._attn_implementation in NAMES:
                    return  # nobody has switched it to that
                found = model(input_ids=IDS, use_cache=False).logits
                wanted = template(entry.family)[1]
                assert model.config._attn_implementation != "sdpa" or torch.equal(found, wanted), "other logits"
                return
            name = entry.active[0].name
            group = registration.registered[name].group if name in registration.registered else self.groups[0]
            batch = {"input_ids": IDS} | ({"labels": IDS} if labels else {})
            try:
                model(**ours.shard_batch(batch, group))
            except (CommError, KeyError):
                functions = entry.active[0].functions
                assert name not in registration.registered or (functions is not None and functions.is_released)

    @rule(index=st.integers(0, 9))
    def generate(self, index: int) -> None:
        if self.models and not self.models[index % len(self.models)].active:
            model = self.models[index % len(self.models)].model
            if model.config._attn_implementation not in NAMES:
                model.generate(IDS, max_new_tokens=1, do_sample=False)

    @rule(index=st.integers(0, 9), is_saved=st.booleans())
    def copy(self, index: int, is_saved: bool) -> None:
        if self.models and len(self.models) < 6:
            entry = self.models[index % len(self.models)]
            if is_saved:
                torch.save(entry.model, buffer := io.BytesIO())
                model = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
            else:
                model = copy.deepcopy(entry.model)
            assert [found.name for found in hooks.switches_of(model) if found.is_on] == [
                found.name for found in entry.active
            ]
            self.models.append(Model(entry.family, model))

    @rule(index=st.integers(0, 9))
    def drop(self, index: int) -> None:
        """Drop a model, which nothing of ours keeps."""
        if len(self.models) > 1:
            entry = self.models.pop(index % len(self.models))
            reference = weakref.ref(entry.model)
            del entry
            gc.collect()
            assert reference() is None

    @rule(is_used=st.booleans(), place=place, number=st.integers(0, 3))
    def reduce(self, is_used: bool, place: str | None, number: int) -> None:
        with planted(place, number):
            (fsdp2.use if is_used else fsdp2.restore)(self.sharded)

    @precondition(lambda self: HAS_MEGATRON)
    @rule(cross_entropy=st.none() | st.booleans(), place=place, number=st.integers(0, 9))
    def patch(self, cross_entropy: bool | None, place: str | None, number: int) -> None:
        from tritoncomm.integrations import megatron

        with planted(place, number, is_once=True):  # names of modules that cannot be set stay as they are
            if cross_entropy is None:
                megatron.unpatch()
            else:
                megatron.patch(cross_entropy=cross_entropy)

    @invariant()
    def is_whole(self) -> None:
        """A model has one switch, to the attention that it has, with all of its hooks, or none that is on."""
        for entry in getattr(self, "models", ()):
            active = entry.active
            assert len(active) <= 1
            if entry.model.config._attn_implementation in NAMES:
                assert [found.name for found in active] == [entry.model.config._attn_implementation]
            if active and active[0].functions is not None and active[0].name in registration.registered:
                assert len(list(hooks_of(entry.model, active[0]))) == HOOKS[entry.family]

    def teardown(self) -> None:
        """Undo everything; what is left is what there was."""
        if not hasattr(self, "models"):
            return
        if self.order == "drop":
            del self.models[::2]
        if self.order != "switch":
            ours.unregister()
        for entry in self.models:
            ours.switch(entry.model, "sdpa")
        fsdp2.restore(self.sharded)
        ours.unregister()
        if HAS_MEGATRON:
            importlib.import_module("tritoncomm.integrations.megatron").unpatch()
        gc.collect()
        for entry in self.models:
            assert state_of(entry.model) == template(entry.family)[2], "hooks or attributes"
        changed = shared_state().items() ^ self.before.items()
        assert not changed, f"functions or registries: {sorted(map(str, changed))[:8]}"
        assert vars(self.parameters) == self.of_parameters, "parameter group"
        assert not list(recurrent_layers._owners) or self.models
        self.models.clear()
        del self.sharded, self.parameters, self.of_parameters
        references = list(map(weakref.ref, self.groups))
        while self.groups:
            dist.destroy_process_group(self.groups.pop())
        gc.collect()
        assert [reference() for reference in references] == [None, None], "groups"


def hooks_of(model: nn.Module, owner: hooks.Switch) -> Iterator[Any]:
    """Hooks of one switch."""
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if getattr(hooks._function_of(hook), "__self__", None) is owner:
                yield hook


HOOKS: dict[str, int] = {}


def draw(examples: int, steps: int) -> int:
    """Run drawn sequences; the number of them.

    Raises:
        AssertionError: something is left.
    """
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    if HAS_MEGATRON:
        with warnings.catch_warnings(action="ignore"):  # Megatron's own, and of versions that are not tested
            for name in ("tensor_parallel", "pipeline_parallel.p2p_communication", "transformer.transformer_layer"):
                importlib.import_module(f"megatron.core.{name}")
            megatron = importlib.import_module("tritoncomm.integrations.megatron")
            megatron.patch(cross_entropy=True)  # imports the rest
            megatron.unpatch()
    name = ours.register(dist.group.WORLD, name="counted")
    for family in set(FAMILIES):
        model = copy.deepcopy(template(family)[0])
        ours.switch(model, name)
        HOOKS[family] = len(list(hooks_of(model, hooks.switches_of(model)[0])))
    del model
    ours.unregister()
    own = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],  # shrinking would take minutes
    )  # fmt: skip
    run_state_machine_as_test(Sequences, settings=own)
    kept = nn.Module | dist.ProcessGroup
    assert [name for name, cache in caches() if any(isinstance(key, kept) for key in kept_by(cache))] == []
    return examples
