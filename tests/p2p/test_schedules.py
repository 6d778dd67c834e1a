"""Pipeline schedules of our own against one process."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from communicators import run_methods
from pool import Pool
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm.core.validation import PerGroup
from tritoncomm.errors import ArgumentError, ShapeError
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


CHUNKS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, int], Tensor]] = {
    "plain": lambda layer, x, microbatch: layer(x),
    "without its input, once": lambda layer, x, microbatch: layer(torch.ones_like(x) if microbatch == 1 else x),
    "without its input": lambda layer, x, microbatch: layer(torch.ones_like(x)),
    "detached": lambda layer, x, microbatch: layer(x).detach(),
    "detached, once": lambda layer, x, microbatch: layer(x).detach() if microbatch == 2 else layer(x),
    "returns its input": lambda layer, x, microbatch: x,
    "returns its input, detached": lambda layer, x, microbatch: x.detach(),
    "returns a view": lambda layer, x, microbatch: x.view(-1).view_as(x),
}
DTYPES = [  # of the pipeline, of the parameters, of autocast
    (torch.float64, torch.float64, None),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.float64, None),
    (torch.bfloat16, torch.float32, None),
    (torch.float16, torch.float32, torch.bfloat16),
]


@dataclass(frozen=True)
class Variant:
    """A model of as many parts as a pipeline has chunks, one of which is special.

    Attributes:
        kind: of ``CHUNKS``: the special part.
        special: number of that part.
        frozen: numbers of the parts whose parameters are frozen.
        dtypes: one of ``DTYPES``.
        varying: whether micro-batches have different lengths.
        several: whether two tensors go from part to part, of which the second passes every part.
    """

    kind: str = "plain"
    special: int = 0
    frozen: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None] = DTYPES[0]
    varying: bool = False
    several: bool = False

    def parts(self, count: int) -> list[nn.Module]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(HIDDEN, HIDDEN, dtype=self.dtypes[1]) for _ in range(count)]
        for part in self.frozen:
            layers[part].requires_grad_(False)
        return layers

    def run(self, layers: list[nn.Module], part: int, x: Any, microbatch: int) -> Any:
        """Run a part on what it receives; the input of the model is the second tensor, too."""
        low = self.dtypes[2]
        if x is None:
            first = batch(microbatch, self.varying).to(self.dtypes[1])
            x = (first, first * 0.5) if self.several else first
        h, passed = x if self.several else (x, None)
        h = h.to(self.dtypes[1])
        with torch.autocast("cpu", low, enabled=low is not None):
            h = CHUNKS[self.kind if part == self.special else "plain"](lambda x: layers[part](x).tanh(), h, microbatch)
        if passed is not None:
            h = h + passed
        if part == len(layers) - 1:
            return h.float().square().sum()
        return h if passed is None else [h, passed]

    def one_process(self, count: int, microbatches: int) -> tuple[list[nn.Module], list[float]]:
        layers, losses = self.parts(count), []
        for microbatch in range(microbatches):
            x: Any = None
            for part in range(count):
                x = self.run(layers, part, x, microbatch)
                if part < count - 1:  # as it would arrive
                    x = [each.to(self.dtypes[0]) for each in x] if self.several else x.to(self.dtypes[0])
            if x.requires_grad:
                x.backward()
            losses.append(x.item())
        return layers, losses

    def compare(self, group: ProcessGroup, chunks: int, microbatches: int, batched: bool = True) -> None:
        stages, stage = group.size(), group.rank()
        count = stages * chunks
        layers = self.parts(count)
        config = SimpleNamespace(
            pipeline_dtype=self.dtypes[0], batch_p2p_comm=batched, variable_seq_lengths=self.varying
        )
        communicator = P2PCommunicator(group, config)
        numbers = [c * stages + stage for c in range(chunks)]
        mine = [partial(self.run, layers, part) for part in numbers]
        shape: Any = [(3, HIDDEN), (3, HIDDEN)] if self.several else (3, HIDDEN)
        if chunks == 1:
            losses = one_forward_one_backward(mine[0], microbatches, communicator, shape)
        else:
            losses = interleaved(mine, microbatches, communicator, shape)
        reference, wanted = self.one_process(count, microbatches)
        assert [loss.item() for loss in losses] == (wanted if stage == stages - 1 else []), self
        for part in numbers:
            for ours, theirs in zip(layers[part].parameters(), reference[part].parameters(), strict=True):
                assert ours.grad is None or ours.requires_grad, self
                none = torch.zeros_like(theirs)  # a pipeline sends zeros where one process has no gradient
                found, expected = (none if x.grad is None else x.grad for x in (ours, theirs))
                tolerance = {torch.float64: 1e-12}.get(self.dtypes[0], 1e-5)
                torch.testing.assert_close(
                    found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{self}: {m}"
                )


def variants(count: int) -> Iterator[Variant]:
    """Every special part at every place, frozen parts, dtypes, and two tensors between parts."""
    for varying in (False, True):
        for several in (False, True):
            for kind in CHUNKS:
                for special in sorted({0, count // 2, count - 1}):
                    yield Variant(kind, special, varying=varying, several=several)
        for frozen in {(0,), tuple(range(count // 2)), (count // 2,), (count - 1,), tuple(range(count))}:
            yield Variant(frozen=frozen, varying=varying)
            yield Variant("without its input, once", count - 1, frozen, varying=varying)
        for dtypes in DTYPES:
            yield Variant(dtypes=dtypes, varying=varying)
            yield Variant("without its input", count - 1, (0,), dtypes, varying)
            yield Variant(dtypes=dtypes, varying=varying, several=True)


def every_variant(group: ProcessGroup, chunks: int, every: bool) -> None:
    stages = group.size()
    step = 1 if every else max(1, stages * chunks - 1)  # a variant of more parts takes longer
    for place, variant in enumerate(itertools.islice(variants(stages * chunks), 0, None, step)):
        variant.compare(group, chunks, stages * (1 + place % 2), batched=bool(place // 2 % 2))


@pytest.mark.parametrize(
    ("world", "chunks", "every"),
    [
        *((world, chunks, False) for world, chunks in ((2, 1), (3, 2), (4, 1))),
        *(
            pytest.param(world, chunks, True, marks=pytest.mark.slow)
            for world, chunks in itertools.product((1, 2, 3, 4), (1, 2))
        ),
    ],
)
def test_missing_gradients_and_other_dtypes_are_those_of_one_process(
    pool: Pool, world: int, chunks: int, every: bool
) -> None:
    pool.run(every_variant, chunks, every, world=world, timeout=115)


def refused_outputs(group: ProcessGroup, chunks: int) -> None:
    """What a chunk may not return is refused on its rank, before it is sent."""
    config = SimpleNamespace(pipeline_dtype=torch.float32)
    communicator, x = P2PCommunicator(group, config), torch.ones(3, HIDDEN)
    shapes = [(3, HIDDEN)] * 2
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ((3, HIDDEN), None, ArgumentError, "micro-batch 0: the chunk returned NoneType in place of a tensor"),
        (shapes, [x, None], ArgumentError, "micro-batch 0: the chunk returned NoneType in place of a tensor"),
        (shapes, x, ArgumentError, "the chunk returned 1 tensors for 2 shapes"),
        (shapes, (x, x, x), ArgumentError, "the chunk returned 3 tensors for 2 shapes"),
        ((3, HIDDEN), [x], ArgumentError, "the chunk returned list in place of a tensor"),
        ((3, HIDDEN), x[:2], ShapeError, r"the chunk returned shape \[2, 4\], and the next stage receives \[3, 4\]"),
        (shapes, (x, x.view(-1)), ShapeError, r"the chunk returned shape \[12\], and the next stage receives"),
        ((3, HIDDEN), x.int(), ArgumentError, r"a tensor \[3, 4\] int32 for a receiver of float32"),
    ]
    for shape, output, error, words in cases:
        if group.rank() == 0:
            returns = partial(lambda output, x, microbatch: output, output)
            run = partial(interleaved, [returns] * chunks) if chunks > 1 else partial(one_forward_one_backward, returns)
            with pytest.raises(error, match=words):
                run(2, communicator, shape)
    if group.size() == 1:
        with pytest.raises(ArgumentError, match="the last chunk returns a loss, not NoneType"):
            one_forward_one_backward(lambda x, i: None, 1, communicator, (3,))


@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_of_a_chunk_are_checked(pool: Pool, chunks: int) -> None:
    pool.run(refused_outputs, chunks, world=2)
    pool.run(refused_outputs, 2, world=1)


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
