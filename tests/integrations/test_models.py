"""Every causal language model of transformers is right over sequence shards, or refused by name: never wrong.

Logits and losses, without a mask, with one of ones, and with padding at either side. ``make test-models`` runs all.
Elsewhere models of each kind run, and a few that the commit draws.
"""

import copy
import importlib.util
import json
import random
import subprocess
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_sweep import KINDS, batch_of, verdicts
from pool import Pool
from torch import nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import model_parts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
FOLDER = Path(__file__).parents[1]
SWEEPS: dict[str, dict[str, dict[str, list[str]]]] = json.loads((FOLDER / "models.json").read_text())
"""By release, model and number of ranks: the kinds of batches that were right in a full sweep."""
RELEASE = metadata.version("transformers") if importlib.util.find_spec("transformers") else ""
RIGHT = SWEEPS.get(RELEASE, {name: {} for models in SWEEPS.values() for name in models})
"""Those of the installed release; of one that was never swept it is only known that none may be wrong."""
OF_EACH_KIND = (
    "llama", "gpt2", "opt", "mistral", "gemma3_text", "mixtral", "gpt_neox", "phi3", "qwen3_5_text", "mamba2", "bamba",
    "bart", "whisper", "biogpt", "longcat_flash", "phi4_multimodal",
)  # fmt: skip
"""Models that differ in positions, masks, windows, experts, recurrences, losses and towers."""


def drawn() -> list[str]:
    """A fortieth of the models that ran, by the hash of the commit; by nothing in a tree without git."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=False)
    return sorted(random.Random(head.stdout.strip()).sample(sorted(set(RIGHT) - {*OF_EACH_KIND}), len(RIGHT) // 40))


def check(pool: Pool, name: str, world: int, seed: int, kv_heads: int) -> None:
    (found, *others) = pool.run(verdicts, name, seed, kv_heads, world=world, timeout=110)
    assert all(other == found for other in others)
    if found[KINDS[0]] == "absent":
        pytest.skip(f"the installed transformers has no {name}")
    again = f"pytest tests/integrations/test_models.py -k 'every and {name}-'"
    for kind, text in found.items():
        assert not text.startswith("wrong"), f"{name}, {kind}, at {world} ranks: {text}; {again}"
        if kind in RIGHT[name].get(str(world), []):
            assert text == "right", f"{name}, {kind}, at {world} ranks was right: {text}; {again}"
        if text.startswith("refused"):
            assert text.split(": ")[1] in ("UnsupportedError", "ArgumentError", "ShapeError"), text


@pytest.mark.parametrize("name", [*OF_EACH_KIND, *drawn()])
def test_models_of_each_kind_and_some_others(pool: Pool, name: str) -> None:
    check(pool, name, 2, 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", sorted(RIGHT))
def test_every_model(pool: Pool, name: str, world: int, kv_heads: int, seed: int) -> None:
    check(pool, name, world, seed, kv_heads)


def llama(**more: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4, **more))


class Convolved(nn.Module):
    """A layer of somebody's own: it mixes positions without attention."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.short = layer, nn.Conv1d(32, 32, 3, padding=2)


@pytest.mark.ranks(1, 2)
def test_parts_that_are_refused(group: ProcessGroup) -> None:
    """States, convolutions, kinds of layers and losses at several ranks; positions and masks of its own at one, too."""
    name = ours.register(group)
    sharded = group.size() > 1
    try:
        cases: list[tuple[Any, str, bool]] = []
        state = llama()
        state._is_stateful = True
        cases.append((state, "it has a state that runs along the sequence", False))
        convolved = llama()
        convolved.model.layers[0] = Convolved(convolved.model.layers[0])
        cases.append((convolved, "Conv1d in its layers mixes positions", False))
        for kind in ("linear_attention", "conv", "indexed_attention", "whatever_comes_next"):
            odd = llama()
            odd.config.layer_types = [kind]
            cases.append((odd, f"its layers of the kind {kind} are not known", False))
        router = llama()
        router.config.output_router_logits = True
        cases.append((router, "output_router_logits: every rank would add the router's auxiliary loss", False))
        noisy = llama()
        noisy.model.embed_tokens.neftune_noise_alpha = 5.0
        cases.append((noisy, "the noise of NEFTune", False))
        dropped = llama()
        dropped.model.layerdrop = 0.1
        cases.append((dropped, "layerdrop: every rank would draw", False))
        for model, words, everywhere in cases:
            if sharded or everywhere:
                with pytest.raises(UnsupportedError, match=words):
                    ours.switch(model, name)
                with pytest.raises(UnsupportedError, match=words):
                    ours.switch(model, name, unverified=True)
            else:
                ours.switch(model, name)
        for kind in ("full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"):
            known = llama()
            known.config.layer_types = [kind]
            ours.switch(known, name)
    finally:
        ours.unregister()


