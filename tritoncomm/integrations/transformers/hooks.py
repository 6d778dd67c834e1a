"""Hooks of a switched model, by which its forward checks a batch and hands it on, and their owner."""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.integrations.changes import Changes, outdated, outdated_end
from tritoncomm.integrations.transformers import forwards, losses, model_parts, recurrent_layers, rotary_tables
from tritoncomm.integrations.transformers.batch_notes import BatchNotes, notes_of
from tritoncomm.integrations.transformers.registration import check_bidirectional, registered, registration

__all__ = ["Followers", "Switch", "Untraced", "check_callers", "remove_unused", "switches_of"]

_OUTDATED = {"tritoncomm_registered", "tritoncomm_rotary"}  # attributes


class Switch:
    """Owner of what a model has for one name of ``register``: hooks, which are its methods, and functions.

    The hooks refer to it, so that a copy of the model, or one that was saved, has a Switch of its own.

    Attributes:
        name: in ``register``.
        is_on: until ``undo``; a hook that could not be removed does nothing.
        has_attention: whether the model has attention, so that its config says whether it still has the name.
        functions: owner of those of recurrent layers, and of packages; None without any.
    """

    _has_recurrent, _takes_whole = True, False  # in models that an earlier release has saved

    def __init__(self, model: nn.Module, outer: Any, name: str, has_attention: bool) -> None:
        """Add the hooks to a model, and to the outermost model of transformers in it.

        Raises:
            BaseException: whatever a change raises; then all are undone.
        """
        parts = model_parts.language_parts(outer)
        self.name, self.has_attention, self.is_on = name, has_attention, True
        self._is_sharded = registered[name].group.size() > 1
        self._is_composite = model_parts.text_config(outer.config) is not outer.config
        self._is_causal = all(getattr(module, "is_causal", True) for module in parts)
        # How the model numbers positions by its padding mask; None if it does not.
        self._counting = model_parts.counts_unpadded(outer)
        self._takes_whole = model_parts.language_model_path(outer) is not None
        layers = recurrent_layers.recurrent_layers(outer)
        self._parts = _JudgedParts(name, has_attention)
        self._changes = Changes()
        with self._changes:
            self._has_recurrent = bool(layers)
            self.functions = recurrent_layers.Functions.of(outer, name)
            if self.functions is not None:
                self._changes.add(self.functions.release)
            for handle in self._add_hooks(outer, parts, layers):
                self._changes.add(handle.remove)
            with_loss = [model] if model is outer else [model, outer]
            for module in with_loss:
                for handle in self._hook_loss(module):
                    self._changes.add(handle.remove)

    def undo(self) -> None:
        """Give up the functions, then remove the hooks, which lead here; ``remove_unused`` removes those of a copy."""
        self.is_on = False
        if self.functions is not None:
            self.functions.release()
        self._changes.undo()

    def take_over(self, changes: Changes) -> None:
        """Undo further changes to the model together with those of this switch."""
        self._changes.extend(changes)

    def is_active(self, model: Any) -> bool:
        """Whether a model still computes over shards by this switch: not after ``set_attn_implementation``.

        Raises:
            UnsupportedError: the model and its text model have different attentions.
        """
        if not self.is_on or not self.has_attention:
            return self.is_on
        name = model.config._attn_implementation
        text_name = model_parts.text_config(model.config)._attn_implementation if self._is_composite else name
        if name != text_name and self.name in (name, text_name):
            raise UnsupportedError(
                f"{self.name}: {type(model).__name__} has the attention {name!r}, and its text model {text_name!r}; "
                "call switch(model, name) with the whole model"
            )
        return name == self.name

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether a model contains the one that was switched."""
        return any(
            _function_of(hook) == self._check_batch
            for module in model.modules()
            for hook in module._forward_pre_hooks.values()
        )

    def __getstate__(self) -> dict[str, Any]:
        # A copy of one layer would take the hooks of all others along. A hook has the number of its handle.
        # Nor what was judged: the copy is judged again.
        return {**vars(self), "_parts": None, "_changes": Changes(), "next_hook": RemovableHandle.next_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RemovableHandle.next_id = max(RemovableHandle.next_id, state.pop("next_hook"))
        vars(self).update(state)
        self._parts = _JudgedParts(self.name, self.has_attention)

    def _add_hooks(self, outer: Any, parts: list[nn.Module], recurrent: list[nn.Module]) -> Iterator[RemovableHandle]:
        """Add hooks one by one, and yield their handles, so that a failure can remove those before.

        Models check the batch and hand it down, recurrent layers compute over shards, rotary tables see the largest
        position of the batch, and models of images or audio refuse to run.
        """
        for layer in recurrent:
            yield layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
            # Also if the forward raises, or is stopped by a checkpoint that has recomputed enough.
            yield layer.register_forward_hook(self._exit_layer, always_call=True)
        for table in rotary_tables.chosen_by_largest(parts) if self._is_sharded else ():
            yield table.register_forward_pre_hook(self._append_largest, with_kwargs=True)
            yield table.register_forward_hook(self._cut_largest)
        yield outer.register_forward_pre_hook(self._check_batch, with_kwargs=True)
        pretrained_model = importlib.import_module("transformers").PreTrainedModel
        for module in parts:
            if isinstance(module, pretrained_model):
                yield module.register_forward_pre_hook(self._traced(self._begin), with_kwargs=True)
                yield module.register_forward_hook(self._traced(self._end), always_call=True)
        for tower in model_parts.towers(outer):
            yield tower.register_forward_pre_hook(self._refuse_tower)

    def _hook_loss(self, module: nn.Module) -> Iterator[RemovableHandle]:
        """Watch the loss of a model where ``switch`` got it: in the model itself, or in a module around it."""
        pretrained_model = importlib.import_module("transformers").PreTrainedModel
        paths = tuple(path for path, part in module.named_modules() if isinstance(part, pretrained_model))
        is_plain = losses.is_plain(module)
        yield module.register_forward_pre_hook(self._traced(partial(self._watch_loss, paths, is_plain)))
        check = self._traced(partial(self._check_loss, paths, is_plain))
        yield module.register_forward_hook(check, with_kwargs=True, always_call=True)

    def _traced(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook of a model as torch.compile shall see it."""
        # A graph would keep the state of this thread that it was traced with; layers are traced by themselves.
        return hook if self.functions is None and not self._takes_whole else Untraced(hook)

    def _check_batch(self, model: Any, args: Any, kwargs: Any) -> None:
        """Reject a batch that the model would take wrongly."""
        if not self.is_active(model) or registration(self.name).group.size() == 1:
            return
        if not is_compiling():
            self._parts.check(model)
        if not self._is_causal:
            label = f"{self.name}: {type(model).__name__}"
            check_bidirectional(label, kwargs.get("position_ids"), registration(self.name).group)

    def _begin(self, model: Any, args: Any, kwargs: Any) -> Any:
        """Reject a batch that ``shard_batch`` did not make; attach its shard to the recurrent layers."""
        if self.name not in registered or not self.is_active(model):
            return None
        label = f"{self.name}: {type(model).__name__}"
        if registered[self.name].group.size() > 1 and (problem := model_parts.wrong_addition(model)):
            raise UnsupportedError(f"{label}: {problem}")
        batch = forwards.whole_batch()
        if forwards.is_inside(model) or (batch is not None and not batch.is_handed_on):
            return None
        names = recurrent_layers.parameters_of(type(model))
        arguments = dict(zip(names, args, strict=False)) | kwargs
        ours = registered[self.name]
        positions = arguments.get("position_ids")
        if ours.group.size() > 1 and not self._is_sharded:
            raise UnsupportedError(f"{label} was switched for one rank; call switch(model, {self.name!r}) again")
        notes = notes_of(positions, label)
        if ours.group.size() == 1 and notes is None:
            return None  # one rank has all positions, whoever made the batch
        if not ours.own_positions:
            ours.check_positions(model, positions)
        if notes is None:  # of an attention with positions of its own: layers get a mask without padding
            notes = BatchNotes().complete(torch.ones(1, 1), None)
        _check_rows(label, notes, arguments)
        if ours.group.size() > 1 and not is_compiling() and batch is None:
            # Between graphs torch.compile would trace the check, which reads source.
            check: Any = torch.compiler.disable(check_callers) if "torch._dynamo" in sys.modules else check_callers
            check(self.name, model, arguments)
        # ``notes.counted`` has the positions of the formula "product", for a batch with padding.
        if self._counting == "other" and notes.counted is not None:
            raise UnsupportedError(f"{label} numbers positions by its padding mask; pass position_ids to shard_batch")
        forwards.enter_model(model, notes, ours.group.size() > 1)
        has_mask = kwargs.get("attention_mask") is not None or "attention_mask" not in names[len(args) :]
        if notes.documents is not None and not has_mask:
            # A mask of ones, as without any transformers looks for documents itself, in the positions of a shard.
            kwargs = {**kwargs, "attention_mask": positions.new_ones(()).expand(notes.shape or ())}
        if isinstance(kwargs.get("shift_labels"), Tensor):  # the loss views them; rows with a step are not contiguous
            kwargs = {**kwargs, "shift_labels": kwargs["shift_labels"].contiguous()}
        if self.functions is not None and self._has_recurrent:
            kwargs = recurrent_layers.keywords(model, kwargs)
        if self._counting == "product" and notes.counted is not None:
            index = names.index("position_ids") if "position_ids" in names else len(args)
            if index < len(args):
                args = (*args[:index], notes.counted, *args[index + 1 :])
            else:
                kwargs = {**kwargs, "position_ids": notes.counted}
        return args, kwargs

    def _end(self, model: Any, *_: Any) -> None:
        """Forget the batch of a forward, also where it has raised."""
        forwards.exit_model(model)

    def _refuse_tower(self, tower: Any, _: Any) -> None:
        """Reject images and audio in a forward over shards."""
        if self.name in registered and registered[self.name].group.size() > 1 and forwards.is_inside(tower):
            raise UnsupportedError(
                f"{self.name}: {type(tower).__name__}: images, videos and audio are no part of a shard; pass the whole "
                "batch, model(**batch), without shard_batch"
            )

    def _watch_loss(self, paths: tuple[str, ...], is_plain: bool, module: Any, _: Any) -> None:
        """Watch what a forward does with its labels."""
        if self.name in registered and self.is_active(module):
            models = [module.get_submodule(path) for path in paths]
            losses.watch(module, models, is_plain, forwards.is_running)

    def _check_loss(self, paths: tuple[str, ...], is_plain: bool, module: Any, _: Any, kwargs: Any, out: Any) -> None:
        """Reject a loss of which nobody knows that shards add up to it."""
        calls = losses.end([module.get_submodule(path) for path in paths], module)
        if calls is None or out is None or self.name not in registered:
            return
        is_sharded = registered[self.name].group.size() > 1
        # Else one rank has all, of whatever batch.
        if is_sharded or notes_of(kwargs.get("position_ids"), self.name) is not None:
            losses.traced(losses.check, is_plain)(module, calls, kwargs, out, is_sharded, self.name)

    def _enter_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the functions of a layer compute over shards."""
        if not self.is_on:
            return None
        label = f"{self.name}: {type(layer).__name__}"
        if self.name not in registered or self.functions is None or self.functions.is_released:
            raise ArgumentError(f"{label}: {self.name!r} is not registered; call register(), then switch(model, name)")
        ours = registered[self.name]
        return recurrent_layers.enter_layer(layer, args, kwargs, ours.group, ours.functions, label)

    def _exit_layer(self, layer: nn.Module, _: Any, result: Any) -> None:
        """Let the functions compute as before."""
        recurrent_layers.exit_layer(layer, result, self.name)

    def _append_largest(self, table: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let a rotary table see the largest position of the whole batch."""
        return rotary_tables.append_largest(table, args, kwargs, self.name) if self.is_on else None

    def _cut_largest(self, table: nn.Module, _: Any, result: Any) -> Any:
        """Leave that position out of the table."""
        return rotary_tables.cut_largest(table, result) if self.is_on else None


