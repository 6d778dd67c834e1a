"""One vision-language model over sequence shards, against the same model in one process."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.errors import CommError
from tritoncomm.integrations import transformers as ours

__all__ = ["compare", "drawn_verdicts", "gradients", "verdict"]

LOGITS, GRADIENTS = 2e-5, 1e-4  # of the largest logit; of the largest gradient of a weight, if not tiny


def verdict(group: ProcessGroup, name: str, seed: int) -> str:
    """Return ``right``, ``refused: ...``, ``wrong: ...`` or ``alone: ...``, an error of one process; on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging
        from vision_models import batch_of, tiny  # imports transformers

        logging.set_verbosity_error()
        try:
            model = tiny(name, seed)
            batch = batch_of(model, seed)
        except Exception as error:  # whatever transformers raises for a model that it cannot make so small
            return f"alone: {type(error).__name__}: {error}"
        reference = copy.deepcopy(model)
        try:
            ours.switch(model, ours.register(group))
            text = compare(group, model, reference, batch)
        except CommError as error:
            text = f"refused: {type(error).__name__}: {error}"
        finally:
            ours.unregister()
    texts = [text] * group.size()
    dist.all_gather_object(texts, text, group=group)
    return next((text for text in texts if text != "right"), "right")


def drawn_verdicts(group: ProcessGroup, name: str, seeds: Sequence[int]) -> dict[int, str]:
    """Return for each seed ``right`` or ``wrong: ...``, of a batch that it draws, on one model of a kind."""
    from vision_models import drawn_batch, tiny  # imports transformers

    model, reference = tiny(name), tiny(name)
    verdicts = {}
    try:
        ours.switch(model, ours.register(group))
        for seed in seeds:
            model.zero_grad()
            reference.zero_grad()
            verdicts[seed] = compare(group, model, reference, drawn_batch(reference, seed))
    finally:
        ours.unregister()
    return verdicts


def compare(group: ProcessGroup, model: Any, reference: Any, batch: dict[str, Any]) -> str:
    """Compare logits of real positions, the loss and the gradients that the ranks add up to.

    Args:
        model: switched; gets the whole batch.
        reference: the same model in one process.
    """
    whole = reference(**batch, use_cache=False)
    whole.loss.backward()
    part = model(**batch, use_cache=False)
    part.loss.backward()
    run = -(-batch["input_ids"].shape[1] // group.size())
    real = whole.logits[:, group.rank() * run : (group.rank() + 1) * run]
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    mask = mask[:, group.rank() * run : (group.rank() + 1) * run]
    off = torch.zeros(2)
    if real.shape[1]:
        distance = (part.logits[:, : real.shape[1]] - real).detach().abs().amax(-1)[mask]
        off[0] = distance.max() / whole.logits.abs().max() if len(distance) else 0
    loss = part.loss.detach().clone()
    dist.all_reduce(loss, group=group)
    off[1], worst = gradients(group, model, reference)
    dist.all_reduce(off, dist.ReduceOp.MAX, group)
    if not off[0] <= LOGITS:
        return f"wrong: off by {off[0]:.2g} of the largest logit"
    if not abs(loss - whole.loss) <= 1e-5 * whole.loss.abs():
        return f"wrong: a loss of {loss:.6g} for {whole.loss:.6g}"
    return "right" if off[1] <= GRADIENTS else f"wrong: the gradient of {worst} is off by {off[1]:.2g}"


def gradients(group: ProcessGroup, model: Any, reference: Any) -> tuple[float, str]:
    """Return the largest distance of a gradient, relative to the weight's largest or a thousandth of the model's."""
    wanted = {name: x.grad for name, x in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    worst = 0.0, ""
    for name, weight in model.named_parameters():
        grad, expected = weight.grad, wanted[name]
        if grad is None and expected is None:
            continue
        total: Tensor = torch.zeros_like(weight) if grad is None else grad.clone()
        dist.all_reduce(total, group=group)
        if grad is None and expected is not None:
            worst = max(worst, (float("inf"), f"{name}, which has none"))
        expected = torch.zeros_like(weight) if expected is None else expected
        scale = max(float(expected.abs().max()), 1e-3 * largest)
        worst = max(worst, (float((total - expected).abs().max()) / scale, name))
    return worst