@pytest.mark.ranks(1, 2)
def test_what_is_added_to_a_switched_model_is_refused(group: ProcessGroup) -> None:
    """Noise, layers that are drawn and adapters that read the sequence, after ``switch`` has accepted the model."""

    def noisy(model: Any) -> Any:
        model.get_input_embeddings().neftune_noise_alpha = 5.0
        return model

    def dropped(model: Any) -> Any:
        model.model.layerdrop = 0.1
        return model

    def adapted(model: Any, **more: Any) -> Any:
        import peft

        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
        return peft.get_peft_model(model, config)

    def injected(model: Any) -> Any:
        import peft

        config = peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3], task_type="CAUSAL_LM")
        peft.inject_adapter_in_model(config, model.model)
        return model

    def sequence(model: Any) -> Any:
        return adapted(model, alora_invocation_tokens=[3])

    words = "adapters of peft look at the whole sequence"
    additions: list[tuple[Any, str]] = [(noisy, "the noise of NEFTune"), (dropped, "layerdrop: every rank would draw")]
    if importlib.util.find_spec("peft") is not None:
        additions += [(adapted, ""), (sequence, words), (injected, words)]
    name = ours.register(group)
    try:
        for add, problem in additions:
            model = llama()
            ours.switch(model, name)
            model = add(model)
            batch = ours.shard_batch({"input_ids": torch.arange(8)[None]}, group)
            if problem and group.size() > 1:
                with pytest.raises(UnsupportedError, match=problem):
                    model(**batch)
            else:
                model(**batch)
    finally:
        ours.unregister()


def rotary(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8} | more


def longrope() -> dict[str, Any]:
    return rotary("longrope", short_factor=[1.0] * 4, long_factor=[1.3] * 4)


def phi3() -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40, "pad_token_id": 0}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "original_max_position_embeddings": 8}
    config = transformers.Phi3Config(**sizes, **more, rope_parameters=longrope(), rope_scaling=None)
    return transformers.Phi3ForCausalLM(config)


