"""DeepSpeed's call sites on the adapters: the attention of one process, and the bits of DeepSpeed where that runs."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import run_job
from torch import Tensor
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm.core.heads import split_heads
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.integrations.deepspeed import DistributedAttention, _SeqAllToAll

HEADS = [(8, 8), (8, 4), (8, 2), (6, 6), (6, 3), (5, 5), (12, 6), (14, 7), (8, 1)]


def attention(batch_dim: int) -> Callable[..., Tensor]:
    """Causal attention of ``[b, S, h, d]``, or of ``[S, b, h, d]`` with the batch in dim 1."""
    into, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if batch_dim else ((0, 2, 1, 3), (0, 2, 1, 3))

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = True) -> Tensor:
        q, k, v = (x.permute(into) for x in (query, key, value))
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).permute(back)

    return attend


def inputs(world: int, batch_dim: int, heads: tuple[int, int]) -> list[Tensor]:
    """Global q, k, v and a gradient of the result."""
    lead = (4 * world, 2) if batch_dim else (2, 4 * world)
    made = torch.Generator().manual_seed(1)
    return [torch.randn(*lead, n, 8, generator=made) for n in (heads[0], heads[1], heads[1], heads[0])]


def shard(x: Tensor, group: ProcessGroup, batch_dim: int) -> Tensor:
    return x.chunk(group.size(), 1 - batch_dim)[group.rank()].contiguous()


def trained(layer: Callable[..., Tensor], tensors: Sequence[Tensor], gradient: Tensor, *args: Any) -> list[Tensor]:
    """The result and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = layer(*leaves, *args)
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(got: Sequence[Tensor], wanted: Sequence[Tensor], what: object) -> None:
    assert len(got) == len(wanted) == 4, what
    assert torch.equal(got[0], wanted[0]), what
    for mine, other in zip(got[1:], wanted[1:], strict=True):
        assert (mine - other).abs().max() <= 1e-6 * max(1.0, float(other.abs().max())), what


@pytest.mark.ranks(1, 2, 4)
def test_is_attention_of_one_process(group: ProcessGroup) -> None:
    for heads in HEADS:
        for batch_dim in (0, 1):
            *full, gradient = inputs(group.size(), batch_dim, heads)
            wanted = [shard(x, group, batch_dim) for x in trained(attention(batch_dim), full, gradient)]
            local = [shard(x, group, batch_dim) for x in full]
            layer = DistributedAttention(attention(batch_dim), group, 2, 1 - batch_dim)
            got = trained(layer, local, shard(gradient, group, batch_dim), batch_dim)
            check(got, wanted, (heads, batch_dim))


@pytest.mark.ranks(2, 4)
def test_arguments(group: ProcessGroup) -> None:
    """Rotary embeddings, results of three dims, repeated keys, contiguous tensors, and what follows in the call."""
    world, local = group.size(), attention(0)
    *full, gradient = inputs(world, 0, (6, 3))
    mine = [shard(x, group, 0) for x in full]
    wanted = shard(local(*full), group, 0)

    def flat(*args: Any) -> Tensor:
        assert all(x.is_contiguous() for x in args[:3])
        return local(*args).flatten(2)

    layer = DistributedAttention(flat, group, contiguous=True)
    leaves = [x.clone().requires_grad_() for x in mine]
    out = layer(*leaves, 0)
    assert torch.equal(out, wanted.flatten(2))
    out.backward(shard(gradient, group, 0).flatten(2))
    want = trained(DistributedAttention(local, group), mine, shard(gradient, group, 0), 0)
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, want[1:], strict=True) if x.grad is not None)
    repeated = [mine[0], *(x.repeat_interleave(2, 2) for x in mine[1:])]
    check_heads = split_heads(6, 3, world)[0].sizes[group.rank()]

    def equal_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.shape[2] == k.shape[2] == v.shape[2] == check_heads
        return local(q, k, v)

    if world <= 3:
        assert torch.equal(DistributedAttention(equal_heads, group, num_kv_heads=3)(*repeated, 0), wanted)
    layer = DistributedAttention(local, group)
    assert torch.equal(layer(*mine, 0, None, False), shard(local(*full, False), group, 0))
    assert torch.equal(layer(*mine, 0, causal=False), shard(local(*full, False), group, 0))
    angles = torch.rand(1, 4 * world, 1, 4).permute(1, 0, 2, 3).repeat(1, 1, 1, 2)
    torch.distributed.broadcast(angles, 0, group=group)
    cos, sin = angles.cos().permute(1, 0, 2, 3), angles.sin().permute(1, 0, 2, 3)

    def turned(x: Tensor) -> Tensor:
        """Pairs (x[i], x[i + 4]) turned by their angle, as complex numbers."""
        pairs = torch.complex(x[..., :4], x[..., 4:8]) * torch.complex(cos[..., :4], sin[..., :4])
        return torch.cat((pairs.real, pairs.imag), -1)

    into_rank = torch.stack((cos, sin)).permute(0, 2, 1, 3, 4)  # the embedding's own order is sequence first
    got = layer(*mine, 0, tuple(into_rank))
    want = shard(local(turned(full[0]), turned(full[1]), full[2]), group, 0)
    assert (got - want).abs().max() < 1e-5


