"""DeepSpeed's ``DistributedAttention`` and ``_SeqAllToAll`` (``deepspeed.sequence.layer``), without importing it.

q, k and v travel in one all-to-all where DeepSpeed sends three. Overlap on a stream of its own (``sp_stream``) is not
supported.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm import ulysses
from tritoncomm.core import eager
from tritoncomm.core.heads import HEAD_DIM, HeadLayout, HeadShare, split_heads
from tritoncomm.core.plan import Ints, located, split_evenly
from tritoncomm.core.validation import PerGroup
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.mappings import all_to_all_dims
from tritoncomm.ulysses import AttentionExchange

__all__ = ["DistributedAttention", "_SeqAllToAll"]

_splits_unevenly: PerGroup[bool] = PerGroup()  # groups over which heads were split that they do not divide


class DistributedAttention(nn.Module):
    """Ulysses attention around ``local_attention``, which gets all positions of this rank's heads.

    Forward: one all-to-all of q, k and v, ``local_attention``, one all-to-all of its result. Backward: reversed.

    Args:
        local_attention: called with q, k, v ``[b, S, h, d]`` (``[S, b, h, d]`` with the batch in dim 1) and the
            arguments of ``forward`` behind ``rotary_pos_emb``; returns ``[b, S, h, d]`` or ``[b, S, h*d]``.
        sequence_process_group: the ranks that hold the sequence.
        scatter_idx: the dim of heads, 2.
        gather_idx: 0 or 1; the dim of the sequence follows from ``batch_dim_idx`` of each call, as in DeepSpeed.
        sp_stream: not supported.
        num_kv_heads: key/value heads that the split follows, by default the key tensor's.
        contiguous: hand q, k and v over as contiguous tensors, at the price of a copy; otherwise they are slices of one
            buffer, of which ``.view`` cannot merge the batch with the heads.

    Raises:
        UnsupportedError: ``sp_stream``, or dims other than sequence and heads.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        contiguous: bool = False,
    ) -> None:
        super().__init__()
        name = "DistributedAttention"
        _refuse_overlap(name, "sp_stream", sp_stream)
        if num_kv_heads is not None and (type(num_kv_heads) is not int or num_kv_heads < 1):
            raise ArgumentError(f"{name}: num_kv_heads must be a positive int, not {num_kv_heads!r}")
        if scatter_idx != HEAD_DIM or gather_idx not in (0, 1):
            raise UnsupportedError(
                f"{name}: scatter_idx {scatter_idx} and gather_idx {gather_idx} are not heads (2) and sequence (0, 1)"
            )
        self.local_attn, self.spg, self.num_kv_heads = local_attention, sequence_process_group, num_kv_heads
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self.contiguous = contiguous  # whether the local attention gets contiguous copies of q, k and v
        # Attributes that DeepSpeed's class has; there is no second stream.
        self.sp_overlap_comm, self.overlap_handles, self.sp_stream = False, None, None

    def layer_sync(self, layer: Any) -> None:
        """Do nothing: there is no second stream to wait for."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention of local ``[b, s, heads, d]``, or sequence first with ``batch_dim_idx`` 1.

        Args:
            query, key, value: this rank's positions of all heads.
            batch_dim_idx: the dim of the batch, 0 or 1.
            rotary_pos_emb: (cos, sin), applied to all positions of q and k; their dims 0 and 1 are those of q the other
                way round, as in DeepSpeed: ``[S, b or 1, 1, rotary_dim]``, or batch first with ``batch_dim_idx`` 1.
            args, kwargs: for ``local_attention``.

        Raises:
            ShapeError: a sequence or heads that cannot be split, or cos and sin of another shape.
        """
        name, group = "DistributedAttention", self.spg
        exchange = self._exchange(query, key, value, batch_dim_idx, name)
        local = ulysses.autocast((query, key, value))
        if group.size() > 1:
            local = ulysses.to_heads(local, exchange.qkv, group, exchange.names)
        if self.contiguous:
            local = [x.contiguous() for x in local]
        query, key, value = local
        if rotary_pos_emb is not None:
            cos, sin = _in_order_of(query, rotary_pos_emb, 1 - batch_dim_idx, name)
            query, key = ulysses.autocast((_rotated(query, cos, sin), _rotated(key, cos, sin)))
        out = self.local_attn(query, key, value, *args, **kwargs)
        if group.size() == 1:
            return out
        # The local attention has merged heads and head_dim into dim 2; they are merged again after the exchange.
        if out.dim() == 3:
            return ulysses.to_sequence(
                out.unflatten(2, (query.shape[HEAD_DIM], -1)), exchange.out, group, exchange.names
            ).flatten(2)
        return ulysses.to_sequence(out, exchange.out, group, exchange.names)

    def _exchange(self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int, name: str) -> AttentionExchange:
        """Return the plan of this call; an own ``num_kv_heads`` decides the split, else the key tensor does."""
        _check_batch_dim(batch_dim_idx, name)
        seq_dim, seq_sizes = 1 - batch_dim_idx, None  # every rank has equally many positions
        exchange = ulysses.exchange_for(query, key, value, self.spg, seq_dim=seq_dim, seq_sizes=seq_sizes, name=name)
        kv_heads = self.num_kv_heads
        if kv_heads is None or kv_heads == key.shape[HEAD_DIM]:
            return exchange
        if key.shape[HEAD_DIM] % kv_heads:
            raise ShapeError(
                f"{name}: {key.shape[HEAD_DIM]} heads of the key are no multiple of num_kv_heads {kv_heads}"
            )
        if kv_heads < self.spg.size():
            # Ranks would share a group, and get a slice of its queries beside all of its keys.
            raise ShapeError(
                f"{name}: num_kv_heads {kv_heads} is less than the {self.spg.size()} ranks, and the key has "
                f"{key.shape[HEAD_DIM]} heads; leave num_kv_heads out, so that the split follows these"
            )
        return _by_kv_groups(exchange, query.shape[HEAD_DIM], key.shape[HEAD_DIM], kv_heads)


