"""Work on a device that is dropped, or that fails: its stream is ordered behind it before the buffers are freed.

The tensors say that they are on a GPU. No stream is real: the order of what happens to works and memory is recorded.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.testing._internal.distributed.fake_pg import FakeStore

from tritoncomm import collective
from tritoncomm.core import backend
from tritoncomm.core.backend import Transfer
from tritoncomm.p2p import transport
from tritoncomm.p2p.neighbours import Neighbours

T = torch.ones
SUM = ReduceOp.SUM
METHODS = (
    "allreduce", "alltoall_base", "broadcast", "reduce", "send", "recv", "all_gather_single",
    "reduce_scatter_single", "all_to_all_single", "_allgather_base", "_reduce_scatter_base",
)  # fmt: skip


class Device:
    """A GPU that does nothing, and a backend that returns works.

    Attributes:
        events: a work was waited for, or memory was recorded on the current stream.
        works: of all calls.
        fails: a call of this number raises.
        capturing: whether the current stream is captured.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.works: list[Work] = []
        self.fails, self.capturing, self.batches = -1, False, 0

    def call(self, *arguments: Any) -> "Work":
        tensors = [x for each in arguments[1:] for x in (each if isinstance(each, list) else [each])]
        if len(self.works) == self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.works.append(Work(self, [x for x in tensors if isinstance(x, Tensor)]))
        return self.works[-1]


class Work:
    def __init__(self, device: Device, tensors: list[Tensor]) -> None:
        self.device, self.is_done = device, False
        self.memory = [weakref.ref(x.untyped_storage()) for x in tensors]

    def wait(self) -> None:
        assert all(each() is not None for each in self.memory), "memory was freed before the work was waited for"
        self.device.events.append(self)

    def is_completed(self) -> bool:
        return self.is_done


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name in METHODS:
        if hasattr(ProcessGroup, name):
            monkeypatch.setattr(ProcessGroup, name, lambda *arguments: made.call(*arguments))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: made.events.append(x.untyped_storage()._cdata))
    try:
        yield made
    finally:
        gc.collect(1)  # the calls of this test are young
        monkeypatch.undo()
        dist.destroy_process_group()


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


CALLS: dict[str, Callable[[ProcessGroup], Any]] = {
    "all_gather": lambda g: backend.all_gather(T(4), T(2), g, "f", True),
    "all_gather-fp8": lambda g: backend.all_gather(*(T(n).to(torch.float8_e4m3fn) for n in (4, 2)), g, "f", True),
    "all_gather_list": lambda g: backend.all_gather_list([T(1), T(3)], T(1), g, "f", True),
    "reduce_scatter": lambda g: backend.reduce_scatter(T(2), T(4), SUM, g, "f", True),
    "reduce_scatter_list": lambda g: backend.reduce_scatter_list(T(1), [T(1), T(3)], SUM, g, "f", True),
    "all_to_all": lambda g: backend.all_to_all(T(4), T(4), (), (), g, "f", True),
    "all_reduce": lambda g: backend.all_reduce(T(4), SUM, g, "f", True),
    "broadcast": lambda g: backend.broadcast(T(4), 0, g, "f", True),
    "reduce": lambda g: backend.reduce(T(4), 0, SUM, g, "f", True),
    "send_and_receive": lambda g: backend.send_and_receive([(1, T(4))], [(1, T(3))], g, "f"),
    "handle": lambda g: collective.all_gather(T(2, 3), 1, g, True),
    "handle-sizes": lambda g: collective.all_gather(T(1, 2), 0, g, True, sizes=[1, 3]),
    "post_one-receive": lambda g: transport.post_one(Neighbours.of(g).directions[0]["recv_prev"], "f", T(4)),
    "post_one-send": lambda g: transport.post_one(Neighbours.of(g).directions[0]["send_next"], "f", T(4)),
}


def waited(events: list[Any]) -> list[Work]:
    return [each for each in events if isinstance(each, Work)]


@pytest.mark.parametrize("name", CALLS)
def test_a_dropped_call_orders_the_stream_before_its_memory_is_freed(fake: Device, name: str) -> None:
    dropped = CALLS[name](world())
    assert fake.works
    assert not fake.events
    del dropped
    assert waited(fake.events) == fake.works
    assert fake.events[-1] not in fake.works, "memory is recorded on the stream that was ordered"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_was_waited_for_is_waited_for_once(fake: Device, name: str) -> None:
    handle = CALLS[name](world())
    (handle[1] if isinstance(handle, tuple) else handle).wait()
    assert waited(fake.events) == fake.works
    del handle
    assert waited(fake.events) == fake.works


