"""Arguments that decide values and no message: ranks that differ in one get an error in check mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import conv1d, pad

from tritoncomm import ArgumentError, MismatchError, collective, p2p, record
from tritoncomm.core.call import compare_arguments, enter
from tritoncomm.debug.descriptor import KINDS
from tritoncomm.experts import combine, dispatch
from tritoncomm.integrations.transformers.batch import shard_batch
from tritoncomm.recurrent import Exchanged, Sliced, by_heads, conv_halo
from tritoncomm.ulysses import UlyssesAttention

Call = Callable[[ProcessGroup, Any], Any]
IDS = torch.arange(8)[None]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recurrence(q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0, **_: Any) -> Tensor:
    return torch.cumsum(q * k * v, 1) * factor


def scaled(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return torch.cumsum(x * weight[: x.shape[2], : x.shape[2], None][0, :, :1], 1)


def convolution(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    return conv1d(pad(x, (weight.shape[-1] - 1, 0)), weight, None, groups=x.shape[1]) * factor


def heads(group: ProcessGroup, **given: Any) -> Tensor:
    made = {key: given.pop(key) for key in ("roles", "result", "boundaries") if key in given}
    q, k, v = (drawn(i, 1, 4, 4, 2) for i in range(3))
    return by_heads(recurrence, group, **made)(q, k, v, **given)


def halo(group: ProcessGroup, taps: int = 3, **given: Any) -> Tensor:
    return conv_halo(convolution, group)(drawn(0, 1, 3, 4), drawn(1, 3, 1, taps), **given)


def sliced(group: ProcessGroup, dim: int) -> Tensor:
    roles = {"x": Exchanged(), "weight": Sliced(dim)}
    return by_heads(scaled, group, roles)(drawn(0, 1, 4, 4, 2), drawn(1, 4, 4))


def attention(group: ProcessGroup, **given: Any) -> Tensor:
    return UlyssesAttention(group)(*(drawn(i, 1, 4, 2, 4) for i in range(3)), **given)


def groups_over(group: ProcessGroup) -> Any:
    """The ranks of ``group`` as those of ColoTensors, which look up a process group by them."""
    from tritoncomm.tensor import ProcessGroup as Groups

    ranks = dist.get_process_group_ranks(group)
    return Groups(ranks=ranks, tp_degree=len(ranks))


def colo(group: ProcessGroup, x: Tensor, dim: int) -> Any:
    from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ShardSpec

    tensor = ColoTensor(x.clone(), spec=ColoTensorSpec(groups_over(group)))
    tensor.set_dist_spec(ShardSpec([dim], [2]))
    return tensor


def cross_entropy(group: ProcessGroup, dim: int = 1, **given: Any) -> Any:
    return F.cross_entropy(colo(group, drawn(0, 6, 8), dim), torch.arange(6), **given)


def clipped(group: ProcessGroup, max_norm: float = 1.0, norm_type: float = 2.0, number: int = 2) -> Any:
    from tritoncomm.tensor import ColoParameter, ColoTensor, ColoTensorSpec, ShardSpec, clip_grad_norm_

    groups, parameters = groups_over(group), []
    for seed in range(2):
        parameters.append(ColoParameter(drawn(seed, 4, 4), True, ColoTensorSpec(groups)))
        parameters[-1].set_dist_spec(ShardSpec([0], [2]))
        spec = ColoTensorSpec(groups, parameters[-1].dist_spec)
        parameters[-1].grad = ColoTensor(drawn(seed + 9, 2, 4), spec=spec)
    return clip_grad_norm_(parameters[:number], max_norm, norm_type)


def unscaled(group: ProcessGroup, factor: float) -> None:
    gradient = colo(group, drawn(0, 4, 4), 0)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], torch.zeros(1), torch.tensor([factor]))  # pyright: ignore


def dropped(group: ProcessGroup, seed: int) -> None:
    """Without check mode seeds are compared in some calls."""
    from tritoncomm.tensor import ColoTensor, ColoTensorSpec

    torch.manual_seed(seed)
    F.dropout(ColoTensor(drawn(0, 4, 4), spec=ColoTensorSpec(groups_over(group))), 0.5)


def megatron_loss(group: ProcessGroup, smoothing: float) -> Tensor:
    from tritoncomm.integrations.megatron.functions import VocabParallelCrossEntropy

    return VocabParallelCrossEntropy(lambda: group)(drawn(0, 3, 2, 4), torch.zeros(3, 2, dtype=torch.int64), smoothing)


def fused(group: ProcessGroup, dtype: torch.dtype) -> Any:
    tensors = [drawn(0, 4), drawn(1, 4).to(dtype)]
    return collective.split_reduce_scatter(tensors, 0, group, dtype=torch.float32)


def wired(group: ProcessGroup, asynchronous: bool) -> Any:
    result = collective.reduce_scatter(drawn(0, 3 << 19), 0, group, wire=torch.bfloat16, async_op=asynchronous)
    return result[1].wait() if asynchronous else result


def combined(group: ProcessGroup, number: int) -> Any:
    rank = group.rank()
    made = []
    for tokens in (6, 9):
        ids = (torch.arange(tokens * 2).view(tokens, 2) * (3 + tokens + rank)) % 4
        made.append(dispatch(drawn(rank, tokens, 8), ids, torch.ones(tokens, 2), 4, group))
    return combine(made[number].summed(made[number].by_expert().rows), made[number])


CASES: dict[str, tuple[str, Call, Any, Any]] = {
    "by_heads: documents": ("documents", lambda g, x: heads(g, documents=x), [0, 3], [0, 5]),
    "by_heads: documents or none": ("documents", lambda g, x: heads(g, documents=x), [0, 3], None),
    "by_heads: many documents": (
        "documents", lambda g, x: heads(g, documents=x), list(range(8)), [*range(6), 7]
    ),
    "by_heads: boundaries": (
        "boundaries", lambda g, x: heads(g, boundaries=x, documents=[0, 3]), "cu_seqlens", "seq_idx"
    ),
    "by_heads: roles": ("roles", sliced, 0, 1),
    "by_heads: result": ("result", lambda g, x: heads(g, result=x), Exchanged(1, 2), Exchanged(1, 2, 3)),
    "by_heads: a number": ("others", lambda g, x: heads(g, factor=x), 1.0, 2.0),
    "conv_halo: documents": ("documents", lambda g, x: halo(g, documents=x), [0, 3], None),
    "conv_halo: taps": ("taps", lambda g, x: halo(g, taps=x), 3, 1),
    "conv_halo: a number": ("others", lambda g, x: halo(g, factor=x), 1.0, 2.0),
    "UlyssesAttention: is_causal": ("arguments", lambda g, x: attention(g, is_causal=x), True, False),
    "UlyssesAttention: scale": ("arguments", lambda g, x: attention(g, scale=x), 0.5, None),
    "UlyssesAttention: a mask or none": (
        "arguments", lambda g, x: attention(g, attn_mask=x), torch.ones(8, 8, dtype=torch.bool), None
    ),
    "cross_entropy: label_smoothing": ("label_smoothing", lambda g, x: cross_entropy(g, label_smoothing=x), 0.0, 0.3),
    "cross_entropy: ignore_index": ("ignore_index", lambda g, x: cross_entropy(g, 0, ignore_index=x), -100, 2),
    "cross_entropy: reduction": ("reduction", lambda g, x: cross_entropy(g, reduction=x), "sum", "mean"),
    "vocab_parallel_cross_entropy: label_smoothing": ("label_smoothing", megatron_loss, 0.0, 0.3),
    "vector_norm: ord": ("order", lambda g, x: torch.linalg.vector_norm(colo(g, drawn(0, 4, 4), 0), x), 2, 3),
    "clip_grad_norm_: max_norm": ("max_norm", lambda g, x: clipped(g, max_norm=x), 1.0, 0.5),
    "clip_grad_norm_: norm_type": ("norm_type", lambda g, x: clipped(g, norm_type=x), 2.0, 3.0),
    "clip_grad_norm_: parameters": ("gradients", lambda g, x: clipped(g, number=x), 2, 1),
    "unscale_: inv_scale": ("inv_scale", unscaled, 0.5, 0.25),
    "agreed_seed: seed": ("seed", dropped, 7, 8),
    "split_reduce_scatter: dtypes": ("dtypes", fused, torch.float32, torch.bfloat16),
    "reduce_scatter: async_op": ("async_op", wired, True, False),
    "shard_batch: num_items_in_batch": (
        "num_items_in_batch", lambda g, x: shard_batch({"input_ids": IDS, "num_items_in_batch": x}, g), 8, 9
    ),
    "shard_batch: num_items_in_batch or none": (
        "num_items_in_batch", lambda g, x: shard_batch({"input_ids": IDS, "num_items_in_batch": x}, g),
        torch.tensor(8), None,
    ),
    "combine: dispatched": ("rows|sizes|send", combined, 0, 1),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_differ_in_an_argument(group: ProcessGroup, case: str) -> None:
    field, call, argument, other = CASES[case]
    with p2p.check():
        call(group, argument)
        with record.recording() as counted, pytest.raises(MismatchError, match=rf"differ in .*({field})|{field}"):
            call(group, other if group.rank() else argument)
        if not case.startswith(("combine", "agreed_seed")):
            assert not sum(count.bytes_sent for count in counted.values()), "before anything is sent"
        call(group, other)
    call(group, argument)


@pytest.mark.ranks(8)
def test_ranks_that_differ_in_the_order_of_dims_and_axes(group: ProcessGroup) -> None:
    from tritoncomm.tensor import (
        CollectiveCommPattern,
        CommSpec,
        DeviceMesh,
        DistSpecManager,
        ReplicaSpec,
        ShardingSpec,
        ShardSpec,
    )  # fmt: skip

    groups, mesh = groups_over(group), DeviceMesh(torch.arange(8), (2, 4), init_process_group=True)
    spec = ShardingSpec(mesh, torch.Size((16, 4)), dim_partition_dict={0: [0, 1]})
    shard = DistSpecManager.handle_trans_spec(drawn(0, 8, 8), ReplicaSpec(), ShardSpec([0, 1], [4, 2]), groups)
    last, pattern = group.rank() == 7, CollectiveCommPattern.GATHER_FWD_SPLIT_BWD
    with p2p.check():
        wrong = ShardSpec([1, 0], [2, 4]) if last else ShardSpec([0, 1], [4, 2])
        with pytest.raises(MismatchError, match="differ in old_dims"):
            DistSpecManager.handle_trans_spec(shard, wrong, ReplicaSpec(), groups)
        axes = [1, 0] if last else [0, 1]
        with pytest.raises(MismatchError, match="differ in order"):
            CommSpec(pattern, spec, 0, logical_process_axis=axes).covert_spec_to_action(drawn(0, 2, 4))


@pytest.mark.ranks(2)
def test_keywords_in_any_order(group: ProcessGroup) -> None:
    """Ranks that name equal tensors in another order exchange the same."""
    given = dict(zip("qkv", (drawn(i, 1, 4, 4, 2) for i in range(3)), strict=True))
    plain = by_heads(recurrence, group)(*given.values())
    ordered = dict(sorted(given.items(), reverse=bool(group.rank())))
    assert torch.equal(by_heads(recurrence, group)(**ordered), plain)
    first, *rest = given.values() if group.rank() else [given["q"]]
    named = {} if rest else {"v": given["v"], "k": given["k"]}
    assert torch.equal(by_heads(recurrence, group)(first, *rest, **named), plain)


@pytest.mark.ranks(2)
def test_a_number_of_arguments_that_a_kind_does_not_have(group: ProcessGroup) -> None:
    x = torch.ones(2)
    with p2p.check():
        for kind, names in KINDS.items():
            if kind != "hop":  # steps of p2p have headers of their own
                for number in {0, len(names) + 1} - {len(names)}:
                    with pytest.raises(ArgumentError, match=f"own: the kind '{kind}' of a call has the arguments"):
                        enter("own", kind, group, [x], (None,) * number)
        with pytest.raises(ArgumentError, match=r"the kind 'echange' of a call has no kind; .*all_gather"):
            enter("own", "echange", group, [x], ())


@pytest.mark.ranks(1, 2)
def test_arguments_of_any_kind(group: ProcessGroup) -> None:
    """Objects without a value of their own are compared by their type, long texts by a digest."""
    compare_arguments("own", group, x=object())
    with p2p.check():
        compare_arguments("own", group, options={"function": object(), "size": 3}, long=list(range(10**4)))
        if group.size() > 1:
            with pytest.raises(MismatchError, match="differ in long") as caught:
                compare_arguments("own", group, long=[*range(10**4), group.rank()])
            assert len(str(caught.value)) < 1500