def gemma3() -> Any:
    """One kind of its layers has another table."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "head_dim": 8}
    kinds = {"sliding_attention": rotary("default"), "full_attention": rotary("dynamic")}
    config = transformers.Gemma3TextConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, rope_parameters=kinds,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def phimoe() -> Any:
    """It scales by the largest position whatever the type, but for the default."""
    import transformers

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 40,
        "num_local_experts": 2,
    }
    rope = rotary("linear", short_mscale=1.0, long_mscale=1.2)
    config = transformers.PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope)
    return transformers.PhimoeForCausalLM(config)


def registered() -> Any:
    """A type that somebody added to those of transformers."""
    model = llama()
    model.model.rotary_emb.rope_type = "yarn_by_length"
    return model


ROTARY: dict[str, Any] = {
    "dynamic": lambda: llama(rope_parameters=rotary("dynamic"), max_position_embeddings=8),
    "longrope": phi3, "one kind of layers": gemma3, "scaled by the largest": phimoe,
}  # fmt: skip


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("case", ROTARY)
def test_tables_chosen_by_the_largest_position(group: ProcessGroup, case: str) -> None:
    """It is the batch's, not a shard's or our padding's: 8 positions are 9 on three ranks, and 9 need other tables."""
    torch.manual_seed(0)
    name, model = ours.register(group), ROTARY[case]().eval()
    reference = copy.deepcopy(model)
    try:
        if group.size() > 1:
            model.set_attn_implementation(name)  # without ``switch``
            with pytest.raises(UnsupportedError, match=r"chosen by the largest position; give the model to switch"):
                model(**ours.shard_batch({"input_ids": torch.arange(8)[None]}, group), use_cache=False)
            model.set_attn_implementation("sdpa")
        for _ in range(2):  # hooks that stay append once
            ours.switch(model, name)
        for length in (7, 8, 16, 8):  # "dynamic" keeps the table of a longer sequence
            ids = torch.randint(3, 40, (2, length), generator=torch.Generator().manual_seed(length))
            wanted = reference(input_ids=ids, use_cache=False).logits
            padded = nn.functional.pad(wanted, (0, 0, 0, -length % group.size()))
            batch = ours.shard_batch({"input_ids": ids}, group)
            found = model(**batch, use_cache=False).logits
            own = padded.chunk(group.size(), 1)[group.rank()]
            seen = batch["position_ids"][0] < length
            torch.testing.assert_close(found[:, seen], own[:, seen], atol=1e-5, rtol=1e-4)
        if group.size() > 1:
            rotary = next(module for module in model.modules() if hasattr(module, "rope_type"))
            with pytest.raises(ArgumentError, match="the largest position, which is unknown here"):
                rotary(torch.zeros(1, 4, 32), position_ids=torch.arange(4)[None])
        ours.switch(model, "sdpa")
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    finally:
        ours.unregister()


@pytest.mark.ranks(1, 2)
def test_tables_of_a_type_of_ones_own_are_refused(group: ProcessGroup) -> None:
    name, model = ours.register(group), registered()
    try:
        if group.size() == 1:
            ours.switch(model, name)
            return
        for unverified in (False, True):
            with pytest.raises(UnsupportedError, match="may choose its table by the length"):
                ours.switch(model, name, unverified=unverified)
        model.set_attn_implementation(name)  # without ``switch``
        with pytest.raises(UnsupportedError, match="may choose its table"):
            model(**ours.shard_batch({"input_ids": torch.arange(8)[None]}, group), use_cache=False)
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_tables_by_each_position_are_right(group: ProcessGroup) -> None:
    name, ids = ours.register(group), torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(1))
    more = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    try:
        for kind in ("default", "linear", "yarn", "llama3"):
            torch.manual_seed(0)
            model = llama(rope_parameters=rotary(kind, **more.get(kind, {})), max_position_embeddings=64)
            wanted = model(input_ids=ids, use_cache=False).logits.chunk(2, 1)[group.rank()]
            ours.switch(model, name)
            found = model(**ours.shard_batch({"input_ids": ids}, group), use_cache=False).logits
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    finally:
        ours.unregister()


