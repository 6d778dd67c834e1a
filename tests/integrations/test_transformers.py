"""A random Llama of transformers on sequence shards is the model of one process; nothing is left when unregistered."""

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import variables
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import batch as sequence_batch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 6), (6, 3), (12, 6), (5, 5)]
LENGTH = 16


def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
        from transformers import masking_utils, modeling_utils

        transformers.logging.set_verbosity_error()
        return transformers, modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS


def model_of(heads: tuple[int, int], **more: Any) -> Any:
    transformers = library()[0]
    torch.manual_seed(0)
    kind = "Mistral" if "sliding_window" in more else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=8 * heads[0], intermediate_size=32, num_hidden_layers=2, num_attention_heads=heads[0], head_dim=8,
        num_key_value_heads=heads[1], vocab_size=32, attn_implementation="sdpa", **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batch_of(case: str, length: int = LENGTH) -> dict[str, Tensor]:
    ids = torch.randint(32, (2, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case in ("right padding", "left padding"):
        mask = torch.ones_like(ids)
        mask[0, slice(10, None) if case == "right padding" else slice(0, 5)] = 0
        batch["labels"][mask == 0] = -100
        batch["attention_mask"] = mask
    if case == "packed":
        parts = (7, 3, length - 10)
        batch["position_ids"] = torch.cat([torch.arange(n) for n in parts]).expand(2, length).contiguous()
        batch["labels"][:, [0, 7, 10]] = -100
    return batch


def of_documents(ids: Tensor, *, labels: bool, **more: Any) -> dict[str, Any]:
    """Documents of 7, 3 and 6 tokens, every token or all but the first of each a label."""
    starts, targets = [0, 7, 10], ids.clone()
    if not labels:
        targets[:, starts] = -100
    return {"input_ids": ids, "labels": targets, "position_ids": batch_of("packed")["position_ids"], **more}


def trained(model: Any, batch: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, loss and gradients."""
    model.zero_grad()
    out = model(**batch, **more)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), [p.grad.clone() for p in model.parameters()]


def compare(group: ProcessGroup, case: str, heads: tuple[int, int], length: int = LENGTH, **more: Any) -> None:
    model, batch, what = model_of(heads, **more), batch_of(case, length), (case, heads, length)
    logits, loss, gradients = trained(model, batch, use_cache=False)
    groups = [layer.self_attn.num_key_value_groups for layer in model.model.layers]
    name = ours.register(group)
    try:
        model.set_attn_implementation(name)
        with tritoncomm.recording() as record:
            local = trained(model, ours.shard_batch(batch, group))
    finally:
        ours.unregister()
    size = -(-length // group.size())
    wanted = logits[:, group.rank() * size : (group.rank() + 1) * size]
    got = local[0][:, : wanted.shape[1]]
    if length % group.size() or case == "packed":
        assert (got - wanted).abs().max() <= 1e-6, what  # products have other rows: with padding, or of one document
    else:
        assert torch.equal(got, wanted), what
    for x in (local[1], *local[2]):
        dist.all_reduce(x, group=group)
    assert abs(local[1] - loss) <= 1e-6 * loss, what
    for mine, other in zip(local[2], gradients, strict=True):
        assert (mine - other).abs().max() <= 1e-6, what
    assert [layer.self_attn.num_key_value_groups for layer in model.model.layers] == groups
    calls = {name: sum(c.calls for (n, _), c in record.items() if n == name) for name, _ in record}
    assert calls == ({} if group.size() == 1 else {"tritoncomm_ulysses": 4, "tritoncomm_ulysses.backward": 4}), what


def every_layout(group: ProcessGroup) -> None:
    for heads in HEADS:
        compare(group, "plain", heads)


def every_case(group: ProcessGroup) -> None:
    for heads in ((8, 2), (6, 3)):
        for case in ("right padding", "left padding", "packed"):
            compare(group, case, heads)
    compare(group, "plain", (8, 4), length=LENGTH - 1)
    compare(group, "right padding", (8, 4), length=LENGTH - 1)
    compare(group, "packed", (8, 4), length=LENGTH - 1)
    compare(group, "plain", (4, 4), sliding_window=5)
    compare(group, "left padding", (4, 4), sliding_window=5)


@pytest.mark.parametrize("run", [every_layout, every_case])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_is_the_model_of_one_process(pool: Pool, world: int, run: Callable[[ProcessGroup], None]) -> None:
    pool.run(run, world=world)


@pytest.mark.ranks(4)
def test_four_ranks(group: ProcessGroup) -> None:
    compare(group, "plain", (8, 2))
    compare(group, "packed", (6, 3))


def test_leaves_no_state(group: ProcessGroup) -> None:
    """What register adds is gone after unregister; the attention function sees its own name and this rank's heads."""
    _, attentions, masks = library()
    before = sorted(attentions), sorted(masks)
    seen: list[Any] = []

    def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        shapes = tuple(query.shape), tuple(key.shape)
        names = module.config._attn_implementation, module.config.hidden_size, module.layer_idx
        seen.append((*names, module.num_key_value_groups, *shapes, attention_mask, "position_ids" in kwargs))
        return attentions["sdpa"](module, query, key, value, None, **kwargs)

    type(attentions).register("flash_test", flash)
    type(masks).register("flash_test", masks["flash_attention_2"])
    try:
        one, two = ours.register(group, attention="flash_test", name="one"), ours.register(group, name="two")
        model = model_of((4, 1))
        model.config._attn_implementation_internal = one
        model(**ours.shard_batch(batch_of("plain"), group))
        assert seen[0] == ("flash_test", 32, 0, 2, (2, 2, LENGTH, 8), (2, 1, LENGTH, 8), None, False)
        assert model.model.layers[0].self_attn.num_key_value_groups == 4
        seen.clear()
        model(**ours.shard_batch(batch_of("right padding"), group))
        assert torch.equal(seen[0][6], batch_of("right padding")["attention_mask"].bool())
        masked = ours.shard_batch(batch_of("plain"), group) | {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}
        with pytest.raises(tritoncomm.UnsupportedError, match="flash_test takes no 4-D mask"):
            model(**masked)
        ours.unregister(one)
        assert two in attentions
        with pytest.raises(tritoncomm.ArgumentError, match="'one' is not registered here"):
            ours.unregister(one)
        with pytest.raises(KeyError):
            model(**ours.shard_batch(batch_of("plain"), group))
        ours.unregister()
        ours.unregister()
    finally:
        del attentions._global_mapping["flash_test"], masks._global_mapping["flash_test"]
    assert (sorted(attentions), sorted(masks)) == before


def shards(group: ProcessGroup) -> None:
    """Shards of all ranks, put together, are the batch, shifted and padded."""
    world = group.size()
    batch = batch_of("right padding", 15)
    mine = ours.shard_batch(batch, group, pad_token_id=9)
    assert set(mine) == {"input_ids", "position_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch"}
    parts = [torch.empty_like(mine["input_ids"]) for _ in range(world)]
    for key, wanted in (
        ("input_ids", torch.cat([batch["input_ids"], torch.full((2, 1), 9)], 1)),
        ("position_ids", torch.arange(16).expand(2, 16)),
        ("shift_labels", torch.cat([batch["labels"][:, 1:], torch.full((2, 2), -100)], 1)),
    ):
        dist.all_gather(parts, mine[key], group=group)
        assert torch.equal(torch.cat(parts, 1), wanted), key
    assert mine["num_items_in_batch"] == (batch["labels"][:, 1:] != -100).sum()
    assert torch.equal(mine["attention_mask"], torch.nn.functional.pad(batch["attention_mask"], (0, 1)))
    assert set(ours.shard_batch({"input_ids": batch["input_ids"]}, group)) == {"input_ids", "position_ids"}
    given = ours.shard_batch(
        {"input_ids": batch["input_ids"], "shift_labels": batch["labels"], "num_items_in_batch": 3}, group
    )
    assert given["num_items_in_batch"] == 3
    ids = batch_of("plain")["input_ids"]
    for labels in (False, True):  # those at starts of documents are left out, and not counted
        assert ours.shard_batch(of_documents(ids, labels=labels), group)["num_items_in_batch"] == 2 * (16 - 3)
    assert ours.shard_batch(of_documents(ids, labels=False, num_items_in_batch=26), group)["num_items_in_batch"] == 26
    for odd in (ids[:, :1].T.contiguous().T, ids[:1].t(), ids[:1, :1].as_strided((1, 1), (7, 9))):
        assert ours.shard_batch({"input_ids": odd}, group)["input_ids"].shape == (len(odd), 1)
    packed = ours.shard_batch(batch_of("packed"), group)
    assert packed["attention_mask"].untyped_storage().nbytes() <= 8, "no memory of all positions"
    assert torch.equal(packed["attention_mask"], torch.ones(2, 16))
    dist.all_gather(parts, packed["shift_labels"], group=group)
    ends = torch.cat(parts, 1)[:, [6, 9, 15]]  # of documents: the next token is another's
    assert (ends == -100).all()


@pytest.mark.ranks(1)
def test_copies_of_a_packed_batch_on_one_rank(group: ProcessGroup) -> None:
    """One rank takes batches that nobody sharded; documents are then those that transformers finds."""
    model, batch = model_of((4, 2)), batch_of("packed")
    parts = [model(input_ids=batch["input_ids"][:, a:b]).logits for a, b in ((0, 7), (7, 10), (10, 16))]
    wanted, name = torch.cat(parts, 1), ours.register(group)
    for is_switched in (False, True):
        model.set_attn_implementation(name)
        if is_switched:
            ours.switch(model, name)
        shard = ours.shard_batch(batch, group)
        copied = {key: x.clone() for key, x in shard.items()}
        for case in (shard, copied, {**copied, "position_ids": shard["position_ids"]}):
            assert (model(**case, use_cache=False).logits - wanted).abs().max() < 1e-5
        model.set_attn_implementation("sdpa")
    ours.unregister()


def test_shards(pool: Pool) -> None:
    pool.run(shards, world=2)


def bloom() -> Any:
    """A model with an attention of its own, which transformers cannot replace."""
    transformers = library()[0]
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=32))


def test_refusals(group: ProcessGroup) -> None:
    argument, shape, unsupported = tritoncomm.ArgumentError, tritoncomm.ShapeError, tritoncomm.UnsupportedError
    batch, ids = batch_of("plain"), batch_of("plain")["input_ids"]
    positions = torch.arange(8 * group.rank(), 8 * group.rank() + 8).expand(2, 8)
    model, windowed = model_of((4, 4)), model_of((4, 4), sliding_window=5)
    name = ours.register(group, own_positions=True)
    for each in (model, windowed):
        each.set_attn_implementation(name)
    local, packed = {"input_ids": ids[:, :8]}, ours.shard_batch(batch_of("packed"), group)
    heads = torch.ones(2, 4, 16, 16, dtype=torch.bool)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (argument, "is registered already", lambda: ours.register(group)),
        (argument, "no attention 'none'", lambda: ours.register(group, attention="none", name="x")),
        (unsupported, "function of each model", lambda: ours.register(group, attention="eager", name="x")),
        *[(argument, "'flash' as a kind of attention", lambda name=name: ours.register(group, name=name))
          for name in ("my_flash", "flash_attention_9", "org/kernel", "paged|sdpa", "eager", "")],
        (argument, "beside labels at starts of packed documents",
         lambda: ours.shard_batch({**of_documents(ids, labels=True), "num_items_in_batch": 30}, group)),
        (argument, "needs input_ids", lambda: ours.shard_batch({"labels": ids}, group)),
        (argument, "needs a model of transformers, not Linear", lambda: ours.switch(torch.nn.Linear(1, 1), name)),
        (unsupported, "cannot change the attention of BloomForCausalLM", lambda: ours.switch(bloom(), name)),
        (argument, "'none' is not registered here", lambda: ours.group_of("none")),
        (argument, "'whatever' is not supported", lambda: ours.shard_batch({**batch, "whatever": ids}, group)),
        *[(unsupported, f"'{key}': a model of images, videos or audio takes the whole batch",
           lambda key=key: ours.shard_batch({**batch, key: ids}, group))
          for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "input_features", "audio_values")],
        (shape, "labels .* needs the shape", lambda: ours.shard_batch({**batch, "labels": ids[:, 1:]}, group)),
        (shape, "not one of all 16 positions", lambda: model(**local, attention_mask=torch.ones(2, 8))),
        (shape, "same for all heads", lambda: model(**local, attention_mask=heads)),
        (unsupported, "mask made of local positions",
         lambda: model(**local, use_cache=False, position_ids=torch.arange(4).repeat(2).expand(2, 8))),
        (unsupported, "has no sliding window", lambda: windowed(**local, attention_mask=heads[:, :1])),
        (unsupported, "has a mask of its own, and packed documents", lambda: windowed(**packed)),
    ]  # fmt: skip
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    cache = model(**local, position_ids=positions, use_cache=True).past_key_values
    key = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"  # before 5.24
    with pytest.raises(unsupported, match="a key/value cache"):
        model(**local, position_ids=positions, **{key: cache})
    layer = model.model.layers[0].self_attn
    x = torch.zeros(2, 4, 8, 8)
    for extra in ("s_aux", "position_bias", "cache"):
        with pytest.raises(unsupported, match=extra):
            library()[1][name](layer, x, x, x, None, **{extra: x})
    ours.unregister()


