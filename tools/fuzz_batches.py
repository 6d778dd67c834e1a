"""Drawn batches over sequence shards of tiny models of transformers: logits, losses and gradients of one process.

Rows, padding, packed documents, labels at their starts, checkpoints, slices of rows, and forwards that an interrupt
ended before, in a hook of any module.
"""

import copy
import warnings
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from fuzz_calls import named, problem_of
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import CommError
from tritoncomm.integrations import transformers as ours

__all__ = ["Batch", "batches", "run_batch"]

MODELS = ("llama", "gpt2", "opt", "mistral", "qwen3_next", "mamba2", "lfm2", "qwen3_5_text")
INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError)


@dataclass(frozen=True)
class Batch:
    """One batch, and the use that is made of it.

    Attributes:
        model: kind of model.
        mask: of each row and position, or none.
        starts: of packed documents in each row, or none.
        boundaries: the entry that says where documents start.
        labels: which positions have labels: none, all, not at starts, or every second.
        items: whether the number of labels is passed.
        rows: slice of rows that is run, or an odd selection.
        checkpoint: kind of checkpoint.
        interrupt: number of a module, kind of error and side of its hooks in a forward before; or none.
    """

    model: str
    rows: int
    length: int
    mask: tuple[tuple[int, ...], ...] | None
    starts: tuple[tuple[int, ...], ...] | None
    boundaries: str
    labels: str
    items: bool
    selection: Any
    checkpoint: bool | None
    interrupt: tuple[int, int, bool] | None


@st.composite
def batches(draw: Any) -> tuple[Any, Batch]:
    """Batches of one to three rows, of which most are right."""
    world, rows, length = draw(st.sampled_from([2, 2, 3, 1])), draw(st.integers(1, 3)), draw(st.integers(2, 12))
    kind = draw(st.sampled_from(["plain", "mask", "mask", "packed", "packed"]))
    mask = starts = None
    if kind == "mask":
        sides = [
            draw(st.tuples(st.integers(0, length - 1), st.integers(0, length - 1), st.booleans())) for _ in range(rows)
        ]
        mask = tuple(
            tuple(int(min(a, b) <= k <= max(a, b)) if is_cut else 1 for k in range(length)) for a, b, is_cut in sides
        )
    elif kind == "packed":
        more = st.sets(st.integers(1, length - 1), max_size=4)
        starts = tuple((0, *sorted(draw(more))) for _ in range(rows))
    selection = draw(st.sampled_from([None, None, None, "rows", "rows", "step", "columns", "index"]))
    if selection == "rows":
        first = draw(st.integers(0, rows - 1))
        selection = (first, draw(st.integers(first + 1, rows)), 1)
    elif selection == "step":
        selection = (draw(st.integers(0, rows - 1)), rows, 2)
    return world, Batch(
        draw(st.sampled_from(MODELS)),
        rows,
        length,
        mask,
        starts,
        draw(st.sampled_from(["position_ids", "seq_idx", *(["cu_seq_lens_q"] if rows == 1 else [])])),
        draw(st.sampled_from(["none", "all", "not at starts", "every second"])),
        draw(st.booleans()),
        selection,
        draw(st.sampled_from([None, None, False, True])),
        draw(st.one_of(st.none(), st.tuples(st.integers(0, 40), st.integers(0, 3), st.booleans()))),
    )


@cache
def _model(name: str) -> Any:
    """Return a tiny model, built once in each rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tiny_models import tiny  # imports transformers
        from transformers.utils import logging

        logging.set_verbosity_error()
        model: Any = tiny(name, 0, 4)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    for module in model.modules():  # checkpoints are for training, where dropout would draw
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
    return model


def _entries(batch: Batch) -> dict[str, Any]:
    """Return the entries of the whole batch."""
    draw = torch.Generator().manual_seed(batch.length * 7 + batch.rows)
    entries: dict[str, Any] = {"input_ids": torch.randint(3, 90, (batch.rows, batch.length), generator=draw)}
    if batch.mask is not None:
        entries["attention_mask"] = torch.tensor(batch.mask)
    elif batch.starts is not None:
        spans = [[*pairwise([*row, batch.length])] for row in batch.starts]
        if batch.boundaries == "position_ids":
            entries["position_ids"] = torch.stack([torch.cat([torch.arange(b - a) for a, b in row]) for row in spans])
        elif batch.boundaries == "seq_idx":
            numbers = [torch.cat([torch.full((b - a,), k) for k, (a, b) in enumerate(row)]) for row in spans]
            entries["seq_idx"] = torch.stack(numbers).int()
        else:
            entries["cu_seq_lens_q"] = torch.tensor([*batch.starts[0], batch.length], dtype=torch.int32)
    if batch.labels != "none":
        labels = entries["input_ids"].clone()
        if batch.mask is not None:  # predictions at padding are nobody's business
            mask = entries["attention_mask"]
            labels[(mask == 0) | (nn.functional.pad(mask, (1, 0))[:, :-1] == 0)] = -100
        if batch.labels == "every second":
            labels[:, ::2] = -100
        if batch.labels != "all":
            for row, starts in enumerate(batch.starts or ()):
                labels[row, list(starts)] = -100
        entries["labels"] = labels
    return entries


def _targets(batch: Batch, entries: dict[str, Any]) -> Tensor:
    """Return the label of each position's successor, by hand."""
    labels = entries["labels"].clone()
    for row, starts in enumerate(batch.starts or ((0,),) * batch.rows):
        labels[row, list(starts)] = -100
    return nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def _logits(batch: Batch, model: Any, entries: dict[str, Any]) -> Tensor:
    """Return the logits of one process; of packed documents each by itself."""
    if batch.starts is None:
        return model(
            input_ids=entries["input_ids"], attention_mask=entries.get("attention_mask"), use_cache=False
        ).logits
    return torch.cat(
        [
            torch.cat(
                [model(input_ids=ids[None, a:b], use_cache=False).logits for a, b in pairwise([*row, batch.length])], 1
            )
            for ids, row in zip(entries["input_ids"], batch.starts, strict=True)
        ]
    )


