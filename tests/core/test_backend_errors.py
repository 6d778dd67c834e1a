"""Which errors of a group are a failed peer: those of the backend; a device's and the program's stay as they are."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritoncomm import PeerError, collective, mappings, ulysses, variables
from tritoncomm.core import backend
from tritoncomm.debug.flight import flight
from tritoncomm.p2p import P2PCommunicator, message, transport
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.reshard import Layout, reshard

T = torch.ones
ASSERT = "CUDA error: device-side assert triggered"
METHODS = (
    "allgather", "allreduce", "alltoall_base", "broadcast", "reduce", "reduce_scatter", "send", "recv",
    "all_gather_single", "reduce_scatter_single", "all_to_all_single", "_allgather_base", "_reduce_scatter_base",
)  # fmt: skip


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """Two ranks that move nothing, seen from the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()


class FailingWork:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def wait(self) -> None:
        raise self.error

    def is_completed(self) -> bool:
        return True


@contextmanager
def failing(error: BaseException, in_wait: bool) -> Iterator[None]:
    """Every method of process groups raises ``error``, or returns a work that does."""

    def fail(*_: Any, **__: Any) -> FailingWork:
        if in_wait:
            return FailingWork(error)
        raise error

    with ExitStack() as stack:
        for name in METHODS:
            if hasattr(ProcessGroup, name):
                stack.enter_context(mock.patch.object(ProcessGroup, name, fail))
        yield


def waited(result: Any) -> None:
    if result is not None:
        result.wait()


def _batched(group: ProcessGroup) -> Neighbours:
    neighbours = Neighbours.of(group)
    neighbours.batch = tuple(each._replace(modes=("batched", "batched")) for each in neighbours.batch)
    return neighbours


def _both(tensor: Tensor) -> dict[str, Tensor]:
    return {"send_next": tensor, "recv_prev": tensor.clone()}


SUM = ReduceOp.SUM
BACKEND: dict[str, Callable[[ProcessGroup, bool], Any]] = {
    "all_gather": lambda g, a: backend.all_gather(T(4), T(2), g, "f", a),
    "all_gather-fp8": lambda g, a: backend.all_gather(*(T(n).to(torch.float8_e4m3fn) for n in (4, 2)), g, "f", a),
    "all_gather_list": lambda g, a: backend.all_gather_list([T(1), T(3)], T(1), g, "f", a),
    "reduce_scatter": lambda g, a: backend.reduce_scatter(T(2), T(4), SUM, g, "f", a),
    "reduce_scatter-max": lambda g, a: backend.reduce_scatter(T(2), T(4), ReduceOp.MAX, g, "f", a),
    "reduce_scatter_list": lambda g, a: backend.reduce_scatter_list(T(1), [T(1), T(3)], SUM, g, "f", a),
    "all_to_all": lambda g, a: backend.all_to_all(T(4), T(4), (), (), g, "f", a),
    "all_to_all-uneven": lambda g, a: backend.all_to_all(T(4), T(4), (1, 3), (1, 3), g, "f", a),
    "all_reduce": lambda g, a: backend.all_reduce(T(4), SUM, g, "f", a),
    "broadcast": lambda g, a: backend.broadcast(T(4), 0, g, "f", a),
    "reduce": lambda g, a: backend.reduce(T(4), 0, SUM, g, "f", a),
    "send_and_receive": lambda g, a: backend.send_and_receive([(1, T(4))], [(1, T(4))], g, "f"),
    "post_one": lambda g, a: transport.post_one(Neighbours.of(g).singles[0], "f", T(4)),
    "post": lambda g, a: next(iter(transport.post(Neighbours.of(g), "f", _both(T(4)), False).values())),
    "post-batched": lambda g, a: next(iter(transport.post(_batched(g), "f", _both(T(4)), True).values())),
    "post_and_wait": lambda g, a: transport.post_and_wait(Neighbours.of(g), "f", _both(T(4)), True),
    "post_and_wait-batched": lambda g, a: transport.post_and_wait(_batched(g), "f", _both(T(4)), True),
}
CONFIG = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=True, variable_seq_lengths=False)


def _stage(group: ProcessGroup, batched: bool = True) -> P2PCommunicator:
    return P2PCommunicator(group, SimpleNamespace(**vars(CONFIG) | {"batch_p2p_comm": batched}))


def _backward(call: Callable[[Tensor], Tensor]) -> None:
    call(T(4, 4, requires_grad=True)).sum().backward()


