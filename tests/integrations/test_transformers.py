"""A random Llama of transformers on sequence shards is the model of one process; nothing is left when unregistered."""

import importlib.util
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
from tritoncomm.integrations import transformers as ours

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
    if length % group.size():
        assert (got - wanted).abs().max() <= 1e-6, what  # the padded product has other rows
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


def four_ranks(group: ProcessGroup) -> None:
    compare(group, "plain", (8, 2))
    compare(group, "packed", (6, 3))


def test_four_ranks(pool: Pool) -> None:
    pool.run(four_ranks, world=4)


def state(group: ProcessGroup) -> None:
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
        with pytest.raises(tritoncomm.UnsupportedError, match="flash_test takes no 4-D mask"):
            model(**ours.shard_batch(batch_of("packed"), group))
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


def test_leaves_no_state(pool: Pool) -> None:
    pool.run(state, world=2)


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
    packed = ours.shard_batch({**batch_of("packed"), "labels": None}, group)
    mask = packed["attention_mask"]
    document = torch.tensor([0] * 7 + [1] * 3 + [2] * 6)
    assert torch.equal(mask[1, 0], (document[:, None] == document) & torch.ones(16, 16).tril().bool())


def test_shards(pool: Pool) -> None:
    pool.run(shards, world=2)


def refusals(group: ProcessGroup) -> None:
    argument, shape, unsupported = tritoncomm.ArgumentError, tritoncomm.ShapeError, tritoncomm.UnsupportedError
    batch, ids = batch_of("plain"), batch_of("plain")["input_ids"]
    positions = torch.arange(8 * group.rank(), 8 * group.rank() + 8).expand(2, 8)
    model, windowed = model_of((4, 4)), model_of((4, 4), sliding_window=5)
    name = ours.register(group)
    for each in (model, windowed):
        each.set_attn_implementation(name)
    local, packed = {"input_ids": ids[:, :8]}, ours.shard_batch(batch_of("packed"), group)
    heads = torch.ones(2, 4, 16, 16, dtype=torch.bool)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (argument, "is registered already", lambda: ours.register(group)),
        (argument, "no attention 'none'", lambda: ours.register(group, attention="none", name="x")),
        (unsupported, "function of each model", lambda: ours.register(group, attention="eager", name="x")),
        (argument, "needs input_ids", lambda: ours.shard_batch({"labels": ids}, group)),
        (argument, "'pixel_values' is not supported", lambda: ours.shard_batch({**batch, "pixel_values": ids}, group)),
        (shape, "labels .* needs the shape", lambda: ours.shard_batch({**batch, "labels": ids[:, 1:]}, group)),
        (shape, "not one of all 16 positions", lambda: model(**local, attention_mask=torch.ones(2, 8))),
        (shape, "same for all heads", lambda: model(**local, attention_mask=heads)),
        (unsupported, "mask made of local positions",
         lambda: model(**local, use_cache=False, position_ids=torch.arange(4).repeat(2).expand(2, 8))),
        (unsupported, "has no sliding window", lambda: windowed(**packed)),
    ]  # fmt: skip
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    cache = model(**local, position_ids=positions, use_cache=True).past_key_values
    with pytest.raises(unsupported, match="a key/value cache"):
        model(**local, position_ids=positions, past_key_values=cache)
    layer = model.model.layers[0].self_attn
    x = torch.zeros(2, 4, 8, 8)
    for extra in ("s_aux", "position_bias", "cache"):
        with pytest.raises(unsupported, match=extra):
            library()[1][name](layer, x, x, x, None, **{extra: x})
    ours.unregister()


def test_refusals(pool: Pool) -> None:
    pool.run(refusals, world=2)
