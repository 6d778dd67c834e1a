"""Rotary tables of transformers that are chosen by the largest position, of which a rank sees its shard's alone.

``append_largest`` appends the largest position of the whole batch as one column to the positions of such a module, and
``cut_largest`` takes that column off the module's result.
"""

import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations.transformers.batch_notes import notes_of
from tritoncomm.integrations.transformers.recurrent_layers import parameters_of

__all__ = ["append_largest", "chosen_by_largest", "cut_largest", "wrong_table"]

# Types of which each row follows from its position alone, and types that read the largest position.
_BY_POSITION = {"default", "linear", "yarn", "llama3", "ntk_alpha", "proportional"}
_BY_LARGEST = {"dynamic", "longrope"}
_LARGEST_POSITION = re.compile(r"max\(position_ids|position_ids\.a?max\(")


def wrong_table(parts: Iterable[nn.Module]) -> str | None:
    """Return the reason why a rotary table is not known to be right over shards, once its model is bound; or None."""
    for module in parts:
        for kind in _kinds(module) - _BY_POSITION - _BY_LARGEST:
            known = ", ".join(sorted(_BY_POSITION | _BY_LARGEST))
            return (
                f"rope_type {kind!r} of {type(module).__name__} may choose its table by the length, of which each rank "
                f"sees its own; right are {known}"
            )
    return None


def chosen_by_largest(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose tables depend on the largest position."""
    return [
        module
        for module in parts
        if (kinds := _kinds(module)) & _BY_LARGEST or (kinds - {"default"} and _reads_largest(type(module)))
    ]


def _kinds(module: nn.Module) -> set[str]:
    """Return the types of a module's rotary tables, one for each kind of layers; an empty set for other modules."""
    types: Any = getattr(module, "rope_type", None)
    return {kind for kind in (types.values() if isinstance(types, dict) else [types]) if kind is not None}


@lru_cache(maxsize=256)
def _reads_largest(kind: type[nn.Module]) -> bool:
    """Whether the forward of a module mentions the largest position, behind the decorator that all rotary ones have."""
    try:
        return bool(_LARGEST_POSITION.search(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError):
        return False


def append_largest(module: nn.Module, args: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Append the largest position of the whole batch to the positions in the arguments of a module."""
    index = parameters_of(type(module)).index("position_ids")
    positions = args[index] if index < len(args) else kwargs["position_ids"]
    notes = notes_of(positions, f"{name}: {type(module).__name__}")
    if notes is None or notes.largest is None:
        raise ArgumentError(
            f"{name}: {type(module).__name__} chooses its table by the largest position, which is unknown here: "
            "shard_batch did not make these position_ids"
        )
    # Positions beyond the largest one are those of our padding, which one process does not have.
    column = notes.largest.max().to(positions).expand(*positions.shape[:-1], 1)
    longer = torch.cat([torch.minimum(positions, column), column], -1)
    if index < len(args):
        return (*args[:index], longer, *args[index + 1 :]), kwargs
    return args, {**kwargs, "position_ids": longer}


def cut_largest(module: nn.Module, result: Any) -> Any:
    """Leave the appended position out of a table, or of the tables of cosines and sines, ``[.., s, d]``."""
    tables = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(table, Tensor) and table.dim() > 1 for table in tables):
        raise UnsupportedError(f"{type(module).__name__} returns no tables of cosines and sines; see its rope_type")
    tables = tuple(table[..., :-1, :] for table in tables)
    return tables if isinstance(result, tuple) else tables[0]
