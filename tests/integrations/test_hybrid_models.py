"""Models with recurrent layers over sequence shards: logits and gradients of one process, padded and packed, too."""

import copy
import gc
import importlib.util
import inspect
import io
import random
import re
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tritoncomm
from tritoncomm import recurrent
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.groups import make_group
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import forwards, model_parts, recurrences, recurrent_layers, registration
from tritoncomm.integrations.transformers.batch import IGNORED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
MODELS = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "zamba", "zamba2",
)  # fmt: skip
MIXERS = ("jamba", "lfm2", "mamba", "mamba2", "qwen3_next")
"""A model with a mixer of each kind."""
LENGTH, LOGITS, GRADIENTS = 24, 2e-5, 1e-4
STARTS = [[0, 5, 6, 17], [0, 12, 23]]
"""Of documents: inside of shards and at their edges, of one token, over three shards."""


def tiny(name: str) -> Any:
    from tiny_models import names, tiny  # imports transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    if name not in names():
        pytest.skip(f"the installed transformers has no {name}")
    model = tiny(name, 0, 4)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model


def drawn(rows: int) -> Tensor:
    return torch.randint(3, 90, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def whole(model: Any, ids: Tensor, case: str, mask: Tensor | None) -> tuple[Tensor, Any]:
    """Logits of one process, after the backward of the mean over labels; each packed document by itself."""
    labels = ids.clone() if mask is None else ids.masked_fill(mask == 0, IGNORED)
    if case != "packed":
        out = model(input_ids=ids, attention_mask=mask, use_cache=False)
        logits = out.logits
    else:
        rows = [
            torch.cat([model(input_ids=row[None, a:b], use_cache=False).logits for a, b in spans(starts)], 1)
            for row, starts in zip(ids, STARTS, strict=False)
        ]
        logits = torch.cat(rows)
        for row, starts in zip(labels, STARTS, strict=False):
            row[starts] = IGNORED
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    nn.functional.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten()).backward()
    return logits.detach(), labels


def spans(starts: list[int]) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], LENGTH], strict=True))


def batch_of(ids: Tensor, case: str) -> dict[str, Tensor]:
    if case == "packed":
        positions = [torch.cat([torch.arange(b - a) for a, b in spans(starts)]) for starts in STARTS[: len(ids)]]
        return {"position_ids": torch.stack(positions)}
    if case == "plain":
        return {}
    mask = torch.ones_like(ids)
    mask[1, -7:] = 0
    return {"attention_mask": mask.flip(1) if case == "left" else mask}


def whole_of_first(group: ProcessGroup, model: Any, ids: Tensor, case: str, mask: Any) -> tuple[Tensor, Any]:
    """As ``whole``, which the first rank alone computes; its model has the gradients."""
    computed = [whole(model, ids, case, mask) if group.rank() == 0 else None]
    dist.broadcast_object_list(computed, group=group, group_src=0)
    assert computed[0] is not None
    return computed[0]


def assert_alike(group: ProcessGroup, model: Any, reference: Any, found: Tensor, wanted: Tensor, mask: Any) -> None:
    """Logits of the rank, and on the first one, whose reference has gradients, the sums of all ranks' gradients."""
    part = wanted.chunk(group.size(), 1)[group.rank()]
    if mask is not None:  # what stands at padding is nobody's business
        seen = mask.chunk(group.size(), 1)[group.rank()].bool()
        found, part = found[seen], part[seen]
    torch.testing.assert_close(found, part, atol=LOGITS, rtol=0)
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    total = torch.cat([grad.flatten() for grad in grads])
    dist.reduce(total, group_dst=0, group=group)
    sums = total.split([grad.numel() for grad in grads])
    for (name, mine), other, grad in zip(model.named_parameters(), reference.parameters(), sums, strict=True):
        if other.grad is None:
            continue
        off = (grad.view_as(mine) - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-3)
        assert off < GRADIENTS, f"{name}: off by {off:.2g} of the largest gradient"


def check(
    group: ProcessGroup,
    name: str,
    case: str,
    rows: int,
    change: Callable[[Any], Any] | None = None,
    attention: str = "sdpa",
) -> None:
    model, ids = tiny(name), drawn(rows)
    reference, batch = copy.deepcopy(model), batch_of(ids, case)
    mask = batch.get("attention_mask")
    wanted, labels = whole_of_first(group, reference, ids, case, mask)
    registered = ours.register(group, attention=attention)
    try:
        ours.switch(model, registered)
        if change is not None:
            change(model)
        shard = ours.shard_batch({"input_ids": ids, "labels": labels, **batch}, group)
        out = model(**shard)
        out.loss.backward()
        assert_alike(group, model, reference, out.logits.detach(), wanted, mask)
    finally:
        ours.unregister()


@pytest.mark.ranks(2, 4, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3)))
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_one_process(group: ProcessGroup, name: str) -> None:
    check(group, name, "plain", 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", ["left", "right"])
@pytest.mark.parametrize("name", MIXERS)
def test_padding_is_zeroed_where_it_is(group: ProcessGroup, name: str, case: str) -> None:
    """transformers takes the last columns of the mask, on every rank; a mixer of each kind."""
    check(group, name, case, 2)


@pytest.mark.ranks(3, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 2, 4)))
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_apart(group: ProcessGroup, name: str) -> None:
    check(group, name, "packed", 2)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", MIXERS)
