"""Pipeline schedules of our own against one process."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from communicators import run_methods
from pool import Pool
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm.core.validation import PerGroup
from tritoncomm.errors import ShapeError
from tritoncomm.p2p import P2PCommunicator, neighbours, transport
from tritoncomm.p2p.schedules import interleaved, one_forward_one_backward

HIDDEN = 4


def parts(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(count)]


def batch(microbatch: int, varying: bool) -> Tensor:
    rows = 1 + microbatch % 3 if varying else 3
    return torch.randn(rows, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(microbatch))


def one_process(count: int, microbatches: int, varying: bool) -> tuple[list[nn.Module], list[Tensor]]:
    layers, losses = parts(count), []
    for microbatch in range(microbatches):
        x = batch(microbatch, varying)
        for layer in layers:
            x = layer(x).tanh()
        loss = x.square().sum()
        loss.backward()
        losses.append(loss.detach())
    return layers, losses


def chunk(layers: list[nn.Module], part: int, varying: bool):
    def call(x: Tensor | None, microbatch: int) -> Tensor:
        y = layers[part](batch(microbatch, varying) if x is None else x).tanh()
        assert (x is None) == (part == 0)
        return y.square().sum() if part == len(layers) - 1 else y

    return call


def run_schedule(group: ProcessGroup, chunks: int, microbatches: int, batched: bool, varying: bool) -> None:
    stages, stage = group.size(), group.rank()
    layers = parts(stages * chunks)
    config = SimpleNamespace(pipeline_dtype=torch.float64, batch_p2p_comm=batched, variable_seq_lengths=varying)
    communicator = P2PCommunicator(group, config)
    mine = [chunk(layers, c * stages + stage, varying) for c in range(chunks)]
    shape = (3, HIDDEN)
    if chunks == 1:
        losses = one_forward_one_backward(mine[0], microbatches, communicator, shape)
    else:
        losses = interleaved(mine, microbatches, communicator, shape)
    reference, reference_losses = one_process(stages * chunks, microbatches, varying)
    assert [loss.item() for loss in losses] == ([x.item() for x in reference_losses] if stage == stages - 1 else [])
    for c in range(chunks):
        for ours, theirs in zip(
            layers[c * stages + stage].parameters(), reference[c * stages + stage].parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("varying", [False, True], ids=["fixed", "varying"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "individual"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4, (1, 3)], ids=str)
def test_losses_and_gradients_are_those_of_one_process(
    pool: Pool, world: int | tuple[int, ...], chunks: int, batched: bool, varying: bool
) -> None:
    stages = world if isinstance(world, int) else len(world)
    for microbatches in (stages, 2 * stages, 8):
        pool.run(run_schedule, chunks, microbatches, batched, varying, world=world)


@contextmanager
def through_the_host() -> Iterator[list[Tensor]]:
    """Send as Gloo sends CUDA tensors, through host memory on both sides; yields those copies."""
    copies: list[Tensor] = []
    direction, on_host = neighbours.Neighbours._direction, transport._on_host

    def recorded(x: Tensor, is_send: bool) -> Tensor:
        copies.append(on_host(x, is_send))
        assert copies[-1].data_ptr() != x.data_ptr()
        assert not copies[-1].requires_grad
        return copies[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "_shared", PerGroup())  # no neighbours from before
        patch.setattr(
            neighbours.Neighbours, "_direction", lambda *args: direction(*args)._replace(modes=("host", "host"))
        )
        patch.setattr(transport, "_on_host", recorded)
        yield copies


@pytest.mark.ranks(2, 4)
def test_a_schedule_whose_tensors_go_through_the_host(group: ProcessGroup) -> None:
    with through_the_host() as copies:
        for chunks, batched, varying in itertools.product((1, 2), (False, True), (False, True)):
            copies.clear()
            run_schedule(group, chunks, 4, batched, varying)
            assert len(copies) >= 4 * chunks, "messages, and headers where lengths vary"


def test_every_method_through_the_host(group: ProcessGroup) -> None:
    with through_the_host() as copies:
        for mode in ("individual", "varying"):
            run_methods(group, mode, ("float32", "complex64", "bool"))
    assert copies


def test_microbatches_that_do_not_divide_are_refused(group: ProcessGroup) -> None:
    communicator = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float64))
    with pytest.raises(ShapeError, match="3 micro-batches do not divide over 2 stages"):
        interleaved([], 3, communicator, (1,))
