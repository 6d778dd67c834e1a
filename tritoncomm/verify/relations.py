"""How the ranks' tensors are parts of a whole one: found by comparing values, not declared.

``whole`` is the tensor of the run in one process, ``parts`` those of the ranks that have it, in rank order. A relation
says for the k-th of them which values it has. Ranks may form a mesh: along one of its dims they hold chunks, along
another the same values, or addends.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Found", "Relation", "find", "is_telling"]

_MOST_RATIO = 16  # of query to key heads, of a fused projection


@dataclass(frozen=True)
class Relation:
    """Parts of a tensor that ranks hold; made by its class methods, ``equal`` to ``addends``.

    Attributes:
        splits: (dim, chunks, step) of every split dim: the k-th rank holds chunk ``(k // step) % chunks`` of it.
        sizes: of the chunks of the one split dim, where they are not those of ``torch.chunk``.
        is_mirrored: chunk i of n is chunk i of 2n and the one as far from the end, as in balanced causal attention.
        is_padded: the ranks hold chunks of the sizes in ``sizes``, which are more than the whole tensor has: what the
            last ones hold beyond its end is not compared.
        is_strided: chunk i of n is every n-th index from i on, as samplers of data parallelism draw them.
        sections: sizes of the parts of a fused tensor along the split dim, each of which is split.
        summed: (ranks, step) of the ranks whose tensors have to be added up; (1, 1) for none.
        is_mean: the whole value is their mean, not their sum.
        view: of the whole tensor that the ranks hold parts of: "", "transposed" or "flat".
    """

    splits: tuple[tuple[int, int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    is_mirrored: bool = False
    is_padded: bool = False
    is_strided: bool = False
    sections: tuple[int, ...] = ()
    summed: tuple[int, int] = (1, 1)
    is_mean: bool = False
    view: str = ""

    @classmethod
    def equal(cls) -> "Relation":
        """Every rank holds the whole tensor."""
        return cls()

    @classmethod
    def chunk(cls, dim: int, chunks: int, step: int = 1, sizes: Sequence[int] = ()) -> "Relation":
        """The k-th rank holds chunk ``(k // step) % chunks`` of ``dim``, which counts from the front."""
        return cls(((dim, chunks, step),), tuple(sizes))

    @classmethod
    def strided(cls, dim: int, chunks: int, step: int = 1) -> "Relation":
        """The k-th rank holds every ``chunks``-th index of ``dim``, from ``(k // step) % chunks`` on."""
        return cls(((dim, chunks, step),), is_strided=True)

    @classmethod
    def padded(cls, dim: int, chunks: int, step: int, length: int) -> "Relation":
        """The k-th rank holds chunk ``(k // step) % chunks`` of ``length``, the last one with padding at its end."""
        return cls(((dim, chunks, step),), (length,) * chunks, is_padded=True)

    @classmethod
    def mirrored(cls, dim: int, chunks: int, step: int = 1) -> "Relation":
        """A rank holds two of twice as many chunks: one, and the one as far from the end."""
        return cls(((dim, chunks, step),), is_mirrored=True)

    @classmethod
    def fused(cls, dim: int, chunks: int, sections: Sequence[int], step: int = 1) -> "Relation":
        """The tensor is sections one after the other along ``dim`` (query, key, value), and each is split."""
        return cls(((dim, chunks, step),), sections=tuple(sections))

    @classmethod
    def addends(cls, ranks: int, step: int = 1) -> "Relation":
        """The tensors of ``ranks`` ranks, ``step`` apart, add up to the whole one."""
        return cls(summed=(ranks, step))

    @property
    def is_partial(self) -> bool:
        """Whether ranks hold addends."""
        return self.summed[0] > 1

    def __str__(self) -> str:
        words = [f"{chunks} chunks along dim {dim}" for dim, chunks, _ in self.splits]
        if self.is_mirrored:
            words[0] = f"two mirrored chunks along dim {self.splits[0][0]}"
        if self.is_padded:
            words[0] = "padded " + words[0]
        if self.is_strided:
            words[0] = words[0].replace("chunks", "strided chunks")
        if self.sections:
            words[0] = f"{len(self.sections)} fused parts, each in " + words[0]
        if self.is_partial:
            words.append(f"{'a mean' if self.is_mean else 'addends'} of {self.summed[0]} ranks")
        if self.view:
            words.append("dims 0 and 1 swapped" if self.view == "transposed" else "dims 0 and 1 as one")
        return ", ".join(words) or "equal"

    def of(self, whole: Tensor, k: int) -> Tensor | None:
        """Return the part of a whole tensor that rank k holds, or an addend of it; None if the split does not fit."""
        x = whole
        for dim, chunks, rank_stride in self.splits:
            i = k // rank_stride % chunks  # digit of the rank for this split
            if dim >= x.dim():
                return None
            if self.sections:
                if sum(self.sections) != x.shape[dim]:
                    return None
                parts = [section.chunk(chunks, dim) for section in x.split(self.sections, dim)]
                if any(len(each) != chunks for each in parts):
                    return None
                x = torch.cat([each[i] for each in parts], dim)
            elif self.is_mirrored:
                pieces = x.chunk(2 * chunks, dim)
                if len(pieces) != 2 * chunks:
                    return None
                x = torch.cat([pieces[i], pieces[2 * chunks - 1 - i]], dim)
            elif self.is_strided:
                x = x[(slice(None),) * dim + (slice(i, None, chunks),)]
            elif self.is_padded:
                start = min(i * self.sizes[0], x.shape[dim])
                x = x.narrow(dim, start, min(self.sizes[0], x.shape[dim] - start))
            elif self.sizes:
                x = x.split(self.sizes, dim)[i]
            else:
                pieces = x.chunk(chunks, dim)
                x = pieces[i] if i < len(pieces) else x.narrow(dim, x.shape[dim], 0)
        return x

    def parts(self, whole: Tensor, like: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what every rank holds of a tensor, in the shapes of other tensors that they hold parts of."""
        viewed = _view(whole, self.view, like[0].dim())
        found = [None if viewed is None else self.of(viewed, k) for k in range(len(like))]
        if not self.is_padded:
            return found
        dim, length = self.splits[0][0], self.sizes[0]
        before = (0, 0) * (whole.dim() - 1 - dim) + (0,)  # of later dims, and in front of this one
        return [x if x is None else nn.functional.pad(x, (*before, length - x.shape[dim])) for x in found]

    def covered(self, count: int) -> int:
        """Return how many of the blocks into which the dims are split ``count`` ranks hold together."""
        return len({tuple(k // step % chunks for _, chunks, step in self.splits) for k in range(count)})

    @property
    def blocks(self) -> int:
        """Number of blocks into which the dims are split."""
        return math.prod(chunks for _, chunks, _ in self.splits)


class Found(NamedTuple):
    """Result of a search.

    Attributes:
        relation: the first relation that explains the values, or None. If the values differ between ranks, a second
            match would be a coincidence.
        error: largest absolute difference to it, or to the nearest relation by shapes.
        nearest: if none fits, the relation with the fewest wrong ranks, and of these with the smallest difference.
        partial: if none fits, one by which every rank is right, but all together hold a part of the tensor.
    """

    relation: Relation | None
    error: float
    nearest: Relation | None = None
    partial: Relation | None = None


def is_telling(whole: Tensor) -> bool:
    """Whether a tensor has different values, so that a relation that fits says something."""
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    if whole.numel() < 2:
        return bool(whole.numel()) and bool((whole != 0).all())
    return bool(whole.amax() > whole.amin())


def find(
    whole: Tensor,
    parts: Sequence[Tensor],
    bound: float,
    *,
    allow_sums: bool = True,
    known: Relation | None = None,
    allow_strides: bool = False,
) -> Found:
    """Find the relation of ranks' tensors to the whole one, all floating point in one dtype.

    Args:
        bound: largest difference of an element.
        allow_sums: whether ranks may hold addends.
        known: a relation that is declared; no other is tried.
        allow_strides: whether ranks may hold every n-th index. Rows that a wrong gather interleaved look alike.
    """
    whole, count = _expanded(whole, parts), len(parts)
    partial = None  # the first relation that fits, although the ranks do not hold all of the tensor
    # The nearest of those that do not fit: one of the whole tensor before others, then by wrong ranks, then by error.
    nearest, least, best = None, math.inf, (True, count + 1, math.inf)
    for relation in [known] if known is not None else candidates(whole, parts, allow_sums, allow_strides):
        error, wrong = _misfit(relation, whole, parts, bound)
        if error <= bound:
            if known is not None or relation.covered(count) == relation.blocks:
                return Found(relation, error)
            partial = partial or relation
        elif error < math.inf:
            order = relation.covered(count) < relation.blocks, wrong, error
            if order < best:
                nearest, least, best = relation, error, order
    return Found(relation=None, error=least, nearest=nearest, partial=partial)


def _expanded(whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a tensor with dims of size 1 repeated where every rank has as many equal values: rotary tables, masks."""
    sizes = list(whole.shape)
    if any(x.dim() != whole.dim() for x in parts):
        return whole
    for dim, size in enumerate(sizes):
        held = {x.shape[dim] for x in parts}
        if size == 1 and len(held) == 1:
            sizes[dim] = held.pop()
    return whole.expand(sizes)


class _Misfit(NamedTuple):
    """How far ranks' tensors are from what a relation says: the largest difference, and how many ranks are wrong."""

    error: float
    wrong: int


def _misfit(relation: Relation, whole: Tensor, parts: Sequence[Tensor], bound: float) -> _Misfit:
    """Compare the ranks' tensors with what a relation says."""
    viewed = _view(whole, relation.view, parts[0].dim())
    does_not_fit = _Misfit(math.inf, len(parts))
    if viewed is None:
        return does_not_fit
    held = _summed(parts, relation) if relation.is_partial else parts
    if held is None:
        return does_not_fit
    worst, wrong = 0.0, 0
    for k, x in enumerate(held):
        expected = relation.of(viewed, k)
        if relation.is_padded and expected is not None:
            dim = relation.splits[0][0]
            x = x.narrow(dim, 0, expected.shape[dim])
        if expected is None or expected.shape != x.shape:
            return does_not_fit
        error = difference(x, expected)
        worst, wrong = max(worst, error), wrong + (error > bound)
    return _Misfit(worst, wrong)


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; infinite where only one is infinite or no number."""
    if not a.numel():
        return 0.0
    apart = (a - b).abs()
    worst = float(apart.max())
    if worst == worst and worst != math.inf:
        return worst
    same = (a == b) | (a.isnan() & b.isnan())
    return float(apart.masked_fill(same, 0.0).nan_to_num(math.inf, math.inf).max())


def _summed(parts: Sequence[Tensor], relation: Relation) -> list[Tensor] | None:
    """Return for every rank the sum along the dim of the mesh that holds addends; None if the ranks hold none."""
    count, step = relation.summed
    result = []
    for k in range(len(parts)):
        first = k - k // step % count * step
        members = [parts[first + i * step] for i in range(count)]
        # Equal values are no addends: the ranks have a whole tensor, and this one is off by their number.
        if any(each.shape != members[0].shape for each in members) or all(map(members[0].equal, members[1:])):
            return None
        total = torch.stack(members).sum(0)
        result.append(total / count if relation.is_mean else total)
    return result


def _view(whole: Tensor, view: str, dims: int) -> Tensor | None:
    """Return a view of the whole tensor; None if it has none with so many dims."""
    if view == "":
        return whole if whole.dim() == dims else None
    if view == "transposed":
        return whole.transpose(0, 1) if whole.dim() == dims >= 2 else None
    return whole.flatten(0, 1) if whole.dim() == dims + 1 >= 2 else None


def candidates(
    whole: Tensor, parts: Sequence[Tensor], allow_sums: bool, allow_strides: bool = False
) -> Iterator[Relation]:
    """Yield relations that the shapes allow, likely ones first."""
    count, dims = len(parts), parts[0].dim()
    for view in ("", "transposed", "flat"):
        viewed = _view(whole, view, dims)
        if viewed is None or any(x.dim() != dims for x in parts):
            continue
        splits = list(_splits(viewed.shape, [x.shape for x in parts], allow_strides))
        yield from (replace(each, view=view) for each in splits)
        if not allow_sums:
            continue
        for (ranks, step), each in itertools.product(_mesh_dims(count), splits):
            yield replace(each, summed=(ranks, step), view=view)
            if not dims:  # of numbers, as a loss, ranks may hold terms of a mean
                yield replace(each, summed=(ranks, step), is_mean=True)


def _mesh_dims(count: int) -> Iterator[tuple[int, int]]:
    """Yield (size, step) of every dim that a mesh of ``count`` ranks may have."""
    for size in range(count, 1, -1):
        if count % size == 0:
            rest = count // size
            yield from ((size, step) for step in range(1, rest + 1) if rest % step == 0)


def _splits(whole: Sequence[int], parts: Sequence[Sequence[int]], allow_strides: bool) -> Iterator[Relation]:
    """Yield ways to split a shape that give the ranks' shapes."""
    split = [dim for dim, size in enumerate(whole) if any(part[dim] != size for part in parts)]
    if any(part[dim] > whole[dim] for part in parts for dim in split):
        return
    if not split:
        yield Relation()
        return
    ways = [list(_of_dim(whole[dim], [part[dim] for part in parts], dim, allow_strides)) for dim in split]
    for each in itertools.product(*ways):
        if len(each) == 1:
            yield each[0]
        elif not any(one.sizes or one.is_mirrored or one.is_strided or one.sections for one in each):
            yield Relation(tuple(one.splits[0] for one in each))


def _of_dim(size: int, sizes: Sequence[int], dim: int, allow_strides: bool) -> Iterator[Relation]:
    """Yield ways to split one dim over the ranks so that they hold these sizes."""
    count, found = len(sizes), []
    for chunks, step in _mesh_dims(count):
        length = -(-size // chunks)
        expected = [max(0, min(length, size - i * length)) for i in range(chunks)]
        if all(sizes[k] == expected[k // step % chunks] for k in range(count)):  # the chunk of rank k has this number
            found.append((chunks, step))
    # As ``torch.chunk`` splits; by sizes of its own; or with all parts as long, the last one being padded.
    yield from (Relation.chunk(dim, *each) for each in found)
    if not found and sum(sizes) == size:
        yield Relation.chunk(dim, count, 1, sizes)
    if not found and len(set(sizes)) == 1:
        for chunks, step in _mesh_dims(count):
            if sizes[0] * (chunks - 1) < size < sizes[0] * chunks:
                yield Relation.padded(dim, chunks, step, sizes[0])
    # Other layouts with the sizes of ``torch.chunk``.
    for chunks, step in found:
        if allow_strides and size % chunks == 0:
            yield Relation.strided(dim, chunks, step)
        if size % (2 * chunks) == 0:
            yield Relation.mirrored(dim, chunks, step)
        yield from (Relation.fused(dim, chunks, sections, step) for sections in _sections(size, chunks))


def _sections(size: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Yield sections of a fused dim: two or three equal ones, or queries with fewer keys and values."""
    for parts in (3, 2):
        if size % (parts * chunks) == 0:
            yield (size // parts,) * parts
    for ratio in range(2, _MOST_RATIO + 1):
        keys, rest = divmod(size, ratio + 2)
        if not rest and keys % chunks == 0:
            yield (ratio * keys, keys, keys)
