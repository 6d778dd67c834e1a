"""``Trainer`` of transformers over sequence shards: ``class SequenceTrainer(UlyssesTrainerMixin, Trainer)``.

The ranks of a sequence group draw the same samples, and each computes the loss of its positions. Everything else
(schedules, logs, clipping, checkpoints, metrics) is the Trainer's own.
"""

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tritoncomm.core import eager
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations.transformers import model_parts
from tritoncomm.integrations.transformers.attention import NAME, group_of
from tritoncomm.integrations.transformers.batch import next_labels, shard_batch
from tritoncomm.integrations.transformers.model_parts import ROUTER_LOSS
from tritoncomm.integrations.transformers.switching import switch

__all__ = ["TRAINERS", "UlyssesTrainerMixin"]

# To type checkers the mixin is a Trainer of any kind; an import of transformers would cost every user seconds.
_Base: Any = Any if TYPE_CHECKING else object
_SEQUENCES = "needs the log-probability of a whole sequence, of which each rank has a part"
_GENERATES = "generates, and needs the log-probability of whole completions, of which each rank has a part"
_TEACHER = "compares logits of a shard with those of a teacher that got no shard"
TRAINERS = {
    "SFTTrainer": "", "RewardTrainer": "scores a whole sequence, and would score each shard",
    "CPOTrainer": _SEQUENCES, "DPOTrainer": _SEQUENCES, "KTOTrainer": _SEQUENCES, "ORPOTrainer": _SEQUENCES,
    "TPOTrainer": _SEQUENCES,
    "A2POTrainer": _GENERATES, "AsyncGRPOTrainer": _GENERATES, "GMPOTrainer": _GENERATES, "GRPOTrainer": _GENERATES,
    "OnlineDPOTrainer": _GENERATES, "RLOOTrainer": _GENERATES, "SDFTTrainer": _GENERATES, "SDPOTrainer": _GENERATES,
    "AsyncDistillationTrainer": _TEACHER, "DistillationTrainer": _TEACHER, "GKDTrainer": _TEACHER,
    "GOLDTrainer": _TEACHER, "IWOPDTrainer": _TEACHER, "ServerDistillationTrainer": _TEACHER,
}  # fmt: skip
"""TRL's trainers by name: the reason why one is refused over sequence shards, empty for one that is right."""
_SUMS_SINCE = 1, 15  # release of TRL whose SFTTrainer gathers sums; earlier ones gathered means, too


