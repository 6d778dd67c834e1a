"""The simulator of streams: every kind of problem in a program of some lines, beside one that is right."""

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from stream_order.nccl import LEGACY, NCCL2, Rules
from stream_order.simulator import DEVICE, Simulator

Program = Callable[[Simulator, bool], None]
ASYNCHRONOUS = SimpleNamespace(asyncOp=True)


@pytest.fixture(scope="module", autouse=True)
def _only_young_objects() -> Iterator[None]:
    """The simulator collects garbage after every program; objects that are there already are left out of it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def race(gpu: Simulator, is_right: bool) -> None:
    x, other = gpu.tensor(8), gpu.new_stream()
    if is_right:
        other.wait_stream(gpu.current)
    with gpu.on(other):
        (x + 1).add_(1)
    gpu.current.wait_stream(other)


def race_of_writes_after_reads(gpu: Simulator, is_right: bool) -> None:
    x, other = gpu.tensor(8), gpu.new_stream()
    other.wait_stream(gpu.current)
    with gpu.on(other):
        x.sum()
    if is_right:
        gpu.current.wait_stream(other)
    x.zero_()
    gpu.synchronize()


def race_of_the_host(gpu: Simulator, is_right: bool) -> None:
    source, x, event = torch.zeros(8, pin_memory=True), gpu.tensor(8), torch.cuda.Event()
    x.copy_(source, non_blocking=True)
    event.record()
    if is_right:
        event.synchronize()
    source.fill_(1)


def race_of_the_host_past_torch(gpu: Simulator, is_right: bool) -> None:
    source, x = torch.zeros(8, pin_memory=True), gpu.tensor(8)
    x.copy_(source, non_blocking=True)
    if is_right:
        gpu.current.synchronize()
    source.numpy()[:] = 1
    gpu.use(x)


def race_by_the_bytes(gpu: Simulator, is_right: bool) -> None:
    x, other = gpu.tensor(8), gpu.new_stream()
    other.wait_stream(gpu.current)
    x[:4].zero_()
    with gpu.on(other):
        x[4 if is_right else 3 :].zero_()
    gpu.synchronize()


def race_with_the_tensor_before(gpu: Simulator, is_right: bool) -> None:
    """Memory of a stream's pool may still be used there when it is given out."""
    x, other = gpu.tensor(8), gpu.new_stream()
    del x
    x = torch.empty(8, device=DEVICE)
    if is_right:
        other.wait_stream(gpu.current)
    with gpu.on(other):
        x.zero_()
    gpu.synchronize()


def reuse(gpu: Simulator, is_right: bool) -> None:
    x, other = gpu.tensor(8), gpu.new_stream()
    other.wait_stream(gpu.current)
    with gpu.on(other):
        gpu.use(x)
    if is_right:
        x.record_stream(other)
    del x


def reuse_without_an_event(gpu: Simulator, is_right: bool) -> None:
    """Memory that the host has seen idle may be used on any stream."""
    x, other = gpu.tensor(8), gpu.new_stream()
    other.wait_stream(gpu.current)
    with gpu.on(other):
        gpu.use(x)
    if is_right:
        other.synchronize()
    del x


def reuse_of_an_output(gpu: Simulator, is_right: bool) -> None:
    x, y = gpu.tensor(8), gpu.tensor(8)
    work = gpu.communicators.collective(1, ASYNCHRONOUS, [x], [y], "sum")
    assert work is not None
    if is_right:
        work.wait()
    del x, y, work


def kept_table(gpu: Simulator, is_right: bool) -> None:
    table, out, stream = gpu.tensor(8), gpu.tensor(8), gpu.new_stream()
    with gpu.capture(stream):
        gpu.operate([], [out], "a kernel", tables=[table])
    if not is_right:
        del table
    gpu.sweep()


def changed_table(gpu: Simulator, is_right: bool) -> None:
    table, out, stream = torch.zeros(8, device=DEVICE), gpu.tensor(8), gpu.new_stream()
    with gpu.capture(stream) as graph:
        gpu.operate([], [out], "a kernel", tables=[table])
    if not is_right:
        table.fill_(1)
    stream.wait_stream(gpu.current)
    with gpu.on(stream):
        graph.replay()
    gpu.synchronize()


def changed_source(gpu: Simulator, is_right: bool) -> None:
    """A copy that is a node of a graph reads pinned memory at every replay."""
    source, table, out = torch.zeros(8, pin_memory=True), gpu.tensor(8), gpu.tensor(8)
    stream = gpu.new_stream()
    with gpu.capture(stream) as graph:
        table.copy_(source, non_blocking=True)
        gpu.operate([], [out], "a kernel", tables=[table])
    table.zero_() if is_right else source.fill_(1)
    stream.wait_stream(gpu.current)
    with gpu.on(stream):
        graph.replay()
    gpu.synchronize()


def memory_of_a_graph(gpu: Simulator, is_right: bool) -> None:
    with gpu.capture(gpu.new_stream()) as graph:
        table = torch.empty(8, device=DEVICE)
    if is_right:
        del table
    gpu.check_pool(graph)


def memory_of_a_warm_up(gpu: Simulator, is_right: bool) -> None:
    with gpu.private_pool() as pool:
        table = gpu.tensor(8)
    if is_right:
        del table
    gpu.check_pool(pool)


def wait_in_a_capture(gpu: Simulator, is_right: bool) -> None:
    x = gpu.tensor(8)
    with gpu.capture(gpu.new_stream()):
        y = x + 1
        if not is_right:
            y[0].item()


def list_in_a_capture(gpu: Simulator, is_right: bool) -> None:
    x = gpu.tensor(8)
    with gpu.capture(gpu.new_stream()):
        assert is_right or x.tolist()


