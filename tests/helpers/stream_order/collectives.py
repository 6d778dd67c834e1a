"""Asynchronous collectives, and what programs do with their handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stream_order.clocks import Stream
from stream_order.program import Program
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm import collective, variables

__all__ = ["COLLECTIVES", "WAYS", "Collective"]

Collective = Callable[[Tensor, ProcessGroup], tuple[Tensor, Any]]
SIZES = [16, 16, 8, 8]
WIRE: dict[str, Any] = {"wire": torch.bfloat16}


def in_nodes(x: Tensor, group: ProcessGroup, dim: int = 0) -> tuple[Tensor, Any]:
    """Sum over two nodes of two ranks."""
    with variables.NODE.override(2):
        return collective.reduce_scatter(x, dim, group, async_op=True, exchange="node", **WIRE)


COLLECTIVES: dict[str, Collective] = {
    "all_gather 0": lambda x, g: collective.all_gather(x, 0, g, True),
    "all_gather 1": lambda x, g: collective.all_gather(x, 1, g, True),
    "all_gather strided": lambda x, g: collective.all_gather(x.t(), 1, g, True),
    "all_gather sizes 0": lambda x, g: collective.all_gather(x[:16], 0, g, True, sizes=SIZES),
    "all_gather sizes 1": lambda x, g: collective.all_gather(x, 1, g, True, sizes=SIZES),
    "all_gather sizes none": lambda x, g: collective.all_gather(x[:0], 0, g, True, sizes=[8, 0, 0, 4]),
    "reduce_scatter 0": lambda x, g: collective.reduce_scatter(x, 0, g, async_op=True),
    "reduce_scatter 1": lambda x, g: collective.reduce_scatter(x, 1, g, async_op=True),
    "reduce_scatter avg": lambda x, g: collective.reduce_scatter(x, 0, g, ReduceOp.AVG, True),
    "reduce_scatter sizes 0": lambda x, g: collective.reduce_scatter(x, 0, g, async_op=True, sizes=[16, 8, 0, 8]),
    "reduce_scatter sizes 1": lambda x, g: collective.reduce_scatter(x, 1, g, async_op=True, sizes=[8, 4, 2, 2]),
    "reduce_scatter wire": lambda x, g: collective.reduce_scatter(x, 0, g, async_op=True, **WIRE),
    "reduce_scatter wire view": lambda x, g: collective.reduce_scatter(x.to(WIRE["wire"]), 0, g, async_op=True, **WIRE),
    "reduce_scatter wire nodes": lambda x, g: in_nodes(x, g),
    "reduce_scatter wire nodes 1": lambda x, g: in_nodes(x, g, 1),
    "all_reduce": lambda x, g: collective.all_reduce(x, g, async_op=True),
    "all_reduce avg": lambda x, g: collective.all_reduce(x, g, ReduceOp.AVG, async_op=True),
    "all_reduce strided": lambda x, g: collective.all_reduce(x.t(), g, async_op=True),
    "broadcast": lambda x, g: collective.broadcast(x, 0, g, async_op=True),
    "broadcast strided": lambda x, g: collective.broadcast(x.t(), 0, g, async_op=True),
    "reduce": lambda x, g: collective.reduce(x, 1, g, async_op=True),
    "reduce strided": lambda x, g: collective.reduce(x.t(), 1, g, async_op=True),
    "all_to_all": lambda x, g: collective.all_to_all(x, g, async_op=True),
    "all_to_all strided": lambda x, g: collective.all_to_all(x.t(), g, async_op=True),
    "all_to_all sizes": lambda x, g: collective.all_to_all(x, g, [4, 8, 0, 6], [16, 8, 0, 8], True),
}


def issued(program: Program, call: Collective) -> tuple[Stream, Tensor, Any]:
    """The stream of a call, its result, and its handle; the input is dropped as soon as the call was issued."""
    stream = program.stream()
    with program.simulator.on(stream):
        x = program.tensor(32, 16)
        out, handle = call(x, program.group)
        del x
        program.goes_on()
    return stream, out, handle


def waited_on_its_stream(program: Program, call: Collective) -> None:
    stream, out, handle = issued(program, call)
    with program.simulator.on(stream):
        done = handle.wait()
        del out, handle
        program.goes_on()
        program.simulator.use(done)
        del done
        program.goes_on()


def waited_on_another_stream(program: Program, call: Collective) -> None:
    stream, out, handle = issued(program, call)
    with program.simulator.on(program.simulator.new_stream()):
        done = handle.wait()
        program.simulator.use(done)
        del handle
        program.goes_on()
        program.simulator.use(done)
        del done, out
        program.goes_on()
    with program.simulator.on(stream):
        program.goes_on()


def dropped(program: Program, call: Collective) -> None:
    stream, out, handle = issued(program, call)
    with program.simulator.on(stream):
        del handle
        program.goes_on()
        del out
        program.goes_on()


def dropped_on_another_stream(program: Program, call: Collective) -> None:
    _, out, handle = issued(program, call)
    with program.simulator.on(program.simulator.new_stream()):
        del out, handle
        program.goes_on()


def unwound(program: Program, call: Collective) -> None:
    """The program raises before it waits."""
    try:
        _, out, handle = issued(program, call)
        raise ArithmeticError(f"of the program, with {out.shape} and {handle} at hand")
    except ArithmeticError:
        out = handle = None
    program.goes_on()


def three_in_flight(program: Program, call: Collective) -> None:
    """Waited for in another order, on another stream."""
    flights = [issued(program, call) for _ in range(3)]
    with program.simulator.on(program.simulator.new_stream()):
        for place in (1, 2, 0):
            program.simulator.use(flights[place][2].wait())
        flights.clear()
        program.goes_on()


WAYS: dict[str, Callable[[Program, Collective], None]] = {
    "waited on its stream": waited_on_its_stream,
    "waited on another stream": waited_on_another_stream,
    "dropped": dropped,
    "dropped on another stream": dropped_on_another_stream,
    "unwound": unwound,
    "three in flight": three_in_flight,
}