FAMILIES = ("Llama", "Mistral", "Qwen3", "Gemma", "GPTNeoX", "GPT2")


def small(family: str, **more: Any) -> Any:
    """A model of two layers with four heads."""
    transformers = library()[0]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(
        **sizes, num_key_value_heads=2, head_dim=8, vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        attn_implementation="sdpa", use_cache=False, **more,
    )  # fmt: skip
    names = {"GPT2": "GPT2LMHeadModel"}
    return getattr(transformers, names.get(family, f"{family}ForCausalLM"))(config)


def test_families_of_models(group: ProcessGroup) -> None:
    """Attention of every family sees whether its batch was sharded, through checkpoints too."""
    name, batch = ours.register(group), batch_of("plain")
    for family in FAMILIES:
        model = small(family)
        model.train(family != "GPT2")  # which has dropout
        wanted = trained(model, batch)
        ours.switch(model, name)
        with pytest.raises(tritoncomm.ArgumentError, match="shard_batch did not make these position_ids"):
            model(**batch)
        for reentrant in (None, False, True) if model.training else (None,):
            if reentrant is not None:
                model.activation_checkpointing_enable({"use_reentrant": reentrant})
            loss, gradients = trained(model, ours.shard_batch(batch, group))[1:]
            for x in (loss, *gradients):
                dist.all_reduce(x, group=group)
            assert abs(loss - wanted[1]) <= 1e-6 * wanted[1], (family, reentrant)
            for mine, other in zip(gradients, wanted[2], strict=True):
                assert (mine - other).abs().max() <= 2e-6, (family, reentrant)
    ours.unregister()