class Followers:
    """Further hooks of a model, the methods of a subclass, that go with the hooks of its switch.

    Attributes:
        switch: their owner.
    """

    def __init__(self, switch: Switch, changes: Changes) -> None:
        """Hand over the changes that have added the hooks."""
        self.switch = switch
        switch.take_over(changes)


class _JudgedParts:
    """Parts of a switched model that were found right; where some are others since, the model is judged again."""

    def __init__(self, name: str, has_attention: bool) -> None:
        self._name, self._has_attention = name, has_attention
        # The modules' dicts of children, their values when they were found right, and the modules that have a config.
        self._live_children: list[dict[str, Any]] = []
        self._judged_children: list[tuple[Any, ...]] = []
        self._with_config: list[Any] = []

    def check(self, model: Any) -> None:
        """Reject parts that were replaced since the switch, unless they are right over shards, too."""
        # Compared by identity, in a fifth of the time that a walk over the modules takes.
        current = [tuple(children.values()) for children in self._live_children]
        if not self._live_children or current != self._judged_children:
            live_children = [module._modules for module in model.modules()]
            judged_children = [tuple(children.values()) for children in live_children]
            self._judge(model)  # raises: then the next call judges again
            self._live_children, self._judged_children = live_children, judged_children
        if not self._has_attention:
            return
        by_config = {id(module.config): module for module in self._with_config}  # a few objects
        for module in by_config.values():
            if (name := module.config._attn_implementation) != self._name:
                raise UnsupportedError(
                    f"{self._name}: {type(module).__name__} of {type(model).__name__} has the attention {name!r}: it "
                    "was replaced, or is a part of another model, too; call switch(model, name) again"
                )

    def _judge(self, model: Any) -> None:
        """Reject a model whose parts, some of them new, are not those that ``switch`` would accept and add hooks to."""
        parts = model_parts.language_parts(model)
        layers = recurrent_layers.recurrent_layers(model)
        if problem := model_parts.wrong_part(
            model, registered[self._name].attention, sharded=True, sharded_layers=layers
        ):
            raise UnsupportedError(f"{self._name}: {type(model).__name__}: {problem}")
        for module in (*layers, *rotary_tables.chosen_by_largest(parts), *model_parts.towers(model)):
            if not any(owner.name == self._name and owner.is_on for owner in _switches_at(module)):
                raise UnsupportedError(
                    f"{self._name}: {type(module).__name__} of {type(model).__name__} is not the one that was there "
                    "when the model was switched; call switch(model, name) again"
                )
        config_class = importlib.import_module("transformers").PreTrainedConfig
        self._with_config = [part for part in parts if isinstance(getattr(part, "config", None), config_class)]


