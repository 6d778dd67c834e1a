"""Steps of pipelines, and what programs do with the handles of their transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from stream_order.calls import Call, leaf
from stream_order.clocks import Stream
from stream_order.program import Program, Run
from stream_order.simulator import DEVICE
from torch import Tensor

from tritoncomm.p2p import P2PCommunicator
from tritoncomm.p2p.communicator import _batched_p2p_ops, _p2p_ops
from tritoncomm.p2p.hop import exchange
from tritoncomm.p2p.schedules import one_forward_one_backward

__all__ = ["INPUTS", "POSTINGS", "STEPS", "TRANSFER_WAYS", "flight_of", "schedule", "sends_kept", "step", "taken"]

SHAPE = (4, 8, 16)


def communicator(program: Program, batched: bool, ranks: str = "group", **more: Any) -> P2PCommunicator:
    config = SimpleNamespace(
        pipeline_dtype=torch.float32, batch_p2p_comm=batched, pipeline_device=DEVICE, variable_seq_lengths=False
    )
    vars(config).update(more)
    return P2PCommunicator(getattr(program, ranks), config)


Step = Callable[[P2PCommunicator, Any], Any]
STEPS: dict[str, Step] = {
    "recv_forward": lambda c, x: c.recv_forward(SHAPE, False),
    "recv_backward": lambda c, x: c.recv_backward(SHAPE, False),
    "send_forward": lambda c, x: c.send_forward(x(), False),
    "send_backward": lambda c, x: c.send_backward(x(), False),
    "send_forward_recv_backward": lambda c, x: c.send_forward_recv_backward(x(), SHAPE, False),
    "send_backward_recv_forward": lambda c, x: c.send_backward_recv_forward(x(), SHAPE, False),
    "send_forward_recv_forward": lambda c, x: c.send_forward_recv_forward(x(), True, SHAPE),
    "send_backward_recv_backward": lambda c, x: c.send_backward_recv_backward(x(), True, SHAPE),
    "all four": lambda c, x: c.send_forward_backward_recv_forward_backward(x(), x(), True, True, SHAPE),
    "several tensors": lambda c, x: c.send_forward_recv_backward([x(), x()], [SHAPE, SHAPE], False),
    "17 tensors": lambda c, x: c.send_forward_recv_backward([x() for _ in range(17)], [SHAPE] * 17, False),
}
INPUTS: dict[str, Callable[[Program], Tensor]] = {
    "": lambda program: program.tensor(*SHAPE),
    " strided": lambda program: program.tensor(8, 4, 16).transpose(0, 1),
}


def step(program: Program, take: Step, make: Callable[[Program], Tensor], batched: bool, **more: Any) -> None:
    """A blocking step, three times: what it sends is dropped at once, and what it received is used."""
    stage = communicator(program, batched, **more)
    with program.simulator.on(program.stream()):
        for _ in range(3):
            received = take(stage, lambda: make(program))
            program.goes_on()
            program.simulator.use(*(x for x in _flat(received) if isinstance(x, Tensor)))
            del received
            program.goes_on()


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, list | tuple):
        for each in x:
            yield from _flat(each)
    elif x is not None:
        yield x


@dataclass
class Posted:
    """Transfers in flight.

    Attributes:
        received: the tensors that arrive.
        receives, sends: what can be waited for.
    """

    received: list[Tensor]
    receives: list[Any]
    sends: list[Any]

    @classmethod
    def of(cls, received: list[Tensor], handles: dict[str, Any]) -> Posted:
        receives = [each for key, each in handles.items() if key.startswith("recv")]
        return cls(received, receives, [each for key, each in handles.items() if key.startswith("send")])

    def drop(self) -> None:
        self.receives.clear()
        self.sends.clear()


Posting = Callable[[Program, Tensor], Posted]


def _overlapped(backward: bool) -> Posting:
    def post(program: Program, x: Tensor) -> Posted:
        stage = communicator(program, False)
        take = stage.send_backward_recv_backward if backward else stage.send_forward_recv_forward
        received, handles = take(x, True, SHAPE, True)
        return Posted.of([received], handles)

    return post


def _by_key(post: Callable[..., Any]) -> Posting:
    def call(program: Program, x: Tensor) -> Posted:
        received = torch.empty(SHAPE, device=DEVICE)
        handles = post(
            tensor_send_prev=None, tensor_recv_prev=received, tensor_send_next=x, tensor_recv_next=None,
            group=program.group, prev_pipeline_rank=0, next_pipeline_rank=2,
        )  # fmt: skip
        named = handles if isinstance(handles, dict) else dict(zip(("recv_prev", "send_next"), handles, strict=True))
        return Posted.of([received], named)

    return call


def _communicated(program: Program, x: Tensor) -> Posted:
    before, after, handles = communicator(program, False)._communicate(
        tensor_send_next=x, tensor_send_prev=x, recv_prev=True, recv_next=True, tensor_shape=SHAPE, wait_on_reqs=False
    )
    assert before is not None
    assert after is not None
    return Posted.of([before, after], handles)


def _several(program: Program, x: Tensor) -> Posted:
    """Messages of several tensors, whose buffers only the handles refer to."""
    neighbours, shapes = communicator(program, False)._neighbours, [SHAPE, SHAPE]
    arguments = neighbours, "test", {"send_next": [x, x]}, {"recv_prev": shapes}, torch.float32, DEVICE, False, False
    received, handles = exchange(*arguments, wait=False)
    return Posted.of([*received["recv_prev"]], {key: handles[key] for key in handles})


POSTINGS: dict[str, Posting] = {
    "forward": _overlapped(False),
    "backward": _overlapped(True),
    "_p2p_ops": _by_key(_p2p_ops),
    "_batched_p2p_ops": _by_key(_batched_p2p_ops),
    "_communicate": _communicated,
    "several tensors": _several,
}


def posted(program: Program, post: Posting, make: Callable[[Program], Tensor]) -> tuple[Stream, Posted]:
    stream = program.stream()
    with program.simulator.on(stream):
        x = make(program)
        flight = post(program, x)
        del x
        program.goes_on()
    return stream, flight


def transfers_waited(program: Program, post: Posting, make: Callable[[Program], Tensor], elsewhere: bool) -> None:
    simulator = program.simulator
    stream, flight = posted(program, post, make)
    with simulator.on(simulator.new_stream() if elsewhere else stream):
        for each in (*flight.sends, *flight.receives):
            each.wait()
        del each
        simulator.use(*flight.received)
        flight.drop()
        program.goes_on()
        simulator.use(*flight.received)
        del flight
        program.goes_on()
    with simulator.on(stream):
        program.goes_on()


def transfers_dropped(program: Program, post: Posting, make: Callable[[Program], Tensor], elsewhere: bool) -> None:
    simulator = program.simulator
    for _ in range(3):
        stream, flight = posted(program, post, make)
        with simulator.on(simulator.new_stream() if elsewhere else stream):
            flight.drop()
            program.goes_on()
            del flight
            program.goes_on()


def sends_kept(program: Program, post: Posting, count: int = 70) -> None:
    """More sends than are kept, which nobody waits for, as Megatron's schedule does; receives are waited for."""
    simulator = program.simulator
    with simulator.on(program.stream()):
        for _ in range(count):
            flight = post(program, program.tensor(*SHAPE))
            for each in flight.receives:
                each.wait()
            flight.sends.clear()
            simulator.use(*flight.received)
            program.goes_on()


TRANSFER_WAYS = {
    "waited": transfers_waited,
    "dropped": transfers_dropped,
}


def schedule(batched: bool) -> Run:
    def run(program: Program) -> None:
        with program.simulator.on(program.stream()):
            weight = leaf(program, 16)
            one_forward_one_backward(lambda x, _: x * weight, 5, communicator(program, batched), SHAPE)
            program.goes_on()

    return run


def taken(take: Step, batched: bool) -> Call:
    return lambda program: [
        x for x in _flat(take(communicator(program, batched), lambda: program.tensor(*SHAPE))) if isinstance(x, Tensor)
    ]


def flight_of(post: Posting) -> Call:
    def call(program: Program) -> list[Tensor]:
        flight = post(program, program.tensor(*SHAPE))
        for each in (*flight.receives, *flight.sends):
            each.wait()
        return flight.received

    return call
