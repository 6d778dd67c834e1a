"""Entries of ``register`` by name, and the batches that each takes."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations.changes import Changes
from tritoncomm.integrations.transformers.batch_notes import notes_of

__all__ = ["Registration", "check_bidirectional", "registered", "registration"]


class Registration:
    """Entry of ``register``.

    Attributes:
        group: ranks that hold the sequence.
        name: for ``switch``.
        attention: of transformers, for all positions.
        own_positions: whether positions are accepted that ``shard_batch`` did not make.
        functions: of recurrent layers over shards of the group, by the original.
        changes: of transformers' registries.
    """

    def __init__(self, group: ProcessGroup, name: str, attention: str, own_positions: bool) -> None:
        self.group, self.name, self.attention, self.own_positions = group, name, attention, own_positions
        self.functions: dict[Any, Callable[..., Any]] = {}
        self.changes = Changes()
        # Modules of models that are right as long as this switch is on; None: whatever is on. A switch knows its
        # modules, so that a value would keep its key.
        self.verdicts: WeakKeyDictionary[Any, ref[Any] | None] = WeakKeyDictionary()
        self.inside_of_models: WeakSet[Any] = WeakSet()  # attention without positions, whose model checks the batch

    def check_positions(self, module: Any, position_ids: Any) -> None:
        """Reject position ids that ``shard_batch`` did not make for this group: the batch may not be sharded."""
        notes = notes_of(position_ids, f"{self.name}: {type(module).__name__}")
        if notes is None:
            raise ArgumentError(
                f"{self.name}: shard_batch did not make these position_ids: this rank's samples would count as a part "
                f"of one sequence of {self.group.size()} ranks. Move the batch to its device, then call "
                "model(**shard_batch(batch, group)), in training and in evaluation; or train with UlyssesTrainerMixin. "
                "Slices of the rows of position_ids, x[a:b], are known; copies and rows by index are not. Before "
                "generate(), switch(model, 'sdpa')"
            )
        if notes.group != self.group.group_name:
            raise ArgumentError(
                f"{self.name}: shard_batch made these position_ids for the group {notes.group!r}, and attention is "
                f"over the group {self.group.group_name!r}; pass both the same group"
            )


registered: dict[str, Registration] = {}  # by name


def registration(name: str) -> Registration:
    """Return the entry of ``register``.

    Raises:
        ArgumentError: ``register`` did not add ``name``.
    """
    if name not in registered:
        raise ArgumentError(f"{name!r} is not registered here, only {sorted(registered)}; call register(group) first")
    return registered[name]


def check_bidirectional(label: str, position_ids: Any, group: ProcessGroup) -> None:
    """Reject batches that are right in causal models alone: padding without a mask, and packed sequences."""
    notes = notes_of(position_ids, label)
    if notes is not None and notes.padded:
        raise UnsupportedError(
            f"{label} is bidirectional, and would attend to the {notes.padded} positions that shard_batch added to the "
            f"sequence; pass an attention_mask, of ones, or sequences of a multiple of {group.size()} positions"
        )
    if notes is not None and notes.documents is not None:
        raise UnsupportedError(f"{label} is bidirectional, and packed sequences are for causal models")
