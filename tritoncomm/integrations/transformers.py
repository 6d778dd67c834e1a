"""Ulysses sequence parallelism for Hugging Face transformers: an attention implementation, and a shard of every batch.

``switch(model, register(group))``, ``model(**shard_batch(batch, group))``: each rank computes the logits and the loss
of its positions, the gradients add up over the group. The attention refuses a batch that ``shard_batch`` did not make.
"""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from tritoncomm import ulysses
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.groups import resolve_sequence
from tritoncomm.integrations import losses, model_parts, recurrent_layers, rotary_tables
from tritoncomm.integrations.batch_notes import DOCUMENTS, MADE, BatchNotes, mark, marked, noted
from tritoncomm.integrations.sequence_batch import shard_batch
from tritoncomm.ulysses import dropout_by_rank

__all__ = ["NAME", "dropout_by_rank", "group_of", "register", "shard_batch", "switch", "unregister"]

NAME = "tritoncomm_ulysses"
# Arguments of an attention function that change nothing, or that are done already: by the mask, or around attention.
_TAKEN = frozenset(
    ["cache_position", "dropout", "is_causal", "labels", "logits_to_keep", "num_items_in_batch", "output_attentions"]
    + ["output_hidden_states", "output_router_logits", "position_ids", "return_dict", "scaling", "shift_labels"]
    + ["sliding_window", "use_cache"]
)
_NOT_IN_A_NAME = ("flash", "/", "|")  # transformers takes such names for implementations of its own or of a hub
_HOOKS = "tritoncomm_hooks"  # attribute of a model that `switch` got: handles, which its copies have of their own
_registered: "dict[str, _Implementation]" = {}


def register(
    group: ProcessGroup | None = None, *, attention: str = "sdpa", name: str = NAME, own_positions: bool = False
) -> str:
    """Add an attention implementation that exchanges sequence for heads around ``attention``; returns ``name``.

    Args:
        group: the ranks that hold the sequence; the tensor group by default, unless there is a context axis.
        attention: the implementation that attends to all positions, under its name in transformers.
        name: for ``switch``, or for ``attn_implementation=`` of a model that shares its config with no other.
        own_positions: accept ``position_ids`` that ``shard_batch`` did not make. Nothing then notices a batch that is
            not sharded.

    Raises:
        ArgumentError: ``attention`` is not registered, or ``name`` is taken or means something to transformers.
        UnsupportedError: ``eager``, which every model defines for itself.
    """
    attentions, masks = _registries()
    if attention == "eager":
        raise UnsupportedError("register: attention 'eager' is a function of each model; use 'sdpa'")
    if attention not in attentions:
        raise ArgumentError(f"register: transformers has no attention {attention!r}, only {sorted(attentions)}")
    if not isinstance(name, str) or not name or name == "eager" or any(part in name for part in _NOT_IN_A_NAME):
        raise ArgumentError(
            f"register: name {name!r}: transformers reads 'flash' as a kind of attention, '/' as a repository and '|' "
            "as the end of a prefix, 'eager' is a function of each model, and '' is none"
        )
    if name in attentions:
        raise ArgumentError(f"register: {name!r} is registered already; unregister() it or pass another name")
    group = resolve_sequence(group, "register")
    if group.size() == 1 and torch.distributed.get_world_size() > 1:
        warnings.warn(
            f"register: the sequence group has one rank of {torch.distributed.get_world_size()}, so no sequence is "
            "sharded; initialize(context=...) with the number of ranks that share one",
            stacklevel=2,
        )
    inner_mask = masks.get(attention)
    added = _Implementation(group, name, attention, attentions[attention], inner_mask, own_positions)
    type(attentions).register(name, added.attend)
    type(masks).register(name, added.make_mask)
    _registered[name] = added
    return name


