"""Log-probabilities over sequence shards: values and gradients of full logits in one process, in float64."""

import copy
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import log_probabilities
from tritoncomm.integrations.transformers.log_probabilities import log_probs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LENGTH, WORDS = 25, 40
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"family": "llama", "tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "gemma3_text": {"final_logit_softcapping": 0.5},
    "falcon_h1": {
        "lm_head_multiplier": 0.4, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 8,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_next": {
        "layer_types": ["full_attention", "linear_attention"], "linear_num_value_heads": 4, "num_experts": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}  # fmt: skip


def tiny(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    options = dict(FAMILIES[name])
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.AutoConfig.for_model(
        options.pop("family", name), vocab_size=WORDS, hidden_size=32, intermediate_size=48, pad_token_id=0, **sizes,
        **options,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()


def drawn(case: str) -> dict[str, Tensor]:
    """Two rows with completions that cross a shard's edge, end at it, or lie in one."""
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    at = torch.arange(LENGTH)
    batch = {"input_ids": ids}
    starts, stops = (3, 12), (17, 13 if case != "left" else 25)
    if case in ("left", "right"):
        mask = torch.stack([at < 21, at < 25]).long()
        batch["attention_mask"] = mask.flip(1) if case == "left" else mask
        starts = (8, 12) if case == "left" else starts
    if case == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(18)])
        batch["position_ids"] = positions.expand(2, -1).contiguous()
    if case == "one":
        starts, stops = (20, 1), (21, 1)
    spans = torch.stack([(at >= a) & (at < b) for a, b in zip(starts, stops, strict=True)])
    batch["labels"] = ids.masked_fill(~spans, -100)
    return batch


