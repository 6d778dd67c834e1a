"""Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): attention over sequence shards.

Every rank holds a shard of the sequence with all heads; inside attention it holds the full sequence with its share of
the heads. q, k and v travel in one all-to-all, the result in another; backward likewise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention

from tritoncomm.core import compiled, heads
from tritoncomm.core.autograd import direct
from tritoncomm.core.call import compare_arguments
from tritoncomm.core.heads import HEAD_DIM, HeadLayout, HeadShare, split_heads
from tritoncomm.core.plan import Ints, check_split_sizes, located, normalize_sizes
from tritoncomm.core.validation import check_kind
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.groups import GroupLike, resolve_sequence
from tritoncomm.mappings.exchanges import _RowExchange

__all__ = [
    "AttentionExchange",
    "UlyssesAttention",
    "autocast",
    "dropout_by_rank",
    "exchange_for",
    "to_heads",
    "to_sequence",
]

# (call of the forward, call of the backward).
_TO_HEADS, _TO_SEQUENCE = (heads.to_heads, heads.to_sequence), (heads.to_sequence, heads.to_heads)
_QKV_DIM = 2  # of a packed tensor [b, s, 3, heads, head_dim], where a single one has HEAD_DIM


@contextmanager
def dropout_by_rank(group: GroupLike | None = None) -> Iterator[None]:
    """Let ranks draw different random numbers within: independent dropout masks for the shards of a sequence.

    Ranks that were seeded alike draw alike, so that all shards, and in attention all shares of heads, have one mask.
    Within, each rank draws from a seed of its own: one number of the CPU's default generator, which all ranks have
    equal, plus the rank. Afterwards the generators are as before, but for that one number of the CPU's: ranks are equal
    again. Put forward and backward inside. Checkpoints of both kinds draw again what they drew.

    Args:
        group: the ranks that hold the sequence; the tensor group by default, unless there is a context axis.

    Raises:
        GroupError: no group is given, and there is a context axis or no default.

    Example:
        ``with dropout_by_rank(group): model(**shard_batch(batch, group)).loss.backward()``
    """
    group = resolve_sequence(group, "dropout_by_rank")
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) + group.rank()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cuda" if accelerator is None else accelerator.type
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type=kind):
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            torch.get_device_module(kind).manual_seed(seed)
        yield


class AttentionExchange(NamedTuple):
    """Splits of the two exchanges of one attention; ``plan_exchange`` makes it.

    Attributes:
        qkv: split of queries, keys and values.
        out: split of the result.
        names: function names under which the calls are counted, in forward and in backward.
    """

    qkv: HeadLayout
    out: HeadLayout
    names: tuple[str, str]


def plan_exchange(
    query: Ints, key: Ints, value: Ints, world: int, rank: int, seq_dim: int, seq_sizes: Ints | None, name: str
) -> AttentionExchange:
    """Return the splits of the exchanges of an attention.

    Args:
        query, key, value: shapes of this rank's tensors, ``[b, s, heads, head_dim]``, or sequence first.
        seq_dim: dim of the sequence, 1 or 0.
        seq_sizes: number of positions of every rank; None where all have as many.
    """
    if any(len(shape) != 4 for shape in (query, key, value)):
        raise ShapeError("q, k and v need four dims")
    if query[:2] != key[:2] or key[:3] != value[:3] or query[3] != key[3]:
        raise ShapeError(
            f"q {list(query)}, k {list(key)} and v {list(value)} need the same batch, local sequence and head_dim, "
            "and k and v the same heads"
        )
    sizes = (query[seq_dim],) * world if seq_sizes is None else seq_sizes
    check_split_sizes((sum(sizes),), 0, world, sizes)
    if sizes[rank] != query[seq_dim]:
        raise ShapeError(f"sequence sizes {list(sizes)}: this rank holds {query[seq_dim]} positions")
    q, kv = split_heads(query[HEAD_DIM], key[HEAD_DIM], world)
    return AttentionExchange(
        HeadLayout(seq_dim, (q, kv, kv), sizes), HeadLayout(seq_dim, (q,), sizes), (name, f"{name}.backward")
    )


_cached_plan = lru_cache(maxsize=1024)(plan_exchange)


def exchange_for(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, seq_dim: int, seq_sizes: Ints | None, name: str
) -> AttentionExchange:
    """Return the cached result of ``plan_exchange`` for this rank's tensors.

    Under torch.compile, which traces through a cache, a new one is made.

    Raises:
        ShapeError: as ``plan_exchange``; the text has ``name``, the rank and the shape of the queries.
    """
    plan = plan_exchange if is_compiling() else _cached_plan
    shapes = query.shape, key.shape, value.shape
    try:
        return plan(*shapes, group.size(), group.rank(), seq_dim, seq_sizes, name)
    except ShapeError as error:
        raise located(error, query.shape, name, group) from None


def autocast(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors of an attention as autocast, if it is on, gives them to ``scaled_dot_product_attention``.

    They are in autocast's dtype, but for float64 and integers. So half of the bytes travel, and queries and keys that a
    rotary embedding has left in float32 meet values of 16 bits.
    """
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x for x in tensors]