class Untraced:
    """Hook that torch.compile does not trace, and that a model can be saved with."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self._untraced = torch.compiler.disable(func)

    def __call__(self, *args: Any) -> Any:
        return self._untraced(*args)

    def __reduce__(self) -> Any:
        return Untraced, (self.func,)


def switches_of(model: nn.Module) -> list[Switch]:
    """Return the switches of which a model, or a module in it, has hooks."""
    return list({id(owner): owner for module in model.modules() for owner in _switches_at(module)}.values())


def _switches_at(module: nn.Module) -> Iterator[Switch]:
    """Yield the owner of each hook of a module that is one of ours."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        owner = getattr(_function_of(hook), "__self__", None)
        if isinstance(owner, Switch):
            yield owner


def remove_unused(modules: Iterable[nn.Module]) -> None:
    """Remove hooks of switches that are not on, and hooks and attributes of an earlier release in a saved model."""
    for module in modules:
        before = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
        after = module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called
        for hooks, *flags in (before, after):
            for key in [key for key, hook in hooks.items() if _is_unused(_function_of(hook))]:
                for entries in (hooks, *flags):
                    entries.pop(key, None)
        for name in _OUTDATED & vars(module).keys():
            delattr(module, name)


def _is_unused(function: Any) -> bool:
    """Whether nobody needs a hook."""
    owner = getattr(function, "__self__", None)
    owner = owner.switch if isinstance(owner, Followers) else owner
    if isinstance(owner, Switch):
        return not owner.is_on and (owner.functions is None or owner.functions.is_released)
    return function in (outdated, outdated_end)


