"""Trainers of TRL by name: which strategy is right for each, or why it is refused."""

from typing import NamedTuple

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations.transformers.training.fused_heads import FUSED_SINCE, has_fused_heads
from tritoncomm.integrations.transformers.training.label_sums import LabelSums
from tritoncomm.integrations.transformers.training.strategy import Strategy
from tritoncomm.integrations.transformers.training.whole_sequences import WholeSequences

__all__ = ["TRAINERS", "TrainerKind", "refuse_trainer", "strategy_of"]


class TrainerKind(NamedTuple):
    """Kind of a trainer of TRL.

    Attributes:
        strategy: which gives them over sequence shards; None where nothing does.
        reason: why not.
        remedy: for the user.
    """

    strategy: type[Strategy] | None
    reason: str = ""
    remedy: str = ""


_ALONE = "use it without UlyssesTrainerMixin, on sequences that fit on a rank"
_LABELS, _SEQUENCES = TrainerKind(LabelSums), TrainerKind(WholeSequences)
_LOGITS = TrainerKind(
    strategy=None,
    reason="takes log-probabilities from logits of whole sequences, of which each rank has a part",
    remedy=f"DPOTrainer and KTOTrainer do not; or {_ALONE}",
)
_GENERATES = TrainerKind(
    strategy=None,
    reason="generates, and needs the log-probability of whole completions, of which each rank has a part",
    remedy=f"train on recorded completions with DPOTrainer or KTOTrainer, or {_ALONE}",
)
_TEACHER = TrainerKind(
    strategy=None, reason="compares logits of a shard with those of a teacher that got no shard", remedy=_ALONE
)
_REWARD = TrainerKind(strategy=None, reason="scores a whole sequence, and would score each shard", remedy=_ALONE)
_UNKNOWN = TrainerKind(
    strategy=None,
    reason="is not known to be right",
    remedy=f"Trainer, SFTTrainer, DPOTrainer and KTOTrainer are; or {_ALONE}",
)
TRAINERS = {
    "SFTTrainer": _LABELS, "DPOTrainer": _SEQUENCES, "KTOTrainer": _SEQUENCES,
    "CPOTrainer": _LOGITS, "ORPOTrainer": _LOGITS, "TPOTrainer": _LOGITS,
    "A2POTrainer": _GENERATES, "AsyncGRPOTrainer": _GENERATES, "GMPOTrainer": _GENERATES, "GRPOTrainer": _GENERATES,
    "OnlineDPOTrainer": _GENERATES, "RLOOTrainer": _GENERATES, "SDFTTrainer": _GENERATES, "SDPOTrainer": _GENERATES,
    "AsyncDistillationTrainer": _TEACHER, "DistillationTrainer": _TEACHER, "GKDTrainer": _TEACHER,
    "GOLDTrainer": _TEACHER, "IWOPDTrainer": _TEACHER, "ServerDistillationTrainer": _TEACHER,
    "RewardTrainer": _REWARD,
}  # fmt: skip
"""TRL's trainers by the names of their classes; subclasses of users are of the same kind."""


def strategy_of(kind: type) -> type[Strategy]:
    """Return the strategy for a class made of the mixin and a trainer."""
    strategies = [TRAINERS.get(base.__name__, _UNKNOWN).strategy for base in _trainers_of_trl(kind)]
    return next(filter(None, strategies), LabelSums)


def refuse_trainer(kind: type) -> None:
    """Reject a class that is, or is made of, a trainer of TRL that would give other numbers over sequence shards."""
    for base in _trainers_of_trl(kind):
        name = base.__name__
        of_trl = TRAINERS.get(name, _UNKNOWN)
        if of_trl.strategy is None:
            raise UnsupportedError(
                f"{kind.__name__}: {name} {of_trl.reason}: not supported over sequence shards; {of_trl.remedy}"
            )
        if of_trl.strategy is WholeSequences and not has_fused_heads():
            since = ".".join(map(str, FUSED_SINCE))
            raise UnsupportedError(f"{kind.__name__}: {name} of TRL before {since} makes logits; install trl>={since}")


def _trainers_of_trl(kind: type) -> list[type]:
    """Return the classes of TRL among the bases of a class that are trainers of their own."""
    return [
        base
        for base in kind.__mro__
        if base.__module__.startswith("trl.") and hasattr(base, "training_step") and not base.__name__.startswith("_")
    ]
