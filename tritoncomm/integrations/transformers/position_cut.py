"""Arguments of a language model that have the sequence: from those of all positions to those of this rank."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import ShapeError, UnsupportedError
from tritoncomm.integrations.transformers.attention import note_mask
from tritoncomm.integrations.transformers.batch import BOUNDARIES, ShardSpan, noted_positions
from tritoncomm.integrations.transformers.forwards import WholeBatch
from tritoncomm.integrations.transformers.recurrent_layers import parameters_of, recurrent_layers

__all__ = ["PositionCut", "unread_tensors"]

# Arguments by position, [b, S, ...], beside embeddings, positions and masks.
_OF_POSITIONS = ("per_layer_inputs",)
# A mask [b, S] or [b, S, h] of images' tokens, and features of these tokens, [tokens, ...], by row, then position.
_OF_IMAGE_TOKENS = {"visual_pos_masks": "deepstack_visual_embeds", "vision_mask": "deepstack_features"}
# Of this rank's positions already.
_OF_SHARD = ("labels", "shift_labels", "num_items_in_batch")


class PositionCut(NamedTuple):
    """Cut of the arguments of a language model.

    Attributes:
        label: for errors.
        model: the language model.
        batch: of all positions.
        span: this rank's.
    """

    label: str
    model: nn.Module
    batch: WholeBatch
    span: ShardSpan
    group: ProcessGroup

    def of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that have the sequence, of this rank's positions; None for those that the model ignores.

        Raises:
            UnsupportedError: a tensor of which nobody knows what belongs to which position.
        """
        embeddings = arguments["inputs_embeds"]
        done = {"inputs_embeds": self.span.cut(embeddings, 0), **dict.fromkeys(BOUNDARIES)}
        done |= self._positions_and_masks(arguments)
        for name in _OF_POSITIONS:
            if arguments.get(name) is not None:
                self._check_shape(name, arguments[name])
                done[name] = self.span.cut(arguments[name], 0)
        for name, features in _OF_IMAGE_TOKENS.items():
            mask = arguments.get(name)
            if mask is not None:
                self._check_shape(name, mask)
                done[name] = self.span.cut(mask, 0)
                is_image_token = mask if mask.dim() == 2 else mask[..., 0]
                has_position = torch.zeros_like(is_image_token)
                has_position[:, self.span.start : self.span.end] = True
                is_here = has_position[is_image_token]  # in order, for each image token, whether this rank has it
                done[features] = _map(partial(_rows, is_here=is_here), arguments.get(features))
        unknown = {name: x for name, x in arguments.items() if name not in (*done, *_OF_SHARD) and _shapes(x)}
        unread = unread_tensors(self.model, unknown)
        for name, x in unknown.items():
            if name not in unread:
                raise UnsupportedError(
                    f"{self.label}: {name}={_shapes(x)}: nobody knows which of it belongs to this rank's positions"
                )
        return {**done, **dict.fromkeys(unread)}

    def _check_shape(self, name: str, x: Tensor) -> None:
        """Reject an argument that has other rows or positions than the batch."""
        if tuple(x.shape[:2]) != self.batch.shape:
            raise ShapeError(f"{self.label}: {name} {list(x.shape)} needs rows and positions {list(self.batch.shape)}")

    def _positions_and_masks(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return positions of this rank, with the notes of the batch, and masks of all positions."""
        (rows, length), mask = self.batch.shape, arguments.get("attention_mask")
        positions = arguments.get("position_ids")
        is_counted = positions is None
        if positions is None:
            positions = torch.arange(length, device=arguments["inputs_embeds"].device)
        positions = positions.expand(*positions.shape[:-2], rows, length)
        added = torch.arange(1, self.span.padding + 1, device=positions.device, dtype=positions.dtype)
        positions = torch.cat([positions, positions[..., -1:] + added], -1)
        # The model around the language model hands on a padding mask [b, S], or has made masks of layers.
        padding = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        made = None if padding is not None else mask
        if made is not None and recurrent_layers(self.model):
            raise UnsupportedError(
                f"{self.label}: its recurrent layers need a padding mask [b, S], and the model around it makes others"
            )
        # ``_longer`` hides the positions that are added at the end, but only in masks that are tensors.
        is_hidden = made is not None and all(isinstance(x, Tensor) for x in _leaves(made))
        placed = noted_positions(
            positions, padding, self.span, self.group, self.batch.documents, is_counted=is_counted, is_hidden=is_hidden
        )
        masks = placed.mask if made is None else _map(self._longer, made)
        return {"position_ids": placed.ids, "attention_mask": masks}

    def _longer(self, mask: Any) -> Any:
        """Return a mask with the positions that were added to the sequence, which nobody sees but themselves."""
        added = self.span.padding
        if not isinstance(mask, Tensor):
            if added:
                raise UnsupportedError(
                    f"{self.label}: a {type(mask).__name__} cannot be padded; pass a multiple of {self.group.size()} "
                    "positions"
                )
            return mask
        if added and mask.dim() == 2:
            mask = F.pad(mask, (0, added))
        elif added:
            visible, hidden = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
            mask = F.pad(mask, (0, added, 0, added), value=hidden)
            places = torch.arange(mask.shape[-1] - added, mask.shape[-1], device=mask.device)
            mask[..., places, places] = visible  # itself, as attention to nothing gives NaN
        return note_mask(mask)


def unread_tensors(model: nn.Module, arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors that no module of a model takes: the model around hands all its keywords down."""
    tensors = [name for name, x in arguments.items() if _shapes(x)]
    if not tensors:
        return []
    read = {name for part in model.modules() for name in parameters_of(type(part))}
    return [name for name in tensors if name not in read]


def _shapes(x: Any) -> list[list[int]]:
    """Return the shapes of the tensors with dims in a value."""
    return [list(y.shape) for y in _leaves(x) if isinstance(y, Tensor) and y.dim()]


def _rows(x: Tensor, is_here: Tensor) -> Tensor:
    """Return the rows of features that belong to this rank's tokens."""
    return x[is_here]


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