@pytest.mark.parametrize("backend_name", ["gloo", "mpi"])
@pytest.mark.parametrize("name", ["all_gather", "all_gather_list", "post_one-receive"])
def test_a_backend_whose_wait_blocks_the_host_is_not_waited_for(
    fake: Device, name: str, backend_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS[name]
    monkeypatch.setattr(backend, "cuda_backend", lambda group: backend_name)
    del (dropped := [call(world())])[0]
    assert fake.works
    assert not dropped
    assert not fake.events


def test_host_memory_is_left_to_the_backend(fake: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", False)
    for name in CALLS:
        CALLS[name](world())
    assert not fake.events


def test_a_work_that_failed_is_dropped_in_silence(fake: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Work) -> None:
        fake.events.append(work)
        raise dist.DistBackendError("NCCL error: the communicator was aborted")

    monkeypatch.setattr(Work, "wait", fail)
    with mock.patch("sys.unraisablehook") as hook:
        CALLS["all_gather_list"](world())
    assert waited(fake.events) == fake.works
    assert not hook.called


def test_the_waiting_stream_is_recorded_for_transfers(fake: Device) -> None:
    """Their memory was made on another stream, and goes back to that one."""
    for key in ("recv_prev", "send_next"):
        x = T(4)
        posted = transport.post_one(Neighbours.of(world()).directions[0][key], "f", x)
        posted.wait()
        assert fake.events == [fake.works[-1], x.untyped_storage()._cdata]
        fake.events.clear()


def test_sends_of_a_device_are_kept_until_they_have_completed(fake: Device) -> None:
    neighbours = Neighbours.of(world())
    direction = neighbours.directions[0]["send_next"]
    queue = direction.end.queue and direction.end.queue()
    assert queue is not None
    for _ in range(3):
        transport.keep_alive([transport.post_one(direction, "f", T(4))])
    assert len(queue) == 3
    assert not fake.events, "no stream waits for a receiver"
    fake.works[0].is_done = fake.works[1].is_done = True
    transport.keep_alive([transport.post_one(direction, "f", T(4))])
    assert len(queue) == 2
    fake.capturing = True
    transport.keep_alive([transport.post_one(direction, "f", T(4))])
    assert len(queue) == 2
    assert fake.events[-2] is fake.works[-1], "what a graph captures is joined"


@pytest.mark.parametrize("function", ["post", "post_and_wait"])
def test_a_step_whose_second_transfer_cannot_be_posted(fake: Device, function: str) -> None:
    neighbours = Neighbours.of(world())
    for direction in neighbours.singles:
        if direction.end.queue is not None and (queue := direction.end.queue()) is not None:
            queue.clear()
    for first in neighbours.singles[:2]:
        fake.works.clear()
        fake.events.clear()
        fake.fails = 1
        keys = [each.key for each in neighbours.singles]
        at = keys.index(first.key)
        with suppress(torch.OutOfMemoryError):
            getattr(transport, function)(neighbours, "f", {key: T(4) for key in keys[at : at + 2]}, False)
        queue = first.end.queue and first.end.queue()
        if first.is_send:
            assert queue is not None
            assert len(queue) == 1
            assert not fake.events
        else:
            assert waited(fake.events) == fake.works


def test_a_batch_that_cannot_be_completed_is_ended(fake: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ProcessGroup, "_start_coalescing", lambda *_: calls.append("start"))
    monkeypatch.setattr(ProcessGroup, "_end_coalescing", lambda *_: calls.append("end") or fake.call())
    monkeypatch.setattr(ProcessGroup, "_get_backend", lambda *_: mock.Mock(supports_coalescing=True))
    fake.fails = 1
    with pytest.raises(torch.OutOfMemoryError):
        backend.batch([Transfer(1, T(4), is_send=True), Transfer(1, T(4), is_send=False)], world())
    assert calls == ["start", "end"]
    fake.fails = -1
    assert len(backend.batch([Transfer(1, T(4), is_send=True), Transfer(1, T(4), is_send=False)], world())) == 1
    assert calls == ["start", "end"] * 2


def test_lists_of_which_one_cannot_be_started(fake: Device) -> None:
    fake.fails = 1
    with pytest.raises(torch.OutOfMemoryError):
        CALLS["all_gather_list"](world())
    assert waited(fake.events) == fake.works
    assert len(fake.works) == 1
