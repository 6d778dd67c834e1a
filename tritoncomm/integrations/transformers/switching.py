"""``switch``: a model of transformers is judged, then it gets an attention and hooks of ours, or gives them back."""

import importlib
import warnings
from copy import deepcopy
from typing import Any
from weakref import ref

import torch

from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations.changes import Changes
from tritoncomm.integrations.transformers import forwards, losses, model_parts, recurrent_layers
from tritoncomm.integrations.transformers.attention import registries
from tritoncomm.integrations.transformers.hooks import Switch, remove_unused, switches_of
from tritoncomm.integrations.transformers.registration import registered
from tritoncomm.integrations.transformers.whole_batches import WholeBatches

__all__ = ["switch"]


def switch(model: Any, name: str, *, unverified: bool = False) -> None:
    """Give one model the attention ``name``, an own one of ``register`` or one of transformers.

    ``model.set_attn_implementation`` writes into the config object. ``switch`` copies the configs of the model and of
    its submodules first, so that other models of the same config object keep their attention.

    A model around a language model, as vision-language ones are, keeps the attention of its towers. It takes a whole
    batch, ``model(**batch)`` with images and labels on every rank of the group, and returns logits ``[b, s, words]``
    and the loss of this rank's positions; losses and gradients of the ranks add up.

    A model is accepted by what it is known to contain: attention that is full, sliding or chunked and goes through
    transformers' registry, and otherwise layers that work on positions one by one. ``unverified=True`` runs a model of
    which that is not known, and warns: compare its logits with those of one process first.

    Raises:
        ArgumentError: ``model`` is no model of transformers, or nothing has the name.
        UnsupportedError: transformers cannot change the attention of this model; or the model has a part that gives
            other numbers over shards: a state or a convolution that crosses them, positions or a mask of its own, a
            loss or noise that knows the length; or it is not known to have none.
    """
    model = dict(model.named_children()).get("_orig_mod", model) if isinstance(model, torch.nn.Module) else model
    if not hasattr(model, "set_attn_implementation"):
        raise ArgumentError(f"switch: needs a model of transformers, not {type(model).__name__}")
    ours = registered.get(name)
    is_sharded = ours is not None and ours.group.size() > 1
    recurrent = [] if ours is None else recurrent_layers.recurrent_layers(model)
    problem = None if ours is None else model_parts.wrong_part(model, ours.attention, is_sharded, recurrent)
    if problem is not None:
        raise UnsupportedError(f"switch: {type(model).__name__}: {problem}")
    unknown = model_parts.unknown_part(model) if is_sharded else None
    has_attention = model_parts.has_attention(model) or not recurrent_layers.recurrent_layers(model)
    is_of_hub = has_attention and "/" in name  # a kernel of the Hugging Face Hub
    if name not in registries()[0] and name != "eager" and not is_of_hub:
        raise ArgumentError(f"switch: transformers has no attention {name!r}, only {sorted(registries()[0])}")
    outer = model_parts.outermost(model.modules()) or model
    if forwards.is_running(outer) or forwards.is_running(model):
        raise UnsupportedError(f"switch: a forward of {type(model).__name__} is running, and would compute with both")
    switches = switches_of(model)
    owners = [owner for owner in switches if owner.is_on]
    others = [owner for owner in owners if not owner.belongs_to(model)]
    if others:
        raise UnsupportedError(
            f"switch: {type(model).__name__} is, or has, a part of a model that was switched to {others[0].name!r}; "
            "give that one to switch() first"
        )
    # What is changed here is undone if this raises, and only then: configs stay copied, as somebody may change them
    # later.
    with Changes() as configs:
        _copy_configs(configs, model)
        if has_attention:
            _set_attention(model, name)
        if unknown is not None and not unverified:  # after ``_set_attention``, whose errors tell more
            raise UnsupportedError(
                f"switch: {type(model).__name__}: {unknown}, so that nobody knows whether it works over shards of the "
                "sequence; compare its logits with those of one process under switch(model, name, unverified=True)"
            )
        if unknown is not None:
            warnings.warn(f"switch: {type(model).__name__}: {unknown}: runs unverified over shards", stacklevel=2)
        if ours is not None:
            added = Switch(model, outer, name, has_attention)
            configs.add(added.undo)
            WholeBatches.attach(outer, added)
            ours.verdicts.update(dict.fromkeys(model.modules(), ref(added)))
    # The new switch stands. End the switches before it, also those that an interrupt has left half undone, and then
    # remove what no switch uses any more. ``undo`` runs the last entry first, and goes on if one raises.
    ended = Changes()
    ended.add(lambda: remove_unused(model.modules()))
    ended.add(lambda: losses.forget(model.modules()))
    for owner in switches:
        ended.add(owner.undo)
    ended.undo()


def _copy_configs(changes: Changes, model: Any) -> None:
    """Give the modules of a model copies of their configs; modules that share one share the copy.

    Also where no attention is set: the model's own ``set_attn_implementation`` may write into them later.
    """
    config_class = importlib.import_module("transformers").PreTrainedConfig
    memo: dict[int, Any] = {}
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, config_class):
                changes.set_attribute(module, attribute, deepcopy(value, memo))


def _set_attention(model: Any, name: str) -> None:
    """Write the attention ``name`` into the configs of a model, which ``_copy_configs`` has copied."""
    model.set_attn_implementation(_implementations(model, name) if name in registered else name)
    if model.config._attn_implementation != name:  # transformers warns only
        raise UnsupportedError(f"switch: transformers cannot change the attention of {type(model).__name__}")
    config_class = importlib.import_module("transformers").PreTrainedConfig
    for module in model_parts.language_parts(model):  # transformers misses a layer with another config than the model
        config: Any = getattr(module, "config", None)
        if isinstance(config, config_class) and config._attn_implementation != name:
            if config is not vars(module).get("config"):  # of a property or the class: _copy_configs has made no copy
                raise UnsupportedError(
                    f"switch: the config of {type(module).__name__} is no attribute of its own, so that it cannot have "
                    "a copy with another attention"
                )
            config._attn_implementation = name


def _implementations(model: Any, name: str) -> str | dict[str, str]:
    """Return the attention for each config of a model: towers keep theirs, as they have all positions."""
    towers = {id(getattr(part, "config", None)) for tower in model_parts.towers(model) for part in tower.modules()}
    names = {"": name}
    for key in model.config.sub_configs:
        config: Any = getattr(model.config, key, None)
        if config is not None and id(config) in towers:
            current = config._attn_implementation
            names[key] = registered[current].attention if current in registered else current
        else:
            names[key] = name
    return names
