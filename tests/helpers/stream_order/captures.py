"""Calls that are captured and replayed."""

from __future__ import annotations

import torch
from stream_order.calls import CALLS, DIFFERENTIABLE, Call, outputs
from stream_order.collectives import COLLECTIVES, Collective
from stream_order.program import Program
from stream_order.tables import LOCALS, Local
from torch import Tensor

from tritoncomm.core import ops

__all__ = ["CAPTURED", "another_table", "captured", "in_private_pool"]


def captured(program: Program, call: Call, warm_up: Call | None = None) -> None:
    """Captured after a warm-up of this call or of another, and replayed twice; meanwhile other tables take over."""
    simulator, stream = program.simulator, program.stream()
    if warm_up is not None:
        with simulator.on(program.stream()):
            made = warm_up(program)
            del made
    with simulator.capture(stream) as graph:
        results = outputs(call(program))
    for _ in range(2):
        simulator.forget()
        with simulator.on(stream):
            graph.replay()
            simulator.use(*results)
            made = [LOCALS[name](program, program.tensor(8, 96)) for name in ("pack many sizes", "gather 20")]
            del made
            program.goes_on()
    results.clear()
    simulator.check_pool(graph)
    simulator.drop(graph)


def another_table(program: Program) -> Tensor:
    """A call with a table that no other call has."""
    sizes = (3,) * 20 + (36,)
    return ops.pack(program.tensor(8, 96), 1, len(sizes), sizes)[0]


def in_private_pool(program: Program, call: Call) -> None:
    """The warm-up of ``reduce-overhead``: nothing may be left in its pool, and the tables serve a capture later."""
    simulator, stream = program.simulator, program.stream()
    with simulator.on(stream), simulator.private_pool() as pool:
        made = call(program)
        del made
    simulator.check_pool(pool)
    captured(program, call)


def both_directions(call: Call) -> Call:
    """A call and its backward; the gradients of what it computed from."""

    def run(program: Program) -> list[Tensor]:
        made = outputs(call(program))
        recorded = [x for x in made if x.requires_grad]
        if recorded:
            torch.autograd.backward(recorded, [torch.ones_like(x) for x in recorded])
        return [x.detach() for x in made]

    return run


def waited(call: Collective) -> Call:
    return lambda program: call(program.tensor(32, 16), program.group)[1].wait()


def local(call: Local) -> Call:
    return lambda program: call(program, program.tensor(8, 96))


CAPTURED: dict[str, Call] = {
    **{f"collective {name}": waited(call) for name, call in COLLECTIVES.items()},
    # The host waits for the counts of experts, which no capture allows.
    **{name: both_directions(call) for name, call in DIFFERENTIABLE.items() if not name.startswith("experts")},
    **CALLS,
    **{f"local {name}": local(call) for name, call in LOCALS.items()},
}
