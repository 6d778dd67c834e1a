"""Calls of TRL's fused head over sequence shards: numbers of all tokens, and their gradients, in float64."""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from preference_jobs import add_fused_head
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tritoncomm import variables
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers.hooks import switches_of
from tritoncomm.integrations.transformers.training import fused_heads
from tritoncomm.integrations.transformers.training.fused_heads import WholeOutputs, gathered_head

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LENGTH, WORDS = 25, 40
# Norms of this model compute in fp32: with 3 ranks, whose factor is no power of two, backward rounds otherwise.
CLOSE = 1e-6


def llama(tied: bool = False) -> Any:
    import transformers  # seconds, which collection does not need

    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=tied)
    model: Any = transformers.LlamaForCausalLM(config)
    model = model.double()
    add_fused_head(model)
    return model


@contextmanager
def over(group: ProcessGroup, model: Any) -> Iterator[Any]:
    """The model with whole outputs over the ranks of a group."""
    name = ours.register(group)
    ours.switch(model, name)
    try:
        WholeOutputs(model, switches_of(model)[0])
        yield model
    finally:
        ours.switch(model, "sdpa")
        ours.unregister()


def batch(start: int = 4, stop: int = LENGTH, left: int = 0) -> dict[str, Any]:
    """Two rows with labels from ``start`` to ``stop``, the second padded on the left."""
    ids = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    places = torch.arange(LENGTH)
    mask = torch.stack([torch.ones_like(places), (places >= left).long()])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((places < start) | (places >= stop), -100),
    }


def loss_of(out: Any) -> Tensor:
    chosen, rejected = out.log_probs.sum(1)
    return -F.logsigmoid(0.1 * (chosen - rejected)) + 0.1 * out.entropy.mean() + 0.1 * out.log_probs.square().mean()


