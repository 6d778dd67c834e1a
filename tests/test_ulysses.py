"""UlyssesAttention on sequence shards is attention on one process: any heads, any sequences, one message each way."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from tritoncomm_kernels import launch

import tritoncomm
from tritoncomm import ParallelMode, groups
from tritoncomm.core import heads
from tritoncomm.core.heads import HeadLayout, HeadShare, split_heads
from tritoncomm.ulysses import UlyssesAttention, exchange_for, to_heads, to_sequence

HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 6), (6, 3), (5, 5), (12, 6), (14, 7), (12, 3), (6, 2)]
COPIES = {"cat", "copy_", "clone", "sum"}
NAMES = "test", "test.backward"


class Counted(TorchDispatchMode):
    """Collectives, and bytes that copies and sums read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        self.messages += func.namespace == "c10d"
        if name in COPIES:
            read = sum(x.nbytes for x in args[0]) if name == "cat" else args[name == "copy_"].nbytes
            self.copied += read + out.nbytes
        elif name == "_foreach_copy_":  # several copies, (targets, sources)
            self.copied += sum(x.nbytes for side in args[:2] for x in side)
        return out


def inputs(batch: int, length: int, q_heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Global q, k, v and a gradient of the result, the same on every rank; batch first."""
    made = torch.Generator().manual_seed(length)
    shapes = [(batch, length, n, 8) for n in (q_heads, kv_heads, kv_heads, q_heads)]
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def attended(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """Causal attention of one process, batch first."""
    kwargs = {"is_causal": "attn_mask" not in kwargs, "enable_gqa": q.shape[2] != k.shape[2], **kwargs}
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **kwargs).transpose(1, 2)


def shard(x: Tensor, sizes: Sequence[int], rank: int, layout: str = "bshd") -> Tensor:
    """This rank's positions of a global tensor, contiguous."""
    x = x.split(list(sizes), 1)[rank]
    return (x.transpose(0, 1) if layout == "sbhd" else x).contiguous()


def close(found: Tensor | None, wanted: Tensor | None, what: object, relative: float = 1e-6) -> None:
    assert found is not None, what
    assert wanted is not None, what
    assert found.shape == wanted.shape, what
    if wanted.numel():
        error = (found - wanted).abs().max().item()
        assert error <= relative * max(1.0, wanted.abs().max().item()), (what, error)


def compare(group: ProcessGroup, heads_: tuple[int, int], sizes: Sequence[int], layout: str, batch: int) -> None:
    """Values have the bits of one process, gradients are within 1e-6; four messages, forward and backward."""
    rank, what = group.rank(), (heads_, tuple(sizes), layout, batch)
    *full, gradient = inputs(batch, sum(sizes), *heads_)
    local = [shard(x, sizes, rank, layout).requires_grad_() for x in full]
    full = [x.requires_grad_() for x in full]
    wanted = attended(*full)
    wanted.backward(gradient)
    attention = UlyssesAttention(group, layout=layout)  # pyright: ignore[reportArgumentType]
    uneven = sizes if len(set(sizes)) > 1 else None
    with Counted() as counted:
        out = attention(*local, is_causal=True, sequence_sizes=uneven)
    assert counted.messages == (2 if group.size() > 1 else 0), what
    assert torch.equal(out, shard(wanted, sizes, rank, layout)), what
    with Counted() as counted:
        out.backward(shard(gradient, sizes, rank, layout))
    assert counted.messages == (2 if group.size() > 1 else 0), what
    for x, one in zip(local, full, strict=True):
        assert one.grad is not None
        close(x.grad, shard(one.grad, sizes, rank, layout), what)


def all_heads(group: ProcessGroup, layout: str, batches: Sequence[int]) -> None:
    for heads_ in HEADS:
        for batch in batches:
            compare(group, heads_, [4] * group.size(), layout, batch)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_is_attention_of_one_process(pool: Pool, world: int, layout: str) -> None:
    pool.run(all_heads, layout, (2,), world=world)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("world", [2, 4])
def test_all_batches(pool: Pool, world: int, layout: str) -> None:
    pool.run(all_heads, layout, (1, 2, 3), world=world)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_uneven_sequences(group: ProcessGroup, layout: str) -> None:
    for sizes in ((5, 3), (7, 1)) if group.size() == 2 else ((5, 3, 3, 1), (3, 3, 1, 2), (2, 0, 3, 1)):
        for heads_ in ((8, 4), (8, 1), (5, 5)):
            compare(group, heads_, sizes, layout, 2)
    compare(group, (6, 2), sizes, layout, 1)


@pytest.mark.ranks(8)
@pytest.mark.slow
def test_eight_ranks(group: ProcessGroup) -> None:
    for heads_ in ((8, 1), (8, 2), (12, 3), (24, 6), (9, 9), (21, 7)):
        compare(group, heads_, [2] * 8, "bshd", 2)


@pytest.mark.ranks(2, 4)
def test_backward_is_the_adjoint(group: ProcessGroup) -> None:
    """<to_heads(x), y> summed over ranks is <x, to_sequence(y)>, exactly: shared heads are copied, and summed."""
    world, rank = group.size(), group.rank()
    for heads_ in HEADS:
        for seq_dim in (0, 1):
            shapes = [
                (2, 3, n, d) if seq_dim else (3, 2, n, d) for n, d in zip((*heads_, heads_[1]), (4, 4, 2), strict=True)
            ]
            made = torch.Generator().manual_seed(7 + rank)
            xs = [torch.randint(-4, 5, shape, generator=made).double() for shape in shapes]
            exchange = exchange_for(*xs, group, seq_dim, None, "test")
            there = heads.to_heads(xs, exchange.qkv, group, "test")
            ys = [torch.randint(-4, 5, x.shape, generator=made).double() for x in there]
            back = heads.to_sequence(ys, exchange.qkv, group, "test")
            sums = torch.stack(
                [
                    sum((a * b).sum() for a, b in zip(there, ys, strict=True)),
                    sum((a * b).sum() for a, b in zip(xs, back, strict=True)),
                ]
            )
            torch.distributed.all_reduce(sums, group=group)
            assert sums[0] == sums[1], (heads_, seq_dim, sums)
            assert sums[0] != 0
            for x in (*there, *back):
                assert x._base is None
    assert world > 1


@pytest.mark.ranks(2, 4)
def test_bits_and_counters(group: ProcessGroup) -> None:
    """Copies keep every bit, also where a path is forced; counters say what was copied and sent."""
    world, rank = group.size(), group.rank()
    for heads_ in ((8, 4), (8, 1), (5, 5), (12, 3)):
        for sizes in ((3,) * world, (2, 4, 1, 3)[:world]):
            q, kv = split_heads(*heads_, world)
            layout = HeadLayout(1, (q, kv, kv), sizes)
            made = torch.Generator().manual_seed(2)
            shapes = [(2, sum(sizes), n, 3) for n in (heads_[0], heads_[1], heads_[1])]
            full = [torch.randint(-(2**31), 2**31, shape, generator=made).int() for shape in shapes]
            xs = [shard(x, sizes, rank) for x in full]
            with tritoncomm.recording() as record, Counted() as counted:
                there = heads.to_heads(xs, layout, group, "to heads")
            own = [
                x.narrow(2, share.starts[rank], share.sizes[rank]) for x, share in zip(full, layout.shares, strict=True)
            ]
            for one, wanted in zip(there, own, strict=True):
                assert torch.equal(one, wanted), (heads_, sizes)
            (count,) = record.values()
            assert (count.calls, count.bytes_copied) == (1, counted.copied), (heads_, sizes)
            others = [w for w in range(world) if w != rank]
            sent = sum(
                x[:, :, : share.sizes[w]].nbytes for x, share in zip(xs, layout.shares, strict=True) for w in others
            )
            assert count.bytes_sent == sent
            dense = [x.contiguous() for x in there]
            with tritoncomm.recording() as record, Counted() as counted:
                back = heads.to_sequence(dense, layout, group, "to sequence")
            (count,) = record.values()
            assert torch.equal(back[0], xs[0])
            if kv.replicated:  # a sum counts its parts and its result, as a kernel moves them; torch may add in steps
                assert count.bytes_copied <= counted.copied, (heads_, sizes)
            else:
                assert count.bytes_copied == counted.copied, (heads_, sizes)
                assert torch.equal(back[2], xs[2])
            if heads_ != (5, 5):
                continue
            one = HeadLayout(1, (q,), sizes)
            results = []
            for path in ("torch", "triton"):
                with tritoncomm.path(path):
                    there = heads.to_heads(xs[:1], one, group, "one")[0]
                    results.append((there, heads.to_sequence([there], one, group, "one")[0]))
            assert torch.equal(results[0][0], own[0])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (heads_, sizes)


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_one_launch_each_way(group: ProcessGroup) -> None:
    """Kernels pack q, k and v in one launch and unpack them in one, with torch's bits and bytes; a slice of 8 heads."""
    world, rank, launches = group.size(), group.rank(), []
    called = launch.Launch.__call__

    def noted(self: Any, *arguments: Any) -> None:
        launches.append(self.kernel)
        called(self, *arguments)

    made = torch.Generator().manual_seed(rank)
    for heads_, seq_dim, dtype, sizes in (
        ((8, 8), 1, torch.bfloat16, (3,) * world),
        ((5, 5), 0, torch.bfloat16, (3,) * world),
        ((6, 2), 1, torch.bfloat16, (2, 4, 1, 3)[:world]),
        ((8, 1), 1, torch.float32, (2, 4, 1, 3)[:world]),
        ((12, 3), 0, torch.float64, (2, 0, 1, 3)[:world]),
    ):
        lead = (2, sizes[rank]) if seq_dim else (sizes[rank], 2)
        dims = (8, 8, 24)  # of v, another
        xs = [
            torch.randn(*lead, n + 1, 2 * d, generator=made).to(dtype)[:, :, 1:, d:]
            for n, d in zip((heads_[0], heads_[1], heads_[1]), dims, strict=True)
        ]
        layout = exchange_for(*xs, group, seq_dim, sizes, "test").qkv
        results = []
        for path in ("torch", "triton"):
            launches.clear()
            with (
                tritoncomm.path(path),
                mock.patch.object(launch.Launch, "__call__", noted),
                tritoncomm.recording() as record,
            ):
                there = heads.to_heads(xs, layout, group, "to heads")
                ahead = len(launches)
                grads = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in there]
                back = heads.to_sequence(grads, layout, group, "to sequence")
            results.append(([*there, *back], [(count.bytes_copied, count.bytes_sent) for count in record.values()]))
        assert results[0][1] == results[1][1]
        for one, twin in zip(results[0][0], results[1][0], strict=True):
            assert torch.equal(one, twin), (heads_, seq_dim)
        if sizes[rank]:
            assert results[1][1][0][0] > 0
            assert ahead == (1 if seq_dim == 0 else 2), (heads_, launches)
            assert len(launches) - ahead == 2, (heads_, launches)
        assert {p for _, p in record} == {"triton"}
    x = torch.randn(2, 3, 8, 4, 2, generator=made)
    lazy = [torch.view_as_complex(x)[:, :, ::2].conj() for _ in range(2)]
    exchange = HeadLayout(1, (split_heads(4, 4, world)[0],) * 2, (3,) * world)
    for path in ("torch", "triton"):
        with tritoncomm.path(path):
            there = heads.to_heads(lazy, exchange, group, "lazy")
            back = heads.to_sequence(there, exchange, group, "lazy")
        assert torch.equal(back[1], lazy[1])