def query_in_a_capture(gpu: Simulator, is_right: bool) -> None:
    event = torch.cuda.Event()
    event.record()
    with gpu.capture(gpu.new_stream()):
        assert is_right or not event.query()


def event_in_a_capture(gpu: Simulator, is_right: bool) -> None:
    with gpu.capture(gpu.new_stream()):
        if not is_right:
            torch.cuda.Event().record()


def blocking_copy_in_a_capture(gpu: Simulator, is_right: bool) -> None:
    source, x = torch.zeros(8), gpu.tensor(8)
    with gpu.capture(gpu.new_stream()):
        x.copy_(source, non_blocking=is_right)


def source_of_a_graph(gpu: Simulator, is_right: bool) -> None:
    source, x = torch.zeros(8), gpu.tensor(8)
    with gpu.capture(gpu.new_stream()):
        x.copy_(source, non_blocking=True)
    if not is_right:
        del source
    gpu.sweep()


def pinned_in_a_capture(gpu: Simulator, is_right: bool) -> None:
    with gpu.capture(gpu.new_stream()):
        torch.zeros(8, pin_memory=not is_right)


def eager_event(gpu: Simulator, is_right: bool) -> None:
    event = torch.cuda.Event()
    event.record()
    with gpu.capture(gpu.new_stream()):
        if not is_right:
            gpu.current.wait_event(event)


def fork(gpu: Simulator, is_right: bool) -> None:
    x, side = gpu.tensor(8), gpu.new_stream()
    with gpu.capture(gpu.new_stream()):
        side.wait_stream(gpu.current)
        with gpu.on(side):
            x.zero_()
        if is_right:
            gpu.current.wait_stream(side)


def race_in_a_capture(gpu: Simulator, is_right: bool) -> None:
    x, side = gpu.tensor(8), gpu.new_stream()
    with gpu.capture(gpu.new_stream()):
        side.wait_stream(gpu.current)
        x.zero_()
        if is_right:
            side.wait_stream(gpu.current)
        with gpu.on(side):
            x.zero_()
        gpu.current.wait_stream(side)


def replay_beside_a_reader(gpu: Simulator, is_right: bool) -> None:
    x, stream, other = gpu.tensor(8), gpu.new_stream(), gpu.new_stream()
    with gpu.capture(stream) as graph:
        y = x + 1
    with gpu.on(stream):
        graph.replay()
    other.wait_stream(stream)
    with gpu.on(other):
        gpu.use(y)
    if is_right:
        stream.wait_stream(other)
    with gpu.on(stream):
        graph.replay()
    gpu.synchronize()


PROGRAMS: dict[str, list[Program]] = {
    "RACE": [
        race, race_of_writes_after_reads, race_of_the_host, race_of_the_host_past_torch, race_by_the_bytes,
        race_with_the_tensor_before, race_in_a_capture, replay_beside_a_reader,
    ],
    "REUSE": [reuse, reuse_without_an_event, reuse_of_an_output],
    "GRAPH": [kept_table, source_of_a_graph],
    "CHANGED": [changed_table, changed_source],
    "KEPT": [memory_of_a_graph, memory_of_a_warm_up],
    "SYNC": [wait_in_a_capture, list_in_a_capture, query_in_a_capture, blocking_copy_in_a_capture],
    "EVENT": [event_in_a_capture],
    "PINNED": [pinned_in_a_capture],
    "ISOLATION": [eager_event],
    "UNJOINED": [fork],
}  # fmt: skip
CASES = [(kind, program) for kind, programs in PROGRAMS.items() for program in programs]


@pytest.mark.parametrize(("kind", "program"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_each_kind_of_problem(kind: str, program: Program) -> None:
    with Simulator(NCCL2) as gpu:
        program(gpu, True)
        assert gpu.finish() == []
    with Simulator(NCCL2) as gpu:
        program(gpu, False)
        assert {problem.partition(":")[0] for problem in gpu.finish()} == {kind}


def dropped_output(rules: Rules) -> list[str]:
    with Simulator(rules) as gpu:
        reuse_of_an_output(gpu, False)
        return gpu.finish()


def test_what_a_backend_keeps() -> None:
    """Up to torch 2.14 the outputs of a work that nobody waits for, from 2.15 on its inputs only."""
    assert dropped_output(LEGACY) == []
    assert dropped_output(NCCL2)


@pytest.mark.parametrize("rules", [LEGACY, NCCL2], ids=lambda each: each.name)
def test_streams_of_transfers(rules: Rules) -> None:
    """A pair of ranks has a stream of its own, or all transfers of a group are in one order."""
    with Simulator(rules) as gpu:
        x, y = gpu.tensor(8), gpu.tensor(8)
        for peer in (0, 2):
            gpu.communicators.single(1, (1, peer), [], [x])  # both write the same memory
        gpu.synchronize()
        assert bool(gpu.finish()) is rules.pairs
        del x, y


def test_nothing_of_a_gpu_is_left() -> None:
    before = torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream, torch.empty, torch.Tensor.to
    with Simulator(LEGACY) as gpu:
        x = torch.empty(3, device="cuda")
        assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (DEVICE, True, False, 0)
        assert (torch.empty(3).is_cuda, x.cpu().is_cuda, x.new_empty(3).is_cuda) == (False, False, True)
        assert torch.empty(3).to(DEVICE, torch.float64).dtype is torch.float64
        assert gpu.operations
    after = torch.cuda.Stream, torch.cuda.Event, torch.cuda.current_stream, torch.empty, torch.Tensor.to
    assert after == before
    assert (x.is_cuda, x.device.type, x.get_device()) == (False, "cpu", -1)