def steps(model: Any, entries: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """A call with its gradients, after a reference in between."""
    model.zero_grad()
    out = model(**entries, fused_lm_head=True)
    with torch.no_grad():
        again = model(**entries, fused_lm_head=True)
    assert torch.equal(again.log_probs, out.log_probs)
    loss_of(out).backward()
    return out, [p.grad for p in model.parameters()]


def mean(grads: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Gradients as DDP leaves them."""
    results = [grad.clone() for grad in grads]
    for grad in results:
        dist.all_reduce(grad, group=group)
    return [grad / group.size() for grad in results]


def problems(mine: tuple[Any, list[Tensor]], other: tuple[Any, list[Tensor]]) -> list[str]:
    """Names of fields, and places of gradients, that differ."""
    fields = [
        name
        for name, x in other[0].items()
        if mine[0][name].shape != x.shape or (mine[0][name].double() - x.double()).abs().max() > CLOSE
    ]
    return fields + [
        str(at) for at, (x, y) in enumerate(zip(mine[1], other[1], strict=True)) if (x - y).abs().max() > CLOSE
    ]


@pytest.mark.ranks(2, 3, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize("entries", [batch(), batch(left=3), batch(stop=6), batch(start=LENGTH - 1), batch(stop=0)])
def test_numbers_and_gradients_are_those_of_one_process(group: ProcessGroup, entries: dict[str, Any]) -> None:
    """Uneven lengths; labels in one shard, a single one, and none."""
    model = llama()
    wanted = steps(copy.deepcopy(model), entries)
    with over(group, model):
        for check in (False, True):
            with variables.CHECK.override(check):
                out, grads = steps(model, entries)
            wrong = problems((out, mean(grads, group)), wanted)
            assert wrong == [], wrong
            assert not out.mean_logits.requires_grad
            assert out.is_top1.dtype is torch.bool


@pytest.mark.ranks(2)
def test_a_model_with_another_attention_takes_whole_batches(group: ProcessGroup) -> None:
    """After ``set_attn_implementation``, which leaves the hooks where they are; and again with its attention."""
    model, entries = llama(), batch()
    wanted = steps(copy.deepcopy(model), entries)
    with over(group, model):
        model.set_attn_implementation("sdpa")
        assert problems(steps(model, entries), wanted) == []
        model.set_attn_implementation("tritoncomm_ulysses")
        out, grads = steps(model, entries)
        assert problems((out, mean(grads, group)), wanted) == []
    assert problems(steps(model, entries), wanted) == []


@pytest.mark.ranks(2)
def test_a_batch_that_is_a_shard_already_stays_one(group: ProcessGroup) -> None:
    """As of an SFTTrainer after a DPOTrainer with the same model, or of a loop."""
    model, entries = llama(), batch()
    wanted, _ = steps(copy.deepcopy(model), entries)
    with over(group, model):
        shard = ours.shard_batch(entries, group)
        out, _ = steps(model, shard)
        start = group.rank() * 13
        part = wanted.log_probs[:, start : start + 13]
        assert out.log_probs.shape == (2, 13)
        assert (out.log_probs[:, : part.shape[1]] - part).abs().max() < CLOSE
        assert float(out.loss) == pytest.approx(-out.log_probs.sum().item() / (wanted.log_probs != 0).sum().item())


UNITS: dict[str, Callable[[Any], list[Any]]] = {
    "root": lambda model: [],
    "tail": lambda model: [[model.model.norm, model.lm_head]],
    "tied tail": lambda model: [[model.model.embed_tokens, model.model.norm, model.lm_head]],
    "alone": lambda model: [model.lm_head],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("units", UNITS)
def test_a_head_that_fsdp2_shards_alone_is_gathered(group: ProcessGroup, units: str) -> None:
    """Else its gradient is wrong, though all numbers are right; a frozen one, and a reference, are right."""
    model, entries = llama("tied" in units), batch()
    wanted = steps(copy.deepcopy(model), entries)
    mesh = DeviceMesh.from_group(group, "cpu")
    with over(group, model):
        for part in (*model.model.layers, *UNITS[units](model)):
            fully_shard(part, mesh=mesh, reshard_after_forward=not isinstance(part, list))
        fully_shard(model, mesh=mesh)
        for gathered in (gathered_head, nullcontext, gathered_head):
            with gathered(model, "T") if gathered is gathered_head else nullcontext():
                out, grads = steps(model, entries)
            wrong = problems((out, [grad.full_tensor() for grad in grads]), wanted)
            is_wrong = units == "alone" and gathered is nullcontext
            assert wrong == ([str(len(grads) - 1)] if is_wrong else []), wrong
        with gathered_head(model, "T", is_fused=False), torch.no_grad():
            model(**entries, fused_lm_head=True)
        with gathered_head(model, "T"), torch.no_grad():
            model(**entries, fused_lm_head=True)
        if "tied" not in units:
            model.lm_head.weight.requires_grad_(False)
            with gathered_head(model, "T"):
                loss_of(model(**entries, fused_lm_head=True)).backward()


def labels_shifted_in_shards(shard: Callable[..., Any]) -> Callable[..., Any]:
    """Every rank shifts its own labels, so that the last of each shard is lost: LLaMA-Factory, VeOmni."""

    def mistaken(entries: Any, group: ProcessGroup, **more: Any) -> Any:
        out = shard(entries, group, **more)
        shift = torch.full_like(out["shift_labels"], -100)
        shift[:, :-1] = out["shift_labels"][:, :-1]
        return {**out, "shift_labels": shift}

    return mistaken


def labels_shifted_twice(shard: Callable[..., Any]) -> Callable[..., Any]:
    """Labels are shifted before the split, and by the head again."""

    def mistaken(entries: Any, group: ProcessGroup, **more: Any) -> Any:
        out = shard(entries, group, **more)
        return {**out, "shift_labels": F.pad(out["shift_labels"], (0, 1), value=-100)[:, 1:].contiguous()}

    return mistaken


MISTAKES: dict[str, tuple[str, Callable[..., Any], set[str]]] = {
    "labels shifted in shards": ("shard_batch", labels_shifted_in_shards, {"loss", "log_probs", "entropy"}),
    "labels shifted twice": ("shard_batch", labels_shifted_twice, {"loss", "log_probs", "entropy"}),
    "a gather that sums": ("all_gather_dim", lambda gather: lambda x, dim, group, **_: gather(x, dim, group), set()),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_public_mistakes_of_other_implementations_are_seen(group: ProcessGroup, name: str) -> None:
    """A gather whose backward reduces and scatters leaves every number right, and makes gradients too large."""
    model, entries = llama(), batch()
    wanted = steps(copy.deepcopy(model), entries)
    attribute, make, fields = MISTAKES[name]
    mistaken = mock.patch.object(fused_heads, attribute, make(getattr(fused_heads, attribute)))
    with over(group, model), mistaken:
        out, grads = steps(model, entries)
        wrong = set(problems((out, mean(grads, group)), wanted))
    assert fields <= wrong
    assert fields or all(torch.allclose(x, 2 * y) for x, y in zip(mean(grads, group), wanted[1], strict=True))
    assert wrong & {str(place) for place in range(len(grads))}