@pytest.mark.ranks(2, 4)
def test_variants(group: ProcessGroup) -> None:
    """Fused qkv, strided inputs, expanded gradients, bf16, no_grad, other head_dims of v, callables of every kind."""
    world, rank = group.size(), group.rank()
    sizes, attention = [4] * world, UlyssesAttention(group)
    *full, gradient = inputs(2, 4 * world, 6, 6)
    q, k, v = (shard(x, sizes, rank) for x in full)
    wanted, gradient = shard(attended(*full), sizes, rank), shard(gradient, sizes, rank)
    for layout in ("bshd", "sbhd"):
        fused = torch.stack((q, k, v), 2)
        fused = (fused.transpose(0, 1) if layout == "sbhd" else fused).requires_grad_()
        swap = (lambda x: x.transpose(0, 1)) if layout == "sbhd" else (lambda x: x)
        with Counted() as counted:
            out = UlyssesAttention(group, layout=layout)(fused, is_causal=True)  # pyright: ignore[reportArgumentType]
            out.backward(swap(gradient))
        assert counted.messages == 4
        assert torch.equal(swap(out), wanted)
        separate = [x.clone().requires_grad_() for x in (q, k, v)]
        attention(*separate, is_causal=True).backward(gradient)
        assert fused.grad is not None
        for i, x in enumerate(separate):
            assert torch.equal(swap(fused.grad.select(2, i)), x.grad)
    for strided in (
        lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        lambda x: torch.cat((x, x), 3)[..., 8:],
        lambda x: torch.stack((x, x), 4)[..., 1],
    ):
        assert torch.equal(attention(*map(strided, (q, k, v)), is_causal=True), wanted)
    out = attention(*(x.requires_grad_() for x in (q, k, v)), is_causal=True)
    out.sum().backward()  # a gradient with stride 0
    close(q.grad, torch.autograd.grad(attention(q, k, v, is_causal=True), q, torch.ones_like(out))[0], "stride 0")
    with torch.no_grad():
        assert not attention(q, k, v, is_causal=True).requires_grad
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v, is_causal=True), wanted)
    low = [x.bfloat16() for x in full]
    assert torch.equal(
        attention(*(shard(x, sizes, rank) for x in low), is_causal=True), shard(attended(*low), sizes, rank)
    )
    seen = []

    def own(q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
        seen.append([tuple(x.shape) for x in (q, k, v)])
        q += 0.0  # slices of one buffer, but tensors of their own
        return v * factor

    heads_of = split_heads(6, 6, world)[0].sizes[rank]
    wide = v.detach().repeat(1, 1, 1, 2).requires_grad_()
    assert torch.equal(UlyssesAttention(group, attention=own)(q, k, v, factor=2.0), 2 * v)
    out = UlyssesAttention(group, attention=own)(q, k, wide, factor=2.0)
    assert torch.equal(out, 2 * wide)
    out.backward(torch.ones_like(out))
    assert torch.equal(wide.grad, torch.full_like(wide, 2.0))  # pyright: ignore[reportArgumentType]
    assert seen == [[(2, 4 * world, heads_of, d) for d in (8, 8, last)] for last in (8, 16)]
    scaled = UlyssesAttention(group, attention=partial(F.scaled_dot_product_attention, scale=0.5))
    assert torch.equal(scaled(q, k, v, is_causal=True), shard(attended(*full, scale=0.5), sizes, rank))
    mask = torch.rand(2, 1, 4 * world, 4 * world, generator=torch.Generator().manual_seed(3)) > 0.4
    mask |= torch.eye(4 * world).bool()
    for each in (mask, mask[0, 0]):
        close(attention(q, k, v, attn_mask=each), shard(attended(*full, attn_mask=each), sizes, rank), "mask")
    bias, part = (torch.zeros(4 * world, 4 * world, requires_grad=True) for _ in range(2))
    attended(*full, attn_mask=bias).square().sum().backward()
    attention(q, k, v, attn_mask=part).square().sum().backward()
    assert part.grad is not None
    torch.distributed.all_reduce(part.grad, group=group)
    close(part.grad, bias.grad, "gradient of a bias")


DTYPES = [
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.float16, torch.bfloat16),
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
]


