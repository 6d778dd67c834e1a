"""Ulysses sequence parallelism for Hugging Face transformers: an attention implementation, and a shard of every batch.

``switch(model, register(group))``, ``model(**shard_batch(batch, group))``: each rank computes the logits and the loss
of its positions, the gradients add up over the group. The attention refuses a batch that ``shard_batch`` did not make.
``trainer`` has a mixin of ``Trainer``, ``experts`` expert parallelism.
"""

from tritoncomm.integrations.changes import outdated, outdated_end
from tritoncomm.integrations.transformers.attention import NAME, group_of, register, unregister
from tritoncomm.integrations.transformers.batch import shard_batch
from tritoncomm.integrations.transformers.hooks import Untraced
from tritoncomm.integrations.transformers.recurrences import (
    register_convolution,
    register_recurrence,
    unregister_recurrence,
)
from tritoncomm.integrations.transformers.switching import switch
from tritoncomm.ulysses import dropout_by_rank

__all__ = [
    "NAME", "dropout_by_rank", "group_of", "register", "register_convolution", "register_recurrence", "shard_batch",
    "switch", "unregister", "unregister_recurrence",
]  # fmt: skip

_begin = _check_call = _refuse_tower = _watch = outdated  # hooks in models that were saved
_check_loss, _Untraced = outdated_end, Untraced