def _interrupt(batch: Batch, model: Any, shard: dict[str, Any]) -> None:
    """Run a forward on another batch, which an error ends in a hook of a module."""
    assert batch.interrupt is not None
    number, kind, is_before = batch.interrupt
    modules = list(model.modules())
    module = modules[number % len(modules)]

    def stop(*_: Any) -> None:
        raise INTERRUPTS[kind]

    hook = module.register_forward_pre_hook(stop) if is_before else module.register_forward_hook(stop)
    try:
        model(**shard, use_cache=False)
    except INTERRUPTS[kind]:
        pass
    finally:
        hook.remove()


def _selected(batch: Batch, shard: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a sharded batch that are run, or another selection of it."""

    def select(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2 or batch.selection is None:
            return x
        if batch.selection == "columns":
            return x[..., :-1]
        if batch.selection == "index":
            return x[torch.arange(batch.rows)]
        return x[slice(*batch.selection)]

    return {key: select(x) for key, x in shard.items()}


def run_batch(group: ProcessGroup, batch: Batch) -> str:
    """Run a batch over the ranks of a group, and compare with one process."""
    entries, model = _entries(batch), copy.deepcopy(_model(batch.model))
    reference = copy.deepcopy(model)
    has_labels, is_odd = batch.labels != "none", batch.selection in ("columns", "index")
    name = ours.register(group, name="fuzzed")
    try:
        ours.switch(model, name)
        if batch.interrupt is not None:
            other = torch.arange(3, 3 + 2 * group.size())[None].repeat(2, 1)
            position_ids = torch.arange(group.size()).repeat(2, 2)
            _interrupt(batch, model, ours.shard_batch({"input_ids": other, "position_ids": position_ids}, group))
        if batch.checkpoint is not None:
            model.train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": batch.checkpoint})
            model.enable_input_require_grads()
        targets = _targets(batch, entries) if has_labels else None
        if has_labels and batch.items and targets is not None:
            entries["num_items_in_batch"] = (targets != -100).sum()
        drops = batch.starts is not None and batch.labels == "all" and any(len(row) > 1 for row in batch.starts)
        try:
            shard = ours.shard_batch(entries, group)
        except CommError as error:
            is_expected = drops and batch.items and "labels at starts of packed documents" in str(error)
            return f"refused: {type(error).__name__}" if is_expected else problem_of(error)
        if drops and batch.items:
            return "problem: a count beside labels that are left out"
        try:
            out = model(**_selected(batch, shard), use_cache=False)
        except Exception as error:
            return f"refused: {type(error).__name__}" if is_odd and named(error) else problem_of(error)
        if is_odd and (group.size() > 1 or batch.selection == "columns"):
            return f"problem: {batch.selection} were taken"
        if is_odd:  # one rank has all positions, whoever made the batch
            return "right"
        return _compare(group, batch, entries, out, model, reference, targets)
    finally:
        ours.unregister()


def _compare(
    group: ProcessGroup, batch: Batch, entries: dict[str, Any], out: Any, model: Any, reference: Any, targets: Any
) -> str:
    """Compare logits at tokens, and for a whole batch the loss and all gradients."""
    rows = slice(None) if batch.selection is None else slice(*batch.selection)
    wanted = _logits(batch, reference, entries)
    seen = entries.get("attention_mask", torch.ones_like(entries["input_ids"]))[rows].bool()
    more = -batch.length % group.size()
    part = nn.functional.pad(wanted.detach()[rows], (0, 0, 0, more)).chunk(group.size(), 1)[group.rank()]
    at = nn.functional.pad(seen, (0, more)).chunk(group.size(), 1)[group.rank()]
    if out.logits.shape != part.shape:
        return f"problem: logits {list(out.logits.shape)}, not {list(part.shape)}"
    off = (out.logits.detach() - part)[at].abs().max() if at.any() else torch.zeros(())
    if not off < 2e-4:
        return f"problem: logits off by {off:.2g}"
    if targets is None or batch.selection is not None or not bool((targets != -100).any()):
        return "right"
    loss = nn.functional.cross_entropy(wanted.flatten(0, 1).float(), targets.flatten())
    loss.backward()
    out.loss.backward()
    total = out.loss.detach().clone()
    dist.all_reduce(total, group=group)
    if not abs(total - loss.detach()) < 1e-4 * loss.detach().clamp(min=1):
        return f"problem: a loss of {total.item():.5g}, not {loss.item():.5g}"
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for (name, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = torch.zeros_like(own) if own.grad is None else own.grad
        dist.all_reduce(grad, group=group)
        if other.grad is not None and not (grad - other.grad).abs().max() < 2e-3 * largest:
            return f"problem: the gradient of {name} off by {float((grad - other.grad).abs().max()):.2g}"
    return "right"
