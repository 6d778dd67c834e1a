"""Forwards of models that run in this thread, with the batch of each."""

import sys
import threading
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.compiler import is_compiling

from tritoncomm.integrations.transformers.batch_notes import BatchNotes, notes_of

__all__ = [
    "ModelForward", "WholeBatch", "documents", "enter_model", "enter_whole", "exit_model", "hand_on", "innermost",
    "is_inside", "is_running", "keep_mask", "whole_batch", "whole_mask",
]  # fmt: skip


class WholeBatch(NamedTuple):
    """Batch of all positions, of which a model hands this rank's to its language model.

    Attributes:
        language_model: by a weak reference.
        shape: rows and positions of all ranks, ``(b, S)``.
        documents: global starts of packed documents, of each row; None for one document in each.
        is_handed_on: whether the language model has got its part.
    """

    language_model: "ref[nn.Module]"
    shape: tuple[int, int]
    documents: list[list[int]] | None
    is_handed_on: bool = False


class ModelForward(NamedTuple):
    """Running forward of a model.

    Attributes:
        model: the outermost one, by a weak reference: an interrupt may keep the forward from ending.
        notes: of the batch. Models hand its layer mask to the layers as the padding mask.
        outer: forward of another model that this one runs in.
        is_sharded: whether there are several ranks.
        mask: padding mask of all positions; None without one, or where the model has it.
        whole: batch that the model gets whole; None where it gets a shard.
    """

    model: "ref[nn.Module]"
    notes: BatchNotes
    outer: "ModelForward | None"
    is_sharded: bool
    mask: Tensor | None = None
    whole: WholeBatch | None = None


class _Running(threading.local):
    """Innermost forward of a model in this thread."""

    def __init__(self) -> None:  # in every thread; torch.compile guards on the names that are there
        self.forward: ModelForward | None = None


_running = _Running()


def is_inside(model: nn.Module | None = None) -> bool:
    """Whether the forward of a model that got its shard runs in this thread: of one that contains ``model``."""
    forward = innermost()
    if forward is None or forward.whole is not None:
        return False
    outer: Any = forward.model()
    return model is None or (model is not outer and any(module is model for module in outer.modules()))


def whole_batch() -> WholeBatch | None:
    """Return the batch of a model around the language model, outside of the latter's forward; None elsewhere."""
    forward = _running.forward  # in attention layers there is one of a shard: no look at the stack
    if forward is None or forward.whole is None:
        return None
    forward = innermost()
    return None if forward is None else forward.whole


def enter_model(model: nn.Module, notes: BatchNotes, is_sharded: bool) -> None:
    """Let the forward of a model in this thread hand the mask of a batch to its recurrent layers."""
    _running.forward = ModelForward(ref(model), notes, innermost(), is_sharded)


def enter_whole(model: nn.Module, batch: WholeBatch) -> None:
    """Let the forward of a model in this thread get a whole batch."""
    _running.forward = ModelForward(ref(model), BatchNotes(), innermost(), is_sharded=False, whole=batch)


def hand_on() -> None:
    """Note that the language model has got its part of a whole batch."""
    forward = _running.forward
    if forward is not None and forward.whole is not None:
        _running.forward = forward._replace(whole=forward.whole._replace(is_handed_on=True))


def exit_model(model: nn.Module, *_: Any) -> None:
    """Forget the batch of a forward, also where it has raised."""
    forward = _running.forward
    if forward is not None and forward.model() is model:
        _running.forward = forward.outer


def keep_mask(mask: Tensor | None) -> None:
    """Keep the padding mask of all positions for ``whole_mask``, where the model gets that of its layers."""
    if _running.forward is not None:
        _running.forward = _running.forward._replace(mask=mask)


def innermost() -> ModelForward | None:
    """Return the innermost running forward of a model; forget those that ended without their hooks."""
    while _running.forward is not None and not is_running(_running.forward.model()):
        _running.forward = _running.forward.outer
    return _running.forward


def is_running(module: nn.Module | None) -> bool:
    """Whether a call of a module is on the stack of this thread.

    Torch runs forward hooks with ``always_call`` after an ``Exception``, but not after KeyboardInterrupt, SystemExit or
    GeneratorExit, so that a hook alone cannot tell. The call of a compiled module may have no frame.
    """
    if is_compiling():
        return True
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and frame.f_locals.get("self") is module and module is not None:
            return True
        # The frame of torch.compile, not that of torch.compiler.disable, which every checkpoint has.
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def documents() -> list[list[int]] | None:
    """Return the documents of the batch in this thread; None for one document, and outside of a model."""
    forward = innermost()
    return None if forward is None else forward.notes.documents


def whole_mask(mask: Tensor, label: str) -> Tensor | None:
    """Return the padding mask of all positions where a model, which has that of its layers, hands that to attention."""
    forward = innermost()
    if forward is None or notes_of(mask, label) is None:
        return mask
    return None if forward.mask is None else forward.mask.to(mask.device, mask.dtype)