def under_autocast(group: ProcessGroup, how: str, low: torch.dtype) -> None:
    """Values have the bits of one process under autocast; each gradient has the dtype of its input."""
    world, rank = group.size(), group.rank()
    for dtypes in DTYPES if how == "eager" else DTYPES[:1]:
        for heads_ in ((8, 4), (8, 1)) if how == "eager" else ((8, 4),):
            attention: Callable[..., Tensor] = UlyssesAttention(group)
            if how == "compiled":
                attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
            if how == "checkpoint":
                attention = partial(checkpoint, UlyssesAttention(group), use_reentrant=False)
            *full, gradient = inputs(2, 4 * world, *heads_)
            leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(full, dtypes, strict=True)]
            mine = [shard(x.detach(), [4] * world, rank).requires_grad_() for x in leaves]
            with torch.autocast("cpu", low), tritoncomm.recording() as record:
                out, wanted = attention(*mine, is_causal=True), attended(*leaves)
            what = how, dtypes, heads_
            assert out.dtype is wanted.dtype, what
            assert out.dtype is (torch.float64 if dtypes[0] is torch.float64 else low), what
            assert torch.equal(out, shard(wanted, [4] * world, rank)), what
            assert sum(count.calls for count in record.values()) == 2 * (world > 1), what
            wanted.backward(gradient.to(wanted.dtype))
            out.backward(shard(gradient, [4] * world, rank).to(out.dtype))
            for x, leaf in zip(mine, leaves, strict=True):
                assert x.grad is not None
                assert leaf.grad is not None
                assert x.grad.dtype is leaf.dtype, what
                close(x.grad.double(), shard(leaf.grad, [4] * world, rank).double(), what, 3e-2)