@lru_cache(maxsize=256)
def _by_kv_groups(exchange: AttentionExchange, q_heads: int, k_heads: int, kv_heads: int) -> AttentionExchange:
    """Return the exchange with heads split as ``kv_heads`` groups are."""
    sizes = exchange.qkv.seq_sizes
    q, groups = split_heads(q_heads, kv_heads, len(sizes))
    # The key tensor has ``per`` heads for each of the ``kv_heads`` groups; queries, keys and values have a share each.
    per = k_heads // kv_heads
    k = HeadShare(tuple([per * n for n in groups.starts]), tuple([per * n for n in groups.sizes]), k_heads)
    seq_dim = exchange.qkv.seq_dim
    return AttentionExchange(HeadLayout(seq_dim, (q, k, k), sizes), HeadLayout(seq_dim, (q,), sizes), exchange.names)


class _SeqAllToAll:
    """One all-to-all between sequence and heads; ``scatter_idx`` below 2 means the sequence, wherever that is.

    Forward: ``[b, s, h, d] -> [b, s*world, h/world, d]`` with ``scatter_idx`` 2, else the reverse. Backward: the other.
    """

    @staticmethod
    def apply(
        group: ProcessGroup,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        stream: Any = None,
        handle: Any = None,
        type: str | None = None,
        is_fwd: bool = True,
        num_kv_heads: int | None = None,
    ) -> Tensor:
        """Exchange one tensor, its heads for the sequence or back, as ``scatter_idx`` says.

        Args:
            num_kv_heads: number of key/value heads; where the ranks do not divide it, heads are split as these are. By
                default it is the number of heads, which after an uneven split the ranks tell each other on the way
                back: a message of 8 bytes, for which the host waits.

        Raises:
            ArgumentError: a ``batch_dim_idx`` that is not 0 or 1.
            UnsupportedError: a ``handle``, DeepSpeed's sign for overlap on a stream of its own.
            ShapeError: a sequence or heads that cannot be split.
        """
        name = "_SeqAllToAll"
        _refuse_overlap(name, "handle", handle)
        _check_batch_dim(batch_dim_idx, name)
        seq_dim = 1 - batch_dim_idx
        to_heads = scatter_idx >= HEAD_DIM
        if num_kv_heads is None and to_heads:
            num_kv_heads = input.shape[HEAD_DIM]  # on the way back the shape has the heads of this rank alone
            if num_kv_heads % group.size() and is_compiling():
                raise UnsupportedError(f"{name}: heads that the ranks do not divide need num_kv_heads in a graph")
            if num_kv_heads % group.size():
                _splits_unevenly.set(group, value=True)
        elif num_kv_heads is None and not is_compiling() and _splits_unevenly.get(group):
            local = torch.tensor([input.shape[HEAD_DIM]], device=input.device)
            sizes = eager.all_gather(local, 0, group, name).tolist()
            return all_to_all_dims(input, seq_dim, HEAD_DIM, group, gather_sizes=sizes)
        if num_kv_heads is None or num_kv_heads % group.size() == 0:
            dims = (HEAD_DIM, seq_dim) if to_heads else (seq_dim, HEAD_DIM)
            return all_to_all_dims(input, *dims, group)
        return _uneven(input, to_heads, seq_dim, num_kv_heads, group, name)


