"""Mistakes that implementations of sequence-parallel preferences have had in public, planted in ours.

A recipe of ``tritoncomm verify`` calls ``plant`` where it runs on several ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F

from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin
from tritoncomm.integrations.transformers.training import fused_heads

__all__ = ["MISTAKES", "plant"]

MISTAKES = {
    "labels shifted inside a shard": "the model: its output is no part of the whole one; is 0.",
    "a label masked at each border": "the model: its output is no part of the whole one; is 0.",
    "losses times the ranks in evaluation": "the loss is ",
    "metrics shifted twice": "the model: its output is no part of the whole one",
    "a gather that sums": "gradient of model.norm.weight is 2 times the whole one",
}
"""What the report says of each."""


def plant(name: str) -> None:
    """Make a mistake from here on."""
    shard, gather, fields = fused_heads.shard_batch, fused_heads.all_gather_dim, fused_heads._of_all_positions

    def sharded(batch: Any, group: Any, **more: Any) -> dict[str, Any]:
        """Shift the shard's own labels, or leave out the first of each shard."""
        out = shard(batch, group, **more)
        labels = out["shift_labels"].clone()
        if name == "a label masked at each border":
            labels[:, 0] = -100
        else:
            mine = shard({**batch, "shift_labels": batch["labels"]}, group)["shift_labels"]
            labels = F.pad(mine, (0, 1), value=-100)[:, 1:].contiguous()
        return {**out, "shift_labels": labels}

    def shifted(numbers: Any, call: Any) -> dict[str, Any]:
        """Shift what the metrics are made of, which is shifted already."""
        whole = fields(numbers, call)
        return {key: x if key == "log_probs" else torch.roll(x, 1, 1) for key, x in whole.items()}

    predict = UlyssesTrainerMixin.prediction_step

    def predicted(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the losses of a group up, each of which is of the whole batch."""
        loss, *others = predict(self, *args, **kwargs)
        return (loss * self.sequence_group.size(), *others)

    if name in ("labels shifted inside a shard", "a label masked at each border"):
        fused_heads.shard_batch = sharded
    elif name == "losses times the ranks in evaluation":
        UlyssesTrainerMixin.prediction_step = predicted
    elif name == "metrics shifted twice":
        fused_heads._of_all_positions = shifted
    else:
        fused_heads.all_gather_dim = lambda x, dim, group, **_: gather(x, dim, group)
