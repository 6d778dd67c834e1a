"""Explanations of wrong values in words, from direct evidence: a factor, a chunk in another order, a missing sum."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tritoncomm.parsing import counted
from tritoncomm.verify.bounds import Values, largest
from tritoncomm.verify.recording import Call, Recording
from tritoncomm.verify.relations import Relation, candidates, difference, find

__all__ = ["factor_of", "not_finite", "of_gradient", "of_output", "ranks_in_words", "repeated"]


def of_output(
    values: Values,
    ranks: Sequence[int],
    nearest: Relation | None,
    bias: Tensor | None = None,
    calls: Sequence[Call] = (),
) -> str:
    """Say what explains wrong values of an output or a parameter; "" if nothing does.

    Args:
        nearest: the relation whose difference is smallest; None where no shape fits.
        bias: of the module.
        calls: of the ranks; and the one in one process first.
    """
    if words := not_finite(values, ranks):
        return f"; {words}"
    found = [*_of_values(values, ranks, nearest)]
    if calls:
        whole, *own = calls
        narrower = [x.narrowest for x in own if torch.finfo(x.narrowest).eps > torch.finfo(whole.narrowest).eps]
        if narrower:
            found.append(f"{narrower[0]} appeared, which one process does not have")
        if bias is not None:
            found += _of_bias(bias, values)
        has_none = all(before == after for before, after in (each.collectives for each in own))
        if len(values.parts) > 1 and has_none and not found:
            found.append("no collective ran inside")
    return "".join(f"; {each}" for each in found)


def _of_bias(bias: Tensor, values: Values) -> Iterator[str]:
    """Yield what explains values to which a bias was added: how often, or what is wrong with the rest."""
    whole, parts, bound = values
    if bias.shape != whole.shape[-1:] or any(x.shape != whole.shape for x in parts):
        return
    bound = 4 * bound  # adding and subtracting the bias rounds, too
    for times in range(2, len(parts) + 1):  # the whole one has it once
        if all(difference(x, whole + (times - 1) * bias) <= bound for x in parts):
            yield f"its bias was added {times} times"
            return
    whole, parts = whole - bias, [x - bias for x in parts]
    factor = factor_of(parts, [whole] * len(parts), values.bound)
    if factor is not None:
        yield f"{factor}, but for its bias"
        return
    added = find(whole, parts, bound).relation
    if added is not None and added.is_partial and not added.is_mean:
        yield f"the ranks' parts were never summed ({added}, but for its bias)"


def _of_values(values: Values, ranks: Sequence[int], nearest: Relation | None) -> Iterator[str]:
    """Yield what explains wrong values, by the ways to split the tensor that its shape allows."""
    whole, parts, bound = values
    if nearest is None:
        missing = _missing(whole, parts)
        if missing:
            yield missing
        return
    partly = set[tuple[int, ...]]()  # the wrong ranks by each relation by which some are right
    for relation in candidates(whole, parts, allow_sums=False):
        expected = [relation.of(whole, k) for k in range(len(parts))]
        if relation.view or any(e is None or e.shape != x.shape for e, x in zip(expected, parts, strict=True)):
            continue
        pairs = [(x, e) for x, e in zip(parts, expected, strict=True) if e is not None]
        factor = factor_of([x for x, _ in pairs], [e for _, e in pairs], bound)
        if factor is not None:
            yield factor
            return
        held = _chunks_held(whole, parts, relation, bound)
        if held is not None:
            places = ", ".join(f"rank {rank} has {i}" for rank, i in zip(ranks, held, strict=True))
            yield f"chunks in another order: {places}"
            return
        wrong = [rank for rank, (x, e) in zip(ranks, pairs, strict=True) if difference(x, e) > bound]
        # Only a relation by which the ranks hold the whole tensor together can be the program's own.
        if len(wrong) < len(pairs) and relation.covered(len(parts)) == relation.blocks:
            partly.add(tuple(wrong))
    # The fewest wrong ranks are named, unless two relations have as few: either may be the right one.
    fewest = [each for each in partly if len(each) == min(map(len, partly))]
    if len(fewest) == 1:
        yield f"only {ranks_in_words(fewest[0])} differ{'s' if len(fewest[0]) == 1 else ''}"


def of_gradient(
    name: str, values: Values, ranks: Sequence[int], relation: Relation, whole_run: Recording, runs: Sequence[Recording]
) -> str:
    """Say what is wrong with a gradient; ``whole_run`` and ``runs`` know which parameters are tied."""
    whole, parts, bound = values
    for each in candidates(whole, parts, allow_sums=True):
        if not each.is_partial or each.is_mean or each.splits != relation.splits:
            continue
        if find(*values, known=each).relation is not None:
            return f"was never summed: {each}"
        if find(*values, known=(mean := replace(each, is_mean=True))).relation is not None:
            return f"was never averaged: {mean}"
    expected = [relation.of(whole, k) for k in range(len(parts))]
    if all(e is not None and e.shape == x.shape for e, x in zip(expected, parts, strict=True)):
        factor = factor_of(parts, [e for e in expected if e is not None], bound)
        if factor is not None:
            return factor
        wrong = [
            rank for rank, x, e in zip(ranks, parts, expected, strict=True) if e is None or difference(x, e) > bound
        ]
        tied = next((each for each in whole_run.tied.values() if name in each), [])
        if tied and not any(name in each for one in runs for each in one.tied.values()):
            others = ", ".join(each for each in tied if each != name)
            return f"is wrong: in one process it is tied to {others}, here it is not"
        if len(wrong) < len(parts):
            return f"is wrong on {ranks_in_words(wrong)} alone"
    return "is wrong"


def not_finite(values: Values, ranks: Sequence[int]) -> str:
    """Say on which ranks values are NaN or infinite, though none of the whole tensor is; "" if none are."""
    if not bool(values.whole.isfinite().all()):
        return ""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, x in zip(ranks, values.parts, strict=True):
        for kind, is_odd in (("NaN", x.isnan()), ("infinite", x.isinf())):
            if bool(is_odd.any()):
                at = [int(i) for i in is_odd.nonzero()[0]]
                many = f"{int(is_odd.sum())} of {counted(x.numel(), 'value')}, first at {at}"
                many = "all values" if bool(is_odd.all()) else many
                found.setdefault((kind, many), []).append(rank)
    return ", ".join(f"is {kind} on {ranks_in_words(who)} ({many})" for (kind, many), who in found.items())


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def factor_of(parts: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> str | None:
    """Say by which factor all values are off, if one explains them; None of values that may be rounding."""
    if bound > max(map(largest, expected), default=0.0) / 10:
        return None
    # The factor by least squares.
    products = sum(float((x * e).sum()) for x, e in zip(parts, expected, strict=True))
    squares = sum(float((e * e).sum()) for e in expected)
    if not squares or not math.isfinite(products / squares):
        return None
    ratio = products / squares
    if any(difference(x, ratio * e) > 4 * bound * max(1.0, abs(ratio)) for x, e in zip(parts, expected, strict=True)):
        return None
    if abs(ratio) < 1e-9:
        return "is 0 on all ranks"
    if abs(ratio - round(ratio)) < 1e-6 and abs(round(ratio)) > 1:
        return f"is {round(ratio)} times the whole one"
    if round(ratio, 6) == -1:
        return "has the other sign"
    if abs(1 / ratio - round(1 / ratio)) < 1e-6:
        return f"is {'-' if ratio < 0 else ''}1/{round(abs(1 / ratio))} of the whole one"
    return f"is {ratio:.6g} times the whole one"


def _chunks_held(whole: Tensor, parts: Sequence[Tensor], relation: Relation, bound: float) -> list[int] | None:
    """Return which chunk each rank holds, if each holds one and they are not in order."""
    if len(relation.splits) != 1:
        return None
    (_, chunks, _), found = relation.splits[0], []
    for x in parts:
        for i in range(chunks):
            expected = relation.of(whole, i * relation.splits[0][2])
            if expected is not None and expected.shape == x.shape and difference(x, expected) <= bound:
                found.append(i)
                break
        else:
            return None
    return found


def repeated(values: Values) -> str:
    """Say that the ranks hold every n-th sample, and the first ones again, as ``DistributedSampler`` draws; else ""."""
    whole, parts, bound = values
    count, size = len(parts), whole.shape[0] if whole.dim() else 0
    length = -(-size // count)
    if not size or length * count == size or any(x.shape != (length, *whole.shape[1:]) for x in parts):
        return ""
    for k, x in enumerate(parts):
        if difference(x, whole[torch.arange(k, length * count, count) % size]) > bound:
            return ""
    again = counted(length * count - size, "sample")
    return f"the ranks hold {length * count} of {size} along dim 0: DistributedSampler repeats the first {again}"


def _missing(whole: Tensor, parts: Sequence[Tensor]) -> str:
    """Say how much of a dim the ranks hold together, if they hold less than all of it."""
    if any(x.dim() != whole.dim() for x in parts):
        return ""
    for dim, size in enumerate(whole.shape):
        held = sum(x.shape[dim] for x in parts)
        if held < size and any(x.shape[dim] != size for x in parts):
            return f"the ranks hold {held} of {size} along dim {dim}"
    return ""
