"""Sorts of expert ids by owner and by bucket, against Python's, on both paths."""

import random
from typing import Any

import pytest
import torch
import tritoncomm_kernels as kernels
from devices import Device
from torch import Tensor
from tritoncomm_kernels import id_sort, torch_path
from tritoncomm_kernels.geometry import MAX_IDS

MODULES = [kernels, torch_path]


def by_owner(ids: list[list[int]], per: int, owners: int, owner: int) -> tuple[list[int], list[list[int]], Any]:
    """Sorted tokens, the places of each token in the order of its owners, and the counts."""
    rows = [sorted({x // per for x in row if 0 <= x < per * owners}) for row in ids]
    order = [w for w in range(owners) if w != owner] + [owner]
    places, lines = {}, []
    for w in order:
        for t, row in enumerate(rows):
            if w in row:
                places[t, w] = len(lines)
                lines.append(t)
    wrong = sum(not 0 <= x < per * owners for row in ids for x in row)
    pairs = [sum(x // per == w for row in ids for x in row) for w in range(owners)]
    counts = [(len([1 for row in rows if w in row]), wrong) for w in range(owners)]
    counts = [(number, pairs[w] - number, wrong) for w, (number, wrong) in enumerate(counts)]
    return lines, [[places[t, w] for w in row] for t, row in enumerate(rows)], counts


def by_bucket(ids: list[list[int]], first: int, buckets: int, total: int, alignment: int) -> tuple[Any, Any, Any]:
    """Counts, pairs, and the place of each pair."""
    k, pairs, counts, places = len(ids[0]) if ids else 1, [-1] * total, [], {}
    start = 0
    for b in range(buckets):
        of_bucket = [t * k + s for t, row in enumerate(ids) for s, x in enumerate(row) if x == first + b]
        for i, pair in enumerate(of_bucket):
            pairs[start + i] = pair
            places[pair] = start + i
        counts.append(-(-len(of_bucket) // alignment) * alignment)
        start += counts[-1]
    return counts, pairs, places


def drawn(draw: random.Random, tokens: int, k: int, number: int, wrong: bool = False) -> list[list[int]]:
    kind = draw.choice(["even", "few", "one"])
    low, high = (0, number) if kind == "even" else (0, max(number // 3, 1)) if kind == "few" else (number - 1, number)
    ids = [[draw.randrange(low, high) for _ in range(k)] for _ in range(tokens)]
    if wrong and tokens:
        ids[-1][0], ids[0][-1] = -1 - draw.randrange(3), number + draw.randrange(2**20)
    return ids


def laid_out(ids: list[list[int]], k: int, dtype: torch.dtype, device: torch.device, gap: int) -> Tensor:
    """The ids in rows that are ``gap`` elements apart."""
    x = torch.full((len(ids), k + gap), -77, dtype=dtype, device=device)
    x[:, :k] = torch.tensor(ids, dtype=dtype, device=device).view(len(ids), k)
    return x[:, :k]


SHAPES = [(0, 2, 4, 2), (1, 1, 1, 2), (5, 3, 3, 4), (40, 8, 4, 8), (70, 2, 300, 1), (9, 64, 5, 7), (33, 6, 130, 3)]


@pytest.mark.parametrize("module", MODULES, ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sorts_are_pythons(
    device: Device,
    module: Any,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of tokens, ids of each, owners or buckets, and ids of an owner; also of ids that nobody has."""
    tokens, k, owners, per = shape
    if tokens >= 40:  # as many blocks at a time make several steps
        monkeypatch.setattr(id_sort, "_ROWS", 2)
        monkeypatch.setattr(id_sort, "_launches", id_sort._launches.__wrapped__)
    draw = random.Random(str(shape))
    for wrong in (False, True):
        ids, owner = drawn(draw, tokens, k, owners * per, wrong), draw.randrange(owners)
        counts = torch.full((owners, 4), -5, dtype=torch.int64, device=device.at)
        x = laid_out(ids, k, dtype, device.at, draw.choice([0, 3]))
        sort = module.sort_by_owner(x, per, owner, counts)
        lines, places, wanted = by_owner(ids, per, owners, owner)
        assert [(a, b, c + d) for a, b, c, d in counts.tolist()] == wanted
        assert sort.lines[: len(lines)].tolist() == lines or wrong
        if wrong:
            continue  # nothing is sent then
        assert sort.index.shape == (tokens, min(k, owners))
        assert [[x for x in row if 0 <= x < len(lines)] for row in sort.index.tolist()] == places
    ids = drawn(draw, tokens, k, owners * per)
    for first, buckets in ((0, owners * per), (owners // 2 * per, per)):
        for alignment in (1, 8):
            pairs = sum(first <= x < first + buckets for row in ids for x in row)
            total = (pairs + min(buckets, pairs) * (alignment - 1)) // alignment * alignment
            x = laid_out(ids, k, dtype, device.at, 1)
            sort = module.sort_by_bucket(x, first, buckets, owners * per, total, alignment)
            counts, order, places = by_bucket(ids, first, buckets, total, alignment)
            assert sort.counts.tolist() == counts
            assert sort.pairs.tolist() == order
            assert sort.lines.tolist() == [pair // k for pair in order]
            wanted = {pair: place for pair, place in enumerate(sort.index.view(-1).tolist()) if 0 <= place < total}
            assert wanted == places


@pytest.mark.parametrize("module", MODULES, ids=["triton", "torch"])
def test_bad_ids_are_refused(module: Any) -> None:
    ids, counts = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    bad: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "contiguous tokens", lambda: module.sort_by_owner(ids.t().contiguous().t(), 1, 0, counts)),
        (ValueError, "contiguous tokens", lambda: module.sort_by_owner(ids[0], 1, 0, counts)),
        (ValueError, "contiguous tokens", lambda: module.sort_by_bucket(ids[:, :0], 0, 2, 2, 0)),
        (TypeError, "int64 or int32", lambda: module.sort_by_owner(ids.short(), 1, 0, counts)),
        (TypeError, "int64 or int32", lambda: module.sort_by_bucket(ids.float(), 0, 2, 2, 6)),
        (TypeError, "must be int64", lambda: module.sort_by_owner(ids, 1, 0, counts.int())),
        (ValueError, "owners, 4", lambda: module.sort_by_owner(ids, 1, 0, counts[:, :3])),
    ]
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()


def test_more_slots_than_a_program_compares(device: Device) -> None:
    ids = torch.zeros(2, MAX_IDS + 1, dtype=torch.int32, device=device.at)
    with pytest.raises(ValueError, match="above 64"):
        kernels.sort_by_bucket(ids, 0, 2, 2, ids.numel())
    assert torch_path.sort_by_bucket(ids, 0, 2, 2, ids.numel()).counts.tolist() == [ids.numel(), 0]