def test_batches_that_are_no_shards(group: ProcessGroup) -> None:
    """Batches that are no shards, or shards of something else: every rank raises before anything is sent."""
    argument, mismatch = tritoncomm.ArgumentError, tritoncomm.MismatchError
    name, batch, rank = ours.register(group), batch_of("plain"), group.rank()
    model, of_others = model_of((4, 4)), model_of((4, 4))
    ours.switch(model, name)
    ours.switch(of_others, ours.register(dist.group.WORLD, name="others"))
    sharded = ours.shard_batch(batch, group)
    moved = {**sharded, "position_ids": sharded["position_ids"].clone()}
    view = {**sharded, "position_ids": sharded["position_ids"][None].expand(3, 2, 8)[0]}
    assert torch.equal(model(**view).logits, model(**sharded).logits)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("shard_batch did not make", lambda: model(**batch)),
        ("shard_batch did not make", lambda: model(**moved)),
        ("shard_batch did not make", lambda: model.eval()(**batch)),
        ("shard_batch did not make", lambda: model.model(batch["input_ids"])),
        ("shard_batch did not make", lambda: model.generate(batch["input_ids"], max_new_tokens=2)),
        ("for the group .*, and attention is over the group", lambda: of_others(**sharded)),
    ]
    with tritoncomm.recording() as record:
        for text, call in cases:
            with pytest.raises(argument, match=text):
                call()
    assert not record
    layer, x = model.model.layers[0].self_attn, torch.zeros(2, 4, 8, 8)
    with pytest.raises(tritoncomm.UnsupportedError, match="LlamaAttention passes no position_ids"):
        library()[1][name](layer, x, x, x, None)
    ours.unregister()
    free = ours.register(group, own_positions=True)
    assert torch.equal(model(**moved).logits, model(**view).logits), free
    ours.unregister()
    mine = {key: value + rank for key, value in batch.items()}
    sequence_batch._compared.forget(group)  # of this group alone: others have more ranks
    for _ in range(2):  # a comparison that failed is made again
        with pytest.raises(
            mismatch, match=r"ranks of the group have different batches.*input_ids is \[2, 16\] of int64"
        ):
            ours.shard_batch(mine, group)
    bad = {**batch, "whatever": x} if rank else batch
    with pytest.raises(argument if rank else mismatch, match="'whatever' is not supported"):
        ours.shard_batch(bad, group)
    ours.shard_batch(batch, group)
    for setting, value in ((variables.CHECK, True), (variables.HASH, 4)):
        ours.shard_batch(mine, group)  # compared once only
        with setting.override(value), pytest.raises(mismatch, match="different batches"):
            ours.shard_batch(mine, group)


