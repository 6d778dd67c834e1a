"""Attention implementation of Ulysses in transformers' registry: ``register``, and what attention layers then call."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm import ulysses
from tritoncomm.core.documents import group_documents
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.groups import resolve_sequence
from tritoncomm.integrations.changes import Changes
from tritoncomm.integrations.transformers import forwards, model_parts, recurrent_layers
from tritoncomm.integrations.transformers.batch_notes import mask_note_of, notes_of, write_mask_note
from tritoncomm.integrations.transformers.hooks import switches_of
from tritoncomm.integrations.transformers.local_modules import LocalModule
from tritoncomm.integrations.transformers.registration import Registration, check_bidirectional, registered
from tritoncomm.integrations.transformers.registration import registration as registration_of
from tritoncomm.recurrent import document_boundaries

__all__ = ["NAME", "group_of", "register", "registries", "unregister"]

NAME = "tritoncomm_ulysses"
# Arguments of an attention function that change nothing, or that are done already: by the mask, or around attention.
_TAKEN = frozenset(
    ["cache_position", "dropout", "is_causal", "labels", "logits_to_keep", "num_items_in_batch", "output_attentions"]
    + ["output_hidden_states", "output_router_logits", "position_ids", "return_dict", "scaling", "shift_labels"]
    + ["sliding_window", "use_cache"]
)
_NOT_IN_A_NAME = ("flash", "/", "|")  # transformers takes such names for implementations of its own or of a hub
_UNKNOWN: Any = object()


def register(
    group: ProcessGroup | None = None, *, attention: str = "sdpa", name: str = NAME, own_positions: bool = False
) -> str:
    """Add an attention implementation that exchanges sequence for heads around ``attention``; returns ``name``.

    Args:
        group: the ranks that hold the sequence; the tensor group by default, unless there is a context axis.
        attention: the implementation that attends to all positions, under its name in transformers.
        name: for ``switch``; or for ``attn_implementation=`` of a model that shares its config with no other, and whose
            layers all have attention: without ``switch`` other layers have no hooks that bring them their batch.
        own_positions: accept ``position_ids`` that ``shard_batch`` did not make. Nothing then notices a batch that is
            not sharded.

    Raises:
        ArgumentError: ``attention`` is not registered, or ``name`` is taken or means something to transformers.
        UnsupportedError: ``eager``, which every model defines for itself.
    """
    attentions, masks = registries()
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
    added = _Implementation(group, name, attention, attentions[attention], masks.get(attention), own_positions)
    with added.changes:
        # `register` of transformers' registries has no inverse.
        added.changes.set_entry(attentions._global_mapping, name, added.attend)
        added.changes.set_entry(masks._global_mapping, name, added.make_mask)
        registered[name] = added
    return name


def group_of(name: str) -> ProcessGroup:
    """Return the ranks for which ``register`` added ``name``.

    Raises:
        ArgumentError: ``register`` did not add ``name``.
    """
    return registration_of(name).group


def unregister(name: str | None = None) -> None:
    """Take back what ``register`` added under ``name``, or everything. A model that still has the name cannot run.

    Raises:
        ArgumentError: ``register`` did not add ``name``.
    """
    if name is not None and name not in registered:
        raise ArgumentError(f"unregister: {name!r} is not registered here, only {sorted(registered)}")
    names = list(registered) if name is None else [name]
    removed = Changes()
    removed.add(lambda: recurrent_layers.restore(names))
    for each in names:
        removed.add(partial(_remove, each))
    removed.undo()


def _remove(name: str) -> None:
    """Remove an entry from transformers' registries, and then from ours: until then it can be called again."""
    if name in registered:
        registered[name].changes.undo()
        registered.pop(name, None)


def registries() -> tuple[Any, Any]:
    """Return transformers' attention functions, and the functions that make their masks."""
    attentions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    return attentions, importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS


class _MadeMask:
    """Note of a mask of ``make_mask``: the documents that it stands for, or none.

    Attributes:
        documents: global starts, of each row, of packed documents, which attention computes one by one: the mask
            itself has no memory. Empty for a mask that is one.
        arguments: of the function that makes the masks of documents; none for causal ones.
        masks: of documents, made so far, by their length.
    """

    def __init__(self, documents: list[list[int]], arguments: dict[str, Any]) -> None:
        self.documents, self.arguments = documents, arguments
        self.masks: dict[int, Any] = {}


def note_mask(mask: Tensor) -> Tensor:
    """Return a mask that the model around has made of all positions, known to be one."""
    write_mask_note(mask, _MadeMask([], {}))
    return mask


