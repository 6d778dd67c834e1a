"""Every causal language model of transformers is right over sequence shards, or refused by name: never wrong.

``make test-models`` runs all. Elsewhere a twentieth runs, drawn by the commit.
"""

import importlib.util
import json
import random
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sweep import verdict
from pool import Pool
from torch import nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations import model_parts
from tritoncomm.integrations import transformers as ours

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
FOLDER = Path(__file__).parents[1]
SWEEPS: dict[str, dict[str, list[int]]] = json.loads((FOLDER / "models.json").read_text())
"""By release, the numbers of ranks at which a model was right in a full sweep; each leaves with its measured error."""
RELEASE = metadata.version("transformers") if importlib.util.find_spec("transformers") else ""
RIGHT = SWEEPS.get(RELEASE, {name: [] for models in SWEEPS.values() for name in models})
"""Those of the installed release; of one that was never swept it is only known that none may be wrong."""


def drawn() -> list[str]:
    """A twentieth of the models that ran, by the hash of the commit; by nothing in a tree without git."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=False)
    return sorted(random.Random(head.stdout.strip()).sample(sorted(RIGHT), len(RIGHT) // 20))


def check(pool: Pool, name: str, world: int, seed: int, kv_heads: int) -> None:
    (found, *others) = pool.run(verdict, name, seed, kv_heads, world=world, timeout=110)
    assert all(other == found for other in others)
    if found == "absent":
        pytest.skip(f"the installed transformers has no {name}")
    again = f"pytest tests/integrations/test_models.py -k 'every and {name}-'"
    assert not found.startswith("wrong"), f"{name} at {world} ranks: {found}; {again}"
    if world in RIGHT[name]:
        assert found == "right", f"{name} at {world} ranks was right: {found}; {again}"


@pytest.mark.parametrize("name", drawn())
def test_a_twentieth_of_the_models(pool: Pool, name: str) -> None:
    for world in (1, 2):
        check(pool, name, world, 0, 2)


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


def test_what_nobody_knows_is_refused_with_the_remedy(group: ProcessGroup) -> None:
    name = ours.register(group)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_parts, "_calls_registry", lambda kinds: False)
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