def switch(model: Any, name: str, *, unverified: bool = False) -> None:
    """Give one model the attention ``name``, an own one of ``register`` or one of transformers.

    ``model.set_attn_implementation`` writes into the config object. ``switch`` copies the configs of the model and of
    its submodules first, so that other models of the same config object keep their attention.

    A model is accepted by what it is known to contain: attention that is full, sliding or chunked and goes through
    transformers' registry, and otherwise layers that work on positions one by one. ``unverified=True`` runs a model of
    which that is not known, and warns: compare its logits with those of one process first.

    Raises:
        ArgumentError: ``model`` is no model of transformers.
        UnsupportedError: transformers cannot change the attention of this model; or the model has a part that gives
            other numbers over shards: a state or a convolution that crosses them, positions or a mask of its own, a
            loss or noise that knows the length; or it is not known to have none.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ArgumentError(f"switch: needs a model of transformers, not {type(model).__name__}")
    ours = _registered.get(name)
    is_sharded = ours is not None and ours.group.size() > 1
    recurrent = [] if ours is None else recurrent_layers.recurrent_layers(model)
    problem = None if ours is None else model_parts.wrong_part(model, ours.attention, is_sharded, recurrent)
    if problem is not None:
        raise UnsupportedError(f"switch: {type(model).__name__}: {problem}")
    unknown = model_parts.unknown_part(model) if is_sharded else None
    has_attention = model_parts.has_attention(model) or not recurrent_layers.recurrent_layers(model)
    if not has_attention and name not in _registries()[0] and name != "eager":
        raise ArgumentError(f"switch: transformers has no attention {name!r}, only {sorted(_registries()[0])}")
    with _attention(model, name, has_attention):
        if unknown is not None and not unverified:
            raise UnsupportedError(
                f"switch: {type(model).__name__}: {unknown}, so that nobody knows whether it works over shards of the "
                "sequence; compare its logits with those of one process under switch(model, name, unverified=True)"
            )
        if unknown is not None:
            warnings.warn(f"switch: {type(model).__name__}: {unknown}: runs unverified over shards", stacklevel=2)
    outer = model_parts.outermost(model.modules()) or model
    for handle in vars(outer).pop(_HOOKS, ()):
        handle.remove()
    recurrent_layers.release(outer)
    rotary_tables.release(outer)
    if ours is None:
        return
    ours.judged.update(model.modules())
    recurrent_layers.bind(outer, name, ours.group)
    if is_sharded:
        rotary_tables.bind(model_parts.language_parts(outer), name)
    handles: list[RemovableHandle] = []
    setattr(outer, _HOOKS, handles)  # the next switch removes them, also those of one that was interrupted
    handles.extend(_hook(outer, name, has_attention))
    for module in (model,) if model is outer else (model, outer):
        handles.extend(_hook_loss(module, name, has_attention))


@contextmanager
def _attention(model: Any, name: str, has_attention: bool) -> Iterator[None]:
    """Give a model copies of its configs with the attention ``name``; put its configs back if anything raises."""
    kind = importlib.import_module("transformers").PreTrainedConfig
    copies: dict[int, Any] = {}
    configs = [
        (module, attribute, value)
        for module in model.modules()
        for attribute, value in vars(module).items()
        if isinstance(value, kind)
    ]
    try:
        for module, attribute, value in configs:
            setattr(module, attribute, deepcopy(value, copies))
        if has_attention:
            model.set_attn_implementation(name)
            if model.config._attn_implementation != name:  # transformers warns only
                raise UnsupportedError(f"switch: transformers cannot change the attention of {type(model).__name__}")
            for module in model_parts.language_parts(model):  # copied layers have a config that transformers misses
                config: Any = vars(module).get("config")
                if isinstance(config, kind) and config._attn_implementation != name:
                    config._attn_implementation = name
        yield
    except BaseException:
        for module, attribute, value in configs:
            setattr(module, attribute, value)
        raise


def _hook(outer: Any, name: str, has_attention: bool) -> Iterator[RemovableHandle]:
    """Check every batch of a model where it comes in: in its forward, or in that of a model inside of it."""
    parts = model_parts.language_parts(outer)
    is_causal = all(getattr(module, "is_causal", True) for module in parts)
    check = partial(_check_call, name, is_causal, has_attention)
    yield outer.register_forward_pre_hook(check, with_kwargs=True)
    kind = importlib.import_module("transformers").PreTrainedModel
    begin = partial(_begin, name, has_attention, model_parts.counts_unpadded(outer))
    leave = recurrent_layers.leave_model
    if recurrent_layers.is_bound(outer, name):
        # A graph would keep the state of this thread that it was traced with; layers are traced by themselves.
        begin, leave = _Untraced(begin), _Untraced(leave)
    for module in parts:
        if isinstance(module, kind):
            yield module.register_forward_pre_hook(begin, with_kwargs=True)
            yield module.register_forward_hook(leave, always_call=True)
    for tower in model_parts.towers(outer):
        yield tower.register_forward_pre_hook(partial(_refuse_tower, name))


def _hook_loss(module: Any, name: str, has_attention: bool) -> Iterator[RemovableHandle]:
    """Watch the loss of a model where ``switch`` got it: in the model itself, or in a module around it."""
    kind = importlib.import_module("transformers").PreTrainedModel
    paths = tuple(path for path, part in module.named_modules() if isinstance(part, kind))
    is_plain = losses.is_plain(module)
    begin: Any = partial(_watch, name, has_attention, paths, is_plain)
    leave: Any = partial(_check_loss, name, paths, is_plain)
    if recurrent_layers.is_bound(module, name):  # the graph breaks around its forward already
        begin, leave = _Untraced(begin), _Untraced(leave)
    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(leave, with_kwargs=True, always_call=True)


def _watch(name: str, has_attention: bool, paths: tuple[str, ...], is_plain: bool, module: Any, _: Any) -> None:
    """Watch what the forward of a switched model does with its labels."""
    if name in _registered and _is_active(name, has_attention, module):
        models = [module.get_submodule(path) for path in paths]
        losses.watch(module, models, is_plain, recurrent_layers.is_running)


def _check_loss(name: str, paths: tuple[str, ...], is_plain: bool, module: Any, _: Any, kwargs: Any, out: Any) -> None:
    """Reject a loss of which nobody knows that shards add up to it."""
    calls = losses.end([module.get_submodule(path) for path in paths], module)
    if calls is None or out is None or name not in _registered:
        return
    is_sharded = _registered[name].group.size() > 1
    if is_sharded or noted(kwargs.get("position_ids"), name) is not None:  # else one rank has all, of whatever batch
        losses.traced(losses.check, is_plain)(module, calls, kwargs, out, is_sharded, name)


def _refuse_tower(name: str, tower: Any, _: Any) -> None:
    """Reject images and audio in a forward over shards."""
    if name in _registered and _registered[name].group.size() > 1 and recurrent_layers.is_inside(tower):
        raise UnsupportedError(
            f"{name}: {type(tower).__name__}: images, videos and audio are not supported over sequence shards; pass "
            "batches of text alone"
        )


class _Untraced:
    """Hook that torch.compile does not trace, and that a model can be saved with."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook, self._untraced = hook, torch.compiler.disable(hook)

    def __call__(self, *args: Any) -> Any:
        return self._untraced(*args)

    def __reduce__(self) -> Any:
        return _Untraced, (self._hook,)


