"""Losses of whole sequences: every rank of a group has the numbers of all tokens, and computes the same loss."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations.transformers.hooks import Switch
from tritoncomm.integrations.transformers.training.fused_heads import WholeOutputs, gathered_head
from tritoncomm.integrations.transformers.training.strategy import Prediction, Strategy

__all__ = ["WholeSequences"]


class WholeSequences(Strategy):
    """Strategy of TRL's ``DPOTrainer`` and ``KTOTrainer``: the class behind the mixin gets full sequences.

    Its models take them, too, and return numbers of all tokens where they are called with the fused head. What it
    gathers for metrics is of full sequences, and of every lane once.
    """

    def models(self) -> list[nn.Module]:
        reference = getattr(self._trainer, "ref_model", None)
        return [self._trainer.model] if reference is None else [self._trainer.model, reference]

    def options(self) -> dict[str, bool]:
        # It asks for logits, in a further forward.
        return {"compute_metrics": self._trainer.compute_metrics is not None and self._group.size() > 1}

    def complete(self, model: nn.Module, switch: Switch) -> None:
        if not WholeOutputs.are_on(model, switch):
            WholeOutputs(model, switch)

    def compute_loss(
        self, compute: Callable[..., Any], model: Any, inputs: Mapping[str, Any], return_outputs: bool, num_items: Any
    ) -> Any:
        if return_outputs and self._group.size() > 1:
            raise UnsupportedError(
                f"{self._label}: logits of full sequences are not supported over sequence shards; evaluate() without "
                "compute_metrics asks for none, and predict() needs prediction_loss_only=True"
            )
        with ExitStack() as heads:
            for part in self.models():
                heads.enter_context(gathered_head(part, self._label))
            return compute(model, inputs, return_outputs, num_items)

    def predict(
        self, predict: Callable[..., Any], model: Any, inputs: Mapping[str, Any], only_loss: bool, ignore_keys: Any
    ) -> Prediction:
        return Prediction(*predict(model, inputs, only_loss, ignore_keys))
