"""Mistakes of other implementations of recurrent layers over sequence shards, made in ours for `tritoncomm verify`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor
from verify_recipes import Fault

from tritoncomm import recurrent
from tritoncomm.integrations.transformers import batch as sequence_batch
from tritoncomm.integrations.transformers import recurrences, recurrent_layers
from tritoncomm.integrations.transformers.batch_notes import BatchNotes

__all__ = ["MISTAKES", "Mistake", "make"]


class Mistake(NamedTuple):
    """A mistake of others.

    Attributes:
        make: makes it, inside of a with statement.
        first: the first wrong module in the report.
        words: of the report.
        fault: a change of the recipe, which is right without the mistake.
    """

    make: Callable[[], Iterator[None]]
    first: str
    words: str = ""
    fault: Fault | None = None


_PADDED = Fault("hybrid", '"position_ids": positions', '"attention_mask": (torch.arange(24) > 4).expand(2, -1) * 1', "")
_by_heads, _halo = recurrent.by_heads, recurrent._halo


def _without_exchange() -> Iterator[None]:
    with (
        mock.patch.object(recurrent_layers, "_over_shards", lambda module, name, original: original),
        mock.patch.object(recurrent_layers, "exit_layer", return_value=None),  # which refuses this
    ):
        yield


def _through_documents() -> Iterator[None]:
    def by_heads(*args: Any) -> Callable[..., Any]:
        return lambda *xs, documents=None, **kwargs: _by_heads(*args)(*xs, **kwargs)

    with mock.patch.object(recurrences, "by_heads", by_heads):
        yield


def _with_halo(change: Callable[[Tensor], Tensor]) -> Callable[[], Iterator[None]]:
    def mistaken() -> Iterator[None]:
        with mock.patch.object(recurrent, "_halo", lambda *args: change(_halo(*args))):
            yield

    return mistaken


def _padding_is_content() -> Iterator[None]:
    def notes(**values: Any) -> BatchNotes:
        columns = values["columns"]
        return BatchNotes(**values | {"columns": None if columns is None else columns * 0 + 1})

    with mock.patch.object(sequence_batch, "BatchNotes", notes):
        yield


_FIRST = "model.layers.0.linear_attn"
MISTAKES = {
    "layers without an exchange": Mistake(_without_exchange, _FIRST),
    "a state that runs through documents": Mistake(_through_documents, _FIRST),
    "a convolution that starts anew inside of a document": Mistake(_with_halo(lambda x: x * 0), _FIRST),
    "padding as content": Mistake(_padding_is_content, _FIRST, fault=_PADDED),
    "gradients that do not return to the rank before": Mistake(
        _with_halo(Tensor.detach), "model.layers.2.linear_attn.in_proj_qkvz"
    ),
}


@contextmanager
def make(name: str) -> Iterator[None]:
    """Make a mistake; the recipe registers, and so makes the functions over shards anew."""
    yield from MISTAKES[name].make()
