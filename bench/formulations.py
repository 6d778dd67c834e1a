"""Peers of `gpu_bench.py`: torch code for the step that one of our kernels does.

``rows`` are ``[outer, world*run]``, ``wire`` is ``[world, outer, run]``. The tensors of a copy-in or copy-out are
FSDP2's parameters, flat, each cut into ``world`` runs. Names say the code; who writes it:

- ``split + cat``: Megatron-LM; DTensor where it gathers or reduce-scatters a dim other than 0; ColossalAI to unpack;
- ``movedim``: DTensor's all-to-all, DeepSpeed; ``compiled`` is the same through torch.compile;
- ``chunk + contiguous``: ColossalAI to pack, a copy per rank that the list collectives take;
- ``FSDP2's op``: its two fused copies. FSDP2 itself uses ``_chunk_cat`` for the copy-in and ``split_with_sizes_copy``
  for the copy-out; between rows and wire they do the step the other way round.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import tritoncomm_kernels as kernels
from torch import Tensor

__all__ = ["OF_LISTS", "PEERS", "Lists", "compiled", "exp_scatter", "logsumexp_gather"]

Tensors = Sequence[Tensor]


def _split_with_sizes_copy(rows: Tensor, world: int, dtype: torch.dtype) -> Tensor:
    outer, run = rows.shape[0], rows.shape[1] // world
    wire = rows.new_empty((world, outer, run), dtype=dtype)
    torch.split_with_sizes_copy(rows.to(dtype), [run] * world, 1, out=wire.unbind(0))
    return wire


def _copy_out(wire: Tensor, world: int, dtype: torch.dtype) -> Tensors:
    _, count, run = wire.shape
    made = [wire.new_empty(world * run, dtype=dtype) for _ in range(count)]
    torch.split_with_sizes_copy(
        wire.to(dtype).view(world, -1), [run] * count, 1, out=[x.view(world, run) for x in made]
    )
    return made


def _chunk_cat(parts: Tensors, chunks: int, dtype: torch.dtype) -> Tensor:
    """Chunk c of every part, concatenated, is row c; the cast is fused."""
    out = parts[0].new_empty((chunks, sum(part.numel() for part in parts) // chunks), dtype=dtype)
    return torch._chunk_cat(parts, 0, chunks, out=out)


# By operation and name: (source, world, dtype of the result) to the result, or to its pieces in order.
PEERS: dict[str, dict[str, Callable[[Any, int, torch.dtype], Any]]] = {
    "pack": {
        "split + cat": lambda rows, world, dtype: torch.cat(torch.split(rows.to(dtype), rows.shape[1] // world, 1), 0),
        "movedim": lambda rows, world, dtype: rows.to(dtype).unflatten(1, (world, -1)).movedim(1, 0).contiguous(),
        "chunk + contiguous": lambda rows, world, dtype: [x.contiguous() for x in rows.to(dtype).chunk(world, 1)],
        "FSDP2's op": _split_with_sizes_copy,
    },
    "unpack": {
        "split + cat": lambda wire, world, dtype: torch.cat(wire.to(dtype).unbind(0), -1),
        "movedim": lambda wire, world, dtype: wire.to(dtype).movedim(0, 1).contiguous(),
        "FSDP2's op": lambda wire, world, dtype: _chunk_cat(wire.unbind(0), wire.shape[1], dtype),
    },
    "copy-in": {
        "split + cat": lambda params, world, dtype: torch.cat([x.to(dtype).view(world, -1) for x in params], 1),
        "FSDP2's op": lambda params, world, dtype: _chunk_cat(params, world, dtype),
    },
    "copy-out": {
        "chunk + contiguous": lambda wire, world, dtype: [x.contiguous() for x in wire.to(dtype).unbind(1)],
        "FSDP2's op": _copy_out,
    },
}


class Lists(NamedTuple):
    """Rows ``x`` of tokens, ``y`` of (token, slot) pairs by expert, and weights ``[tokens, slots]``.

    Attributes:
        pair: of each row of ``y``.
        index: ``[tokens, slots]``, the row of each pair.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    pair: Tensor
    index: Tensor

    @property
    def tokens(self) -> Tensor:
        """Of each row of ``y``."""
        return self.pair // self.weights.shape[1]

    @property
    def scaled(self) -> Tensor:
        """Rows ``y`` times their weights."""
        return self.y * self.weights.view(-1)[self.pair, None].to(self.y.dtype)


def _scatter_add(of: Lists) -> Tensor:
    """What torchtitan does: atomic additions, in any order."""
    return torch.zeros_like(of.x).scatter_add_(0, of.tokens[:, None].expand(of.y.shape), of.scaled)


def _deterministic_index_add(of: Lists) -> Tensor:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return torch.zeros_like(of.x).index_add_(0, of.tokens, of.scaled)
    finally:
        torch.use_deterministic_algorithms(was)


def _scaled_and_dotted(of: Lists) -> Tensor:
    """Our two kernels, one after the other."""
    scaled = torch.empty_like(of.y)
    kernels.scale_rows(of.x, of.pair, of.weights, scaled)
    kernels.dot_rows(of.x, of.y, of.pair, torch.zeros_like(of.weights))
    return scaled


# By operation and name: of rows to the result.
OF_LISTS: dict[str, dict[str, Callable[[Lists], Tensor]]] = {
    "sum rows": {
        "scatter_add": _scatter_add,
        "index_add": _deterministic_index_add,
        "bmm": lambda of: torch.bmm(of.weights[:, None].to(of.y.dtype), of.y[of.index])[:, 0],
        "view + sum": lambda of: of.scaled[of.index.view(-1)].view(*of.index.shape, -1).sum(1),
    },
    "scale rows": {
        "index + mul": lambda of: of.x[of.tokens] * of.weights.view(-1)[of.pair, None].to(of.x.dtype),
    },
    "scale and dot": {"scale rows, dot rows": _scaled_and_dotted},
    "dot rows": {
        "index + mul + sum": lambda of: torch.empty_like(of.weights).put_(
            of.pair, (of.x[of.tokens] * of.y).sum(1, dtype=torch.float32)
        ),
    },
}


def logsumexp_gather(x: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """The statistics of the rows of a piece of the vocabulary."""
    wide = x.float()
    return torch.stack((torch.logsumexp(wide, -1), (wide.gather(1, column) * factor)[:, 0]))


def exp_scatter(x: Tensor, lse: Tensor, column: Tensor, factor: Tensor, upstream: Tensor) -> Tensor:
    """The gradient of the logits of that piece."""
    out = (x - lse[:, None]).exp_()
    return out.scatter_add_(1, column, -factor).mul_(upstream[:, None]).to(x.dtype)


def compiled(function: Callable[..., Any], dry: bool, *arguments: Any) -> Callable[[], Any]:
    """``function`` of these arguments through torch.compile, at its first call; in a dry run traced, not compiled."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes takes longer than one kernel
    torch.compiler.reset()  # every case for itself: a graph for any size would be slower
    made = torch.compile(function, dynamic=False, fullgraph=True, backend="eager" if dry else "inductor")
    return lambda: made(*arguments)