@pytest.mark.ranks(2)
def test_kv_heads_that_are_refused(group: ProcessGroup) -> None:
    """Fewer groups of keys than ranks: a rank would get a part of the queries of a group, and all of its keys."""
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8)
    with pytest.raises(ShapeError, match="leave num_kv_heads out"):
        DistributedAttention(attention(0), group, num_kv_heads=1)(q, k, k, 0)
    for wrong in (0, 2.0, "2"):
        with pytest.raises(ArgumentError, match="num_kv_heads"):
            DistributedAttention(attention(0), group, num_kv_heads=wrong)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_rotary_embeddings_of_another_order(group: ProcessGroup, batch_dim: int) -> None:
    """As many sequences as positions: an embedding in q's own order would be broadcast along the batch."""
    seq_dim, size, local = 1 - batch_dim, 4, attention(batch_dim)
    made = torch.Generator().manual_seed(2)
    full = [torch.randn(size, size, 2, 8, generator=made) for _ in range(3)]
    angles = torch.rand(size, 4, generator=made).repeat(1, 2)
    in_order = angles.view(*(n if dim in (seq_dim, 3) else 1 for dim, n in enumerate((size, size, 1, 8))))
    cos, sin = in_order.cos(), in_order.sin()
    turned = [x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin for x in full[:2]]
    wanted = shard(local(*turned, full[2]), group, batch_dim)
    layer, mine = DistributedAttention(local, group), [shard(x, group, batch_dim) for x in full]
    got = layer(*mine, batch_dim, (cos.transpose(0, 1), sin.transpose(0, 1)))
    assert (got - wanted).abs().max() < 1e-5
    for wrong in ((cos, sin), (cos.transpose(0, 1), sin), (cos[..., :3].transpose(0, 1), sin[..., :3].transpose(0, 1))):
        with pytest.raises(ShapeError, match="rotary_pos_emb"):
            layer(*mine, batch_dim, wrong)


@pytest.mark.ranks(2, 4)
def test_there_and_back(group: ProcessGroup) -> None:
    """``_SeqAllToAll``: my heads of all positions, back to where it came from, and the gradient likewise."""
    for heads, batch_dim in ((3, 0), (5, 1), (4, 0)):  # the same arguments both ways, as DeepSpeed's layer calls it
        if heads >= group.size():
            full = inputs(group.size(), batch_dim, (heads, heads))[0]
            x, seq_dim = shard(full, group, batch_dim).requires_grad_(), 1 - batch_dim
            there = _SeqAllToAll.apply(group, x, 2, seq_dim, batch_dim)
            back = _SeqAllToAll.apply(group, there, seq_dim, 2, batch_dim)
            assert torch.equal(back, x)
            (gradient,) = torch.autograd.grad(back, x, 3 * x.detach())
            assert torch.equal(gradient, 3 * x)
    for heads in HEADS:
        for batch_dim in (0, 1):
            full = inputs(group.size(), batch_dim, heads)[0]
            x, seq_dim = shard(full, group, batch_dim).requires_grad_(), 1 - batch_dim
            for kv_heads in (None, heads[1]) if heads[1] >= group.size() else (None,):
                args = batch_dim, None, None, "q", True, kv_heads
                there = _SeqAllToAll.apply(group, x, 2, seq_dim, *args)
                share = split_heads(heads[0], kv_heads or heads[0], group.size())[0]
                start, size = share.starts[group.rank()], share.sizes[group.rank()]
                assert torch.equal(there, full.narrow(2, start, size)), (heads, batch_dim, kv_heads)
                args = *args[:-1], kv_heads or heads[0]
                back = _SeqAllToAll.apply(group, there, seq_dim, 2, *args)
                assert torch.equal(back, x)
                (gradient,) = torch.autograd.grad(back, x, 2 * x.detach())
                assert torch.equal(gradient, 2 * x)
                if (kv_heads or heads[0]) % group.size() and not batch_dim:
                    flat = _SeqAllToAll.apply(group, there.flatten(2), seq_dim, 2, *args[:-1], kv_heads or heads[0])
                    assert torch.equal(flat, x.flatten(2))


