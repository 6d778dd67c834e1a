"""All programs, as a table: each of them has to leave no problem in the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from stream_order.calls import CALLS, DIFFERENTIABLE, ON_TWO_STREAMS
from stream_order.captures import CAPTURED, another_table, captured, in_private_pool
from stream_order.collectives import COLLECTIVES, WAYS
from stream_order.nccl import LEGACY, NCCL2
from stream_order.pipelines import (
    INPUTS,
    POSTINGS,
    STEPS,
    TRANSFER_WAYS,
    flight_of,
    schedule,
    sends_kept,
    step,
    taken,
)
from stream_order.program import Program, Run, Scenario
from stream_order.tables import LOCALS, on_two_streams, small_slabs
from stream_order.ways import backward, backward_on_another_stream, failing, forward

__all__ = ["scenarios"]


def _in_small_slabs(program: Program, run: Run) -> None:
    with small_slabs():
        run(program)


def _collectives() -> Iterator[tuple[str, Run]]:
    for (name, call), (way, run) in itertools.product(COLLECTIVES.items(), WAYS.items()):
        yield f"collective {name}, {way}", partial(run, call=call)


def _differentiable() -> Iterator[tuple[str, Run]]:
    ways = (forward, backward, backward_on_another_stream, failing)
    for (name, call), way in itertools.product(DIFFERENTIABLE.items(), ways):
        yield f"{name}, {way.__name__.replace('_', ' ')}", partial(way, call=call)
    for name, call in (CALLS | ON_TWO_STREAMS).items():
        yield f"{name}, forward", partial(forward, call=call)
        yield f"{name}, failing", partial(failing, call=call)


def _pipelines() -> Iterator[tuple[str, Run]]:
    for (name, take), (kind, make), batched in itertools.product(STEPS.items(), INPUTS.items(), (True, False)):
        what = f"p2p {name}{kind}, {'batched' if batched else 'single'}"
        run = partial(step, take=take, make=make, batched=batched)
        yield what, run
        yield f"{what}, of two", partial(run, ranks="pair")
        if not kind:
            yield f"{what}, failing", partial(failing, call=taken(take, batched), runs_backward=False)
        if "send" in name and "recv" in name:
            yield f"{what}, variable", partial(run, variable_seq_lengths=True)
    posts = itertools.product(POSTINGS.items(), INPUTS.items(), TRANSFER_WAYS.items(), (False, True))
    for (name, post), (kind, make), (way, run), elsewhere in posts:
        what = f"p2p {name}{kind}, {way}{' on another stream' if elsewhere else ''}"
        yield what, partial(run, post=post, make=make, elsewhere=elsewhere)
    for name, post in POSTINGS.items():
        yield f"p2p {name}, failing", partial(failing, call=flight_of(post), runs_backward=False)
        yield f"p2p {name}, sends kept", partial(sends_kept, post=post)
    for batched in (True, False):
        yield f"p2p schedule, {'batched' if batched else 'single'}", schedule(batched)


def _captures() -> Iterator[tuple[str, Run]]:
    for name, call in CAPTURED.items():
        runs = {
            f"capture {name}": partial(captured, call=call, warm_up=call),
            f"capture {name}, cold": partial(captured, call=call),
        }
        if name.startswith("local"):
            runs[f"capture {name}, beside another"] = partial(captured, call=call, warm_up=another_table)
            runs |= {f"{what}, small slabs": partial(_in_small_slabs, run=run) for what, run in runs.items()}
        yield from runs.items()
        yield f"pool {name}", partial(in_private_pool, call=call)


def _programs() -> Iterator[tuple[str, Run]]:
    yield from _collectives()
    yield from _differentiable()
    yield from _pipelines()
    for name, call in LOCALS.items():
        run = partial(on_two_streams, call=call)
        yield f"local {name}, on two streams", run
        yield f"local {name}, on two streams, small slabs", partial(_in_small_slabs, run=run)
    yield from _captures()


def scenarios() -> list[Scenario]:
    """Every program under the rules of both backends, and where the device may be faster than the program."""
    programs = [*_programs()]
    found = [Scenario(name, run, rules) for name, run in programs for rules in (LEGACY, NCCL2)]
    dropping = [each for each in found if each.name.startswith("p2p") and ("kept" in each.name or "drop" in each.name)]
    found += [replace(each, name=f"{each.name}, soon over", completes=True) for each in dropping]
    assert len({each.id for each in found}) == len(found)
    return found
