"""Strategy of ``UlyssesTrainerMixin``: the part of its hooks that differs between kinds of losses."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations.transformers import model_parts
from tritoncomm.integrations.transformers.hooks import Switch, switches_of
from tritoncomm.integrations.transformers.switching import switch

__all__ = ["Prediction", "Strategy"]


class Prediction(NamedTuple):
    """Results of ``prediction_step``, of full sequences: None, or logits and labels as ``Trainer`` nests them."""

    loss: Tensor | None
    logits: Any
    labels: Any


class Strategy:
    """How the losses of a trainer are computed over sequence shards, and how its numbers are gathered.

    A mixin has the hooks of ``Trainer``, and a strategy what differs between kinds of losses.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._group, self._label = trainer, trainer.sequence_group, type(trainer).__name__
        self._switches: WeakKeyDictionary[nn.Module, Switch] = WeakKeyDictionary()

    # Models.

    def models(self) -> list[nn.Module]:
        """Return the models that run over shards."""
        return [self._trainer.model]

    def attach(self) -> None:
        """Give the models this attention, unless they have it: a callback that generates may have taken it away."""
        for model in self.models():
            outer: Any = model_parts.outermost(model.modules())
            owner = self._switches.get(model)
            if owner is None or not owner.is_active(outer):
                name = self._trainer.ulysses
                if not any(owner.name == name and owner.is_active(outer) for owner in switches_of(model)):
                    self.switch(model)
                owner = next(owner for owner in switches_of(model) if owner.name == name and owner.is_on)
                self._switches[model] = owner
            self.complete(model, owner)

    def complete(self, model: nn.Module, switch: Switch) -> None:
        """Add what a model needs besides this attention."""

    def switch(self, model: Any) -> None:
        """Give a model this attention."""
        if any(model_parts.learns_prompts(module) for module in model.modules()):  # also on one rank, with labels
            raise UnsupportedError(f"{self._label}: {model_parts.PROMPTS}")
        switch(model, self._trainer.ulysses, unverified=self._trainer.unverified)

    # Numbers.

    def options(self) -> dict[str, bool]:
        """Return options that would give other numbers than one process, by name, and whether they are set."""
        return {}

    def step(self) -> AbstractContextManager[None]:
        """Return what a step of training or prediction runs within."""
        return nullcontext()

    def with_counted_labels(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a whole batch with the labels that ``Trainer`` has to count."""
        return batch

    def of_group(self, numbers: Any) -> Any:
        """Return numbers of the group's batch from those that a class gathers for metrics."""
        return numbers

    def compute_loss(
        self, compute: Callable[..., Any], model: Any, inputs: Mapping[str, Any], return_outputs: bool, num_items: Any
    ) -> Any:
        """Run ``compute_loss`` of the class behind the mixin, on a batch that every rank of the group has."""
        raise NotImplementedError

    def predict(
        self, predict: Callable[..., Any], model: Any, inputs: Mapping[str, Any], only_loss: bool, ignore_keys: Any
    ) -> Prediction:
        """Run ``prediction_step`` of the class behind the mixin; results are of full sequences."""
        raise NotImplementedError
