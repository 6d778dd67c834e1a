"""One causal language model of transformers over sequence shards, against the same model in one process."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.integrations import transformers as ours

__all__ = ["KINDS", "verdicts"]

LENGTH, TOLERANCE = 16, 1e-3  # a wrong model is off by a third and more
KINDS = ("plain", "ones", "left", "right")
"""Masks of two rows: none, of ones, padding at the left of the first row, at the right of the second."""


def batch_of(kind: str, seed: int) -> dict[str, Tensor]:
    """Tokens, labels and the mask of a kind."""
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(seed + 1))
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[0, :5] = 0
    elif kind == "right":
        mask[1, 10:] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return batch if kind == "plain" else {**batch, "attention_mask": mask}


def _run(model: Any, batch: dict[str, Tensor]) -> Any:
    """Outputs, or the error that came instead: whatever transformers raises for inputs that it does not take."""
    try:
        return model(**batch, use_cache=False)
    except Exception as error:
        return error


def verdicts(group: ProcessGroup, name: str, seed: int, kv_heads: int) -> dict[str, str]:
    """Return for each kind ``right``, ``refused: ...``, ``wrong: ...``, ``alone: ...``, ``not run: ...`` or ``absent``.

    They are the same on every rank. ``alone`` is an error of one process.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tiny_models import NOT_RUN, names, tiny  # imports transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        if name in NOT_RUN or name not in names():
            return dict.fromkeys(KINDS, f"not run: {NOT_RUN[name]}" if name in NOT_RUN else "absent")
        model: Any = tiny(name, seed, kv_heads)
        with torch.no_grad():
            wanted = {kind: _run(model, batch_of(kind, seed)) for kind in KINDS}
            registered, found = ours.register(group, name="sweep"), {}
            try:
                ours.switch(model, registered)
                for kind in KINDS:
                    if isinstance(wanted[kind], Exception):
                        continue
                    batch = batch_of(kind, seed)
                    found[kind] = _run(model, ours.shard_batch(batch, group))
                    if "Leave labels out" in str(found[kind]):
                        del batch["labels"]
                        found[kind] = _run(model, ours.shard_batch(batch, group))
            except Exception as error:
                found = {kind: found.get(kind, error) for kind in KINDS}
            finally:
                ours.unregister(registered)
        errors = {kind: f"{type(out).__name__}: {out}" for kind, out in found.items() if isinstance(out, Exception)}
        of_ranks = [errors] * group.size()
        dist.all_gather_object(of_ranks, errors, group=group)
    result = {}
    for kind in KINDS:
        texts = [texts[kind] for texts in of_ranks if kind in texts]
        if isinstance(wanted[kind], Exception):
            result[kind] = f"alone: {type(wanted[kind]).__name__}: {wanted[kind]}"
        elif texts:
            result[kind] = f"refused: {texts[0]}"
        else:
            result[kind] = _compare(group, batch_of(kind, seed), found[kind], wanted[kind])
    return result


def _compare(group: ProcessGroup, batch: dict[str, Tensor], found: Any, wanted: Any) -> str:
    """Compare logits of real positions, and the loss that the ranks add up to."""
    part = wanted.logits.chunk(group.size(), 1)[group.rank()]
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).chunk(group.size(), 1)[group.rank()].bool()
    off = (found.logits - part).abs().amax(-1)[seen].amax() / wanted.logits.abs().max()
    dist.all_reduce(off, dist.ReduceOp.MAX, group)
    loss = torch.zeros(()) if found.loss is None else found.loss.detach().float()
    dist.all_reduce(loss, group=group)
    if not off <= TOLERANCE:
        return f"wrong: off by {off:.2g} of the largest logit"
    if found.loss is None:  # where labels are refused
        return "right"
    is_alike = abs(loss - wanted.loss) <= TOLERANCE * wanted.loss.abs().clamp(min=1)
    return "right" if is_alike else f"wrong: a loss of {loss:.4g} for {wanted.loss:.4g}"