@pytest.mark.parametrize(
    ("how", "low"),
    [
        ("eager", torch.bfloat16), ("eager", torch.float16), ("compiled", torch.bfloat16),
        ("checkpoint", torch.float16), pytest.param("compiled", torch.float16, marks=pytest.mark.slow),
        pytest.param("checkpoint", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_is_attention_of_one_process_under_autocast(pool: Pool, how: str, low: torch.dtype) -> None:
    pool.run(under_autocast, how, low, world=2)
    if how == "eager":
        pool.run(under_autocast, how, low, world=1)
        pool.run(under_autocast, how, low, world=4)


@pytest.mark.ranks(1, 2, 4)
def test_packed_heads_and_own_attention_under_autocast(group: ProcessGroup) -> None:
    """One tensor of q, k and v is cast, too; an own attention gets autocast's dtype at any number of ranks."""
    world, rank, seen = group.size(), group.rank(), []
    *full, _ = inputs(2, 4 * world, 8, 8)
    packed = torch.stack([shard(x, [4] * world, rank) for x in full], 2).requires_grad_()

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append({x.dtype for x in (q, k, v)})
        return attended(q, k, v)

    with torch.autocast("cpu", torch.bfloat16):
        wanted = shard(attended(*full), [4] * world, rank)
        for attention in (UlyssesAttention(group, attention=own), partial(UlyssesAttention(group), is_causal=True)):
            out = attention(packed)
            assert torch.equal(out, wanted)
            out.sum().backward()
    assert seen == [{torch.bfloat16}]
    assert packed.grad is not None
    assert packed.grad.dtype is torch.float32


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_several_dtypes_without_autocast(group: ProcessGroup) -> None:
    """Each tensor keeps its dtype and bits, and its gradient the sum over ranks that share a head; compiled alike."""
    world, rank = group.size(), group.rank()
    for dtypes in (*DTYPES, (torch.float32, torch.float32, torch.int64)):
        for heads_ in ((8, 8), (8, 1), (6, 3)):
            *full, _ = inputs(2, 4 * world, *heads_)
            full = [(x * 8).round().to(dtype) for x, dtype in zip(full, dtypes, strict=True)]
            mine = [shard(x, [4] * world, rank) for x in full]
            for x in mine:
                x.requires_grad_(x.is_floating_point())
            exchange = exchange_for(*mine, group, 1, None, "test")
            calls = [to_heads]
            if heads_ == (8, 8) and dtypes == DTYPES[0]:
                calls.append(torch.compile(to_heads, backend="aot_eager"))
            for call in calls:
                there = call(mine, exchange.qkv, group, NAMES)
                for x, local, share in zip(full, there, exchange.qkv.shares, strict=True):
                    assert local.dtype is x.dtype, (dtypes, heads_)
                    assert torch.equal(local, x.narrow(2, share.starts[rank], share.sizes[rank])), (dtypes, heads_)
                torch.autograd.backward([x.sum() for x in there if x.is_floating_point()])
                for x, share in zip(mine, exchange.qkv.shares, strict=True):
                    if x.is_floating_point():
                        copies = [sum(s <= h < s + n for s, n in zip(share.starts, share.sizes, strict=True))
                                  for h in range(share.heads)]  # fmt: skip
                        wanted = torch.tensor(copies, dtype=x.dtype)[:, None].expand_as(x)
                        assert torch.equal(x.grad, wanted), (dtypes, heads_)  # pyright: ignore[reportArgumentType]
                        x.grad = None


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in operators that can be differentiated twice; batch first, kv heads repeated."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


class Block(torch.nn.Module):
    """Two uses of one attention with projections around, as in a model."""

    def __init__(self, attention: Callable[..., Tensor], q_heads: int, kv_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.attention = (q_heads, kv_heads, kv_heads), attention
        self.norm = torch.nn.LayerNorm(16)
        self.project = torch.nn.Linear(16, 8 * sum(self.heads))
        self.out = torch.nn.Linear(8 * q_heads, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            parts = self.project(self.norm(x)).split([8 * n for n in self.heads], -1)
            q, k, v = (part.unflatten(-1, (n, 8)) for part, n in zip(parts, self.heads, strict=True))
            x = x + self.out(self.attention(q, k, v).flatten(2))
        return x


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["bshd", pytest.param("sbhd", marks=pytest.mark.slow)])
def test_a_rank_without_positions_compiles(group: ProcessGroup, layout: str) -> None:
    sizes = [0, 6]
    dim = layout.index("s")
    q, k, v, _ = inputs(2, 6, 4, 2)
    mine = [shard(x, sizes, group.rank()).transpose(0, 1 - dim).contiguous() for x in (q, k, v)]

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = plain_attention(*(x.transpose(0, 1 - dim) for x in (q, k, v)))
        return out.transpose(0, 1 - dim)

    attention = UlyssesAttention(group, layout=layout, attention=attended)
    compiled = torch.compile(attention, backend="aot_eager")
    results = []
    for call in (attention, compiled):
        leaves = [x.clone().requires_grad_() for x in mine]
        out = call(*leaves, sequence_sizes=sizes)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    wanted = shard(plain_attention(q, k, v), sizes, group.rank()).transpose(0, 1 - dim)
    torch.testing.assert_close(results[0][0], wanted)
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)


def in_a_model(group: ProcessGroup, how: str, q_heads: int, kv_heads: int) -> None:
    world, rank = group.size(), group.rank()
    x = torch.randn(2, 4 * world, 16, generator=torch.Generator().manual_seed(5))
    one = Block(plain_attention, q_heads, kv_heads)
    many = Block(UlyssesAttention(group, attention=plain_attention), q_heads, kv_heads)
    full, local = x.clone().requires_grad_(), shard(x, [4] * world, rank).requires_grad_()
    call: Callable[..., Tensor] = many
    if how.startswith("checkpoint"):
        call = partial(checkpoint, many, use_reentrant=how.endswith("reentrant"))
    elif how in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        call = torch.compile(many, fullgraph=True, backend=how)  # pyright: ignore[reportAssignmentType]
    with tritoncomm.recording() as record:
        got, wanted = call(local), one(full)
        close(got, shard(wanted, [4] * world, rank), how, 2e-6)
        if how == "twice":
            for run, leaf in ((many, local), (one, full)):
                (gradient,) = torch.autograd.grad(run(leaf).square().sum(), leaf, create_graph=True)
                gradient.square().sum().backward()
        else:
            got.square().sum().backward()
            wanted.square().sum().backward()
    assert local.grad is not None
    assert full.grad is not None
    close(local.grad, shard(full.grad, [4] * world, rank), how, 2e-5 if how == "twice" else 2e-6)
    for p, other in zip(many.parameters(), one.parameters(), strict=True):
        total = p.grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
        torch.distributed.all_reduce(total, group=group)
        close(total, other.grad, how, 2e-5 if how == "twice" else 2e-6)
    calls = {name: sum(c.calls for (n, _), c in record.items() if n == name) for name, _ in record}
    if how != "twice":
        forward = 8 if how.startswith("checkpoint") else 4
        assert calls == {"UlyssesAttention": forward, "UlyssesAttention.backward": 4}, how


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 4), (6, 3), (8, 1)])
@pytest.mark.parametrize("how", ["plain", "twice", "checkpoint", "checkpoint reentrant"])
def test_in_a_model(pool: Pool, how: str, q_heads: int, kv_heads: int) -> None:
    pool.run(in_a_model, how, q_heads, kv_heads, world=2)
    pool.run(in_a_model, how, q_heads, kv_heads, world=4)