def _resharded(group: ProcessGroup, sizes: list[int], after: list[int]) -> None:
    before, target = Layout.split((4, 6), 0, sizes), Layout.split((4, 6), 1, after)
    reshard(T(before.local_shape(0) or (0,)), before, target, group=group)


def _ulysses(group: ProcessGroup) -> None:
    attention = ulysses.UlyssesAttention(group)
    attention(*[T(2, 4, 4, 8) for _ in range(3)])


PUBLIC: dict[str, Callable[[ProcessGroup], Any]] = {
    "collective.all_gather": lambda g: collective.all_gather(T(2), 0, g),
    "collective.all_gather-async": lambda g: collective.all_gather(T(2), 0, g, True)[1].wait(),
    "collective.all_gather-sizes": lambda g: collective.all_gather(T(1), 0, g, sizes=[1, 3]),
    "collective.reduce_scatter": lambda g: collective.reduce_scatter(T(2), 0, g),
    "collective.reduce_scatter-sizes": lambda g: collective.reduce_scatter(T(4), 0, g, sizes=[1, 3]),
    "collective.split_reduce_scatter": lambda g: collective.split_reduce_scatter(T(4), 0, g),
    "collective.all_reduce": lambda g: collective.all_reduce(T(2), g),
    "collective.broadcast": lambda g: collective.broadcast(T(2), 0, g),
    "collective.reduce": lambda g: collective.reduce(T(2), 0, g),
    "collective.all_to_all": lambda g: collective.all_to_all(T(2), g),
    "mappings.reduce_from": lambda g: mappings.reduce_from_tensor_model_parallel_region(T(2), g),
    "mappings.gather_tp": lambda g: mappings.gather_from_tensor_model_parallel_region(T(2, 2), g),
    "mappings.gather_sp": lambda g: mappings.gather_from_sequence_parallel_region(T(2, 2), group=g),
    "mappings.reduce_scatter_sp": lambda g: mappings.reduce_scatter_to_sequence_parallel_region(T(2, 2), g),
    "mappings.sp2hp": lambda g: mappings.all_to_all_sp2hp(T(2, 2), g, True),
    "mappings.hp2sp": lambda g: mappings.all_to_all_hp2sp(T(2, 2), g),
    "mappings.all_to_all": lambda g: mappings.all_to_all(g, T(4), [2, 2], [2, 2], True),
    "mappings.copy_to.backward": lambda g: _backward(lambda x: mappings.copy_to_tensor_model_parallel_region(x, g)),
    "reshard": lambda g: _resharded(g, [2, 2], [3, 3]),
    "ulysses": _ulysses,
    "stage.send_forward": lambda g: _stage(g).send_forward(T(2, 4), False),
    "stage.recv_forward": lambda g: _stage(g).recv_forward((2, 4), False),
    "stage.send_forward_recv_backward": lambda g: _stage(g).send_forward_recv_backward(T(2, 4), (2, 4), False),
    "stage.overlapped": lambda g: [
        each.wait() for each in _stage(g, False).send_forward_recv_forward(T(2, 4), True, (2, 4), True)[1].values()
    ],
}