def test_the_switch_is_per_model(group: ProcessGroup) -> None:
    """A policy is switched, its reference model of the same config object is not; and back."""
    transformers = library()[0]
    policy, batch = model_of((4, 2)), batch_of("plain")
    reference = transformers.LlamaForCausalLM(policy.config)
    wanted = trained(reference, batch, use_cache=False)
    name = ours.register(group)
    ours.switch(policy, name)
    assert policy.config is not reference.config
    assert policy.config is policy.model.config is policy.model.layers[1].self_attn.config
    assert reference.config._attn_implementation == "sdpa"
    for mine, other in zip(trained(reference, batch, use_cache=False)[2], wanted[2], strict=True):
        assert torch.equal(mine, other)
    assert name not in str(policy.config.to_dict())
    with pytest.raises(tritoncomm.ArgumentError, match="shard_batch did not make"):
        policy(**batch)
    ours.switch(policy, "sdpa")
    policy.load_state_dict(reference.state_dict())
    assert torch.equal(policy(**batch).logits, wanted[0])
    ours.unregister()


def compiled(group: ProcessGroup, fullgraph: bool) -> None:
    """A compiled model sees the mark of shard_batch, or raises."""
    name, batch = ours.register(group), batch_of("right padding")  # without a mask, transformers traces one of its own
    model = small("Llama")
    ours.switch(model, name)
    with torch.no_grad():
        sharded = ours.shard_batch(batch, group)
        wanted = model(**sharded).logits
        traced = torch.compile(model, backend="eager", fullgraph=fullgraph)
        for _ in range(2):
            assert (traced(**sharded).logits - wanted).abs().max() <= 1e-6
            error = torch._dynamo.exc.Unsupported if fullgraph else tritoncomm.ArgumentError
            with pytest.raises(error, match="ArgumentError" if fullgraph else "shard_batch did not make"):
                traced(**{**sharded, "position_ids": sharded["position_ids"].clone()})
    torch._dynamo.reset()
    ours.unregister()


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_models(pool: Pool, fullgraph: bool) -> None:
    pool.run(compiled, fullgraph, world=2)