def whole(model: Any, batch: dict[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of full logits, in plain torch."""
    ids, labels = batch["input_ids"], batch["labels"].clone()
    if "position_ids" in batch:
        parts = [model(input_ids=ids[:, a:b], use_cache=False).logits for a, b in ((0, 7), (7, LENGTH))]
        logits = torch.cat(parts, 1)
        labels[:, 7] = -100
    else:
        logits = model(input_ids=ids, attention_mask=batch.get("attention_mask"), use_cache=False).logits
    wide = logits if logits.dtype is torch.float64 else logits.float()
    log_p = (wide[:, :-1] / temperature).log_softmax(-1)
    targets, has_label = labels[:, 1:].clamp(min=0), labels[:, 1:] >= 0
    return log_p.gather(2, targets[..., None])[..., 0] * has_label, -(log_p.exp() * log_p).sum(2) * has_label


def loss_of(log_p: Tensor, entropy: Tensor | None) -> Tensor:
    """A loss that no sum of shards gives: of sequences, clipped, with a bonus."""
    of_rows = log_p.sum(1)
    loss = nn.functional.softplus(of_rows[0] - 0.3 * of_rows[1]) + log_p.exp().square().mean()
    return loss if entropy is None else loss - 0.1 * (entropy * log_p.detach()).mean()


@contextmanager
def switched(model: Any, group: ProcessGroup) -> Iterator[None]:
    try:
        ours.switch(model, ours.register(group))
        yield
    finally:
        ours.unregister()


def assert_grads(group: ProcessGroup, model: nn.Module, reference: nn.Module, bound: float) -> None:
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(grad.abs().max().item() for grad in grads.values())
    for name, p in model.named_parameters():
        if name in grads:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad, group=group)
            assert (grad - grads[name]).abs().max() <= bound * largest, name


def check(
    group: ProcessGroup,
    name: str,
    case: str,
    dtype: torch.dtype = torch.float64,
    change: Callable[[Any], Any] | None = None,
    **options: Any,
) -> None:
    model, batch = tiny(name, dtype), drawn(case)
    if change is not None:
        model = change(model)
    reference = copy.deepcopy(model)
    wanted = whole(reference, batch, options.get("temperature", 1.0))
    loss_of(wanted[0], wanted[1] if options.get("entropy") else None).backward()
    values, gradients = (1e-9, 1e-9) if dtype is torch.float64 else (2e-5, 1e-4)
    with switched(model.get_base_model() if hasattr(model, "get_base_model") else model, group):
        found = log_probs(model, batch, group, **options)
        assert (found.log_probs - wanted[0]).abs().max() < values
        assert found.entropy is None or (found.entropy - wanted[1]).abs().max() < values
        loss_of(*found).backward()
    assert_grads(group, model, reference, gradients)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", ["plain", "left", "right", "packed", "one"])
def test_cases(group: ProcessGroup, case: str) -> None:
    """A rank without labels takes part in backward; chunks are no multiple of the labels."""
    check(group, "llama", case, entropy=True, temperature=0.7, chunk_size=4)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
def test_families(group: ProcessGroup, name: str) -> None:
    """Scaled logits, tied heads, experts, recurrences."""
    check(group, name, "right", torch.float32, entropy=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_bf16_is_as_near_to_fp32_as_in_one_process(group: ProcessGroup, name: str) -> None:
    model, batch = tiny(name, torch.float32), drawn("plain")
    exact = whole(model, batch, 1.0)
    model.bfloat16()
    rounded = whole(model, batch, 1.0)
    with switched(model, group):
        found = log_probs(model, batch, group, entropy=True)
        for value, near, far in zip(found, exact, rounded, strict=True):
            assert value is not None
            assert value.dtype is torch.float32
            assert (value - near).abs().max() <= 1.5 * (far - near).abs().max()


@pytest.mark.ranks(2, 3)
def test_adapters(group: ProcessGroup) -> None:
    """Through the wrapper; the reference is the same model without adapters. An adapter on the head is refused."""
    peft = pytest.importorskip("peft")

    def adapted(model: Any, *targets: str) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[*targets], init_lora_weights=False))

    check(group, "llama", "plain", change=lambda model: adapted(model, "q_proj", "v_proj", "down_proj"))
    model, batch = adapted(tiny("llama"), "q_proj"), drawn("plain")
    wanted = whole(model.base_model.model, batch, 1.0)
    with switched(model.get_base_model(), group):
        with torch.no_grad(), model.disable_adapter():
            reference = log_probs(model, batch, group).log_probs
        assert (log_probs(model, batch, group).log_probs - wanted[0]).abs().max() < 1e-9
        assert (reference - wanted[0]).abs().max() > 1e-3
    model = adapted(tiny("llama"), "q_proj", "lm_head")
    with (
        switched(model.get_base_model(), group),
        pytest.raises(UnsupportedError, match=r"Linear, is no torch.nn.Linear"),
    ):
        log_probs(model, batch, group)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("name", "head"),
    [("llama", "unit"), *((name, head) for name in ("llama", "tied") for head in ("root", "resharded root"))],
)
def test_fsdp2(group: ProcessGroup, name: str, head: str) -> None:
    """FSDP2 takes means over the ranks, so the loss counts once for each; also where the head is sharded after it."""
    model, batch = tiny(name), drawn("plain")
    reference = copy.deepcopy(model)
    wanted = whole(reference, batch, 1.0)
    loss_of(*wanted).backward()
    with switched(model, group):
        mesh = DeviceMesh.from_group(group, "cpu")
        for part in (*model.model.layers, *([model.lm_head] if head == "unit" else [])):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=head != "root")
        for _ in range(2):
            model.zero_grad()
            found = log_probs(model, batch, group, entropy=True, chunk_size=3)
            assert (found.log_probs - wanted[0]).abs().max() < 1e-9
            (loss_of(*found) * group.size()).backward()
            for (key, p), other in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert isinstance(p.grad, DTensor)
                assert (p.grad.full_tensor() - other.grad).abs().max() < 1e-9, key


@pytest.mark.ranks(2)
@pytest.mark.parametrize("head", ["root", "unit"])
def test_fsdp2_in_bf16(group: ProcessGroup, head: str) -> None:
    """Parameters in bf16, sums in fp32: as near to fp32 as the step of one process in bf16."""
    model, batch = tiny("llama", torch.float32), drawn("plain")
    exact, rounded = copy.deepcopy(model), copy.deepcopy(model).bfloat16()
    for reference in (exact, rounded):
        loss_of(*whole(reference, batch, 1.0)).backward()
    with switched(model, group):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = DeviceMesh.from_group(group, "cpu")
        for part in (*model.model.layers, *([model.lm_head] if head == "unit" else [])):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        (loss_of(*log_probs(model, batch, group, entropy=True)) * group.size()).backward()
        off: Any = [0.0, 0.0]
        for p, near, far in zip(model.parameters(), exact.parameters(), rounded.parameters(), strict=True):
            assert isinstance(p.grad, DTensor)
            assert p.grad.dtype is torch.float32
            off[0] += (p.grad.full_tensor() - near.grad).square().sum().item()
            off[1] += (far.grad.float() - near.grad).square().sum().item()
        assert off[0] <= 2 * off[1]


@pytest.mark.ranks(2)
def test_two_runs_have_equal_bits_and_a_gather_that_sums_is_seen(group: ProcessGroup) -> None:
    model, batch = tiny("llama", torch.float32), drawn("plain")
    with switched(model, group):

        def grads() -> list[Tensor]:
            model.zero_grad()
            loss_of(*log_probs(model, batch, group, entropy=True, chunk_size=4)).backward()
            return [p.grad.clone() for p in model.parameters()]

        first = grads()
        assert all(torch.equal(x, y) for x, y in zip(first, grads(), strict=True))
        summing = log_probabilities.all_gather_dim
        with mock.patch.object(log_probabilities, "all_gather_dim", lambda x, dim, group, **_: summing(x, dim, group)):
            for x, y in zip(first, grads(), strict=True):  # values are right, and gradients twice too large
                torch.testing.assert_close(y, 2 * x, rtol=1e-4, atol=1e-6)


class Widest(TorchDispatchMode):
    """Values of living tensors with a dim of the vocabulary, but for parameters and their gradients."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.living, self.largest = words, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            is_weight = isinstance(x, Tensor) and x.shape[0:1] == (32,)  # the head's, transposed, and its gradient
            if isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == self.words and not is_weight:
                storage = x.untyped_storage()
                self.living[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage), x.numel()
        self.living = {key: pair for key, pair in self.living.items() if not pair[0].expired()}
        self.largest = max(self.largest, sum(count for _, count in self.living.values()))
        return out


@pytest.mark.ranks(1)
@pytest.mark.parametrize("length", [36, 96])
@pytest.mark.parametrize("chunk_size", [8, 16])
def test_at_most_three_tensors_of_a_chunk_of_logits_live(group: ProcessGroup, chunk_size: int, length: int) -> None:
    model, ids = tiny("llama", torch.float32), torch.randint(3, WORDS, (1, length))
    with switched(model, group):
        batch = {"input_ids": ids, "labels": ids}
        log_probs(model, batch, group)  # compares one position of the logits
        with Widest(WORDS) as seen:
            loss_of_one = log_probs(model, batch, group, entropy=True, temperature=0.7, chunk_size=chunk_size)
            (loss_of_one.log_probs.sum() + loss_of_one.entropy.sum()).backward()
    assert chunk_size * WORDS < seen.largest <= 3 * chunk_size * WORDS, seen.largest / WORDS


@pytest.mark.ranks(2)
def test_what_is_refused(group: ProcessGroup) -> None:
    model, batch = tiny("llama", torch.float32), drawn("plain")
    with pytest.raises(ArgumentError, match="was not switched to an attention over the 2 ranks"):
        log_probs(model, batch, group)
    with pytest.raises(ArgumentError, match="needs a model of transformers, not Linear"):
        log_probs(nn.Linear(2, 2), batch, group)
    with switched(model, group):
        with pytest.raises(ArgumentError, match="a batch needs labels"):
            log_probs(model, {"input_ids": batch["input_ids"]}, group)
        for options in ({"temperature": 0.0}, {"chunk_size": 0}, {"temperature": float("nan")}):
            with pytest.raises(ArgumentError, match="have to be above 0"):
                log_probs(model, batch, group, **options)  # pyright: ignore[reportArgumentType]
        handle = model.lm_head.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedError, match="Linear, has hooks, or a forward of its own"):
            log_probs(model, batch, group)
        handle.remove()
        with (
            mock.patch.object(
                type(model.lm_head), "forward", lambda self, x: 1.01 * nn.functional.linear(x, self.weight)
            ),
            pytest.raises(UnsupportedError, match=r"are not the product of its head: off by .* at one position"),
        ):
            log_probs(model, batch, group)