def _uneven(x: Tensor, to_heads: bool, seq_dim: int, kv_heads: int, group: ProcessGroup, name: str) -> Tensor:
    """Exchange heads whose kv groups do not divide over the ranks."""
    plan = _uneven_layout.__wrapped__ if is_compiling() else _uneven_layout
    try:
        layout, columns = plan(x.shape, to_heads, seq_dim, kv_heads, group.size(), group.rank())
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    names = name, f"{name}.backward"  # of the exchange in forward, and in backward
    if to_heads:
        return ulysses.to_heads((x,), layout, group, names)[0]
    if columns is not None:
        return ulysses.to_sequence(x.unflatten(2, columns), layout, group, names).flatten(2)
    return ulysses.to_sequence(x, layout, group, names)


@lru_cache(maxsize=1024)
def _uneven_layout(
    shape: Ints, to_heads: bool, seq_dim: int, kv_heads: int, world: int, rank: int
) -> tuple[HeadLayout, Ints | None]:
    """Return the layout for the exchange of q, k, v or the result, whose kv heads do not divide by the ranks.

    Args:
        to_heads: whether the tensor has this rank's positions of all heads; else all positions of this rank's heads.

    Returns:
        The layout, and for a tensor ``[.., heads*head_dim]`` on the way back the sizes by which the caller unflattens
        dim 2: this rank's kv heads, and the columns of each; else None.
    """
    if kv_heads < world:
        raise ShapeError(
            f"{kv_heads} key/value heads are fewer than the ranks, and one tensor does not say whose it is"
        )
    size = shape[HEAD_DIM]  # number of heads; of a tensor with three dims heads * head_dim, the columns
    kv_share = split_heads(kv_heads, kv_heads, world)[0]
    if to_heads:
        if size % kv_heads:
            raise ShapeError(f"{size} heads are no multiple of {kv_heads} key/value heads")
        heads_per_kv_head = size // kv_heads
        positions = shape[seq_dim]
        unflattened = None
    else:
        # The shape has the heads of this rank alone, so they are divided by its own kv heads.
        local_kv_heads = kv_share.sizes[rank]
        positions = split_evenly(shape, seq_dim, world)
        if size % local_kv_heads:
            raise ShapeError(f"dim 2 of size {size} is no multiple of this rank's {local_kv_heads} key/value heads")
        unflattened = (local_kv_heads, size // local_kv_heads) if len(shape) == 3 else None
        # Unflattened, dim 2 has one entry for each kv head, with the columns of all heads that belong to it.
        heads_per_kv_head = 1 if unflattened else size // local_kv_heads
    share = HeadShare(
        tuple([heads_per_kv_head * head for head in kv_share.starts]),
        tuple([heads_per_kv_head * count for count in kv_share.sizes]),
        heads_per_kv_head * kv_heads,
    )
    return HeadLayout(seq_dim, (share,), (positions,) * world), unflattened


def _refuse_overlap(name: str, argument: str, value: Any) -> None:
    """Reject a ``value`` of the argument with which DeepSpeed overlaps an exchange; None passes."""
    if value is not None:
        raise UnsupportedError(
            f"{name}: {argument} (overlap of the exchange with the projections) is not supported; pass None"
        )


def _check_batch_dim(batch_dim_idx: int, name: str) -> None:
    """Reject a dim of the batch other than 0 and 1."""
    if batch_dim_idx not in (0, 1):
        raise ArgumentError(f"{name}: batch_dim_idx must be 0 or 1, not {batch_dim_idx!r}")


def _in_order_of(x: Tensor, rotary_pos_emb: Any, seq_dim: int, name: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin with the sequence in the dim in which ``x`` has it; refuse shapes that would be broadcast."""
    cos, sin = (part.permute(1, 0, 2, 3) for part in rotary_pos_emb)
    width, batch = cos.shape[-1], x.shape[1 - seq_dim]
    fits = cos.shape[seq_dim] == x.shape[seq_dim] and cos.shape[1 - seq_dim] in (1, batch)
    if not fits or cos.shape[2] != 1 or width % 2 or width > x.shape[-1] or sin.shape != cos.shape:
        wanted = [x.shape[seq_dim], f"1 or {batch}"] if seq_dim == 1 else [f"1 or {batch}", x.shape[seq_dim]]
        raise ShapeError(
            f"{name}: rotary_pos_emb of {list(rotary_pos_emb[0].shape)} and {list(rotary_pos_emb[1].shape)} for q "
            f"{list(x.shape)}; both are [{wanted[0]}, {wanted[1]}, 1, an even number up to {x.shape[-1]}], with the "
            "batch and the sequence the other way round than in q"
        )
    return cos, sin


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x * cos + rotate(x) * sin`` of the first ``cos.shape[-1]`` columns; rotate swaps the halves of them."""
    width = cos.shape[-1]
    rotary = x[..., :width]
    rest = x[..., width:]
    first, second = rotary.chunk(2, -1)
    rotary = rotary * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotary, rest), -1) if rest.shape[-1] else rotary