@pytest.mark.parametrize(
    ("backend", "q_heads", "kv_heads"),
    [
        ("aot_eager", 8, 4),
        pytest.param("aot_eager", 5, 5, marks=pytest.mark.slow),
        pytest.param("aot_eager", 8, 1, marks=pytest.mark.slow),
        pytest.param("inductor", 8, 4, marks=pytest.mark.slow),
        pytest.param("inductor", 5, 5, marks=pytest.mark.slow),
        pytest.param("inductor", 8, 1, marks=pytest.mark.slow),
    ],
)
def test_compiles_as_one_graph(pool: Pool, backend: str, q_heads: int, kv_heads: int) -> None:
    pool.run(in_a_model, backend, q_heads, kv_heads, world=2, timeout=110)


def test_refusals(group: ProcessGroup) -> None:
    """Every bad call is refused before anything is sent, and the group stays usable."""
    x, attention = torch.zeros(2, 4, 8, 4), UlyssesAttention(group)
    length = 4 * group.size()
    bound = UlyssesAttention(group, attention=partial(F.scaled_dot_product_attention, attn_mask=torch.zeros(4, 4)))
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (tritoncomm.ShapeError, "8 query heads are no multiple of 3", lambda: attention(x, x[:, :, :3], x[:, :, :3])),
        (tritoncomm.ShapeError, "1 query heads are fewer", lambda: attention(*[x[:, :, :1]] * 3)),
        (tritoncomm.ShapeError, "four dims", lambda: attention(x[0], x[0], x[0])),
        (tritoncomm.ShapeError, "same batch", lambda: attention(x, x[:, :2], x[:, :2])),
        (tritoncomm.ShapeError, "k and v the same heads", lambda: attention(x, x, x[:, :, :4])),
        (tritoncomm.ShapeError, "holds all three in dim 2", lambda: attention(x)),
        (tritoncomm.ShapeError, "this rank holds 4", lambda: attention(x, x, x, sequence_sizes=[3] * group.size())),
        (tritoncomm.ShapeError, "split sizes", lambda: attention(x, x, x, sequence_sizes=[4])),
        (tritoncomm.ArgumentError, "not NoneType", lambda: attention(x, x)),
        (tritoncomm.UnsupportedError, "local positions", lambda: attention(x, x, x, attn_mask=torch.zeros(4, 4))),
        (tritoncomm.UnsupportedError, "local positions", lambda: bound(x, x, x)),
        (tritoncomm.UnsupportedError, "between heads",
         lambda: attention(x, x, x, attn_mask=torch.zeros(2, 8, length, length))),
        (tritoncomm.ArgumentError, "attn_mask must be", lambda: attention(x, x, x, attn_mask=True)),
        (tritoncomm.ArgumentError, "layout must be", lambda: UlyssesAttention(group, layout="bhsd")),  # pyright: ignore
    ]  # fmt: skip
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(tritoncomm.ArgumentError, match="must return a tensor"):
        UlyssesAttention(group, attention=lambda q, k, v: (q, None))(x, x, x)  # pyright: ignore[reportArgumentType]
    assert attention(x, x, x).shape == x.shape


