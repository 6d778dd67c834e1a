"""Recurrences by heads and convolutions by a halo over shards of the sequence, against one process in float64."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from tritoncomm import ArgumentError, ShapeError, UnsupportedError, record
from tritoncomm.recurrent import Exchanged, Gathered, Sliced, by_heads, conv_halo


def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A gated linear recurrence, ``[b, s, heads, d]``; keys are repeated for the heads of the values."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, out = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3]), []
    for i in range(v.shape[1]):
        if g is not None:
            state = state * g[:, i].to(v.dtype).sigmoid()[..., None, None]
        state = state + k[:, i, :, :, None] * v[:, i, :, None]
        out.append((q[:, i, :, :, None] * state).sum(2) * scale)
    return (torch.stack(out, 1) if out else v * 0), state


def scan(x: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """A scan over ``[b, channels, s]`` with a decay per channel, and inputs ``[b, 2, s]`` that all channels share."""
    state, out = torch.zeros_like(x[..., :1]), []
    for i in range(x.shape[2]):
        state = state * A[:, None].sigmoid() + x[..., i : i + 1] * B[:, :1, i : i + 1] + B[:, 1:, i : i + 1]
        out.append(state)
    return torch.cat(out, 2)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    out = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1])
    return F.silu(out) if activation == "silu" else out


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def alone(function: Callable[..., Tensor], documents: Sequence[int], length: int, dim: int, *xs: Tensor) -> Tensor:
    """``function`` of every document by itself, in one process."""
    parts = [function(*(x.narrow(dim, a, b - a) for x in xs)) for a, b in pairwise((*documents, length))]
    return torch.cat(parts, dim)


def compare(group: ProcessGroup, whole: Sequence[Tensor], out: Tensor, sizes: Sequence[int], dim: int,
            ours: Callable[..., Tensor], rest: Sequence[Tensor] = ()) -> None:  # fmt: skip
    """Value and gradients of a rank's shard; gradients of whole tensors add up over the ranks."""
    rank, weight = group.rank(), torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = torch.autograd.grad((out * weight).sum(), [*whole, *rest])
    mine = [x.detach().split(list(sizes), dim)[rank].clone().requires_grad_() for x in whole]
    parameters = [x.detach().clone().requires_grad_() for x in rest]
    local = ours(*mine, *parameters)
    torch.testing.assert_close(local, out.split(list(sizes), dim)[rank], rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((local * weight.split(list(sizes), dim)[rank]).sum(), [*mine, *parameters])
    for x, y in zip(found, wanted[: len(mine)], strict=False):
        torch.testing.assert_close(x, y.split(list(sizes), dim)[rank], rtol=1e-10, atol=1e-10)
    for x, y in zip(found[len(mine) :], wanted[len(mine) :], strict=True):
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        torch.testing.assert_close(total, y, rtol=1e-10, atol=1e-10)


def sizes_of(world: int, even: bool) -> list[int]:
    return [4] * world if even else [5, 0, 3, 6][:world]


DOCUMENTS: tuple[tuple[int, ...], ...] = ((0,), (0, 3, 4, 5))


def inside(documents: tuple[int, ...], length: int) -> list[int]:
    return [start for start in documents if start < length]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (7, 7), (8, 2), (8, 1), (5, 5)])
def test_recurrences(group: ProcessGroup, heads: tuple[int, int], documents: tuple[int, ...], even: bool) -> None:
    sizes = sizes_of(group.size(), even)
    n = sum(sizes)
    values, keys = heads
    q, k = (drawn(2, n, keys, 3, seed=i).requires_grad_() for i in (1, 2))
    v, g = drawn(2, n, values, 5, seed=3).requires_grad_(), drawn(2, n, values, seed=4).requires_grad_()
    out = alone(lambda q, k, v, g: rule(q, k, v, g, 0.5)[0], inside(documents, n), n, 1, q, k, v, g)
    call = by_heads(rule, group)
    given = None if even else sizes
    ours = lambda q, k, v, g: call(q, k, v, g=g, scale=0.5, documents=inside(documents, n), sizes=given)[0]  # noqa: E731
    compare(group, (q, k, v, g), out, sizes, 1, ours)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("heads", "width"), [((1, 1), 5), ((2, 1), 2), ((2, 2), 3), ((3, 1), 4), ((3, 3), 2)])