def _function_of(hook: Any) -> Any:
    """Return the function that a hook calls."""
    while isinstance(hook, partial | Untraced):
        hook = hook.func
    return hook


def _check_rows(label: str, notes: BatchNotes, arguments: dict[str, Any]) -> None:
    """Reject tokens of other rows or positions than those of the batch that ``shard_batch`` made."""
    tokens = arguments.get("inputs_embeds") if arguments.get("input_ids") is None else arguments.get("input_ids")
    if isinstance(tokens, Tensor) and notes.shape is not None and tuple(tokens.shape[:2]) != notes.shape:
        raise ShapeError(
            f"{label}: tokens {list(tokens.shape)} with position_ids of {notes.shape[0]} rows of {notes.shape[1]} "
            "positions; slice the rows of all entries of shard_batch alike"
        )


def check_callers(name: str, model: Any, arguments: dict[str, Any]) -> None:
    """Reject labels for modules around a model that may add to its loss, unless hooks of theirs watch the loss."""
    around = list(model_parts.callers(model))
    if all(names.get("labels") is None for names in (arguments, *(names for _, names in around))):
        return
    watching = set(map(id, losses.owners([model, *(module for module, _ in around)])))
    for module, _ in reversed(around):
        if id(module) in watching:
            return
        if problem := losses.wrong_caller(module):
            raise UnsupportedError(losses.REFUSED_LOSS.format(label=name, problem=problem))
