"""Whole batches into a model around a language model: images are embedded as in one process, and then it is sharded.

The outer model embeds all tokens, runs its towers, scatters features and numbers positions. Where it calls its language
model with ``inputs_embeds=``, a hook takes this rank's positions of every argument that has the sequence.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.integrations.changes import Changes
from tritoncomm.integrations.transformers import forwards, model_parts
from tritoncomm.integrations.transformers.batch import (
    IGNORED,
    ShardSpan,
    check_same,
    counted_labels,
    documents_of,
    is_compared,
)
from tritoncomm.integrations.transformers.batch_notes import notes_of, write_whole
from tritoncomm.integrations.transformers.hooks import Followers, Switch, Untraced, check_callers
from tritoncomm.integrations.transformers.position_cut import PositionCut, unread_tensors
from tritoncomm.integrations.transformers.recurrent_layers import parameters_of
from tritoncomm.integrations.transformers.registration import registered
from tritoncomm.integrations.transformers.sources import takes_keyword

__all__ = ["WholeBatches"]


class WholeBatches(Followers):
    """Hooks of a switched model that takes a whole batch, and of the language model in it, which gets the shard.

    A batch of ``shard_batch`` is left alone. Gradients of every weight are partial, and add up over the group.
    """

    @classmethod
    def attach(cls, model: nn.Module, switch: Switch) -> None:
        """Add the hooks to the outermost model of transformers, if it hands embeddings to a language model inside."""
        path = model_parts.language_model_path(model)
        if path is not None:
            cls(model, path, switch)

    def __init__(self, model: nn.Module, path: str, switch: Switch) -> None:
        names = path.split(".")
        with Changes() as changes:
            # Before the hooks of the switch, which see the shard.
            for depth in range(len(names)):
                part = model.get_submodule(".".join(names[:depth]))
                hook = Untraced(partial(self._begin, ".".join(names[depth:])))
                changes.add(part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
            cut = Untraced(self._cut)
            language_model = model.get_submodule(path)
            changes.add(language_model.register_forward_pre_hook(cut, prepend=True, with_kwargs=True).remove)
            super().__init__(switch, changes)

    def _group(self, model: Any) -> ProcessGroup | None:
        """Return the ranks; None where one has the whole batch, or the model computes without them."""
        name = self.switch.name
        if name not in registered or registered[name].own_positions or not self.switch.is_active(model):
            return None
        group = registered[name].group
        return group if group.size() > 1 else None

    def _begin(self, path: str, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note a whole batch, and give the model the labels of this rank's positions."""
        group = self._group(model)
        if group is None or forwards.whole_batch() is not None or forwards.is_inside(model):
            return None
        label = f"{self.switch.name}: {type(model).__name__}"
        arguments = dict(zip(parameters_of(type(model)), args, strict=False)) | kwargs
        if notes_of(arguments.get("position_ids"), label) is not None:
            return None  # a shard
        _check_call(label, arguments)
        tokens = arguments.get("inputs_embeds") if arguments.get("input_ids") is None else arguments["input_ids"]
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ArgumentError(f"{label}: a batch needs input_ids, a tensor [batch, sequence]")
        shape = int(tokens.shape[0]), int(tokens.shape[1])
        _check_same(label, arguments, group)
        check_callers(self.switch.name, model, arguments)
        # Embeddings stand for ids where there are none: of these only the shape [b, S] is read below.
        ids = tokens if tokens.dim() == 2 else tokens[..., 0]
        batch = {**arguments, "input_ids": ids}
        documents = documents_of(batch, label) if arguments.get("attention_mask") is None else None
        counted = counted_labels(batch, documents, label)
        if counted is not None and tuple(counted.labels.shape) != shape:
            got = list(counted.labels.shape)
            raise ShapeError(f"{label}: labels {got} need the shape of input_ids, {list(shape)}")
        if counted is not None and not takes_keyword(type(model), "shift_labels"):
            raise UnsupportedError(f"{label} takes no shift_labels; leave labels out, and compute the loss from logits")
        forwards.enter_whole(model, forwards.WholeBatch(ref(model.get_submodule(path)), shape, documents))
        if counted is None:
            return None
        shard = ShardSpan.of(shape[1], group).cut(counted.labels, IGNORED)
        write_whole(shard, arguments.get("labels"), arguments.get("shift_labels"))
        arguments |= {"shift_labels": shard, "num_items_in_batch": counted.count}
        if arguments.get("labels") is not None:
            arguments["labels"] = shard
        return (), arguments

    def _cut(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give the language model this rank's positions."""
        batch, group = forwards.whole_batch(), self._group(model)  # group: None with one rank, and without shards
        # ``PositionCut.of`` sets tensors that the model ignores to None. With one rank the model gets None, too.
        if group is None and self.switch.name in registered and registered[self.switch.name].group.size() == 1:
            return args, {**kwargs, **dict.fromkeys(unread_tensors(model, kwargs))}
        if batch is None or group is None or batch.language_model() is not model:
            return None
        label = f"{self.switch.name}: {type(model).__name__}"
        arguments = dict(zip(parameters_of(type(model)), args, strict=False)) | kwargs
        embeddings = arguments.get("inputs_embeds")
        if not isinstance(embeddings, Tensor):
            raise UnsupportedError(
                f"{label} gets no inputs_embeds: a language model that attends to images from its layers, as Mllama's, "
                "is not supported over sequence shards; nor are tokens that it embeds itself: pass them to shard_batch"
            )
        if tuple(embeddings.shape[:2]) != batch.shape:
            raise UnsupportedError(
                f"{label}: gets embeddings {list(embeddings.shape)} of a batch of {batch.shape[0]} rows of "
                f"{batch.shape[1]} positions; over sequence shards every token has one position"
            )
        arguments |= PositionCut(label, model, batch, ShardSpan.of(batch.shape[1], group), group).of(arguments)
        forwards.hand_on()
        return (), arguments


def _check_call(label: str, arguments: Mapping[str, Any]) -> None:
    """Reject a call whose result would be of other positions than one process has."""
    if _is_generating():  # with its cache attention is refused later, by the number of keys; without one nowhere
        raise UnsupportedError(
            f"{label}: a key/value cache is not supported; pass use_cache=False, and generate after "
            "switch(model, 'sdpa')"
        )
    keep = arguments.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        raise UnsupportedError(
            f"{label}: logits_to_keep counts positions of the whole sequence, of which this rank has a part; leave it "
            "out, and take the logits that you need"
        )


def _is_generating() -> bool:
    """Whether ``generate`` of transformers is on the stack of this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith("transformers/generation/utils.py"):
            return True
        frame = frame.f_back
    return False


def _check_same(label: str, arguments: Mapping[str, Any], group: ProcessGroup) -> None:
    """Reject batches that differ between the ranks, in the first call and in check mode.

    With positions of the caller, which may be of a shard that lost the notes of ``shard_batch``, tokens in every call.
    """
    names = arguments.keys()
    if is_compared(group, "whole"):
        if arguments.get("position_ids") is None:
            return
        names = {"input_ids", "inputs_embeds", "position_ids"} & names
    tensors = {key: arguments[key] for key in sorted(names) if isinstance(arguments[key], Tensor)}
    check_same(tensors, group, label, "whole")