def _is_active(name: str, has_attention: bool, model: Any) -> bool:
    """Whether a model that ``switch`` got computes over shards still."""
    return model.config._attn_implementation == name if has_attention else recurrent_layers.is_bound(model, name)


def _begin(name: str, has_attention: bool, counting: str | None, model: Any, args: Any, kwargs: Any) -> Any:
    """Reject a batch that ``shard_batch`` did not make; hand its positions down to recurrent layers."""
    if name not in _registered or not _is_active(name, has_attention, model) or recurrent_layers.is_inside(model):
        return None
    label = f"{name}: {type(model).__name__}"
    names = recurrent_layers.parameters_of(type(model))
    arguments = dict(zip(names, args, strict=False)) | kwargs
    ours, positions = _registered[name], arguments.get("position_ids")
    notes = noted(positions, label)
    if ours.group.size() == 1 and notes is None:
        return None  # one rank has all positions, whoever made the batch
    if not ours.own_positions:
        ours.check_positions(model, positions)
    if notes is None:
        notes = BatchNotes().complete(torch.ones(1, 1), None)
    _check_rows(label, notes, arguments)
    if ours.group.size() > 1 and not is_compiling():
        # Between graphs torch.compile would trace the check, which reads source.
        check: Any = torch.compiler.disable(_check_callers) if "torch._dynamo" in sys.modules else _check_callers
        check(name, model, arguments)
    if counting == "other" and notes.counted is not None:
        raise UnsupportedError(f"{label} numbers positions by its padding mask; pass position_ids to shard_batch")
    recurrent_layers.enter_model(model, notes)
    if notes.documents is not None and "attention_mask" in names[len(args) :] and kwargs.get("attention_mask") is None:
        # Else transformers looks for documents, too, and the masks of each would have those of all.
        kwargs = {**kwargs, "attention_mask": positions.new_ones(()).expand(notes.shape or ())}
    if isinstance(kwargs.get("shift_labels"), Tensor):  # the loss views them; rows with a step are not contiguous
        kwargs = {**kwargs, "shift_labels": kwargs["shift_labels"].contiguous()}
    if recurrent_layers.is_bound(model, name):
        kwargs = recurrent_layers.keywords(model, kwargs)
    if counting == "product" and notes.counted is not None:  # positions that one process makes from the same mask
        index = names.index("position_ids")
        if index < len(args):
            args = (*args[:index], notes.counted, *args[index + 1 :])
        else:
            kwargs = {**kwargs, "position_ids": notes.counted}
    return args, kwargs