def reported(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("in_wait", [False, True], ids=["start", "wait"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", BACKEND)
def test_an_error_of_the_device_stays_itself(group: ProcessGroup, name: str, asynchronous: bool, in_wait: bool) -> None:
    error = torch.AcceleratorError(ASSERT)
    with failing(error, in_wait), pytest.raises(RuntimeError) as caught:
        waited(BACKEND[name](group, asynchronous))
    assert caught.value is error
    assert error.__cause__ is None
    notes = reported(error)
    assert len(notes) == 1
    assert notes[0].startswith("surfaced in f, ")
    assert notes[0].endswith("an earlier kernel may have caused it")
    assert "ranks [0, 1] on rank 0" in notes[0] or "stage 0 of 2 (rank 0) wanted to " in notes[0]


@pytest.mark.parametrize("in_wait", [False, True], ids=["start", "wait"])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_raise_an_error_of_the_device(group: ProcessGroup, name: str, in_wait: bool) -> None:
    error = torch.AcceleratorError(ASSERT)
    with failing(error, in_wait), pytest.raises(torch.AcceleratorError) as caught:
        PUBLIC[name](group)
    assert caught.value is error
    assert len(reported(error)) == 1


class ProgramError(RuntimeError):
    """Raised by a hook of the program."""


OWN = {
    "hip": RuntimeError("HIP error: an illegal memory access was encountered"),
    "cuda": RuntimeError(ASSERT),
    "driver": RuntimeError("CUDA driver error: invalid argument"),
    "watchdog": dist.DistBackendError(f"Process group watchdog thread terminated with exception: {ASSERT}"),
    "gpu-memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu-memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    "recursion": RecursionError("maximum recursion depth exceeded"),
    "not-implemented": NotImplementedError("no such kernel"),
    "program": ProgramError("on purpose"),
}
OF_BACKEND = {
    "gloo": RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:53411"),
    "timeout": RuntimeError("Timed out waiting 4000ms for recv operation to complete"),
    "nccl": dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error: CUDA error 700"),
    "network": dist.DistNetworkError("the connection was reset"),
    "store": dist.DistStoreError("the wait timed out"),
}


@pytest.mark.parametrize("error", OWN.values(), ids=OWN)
@pytest.mark.parametrize("name", ["all_gather", "post_one", "all_to_all"])
def test_errors_of_the_program_stay_themselves(group: ProcessGroup, name: str, error: RuntimeError) -> None:
    with failing(error, False), pytest.raises(type(error)) as caught:
        BACKEND[name](group, False)
    assert caught.value is error


@pytest.mark.parametrize("error", OF_BACKEND.values(), ids=OF_BACKEND)
@pytest.mark.parametrize("name", ["all_gather", "post_one", "all_to_all"])
def test_errors_of_the_backend_are_a_failed_peer(group: ProcessGroup, name: str, error: RuntimeError) -> None:
    with failing(error, False), pytest.raises(PeerError) as caught:
        BACKEND[name](group, False)
    assert caught.value.__cause__ is error
    assert str(error) in str(caught.value)


@pytest.mark.parametrize("name", ["collective.all_gather", "stage.send_forward"])
def test_the_record_has_the_error_and_is_not_written(group: ProcessGroup, name: str, tmp_path: Any) -> None:
    variables.FLIGHT.assign((8, str(tmp_path)))
    try:
        with failing(torch.AcceleratorError(ASSERT), False), pytest.raises(torch.AcceleratorError):
            PUBLIC[name](group)
        assert flight.calls[-1].error == f"AcceleratorError: {ASSERT}"
        assert not list(tmp_path.iterdir()), "no other rank failed"
        with failing(OF_BACKEND["gloo"], False), pytest.raises(PeerError):
            PUBLIC[name](group)
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        variables.FLIGHT.assign((0, ""))


@pytest.mark.parametrize("name", ["all_reduce", "post_one"])
def test_an_error_keeps_nothing_until_the_garbage_is_collected(group: ProcessGroup, name: str) -> None:
    class Kept(torch.AcceleratorError):
        """Can be referenced weakly."""

    def fail(*_: Any) -> None:
        raise Kept(ASSERT)

    def run() -> weakref.ref[Any]:
        try:
            BACKEND[name](group, False)
        except Kept as caught:
            return weakref.ref(caught)
        raise AssertionError("nothing was raised")

    gc.collect()
    gc.disable()
    try:
        with mock.patch.multiple(ProcessGroup, allreduce=fail, recv=fail, send=fail):
            assert run()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("function", ["allocate_expected", "allocate_from_header"])
def test_an_allocation_that_meets_an_error_of_the_device_raises_it(group: ProcessGroup, function: str) -> None:
    error, incoming = torch.AcceleratorError(ASSERT), message.Incoming.of((2, 4), torch.float32, False, "f")
    cpu, specs = torch.device("cpu"), incoming.specs
    arguments = ("f", cpu) if function == "allocate_expected" else (Neighbours.of(group), "f", "recv_prev", specs, cpu)
    with (
        mock.patch.object(message.Incoming, "allocate", side_effect=error),
        pytest.raises(torch.AcceleratorError) as caught,
    ):
        getattr(incoming, function)(*arguments)
    assert caught.value is error


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nccl", True), ("nccl2", True), ("nccl-lazy", True), ("NCCL-legacy", True), ("cpu:gloo,cuda:nccl2", True),
        ("gloo", False), ("cpu:gloo,cuda:gloo", False), ("", False), ("my-nccl", False),
    ],
)  # fmt: skip
def test_names_of_nccl(name: str, expected: bool) -> None:
    assert backend.is_nccl(name) is expected
    if "," not in name:
        assert bool(backend.refused(ReduceOp.BAND, torch.int32, name.lower())) is expected
        assert bool(backend.refused(ReduceOp.AVG, torch.int32, name.lower())) is not expected