def test_ranks_of_a_head_split_its_columns(
    group: ProcessGroup, heads: tuple[int, int], width: int, documents: tuple[int, ...], even: bool
) -> None:
    sizes = sizes_of(group.size(), even)
    n, (values, keys) = sum(sizes), heads
    q, k = (drawn(2, n, keys, 3, seed=i).requires_grad_() for i in (1, 2))
    v, g = drawn(2, n, values, width, seed=3).requires_grad_(), drawn(2, n, values, seed=4).requires_grad_()
    starts = inside(documents, n)
    out = alone(lambda q, k, v, g: rule(q, k, v, g, 0.5)[0], starts, n, 1, q, k, v, g)
    columns = Exchanged(columns=3)
    roles = {"q": Exchanged(), "k": Exchanged(), "v": columns, "g": Exchanged()}
    call = by_heads(rule, group, roles, columns)
    ours = lambda q, k, v, g: call(q, k, v, g=g, scale=0.5, documents=starts, sizes=sizes)[0]  # noqa: E731
    compare(group, (q, k, v, g), out, sizes, 1, ours)
    # The same with other dims, and a parameter of each head.
    decay = drawn(values, seed=5).requires_grad_()

    def turned(v: Tensor, q: Tensor, k: Tensor, a: Tensor) -> Tensor:
        return rule(q, k, v.permute(3, 1, 0, 2), a.expand(v.shape[3], v.shape[1], -1))[0].permute(2, 1, 3, 0)

    v = drawn(values, n, width, 2, seed=6).requires_grad_()
    out = alone(lambda v, q, k: turned(v, q, k, decay), starts, n, 1, v, q, k)
    columns = Exchanged(1, 0, 2)
    call = by_heads(turned, group, {"v": columns, "q": Exchanged(), "k": Exchanged(), "a": Sliced()}, columns)
    ours = lambda v, q, k, a: call(v, q, k, a, documents=starts, sizes=sizes)  # noqa: E731
    compare(group, (v, q, k), out, sizes, 1, ours, (decay,))


@pytest.mark.ranks(1, 3, 8, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4)))
def test_drawn_layouts(group: ProcessGroup) -> None:
    run_drawn_layouts(group)


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.parametrize("world", [5, 6, 7])
def test_drawn_layouts_of_odd_groups(group: ProcessGroup, world: int) -> None:
    part = torch.distributed.new_group(range(world))
    if group.rank() < world:
        assert isinstance(part, ProcessGroup)
        run_drawn_layouts(part)


def run_drawn_layouts(group: ProcessGroup) -> None:
    """Heads 2 to 7 and 16, groups of keys 1 and 8 among them; any sizes, zeros too; documents; one message a dtype."""
    draw = random.Random(group.size())
    columns = Exchanged(columns=3)
    roles = {"q": Exchanged(), "k": Exchanged(), "v": columns, "g": Exchanged()}
    for values, keys in [(2, 1), (3, 3), (4, 2), (5, 1), (6, 2), (7, 7), (16, 8), (16, 1)]:
        sizes = [draw.choice([0, 1, 2, 5]) for _ in range(group.size())]
        sizes[draw.randrange(group.size())] += 1
        n = sum(sizes)
        starts = sorted({0, *(draw.randrange(n) for _ in range(draw.randrange(4)))})
        q, k = (drawn(2, n, keys, 2, seed=i).requires_grad_() for i in (1, 2))
        v, g = drawn(2, n, values, 4, seed=3).requires_grad_(), drawn(2, n, values, seed=4).requires_grad_()
        out = alone(lambda q, k, v, g: rule(q, k, v, g)[0], starts, n, 1, q, k, v, g)
        ours = lambda q, k, v, g: by_heads(rule, group, roles, columns)(q, k, v, g, documents=starts, sizes=sizes)[0]  # noqa: B023, E731
        with record.recording() as counted:
            compare(group, (q, k, v, g), out, sizes, 1, ours)
        if group.size() > 1:
            calls = {name: sum(c.calls for (n, _), c in counted.items() if n == name) for name, _ in counted}
            assert calls == {"by_heads": 2, "by_heads.backward": 2}, (values, keys, sizes)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["cu_seqlens", "seq_idx"])
