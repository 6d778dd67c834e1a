"""Documents of a batch by their length: every document once in a group, and back, with exact gradients."""

import random
from itertools import accumulate, pairwise

import pytest
import torch

from tritoncomm.core.documents import group_documents


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("batch", "positions"), [(0, 1), (1, 0), (0, 2), (2, 0)])
def test_documents_of_drawn_rows(batch: int, positions: int, seed: int) -> None:
    draw = random.Random(seed)
    rows, length = draw.randint(1, 3), draw.randint(6, 20)
    starts = [sorted({0, *draw.sample(range(length), draw.randint(0, 4))}) for _ in range(draw.choice([1, rows]))]
    stops = tuple([(*of_row, length) for of_row in starts])
    x = torch.arange(rows * length * 3.0).view(rows, length, 3)
    x = torch.movedim(x, (0, 1), (batch, positions)).contiguous().requires_grad_()
    groups = group_documents(stops, rows, x.device)
    parts = groups.split(x, batch, positions)
    found = [document for part in parts for document in part.movedim((batch, positions), (0, 1)).tolist()]
    plain = x.movedim((batch, positions), (0, 1))
    every = stops if len(stops) == rows else stops * rows
    expected = [plain[row, a:b].tolist() for row, of_row in enumerate(every) for a, b in pairwise(of_row)]
    assert sorted(found) == sorted(expected)
    assert len(parts) == len({len(document) for document in expected})
    weights = torch.arange(x.numel()).view_as(x)
    # A factor of its own for each element: two wrong orders in backward would undo each other.
    joined = groups.join([part * part for part in parts], batch, positions)
    (joined * weights).sum().backward()
    assert torch.equal(joined, x * x)
    assert torch.equal(x.grad, 2.0 * x * weights)


def test_documents_in_order_are_not_copied() -> None:
    x = torch.zeros(2, 12, 3)
    for lengths in ([4, 4, 4], [12], [3, 3, 6]):
        stops = (tuple(accumulate(lengths, initial=0)),)
        groups = group_documents(stops, 1, x.device)
        assert groups.order is None
        (first, *_) = groups.split(x[:1], 0, 1)
        assert first.data_ptr() == x.data_ptr()
    assert group_documents(((0, 3, 9, 12),), 1, x.device).order is not None
    again = group_documents(((0, 3, 9, 12),), 1, x.device)
    assert again is group_documents(((0, 3, 9, 12),), 1, x.device), "layers of a batch share the index"