def test_packed_documents_are_apart_on_one_rank(group: ProcessGroup, name: str) -> None:
    check(group, name, "packed", 2)


@pytest.mark.slow
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", MODELS)
def test_drawn_documents(group: ProcessGroup, name: str) -> None:
    draw = random.Random(name)
    starts = [sorted({0, *draw.sample(range(1, LENGTH), draw.randint(1, 5))}) for _ in range(2)]
    with mock.patch.dict(globals(), STARTS=starts):
        check(group, name, "packed", 2)


@pytest.mark.slow
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_near_to_fp32_as_in_one_process(group: ProcessGroup, name: str) -> None:
    model, ids = tiny(name), drawn(2)
    exact = model(input_ids=ids, use_cache=False).logits
    model.bfloat16()
    rounded = model(input_ids=ids, use_cache=False).logits.float()
    registered = ours.register(group)
    try:
        ours.switch(model, registered)
        found = model(**ours.shard_batch({"input_ids": ids}, group)).logits.float()
        exact, rounded = (x.chunk(group.size(), 1)[group.rank()] for x in (exact, rounded))
        assert (found - exact).abs().max() <= 1.5 * (rounded - exact).abs().max()
    finally:
        ours.unregister()


@pytest.mark.ranks(8)
@pytest.mark.parametrize("case", ["plain", "packed"])
def test_more_ranks_than_heads(group: ProcessGroup, case: str) -> None:
    """Ranks of a head split its columns, in a model without attention, which has no columns to split."""
    check(group, "mamba2", case, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "function", "package", "kind"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "cu_seqlens"),
        ("mamba2", "mamba2_chunk_scan", "mamba_chunk_scan_combined", "seq_idx"),
    ],
)
def test_a_package_computes_all_documents_in_one_call(
    group: ProcessGroup, name: str, function: str, package: str, kind: str
) -> None:
    """As fla's and mamba_ssm's functions do, behind transformers' own decorator; a stand-in of the same arguments."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback as behind

    model, calls = tiny(name), []
    module = sys.modules[type(model).__module__]
    original, reference = inspect.unwrap(getattr(module, function)), inspect.unwrap(getattr(module, function))

    def of_documents(args: Any, kwargs: Any, row: int, start: int, stop: int) -> Tensor:
        def cut(x: Any) -> Any:
            return x[row : row + 1, start:stop] if isinstance(x, Tensor) and x.dim() > 2 else x

        out = reference(*map(cut, args), **{key: cut(x) for key, x in kwargs.items()})
        return out[0] if isinstance(out, tuple) else out

    def packed(*args: Any, **kwargs: Any) -> Any:
        boundaries = kwargs.pop(kind)
        calls.append(boundaries)
        if boundaries is None:
            return reference(*args, **kwargs)
        if kind == "cu_seqlens":
            rows = [boundaries.tolist()]
        else:
            rows = [[0, *(of_row.diff().nonzero()[:, 0] + 1).tolist(), LENGTH] for of_row in boundaries]
        outs = [
            torch.cat([of_documents(args, kwargs, row, start, stop) for start, stop in pairwise(cuts)], 1)
            for row, cuts in enumerate(rows)
        ]
        return (torch.cat(outs), None) if kind == "cu_seqlens" else torch.cat(outs)

    plain = inspect.signature(original)
    boundaries = inspect.Parameter(kind, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [x for x in plain.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    stand_in: Any = lambda *args, **kwargs: packed(*args, **{kind: None, **kwargs})  # noqa: E731
    stand_in.__signature__ = plain.replace(parameters=[*parameters, boundaries])
    with mock.patch.dict(sys.modules, {"a_package": mock.Mock(spec=[package], **{package: stand_in})}):
        replaced: Any = behind(package, "a_package", "")(original)
    with mock.patch.object(module, function, replaced):
        check(group, name, "packed", 2)
    of_shards = [x for x in calls if x is not None]
    mixers = len(recurrent_layers.recurrent_layers(model))
    assert len(of_shards) == mixers > 1
    assert all(x is of_shards[0] for x in of_shards)
    if kind == "cu_seqlens":
        assert of_shards[0].tolist() == [0, 5, 6, 17, 24, 36, 47, 48]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [3, 4])
def test_positions_of_multimodal_rotary_embeddings(group: ProcessGroup, count: int) -> None:
    """Time, height and width each have their own; of four the first ones are the text's, and tell documents apart."""
    model, ids = tiny("qwen3_5_text"), drawn(2)
    reference = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(2)
    places = torch.randint(0, 9, (3, 2, LENGTH), generator=draw).cumsum(2) // 4
    batch: dict[str, Any] = {"position_ids": places}
    if count == 3:
        wanted = reference(input_ids=ids, use_cache=False, **batch).logits
    else:
        text = batch_of(ids, "packed")["position_ids"]
        batch = {"position_ids": torch.cat([text[None], places])}
        parts = [
            [
                reference(input_ids=ids[row, None, a:b], position_ids=places[:, row, None, a:b], use_cache=False).logits
                for a, b in spans(starts)
            ]
            for row, starts in enumerate(STARTS)
        ]
        wanted = torch.cat([torch.cat(part, 1) for part in parts])
    padded = -LENGTH % group.size()
    registered = ours.register(group)
    try:
        ours.switch(model, registered)
        shard = ours.shard_batch({"input_ids": ids, **batch}, group)
        assert shard["position_ids"].shape == (count, 2, (LENGTH + padded) // group.size())
        found = model(**shard).logits
        torch.testing.assert_close(found, wanted.chunk(group.size(), 1)[group.rank()], atol=LOGITS, rtol=0)
        with pytest.raises(ShapeError, match=r"position_ids \[3, 2, 4\] needs the shape of input_ids"):
            ours.shard_batch({"input_ids": ids, "position_ids": places[..., :4]}, group)
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_boundaries_of_collators(group: ProcessGroup) -> None:
    """What collators add for packed documents says the same as position_ids that start again, or is refused."""
    ids, labels = drawn(2), drawn(2)
    wanted = ours.shard_batch({"input_ids": ids, "labels": labels, **batch_of(ids, "packed")}, group)
    numbers = torch.stack([(torch.arange(LENGTH)[:, None] >= torch.tensor(starts)).sum(1) for starts in STARTS])
    found = ours.shard_batch({"input_ids": ids, "labels": labels, "seq_idx": numbers.int()}, group)
    row = {"input_ids": ids[:1], "labels": labels[:1]}
    cu = torch.tensor([*STARTS[0], LENGTH], dtype=torch.int32)
    flat = ours.shard_batch(
        row | {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}, group
    )
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
        assert key == "num_items_in_batch" or torch.equal(flat[key], value[:1]), key
    assert set(flat) == set(wanted)
    positions = batch_of(ids, "packed")["position_ids"][:1]
    mask = torch.ones_like(ids[:1])
    for wrong, words in (
        ({"cu_seq_lens_q": cu[:-1]}, "cu_seq_lens_q has to ascend from 0 to 24"),
        ({"cu_seq_lens_k": cu.flip(0)}, "cu_seq_lens_k has to ascend"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, LENGTH]), "position_ids": positions}, "start at other positions"),
        ({"cu_seq_lens_q": cu, "attention_mask": mask}, "and an attention_mask; packed documents have no padding"),
        ({"seq_idx": numbers[:1, :4]}, "seq_idx .* needs the shape of input_ids"),
    ):
        with pytest.raises((ArgumentError, ShapeError), match=words):
            ours.shard_batch(row | wrong, group)
    two = {"input_ids": ids, "cu_seq_lens_q": cu}
    with pytest.raises(ArgumentError, match="there are 2 rows"):
        ours.shard_batch(two, group)


