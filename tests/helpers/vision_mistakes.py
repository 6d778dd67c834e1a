"""Mistakes of other implementations of vision-language models over sequence shards, made in ours for `verify`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from hybrid_mistakes import Mistake
from torch import Tensor
from verify_recipes import Fault

from tritoncomm.integrations.transformers import position_cut, whole_batches

__all__ = ["MISTAKES", "make"]


def _features_of_a_shard_further() -> Iterator[None]:
    """Take the features of images' tokens from the first ones on, whatever rank they belong to."""
    with mock.patch.object(position_cut, "_rows", lambda x, is_here: x[: int(is_here.sum())]):
        yield


def _positions_of_a_shard() -> Iterator[None]:
    """Number the positions of a shard from 0 on, as a model does that sees no other ids."""
    noted = position_cut.noted_positions

    def numbered(positions: Tensor, *args: Any, **kwargs: Any) -> Any:
        span = args[1]
        shifted = positions.clone()
        shifted[..., span.start : span.end] -= positions[..., span.start : span.start + 1]
        return noted(shifted, *args, **kwargs)

    with mock.patch.object(position_cut, "noted_positions", numbered):
        yield


def _labels_shifted_in_a_shard() -> Iterator[None]:
    """Let the last position of a shard have no label."""
    counted = whole_batches.counted_labels

    def shifted(batch: Any, *args: Any) -> Any:
        found: Any = counted(batch, *args)
        labels = found.labels.clone()
        labels[:, labels.shape[1] // 2 - 1] = -100
        return found._replace(labels=labels)

    with mock.patch.object(whole_batches, "counted_labels", shifted):
        yield


def _nothing() -> Iterator[None]:
    yield


_SUMMED = "dist.all_reduce(parameter.grad, group=group)"
_IS_OF_TOWER = "any(parameter is each for each in model.model.visual.parameters())"
_AVERAGED = Fault("vision", _SUMMED, f"{_SUMMED} or parameter.grad.div_(world if {_IS_OF_TOWER} else 1)", "")
MISTAKES = {
    "features of a shard further": Mistake(_features_of_a_shard_further, "model", "deepstack_visual_embeds.0"),
    "positions of a shard": Mistake(_positions_of_a_shard, "model.language_model.rotary_emb"),
    "labels shifted in a shard": Mistake(_labels_shifted_in_a_shard, ""),
    "a tower's gradient that is averaged": Mistake(
        _nothing, "model.visual.merger.linear_fc2", "is 1/", fault=_AVERAGED
    ),
}


@contextmanager
def make(name: str) -> Iterator[None]:
    """Make a mistake; a fault of the recipe comes with it."""
    yield from MISTAKES[name].make()