@direct
class _Exchanged(torch.autograd.Function):
    """Forward: one all-to-all, to the heads of this rank or to its positions. Backward: the other one, its adjoint."""

    @staticmethod
    def forward(
        ctx: Any,
        forward_call: Any,
        backward_call: Any,
        layout: HeadLayout,
        group: ProcessGroup,
        names: tuple[str, str],
        *tensors: Tensor,
    ) -> Any:
        # The calls are ``heads.to_heads`` and ``heads.to_sequence``, in either order. A backward whose gradient is
        # differentiated again runs this function with both swapped.
        ctx.calls, ctx.layout, ctx.group, ctx.names = (backward_call, forward_call), layout, group, (names[1], names[1])
        return tuple(forward_call(tensors, layout, group, names[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        args, names = (ctx.layout, ctx.group), ctx.names
        if any(grad.requires_grad for grad in grads):
            # None for the five arguments before the tensors.
            return None, None, None, None, None, *_Exchanged.apply(*ctx.calls, *args, names, *grads)
        return None, None, None, None, None, *ctx.calls[0](grads, *args, names[0])


@direct
class _FusedToHeads(torch.autograd.Function):
    """Forward: all-to-all to the heads of q, k and v, which are one tensor ``[.., 3, heads, head_dim]``.

    Backward: all-to-all to the positions, whose three results fill slices of one gradient.
    """

    @staticmethod
    def forward(ctx: Any, layout: HeadLayout, group: ProcessGroup, names: tuple[str, str], qkv: Tensor) -> Any:
        ctx.layout, ctx.group, ctx.names, ctx.shape = layout, group, names, qkv.shape
        return tuple(heads.to_heads(qkv.unbind(_QKV_DIM), layout, group, names[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        args = ctx.layout, ctx.group, (ctx.names[1], ctx.names[1])
        if any(grad.requires_grad for grad in grads):
            return None, None, None, torch.stack(_Exchanged.apply(*_TO_SEQUENCE, *args, *grads), _QKV_DIM)
        fused = grads[0].new_empty(ctx.shape)
        heads.to_sequence(grads, *args[:2], ctx.names[1], fused.unbind(_QKV_DIM))
        return None, None, None, fused


def to_heads(
    tensors: Sequence[Tensor], layout: HeadLayout, group: ProcessGroup, names: tuple[str, str]
) -> Sequence[Tensor]:
    """Forward: all-to-all to the heads of this rank. Backward: all-to-all to its positions, shared heads summed.

    The results are disjoint slices of one buffer, contiguous in heads and head_dim; a buffer for each dtype.

    Shape: ``[b, s, H, d] -> [b, S, h, d]`` for every tensor, in one message each way; in one for each dtype.
    """
    wants_grad, dtype = False, tensors[0].dtype
    for x in tensors:
        if x.dtype is not dtype:
            # A message for each dtype, as sums of shared heads are of one dtype. Such calls are rare, as
            # scaled_dot_product_attention refuses them: one message of bytes is not worth a second way to sum.
            return _by_dtype(tensors, layout, group, names)
        wants_grad = wants_grad or x.requires_grad
    if is_compiling():
        return compiled.traced(to_heads, _traced_to_heads, names[0])(tensors, layout, group, names)
    if wants_grad and torch.is_grad_enabled():
        return _Exchanged.apply(*_TO_HEADS, layout, group, names, *tensors)
    if wants_grad:
        tensors = [x.detach() for x in tensors]
    return heads.to_heads(tensors, layout, group, names[0])


def _by_dtype(
    tensors: Sequence[Tensor], layout: HeadLayout, group: ProcessGroup, names: tuple[str, str]
) -> Sequence[Tensor]:
    """Compute ``to_heads`` of tensors of several dtypes, one dtype at a time."""
    results = list(tensors)
    for dtype in dict.fromkeys([x.dtype for x in tensors]):
        chosen = tuple([i for i, x in enumerate(tensors) if x.dtype is dtype])
        part = (_part_of.__wrapped__ if is_compiling() else _part_of)(layout, chosen)
        for i, local in zip(chosen, to_heads([tensors[i] for i in chosen], part, group, names), strict=True):
            results[i] = local
    return results


@lru_cache(maxsize=1024)
def _part_of(layout: HeadLayout, chosen: Ints) -> HeadLayout:
    """Return the layout of some tensors of an exchange. Cached, because plans are looked up by identity."""
    return HeadLayout(layout.seq_dim, tuple([layout.shares[i] for i in chosen]), layout.seq_sizes)


def to_sequence(out: Tensor, layout: HeadLayout, group: ProcessGroup, names: tuple[str, str]) -> Tensor:
    """Forward: all-to-all to the positions of this rank. Backward: all-to-all to its heads.

    Shape: ``[b, S, h, d] -> [b, s, H, d]``.
    """
    if is_compiling():
        return compiled.traced(to_sequence, _traced_to_sequence, names[0])(out, layout, group, names)
    if torch.is_grad_enabled() and out.requires_grad:
        return _Exchanged.apply(*_TO_SEQUENCE, layout, group, names, out)[0]
    out = out.detach() if out.requires_grad else out
    return heads.to_sequence((out,), layout, group, names[0])[0]


def _counts(layout: HeadLayout, batch: int, width: int, rank: int, widths: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the elements of each block: this rank's positions of all heads, all positions of this rank's heads.

    ``width`` and ``widths`` are elements per token of this rank's heads, and of every rank's.
    """
    by_heads = tuple([batch * layout.seq_sizes[rank] * each for each in widths])
    return by_heads, tuple([batch * size * width for size in layout.seq_sizes])


def _traced_to_heads(
    tensors: Sequence[Tensor], layout: HeadLayout, group: ProcessGroup, names: tuple[str, str]
) -> Sequence[Tensor]:
    """Compute ``to_heads`` by plain operators around one functional collective, for torch.compile to trace."""
    rank, world, batch = group.rank(), group.size(), tensors[0].shape[1 - layout.seq_dim]
    dims = [x.shape[3] for x in tensors]
    widths = [sum(s.sizes[w] * d for s, d in zip(layout.shares, dims, strict=True)) for w in range(world)]
    by_heads, by_positions = _counts(layout, batch, widths[rank], rank, widths)
    if layout.even and not any(share.replicated for share in layout.shares):
        # By views ``[world, d0, d1, columns of a rank's heads]``, as the code and the gradients of split and cat would
        # grow with the ranks.
        blocks = [
            x.unflatten(HEAD_DIM, (world, s.sizes[0])).movedim(HEAD_DIM, 0).flatten(3)
            for x, s in zip(tensors, layout.shares, strict=True)
        ]
        received = _RowExchange.apply(torch.cat(blocks, 3).view(-1), by_positions, by_heads, group, names)
        whole = received.view(world, *tensors[0].shape[:2], widths[rank]).movedim(0, layout.seq_dim)
        joined = whole.flatten(layout.seq_dim, layout.seq_dim + 1)
    else:
        blocks = [
            torch.cat([_heads_of(x, s, w).flatten(2) for x, s in zip(tensors, layout.shares, strict=True)], 2)
            for w in range(world)
        ]
        wire = torch.cat([block.reshape(-1) for block in blocks])
        received = _RowExchange.apply(wire, by_positions, by_heads, group, names)
        parts = [
            part.view((batch, size, widths[rank]) if layout.seq_dim else (size, batch, widths[rank]))
            for part, size in zip(received.split(by_positions), layout.seq_sizes, strict=True)
        ]
        joined = torch.cat(parts, layout.seq_dim)
    sizes = [share.sizes[rank] for share in layout.shares]
    # ``joined`` is all positions, with the heads of all tensors side by side in dim 2.
    columns = joined.split([n * d for n, d in zip(sizes, dims, strict=True)], 2)
    return [x.unflatten(2, (n, d)) for x, n, d in zip(columns, sizes, dims, strict=True)]


def _heads_of(x: Tensor, share: HeadShare, w: int) -> Tensor:
    """Return a view of the heads of ``x`` that rank ``w`` attends with."""
    return x.narrow(HEAD_DIM, share.starts[w], share.sizes[w])


def _traced_to_sequence(out: Tensor, layout: HeadLayout, group: ProcessGroup, names: tuple[str, str]) -> Tensor:
    """Compute ``to_sequence`` by plain operators around one functional collective, for torch.compile to trace."""
    rank, (share,), head_dim = group.rank(), layout.shares, out.shape[3]
    batch, size = out.shape[1 - layout.seq_dim], layout.seq_sizes[rank]
    widths = [n * head_dim for n in share.sizes]  # columns of each rank's heads
    by_heads, by_positions = _counts(layout, batch, widths[rank], rank, widths)  # elements from, and to each rank
    lead = (batch, size) if layout.seq_dim else (size, batch)
    if layout.even:
        wire = out.unflatten(layout.seq_dim, (group.size(), size)).movedim(layout.seq_dim, 0).reshape(-1)
        received = _RowExchange.apply(wire, by_heads, by_positions, group, names)
        return (
            received.view(group.size(), *lead, share.sizes[rank], head_dim)
            .movedim(0, HEAD_DIM)
            .flatten(HEAD_DIM, HEAD_DIM + 1)
        )
    blocks = [part.reshape(-1) for part in out.split(layout.seq_sizes, layout.seq_dim)]
    received = _RowExchange.apply(torch.cat(blocks), by_heads, by_positions, group, names)
    parts = [part.view(*lead, n, head_dim) for part, n in zip(received.split(by_heads), share.sizes, strict=True)]
    return torch.cat(parts, HEAD_DIM)


class UlyssesAttention(nn.Module):
    """Attention over sequence shards: all heads of this rank's positions in and out, its heads of all positions inside.

    Forward: one all-to-all of q, k and v, attention, one all-to-all of the result. Backward: the same, reversed.

    ``attention`` is ``torch.nn.functional.scaled_dot_product_attention`` (or a ``functools.partial`` of it), called
    with ``[b, h, S, d]``, or any callable, called with tensors in ``layout`` (as ``flash_attn_func`` takes
    ``[b, S, h, d]``) and returning one in ``layout``. Keyword arguments of ``forward`` are passed on to it. The tensors
    it gets are slices of one buffer, contiguous in the last two dims.

    Query heads are split over the ranks together with their kv heads, evenly where that is possible and otherwise one
    more for the first ranks. With fewer kv heads than ranks a kv head goes to every rank that needs it, and its
    gradient is the sum over them. A dropout inside ``attention`` draws per rank. Under autocast q, k and v are cast to
    its dtype before they travel, as ``scaled_dot_product_attention`` casts them.

    Args:
        group: the ranks that hold the sequence (see ``groups.as_group``); the tensor group by default, unless there is
            a context axis.
        attention: the callable.
        layout: of q, k, v and the result: ``"bshd"`` is ``[batch, sequence, heads, head_dim]``, ``"sbhd"`` has the
            sequence first.

    Source: DeepSpeed-Ulysses, arXiv 2309.14509.
    """

    def __init__(
        self,
        group: GroupLike | None = None,
        *,
        attention: Callable[..., Tensor] = scaled_dot_product_attention,
        layout: Literal["bshd", "sbhd"] = "bshd",
    ) -> None:
        super().__init__()
        if layout not in ("bshd", "sbhd"):
            raise ArgumentError(f"UlyssesAttention: layout must be 'bshd' or 'sbhd', not {layout!r}")
        self.group, self.attention, self.layout = group, attention, layout
        self._is_sdpa = getattr(attention, "func", attention) is scaled_dot_product_attention

    def __deepcopy__(self, memo: dict[int, Any]) -> "UlyssesAttention":
        """Return a deep copy of the module that shares its process group, which cannot be copied."""
        copy = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.group)] = self.group
        copy.__dict__.update(deepcopy(self.__dict__, memo))
        return copy

    def extra_repr(self) -> str:
        """Return the layout, which ``repr`` of the module shows."""
        return f"layout={self.layout!r}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        sequence_sizes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the attention of this rank's positions to the positions of all ranks.

        Args:
            query: ``[b, s, heads, head_dim]``, any strides; or q, k and v in one tensor ``[b, s, 3, heads, head_dim]``.
            key: ``[b, s, kv_heads, head_dim]``; the number of query heads is a multiple of ``kv_heads``.
            value: ``[b, s, kv_heads, any]``.
            sequence_sizes: positions of every rank, when they differ.
            kwargs: for ``attention``: ``is_causal``, ``dropout_p``, ``scale``, ... An ``attn_mask`` is one of the
                global sequence, the same for all heads; its gradient is that of this rank's heads, to be summed over
                the group as those of parameters are.

        Shape: ``[b, s, heads, head_dim of value]``.

        Raises:
            ShapeError: the shapes do not fit each other or the ranks; before anything is sent.
            UnsupportedError: a mask of local positions or of single heads.
        """
        name = "UlyssesAttention"
        group, packed = resolve_sequence(self.group, name), query if key is None else None
        tensors = _checked(query, key, value, name)
        if packed is None:
            tensors = autocast(tensors)
        else:
            (packed,) = autocast([packed])
            tensors = packed.unbind(_QKV_DIM)
        sizes = None if sequence_sizes is None else normalize_sizes(sequence_sizes, name)
        query, key, value = tensors
        exchange = exchange_for(query, key, value, group, self.layout.index("s"), sizes, name)
        bound = self.attention.keywords if isinstance(self.attention, partial) else {}
        mask = kwargs.get("attn_mask", bound.get("attn_mask"))
        if mask is not None:
            _check_mask(mask, sum(exchange.qkv.seq_sizes), name)
        if group.size() == 1:
            return self._attend(tensors, kwargs)
        compare_arguments(name, group, arguments=kwargs)
        # Of a packed tensor that trains: one node, whose backward makes one packed gradient, not a stack of three.
        if packed is not None and packed.requires_grad and torch.is_grad_enabled() and not is_compiling():
            local = _FusedToHeads.apply(exchange.qkv, group, exchange.names, packed)
        else:
            local = to_heads(tensors, exchange.qkv, group, exchange.names)
        return to_sequence(self._attend(local, kwargs), exchange.out, group, exchange.names)

    def _attend(self, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> Tensor:
        """Call ``attention`` with q, k and v in the layout that it takes, and return its result in ``self.layout``."""
        query, key, value = tensors
        if not self._is_sdpa:
            out = self.attention(query, key, value, **kwargs)
            if not isinstance(out, Tensor):
                raise ArgumentError(f"UlyssesAttention: attention must return a tensor, not {type(out).__name__}")
            return out
        if query.shape[HEAD_DIM] != key.shape[HEAD_DIM]:
            kwargs.setdefault("enable_gqa", True)
        if self.layout == "bshd":
            out = self.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **kwargs)
            return out.transpose(1, 2)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self.attention(query, key, value, **kwargs).permute(2, 0, 1, 3)


def _checked(query: Tensor, key: Tensor | None, value: Tensor | None, name: str) -> tuple[Tensor, ...]:
    """Return q, k and v, of three tensors or of one tensor ``query`` that holds all three in dim 2."""
    for x in (query, key, value):
        if isinstance(x, Tensor) and (type(x) is not Tensor or x.layout is not torch.strided or x.is_nested):
            check_kind(x, name)
    if key is None and value is None and isinstance(query, Tensor):
        if query.dim() != 5 or query.shape[_QKV_DIM] != 3:
            raise ShapeError(
                f"{name}: without key and value, query holds all three in dim 2, not shape {list(query.shape)}"
            )
        return query.unbind(_QKV_DIM)
    for x in (query, key, value):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name}: query, key and value must be tensors, not {type(x).__name__}")
    return query, key, value  # pyright: ignore[reportReturnType]


def _check_mask(mask: Any, positions: int, name: str) -> None:
    """Check that every rank can apply the attention mask to its heads and all positions."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        raise ArgumentError(f"{name}: attn_mask must be a tensor [..., positions, positions], not {mask!r:.60}")
    if any(size not in (1, positions) for size in mask.shape[-2:]):
        raise UnsupportedError(
            f"{name}: attn_mask {list(mask.shape)} is not one of the global sequence of {positions} positions; "
            "a mask of local positions is not supported"
        )
    if mask.dim() > 2 and mask.shape[-3] != 1:
        raise UnsupportedError(
            f"{name}: attn_mask {list(mask.shape)} differs between heads (dim -3), which is not supported"
        )
