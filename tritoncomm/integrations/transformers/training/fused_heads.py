"""TRL's fused head: ``model(..., labels=, fused_lm_head=True)`` returns numbers of tokens, and no logits.

It multiplies by the weight of the head, past the head's own forward, and scores labels that are shifted already as they
are.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations.changes import Changes
from tritoncomm.integrations.transformers import model_parts
from tritoncomm.integrations.transformers.batch import is_text, shard_batch, text_of
from tritoncomm.integrations.transformers.batch_notes import notes_of
from tritoncomm.integrations.transformers.hooks import Followers, Switch
from tritoncomm.integrations.transformers.model_parts import outermost
from tritoncomm.integrations.transformers.registration import registered
from tritoncomm.mappings import all_gather_dim

__all__ = ["FUSED_SINCE", "WholeOutputs", "gathered_head", "has_fused_heads"]

FUSED_SINCE = 1, 15  # release of TRL; its trainers gather sums for metrics from then on, too


def has_fused_heads() -> bool:
    """Whether the installed TRL has the fused head."""
    major, minor = importlib.import_module("trl").__version__.split(".")[:2]
    return (int(major), int(minor)) >= FUSED_SINCE


@contextmanager
def gathered_head(model: nn.Module, label: str, is_fused: bool = True) -> Iterator[None]:
    """Within: gather the weight of a head that FSDP2 shards as a unit of its own before the fused head takes it.

    TRL's fused head reads the weight without calling the head. It would gather a sharded weight by itself, and FSDP2
    would not sum the gradient over the ranks. A unit that is gathered here is one whose gradients FSDP2 sums at the
    end of backward, if the model is a unit, too.
    """
    outer: Any = outermost(model.modules())
    weight = getattr(outer.get_output_embeddings(), "weight", None) if is_fused else None
    if not isinstance(weight, DTensor) or not weight.requires_grad:
        yield
        return

    def gather(*_: Any) -> None:
        """Gather the head's weight once the decoder has run."""
        head = outer.get_output_embeddings()
        is_gathered = not isinstance(head.weight, DTensor)  # by the root unit, or by one that has run
        if is_gathered or not torch.is_grad_enabled():
            return
        if not isinstance(head, FSDPModule) or not any(isinstance(part, FSDPModule) for part in (model, outer)):
            raise UnsupportedError(
                f"{label}: the head of {type(outer).__name__} is sharded, and the model is no unit of FSDP2, which "
                "would sum its gradients: TRL's fused head takes the weight past its forward. Shard the model, too"
            )
        head.unshard()

    handle = outer.base_model.register_forward_hook(gather)
    try:
        yield
    finally:
        handle.remove()


class WholeOutputs(Followers):
    """Hooks of a switched model by which a call of the fused head takes a whole batch and returns numbers of all of it.

    Forward: the shard of ``input_ids`` and the other entries of ``shard_batch``; what the model returns for each token,
    ``[b, s]``, is put side by side, ``[b, S-1]``, and its loss is that of all tokens. Backward: this rank's part, times
    the ranks, as the loss of these numbers is the same on every rank, and DDP and FSDP2 average gradients over all
    ranks. Calls without ``fused_lm_head=True``, or with a shard, are left alone.
    """

    def __init__(self, model: nn.Module, switch: Switch) -> None:
        self._call: _FusedCall | None = None  # while one runs
        with Changes() as changes:
            # Before the hooks of the switch, which see the shard.
            before = model.register_forward_pre_hook(self._shard, prepend=True, with_kwargs=True)
            changes.add(before.remove)
            changes.add(model.register_forward_hook(self._gather, always_call=True).remove)
            super().__init__(switch, changes)

    @staticmethod
    def are_on(model: nn.Module, switch: Switch) -> bool:
        """Whether a model has these hooks of a switch."""
        owners = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
        return any(isinstance(owner, WholeOutputs) and owner.switch is switch for owner in owners)

    def _group(self, model: Any) -> ProcessGroup | None:
        """Return the ranks; None where one has the whole batch, or the model computes without them."""
        outer: Any = outermost(model.modules())
        if self.switch.name not in registered or not self.switch.is_active(outer):
            return None
        group = registered[self.switch.name].group
        return group if group.size() > 1 else None

    def _shard(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give the model the shard of a batch."""
        self._call = None
        group = self._group(model) if kwargs.get("fused_lm_head") else None
        if group is None:
            return None
        label = f"{self.switch.name}: {type(model).__name__}"
        if notes_of(kwargs.get("position_ids"), label) is not None:
            return None  # a shard, of somebody who has called shard_batch
        if args or kwargs.get("labels") is None:
            raise ArgumentError(f"{label}: a call of the fused head needs keywords, among them labels")
        # All tensors: ``shard_batch`` refuses those that it does not know, as they may have all positions.
        batch = {name: x for name, x in kwargs.items() if isinstance(x, Tensor) or name == "num_items_in_batch"}
        if not is_text(batch) and model_parts.language_model_path(outermost(model.modules())) is not None:
            names = ", ".join(batch.keys() - text_of(batch).keys())
            raise UnsupportedError(
                f"{label}: {names}: preferences over images are not supported over sequence shards; SFTTrainer takes "
                "batches with images"
            )
        shard = shard_batch(batch, group)
        self._call = _FusedCall(label, group, batch["input_ids"].shape[1], shard.pop("num_items_in_batch"))
        options = {name: x for name, x in kwargs.items() if name not in batch}
        return args, {**options, **shard, "labels": None}  # the fused head would shift labels itself

    def _gather(self, model: Any, _: Any, out: Any) -> Any:
        """Put what the ranks return side by side."""
        call, self._call = self._call, None
        if call is None or out is None:
            return None
        fields = {name: x for name, x in out.items() if x is not None and name != "loss"}
        for name, x in fields.items():
            if not isinstance(x, Tensor) or x.dim() != 2:
                raise UnsupportedError(f"{call.label}: the fused head returns {name}, which is no number of each token")
        for name, x in _of_all_positions(fields, call).items():
            setattr(out, name, x)
        items = torch.as_tensor(call.num_items, device=out.log_probs.device)
        out.loss = -out.log_probs.sum() / items.clamp(min=1)
        return out


class _FusedCall(NamedTuple):
    """Call of the fused head on a batch.

    Attributes:
        length: of its sequences, without padding to a multiple of the ranks.
        num_items: by which the loss is divided.
    """

    label: str
    group: ProcessGroup
    length: int
    num_items: Any


def _of_all_positions(fields: Mapping[str, Tensor], call: _FusedCall) -> dict[str, Tensor]:
    """Gather numbers of tokens ``[b, s]`` as ``[b, S-1]``, in one message for each pair of dtype and ``requires_grad``.

    Backward: this rank's part of the gradient, times the ranks: data parallelism takes the mean over ranks.
    """
    messages: dict[Any, list[str]] = {}
    for name, x in fields.items():
        messages.setdefault((x.dtype, x.requires_grad), []).append(name)
    results: dict[str, Tensor] = {}
    for names in messages.values():
        shards = torch.stack([fields[name] for name in names])
        sequences = all_gather_dim(shards, 2, call.group, tensor_parallel_output_grad=False)
        if sequences.requires_grad:
            sequences.register_hook(lambda grad: None if grad is None else grad * call.group.size())
        results.update(zip(names, sequences[..., : call.length - 1].unbind(), strict=True))
    return results
