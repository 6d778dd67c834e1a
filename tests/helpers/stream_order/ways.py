"""How programs run a call: forward, backward, on which streams, and with an operation that raises."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from stream_order.calls import Call, outputs
from stream_order.clocks import Stream
from stream_order.program import Program
from stream_order.simulator import Simulator

from tritoncomm.errors import CommError

__all__ = ["backward", "backward_on_another_stream", "failing", "forward"]


def forward(program: Program, call: Call) -> None:
    """Several times on one stream, and on another."""
    for stream in (program.stream(), program.stream()):
        with program.simulator.on(stream), torch.no_grad():
            for _ in range(2):
                made = outputs(call(program))
                program.goes_on()
                program.simulator.use(*made)
                del made
                program.goes_on()


def backward(program: Program, call: Call) -> None:
    with program.simulator.on(program.stream()):
        for _ in range(2):
            made = outputs(call(program))
            program.goes_on()
            differentiated = [x for x in made if x.requires_grad]
            torch.autograd.backward(differentiated, [torch.ones_like(x) for x in differentiated])
            del made, differentiated
            program.goes_on()


def backward_on_another_stream(program: Program, call: Call) -> None:
    """The backward is called on another stream; autograd runs it on that of the forward, ordered as its engine does."""
    stream, caller = program.stream(), program.simulator.new_stream()
    with program.simulator.on(stream):
        made = [x for x in outputs(call(program)) if x.requires_grad]
    engine_runs_on(program, [x.grad_fn for x in made], stream)
    with program.simulator.on(caller):
        caller.wait_stream(stream)
        gradients = [torch.ones_like(x) for x in made]
        torch.autograd.backward(made, gradients)
        caller.wait_stream(stream)
        del made, gradients
        program.goes_on()
    with program.simulator.on(stream):
        program.goes_on()


def engine_runs_on(program: Program, nodes: list[Any], stream: Stream) -> None:
    """Have autograd run nodes and those before them on a stream, which waits for whoever made their gradients."""
    simulator, seen, waiting = program.simulator, set(), [*nodes]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        node.register_prehook(lambda gradients: _enter(simulator, stream, gradients))
        node.register_hook(lambda made, gradients: simulator.leave())


def _enter(simulator: Simulator, stream: Stream, gradients: Any) -> None:
    producer = simulator.current
    if producer != stream:
        stream.wait_stream(producer)
        for x in gradients:
            if x is not None:
                simulator.record(x, stream)
    simulator.enter(stream)


def failing(program: Program, call: Call, runs_backward: bool = True) -> None:
    """Every operation in turn raises in the forward or the backward; the program catches that and goes on."""
    simulator = program.simulator
    for place in itertools.count(1):
        with simulator.on(program.stream()):
            simulator.fail_at = simulator.operations + place
            try:
                made = [x for x in outputs(call(program)) if x.requires_grad]
                if runs_backward and made:
                    torch.autograd.backward(made, [torch.ones_like(x) for x in made])
                fails = False
            except (torch.OutOfMemoryError, dist.DistBackendError, CommError):
                fails = True
            simulator.fail_at = 0
            made = None
            program.goes_on()
        if not fails:
            break