def test_refusals(group: ProcessGroup) -> None:
    x = torch.zeros(2, 4, 8, 4)
    layer = DistributedAttention(attention(0), group)
    unsupported, shape = tritoncomm.UnsupportedError, tritoncomm.ShapeError
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (unsupported, "sp_stream", lambda: DistributedAttention(attention(0), group, sp_stream=object())),
        (unsupported, "scatter_idx 1", lambda: DistributedAttention(attention(0), group, 1, 2)),
        (unsupported, "handle", lambda: _SeqAllToAll.apply(group, x, 2, 1, 0, None, {})),
        (tritoncomm.ArgumentError, "batch_dim_idx", lambda: layer(x, x, x, 2)),
        (tritoncomm.ArgumentError, "batch_dim_idx", lambda: _SeqAllToAll.apply(group, x, 2, 1, 3)),
        (shape, "1 key/value heads are fewer",
         lambda: _SeqAllToAll.apply(group, x, 2, 1, 0, None, None, None, True, 1)),
        (shape, "no multiple of 3 key", lambda: _SeqAllToAll.apply(group, x, 2, 1, 0, None, None, None, True, 3)),
        (shape, "no multiple of num_kv_heads 3",
         lambda: DistributedAttention(attention(0), group, num_kv_heads=3)(x, x, x, 0)),
        (shape, "rank", lambda: layer(x, x[:, :, :3], x[:, :, :3], 0)),
    ]  # fmt: skip
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    assert layer(x, x, x, 0).shape == x.shape


def beside_deepspeed(store: str, rank: int, world: int) -> list[str]:
    """Every layout through DeepSpeed's classes and ours in the same processes; what DeepSpeed refused."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    import deepspeed.comm
    from deepspeed.sequence import layer as theirs
    from deepspeed.utils import groups

    deepspeed.comm.init_distributed("gloo", verbose=False)
    groups.mpu = type("Mpu", (), {"get_sequence_parallel_rank": staticmethod(lambda: rank)})
    group, refused = dist.group.WORLD, []
    assert group is not None
    for heads in HEADS:
        for batch_dim in (0, 1):
            tensors = [shard(x, group, batch_dim) for x in inputs(world, batch_dim, heads)]
            dims = 2, 1 - batch_dim
            try:
                layer = theirs.DistributedAttention(attention(batch_dim), group, *dims)
                wanted = trained(layer, tensors[:3], tensors[3], batch_dim)
            except AssertionError:
                refused.append(f"{heads} {batch_dim}")
                continue
            got = trained(DistributedAttention(attention(batch_dim), group, *dims), tensors[:3], tensors[3], batch_dim)
            assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)), (heads, batch_dim)
            for kv_heads in (None, heads[1]):
                there = [f.apply(group, tensors[0], *dims, batch_dim, None, None, None, True, kv_heads)
                         for f in (_SeqAllToAll, theirs._SeqAllToAll)]  # fmt: skip
                assert torch.equal(*there), (heads, batch_dim, kv_heads)
                assert there[0].is_contiguous()
                assert there[1].is_contiguous()
    dist.barrier()
    return refused


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_bits_of_deepspeed(tmp_path: Path, world: int) -> None:
    pytest.importorskip("deepspeed")
    answers = run_ranks(beside_deepspeed, tmp_path, world)
    fewer = [heads for heads in HEADS if heads[1] < world]
    assert answers == [[f"{heads} {batch_dim}" for heads in fewer for batch_dim in (0, 1)]] * world


def run_ranks(function: Callable[..., Any], folder: Path, world: int) -> list[Any]:
    """The function in fresh processes: a framework keeps state of its own, which has no place in the pool."""
    return run_job(_ranked, [{"RANK": str(rank)} for rank in range(world)], function, str(folder / "store"), world,
                   timeout=200)  # fmt: skip


def _ranked(function: Callable[..., Any], store: str, world: int) -> Any:
    import os

    return function(store, int(os.environ["RANK"]), world)
