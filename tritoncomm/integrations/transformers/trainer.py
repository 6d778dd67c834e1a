"""``Trainer`` of transformers over sequence shards: ``class SequenceTrainer(UlyssesTrainerMixin, Trainer)``.

The ranks of a sequence group draw the same samples, and each computes the loss of its positions. Everything else
(schedules, logs, clipping, checkpoints, metrics) is the Trainer's own.
"""

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations.transformers.attention import NAME, group_of
from tritoncomm.integrations.transformers.model_parts import ROUTER_LOSS
from tritoncomm.integrations.transformers.training.kinds import TRAINERS, refuse_trainer, strategy_of
from tritoncomm.integrations.transformers.training.label_sums import LabelSums
from tritoncomm.integrations.transformers.training.lanes import Lanes
from tritoncomm.integrations.transformers.training.strategy import Strategy

__all__ = ["TRAINERS", "UlyssesTrainerMixin"]

# To type checkers the mixin is a Trainer of any kind; an import of transformers would cost every user seconds.
_Base: Any = Any if TYPE_CHECKING else object


class UlyssesTrainerMixin(_Base):
    """Train and evaluate over sequence shards; stands before ``Trainer``, or a class made of it, in the bases.

    Batch sizes count samples of a sequence group, so that ``world / group.size()`` groups train data-parallel. The
    data loaders, ``num_items_in_batch`` and ``gather_for_metrics`` count every group once. DDP averages gradients over
    all ranks: ``Trainer`` multiplies each loss by their number, and the losses of a group add up.

    A vision-language model gets a batch with images whole, and shards it; classes behind this one see the text of a
    shard and all images.

    Evaluation gives every rank the loss, the logits and the labels of full sequences. In ``compute_loss``, ``inputs``
    of subclasses before this class are full sequences; those of classes behind it, and the outputs, are shards. For
    numbers of them that are gathered for metrics see ``metrics_are_sums``.

    Attributes:
        metrics_are_sums: whether every number that a class passes to ``accelerator.gather_for_metrics`` is a sum over
            tokens of a shard. The group adds it up then. False by default: such a call is refused, but in TRL's
            ``SFTTrainer`` from 1.15 on, which is known to gather sums.

    Args:
        args, kwargs: of ``Trainer``.
        ulysses: the name that ``register(group)`` returned; by default the name that it registers. The model gets
            this attention (see ``switch``).
        unverified: as of ``switch``.

    Raises:
        ArgumentError: nothing is registered under ``ulysses``, or groups of ranks do not divide the job evenly.
        UnsupportedError: a trainer of TRL other than ``SFTTrainer``; a model whose loss is no sum over labels, in the
            first step, or whose outputs have a further loss; an option that would give other numbers than one process:
            own loss functions, label smoothing, NEFTune, generation, batches that rank 0 dispatches,
            ``batch_rebalance``, DeepSpeed, other parallelism; numbers of a shard that are gathered for metrics and may
            be no sums; or, in the first step, FSDP that left all weights on every rank.

    Example:
        ``SequenceTrainer(model=model, args=args, train_dataset=data, ulysses=register(group)).train()``
    """

    metrics_are_sums = False
    __strategy_class: type[Strategy] = LabelSums

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__strategy_class = strategy_of(cls)

    def __init__(self, *args: Any, ulysses: str = NAME, unverified: bool = False, **kwargs: Any) -> None:
        self.__is_prepared = self.__weights_are_checked = False
        refuse_trainer(type(self))
        self.ulysses = ulysses
        self.unverified = unverified
        self.sequence_group = group_of(ulysses)
        self.__strategy = self.__strategy_class(self)
        super().__init__(*args, **kwargs)
        self.__prepare()

    def call_model_init(self, trial: Any = None) -> Any:
        """Make the model as ``Trainer`` does, with this attention."""
        model = super().call_model_init(trial)
        self.__strategy.switch(model)
        return model

    def __prepare(self) -> None:
        """Reject options, and give the models this attention: before a trainer reads its data, or when it is made."""
        if not self.__is_prepared:
            self.__refuse_options()
            self.__is_prepared = True
        if self.model is not None:
            self.__strategy.attach()

    def __refuse_options(self) -> None:
        """Reject options of ``Trainer`` that would give other numbers over sequence shards than in one process."""
        args = self.args
        # accelerate makes it of environment variables, too, without any argument.
        parallel = getattr(self.accelerator, "parallelism_config", None)
        options = {
            **self.__strategy.options(),
            "neftune_noise_alpha": args.neftune_noise_alpha is not None and self.sequence_group.size() > 1,
            "predict_with_generate": getattr(args, "predict_with_generate", False),
            "dispatch_batches": bool(self.accelerator.dispatch_batches),
            "split_batches": self.accelerator.split_batches,
            "eval_use_gather_object": args.eval_use_gather_object,
            "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
            "parallelism_config: cp_size, sp_size or tp_size": parallel is not None
            and parallel.non_data_parallel_size > 1,
            "deepspeed": args.deepspeed is not None or self.is_deepspeed_enabled,
            "a model that is sharded over tensor ranks": self.get_tp_size() > 1,
        }
        refused = [name for name, is_set in options.items() if is_set]
        if refused:
            remedy = ""
            if "predict_with_generate" in refused:
                remedy = "; set predict_with_generate=False, and generate on full sequences after switch(model, 'sdpa')"
            raise UnsupportedError(
                f"{type(self).__name__}: {', '.join(refused)}: not supported over sequence shards{remedy}"
            )
        # Raised early, before callbacks run and policies are set: on CPUs accelerate leaves FSDP aside without a word.
        if self.__wants_fsdp() and not self.is_fsdp_enabled:
            self.__check_weights()
        # TRL turns it on for every mixture of experts, whatever the model's config says.
        if getattr(self, "aux_loss_enabled", False) and self.sequence_group.size() > 1:
            raise UnsupportedError(
                f"{type(self).__name__}: router_aux_loss_coef: {ROUTER_LOSS}; pass "
                f"router_aux_loss_coef=0.0 to {type(args).__name__}"
            )

    # Data: one lane per sequence group.

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator as ``Trainer`` does; it then loads and gathers data per sequence group."""
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        self.__lanes = Lanes(accelerator, self.sequence_group, type(self).__name__)
        accelerator.prepare_data_loader = self.__prepare_data_loader
        accelerator.gather_for_metrics = self.__gather_for_metrics
        self.gather_function = self.__gather_for_metrics

    def __prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``Accelerator.prepare_data_loader`` over lanes; trainers run models when they are made, too."""
        self.__prepare()
        return self.__lanes.prepare_data_loader(*args, **kwargs)

    def __gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Run ``Accelerator.gather_for_metrics`` over one rank per sequence group."""
        if use_gather_object:
            raise UnsupportedError(f"{type(self).__name__}: use_gather_object is not supported over sequence shards")
        state, world = self.accelerator.gradient_state, self.accelerator.num_processes
        # The last batch repeats samples to fill all lanes; the remainder is the number of real ones.
        count = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def select(x: Tensor) -> Tensor:
            """Return the samples of the first rank of every group, from those of all ranks along dim 0."""
            return x.unflatten(0, (world, -1))[self.__lanes.leaders].flatten(0, 1)[:count]

        apply = importlib.import_module("accelerate.utils").recursively_apply
        return apply(select, self.accelerator.gather(self.__strategy.of_group(input_data)))

    # Numbers: a rank has a share of its group's batch.

    def get_cp_size(self) -> int:
        """Return the ranks that share one batch, by which ``Trainer`` divides batch sizes and counts of labels."""
        return self.sequence_group.size()

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> Any:
        """Return the operations of this rank's share."""
        return super().floating_point_ops(inputs) / self.sequence_group.size()

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        """Count input tokens as ``Trainer`` does, but the batch of a sequence group once: each of its ranks has it."""
        seen = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = seen + (self.state.num_input_tokens_seen - seen) // self.get_cp_size()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Count labels as ``Trainer`` does: of each batch those that ``shard_batch`` keeps."""
        # A public hook for the count is missing in transformers (5.23, 5.24).
        batches = [self.__strategy.with_counted_labels(batch) for batch in batch_samples]
        return super()._get_num_items_in_batch(batches, device)

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss as the class behind the mixin does, of ``inputs`` that every rank of the group has."""
        self.__strategy.attach()
        return self.__strategy.compute_loss(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train as ``Trainer`` does."""
        if not self.__weights_are_checked:
            self.__check_weights()
            self.__weights_are_checked = True
        with self.__strategy.step():
            return super().training_step(*args, **kwargs)

    def __wants_fsdp(self) -> bool:
        """Whether FSDP was asked for: by the arguments, or by the variable that accelerate's launcher sets."""
        return bool(self.args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"

    def __check_weights(self) -> None:
        """Reject weights that are whole on every rank where FSDP was asked for, and a case that was wrong on GPUs."""
        weights = list(self.model.parameters())
        is_sharded = any(isinstance(weight, DTensor) for weight in weights)  # transformers may shard without fsdp
        if self.__wants_fsdp() and not is_sharded:
            is_on_cpu = self.accelerator.device.type == "cpu"
            remedy = "set fsdp_config={'version': 2}, or leave fsdp out"
            if is_on_cpu:
                remedy = "accelerate shards none on CPUs; leave fsdp out"
            raise UnsupportedError(
                f"{type(self).__name__}: FSDP was asked for, and every rank has all weights: {remedy}"
            )
        # Seen with 4 ranks of one H200 in groups of 2: losses differed from run to run. They did not with
        # CUDA_LAUNCH_BLOCKING=1, nor in one group of all ranks, nor, in 12 runs, with all weights trained. TODO: delete
        # when the cause is found.
        is_partial = 1 < self.sequence_group.size() < self.accelerator.num_processes
        if is_sharded and is_partial and weights[0].is_cuda and not all(weight.requires_grad for weight in weights):
            raise UnsupportedError(
                f"{type(self).__name__}: frozen weights under FSDP2 on GPUs, in sequence groups of "
                f"{self.sequence_group.size()} of {self.accelerator.num_processes} ranks: losses were wrong in some "
                "runs, for a reason that is not known. Make one group of all ranks, or leave fsdp out"
            )

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict as the class behind the mixin does; results are of full sequences, on every rank."""
        return self.__strategy.predict(super().prediction_step, model, inputs, prediction_loss_only, ignore_keys)
