"""Slices of rows of a noted tensor have the notes of their rows; every other view is rejected, never taken wrongly."""

import gc
import random
import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError
from tritoncomm.integrations.transformers.batch_notes import BatchNotes, notes_of, write_notes

VIEWS: list[Callable[[Tensor, random.Random], Tensor]] = [
    lambda x, draw: x[draw.randint(0, x.shape[0]) :],
    lambda x, draw: x[: draw.randint(0, x.shape[0])],
    lambda x, draw: x[draw.randrange(x.shape[0])],
    lambda x, draw: x[:: draw.randint(1, 3)],
    lambda x, draw: x[..., draw.randint(0, 1) :],
    lambda x, draw: x[..., : draw.randint(1, x.shape[-1])],
    lambda x, draw: x[..., :: draw.randint(1, 2)],
    lambda x, draw: x.unsqueeze(draw.randint(0, x.dim())),
    lambda x, draw: x.transpose(draw.randrange(x.dim()), draw.randrange(x.dim())),
    lambda x, draw: x.narrow(max(0, x.dim() - 2), 0, draw.randint(0, x.shape[max(0, x.dim() - 2)])),
    lambda x, draw: x[None].expand(draw.randint(1, 3), *x.shape),
    lambda x, draw: x.expand(draw.randint(1, 3), *x.shape[1:]) if x.shape[0] == 1 else x,
    lambda x, draw: x.flatten(),
    lambda x, draw: x.squeeze(),
    lambda x, draw: x.detach(),
]


def noted_tensor(draw: random.Random) -> tuple[Tensor, BatchNotes]:
    """A tensor of other numbers everywhere, and the notes of its rows, which have the rows' first numbers."""
    rows, positions = draw.randint(1, 4), draw.randint(1, 4)
    planes = draw.choice([(), (), (3,), (4,)])
    x = torch.arange(100, 100 + torch.Size((*planes, rows, positions)).numel()).view(*planes, rows, positions)
    marks = (x if x.dim() == 2 else x[0])[:, 0]
    notes = BatchNotes(shape=(rows, positions), documents=[[0, int(mark)] for mark in marks], largest=marks.clone())
    notes = notes.complete((x if x.dim() == 2 else x[0]).clone(), (x if x.dim() == 2 else x[0]).clone())
    write_notes(x, notes)
    return x, notes


@pytest.mark.parametrize("seed", range(8))
def test_views(seed: int) -> None:
    """What is accepted are whole rows of one order in each of the first dims, by their numbers."""
    draw = random.Random(seed)
    accepted = rejected = 0
    for _ in range(300):
        x, _ = noted_tensor(draw)
        planes = x.reshape(-1, *x.shape[-2:])
        firsts = planes[0, :, 0].tolist()
        view = x
        for _ in range(draw.randint(0, 3)):
            if view.dim() and view.numel():
                view = draw.choice(VIEWS)(view, draw)
        try:
            found = notes_of(view, "test")
        except ArgumentError:
            whole_rows = view.dim() and view.shape[-1] == x.shape[-1] and view.numel()
            flat = view.reshape(-1, x.shape[-1]).tolist() if whole_rows else []
            rejected += 1
            if view.dim() <= 2:  # rows of one plane in order are never rejected
                steps = {b[0] - a[0] for a, b in pairwise(flat)}
                in_plane = any(all(row in plane.tolist() for row in flat) for plane in planes)
                assert not flat or not in_plane or len(steps) > 1 or min(steps, default=0) < 0, (view, x)
            continue
        if found is None:
            assert view.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            continue
        accepted += 1
        assert found.shape is not None
        rows, positions = found.shape
        if view.numel():
            assert (rows, positions) == (view.shape[-2] if view.dim() > 1 else 1, view.shape[-1])
        marks = [int(mark) for mark in found.largest] if found.largest is not None else []
        assert len(marks) == rows
        assert marks == [starts[1] for starts in found.documents or []]
        assert found.layer_mask is not None
        assert found.layer_mask[:, 0].tolist() == marks
        assert found.counted is not None
        assert found.counted[:, 0].tolist() == marks
        own, of_counted = notes_of(found.layer_mask, "mask"), notes_of(found.counted, "positions")
        assert own is not None
        assert of_counted is not None
        assert (own.documents, own.layer_mask, own.counted) == (found.documents, None, None)
        assert (of_counted.layer_mask is found.layer_mask, of_counted.counted) == (True, None)
        for part in view.reshape(-1, rows, positions) if view.numel() else ():
            index = [next(k for k, plane in enumerate(planes) if row in plane.tolist()) for row in part.tolist()]
            assert len(set(index)) == 1
            assert [planes[index[0]].tolist().index(row) for row in part.tolist()] == [firsts.index(m) for m in marks]
    assert accepted > 60
    assert rejected > 60


def test_views_of_other_tensors_have_no_notes() -> None:
    x = noted_tensor(random.Random(0))[0]
    assert notes_of(None, "test") is notes_of(x.clone(), "test") is notes_of(x[torch.tensor([0])], "test") is None
    assert notes_of(torch.arange(4), "test") is None


def test_rows_are_selected_once_and_one_document_is_none() -> None:
    x = torch.arange(12).view(3, 4)
    write_notes(x, BatchNotes(shape=(3, 4), documents=[[0, 2], [0], [0]], padded=1, group="g"))
    first = notes_of(x[:2], "test")
    assert first is notes_of(x[:2].view(2, 4), "test")
    assert first is not None
    assert (first.documents, first.padded, first.group) == ([[0, 2], [0]], 1, "g")
    alone = notes_of(x[1:], "test")
    assert alone is not None
    assert alone.documents is None


def test_notes_are_freed_with_their_batch() -> None:
    """Without a collection of cycles: memory of batches that are gone would stay until then."""
    x, notes = noted_tensor(random.Random(1))
    found = notes_of(x[:1], "test")
    assert found is not None
    tensors = [notes.layer_mask, notes.counted, found.layer_mask, found.counted]
    kept = [weakref.ref(tensor.untyped_storage()) for tensor in tensors if tensor is not None]
    gc.disable()
    try:
        del x, notes, found, tensors
        assert [ref() for ref in kept] == [None] * 4
    finally:
        gc.enable()
