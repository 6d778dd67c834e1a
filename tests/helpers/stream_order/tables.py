"""Launches that read tables on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from stream_order.calls import outputs
from stream_order.program import Program
from torch import Tensor
from tritoncomm_kernels import Copies, Segments, copy_segments, device_table, gather_segments, scatter_segments

from tritoncomm.core import ops

__all__ = ["LOCALS", "Local", "on_two_streams", "small_slabs"]

MANY = (5,) * 18 + (6,)  # more ranks than a launch takes by value
Local = Callable[[Program, Tensor], Any]


def packed(program: Program, x: Tensor) -> Tensor:
    return ops.pack(x, 1, len(MANY), MANY)[0]


def unpacked(program: Program, x: Tensor) -> Tensor:
    return ops.unpack(x.view(-1), tuple(x.shape), 1, len(MANY), MANY)[0]


def _segments(count: int) -> Segments:
    return Segments([(i, 1, 1, 90, 96, i * 360) for i in range(count)], [torch.float32] * count)


def gathered(count: int) -> Local:
    def call(program: Program, x: Tensor) -> Tensor:
        wire = x.new_empty(count * 360, dtype=torch.uint8)
        gather_segments([x[i % 8] for i in range(count)], wire, _segments(count))
        return wire

    return call


def scattered(count: int) -> Local:
    def call(program: Program, x: Tensor) -> list[Tensor]:
        wire, made = program.tensor(count * 90), [x.new_empty(96) for _ in range(count)]
        scatter_segments(wire, made, _segments(count))
        return made

    return call


def copied(count: int) -> Local:
    def call(program: Program, x: Tensor) -> list[Tensor]:
        made = [x.new_empty(99) for _ in range(count)]
        rows = [(i, 1, 1, 90, 96, 0, 99) for i in range(count)]
        copy_segments([x[i % 8] for i in range(count)], made, Copies(rows, [x.dtype] * count))
        return made

    return call


LOCALS: dict[str, Local] = {
    "pack": lambda program, x: ops.pack(x, 1, 4)[0],
    "pack many sizes": packed,
    "unpack many sizes": unpacked,
    "gather 4": gathered(4),
    "gather 20": gathered(20),
    "scatter 20": scattered(20),
    "copy 4": copied(4),
    "copy 20": copied(20),
}


def small_slabs() -> AbstractContextManager[Any]:
    """Tables fill a slab every few calls, so that slabs without tables go back to torch."""
    return mock.patch.multiple(device_table, _SLAB=1024, _RESERVE=512)


def on_two_streams(program: Program, call: Local) -> None:
    """First on one stream, at once on another, on both again after the tables were evicted."""
    streams = [program.stream(), program.stream()]
    x = program.tensor(8, 96)
    for stream in streams:
        stream.wait_stream(program.simulator.current)
    for _ in range(2):
        program.goes_on()  # on a stream that no other one waits for
        for stream in (*streams, *streams):
            with program.simulator.on(stream):
                made = outputs(call(program, x))
                program.simulator.use(*made)
                del made
                program.goes_on()
        program.simulator.forget()
        program.goes_on()
    for stream in streams:
        program.simulator.current.wait_stream(stream)