def test_a_function_that_keeps_documents_apart_is_called_once(group: ProcessGroup, kind: Any) -> None:
    """For all rows and documents, with global boundaries; values and gradients."""
    sizes = sizes_of(group.size(), even=False)
    n, calls = sum(sizes), []

    def packed(q: Tensor, k: Tensor, v: Tensor, **kwargs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        boundaries = kwargs.get(kind)
        calls.append(boundaries)
        if boundaries is None:
            return rule(q, k, v)
        assert boundaries.dtype is torch.int32
        if kind == "cu_seqlens":
            assert q.shape[0] == 1
            assert q.shape[1] == boundaries[-1]
            cuts = boundaries.tolist()
            return alone(lambda *xs: rule(*xs)[0], cuts[:-1], cuts[-1], 1, q, k, v), None
        assert boundaries.shape == q.shape[:2]
        rows = []
        for row, numbers in enumerate(boundaries):
            starts = [0, *(numbers.diff().nonzero()[:, 0] + 1).tolist()]
            xs = [x[row : row + 1] for x in (q, k, v)]
            rows.append(alone(lambda *xs: rule(*xs)[0], starts, q.shape[1], 1, *xs))
        return torch.cat(rows), None

    q, k, v = (drawn(2, n, 4, 3, seed=i).requires_grad_() for i in range(3))
    call = by_heads(packed, group, boundaries=kind)
    for rows in ([[0, 1, 4], [0, n - 1]], [0, 3, 4], [0]):
        of_rows = rows if isinstance(rows[0], list) else [rows, rows]
        out = torch.cat([alone(lambda *xs: rule(*xs)[0], starts, n, 1, *(x[r : r + 1] for x in (q, k, v)))
                         for r, starts in enumerate(of_rows)])  # fmt: skip
        calls.clear()
        ours = lambda q, k, v: call(q, k, v, documents=rows, sizes=sizes)[0]  # noqa: B023, E731
        compare(group, (q, k, v), out, sizes, 1, ours)
        assert len(calls) == 1
        assert (calls[0] is None) == (rows == [0])
    with torch.inference_mode():  # what is kept for later calls can be kept for their backward
        mine = [x.split(sizes, 1)[group.rank()] for x in (q, k, v)]
        call(*mine, documents=[0, 2], sizes=sizes)
    call(*mine, documents=[0, 2], sizes=sizes)
    assert calls[-1] is not None
    assert not calls[-1].is_inference()
    assert calls[-1] is calls[-2]
    with pytest.raises(ArgumentError, match="need positions in dim 1"):
        by_heads(scan, group, {"x": Exchanged(2, 1)}, Exchanged(2, 1), boundaries="cu_seqlens")


@pytest.mark.ranks(2, 4)
def test_heads_have_the_bits_of_one_process_in_several_dtypes(group: ProcessGroup) -> None:
    sizes = sizes_of(group.size(), even=False)
    n = sum(sizes)
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (drawn(1, n, h, 4, seed=h, dtype=dtype) for h in (2, 2, 6))
        g = drawn(1, n, 6, seed=9, dtype=torch.float32)  # gates stay in fp32
        wanted, _ = rule(q, k, v, g)
        mine = [x.split(sizes, 1)[group.rank()] for x in (q, k, v, g)]
        twice = [by_heads(rule, group)(*mine, sizes=sizes)[0] for _ in range(2)]
        assert torch.equal(twice[0], wanted.split(sizes, 1)[group.rank()])
        assert torch.equal(*twice)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_channels_with_slices_and_shared_inputs(group: ProcessGroup, documents: tuple[int, ...]) -> None:
    sizes = sizes_of(group.size(), even=False)
    n = sum(sizes)
    x, shared = drawn(2, 5, n, seed=1).requires_grad_(), drawn(2, 2, n, seed=2).requires_grad_()
    decay = drawn(5, seed=3).requires_grad_()
    out = alone(lambda x, b: scan(x, decay, b), inside(documents, n), n, 2, x, shared)
    roles = {"x": Exchanged(2, 1), "A": Sliced(), "B": Gathered(2)}
    call = by_heads(scan, group, roles, result=Exchanged(2, 1))
    ours = lambda x, b, a: call(x, a, B=b, documents=inside(documents, n), sizes=sizes)  # noqa: E731
    compare(group, (x, shared), out, sizes, 2, ours, (decay,))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("documents", [*DOCUMENTS, (0, 4), (0, 5, 7)])
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_convolutions(group: ProcessGroup, taps: int, documents: tuple[int, ...], even: bool) -> None:
    sizes = sizes_of(group.size(), even) if group.size() > 1 else [8]
    n = sum(sizes)
    x, weight, bias = (drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(((2, 3, n), (3, taps), (3,))))
    starts = inside(documents, n)
    out = alone(lambda x: conv(x, weight, bias, "silu"), starts, n, 2, x)
    call = conv_halo(conv, group)
    ours = lambda x, w, b: call(x, w, b, activation="silu", documents=starts, sizes=sizes)  # noqa: E731
    compare(group, (x,), out, sizes, 2, ours, (weight, bias))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("documents", [None, (0, 4), (0, 5, 7)])
@pytest.mark.parametrize("taps", [1, 4])
def test_convolutions_of_rows_of_channels(group: ProcessGroup, taps: int, documents: tuple[int, ...] | None) -> None:
    """Positions in dim 1, inputs by name, and a state beside the result, which is of a shard: None."""

    def convolve(inputs: Tensor, kernel: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return conv(inputs.transpose(1, 2), kernel, bias).transpose(1, 2), inputs[:, -1:]

    sizes = sizes_of(group.size(), even=False) if group.size() > 1 else [8]
    n = sum(sizes)
    x, weight, bias = (drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(((2, n, 3), (3, taps), (3,))))
    starts = None if documents is None else inside(documents, n)
    out = alone(lambda x: convolve(x, weight, bias)[0], starts or [0], n, 1, x)
    call = conv_halo(convolve, group, positions=1)
    ours = lambda x, w, b: call(bias=b, inputs=x, kernel=w, documents=starts, sizes=sizes)[0]  # noqa: E731
    compare(group, (x,), out, sizes, 1, ours, (weight, bias))
    shard = x.split(sizes, 1)[group.rank()].detach()
    assert call(shard, weight, bias, documents=starts, sizes=sizes)[1] is None
    with pytest.raises(UnsupportedError, match=r"the argument bias, torch.float64 \[2, 3\], is no bias"):
        call(shard, weight, bias=x[:, 0].detach(), sizes=sizes)
    with pytest.raises(UnsupportedError, match=r"the argument 2, torch.int64 \[2\], is no bias"):
        call(shard, weight, torch.tensor([0, n]), sizes=sizes)


@pytest.mark.ranks(2)
def test_convolutions_whose_taps_lie_apart(group: ProcessGroup) -> None:
    """They read more positions than the halo has, so a ``dilation`` is refused however it is passed."""

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, dilation: Any = 1) -> Tensor:
        padding = (weight.shape[-1] - 1) * (dilation if isinstance(dilation, int) else dilation[0])
        return F.conv1d(F.pad(x, (padding, 0)), weight, bias, dilation=dilation)

    x, weight = drawn(2, 3, 8, seed=1), drawn(3, 3, 2, seed=2)
    shard = x.chunk(2, 2)[group.rank()]
    calls = [
        lambda: conv_halo(convolve, group)(shard, weight, dilation=2),
        lambda: conv_halo(convolve, group)(shard, weight, None, (2,)),
        lambda: conv_halo(partial(convolve, dilation=2), group)(shard, weight),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match=r"dilation=.* reads more than the K-1 positions of the halo"):
            call()
    # As the error says: zeros between the taps.
    apart = torch.stack((weight, torch.zeros_like(weight)), -1).flatten(2)[..., :-1]
    out = conv_halo(convolve, group)(shard, apart, dilation=1)
    torch.testing.assert_close(out, convolve(x, weight, dilation=2).chunk(2, 2)[group.rank()])


@pytest.mark.ranks(1, 2, 3)
def test_documents_of_every_row(group: ProcessGroup) -> None:
    """Each row of a batch is packed in its own way; its gradients, too."""
    sizes = sizes_of(group.size(), even=False) if group.size() > 1 else [8]
    n = sum(sizes)
    rows = [[0, 1, 4], [0], [0, n - 1]]
    q, k, v, g = (drawn(3, n, 4, 3, seed=i).requires_grad_() for i in range(4))
    g = drawn(3, n, 4, seed=5).requires_grad_()
    each = [
        alone(lambda q, k, v, g: rule(q, k, v, g, 0.5)[0], starts, n, 1, *(x[r : r + 1] for x in (q, k, v, g)))
        for r, starts in enumerate(rows)
    ]
    call = by_heads(rule, group)
    ours = lambda q, k, v, g: call(q, k, v, g=g, scale=0.5, documents=rows, sizes=sizes)[0]  # noqa: E731
    compare(group, (q, k, v, g), torch.cat(each), sizes, 1, ours)
    x, decay = drawn(3, 4, n, seed=6).requires_grad_(), drawn(4, seed=7).requires_grad_()
    shared = drawn(3, 2, n, seed=8).requires_grad_()
    each = [
        alone(lambda x, b: scan(x, decay, b), starts, n, 2, x[r : r + 1], shared[r : r + 1])
        for r, starts in enumerate(rows)
    ]
    channels = by_heads(scan, group, {"x": Exchanged(2, 1), "A": Sliced(), "B": Gathered(2)}, Exchanged(2, 1))
    ours = lambda x, b, a: channels(x, a, B=b, documents=rows, sizes=sizes)  # noqa: E731
    compare(group, (x, shared), torch.cat(each), sizes, 2, ours, (decay,))
    weight, bias = drawn(4, 3, seed=9).requires_grad_(), drawn(4, seed=10).requires_grad_()
    each = [alone(lambda x: conv(x, weight, bias, "silu"), starts, n, 2, x[r : r + 1]) for r, starts in enumerate(rows)]
    convolve = conv_halo(conv, group)
    ours = lambda x, w, b: convolve(x, w, b, activation="silu", documents=rows, sizes=sizes)  # noqa: E731
    compare(group, (x,), torch.cat(each), sizes, 2, ours, (weight, bias))
    with pytest.raises(ArgumentError, match="documents of 2 rows, and the batch has 3"):
        call(*(y.detach().split(sizes, 1)[group.rank()] for y in (q, k, v, g)), documents=rows[:2], sizes=sizes)


@pytest.mark.ranks(2)
def test_messages(group: ProcessGroup) -> None:
    """Two all-to-alls of a recurrence each way, and one of a convolution."""
    x = drawn(1, 4, 2, 3, seed=1, dtype=torch.float32).requires_grad_()
    y = drawn(1, 3, 4, seed=2, dtype=torch.float32).requires_grad_()
    with record.recording() as counted:
        by_heads(rule, group)(x, x, x)[0].sum().backward()
        conv_halo(conv, group)(y, torch.ones(3, 4)).sum().backward()
    calls = {name: sum(count.calls for (n, _), count in counted.items() if n == name) for name, _ in counted}
    assert calls == {"by_heads": 2, "by_heads.backward": 2, "conv_halo": 1, "conv_halo.backward": 1}
    assert sum(count.bytes_sent for (name, _), count in counted.items() if name == "conv_halo") == (
        3 * 3 * 4 if group.rank() == 0 else 0
    )


@pytest.mark.ranks(2)
def test_double_backward(group: ProcessGroup) -> None:
    x = drawn(1, 2, 2, 2, seed=group.rank()).requires_grad_()
    (grad,) = torch.autograd.grad((by_heads(lambda y: y * y, group)(x) ** 2).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 4 * x**3)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 12 * x**2)
    y = drawn(1, 2, 3, seed=group.rank()).requires_grad_()
    full = torch.cat([drawn(1, 2, 3, seed=rank) for rank in range(2)], 2).requires_grad_()
    weight = torch.ones(2, 3, dtype=torch.float64)
    seconds = []
    for call, z in ((conv_halo(conv, group), y), (conv, full)):
        (grad,) = torch.autograd.grad((call(z, weight) ** 3).sum(), z, create_graph=True)
        (second,) = torch.autograd.grad((grad**2).sum(), z)
        seconds.append(second)
    torch.testing.assert_close(seconds[0], seconds[1].chunk(2, 2)[group.rank()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(group: ProcessGroup, reentrant: bool) -> None:
    full = [drawn(1, 8, 4, 3, seed=i).requires_grad_() for i in range(3)]
    wanted = torch.autograd.grad((rule(*full)[0] ** 2).sum(), full)
    mine = [x.detach().chunk(2, 1)[group.rank()].clone().requires_grad_() for x in full]
    call = by_heads(rule, group)
    out: Any = checkpoint(lambda *xs: call(*xs)[0], *mine, use_reentrant=reentrant)
    (out**2).sum().backward()
    for x, y in zip(mine, wanted, strict=True):
        torch.testing.assert_close(x.grad, y.chunk(2, 1)[group.rank()])


@pytest.mark.ranks(2)
def test_autocast_modes_and_dtypes(group: ProcessGroup) -> None:
    """Of the function itself: what it gets keeps its dtype."""
    rank, weight = group.rank(), torch.eye(4)
    q, k, v = (drawn(1, 8, 4, 4, seed=i, dtype=torch.float32) for i in range(3))
    mine = [x.chunk(2, 1)[rank] for x in (q, k)] + [v.chunk(2, 1)[rank].clone().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = (q @ weight) * k + v
        out = by_heads(lambda q, k, v: (q @ weight) * k + v, group)(*mine)
    assert torch.equal(out, wanted.chunk(2, 1)[rank])
    with torch.inference_mode():
        assert torch.equal(by_heads(rule, group)(*mine)[0], rule(q, k, v)[0].chunk(2, 1)[rank])
    strided = q.transpose(2, 3).chunk(2, 1)[rank]
    assert torch.equal(by_heads(lambda x: x * 2, group)(strided), strided * 2)
    for x in (torch.arange(8).view(1, 4, 2, 1), torch.randn(1, 4, 2, 3, dtype=torch.complex64).conj()):
        assert torch.equal(by_heads(lambda x: x * 2, group)(x), x * 2)


@pytest.mark.ranks(2)
def test_what_is_refused(group: ProcessGroup) -> None:
    x = torch.ones(1, 4, 2, 3)
    call = by_heads(rule, group)
    with pytest.raises(ShapeError, match="1 heads are fewer than the 2 ranks"):
        call(x[:, :, :1], x[:, :, :1], x[:, :, :1])
    columns = Exchanged(columns=3)
    of_columns = by_heads(rule, group, {"q": Exchanged(), "k": Exchanged(), "v": columns, "g": columns}, columns)
    with pytest.raises(ShapeError, match="1 heads of 1 columns are fewer than the 2 ranks that split them"):
        of_columns(x[:, :, :1], x[:, :, :1], x[:, :, :1, :1])
    with pytest.raises(ShapeError, match=r"need as many heads and columns; they have \[0, 0, 3, 2\]"):
        of_columns(x[:, :, :1], x[:, :, :1], x[:, :, :1], x[:, :, :1, :2])
    with pytest.raises(ShapeError, match=r"need a result with the \d columns of this rank; it has the shape"):
        by_heads(lambda v: v.sum(3), group, {"v": columns})(x[:, :, :1])
    with pytest.raises(UnsupportedError, match="more than two different numbers of heads"):
        call(x[:, :, :1], x, x.repeat(1, 1, 2, 1))
    with pytest.raises(ArgumentError, match="'k' of shape"):
        call(x, torch.ones(2), x)
    with pytest.raises(ArgumentError, match="the tensor 'A' has no role"):
        by_heads(scan, group, {"x": Exchanged(2, 1), "B": Gathered(2)})(x[0], torch.ones(4), x[0])
    with pytest.raises(ShapeError, match="'A' has 3 heads, not 2"):
        by_heads(scan, group, {"x": Exchanged(2, 1), "A": Sliced(), "B": Gathered(2)}, Exchanged(2, 1))(
            x[0], torch.ones(3), x[0]
        )
    for wrong in ((1, 2), (0, 3, 3), (0, 8), ()):
        with pytest.raises(ArgumentError, match="have to ascend from 0"):
            call(x, x, x, documents=wrong)
    with pytest.raises(ShapeError, match="this rank holds 4 positions"):
        call(x, x, x, sizes=[5, 3] if group.rank() == 0 else [4, 5])
    for options, words in (
        ({"boundaries": "cu_seqlen"}, "boundaries='cu_seqlen'"),
        ({"roles": {"x": (1, 2)}}, "the role of 'x' must be"),
        ({"roles": {"x": Exchanged}}, "the role of 'x' must be"),
        ({"roles": [Exchanged()]}, "roles must be a mapping"),
        ({"result": (1, 2)}, "result must be"),
    ):
        with pytest.raises(ArgumentError, match=words):
            by_heads(lambda x: x, group, **options)
    four = torch.ones(1, 2, group.size(), 2)
    with pytest.raises(ArgumentError, match="'y' has tensors inside"):
        by_heads(lambda x, y: x, group)(four, [four])
    torch.testing.assert_close(by_heads(lambda x, y: x, group, {"x": Exchanged(), "y": None})(four, [four]), four)
    packed = by_heads(
        lambda x, cu_seqlens=None: x, group, {"x": Exchanged(), "cu_seqlens": None}, boundaries="cu_seqlens"
    )
    with pytest.raises(ArgumentError, match="pass documents alone"):
        packed(four, cu_seqlens=torch.tensor([0, 2]), documents=[0, 1])
    with pytest.raises(ArgumentError, match="no argument is a tensor"):
        call(1, 2, 3)
    with pytest.raises(ShapeError, match=r"is not \[b, channels, s\]"):
        conv_halo(conv, group)(x, torch.ones(2, 3))
    with pytest.raises(ShapeError, match="as many as it gets are needed"):
        conv_halo(lambda x, w: x[..., 1:], group)(x[0], torch.ones(4, 3))
    with pytest.raises(ArgumentError, match="positions=0; they are dim 1 or 2 of three"):
        conv_halo(conv, group, positions=0)
    with pytest.raises(ArgumentError, match="needs x and weight"):
        conv_halo(conv, group)(x[0])


def test_layers_compile(group: ProcessGroup) -> None:
    x, weight = drawn(1, 4, 4, 3, seed=group.rank()), drawn(3, 4, seed=5)
    for function in (
        lambda: by_heads(rule, group)(x, x, x)[0],
        lambda: conv_halo(conv, group)(x[0], weight[:1].repeat(4, 1)),
    ):
        traced: Any = torch.compile(function, backend="aot_eager")
        torch.testing.assert_close(traced(), function())