def _check_rows(label: str, notes: BatchNotes, arguments: dict[str, Any]) -> None:
    """Reject tokens of other rows or positions than those of the batch that ``shard_batch`` made."""
    tokens = arguments.get("inputs_embeds") if arguments.get("input_ids") is None else arguments.get("input_ids")
    if isinstance(tokens, Tensor) and notes.shape is not None and tuple(tokens.shape[:2]) != notes.shape:
        raise ShapeError(
            f"{label}: tokens {list(tokens.shape)} with position_ids of {notes.shape[0]} rows of {notes.shape[1]} "
            "positions; slice the rows of all entries of shard_batch alike"
        )


def _check_call(name: str, is_causal: bool, has_attention: bool, model: Any, args: Any, kwargs: Any) -> None:
    """Reject a batch that a switched model would take wrongly, while its attention is ``name``."""
    if not _is_active(name, has_attention, model) or group_of(name).size() == 1:
        return
    if not is_causal:
        label = f"{name}: {type(model).__name__}"
        _check_bidirectional(label, kwargs.get("position_ids"), group_of(name))


def _check_callers(name: str, model: Any, arguments: dict[str, Any]) -> None:
    """Reject labels for modules around a model that may add to its loss, unless hooks of theirs watch the loss."""
    around = list(model_parts.callers(model))
    if all(names.get("labels") is None for names in (arguments, *(names for _, names in around))):
        return
    watching = set(map(id, losses.owners([model, *(module for module, _ in around)])))
    for module, _ in reversed(around):
        if id(module) in watching:
            return
        if problem := losses.wrong_caller(module):
            raise UnsupportedError(losses.NO_LABELS.format(label=name, problem=problem))


def _check_bidirectional(label: str, position_ids: Any, group: ProcessGroup) -> None:
    """Reject batches that are right in causal models alone: padding without a mask, and packed sequences."""
    notes = noted(position_ids, label)
    if notes is not None and notes.padded:
        raise UnsupportedError(
            f"{label} is bidirectional, and would attend to the {notes.padded} positions that shard_batch added to the "
            f"sequence; pass an attention_mask, of ones, or sequences of a multiple of {group.size()} positions"
        )
    if notes is not None and notes.documents is not None:
        raise UnsupportedError(f"{label} is bidirectional, and packed sequences are for causal models")


def group_of(name: str) -> ProcessGroup:
    """Return the ranks for which ``register`` added ``name``.

    Raises:
        ArgumentError: ``register`` did not add ``name``.
    """
    if name not in _registered:
        raise ArgumentError(f"{name!r} is not registered here, only {sorted(_registered)}; call register(group) first")
    return _registered[name].group


def unregister(name: str | None = None) -> None:
    """Take back what ``register`` added under ``name``, or everything. A model that still has the name cannot run.

    Raises:
        ArgumentError: ``register`` did not add ``name``.
    """
    if name is not None and name not in _registered:
        raise ArgumentError(f"unregister: {name!r} is not registered here, only {sorted(_registered)}")
    names = list(_registered) if name is None else [name]
    for registry in _registries() if names else ():
        for each in names:
            registry._global_mapping.pop(each, None)  # `register` is a classmethod without an inverse
    for each in names:
        del _registered[each]
    recurrent_layers.restore(names)


def _registries() -> tuple[Any, Any]:
    """Return transformers' attention functions, and the functions that make their masks."""
    attentions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    return attentions, importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS


class _Local:
    """Attention module as ``attention`` has to see it: with this rank's heads, and under its own name."""

    def __init__(self, module: Any, groups: int, attention: str) -> None:
        self._module, self.num_key_value_groups, self._attention = module, groups, attention

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _Config(value, self._attention) if name == "config" else value