class _Implementation(Registration):
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
        super().__init__(group, name, attention, own_positions)
        self.inner, self.inner_mask = inner, mask
        self.inner_parameters = inspect.signature(inner).parameters.keys()

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend: q, k, v ``[b, heads, s, d]`` of this rank's positions in, ``[b, s, heads, d]`` of them out."""
        group = self.group
        groups = getattr(module, "num_key_value_groups", 1)
        if not is_compiling():
            # A verdict is a weak reference to the switch that it depends on, or None if it depends on none. A module
            # without a verdict, or one whose switch has ended, is judged now.
            verdict = self.verdicts.get(module, _UNKNOWN)
            if verdict is not None:
                owner = None if verdict is _UNKNOWN else verdict()
                if owner is None or not owner.is_on:
                    self._judge(module)
        if group.size() > 1 and forwards.whole_batch() is not None:
            raise UnsupportedError(
                f"{self.name}: {type(module).__name__} is outside of the language model, and has the attention of its "
                "shards; give the whole model to switch(), which leaves the attention of others as it is"
            )
        if group.size() > 1 and not self.own_positions:
            self._check_layer(module, kwargs.get("position_ids"))
        is_causal = kwargs.get("is_causal")
        if group.size() > 1 and not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            check_bidirectional(f"{self.name}: {type(module).__name__}", kwargs.get("position_ids"), group)
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
            module = LocalModule(module, of_rank, self.attention)
        if packed is not None:
            kwargs.pop("position_ids", None)
            out = self._by_documents(module, (query, key, value), packed, kwargs)
        else:
            out = self.inner(module, query, key, value, attention_mask, **kwargs)[0]
        if group.size() > 1:
            out = ulysses.to_sequence(out, exchange.out, group, exchange.names)
        return out, None

    def _packed(self, module: Any, mask: Any, kwargs: dict[str, Any]) -> _MadeMask | None:
        """Return the documents that a mask of ours stands for, or those of position_ids; None for one document."""
        made = mask_note_of(mask)
        packed = made if made is not None and made.documents else None
        notes = notes_of(kwargs.get("position_ids"), f"{self.name}: {type(module).__name__}")
        if packed is not None or notes is None or notes.documents is None:
            return packed
        if self.group.size() == 1 and isinstance(mask, Tensor) and mask.dim() == 4:
            return None  # transformers found the documents in position_ids of all positions
        # The mask that ``switch`` lets transformers make has the documents and the window. Another one lacks documents,
        # and a window without that mask would run over their ends.
        if kwargs.get("sliding_window") is not None or (isinstance(mask, Tensor) and mask.dim() == 4):
            raise UnsupportedError(
                f"{self.name}: {type(module).__name__} has a mask of its own, and packed documents; give its model to "
                "switch()"
            )
        return _MadeMask(notes.documents, {})

    def _by_documents(
        self, module: Any, tensors: tuple[Tensor, ...], packed: _MadeMask, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attend to all positions of every document by itself: q, k, v ``[b, heads, S, d]`` to ``[b, S, heads, d]``.

        No mask of all positions is made; a window that is shorter than a document needs one of that document's
        positions.
        """
        length = tensors[0].shape[2]
        rows = packed.documents
        if "flash" in self.attention:  # it knows boundaries: one call for all rows
            stops = tuple([(*starts, length) for starts in rows])
            boundaries = document_boundaries(stops, "cu_seqlens", tensors[0].device)
            longest = max(stop - start for row in stops for start, stop in pairwise(row))
            flat = [x.transpose(0, 1).flatten(1, 2)[None] for x in tensors]
            kwargs = {
                **kwargs, "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries,
                "max_length_q": longest, "max_length_k": longest,
            }  # fmt: skip
            out = self.inner(module, *flat, None, **kwargs)[0]
            return out[0].unflatten(0, (len(rows), length))
        distinct_rows = rows[:1] if all(row == rows[0] for row in rows) else rows
        stops = tuple([(*starts, length) for starts in distinct_rows])
        groups = group_documents(stops, len(tensors[0]), tensors[0].device)
        outs = []
        for part in zip(*(groups.split(x, 0, 2) for x in tensors), strict=True):
            mask = self._mask_of(part[0], packed)
            outs.append(self.inner(module, *part, mask, **kwargs)[0])
        return groups.join(outs, 0, 1)

    def _mask_of(self, query: Tensor, packed: _MadeMask) -> Any:
        """Return the mask of documents of one length, or None for causal attention; made for one of them."""
        count, length = len(query), query.shape[2]
        if length not in packed.masks:
            make = self.inner_mask if packed.arguments else None
            packed.masks[length] = None if make is None else make(1, length, length, 0, 0, **packed.arguments)
        mask = packed.masks[length]
        return mask.expand(count, *mask.shape[1:]) if isinstance(mask, Tensor) else mask

    def _check_layer(self, module: Any, position_ids: Any) -> None:
        """Reject a batch that is not known to be sharded: by its positions, or by the model that the layer is in."""
        if isinstance(position_ids, Tensor):
            self.check_positions(module, position_ids)
            return
        if forwards.is_inside():
            if not is_compiling():
                self.inside_of_models.add(module)  # in the recomputation of a checkpoint no model runs
        elif is_compiling() or module not in self.inside_of_models:
            raise UnsupportedError(
                f"{self.name}: {type(module).__name__} passes no position_ids to its attention, which therefore cannot "
                "see whether the batch is sharded; call the model that switch() got"
            )

    def _judge(self, module: Any) -> None:
        """Reject an attention module that would give wrong numbers, and keep the verdict for its next call.

        The model whose forward runs is judged, which may be a copy of one that ``switch`` got; outside of a forward the
        module's config and file.
        """
        self.inside_of_models.discard(module)  # so that `_check_layer` looks at it again
        is_sharded = self.group.size() > 1
        switch = None
        model = model_parts.running_model()
        if model is None:
            problem = model_parts.wrong_attention(module, is_sharded)
        else:
            switch = next((x for x in switches_of(model) if x.name == self.name and x.is_on), None)
            sharded_layers = () if switch is None else recurrent_layers.recurrent_layers(model)
            problem = model_parts.wrong_part(model, self.attention, is_sharded, sharded_layers)
            if problem is None and is_sharded and switch is None:
                problem = model_parts.needs_switch(model)
        if problem is not None:
            raise UnsupportedError(f"{self.name}: {type(model or module).__name__}: {problem}")
        self.verdicts[module] = None if switch is None else ref(switch)

    def _check(self, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
        """Reject arguments, a cache or a mask that ``attention`` cannot take once all positions are exchanged."""
        # A tensor among the arguments is of this rank's positions, and attention is of all.
        accepted_types = int | float if self.group.size() > 1 else int | float | Tensor
        for argument, value in kwargs.items():
            if value is None or value is False or argument in _TAKEN:
                continue
            if argument not in self.inner_parameters or not isinstance(value, accepted_types):
                raise UnsupportedError(
                    f"{self.name}: the model passes {argument}= to its attention, which {self.attention!r} over shards "
                    "does not support"
                )
        if kwargs.get("output_router_logits") and self.group.size() > 1:
            raise UnsupportedError(
                f"{self.name}: output_router_logits=True: {model_parts.ROUTER_LOSS}; set it to False"
            )
        local = query.shape[2]
        positions = local * self.group.size()
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
        window = kwargs.get("sliding_window")
        is_ours = mask_note_of(mask) is not None
        # A 4-D mask of the caller with one row holds for all rows. A padding mask [b, S] has a row for each row of the
        # batch, and so has a mask that was made of one.
        can_broadcast = mask.shape[0] == 1 and mask.dim() != 2 and not is_ours
        if mask.shape[0] != query.shape[0] and not can_broadcast:
            raise ShapeError(f"{self.name}: attention mask {list(mask.shape)} for {query.shape[0]} rows")
        # transformers puts the window into the masks that it makes; of others only 4-D ones are left here.
        if window is not None and window < positions and not (is_ours or is_compiling()):
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
        """Make the mask of the whole sequence, by the mask function of ``attention``.

        Args:
            q_length: positions of this rank; times the ranks it is the length of the sequence. ``kv_length`` and the
                offsets are those of a shard, and are not read.

        Returns:
            The mask; ``attention_mask`` where ``attention`` has no mask function. For packed documents a placeholder
            without memory, whose note has the documents for ``attend``.
        """
        if forwards.whole_batch() is not None:  # the model around the language model makes it of all positions
            if self.inner_mask is None:
                return attention_mask
            return self.inner_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask=attention_mask, **kwargs
            )
        positions = q_length * self.group.size()
        documents = forwards.documents()
        if documents is not None:
            if kwargs.get("use_vmap"):
                raise UnsupportedError(f"{self.name}: a mask with an overlay has no packed documents")
            # Of the shape that layers expect, without its memory. It is all False: attention by it gives NaN.
            mask = torch.zeros((), dtype=torch.bool, device=kwargs.get("device"))
            mask = mask.expand(batch_size, 1, positions, positions)
            write_mask_note(mask, _MadeMask(documents, kwargs))
            return mask
        if attention_mask is not None:
            attention_mask = forwards.whole_mask(attention_mask, self.name)
        if attention_mask is not None and attention_mask.shape[-1] != positions:
            raise ShapeError(
                f"{self.name}: attention_mask {list(attention_mask.shape)} is not one of all {positions} positions; "
                "shard_batch leaves it so, and for a model that makes one of its own pass it a mask of ones"
            )
        if attention_mask is not None and attention_mask.shape[0] != batch_size:
            raise ShapeError(f"{self.name}: attention_mask {list(attention_mask.shape)} for {batch_size} rows")
        # transformers passes allow_is_causal_skip=False for a causal mask with further conditions. Bidirectional masks
        # have the other keyword.
        is_causal = "allow_is_bidirectional_skip" not in kwargs
        has_conditions = is_causal and not kwargs.get("allow_is_causal_skip", True)
        if self.group.size() > 1 and (has_conditions or kwargs.get("use_vmap")):
            raise UnsupportedError(
                f"{self.name}: a mask made of local positions (position_ids that start again in a shard, overlays) is "
                "not supported; shard_batch makes the mask of packed sequences"
            )
        if self.inner_mask is None:
            return attention_mask
        # All queries and all keys, both from position 0 on.
        mask = self.inner_mask(batch_size, positions, positions, 0, 0, attention_mask=attention_mask, **kwargs)
        if isinstance(mask, Tensor) and not is_compiling():
            # For `_check`: a mask with this note has the window in it. The note is on the storage, so slices have it,
            # too.
            write_mask_note(mask, _MadeMask([], {}))
        return mask
