"""Losses that are sums over labels: each rank has those of its positions, and the losses of a group add up."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tritoncomm.core import eager
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations.changes import Changes
from tritoncomm.integrations.transformers import model_parts
from tritoncomm.integrations.transformers.batch import is_text, next_labels, shard_batch, text_of
from tritoncomm.integrations.transformers.sources import takes_keyword
from tritoncomm.integrations.transformers.training.fused_heads import gathered_head, has_fused_heads
from tritoncomm.integrations.transformers.training.strategy import Prediction, Strategy

__all__ = ["LabelSums"]


class LabelSums(Strategy):
    """Strategy of ``Trainer`` and TRL's ``SFTTrainer``: the class behind the mixin gets, and returns, shards."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._is_in_step = False

    def options(self) -> dict[str, bool]:
        trainer = self._trainer
        model: Any = model_parts.outermost(trainer.model.modules())
        takes_count = trainer.model_accepts_loss_kwargs or takes_keyword(type(model), "num_items_in_batch")
        return {
            "compute_loss_func": trainer.compute_loss_func is not None,
            "label_smoothing_factor": trainer.label_smoother is not None,
            "a model without num_items_in_batch": not takes_count,
        }

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within: ``gather_for_metrics`` gets numbers of shards. Outside, `Trainer` passes it full sequences."""
        before, self._is_in_step = self._is_in_step, True
        try:
            yield
        finally:
            self._is_in_step = before

    def with_counted_labels(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        # `Trainer` counts `shift_labels` as they are.
        labels = next_labels(batch)
        return batch if labels is None else {**batch, "shift_labels": labels}

    def of_group(self, numbers: Any) -> Any:
        if not self._is_in_step or self._group.size() == 1:
            return numbers
        self._check_sums()
        apply = importlib.import_module("accelerate.utils").recursively_apply
        return apply(lambda x: eager.all_reduce(x, self._group, "gather_for_metrics"), numbers)

    def _check_sums(self) -> None:
        """Reject numbers of a shard that may be no sums: a mean over a shard is not one over the sequence."""
        kind = type(self._trainer)
        owner = next(
            each
            for each in kind.__mro__
            if "compute_loss" in vars(each) and not each.__module__.startswith("tritoncomm.")
        )
        if not (self._trainer.metrics_are_sums or _is_known_to_sum(owner)):
            raise UnsupportedError(
                f"{self._label}: compute_loss of {owner.__module__}.{owner.__qualname__} gathers numbers of a "
                "sequence shard for metrics. If each is a sum over tokens of its shard, and no mean, set "
                f"metrics_are_sums = True in {self._label}. TRL's SFTTrainer gathers only sums from 1.15 on"
            )

    def compute_loss(
        self, compute: Callable[..., Any], model: Any, inputs: Mapping[str, Any], return_outputs: bool, num_items: Any
    ) -> Any:
        takes_whole = self._takes_whole(inputs)
        shard = shard_batch(text_of(inputs) if takes_whole else inputs, self._group)
        if "labels" not in shard:
            raise ArgumentError(f"{self._label}: a batch needs labels, only {', '.join(inputs)} are there")
        if num_items is None:  # a mean of this batch: as `Trainer` counts them if every group has as many labels
            # With the average over devices it counts the labels of all groups, and multiplies the loss by the ranks.
            # Else it counts those of one rank; the mean over ranks then divides by ``size`` what is a sum over the
            # group.
            ranks, size = self._trainer.accelerator.num_processes, self._group.size()
            scale = ranks // size if self._trainer.args.average_tokens_across_devices else 1 / size
            num_items = shard["num_items_in_batch"] * scale
        # The model attends to all positions, and needs the mask of all. Others see the mask of the inputs' positions.
        mask = shard.pop("attention_mask", None)
        if inputs.get("attention_mask") is not None:
            shard["attention_mask"] = self._shard_of(mask)
        for_model = {} if mask is None else {"attention_mask": mask}
        if takes_whole:  # the model gets the whole batch in place of the shard, which it makes itself
            whole = {**text_of(inputs), "shift_labels": next_labels(inputs)}
            for_model = {**dict.fromkeys(shard.keys() - {"num_items_in_batch"}), **whole}
            shard = {**inputs, **shard}
        with self.step(), Changes() as counted:
            # Models that want a mean of each batch get its count, too, or each rank would divide by its own labels.
            counted.set_attribute(self._trainer, "model_accepts_loss_kwargs", value=True)
            result = compute(_Sharded(self, model, for_model), shard, return_outputs, num_items)
            counted.undo()
            return result

    def _takes_whole(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the model gets the whole batch: one around a language model does, unless it is of text alone."""
        if self._group.size() == 1 or is_text(inputs):
            return False
        return model_parts.language_model_path(model_parts.outermost(self._trainer.model.modules())) is not None

    def refuse_further_losses(self, outputs: Any) -> None:
        """Reject outputs with a loss besides the one that is a mean over labels: it would be of this rank's tokens."""
        if not isinstance(outputs, Mapping) or self._group.size() == 1:
            return
        further = [name for name, x in outputs.items() if name.endswith("loss") and name != "loss" and x is not None]
        if further:
            raise UnsupportedError(f"{self._label}: the model returns {', '.join(further)} of its own shard")

    def head_of(self, is_fused: bool) -> Any:
        """Return the context of a call of the model, of TRL's fused head or not."""
        return gathered_head(self._trainer.model, self._label, is_fused)

    def predict(
        self, predict: Callable[..., Any], model: Any, inputs: Mapping[str, Any], only_loss: bool, ignore_keys: Any
    ) -> Prediction:
        length = inputs["input_ids"].shape[1]
        callee = model
        if any(inputs.get(name) is None for name in self._trainer.label_names):  # `Trainer` calls no compute_loss then
            takes_whole = self._takes_whole(inputs)
            callee = lambda **batch: model(**(batch if takes_whole else shard_batch(batch, self._group)))  # noqa: E731
        with self.step():
            loss, logits, labels = predict(callee, inputs, only_loss, ignore_keys)
        if loss is not None:
            loss = eager.all_reduce(loss, self._group, "prediction_step") / self._group.size()
        return Prediction(loss, self._full(logits, length), labels)

    def _shard_of(self, x: Tensor) -> Tensor:
        """Return this rank's positions of ``x`` ``[b, S]``, whose length the ranks divide."""
        return x.chunk(self._group.size(), dim=1)[self._group.rank()]

    def _full(self, outputs: Any, length: int) -> Any:
        """Gather outputs ``[b, s, ...]`` of all ranks of the group, without padding."""
        if isinstance(outputs, list | tuple):
            return type(outputs)(self._full(each, length) for each in outputs)
        if outputs is None:
            return None
        run = -(-length // self._group.size())
        if not isinstance(outputs, Tensor) or outputs.dim() < 2 or outputs.shape[1] != run:
            shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise UnsupportedError(f"{self._label}: an output {shape} that has no dim of {run} positions")
        return eager.all_gather(outputs, 1, self._group, "prediction_step")[:, :length]


class _Sharded:
    """Model as classes behind the mixin call it, with shards: the model gets other entries, and outputs are checked.

    Args:
        for_model: entries that the model gets instead, such as the mask of all positions; None for none. Entries that
            a class leaves out, such as labels, stay left out.
    """

    def __init__(self, strategy: LabelSums, model: Any, for_model: Mapping[str, Any]) -> None:
        self._strategy, self._model, self._for_model = strategy, model, for_model

    def __call__(self, **inputs: Any) -> Any:
        """Call the model with its own entries."""
        for name, x in self._for_model.items():
            if x is None:
                inputs.pop(name, None)
            elif name in inputs or name == "attention_mask":
                inputs[name] = x
        with self._strategy.head_of(bool(inputs.get("fused_lm_head"))):
            outputs = self._model(**inputs)
        self._strategy.refuse_further_losses(outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _is_known_to_sum(owner: type) -> bool:
    """Whether ``compute_loss`` of the class gathers nothing but sums over tokens."""
    name = owner.__module__, owner.__qualname__
    return name == ("trl.trainer.sft_trainer", "SFTTrainer") and has_fused_heads()
