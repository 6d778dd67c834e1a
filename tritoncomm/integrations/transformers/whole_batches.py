"""Whole batches into a model around a language model: images are embedded as in one process, and then it is sharded.

The outer model embeds all tokens, runs its towers, scatters features and numbers positions. Where it calls its language
model with ``inputs_embeds=``, a hook takes this rank's positions of every argument that has the sequence.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm import variables
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.integrations.changes import Changes
from tritoncomm.integrations.transformers import forwards, model_parts
from tritoncomm.integrations.transformers.attention import note_mask
from tritoncomm.integrations.transformers.batch import (
    BOUNDARIES,
    IGNORED,
    ShardSpan,
    check_same,
    counted_labels,
    documents_of,
    noted_positions,
)
from tritoncomm.integrations.transformers.batch_notes import notes_of, write_whole
from tritoncomm.integrations.transformers.hooks import Followers, Switch, Untraced, check_callers
from tritoncomm.integrations.transformers.recurrent_layers import parameters_of, recurrent_layers
from tritoncomm.integrations.transformers.registration import registered

__all__ = ["WholeBatches"]

# Arguments of language models by position, [b, S, ...], beside embeddings, positions and masks.
_OF_POSITIONS = ("per_layer_inputs",)
# A mask [b, S] of the tokens of images, and features of these tokens, [tokens, ...], by row, then position.
_OF_IMAGE_TOKENS = {"visual_pos_masks": "deepstack_visual_embeds"}
_OF_SHARD = ("labels", "shift_labels", "num_items_in_batch")
# Groups whose ranks have compared their whole batches.
_compared: "WeakKeyDictionary[ProcessGroup, tuple[int, int]]" = WeakKeyDictionary()


class WholeBatches(Followers):
    """Hooks of a switched model that takes a whole batch, and of the language model in it, which gets the shard.

    A batch of ``shard_batch`` is left alone. Gradients of every weight are partial, and add up over the group.
    """

    @classmethod
    def attach(cls, model: nn.Module, switch: Switch) -> None:
        """Add the hooks to the outermost model of transformers, if it hands embeddings to a language model inside."""
        path = model_parts.language_model_path(model)
        if path is not None:
            cls(model, path, switch)

    def __init__(self, model: nn.Module, path: str, switch: Switch) -> None:
        names = path.split(".")
        with Changes() as changes:
            # Before the hooks of the switch, which see the shard.
            for depth in range(len(names)):
                part = model.get_submodule(".".join(names[:depth]))
                hook = Untraced(partial(self._begin, ".".join(names[depth:])))
                changes.add(part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
            cut = Untraced(self._cut)
            language_model = model.get_submodule(path)
            changes.add(language_model.register_forward_pre_hook(cut, prepend=True, with_kwargs=True).remove)
            super().__init__(switch, changes)

    def _group(self, model: Any) -> ProcessGroup | None:
        """Return the ranks; None where one has the whole batch, or the model computes without them."""
        name = self.switch.name
        if name not in registered or registered[name].own_positions or not self.switch.is_active(model):
            return None
        group = registered[name].group
        return group if group.size() > 1 else None

    def _begin(self, path: str, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note a whole batch, and give the model the labels of this rank's positions."""
        group = self._group(model)
        if group is None or forwards.whole_batch() is not None or forwards.is_inside(model):
            return None
        label = f"{self.switch.name}: {type(model).__name__}"
        arguments = dict(zip(parameters_of(type(model)), args, strict=False)) | kwargs
        if notes_of(arguments.get("position_ids"), label) is not None:
            return None  # a shard
        _check_call(label, arguments)
        tokens = next(filter(_is_tensor, map(arguments.get, ("input_ids", "inputs_embeds"))), None)
        if tokens is None or tokens.dim() < 2:
            raise ArgumentError(f"{label}: a batch needs input_ids, a tensor [batch, sequence]")
        shape = int(tokens.shape[0]), int(tokens.shape[1])
        _check_same(label, arguments, group)
        check_callers(self.switch.name, model, arguments)
        of_tokens = tokens if tokens.dim() == 2 else tokens[..., 0]  # for their rows and positions
        batch = {**arguments, "input_ids": of_tokens}
        documents = documents_of(batch, label) if arguments.get("attention_mask") is None else None
        counted = counted_labels(batch, documents, label)
        if counted is not None and tuple(counted.labels.shape) != shape:
            got = list(counted.labels.shape)
            raise ShapeError(f"{label}: labels {got} need the shape of input_ids, {list(shape)}")
        if counted is not None and not _takes_shift_labels(type(model)):
            raise UnsupportedError(f"{label} takes no shift_labels; leave labels out, and compute the loss from logits")
        forwards.enter_whole(model, forwards.WholeBatch(ref(model.get_submodule(path)), shape, documents))
        if counted is None:
            return None
        shard = ShardSpan.of(shape[1], group).cut(counted.labels, IGNORED)
        write_whole(shard, arguments.get("labels"))
        arguments |= {"shift_labels": shard, "num_items_in_batch": counted.count}
        if arguments.get("labels") is not None:
            arguments["labels"] = shard
        return (), arguments

    def _cut(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give the language model this rank's positions."""
        batch, group = forwards.whole_batch(), self._group(model)
        if batch is None or group is None or batch.language_model() is not model:
            return None
        label = f"{self.switch.name}: {type(model).__name__}"
        arguments = dict(zip(parameters_of(type(model)), args, strict=False)) | kwargs
        embeddings = arguments.get("inputs_embeds")
        if not isinstance(embeddings, Tensor) or tuple(embeddings.shape[:2]) != batch.shape:
            got = list(embeddings.shape) if isinstance(embeddings, Tensor) else None
            raise UnsupportedError(
                f"{label}: gets embeddings {got} of a batch of {batch.shape[0]} rows of {batch.shape[1]} positions; "
                "over sequence shards every token has one position"
            )
        if any(map(_has_states, (arguments.get("past_key_values"), arguments.get("cache_params")))):
            raise UnsupportedError(f"{label}: {_CACHE}")
        span = ShardSpan.of(batch.shape[1], group)
        arguments |= _shard_of(label, model, arguments, batch, span, group)
        forwards.hand_on()
        return (), arguments


_CACHE = "a key/value cache is not supported; pass use_cache=False, and generate after switch(model, 'sdpa')"


@lru_cache(maxsize=64)
def _takes_shift_labels(kind: type[nn.Module]) -> bool:
    """Whether a forward takes labels that are shifted, by name or among further keywords."""
    parameters = inspect.signature(kind.forward).parameters
    return "shift_labels" in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _has_states(cache: Any) -> bool:
    """Whether a cache has states of earlier positions; an empty one is what models make for themselves."""
    length = getattr(cache, "get_seq_length", None)
    return cache is not None and (length is None or bool(length()))


def _check_call(label: str, arguments: Mapping[str, Any]) -> None:
    """Reject a call whose result would be of other positions than one process has."""
    if _has_states(arguments.get("past_key_values")) or _is_generating():
        raise UnsupportedError(f"{label}: {_CACHE}")
    keep = arguments.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        raise UnsupportedError(
            f"{label}: logits_to_keep counts positions of the whole sequence, of which this rank has a part; leave it "
            "out, and take the logits that you need"
        )


def _is_generating() -> bool:
    """Whether ``generate`` of transformers is on the stack of this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith("transformers/generation/utils.py"):
            return True
        frame = frame.f_back
    return False


def _check_same(label: str, arguments: Mapping[str, Any], group: ProcessGroup) -> None:
    """Reject batches that differ between the ranks: in the first call, in check mode, and with positions of the caller.

    Those may be of a shard that lost the notes of ``shard_batch``.
    """
    here = group.size(), group.rank()
    if (
        variables.CHECK.value
        or variables.HASH.value
        or _compared.get(group) != here
        or arguments.get("position_ids") is not None
    ):
        check_same({key: x for key, x in arguments.items() if isinstance(x, Tensor)}, group, label)
        _compared[group] = here


def _shard_of(
    label: str,
    model: nn.Module,
    arguments: dict[str, Any],
    batch: forwards.WholeBatch,
    span: ShardSpan,
    group: ProcessGroup,
) -> dict[str, Any]:
    """Return the arguments of a language model that have the sequence, of this rank's positions."""
    embeddings = arguments["inputs_embeds"]
    done = {"inputs_embeds": span.cut(embeddings, 0), **dict.fromkeys(BOUNDARIES)}
    done |= _positions_and_masks(label, model, arguments, batch, span, group)
    for name in _OF_POSITIONS:
        if arguments.get(name) is not None:
            _check_shape(label, name, arguments[name], batch)
            done[name] = span.cut(arguments[name], 0)
    for name, features in _OF_IMAGE_TOKENS.items():
        mask = arguments.get(name)
        if mask is not None:
            _check_shape(label, name, mask, batch)
            done[name] = span.cut(mask, 0)
            is_here = torch.zeros_like(mask)
            is_here[:, span.start : span.end] = True
            done[features] = _map(partial(_rows, is_here=is_here[mask]), arguments.get(features))
    unknown = {
        name: shapes for name, x in arguments.items() if name not in (*done, *_OF_SHARD) and (shapes := _shapes(x))
    }
    if unknown:
        read = {name for part in model.modules() for name in parameters_of(type(part))}
        for name in unknown:
            if name in read:
                raise UnsupportedError(
                    f"{label}: {name}={unknown[name]}: nobody knows which of it belongs to this rank's positions"
                )
        done |= dict.fromkeys(unknown)  # of the model around, which hands all keywords down
    return done


def _shapes(x: Any) -> list[list[int]]:
    """Return the shapes of the tensors with dims in a value."""
    return [list(y.shape) for y in _leaves(x) if isinstance(y, Tensor) and y.dim()]


def _rows(x: Tensor, is_here: Tensor) -> Tensor:
    """Return the rows of features that belong to this rank's tokens."""
    return x[is_here]


def _check_shape(label: str, name: str, x: Tensor, batch: forwards.WholeBatch) -> None:
    """Reject an argument that has other rows or positions than the batch."""
    if tuple(x.shape[:2]) != batch.shape:
        raise ShapeError(f"{label}: {name} {list(x.shape)} needs rows and positions {list(batch.shape)}")


def _positions_and_masks(
    label: str,
    model: nn.Module,
    arguments: dict[str, Any],
    batch: forwards.WholeBatch,
    span: ShardSpan,
    group: ProcessGroup,
) -> dict[str, Any]:
    """Return positions of this rank, with the notes of the batch, and masks of all positions."""
    (rows, length), mask = batch.shape, arguments.get("attention_mask")
    positions = arguments.get("position_ids")
    is_counted = positions is None
    if positions is None:
        positions = torch.arange(length, device=arguments["inputs_embeds"].device)
    positions = positions.expand(*positions.shape[:-2], rows, length)
    added = torch.arange(1, span.padding + 1, device=positions.device, dtype=positions.dtype)
    positions = torch.cat([positions, positions[..., -1:] + added], -1)
    padding = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    made = None if padding is not None else mask
    if made is not None and recurrent_layers(model):
        raise UnsupportedError(
            f"{label}: its recurrent layers need a padding mask [b, S], and the model around it makes others"
        )
    is_hidden = made is not None and all(isinstance(x, Tensor) for x in _leaves(made))
    placed = noted_positions(
        positions, padding, span, group, batch.documents, is_counted=is_counted, is_hidden=is_hidden
    )
    return {
        "position_ids": placed.ids,
        "attention_mask": placed.mask if made is None else _map(partial(_longer, span), made),
    }


def _longer(span: ShardSpan, mask: Any) -> Any:
    """Return a mask with the positions that were added to the sequence, which nobody sees but themselves."""
    if not isinstance(mask, Tensor):
        if span.padding:
            raise UnsupportedError(f"a {type(mask).__name__} cannot be padded to a multiple of the ranks")
        return mask
    if span.padding and mask.dim() == 2:
        mask = F.pad(mask, (0, span.padding))
    elif span.padding:
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        mask = F.pad(mask, (0, span.padding, 0, span.padding), value=hidden)
        added = torch.arange(mask.shape[-1] - span.padding, mask.shape[-1], device=mask.device)
        mask[..., added, added] = mask.dtype == torch.bool
    return note_mask(mask)


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to a value, or to those of a list or dict; None stays."""
    if isinstance(x, Mapping):
        return {key: _map(function, value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_map(function, value) for value in x]
    return None if x is None else function(x)


def _leaves(x: Any) -> Iterator[Any]:
    """Yield a value, or those in lists and dicts of values."""
    if isinstance(x, Mapping | list | tuple):
        for value in x.values() if isinstance(x, Mapping) else x:
            yield from _leaves(value)
    else:
        yield x