class _Config:
    """Config of a model with another attention implementation."""

    def __init__(self, config: Any, attention: str) -> None:
        self._config, self._attn_implementation = config, attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _PackedMask:
    """A mask of packed documents, which attention computes one by one.

    Attributes:
        documents: global starts, of each row.
        arguments: of the function that makes a mask; none for a causal one.
        masks: made so far, by rows and positions.
    """

    def __init__(self, documents: list[list[int]], arguments: dict[str, Any]) -> None:
        self.documents, self.arguments = documents, arguments
        self.masks: dict[tuple[int, int], Any] = {}


class _Implementation:
    """Implementation that ``register`` adds: an attention function, and the function that makes its masks."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        attention: str,
        inner: Callable[..., Any],
        mask: Any,
        own_positions: bool,
    ) -> None:
        self.group, self.name, self.attention, self.inner, self.inner_mask = group, name, attention, inner, mask
        self.own_positions = own_positions
        self.arguments = inspect.signature(inner).parameters.keys()
        self.judged: WeakSet[Any] = WeakSet()  # modules of models that were found right
        self.checked: WeakSet[Any] = WeakSet()  # those without positions, in a model that checks the batch

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend: q, k, v ``[b, heads, s, d]`` of this rank's positions in, ``[b, s, heads, d]`` of them out."""
        group, groups = self.group, getattr(module, "num_key_value_groups", 1)
        if not is_compiling() and module not in self.judged:
            self._judge(module)
        if group.size() > 1 and not self.own_positions:
            self._check_layer(module, kwargs.get("position_ids"))
        is_causal = kwargs.get("is_causal")
        if group.size() > 1 and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            _check_bidirectional(f"{self.name}: {type(module).__name__}", kwargs.get("position_ids"), group)
        packed = self._packed(module, attention_mask, kwargs)
        if packed is not None and len(packed.documents) != len(query):
            raise ShapeError(f"{self.name}: {len(query)} rows with the documents of {len(packed.documents)}")
        self._check(query, key, None if packed is not None else attention_mask, kwargs)
        query, key, value = ulysses.autocast((query, key, value))
        tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        exchange = ulysses.exchange_for(*tensors, group, seq_dim=1, seq_sizes=None, name=self.name)
        if group.size() > 1:
            kwargs.pop("position_ids", None)  # local ones; an implementation would take them for all positions
            local = ulysses.to_heads(tensors, exchange.qkv, group, exchange.names)
            query, key, value = (x.transpose(1, 2) for x in local)
        # Query heads per key/value head here, which may differ from the number in the module.
        of_rank = query.shape[1] // key.shape[1]
        if self.attention != "sdpa" or of_rank != groups:
            module = _Local(module, of_rank, self.attention)
        if packed is not None:
            kwargs.pop("position_ids", None)
            out = self._by_documents(module, (query, key, value), packed, kwargs)
        else:
            out = self.inner(module, query, key, value, attention_mask, **kwargs)[0]
        if group.size() > 1:
            out = ulysses.to_sequence(out, exchange.out, group, exchange.names)
        return out, None

    def _packed(self, module: Any, mask: Any, kwargs: dict[str, Any]) -> "_PackedMask | None":
        """Return the documents that a mask of ours stands for, or those of position_ids; None for one document."""
        packed = marked(mask, DOCUMENTS)
        notes = noted(kwargs.get("position_ids"), f"{self.name}: {type(module).__name__}")
        if packed is not None or notes is None or notes.documents is None:
            return packed
        if self.group.size() == 1 and isinstance(mask, Tensor) and mask.dim() == 4:
            return None  # transformers found the documents in position_ids of all positions
        if kwargs.get("sliding_window") is not None or (isinstance(mask, Tensor) and mask.dim() == 4):
            raise UnsupportedError(
                f"{self.name}: {type(module).__name__} has a mask of its own, and packed documents; give its model to "
                "switch()"
            )
        return _PackedMask(notes.documents, {})

    def _by_documents(
        self, module: Any, tensors: tuple[Tensor, ...], packed: "_PackedMask", kwargs: dict[str, Any]
    ) -> Tensor:
        """Attend to all positions of every document by itself: q, k, v ``[b, heads, S, d]`` to ``[b, S, heads, d]``.

        No mask of all positions is made, but for a window that ends inside of a document one of this document.
        """
        length = tensors[0].shape[2]
        rows = packed.documents
        if "flash" in self.attention:  # it knows boundaries: one call for all rows
            starts = [row * length + start for row, of_row in enumerate(rows) for start in of_row]
            stops = [*starts[1:], len(rows) * length]
            boundaries = torch.tensor([*starts, stops[-1]], dtype=torch.int32, device=tensors[0].device)
            longest = max(stop - start for start, stop in zip(starts, stops, strict=True))
            flat = [x.transpose(0, 1).flatten(1, 2)[None] for x in tensors]
            kwargs = {
                **kwargs, "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries,
                "max_length_q": longest, "max_length_k": longest,
            }  # fmt: skip
            out = self.inner(module, *flat, None, **kwargs)[0]
            return out[0].unflatten(0, (len(rows), length))
        if all(row == rows[0] for row in rows):
            return self._by_rows(module, tensors, rows[0], packed, kwargs)
        parts = [
            self._by_rows(module, tuple([x[row : row + 1] for x in tensors]), starts, packed, kwargs)
            for row, starts in enumerate(rows)
        ]
        return torch.cat(parts)

    def _by_rows(
        self,
        module: Any,
        tensors: tuple[Tensor, ...],
        starts: list[int],
        packed: "_PackedMask",
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Attend to every document of rows that are packed alike."""
        outs = []
        for start, stop in pairwise([*starts, tensors[0].shape[2]]):
            part = [x[:, :, start:stop] for x in tensors]
            key = len(part[0]), stop - start
            if key not in packed.masks:
                make = self.inner_mask if packed.arguments else None
                packed.masks[key] = None if make is None else make(*key, key[1], 0, 0, **packed.arguments)
            outs.append(self.inner(module, *part, packed.masks[key], **kwargs)[0])
        return torch.cat(outs, 1)

    def _check_layer(self, module: Any, position_ids: Any) -> None:
        """Reject a batch that is not known to be sharded: by its positions, or by the model that the layer is in."""
        if isinstance(position_ids, Tensor):
            self.check_positions(module, position_ids)
            return
        if recurrent_layers.is_inside():
            if not is_compiling():
                self.checked.add(module)  # in the recomputation of a checkpoint no model runs
        elif is_compiling() or module not in self.checked:
            raise UnsupportedError(
                f"{self.name}: {type(module).__name__} passes no position_ids to its attention, which therefore cannot "
                "see whether the batch is sharded; call the model that switch() got"
            )

    def check_positions(self, module: Any, position_ids: Any) -> None:
        """Reject position ids that ``shard_batch`` did not make for this group: the batch may not be sharded."""
        notes = noted(position_ids, f"{self.name}: {type(module).__name__}")
        if notes is None:
            raise ArgumentError(
                f"{self.name}: shard_batch did not make these position_ids: this rank's samples would count as a part "
                f"of one sequence of {self.group.size()} ranks. Move the batch to its device, then call "
                "model(**shard_batch(batch, group)), in training and in evaluation; or train with UlyssesTrainerMixin. "
                "Slices of its rows, x[a:b], count as its own; copies and rows by index do not. Before generate(), "
                "switch(model, 'sdpa')"
            )
        if notes.group != self.group.group_name:
            raise ArgumentError(
                f"{self.name}: shard_batch made these position_ids for the group {notes.group!r}, and attention is "
                f"over the group {self.group.group_name!r}; pass both the same group"
            )

    def _judge(self, module: Any) -> None:
        """Reject an attention of a model that was not given to ``switch``: by its model, or its config and file."""
        model, sharded = model_parts.called(), self.group.size() > 1
        if model is None:
            problem = model_parts.wrong_attention(module, sharded)
        else:
            is_bound = recurrent_layers.is_bound(model, self.name)  # a copy of a model that was given to it, too
            served = recurrent_layers.recurrent_layers(model) if is_bound else ()
            problem = model_parts.wrong_part(model, self.attention, sharded, served)
            parts = model_parts.language_parts(model)
            if problem is None and sharded and not rotary_tables.is_bound(parts):
                problem = "its rotary tables are chosen by the largest position; give the model to switch()"
            if (
                problem is None
                and sharded
                and model_parts.counts_unpadded(model) is not None
                and not hasattr(model, _HOOKS)
            ):
                problem = "it numbers positions by its padding mask; give the model to switch()"
        if problem is not None:
            raise UnsupportedError(f"{self.name}: {type(model or module).__name__}: {problem}")
        self.judged.add(module)

    def _check(self, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
        """Reject arguments, a cache or a mask that ``attention`` cannot take once all positions are exchanged."""
        plain = int | float if self.group.size() > 1 else int | float | Tensor  # a tensor is of local positions
        for argument, value in kwargs.items():
            if value is None or value is False or argument in _TAKEN:
                continue
            if argument not in self.arguments or not isinstance(value, plain):
                raise UnsupportedError(
                    f"{self.name}: the model passes {argument}= to its attention, which {self.attention!r} over shards "
                    "does not support"
                )
        if kwargs.get("output_router_logits") and self.group.size() > 1:
            raise UnsupportedError(
                f"{self.name}: output_router_logits=True: {model_parts.ROUTER_LOSS}; set it to False"
            )
        local, positions = query.shape[2], query.shape[2] * self.group.size()
        if key.shape[2] != local:
            raise UnsupportedError(
                f"{self.name}: {local} queries of {key.shape[2]} keys: a key/value cache is not supported; "
                "pass use_cache=False, and generate after switch(model, 'sdpa')"
            )
        if not isinstance(mask, Tensor):  # none, or a block mask that `make_mask` has made
            return
        if mask.dim() == 4 and "flash" in self.attention:
            raise UnsupportedError(f"{self.name}: {self.attention} takes no 4-D mask; pack by position_ids")
        if mask.shape[-1] != positions or (mask.dim() == 4 and tuple(mask.shape[1:3]) != (1, positions)):
            raise ShapeError(
                f"{self.name}: attention mask {list(mask.shape)} is not one of all {positions} positions, the same for "
                "all heads; shard_batch makes one"
            )
        window, is_made = kwargs.get("sliding_window"), is_compiling() or marked(mask, MADE)
        if mask.shape[0] != query.shape[0] and (mask.shape[0] != 1 or mask.dim() == 2 or marked(mask, MADE)):
            raise ShapeError(f"{self.name}: attention mask {list(mask.shape)} for {query.shape[0]} rows")
        if window is not None and window < positions and not is_made:
            raise UnsupportedError(f"{self.name}: a 4-D mask of the caller has no sliding window")

    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: int = 0,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make the mask of all positions, by the mask function of ``attention``, from local lengths and offsets."""
        positions, documents = q_length * self.group.size(), recurrent_layers.documents()
        if documents is not None:
            if kwargs.get("use_vmap"):
                raise UnsupportedError(f"{self.name}: a mask with an overlay has no packed documents")
            # Of the shape that layers expect, without its memory; whoever attends by it gets NaN.
            mask = torch.zeros((), dtype=torch.bool, device=kwargs.get("device"))
            mask = mask.expand(batch_size, 1, positions, positions)
            mark(mask, DOCUMENTS, _PackedMask(documents, kwargs))
            return mask
        if attention_mask is not None and attention_mask.shape[-1] != positions:
            raise ShapeError(
                f"{self.name}: attention_mask {list(attention_mask.shape)} is not one of all {positions} positions; "
                "shard_batch leaves it so, and for a model that makes one of its own pass it a mask of ones"
            )
        if attention_mask is not None and attention_mask.shape[0] != batch_size:
            raise ShapeError(f"{self.name}: attention_mask {list(attention_mask.shape)} for {batch_size} rows")
        causal_with_more = not kwargs.get("allow_is_causal_skip", True) and "allow_is_bidirectional_skip" not in kwargs
        if self.group.size() > 1 and (causal_with_more or kwargs.get("use_vmap")):
            raise UnsupportedError(
                f"{self.name}: a mask made of local positions (position_ids that start again in a shard, overlays) is "
                "not supported; shard_batch makes the mask of packed sequences"
            )
        if self.inner_mask is None:
            return attention_mask
        # All queries and all keys, both from position 0 on.
        mask = self.inner_mask(batch_size, positions, positions, 0, 0, attention_mask=attention_mask, **kwargs)
        if isinstance(mask, Tensor) and not is_compiling():
            mark(mask, MADE, True)  # on its storage, which slices share
        return mask