def test_no_group_is_no_tensor_group_where_a_context_axis_may_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(size=lambda: 1)
    tensor, context = SimpleNamespace(group=group), SimpleNamespace(group=SimpleNamespace(size=lambda: 2))
    modes: Any = {ParallelMode.TENSOR: tensor, ParallelMode.CONTEXT: context}
    monkeypatch.setattr(groups, "groups", modes)
    x = torch.zeros(2, 4, 8, 4)
    with pytest.raises(tritoncomm.GroupError, match="which is the tensor group, and there is a context axis; pass"):
        UlyssesAttention()(x, x, x)
    modes[ParallelMode.CONTEXT] = tensor
    assert groups.resolve_sequence(None, "test") is group


def test_exchanges_alone(group: ProcessGroup) -> None:
    """The exchanges alone, without a module."""
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    exchange = exchange_for(x, x, x, group, 1, None, "test")
    (there,) = to_heads((x,), exchange.out, group, NAMES)
    back = to_sequence(there * 3, exchange.out, group, NAMES)
    back.backward(torch.ones_like(back))
    assert torch.equal(back, 3 * x)
    assert torch.equal(x.grad, torch.full_like(x, 3.0))  # pyright: ignore[reportArgumentType]


@given(world=st.integers(1, 12), kv_heads=st.integers(1, 12), per=st.integers(1, 6))
def test_every_query_head_meets_its_kv_head(world: int, kv_heads: int, per: int) -> None:
    if per * kv_heads < world:
        with pytest.raises(tritoncomm.ShapeError):
            split_heads(per * kv_heads, kv_heads, world)
        return
    q, kv = split_heads(per * kv_heads, kv_heads, world)
    taken = []
    for w in range(world):
        local = range(q.starts[w], q.starts[w] + q.sizes[w])
        taken += local
        groups = q.sizes[w] // kv.sizes[w]
        assert q.sizes[w] == groups * kv.sizes[w] > 0
        assert [head // per for head in local] == [kv.starts[w] + i // groups for i in range(len(local))]
    assert taken == list(range(per * kv_heads))
    if kv_heads % world == 0:
        assert len(set(q.sizes)) == 1
    assert max(kv.sizes) - min(kv.sizes) <= 1
    assert kv.replicated == (kv_heads < world)
    assert isinstance(q, HeadShare)


def copied(group: ProcessGroup) -> None:
    model = torch.nn.Sequential(UlyssesAttention(group, layout="sbhd"), UlyssesAttention(group))
    other = copy.deepcopy(model)
    for mine, made in zip(model, other, strict=True):
        assert mine is not made
        assert vars(made)["_parameters"] is not vars(mine)["_parameters"]
        assert (made.group, made.layout, made.attention) == (group, mine.layout, mine.attention)
    q = torch.randn(2, 4, 4, 3)
    assert torch.equal(model[1](q, q, q), other[1](q, q, q))


def test_a_deepcopy_is_over_the_same_group(pool: Pool) -> None:
    pool.run(copied)