class OfItsOwn(nn.Module):
    """A model behind a wrapper, as peft's is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


def heads() -> dict[str, tuple[str, Any, str]]:
    """By name: the class, what makes the model, and the words that it is refused with; "" for one that is right."""
    import transformers as t

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40}
    bert = t.BertConfig(**small, intermediate_size=32, max_position_embeddings=64)
    of_llama = t.LlamaConfig(**small, intermediate_size=32, num_labels=3, pad_token_id=0)
    gpt2 = t.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=40, n_positions=64, pad_token_id=0)

    class Pooled(t.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs).logits[:, -1]

    class Renamed(t.LlamaForCausalLM): ...

    return {
        "sequence classification": (
            "",
            lambda: t.LlamaForSequenceClassification(of_llama),
            "one result for a sequence",
        ),
        "of GPT-2": ("", lambda: t.GPT2ForSequenceClassification(gpt2), "one result for a sequence"),
        "behind a wrapper": ("", lambda: OfItsOwn(t.LlamaForSequenceClassification(of_llama)), "one result for a seq"),
        "multiple choice": ("", lambda: t.BertForMultipleChoice(bert), "one result for a sequence"),
        "two heads": ("", lambda: t.GPT2DoubleHeadsModel(gpt2), "one result for a sequence"),
        "pooler": ("", lambda: t.BertModel(bert), "its pooler would read a position of each shard"),
        "forward of one's own": ("unknown", lambda: Pooled(of_llama), "not known that it has one result for each pos"),
        "no pooler": ("", lambda: t.BertModel(bert, add_pooling_layer=False), ""),
        "base": ("", lambda: t.LlamaModel(of_llama), ""),
        "class of one's own": ("", lambda: Renamed(of_llama), ""),
        "token classification": ("", lambda: t.LlamaForTokenClassification(of_llama), ""),
        "question answering": ("", lambda: t.LlamaForQuestionAnswering(of_llama), ""),
        "masked": ("", lambda: t.BertForMaskedLM(bert), ""),
    }


@pytest.mark.ranks(2)
def test_heads_that_pool_over_positions_are_refused(group: ProcessGroup) -> None:
    """Others give each rank the results of its positions; labels are for causal language models."""
    name, ids = (
        ours.register(group, own_positions=True),
        torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(1)),
    )
    try:
        for case, (kind, make, words) in heads().items():
            torch.manual_seed(0)
            model = make().eval()
            if words:
                with pytest.raises(UnsupportedError, match=words):
                    ours.switch(model, name)
                if not kind:
                    with pytest.raises(UnsupportedError, match=words):
                        ours.switch(model, name, unverified=True)
                    model.set_attn_implementation(name)
                    with pytest.raises(UnsupportedError, match=words):
                        model(**ours.shard_batch({"input_ids": ids}, group))
                    model.set_attn_implementation("sdpa")  # of a config that the next model has, too
                continue
            wanted = model(input_ids=ids)[0].chunk(2, 1)[group.rank()]
            ours.switch(model, name)
            torch.testing.assert_close(
                model(**ours.shard_batch({"input_ids": ids}, group))[0], wanted, atol=1e-5, rtol=1e-4, msg=case
            )
            batch = ours.shard_batch({"input_ids": ids, "labels": ids % 2}, group)
            if case in ("token classification", "masked"):
                with pytest.raises(UnsupportedError, match="compute the loss from the logits"):
                    model(**batch)
            elif case in ("base", "question answering"):  # they take labels, and make no loss of them
                assert getattr(model(**batch), "loss", None) is None, case
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_bidirectional_models_see_no_padding_of_ours(group: ProcessGroup) -> None:
    import transformers as t

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40}
    config = t.BertConfig(**sizes, intermediate_size=32, max_position_embeddings=64)
    torch.manual_seed(0)
    model, name = t.BertForMaskedLM(config).eval(), ours.register(group, own_positions=True)
    ids = torch.randint(3, 40, (2, 15), generator=torch.Generator().manual_seed(1))
    wanted = torch.nn.functional.pad(model(input_ids=ids).logits, (0, 0, 0, 1)).chunk(2, 1)[group.rank()]
    count = 8 if group.rank() == 0 else 7
    try:
        ours.switch(model, name)
        with pytest.raises(UnsupportedError, match="would attend to the 1 positions that shard_batch added"):
            model(**ours.shard_batch({"input_ids": ids}, group))
        found = model(**ours.shard_batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, group)).logits
        torch.testing.assert_close(found[:, :count], wanted[:, :count], atol=1e-5, rtol=1e-4)
        packed = ids[:, :14], torch.arange(7).repeat(2, 2)
        with pytest.raises(UnsupportedError, match="packed sequences are for causal models"):
            model(**ours.shard_batch({"input_ids": packed[0], "position_ids": packed[1]}, group))
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_judging_keeps_no_tensor_of_the_caller(group: ProcessGroup) -> None:
    """The attention looks for the model that calls it; a loop that calls the model may free what it has."""
    name, model, local = ours.register(group), llama(), torch.ones(4)
    model.set_attn_implementation(name)
    try:
        model(**ours.shard_batch({"input_ids": torch.arange(8)[None]}, group), use_cache=False)
        kept = weakref.ref(local)
        del local
        assert kept() is None
    finally:
        ours.unregister()


def test_what_nobody_knows_is_refused_with_the_remedy(group: ProcessGroup) -> None:
    name = ours.register(group)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_parts, "calls_registry", lambda kinds: False)
            with pytest.raises(UnsupportedError, match=r"no layer_types .* switch\(model, name, unverified=True\)"):
                ours.switch(llama(), name)
            with pytest.warns(UserWarning, match="runs unverified"):
                ours.switch(llama(), name, unverified=True)
    finally:
        ours.unregister()


@pytest.mark.ranks(1, 2)
def test_arguments_that_attention_would_ignore_are_refused(group: ProcessGroup) -> None:
    """Whatever a model passes that changes its attention; what changes nothing is taken.

    One rank has all positions, so that the implementation may have the tensors that it names.
    """
    name = ours.register(group)
    ids = torch.arange(8 * group.size())[None]
    try:
        model = llama()
        ours.switch(model, name)
        batch = ours.shard_batch({"input_ids": ids, "labels": ids}, group)
        bias = torch.randn(1, 4, 8, 8)
        if group.size() == 1:
            found = model(**batch, position_bias=bias).logits
            model.set_attn_implementation("sdpa")
            assert torch.equal(found, model(input_ids=ids, position_bias=bias, use_cache=False).logits)
            assert not torch.allclose(found, model(input_ids=ids, use_cache=False).logits)
            model.set_attn_implementation(name)
        else:
            with pytest.raises(UnsupportedError, match="position_bias"):
                model(**batch, position_bias=bias)
        for argument in ("s_aux", "sinks", "indices", "block_indices", "yet_another"):
            with pytest.raises(UnsupportedError, match=argument):
                model(**batch, **{argument: torch.ones(1)})
        with pytest.raises(UnsupportedError, match="softcap= to its attention"):
            model(**batch, softcap=50.0)
        if group.size() > 1:
            with pytest.raises(UnsupportedError, match="output_router_logits=True"):
                model(**batch, output_router_logits=True)
        model(**batch, yet_another=None, output_router_logits=False)
        other = llama()  # never given to switch
        other.config.layer_types = ["linear_attention"]
        other.set_attn_implementation(name)
        if group.size() > 1:
            with pytest.raises(UnsupportedError, match="its layers of the kind linear_attention"):
                other(**batch, use_cache=False)
    finally:
        ours.unregister()


def composite(name: str) -> Any:
    """A tiny model of text and images."""
    import transformers as t

    t.logging.set_verbosity_error()
    text = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "llava":
        vision = t.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
        config: Any = t.LlavaConfig(vision_config=vision, text_config=t.LlamaConfig(**text), image_token_index=98)
        return t.LlavaForConditionalGeneration(config).eval()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    kinds = {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": rope}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 4, "out_hidden_size": 32}
    tokens = {"image_token_id": 98, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
    config = t.Qwen3_5Config(vision_config=vision, text_config={**text, **linear, **kinds}, **tokens)
    return t.Qwen3_5ForConditionalGeneration(config).eval()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llava", "qwen3_5"])
def test_composite_models_on_text(group: ProcessGroup, name: str) -> None:
    """Only the language model is judged, whatever its tower has; images are refused in a sentence that says so."""
    model, registered = composite(name), ours.register(group)
    reference = copy.deepcopy(model)
    try:
        ours.switch(model, registered)
        for kind in KINDS:
            batch = batch_of(kind, 0)
            with torch.no_grad():
                wanted = reference(**batch, use_cache=False)
                found = model(**ours.shard_batch(batch, group), use_cache=False)
            seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).chunk(2, 1)[group.rank()].bool()
            part = wanted.logits.chunk(2, 1)[group.rank()]
            assert (found.logits - part)[seen].abs().max() < 2e-5, kind
            dist.all_reduce(found.loss, group=group)
            assert abs(found.loss - wanted.loss) < 1e-5 * wanted.loss, kind
        pixels = torch.zeros(1, 3, 16, 16)
        with pytest.raises(
            UnsupportedError, match="'pixel_values': a model of images, videos or audio takes the whole"
        ):
            ours.shard_batch({**batch, "pixel_values": pixels}, group)
        images = {"pixel_values": pixels}
        if name == "qwen3_5":
            images = {"pixel_values": torch.zeros(16, 1536), "image_grid_thw": torch.tensor([[1, 4, 4]])}
        with pytest.raises(UnsupportedError, match=r"VisionModel: images, videos and audio are no part of a shard"):
            model(**ours.shard_batch(batch, group), **images, use_cache=False)
        ours.switch(model, "sdpa")
        assert torch.equal(model(**batch, use_cache=False).logits, wanted.logits)
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_positions_by_the_mask_need_switch(group: ProcessGroup) -> None:
    """OPT numbers positions by its padding mask; a copy of a switched model does so over shards, too."""
    from tiny_models import tiny  # imports transformers

    model: Any = tiny("opt")
    reference, copied, batch, registered = (
        copy.deepcopy(model),
        copy.deepcopy(model),
        batch_of("left", 0),
        ours.register(group),
    )
    try:
        copied.set_attn_implementation(registered)
        with pytest.raises(UnsupportedError, match=r"numbers positions by its padding mask; give the model to switch"):
            copied(**ours.shard_batch(batch, group), use_cache=False)
        ours.switch(model, registered)
        with torch.no_grad():
            wanted = reference(**batch, use_cache=False).logits.chunk(2, 1)[group.rank()]
            seen = batch["attention_mask"].chunk(2, 1)[group.rank()].bool()
            for each in (model, copy.deepcopy(model)):
                shard = ours.shard_batch(batch, group)
                assert (each(**shard, use_cache=False).logits - wanted)[seen].abs().max() < 1e-5
                rows = {key: x[1:] if x.dim() > 1 else x for key, x in shard.items()}
                assert (each(**rows, use_cache=False).logits - wanted[1:])[seen[1:]].abs().max() < 1e-5
            own = {**batch, "position_ids": torch.arange(16).expand(2, 16)}
            wanted = reference(**own, use_cache=False).logits.chunk(2, 1)[group.rank()]
            assert (model(**ours.shard_batch(own, group), use_cache=False).logits - wanted)[seen].abs().max() < 1e-5
    finally:
        ours.unregister()


def test_models_inside_of_models_are_no_towers() -> None:
    """A frozen teacher, and a model of one's own around one, take tokens; a vision model takes none."""
    import transformers

    class Taught(transformers.LlamaForCausalLM): ...

    class Holder(transformers.LlamaPreTrainedModel):
        def __init__(self, model: Any) -> None:
            super().__init__(model.config)
            self.lm = model

        def forward(self, **batch: Any) -> Any:
            return self.lm(**batch)

    taught = Taught(llama().config)
    taught.teacher = llama()
    assert model_parts.towers(taught) == model_parts.towers(Holder(llama())) == []
    assert model_parts.wrong_part(Holder(llama()), "sdpa", True) is None
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4, "num_layers": 1, "vocab_size": 40}
    both = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    assert model_parts.language_model_path(both) is None  # its encoder has a config of its own, and is called so
    assert model_parts.language_model_path(llama()) is None
    assert model_parts.language_model_path(composite("llava")) == "model.language_model"
    (tower,) = {type(part).__name__ for part in model_parts.towers(composite("qwen3_5"))}
    assert tower == "Qwen3_5VisionModel"


@pytest.mark.ranks(2)
def test_copied_layers_compute_over_shards(group: ProcessGroup) -> None:
    """A deepcopy of a layer, as for up-scaling, has a config of its own, which transformers does not reach."""
    model, name = llama().eval(), ours.register(group)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.model.layers[1].self_attn.layer_idx = 1
    model.config.num_hidden_layers = 2
    ids = torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=ids, use_cache=False).logits
    try:
        ours.switch(model, name)
        found = model(**ours.shard_batch({"input_ids": ids}, group), use_cache=False).logits
        torch.testing.assert_close(found, wanted.chunk(2, 1)[group.rank()], atol=1e-5, rtol=1e-4)
        ours.switch(model, "sdpa")
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
    finally:
        ours.unregister()