class UlyssesTrainerMixin(_Base):
    """Train and evaluate over sequence shards; stands before ``Trainer``, or a class made of it, in the bases.

    Batch sizes count samples of a sequence group, so that ``world / group.size()`` groups train data-parallel. The
    data loaders, ``num_items_in_batch`` and ``gather_for_metrics`` count every group once. DDP averages gradients over
    all ranks: ``Trainer`` multiplies each loss by their number, and the losses of a group add up.

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

    def __init__(self, *args: Any, ulysses: str = NAME, unverified: bool = False, **kwargs: Any) -> None:
        self.__is_in_step = self.__weights_are_checked = False
        _refuse_trainer(type(self))
        self.ulysses = ulysses
        self.unverified = unverified
        self.sequence_group = group_of(ulysses)
        super().__init__(*args, **kwargs)
        self.__refuse_options()
        if self.model_init is None:
            self.__switch_model(self.model)

    def call_model_init(self, trial: Any = None) -> Any:
        """Make the model as ``Trainer`` does, with this attention."""
        model = super().call_model_init(trial)
        self.__switch_model(model)
        return model

    def __switch_model(self, model: Any) -> None:
        """Give a model this attention."""
        if any(model_parts.learns_prompts(module) for module in model.modules()):  # also on one rank, with labels
            raise UnsupportedError(f"{type(self).__name__}: {model_parts.PROMPTS}")
        switch(model, self.ulysses, unverified=self.unverified)

    def __refuse_options(self) -> None:
        """Reject options of ``Trainer`` that would give other numbers over sequence shards than in one process."""
        args = self.args
        parallel = getattr(self.accelerator, "parallelism_config", None)  # its variables set it without any argument
        options = {
            "compute_loss_func": self.compute_loss_func is not None,
            "neftune_noise_alpha": args.neftune_noise_alpha is not None and self.sequence_group.size() > 1,
            "label_smoothing_factor": self.label_smoother is not None,
            "predict_with_generate": getattr(args, "predict_with_generate", False),
            "dispatch_batches": bool(self.accelerator.dispatch_batches),
            "split_batches": self.accelerator.split_batches,
            "eval_use_gather_object": args.eval_use_gather_object,
            "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
            "parallelism_config: cp_size, sp_size or tp_size": parallel is not None
            and parallel.non_data_parallel_size > 1,
            "deepspeed": args.deepspeed is not None or self.is_deepspeed_enabled,
            "a model that is sharded over tensor ranks": self.get_tp_size() > 1,
            "a model without num_items_in_batch": not self.model_accepts_loss_kwargs,
        }
        refused = [name for name, is_set in options.items() if is_set]
        if refused:
            remedy = ""
            if "predict_with_generate" in refused:
                remedy = "; set predict_with_generate=False, and generate on full sequences after switch(model, 'sdpa')"
            raise UnsupportedError(
                f"{type(self).__name__}: {', '.join(refused)}: not supported over sequence shards{remedy}"
            )
        # Said before callbacks run and policies are set: on CPUs accelerate leaves FSDP aside without a word.
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
        self.__lanes = _Lanes(accelerator, self.sequence_group, type(self).__name__)
        accelerator.prepare_data_loader = self.__lanes.prepare_data_loader
        accelerator.gather_for_metrics = self.__gather_for_metrics
        self.gather_function = self.__gather_for_metrics

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
        if self.__is_in_step and self.sequence_group.size() > 1:
            self.__check_sums()
            input_data = apply(lambda x: eager.all_reduce(x, self.sequence_group, "gather_for_metrics"), input_data)
        return apply(select, self.accelerator.gather(input_data))

    @contextmanager
    def __step(self) -> Iterator[None]:
        """Within: ``gather_for_metrics`` gets numbers of shards. Outside, `Trainer` passes it full sequences."""
        before, self.__is_in_step = self.__is_in_step, True
        try:
            yield
        finally:
            self.__is_in_step = before

    def __check_sums(self) -> None:
        """Reject numbers of a shard that may be no sums: a mean over a shard is not one over the sequence."""
        owner = next(
            each for each in type(self).__mro__ if "compute_loss" in vars(each) and each is not UlyssesTrainerMixin
        )
        if not (self.metrics_are_sums or _is_known_to_sum(owner)):
            raise UnsupportedError(
                f"{type(self).__name__}: compute_loss of {owner.__module__}.{owner.__qualname__} gathers numbers of a "
                "sequence shard for metrics. If each is a sum over tokens of its shard, and no mean, set "
                f"metrics_are_sums = True in {type(self).__name__}. TRL's SFTTrainer gathers only sums from 1.15 on"
            )

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
        # A public hook for the count is missing in transformers (5.23, 5.24); `shift_labels` are counted as they are.
        kept = [
            {**batch, "shift_labels": labels} if (labels := next_labels(batch)) is not None else batch
            for batch in batch_samples
        ]
        return super()._get_num_items_in_batch(kept, device)

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss as ``Trainer`` does, of this rank's shard of ``inputs``."""
        shard = shard_batch(inputs, self.sequence_group)
        size = self.sequence_group.size()
        if "labels" not in shard:
            raise ArgumentError(f"{type(self).__name__}: a batch needs labels, only {', '.join(inputs)} are there")
        if num_items_in_batch is None:  # as `Trainer` counts them if every group has as many labels
            lanes = len(self.__lanes.leaders) if self.args.average_tokens_across_devices else 1 / size
            num_items_in_batch = shard["num_items_in_batch"] * lanes
        # The model attends to all positions, and needs the mask of all. Others see the mask of the inputs' positions.
        mask = shard.pop("attention_mask", None)
        if inputs.get("attention_mask") is not None:
            shard["attention_mask"] = self.__shard_of(mask)
        with self.__step():
            return super().compute_loss(_Sharded(self, model, mask), shard, return_outputs, num_items_in_batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train as ``Trainer`` does."""
        if not self.__weights_are_checked:
            self.__check_weights()
            self.__weights_are_checked = True
        with self.__step():
            return super().training_step(*args, **kwargs)

    def __wants_fsdp(self) -> bool:
        """Whether FSDP was asked for: by the arguments, or by the variable that accelerate's launcher sets."""
        return bool(self.args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"

    def __check_weights(self) -> None:
        """Reject weights that are whole on every rank where FSDP was asked for, and a case that was wrong on GPUs."""
        weights = list(self.model.parameters())
        is_sharded = any(isinstance(weight, DTensor) for weight in weights)  # by transformers, too, unasked
        if self.__wants_fsdp() and not is_sharded:
            is_on_cpu = self.accelerator.device.type == "cpu"
            remedy = "accelerate shards none on CPUs" if is_on_cpu else "set fsdp_config={'version': 2}"
            raise UnsupportedError(
                f"{type(self).__name__}: FSDP was asked for, and every rank has all weights: {remedy}; or leave fsdp "
                "out"
            )
        # Losses differed from run to run with 4 ranks of one H200 in groups of 2, not with CUDA_LAUNCH_BLOCKING=1, not
        # in groups of all ranks, and with all weights trained in none of 12 runs. TODO: delete when the cause is found.
        is_partial = 1 < self.sequence_group.size() < self.accelerator.num_processes
        if is_sharded and is_partial and weights[0].is_cuda and not all(weight.requires_grad for weight in weights):
            raise UnsupportedError(
                f"{type(self).__name__}: frozen weights under FSDP2 on GPUs, in sequence groups of "
                f"{self.sequence_group.size()} of {self.accelerator.num_processes} ranks: losses were wrong in some "
                "runs, for a reason that is not known. Make one group of all ranks, or leave fsdp out"
            )

    def __shard_of(self, x: Tensor) -> Tensor:
        """Return this rank's positions of ``x`` ``[b, S]``, whose length the ranks divide."""
        return x.chunk(self.sequence_group.size(), dim=1)[self.sequence_group.rank()]

    def refuse_further_losses(self, outputs: Any) -> None:
        """Reject outputs with a loss besides the one that is a mean over labels: it would be of this rank's tokens."""
        if not isinstance(outputs, Mapping) or self.sequence_group.size() == 1:
            return
        further = [name for name, x in outputs.items() if name.endswith("loss") and name != "loss" and x is not None]
        if further:
            raise UnsupportedError(f"{type(self).__name__}: the model returns {', '.join(further)} of its own shard")

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Predict as ``Trainer`` does; the loss and the logits are of full sequences, on every rank."""
        length = inputs["input_ids"].shape[1]
        called = model
        if any(inputs.get(name) is None for name in self.label_names):  # `Trainer` does not call compute_loss then
            called = lambda **whole: model(**shard_batch(whole, self.sequence_group))  # noqa: E731
        with self.__step():
            loss, logits, labels = super().prediction_step(called, inputs, prediction_loss_only, ignore_keys)
        if loss is not None:
            loss = eager.all_reduce(loss, self.sequence_group, "prediction_step") / self.sequence_group.size()
        return loss, self.__full(logits, length), labels

    def __full(self, outputs: Any, length: int) -> Any:
        """Gather outputs ``[b, s, ...]`` of all ranks of the group, without padding."""
        if isinstance(outputs, list | tuple):
            return type(outputs)(self.__full(each, length) for each in outputs)
        if outputs is None:
            return None
        run = -(-length // self.sequence_group.size())
        if not isinstance(outputs, Tensor) or outputs.dim() < 2 or outputs.shape[1] != run:
            shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise UnsupportedError(f"{type(self).__name__}: an output {shape} that has no dim of {run} positions")
        return eager.all_gather(outputs, 1, self.sequence_group, None, "prediction_step")[:, :length]


class _Lanes:
    """Sequence groups of a job, each a lane of the data loaders: its ranks draw the same samples.

    Attributes:
        leaders: first rank of every group, in order; all ranks of the job compare theirs.
    """

    def __init__(self, accelerator: Any, group: ProcessGroup, label: str) -> None:
        self._accelerator, self._prepare_as_accelerate = accelerator, accelerator.prepare_data_loader
        self._leader = torch.distributed.get_process_group_ranks(group)[0]
        if accelerator.num_processes != (world := torch.distributed.get_world_size()):
            raise ArgumentError(
                f"{label}: accelerate takes this job of {world} ranks for {accelerator.num_processes}; without a GPU, "
                "set use_cpu=True in TrainingArguments"
            )
        firsts = accelerator.gather(torch.tensor([self._leader], device=accelerator.device)).tolist()
        self.leaders = sorted(set(firsts))
        if any(firsts.count(leader) != group.size() for leader in self.leaders):
            raise ArgumentError(
                f"{label}: every rank of the job needs a sequence group of {group.size()} ranks; by rank, the groups "
                f"begin with ranks {firsts}"
            )

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Run ``Accelerator.prepare_data_loader`` with sequence groups in the place of processes."""
        accelerator = self._accelerator
        if not getattr(data_loader, "_is_accelerate_prepared", False):
            data_loader = importlib.import_module("accelerate.data_loader").prepare_data_loader(
                data_loader,
                accelerator.device,
                num_processes=len(self.leaders),
                process_index=self.leaders.index(self._leader),
                put_on_device=accelerator.device_placement if device_placement is None else device_placement,
                rng_types=accelerator.rng_types.copy(),
                dispatch_batches=False,  # rank 0 would slice its batches for all processes
                even_batches=accelerator.even_batches,
                use_seedable_sampler=accelerator.use_seedable_sampler,
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
                use_stateful_dataloader=accelerator.use_stateful_dataloader,
            )
            data_loader._is_accelerate_prepared = True  # pyright: ignore[reportAttributeAccessIssue]
        return self._prepare_as_accelerate(data_loader, device_placement, slice_fn_for_dispatch)  # notes it


class _Sharded:
    """Model as classes behind the mixin call it: with the mask of all positions, and with outputs that are checked."""

    def __init__(self, trainer: UlyssesTrainerMixin, model: Any, mask: Tensor | None) -> None:
        self._trainer, self._model, self._mask = trainer, model, mask

    def __call__(self, **inputs: Any) -> Any:
        """Call the model; the mask in ``inputs`` is of this rank's positions."""
        if self._mask is not None:
            inputs["attention_mask"] = self._mask
        outputs = self._model(**inputs)
        self._trainer.refuse_further_losses(outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _refuse_trainer(kind: type) -> None:
    """Reject a class that is, or is made of, a trainer of TRL that would give other numbers over sequence shards."""
    for base in kind.__mro__:
        name = base.__name__
        is_trainer = hasattr(base, "training_step") and not base.__name__.startswith("_")
        if not base.__module__.startswith("trl.") or not is_trainer:
            continue
        if reason := TRAINERS.get(name, "is not known to be right"):
            raise UnsupportedError(
                f"{kind.__name__}: {name} {reason}: not supported over sequence shards. Trainer and SFTTrainer are; "
                f"use {name} without UlyssesTrainerMixin, on sequences that fit on a rank"
            )


def _is_known_to_sum(owner: type) -> bool:
    """Whether ``compute_loss`` of the class gathers nothing but sums over tokens."""
    if (owner.__module__, owner.__qualname__) != ("trl.trainer.sft_trainer", "SFTTrainer"):
        return False
    major, minor = importlib.import_module("trl").__version__.split(".")[:2]
    return (int(major), int(minor)) >= _SUMS_SINCE