@pytest.mark.ranks(1, 2)
def test_no_tensor_has_the_positions_squared(group: ProcessGroup) -> None:
    """Attention goes document by document, with windows as well; a mask of all positions would be 16 times as large."""
    model, ids = tiny("qwen3_next"), torch.randint(3, 90, (1, 512), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "position_ids": torch.arange(32).repeat(16)[None]}
    registered, largest = ours.register(group), 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            masks = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.dtype is torch.bool]
            largest = max([largest, *(x.untyped_storage().nbytes() for x in masks)])
            return out

    try:
        ours.switch(model, registered)
        with Largest(), torch.no_grad():
            model(**ours.shard_batch(batch, group))
    finally:
        ours.unregister()
    assert largest <= max(64 * 64, 512), largest  # of a chunk of the recurrence


class Operators(TorchDispatchMode):
    """Counts operators that compute or copy, and the bytes of the storages that they make and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.live, self.peak = 0, 0, 0

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        self.number += not is_view and "empty" not in func._schema.name and "detach" not in func._schema.name
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not is_view and x.untyped_storage()._cdata not in given:
                self.live += x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self._free, x.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live)
        return out


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("name", "most", "chunk"), [("qwen3_next", 1.5, 64), ("mamba2", 2.0, 64), ("llama", 1.5, 16)])
def test_cost_follows_the_lengths_of_documents(group: ProcessGroup, name: str, most: float, chunk: int) -> None:
    """Documents of two lengths are two calls, whatever their number; in whole chunks they take no more memory."""
    many, full_chunks = [4, 12] * 32, [chunk, 2 * chunk] * 2
    model, registered = tiny(name), ours.register(group)
    for module in model.modules():
        if hasattr(module, "chunk_size"):  # of Mamba; the other functions have theirs as a default
            module.chunk_size = chunk

    def cost_of(documents: list[int]) -> Operators:
        ids = torch.randint(3, 90, (1, sum(documents)), generator=torch.Generator().manual_seed(1))
        positions = torch.cat([torch.arange(length) for length in documents])[None]
        batch = ours.shard_batch({"input_ids": ids, "labels": ids, "position_ids": positions}, group)
        for _ in range(2):  # what is kept for a batch is made in its first forward
            with Operators() as operators:
                model(**batch, use_cache=False)
        return operators

    try:
        ours.switch(model, registered)
        numbers, peaks = ([cost_of(documents) for documents in ([sum(x)], x)] for x in (many, full_chunks))
    finally:
        ours.unregister()
    assert numbers[1].number <= most * numbers[0].number
    assert peaks[1].peak <= 1.2 * peaks[0].peak


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["lfm3", "qwen3_next"])
def test_flash_attention_gets_the_boundaries_of_documents(group: ProcessGroup, name: str) -> None:
    import transformers.masking_utils as masking
    import transformers.modeling_utils as modeling

    attentions, masks = modeling.ALL_ATTENTION_FUNCTIONS, masking.ALL_MASK_ATTENTION_FUNCTIONS
    lengths = []

    def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        """Attention by boundaries, as flash attention has them."""
        cu, window = kwargs.pop("cu_seq_lens_q").tolist(), kwargs.pop("sliding_window", None)
        assert cu == kwargs.pop("cu_seq_lens_k").tolist()
        assert mask is None
        lengths.append((kwargs.pop("max_length_q"), kwargs.pop("max_length_k"), cu))
        outs = []
        for a, b in pairwise(cu):
            place = torch.arange(b - a)
            near = place[:, None] - place
            seen = (near >= 0) & (near < (window or LENGTH))
            outs.append(attentions["sdpa"](module, *(x[:, :, a:b] for x in (query, key, value)), seen, **kwargs)[0])
        return torch.cat(outs, 1), None

    type(attentions).register("flash_test", flash)
    type(masks).register("flash_test", masks["flash_attention_2"])
    try:
        recurrent._kept_boundaries.cache_clear()
        check(group, name, "packed", 2, attention="flash_test")
    finally:
        attentions._global_mapping.pop("flash_test")
        masks._global_mapping.pop("flash_test")
    assert lengths[0] == (12, 12, [0, 5, 6, 17, 24, 36, 47, 48])
    # On a GPU the host waits for each new tensor of boundaries: one is for all layers of a batch.
    assert len(lengths) > recurrent._kept_boundaries.cache_info().misses == 1


def checkpointed(use_reentrant: bool) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})

    return change


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["granitemoehybrid", "mamba", "qwen3_next"])
def test_recomputation(group: ProcessGroup, name: str, use_reentrant: bool) -> None:
    """It runs layers outside of the forward of their model, which has got another batch since."""

    def change(model: Any) -> None:
        checkpointed(use_reentrant)(model)
        if use_reentrant:
            model.enable_input_require_grads()

    check(group, name, "packed", 2, change)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "case", "fullgraph"),
    [
        ("lfm2", "packed", True),
        ("qwen3_next", "plain", True),
        pytest.param("qwen3_next", "packed", True, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "packed", False, marks=pytest.mark.slow),
    ],
)
def test_layers_compile(group: ProcessGroup, name: str, case: str, fullgraph: bool) -> None:
    """Packed, the loop over a chunk of qwen3_next is traced for each document, which takes four times as long."""

    def change(model: Any) -> None:
        for layer in model.model.layers[-2:]:  # one of each kind
            layer.compile(backend="aot_eager", fullgraph=fullgraph)

    torch.compiler.reset()
    check(group, name, case, 1, change)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["plain", pytest.param("packed", marks=pytest.mark.slow)])
def test_whole_models_compile_that_make_no_masks(group: ProcessGroup, case: str) -> None:
    torch.compiler.reset()
    check(group, "mamba2", case, 2, lambda model: model.compile(backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_whole_models_with_masks_are_refused_under_compile(group: ProcessGroup) -> None:
    torch.compiler.reset()
    with pytest.raises(UnsupportedError, match="a mask made of local positions"):
        check(group, "qwen3_next", "plain", 2, lambda model: model.compile(backend="aot_eager"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_bf16_has_the_bits_of_one_process(group: ProcessGroup, name: str) -> None:
    model, ids = tiny(name).bfloat16(), drawn(2)
    wanted = model(input_ids=ids, use_cache=False).logits
    registered = ours.register(group)
    try:
        ours.switch(model, registered)
        found = model(**ours.shard_batch({"input_ids": ids}, group)).logits
        assert torch.equal(found, wanted.chunk(2, 1)[group.rank()])
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_fsdp2_over_the_same_ranks(group: ProcessGroup) -> None:
    """Its gradients are means over the ranks of the sums that shards of the sequence have."""
    model, ids = tiny("qwen3_next"), drawn(2)
    reference = copy.deepcopy(model)
    wanted, labels = whole(reference, ids, "packed", None)
    registered = ours.register(group)
    try:
        ours.switch(model, registered)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        out = model(**ours.shard_batch({"input_ids": ids, "labels": labels, **batch_of(ids, "packed")}, group))
        out.loss.backward()
        torch.testing.assert_close(out.logits, wanted.chunk(2, 1)[group.rank()], atol=LOGITS, rtol=0)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            if other.grad is not None:
                off = (2 * mine.grad.full_tensor() - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-3)
                assert off < GRADIENTS
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_two_forwards_before_their_backwards(group: ProcessGroup) -> None:
    """The recomputation of the first has the documents of the first."""
    model, ids = tiny("qwen3_next"), drawn(2)
    registered = ours.register(group)
    try:
        ours.switch(model, registered)
        grads = []
        for change in (lambda model: model.train(), checkpointed(False)):
            change(model)
            model.zero_grad()
            losses = [
                model(**ours.shard_batch({"input_ids": ids, "labels": ids, **batch_of(ids, case)}, group)).loss
                for case in ("packed", "plain")
            ]
            losses[0].backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for one, other in zip(*grads, strict=True):
            assert torch.equal(one, other)
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_others_are_untouched(group: ProcessGroup) -> None:
    """A second model of the class, the names of the module, a copy, and the model itself when it is switched back."""
    model, ids = tiny("qwen3_next"), drawn(1)
    module = sys.modules[type(model).__module__]
    before, other = dict(vars(module)), copy.deepcopy(model)
    wanted = other(input_ids=ids, use_cache=False).logits
    registered = ours.register(group)
    batch = ours.shard_batch({"input_ids": ids}, group)
    ours.switch(model, registered)
    found = model(**batch).logits
    assert torch.equal(other(input_ids=ids, use_cache=False).logits, wanted)
    again, saved = copy.deepcopy(model), io.BytesIO()
    assert torch.equal(again(**batch).logits, found)
    torch.save(model, saved)
    with pytest.raises(ZeroDivisionError), mock.patch.object(nn.Linear, "forward", side_effect=ZeroDivisionError):
        model(**batch)
    assert torch.equal(other(input_ids=ids, use_cache=False).logits, wanted)
    for each in (model, again):
        ours.switch(each, "sdpa")
        assert torch.equal(each(input_ids=ids).logits, other(input_ids=ids).logits)
    ours.switch(model, registered)
    ours.register(group, name="second")
    ours.switch(other, "second")
    ours.unregister("second")
    assert torch.equal(model(**batch).logits, found)
    ours.unregister()
    assert {name for name, value in vars(module).items() if before.get(name) is not value} == set()
    with pytest.raises(ArgumentError, match="is not registered"):
        model.model.layers[0].linear_attn(torch.zeros(1, 4, 64))


@pytest.mark.ranks(2)
def test_layers_get_no_mask_without_padding(group: ProcessGroup) -> None:
    """As in one process: a mask of ones would be multiplied by in every layer."""
    masks = []

    def change(model: Any) -> None:
        layer = model.model.layers[0].linear_attn
        layer.register_forward_pre_hook(lambda *args: masks.append(args[2]["attention_mask"]), with_kwargs=True)

    check(group, "qwen3_next", "plain", 2, change)
    check(group, "qwen3_next", "right", 2, change)
    assert masks[0] is None
    assert masks[1].shape == (2, LENGTH // 2)


@pytest.mark.ranks(2)
def test_what_would_be_wrong_is_refused(group: ProcessGroup) -> None:
    model, ids = tiny("qwen3_next"), drawn(1)
    registered = ours.register(group)
    try:
        model.set_attn_implementation(registered)  # without ``switch``
        with pytest.raises(UnsupportedError, match="its layers of the kind linear_attention are not known"):
            model(**ours.shard_batch({"input_ids": ids}, group))
        model.set_attn_implementation("sdpa")
        ours.switch(model, registered)
        batch = ours.shard_batch({"input_ids": ids}, group)
        with pytest.raises(ArgumentError, match="shard_batch did not make"):
            model(input_ids=ids)
        with pytest.raises(ArgumentError, match=r"no batch of shard_batch came here.*call the whole model"):
            model.model.layers[0].linear_attn(torch.zeros(1, 12, 64))
        with pytest.raises(UnsupportedError, match=r"a cache of states is not supported.*use_cache=False"):
            model(**batch, use_cache=True)
        layer = model.model.layers[0].linear_attn
        replaced = mock.patch.object(layer, "forward", lambda hidden_states, **_: hidden_states)  # as a kernel's layer
        with replaced, pytest.raises(UnsupportedError, match=r"Qwen3NextGatedDeltaNet did not call causal_conv1d_fn"):
            model(**batch)
        module = sys.modules[type(layer).__module__]
        theirs = mock.patch.object(module, "causal_conv1d_fn", inspect.unwrap(module.causal_conv1d_fn))
        with theirs, pytest.raises(UnsupportedError, match=r"did not call causal_conv1d_fn as switch\(\) left it"):
            model(**batch)
        assert model(**batch).logits.shape == (1, LENGTH // 2, 96)
    finally:
        ours.unregister()


def test_the_table_has_all_functions_and_kinds_of_layers() -> None:
    """Of the installed transformers; in a release with another function or kind somebody has to look at it."""
    import transformers
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    folder = Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"@use_kernel_func_from_hub_with_fallback\([^)]*\)\ndef (\w+)\(")
    functions = {name for path in folder.glob("*/modeling_*.py") for name in pattern.findall(path.read_text())}
    table = {*recurrences.NAMES, *recurrences.FUSED, *recurrences.STEPS}
    assert functions <= table  # one that an earlier release has, or the next one, may stand there, too
    refused = {
        "window_attention", "indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "minimax_m3_sparse", "reference_sliding_attention",
    }  # fmt: skip
    recurrent = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}  # right where a function of the table serves
    assert set(ALLOWED_LAYER_TYPES) <= model_parts._ATTENTION | model_parts._BY_POSITION | recurrent | refused


@pytest.mark.ranks(2)
def test_a_function_that_nobody_knows_is_refused(group: ProcessGroup) -> None:
    """What a package may replace mixes positions; a release with another function has to be looked at."""
    model = tiny("qwen3_next")
    registered = ours.register(group)
    recurrence = recurrences.RECURRENCES
    try:
        names = tuple(name for name in recurrences.NAMES if name != "torch_chunk_gated_delta_rule")
        for function in (recurrences.functions_of, recurrences.unknown_of):
            function.cache_clear()
        with mock.patch.object(recurrences, "NAMES", names):
            assert "torch_chunk_gated_delta_rule" in recurrence
            with pytest.raises(UnsupportedError, match="its layers of the kind linear_attention are not known"):
                ours.switch(model, registered)
    finally:
        for function in (recurrences.functions_of, recurrences.unknown_of):
            function.cache_clear()
        ours.unregister()


@pytest.mark.ranks(2)
def test_a_refused_switch_changes_nothing(group: ProcessGroup) -> None:
    """Attention, recurrent layers and rotary tables compute over shards as before, or all of them alone as before."""
    model, ids = tiny("qwen3_next"), drawn(2)
    wanted = model(input_ids=ids, use_cache=False).logits
    name, second = ours.register(group), ours.register(group, name="second")
    refusals: dict[str, Any] = {
        "unknown": mock.patch.object(model_parts, "unknown_part", return_value="nobody knows it"),
        "wrong": mock.patch.object(model_parts, "wrong_part", return_value="it is wrong"),
        "transformers": mock.patch.object(type(model), "set_attn_implementation", side_effect=KeyboardInterrupt),
    }
    try:
        for is_switched in (False, True):
            if is_switched:
                ours.switch(model, name)
            for patch in refusals.values():
                for other in (name, second):
                    with patch, pytest.raises((UnsupportedError, KeyboardInterrupt)):
                        ours.switch(model, other)
                    batch = {"input_ids": ids, "use_cache": False}
                    own = wanted
                    if is_switched:
                        batch = ours.shard_batch({"input_ids": ids}, group)
                        own = wanted.chunk(2, 1)[group.rank()]
                    found = model(**batch).logits
                    assert (found - own).abs().max() < LOGITS
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_models_without_attention_switch_back(group: ProcessGroup, name: str) -> None:
    model, ids = tiny(name), drawn(2)
    wanted = model(input_ids=ids, use_cache=False).logits
    registered = ours.register(group)
    try:
        ours.switch(model, registered)
        with pytest.raises(ArgumentError, match="transformers has no attention 'none'"):
            ours.switch(model, "none")
        for other in ("sdpa", "eager"):
            ours.switch(model, other)
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)
        assert model.generate(ids[:, :4], max_new_tokens=2, do_sample=False).shape == (2, 6)
    finally:
        ours.unregister()


ROWS = {"one": slice(1, 2), "some": slice(1, 3), "every second": slice(None, None, 2)}


def rows_of(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {key: x[..., rows, :] if isinstance(x, Tensor) and x.dim() > 1 else x for key, x in batch.items()}


def documents_alone(reference: Any, ids: Tensor, starts: list[list[int]]) -> Tensor:
    rows = [
        [reference(input_ids=row[None, a:b], use_cache=False).logits for a, b in spans(of_row)]
        for row, of_row in zip(ids, starts, strict=True)
    ]
    return torch.cat([torch.cat(parts, 1) for parts in rows])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        "mamba2",
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3_next", "lfm2", "bamba", "jamba")],
    ],
)
def test_rows_of_a_batch_are_a_batch(group: ProcessGroup, name: str) -> None:
    """Padding, documents, boundaries and the largest position are of these rows."""
    model, ids = tiny(name), drawn(4)
    reference, registered, starts = copy.deepcopy(model), ours.register(group), [*STARTS, [0], [0, 3]]
    packed = torch.stack([torch.cat([torch.arange(b - a) for a, b in spans(row)]) for row in starts])
    padded = torch.ones_like(ids)
    for row, count in enumerate((3, 11, 0, 17)):
        padded[row, :count] = 0
    batches = {"left": {"attention_mask": padded}, "right": {"attention_mask": padded.flip(1)}}
    batches["packed"] = {"position_ids": packed}
    if name == "qwen3_5_text":
        batches["packed, multimodal"] = {"position_ids": torch.stack([packed] * 4)}
    try:
        ours.switch(model, registered)
        for case, batch in batches.items():
            if "packed" in case:
                wanted = documents_alone(reference, ids, starts)
            else:
                wanted = reference(input_ids=ids, use_cache=False, **batch).logits
            seen = batch.get("attention_mask", torch.ones_like(ids)).chunk(2, 1)[group.rank()].bool()
            part, shard = wanted.chunk(2, 1)[group.rank()], ours.shard_batch({"input_ids": ids, **batch}, group)
            for label, rows in ROWS.items():
                found = model(**rows_of(shard, rows)).logits
                assert found.shape == part[rows].shape, (case, label)
                assert (found - part[rows])[seen[rows]].abs().max() < LOGITS, (case, label)
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_other_selections_of_a_batch_are_refused(group: ProcessGroup, name: str) -> None:
    """On every rank, before anything is sent, and in our words."""
    model, ids, registered = tiny(name), drawn(4), ours.register(group)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    try:
        ours.switch(model, registered)
        shard = ours.shard_batch({"input_ids": ids, "attention_mask": mask}, group)
        columns = {key: x[:, :4] if key != "attention_mask" else x[:, :8] for key, x in shard.items()}
        by_index = {key: x[torch.tensor([1, 0])] for key, x in shard.items()}
        cases: list[tuple[type[Exception], str, dict[str, Tensor]]] = [
            (ArgumentError, "that is no slice of its rows", columns),
            (ArgumentError, "shard_batch did not make these position_ids.*rows by index are not", by_index),
            (ShapeError, r"tokens \[4, 12\] with position_ids of 1 rows", {**shard, **rows_of(
                {"position_ids": shard["position_ids"]}, slice(1, 2))}),
            (ShapeError, r"tokens \[1, 12\] with position_ids of 4 rows", {**rows_of(shard, slice(1, 2)),
                "position_ids": shard["position_ids"]}),
        ]  # fmt: skip
        if name != "mamba2":  # which sees no mask of all positions
            one_mask = {**shard, "attention_mask": shard["attention_mask"][:1]}
            cases.append((ShapeError, r"attention_mask \[1, 24\] for 4 rows", one_mask))
        for error, text, batch in cases:
            with tritoncomm.recording() as record, pytest.raises(error, match=text):
                model(**batch)
            assert not record
        assert model(**shard).logits.shape[:2] == (4, 12)
    finally:
        ours.unregister()


INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit, ZeroDivisionError)


def losses_of(model: Any, group: ProcessGroup, ids: Tensor, case: str) -> float:
    labels = ids.clone()
    for row, starts in zip(labels, STARTS if case == "packed" else [], strict=False):
        row[starts] = IGNORED
    with torch.no_grad():
        loss = model(**ours.shard_batch({"input_ids": ids, "labels": labels, **batch_of(ids, case)}, group)).loss
    dist.all_reduce(loss, group=group)
    return float(loss)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "in_full"),
    [("qwen3_next", False), ("llama", False)]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in ("llama", "gemma3_text", "qwen3_next", "mamba2")],
)
def test_an_interrupted_forward_leaves_nothing(group: ProcessGroup, name: str, in_full: bool) -> None:
    """Torch runs no hooks after a KeyboardInterrupt: the next batch, model or layer must not see the one before."""
    model, ids, registered = tiny(name), drawn(2), ours.register(group)
    plain, twin = copy.deepcopy(model), copy.deepcopy(model)
    wanted = plain(input_ids=ids, use_cache=False).logits
    inner = model.get_decoder()
    layers = next(part for part in inner.modules() if isinstance(part, nn.ModuleList))
    places = [layers[0], layers[-1], *[part for part in layers[0].children() if not list(part.children())][:1], inner]
    try:
        ours.switch(model, registered)
        ours.switch(twin, registered)
        expected = {case: losses_of(model, group, ids, case) for case in ("plain", "packed")}
        assert abs(expected["plain"] - expected["packed"]) > 1e-3
        for number, place in enumerate(places if in_full else places[1:2]):
            for kind in INTERRUPTS if in_full else INTERRUPTS[:2]:
                for when in (place.register_forward_pre_hook, place.register_forward_hook)[number % 2 :]:
                    hook = when(mock.Mock(side_effect=kind))
                    with pytest.raises(kind):
                        losses_of(model, group, ids, "packed")
                    hook.remove()
                    assert torch.equal(plain(input_ids=ids, use_cache=False).logits, wanted)
                    with pytest.raises(ArgumentError, match=r"shard_batch did not make"):
                        inner(input_ids=ids, use_cache=False)
                    following = twin if kind is SystemExit else model
                    assert losses_of(following, group, ids, "plain") == expected["plain"], (kind, place)
                    with pytest.raises(kind), mock.patch.object(nn.Linear, "forward", side_effect=kind):
                        losses_of(model, group, ids, "plain")
                    assert losses_of(model, group, ids, "packed") == expected["packed"], (kind, place)
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_an_interrupted_recomputation_leaves_nothing(group: ProcessGroup) -> None:
    model, ids, registered = tiny("qwen3_next"), drawn(2), ours.register(group)
    plain = copy.deepcopy(model)
    wanted = plain(input_ids=ids, use_cache=False).logits
    try:
        ours.switch(model, registered)
        for change in (checkpointed(False), checkpointed(True)):
            change(model)
            model.enable_input_require_grads()
            batch = ours.shard_batch({"input_ids": ids, "labels": ids, **batch_of(ids, "packed")}, group)
            loss = model(**batch).loss
            with (
                pytest.raises(KeyboardInterrupt),
                mock.patch.object(nn.Linear, "forward", side_effect=KeyboardInterrupt),
            ):
                loss.backward()
            assert torch.equal(plain(input_ids=ids, use_cache=False).logits, wanted)
            grads = []
            for _ in range(2):
                model.zero_grad()
                model(**batch).loss.backward()
                grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    finally:
        ours.unregister()


@pytest.mark.ranks(2)
def test_a_model_inside_of_another_has_its_own_batch(group: ProcessGroup) -> None:
    """A teacher that a hook calls, a model of another thread, and the model itself: each computes on its batch."""
    model, ids, registered = tiny("qwen3_next"), drawn(2), ours.register(group)
    teacher = copy.deepcopy(model)
    try:
        for each in (model, teacher):
            ours.switch(each, registered)
        expected = {case: losses_of(model, group, ids, case) for case in ("plain", "packed")}
        layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        for called in (teacher, model):
            found: list[float] = []

            def call(*_: Any, called: Any = called, found: list[float] = found) -> None:
                layers[1]._forward_pre_hooks.popitem()
                found.append(losses_of(called, group, ids, "plain"))

            layers[1].register_forward_pre_hook(call)
            assert losses_of(model, group, ids, "packed") == expected["packed"]
            assert found == [expected["plain"]]
        stopped, seen = threading.Event(), []

        def wait(*_: Any) -> None:
            hook.remove()
            thread = threading.Thread(target=lambda: seen.append(losses_of(teacher, group, ids, "plain")))
            thread.start()
            thread.join(30)
            stopped.set()

        hook = layers[1].register_forward_pre_hook(wait)
        assert losses_of(model, group, ids, "packed") == expected["packed"]
        assert stopped.is_set()
        assert seen == [expected["plain"]]
    finally:
        ours.unregister()


def masks_of(model: Any, call: Callable[[], None]) -> list[Tensor]:
    """Zeros of the results of every dropout in a call."""
    masks: list[Tensor] = []
    hooks = [
        part.register_forward_hook(lambda module, args, out: masks.append(out.detach() == 0))
        for part in model.modules()
        if isinstance(part, nn.Dropout)
    ]
    call()
    for hook in hooks:
        hook.remove()
    return masks


@pytest.mark.ranks(2)
def test_dropout_by_rank(group: ProcessGroup) -> None:
    """Masks of shards are equal where ranks are seeded alike, and independent within; generators stay equal."""
    import transformers

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, embd_pdrop=0.25, resid_pdrop=0.25, attn_pdrop=0.25)
    torch.manual_seed(0)
    model, registered, ids = transformers.GPT2LMHeadModel(config).train(), ours.register(group), drawn(4)
    batch = ours.shard_batch({"input_ids": ids, "labels": ids}, group)

    def equal_share(x: Tensor) -> float:
        both = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(both, x, group=group)
        return float((both[0] == both[1]).float().mean())

    def step(seed: int | None = None) -> list[Tensor]:
        if seed is not None:
            torch.manual_seed(seed)
        model.zero_grad()
        masks = masks_of(model, lambda: model(**batch, use_cache=False).loss.backward())
        return masks

    try:
        ours.switch(model, registered)
        assert {equal_share(mask) for mask in step(7)} == {1.0}
        torch.manual_seed(7)
        with ours.dropout_by_rank(group):
            masks = step()
        shares = [equal_share(mask) for mask in masks]
        assert all(abs(share - 0.625) < 0.05 for share in shares), shares  # 0.25 ** 2 + 0.75 ** 2
        after = torch.get_rng_state()
        assert equal_share(after) == 1.0
        torch.manual_seed(7)
        torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(torch.get_rng_state(), after)
        with ours.dropout_by_rank(group):
            assert not torch.equal(step()[0], masks[0])  # the next step draws other masks
        grads = []
        for change in (lambda model: model.train(), checkpointed(False), checkpointed(True)):
            change(model)
            model.enable_input_require_grads()
            torch.manual_seed(7)
            with ours.dropout_by_rank(group):
                step()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            assert torch.equal(torch.get_rng_state(), after)
        for others in grads[1:]:
            assert all(torch.equal(one, other) for one, other in zip(grads[0], others, strict=True))
        with pytest.raises(KeyboardInterrupt), ours.dropout_by_rank(group):
            raise KeyboardInterrupt
        assert equal_share(torch.get_rng_state()) == 1.0
    finally:
        ours.unregister()


def hooks_of(model: Any) -> list[int]:
    """Numbers of hooks of all modules."""
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_switches_leave_no_hooks(group: ProcessGroup, name: str) -> None:
    """As a model has that generates while it trains; a copy has hooks of its own, which only its switch removes."""
    from tiny_models import tiny  # imports transformers

    model: Any = tiny(name)
    batch = {"input_ids": torch.randint(3, 90, (1, 16), generator=torch.Generator().manual_seed(1))}
    registered, other = ours.register(group), ours.register(group, name="other")
    try:
        ours.switch(model, registered)
        once, wanted = hooks_of(model), model(**ours.shard_batch(batch, group)).logits
        for _ in range(5):
            ours.switch(model, "sdpa")
            ours.switch(model, other)
            ours.switch(model, registered)
        assert hooks_of(model) == once
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(model), buffer)
        copied = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        assert hooks_of(copied) == once
        ours.switch(copied, "sdpa")
        assert hooks_of(model) == once
        assert sum(hooks_of(copied)) < sum(once)
        assert torch.equal(model(**ours.shard_batch(batch, group)).logits, wanted)
        ours.switch(copied, registered)
        ours.switch(model, "sdpa")
        assert hooks_of(copied) == once
        assert torch.equal(copied(**ours.shard_batch(batch, group)).logits, wanted)
    finally:
        ours.unregister()


@pytest.mark.ranks(1)
def test_functions_of_layers_go_with_their_registration(group: ProcessGroup) -> None:
    """They refer to the group, which torch's destroy_process_group frees."""
    from tiny_models import tiny  # imports transformers

    model: Any = tiny("qwen3_next")
    batch = {"input_ids": torch.arange(3, 19)[None]}
    made = make_group("alone", [dist.get_rank()])
    reference = weakref.ref(made)
    try:
        ours.switch(model, ours.register(made))
        model(**ours.shard_batch(batch, made))
        assert registration.registered["tritoncomm_ulysses"].functions
    finally:
        ours.unregister()
    assert not registration.registered
    dist.destroy_process_group(made)
    del made
    gc.collect()
    assert reference() is None


def test_a_checkpoint_is_no_compiled_call() -> None:
    """Each has a frame of torch.compiler.disable, below which no call of a module is taken for running."""
    module = nn.Linear(1, 1)
    assert not torch.compiler.disable(forwards.is_running)(module)
