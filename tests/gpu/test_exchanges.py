"""Exchanges between ranks over NCCL: what holds there because of the order of streams, and what Gloo cannot do.

Where ranks outnumber the GPUs each of them is a host of its own to NCCL. On the CPU the same runs over Gloo.
"""

import json
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bits import bits
from devices import Device
from experts_twin import Routing, apply, apply_apart, apply_routed, draw_of, twin
from fuzz_calls import assert_right
from mapping_cases import FUNCTIONS, MAPPINGS, by_sizes, value
from pool import Pool, WorkerError, group_of
from rank_runs import TIMEOUT, Exchange, run_checked, run_mappings, run_reshardings, run_ulysses
from sums_by_hand import FLOATS, by_hand, shard, values
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import MismatchError, PeerError, collective, mappings, p2p, variables
from tritoncomm.core import ops, wire_sum
from tritoncomm.p2p import P2PCommunicator
from tritoncomm.p2p.schedules import one_forward_one_backward
from tritoncomm.reshard import Layout, reshard

COPIES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float8_e4m3fn", "float8_e5m2", "complex64")
BIG = 1_000_003
LIMIT_S = 8


def run_copies(group: ProcessGroup, device: Device) -> None:
    """Every exchange that copies, in dtypes that NCCL has no sum for or no type at all, even and uneven."""
    calls = [replace(call, shape=(8, group.size(), 16)) for call in MAPPINGS.values()] + list(
        by_sizes(group.size()).values()
    )
    for call in calls:
        if not FUNCTIONS[call.function].adds:
            for dtype in device.pick(COPIES[::3], COPIES):
                assert_right(group, replace(call, dtype=dtype, path="triton"), device=device.at)


def run_almost_equal(group: ProcessGroup, device: Device) -> None:
    """Gathers whose shorter parts are padded, and sums of a number of elements that the ranks do not divide."""
    world, rank = group.size(), group.rank()
    for dim, shorter, dtype in product((0, 1), (0, world - 1), device.pick(COPIES[::3], COPIES)):
        sizes = [17] * world
        sizes[shorter] = 16
        shapes = [(n, 3) if dim == 0 else (3, n) for n in sizes]
        parts = [value(shape, dtype, each) for each, shape in enumerate(shapes)]
        with ops.path("triton"):
            out = collective.all_gather(parts[rank].to(device.at), dim, group, sizes=sizes)
            later, handle = collective.all_gather(parts[rank].to(device.at), dim, group, True, sizes=sizes)
            handle.wait()
        wanted = torch.cat([bits(each) for each in parts], dim)
        for got in (out, later):
            assert torch.equal(bits(got.cpu()), wanted), (dim, shorter, dtype)
    for count in (8 * world + 1, device.pick(99, BIG)):
        every = [values(each, (count,), torch.float32) for each in range(world)]
        wanted = by_hand(every, torch.bfloat16, torch.float32)
        summed = collective.all_reduce(every[rank].to(device.at), group, wire=torch.bfloat16)
        assert torch.equal(summed.cpu(), wanted), count


def run_sums(group: ProcessGroup, device: Device) -> None:
    """Sums over 16-bit wires: bit for bit the fp32 sum in rank order of the wire's values, on one level."""
    world, rank = group.size(), group.rank()
    shape = (4 * world, 8, 2 * world)
    for wire in wire_sum.WIRES:
        for dtype, dim in ((torch.float32, 0), (torch.bfloat16, -1), (torch.float32, 2)):
            for result in device.pick((None,), (None, *FLOATS[:2])):
                sizes = (shape[dim] // world,) * world
                every = [values(each, shape, dtype) for each in range(world)]
                wanted = by_hand([shard(x, dim, sizes, rank) for x in every], wire, result or dtype, 0.3)
                out = None if result is None else torch.empty(wanted.shape, dtype=result, device=device.at)
                with ops.path("triton"):
                    call = partial(collective.reduce_scatter, every[rank].to(device.at), dim, group)
                    plain = call(wire=wire, scale=0.3, out=out)
                    later, handle = call(async_op=True, wire=wire, scale=0.3, out=out)
                    handle.wait()
                for got in (plain, later):
                    assert torch.equal(bits(got.cpu()), bits(wanted)), (wire, dtype, dim, result)


def run_experts(group: ProcessGroup, device: Device) -> None:
    """A layer of experts, its exchanges alone and beside other work: the bits of the twin, forward and backward."""
    rank, world = group.rank(), group.size()
    forms = {"eager": apply, "apart": apply_apart, "route": apply_routed}
    for (how, form), dtype in product(forms.items(), device.pick(FLOATS[:1], FLOATS[:2])):
        for k, alignment in device.pick([(6, 8)], [(2, 1), (6, 8)]):
            tokens = (5, 0, 7, 3)[:world]
            name = str(dtype).removeprefix("torch.")
            routing = Routing(tokens, 24, k, 3, "even", name, "float32", alignment, "triton", how, k)
            drawn = draw_of(routing, rank)
            x, weights = (each.to(device.at).requires_grad_() for each in (drawn.x, drawn.weights))
            scales = drawn.scales[rank * 3 : rank * 3 + 3].to(device.at)
            with ops.path("triton"), device.side_stream():
                device.busy()
                out = form(x * 1, drawn.ids.to(device.at), weights * 1, scales, routing, group)
                grads = torch.autograd.grad(out, (x, weights), drawn.grad.to(device.at))
            for result, wanted in zip((out.detach(), *grads), twin(routing, rank), strict=True):
                assert torch.equal(bits(result.cpu()), bits(wanted)), routing


def run_handles(group: ProcessGroup, device: Device) -> None:
    """Asynchronous calls behind a busy stream, whose inputs are freed or overwritten."""
    world, rank = group.size(), group.rank()
    n = device.pick(64, BIG)
    calls = {
        "all_gather": lambda x: collective.all_gather(x, 1, group, async_op=True),
        "reduce_scatter": lambda x: collective.reduce_scatter(x, 1, group, async_op=True),
        "all_reduce": lambda x: collective.all_reduce(x, group, async_op=True),
    }
    for name, call in calls.items():
        for turn in range(3):
            every = [value((2, n * world), "float32", 10 * turn + each).to(device.at) for each in range(world)]
            wanted = torch.cat(every, 1) if name == "all_gather" else sum(every[1:], every[0])
            wanted = wanted.chunk(world, 1)[rank] if name == "reduce_scatter" else wanted
            with device.side_stream():
                device.busy()
                x = every[rank] * 1  # not there yet when the call begins
                out, handle = call(x)
                del x
                torch.full((2, n * world), -5.0, device=device.at)  # where the input was, if that is free too early
                kept = handle.wait().clone()
                torch.full((2, n * world), -6.0, device=device.at)
                out.zero_()
            assert torch.equal(kept, wanted), (name, turn)


def run_orders(group: ProcessGroup, device: Device) -> None:
    """Results of one stream alone: nothing waits on the host between an input that comes late and its result's use."""
    world, rank, n = group.size(), group.rank(), device.pick(8, 4096)
    rows, columns = (Layout.on_mesh((world * n, 16 * world), list(range(world)), [dim]) for dim in (0, 1))
    whole = [value((world * n, 16 * world), "float32", turn).to(device.at) for turn in range(3)]
    shards = [x.chunk(world, 0)[rank].contiguous() for x in whole]
    with ops.path("triton"):
        for turn, (full, local) in enumerate(zip(whole, shards, strict=True)):
            device.busy()
            x = local * 1
            out = mappings.all_to_all_sp2hp(x, group)
            back = mappings.all_to_all_hp2sp(out, group)
            x.fill_(-1)  # behind the exchange
            again = reshard({"w": back.clone()}, rows, columns, group=group)["w"]
            summed = mappings.reduce_from_tensor_model_parallel_region(back.clone(), group)
            assert torch.equal(out, full.chunk(world, 1)[rank]), (turn, "sp2hp")
            assert torch.equal(back, local), (turn, "hp2sp")
            assert torch.equal(again, full.chunk(world, 1)[rank]), (turn, "reshard")
            assert torch.equal(summed, sum(full.chunk(world, 0)[1:], full.chunk(world, 0)[0])), (turn, "sum")


def run_grid(group: ProcessGroup, device: Device) -> None:
    """Two groups that cross: exchanges of both follow each other, and are under way at the same time."""
    rank = group.rank()
    row, column = divmod(rank, 2)
    rows, columns = group_of(2 * row, 2 * row + 1), group_of(column, column + 2)
    run_grid_mappings(rows, device)
    run_grid_mappings(columns, device)
    for turn in range(5):
        every = [value((64, 32), "float32", 10 * turn + each).to(device.at) for each in range(4)]
        device.busy()
        x, y = every[rank] * 1, every[rank] * 1
        _, first = collective.all_reduce(x, rows, async_op=True)
        _, second = collective.all_gather(y, 0, columns, async_op=True)
        assert torch.equal(second.wait(), torch.cat([every[column], every[column + 2]])), turn
        assert torch.equal(first.wait(), every[2 * row] + every[2 * row + 1]), turn
        both = mappings.all_gather_dim(mappings.reduce_from_tensor_model_parallel_region(every[rank], rows), 1, columns)
        assert torch.equal(both, torch.cat([every[0] + every[1], every[2] + every[3]], 1)), turn


def run_grid_mappings(group: ProcessGroup, device: Device) -> None:
    for call in MAPPINGS.values():
        assert_right(group, replace(call, shape=(8, group.size(), 16), kind="leaf", path="triton"), device=device.at)


def run_captured(group: ProcessGroup, device: Device) -> None:
    """Graphs of pack, exchange and unpack, replayed three times with other values in the same memory."""
    world = group.size()
    rows, columns = (Layout.on_mesh((8 * world, 24 * world), list(range(world)), [dim]) for dim in (0, 1))
    sizes, almost = ((24 * world) - 3 * (world - 1), *[3] * (world - 1)), [16, *[17] * (world - 1)]
    calls = {
        "gather_sp": lambda x: mappings.gather_from_sequence_parallel_region(x, group=group),
        "sum": lambda x: mappings.reduce_from_tensor_model_parallel_region(x, group),
        "scatter": lambda x: mappings.reduce_scatter_last_dim_to_tensor_parallel_region(x, group),
        "exchange": lambda x: mappings.all_to_all_hp2sp(mappings.all_to_all_sp2hp(x, group) * 2, group),
        "uneven": lambda x: mappings.all_to_all_dims(x, 1, 0, group, scatter_sizes=sizes),
        "reshard": lambda x: reshard({"w": x * 1}, rows, columns, group=group)["w"],
        "many": lambda x: torch.cat(
            [*reshard({str(n): x + n for n in range(20)}, rows, columns, group=group).values()]
        ),
        "16 bits": lambda x: collective.reduce_scatter(x, 1, group, wire=torch.bfloat16),
        "padded": lambda x: collective.all_gather(x[:, : almost[group.rank()]], 1, group, sizes=almost),
        "odd sum": lambda x: collective.all_reduce(x.flatten()[1:] * 1, group, wire=torch.bfloat16),
    }
    with ops.path("triton"):
        for name in device.pick(("exchange", "reshard"), tuple(calls)):
            call = calls[name]
            given = [value((8, 24 * world), "float32", 100 * turn + group.rank()).to(device.at) for turn in range(4)]
            wanted = [call(x.clone()).clone() for x in given]
            x = given[0].clone()
            out, replay = device.captured(call, x, exchanges=True)
            for turn in (1, 2, 3):
                x.copy_(given[turn])
                out = replay(out)
                assert torch.equal(out, wanted[turn]), (name, turn)


def run_graphs_of_compiled(group: ProcessGroup, device: Device) -> None:
    """Compiled layers under CUDA graphs: forward and backward of several steps against eager."""
    for uneven in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(group.rank())
        layer = Exchange(group, uneven).to(device.at)
        if uneven and group.size() != 2:
            continue
        compiled = torch.compile(layer, fullgraph=True, **device.compiled[1])
        for turn in range(4):
            x = torch.randn(8, 16, device=device.at)
            results = []
            for function in (layer, compiled):
                device.begin_step()
                leaf = x.clone().requires_grad_()
                out = function(leaf)
                kept = out.detach().clone()
                grads = torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])
                results.append((kept, *[each.clone() for each in grads]))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=str((uneven, turn)))


def run_without_waits(group: ProcessGroup, device: Device) -> None:
    """No call waits on the host for the device, which is busy; around exchanges that take place."""
    world = group.size()
    rows, columns = (Layout.on_mesh((8 * world, 8 * world), list(range(world)), [dim]) for dim in (0, 1))
    sizes = (7 * world + 1, *[1] * (world - 1))
    calls = {
        "gather_sp": lambda x: mappings.gather_from_sequence_parallel_region(x, group=group),
        "sum": lambda x: mappings.reduce_from_tensor_model_parallel_region(x, group),
        "exchange": lambda x: mappings.all_to_all_sp2hp(x, group),
        "uneven": lambda x: mappings.all_to_all_dims(x, 1, 0, group, scatter_sizes=sizes),
        "reshard": lambda x: reshard({str(n): x + n for n in range(20)}, rows, columns, group=group)["7"],
        "16 bits": lambda x: collective.reduce_scatter(x.detach(), 0, group, wire=torch.bfloat16) + x.sum() * 0,
    }  # fmt: skip
    for name, call in calls.items():
        x = value((8, 8 * world), "float32", group.rank()).to(device.at).requires_grad_()
        gradient = torch.ones_like(call(x))
        call(x).backward(gradient)
        device.busy()
        with device.waits_are_errors():
            try:
                call(x).backward(gradient)
            except RuntimeError as error:
                raise AssertionError(name) from error


def run_pipeline(group: ProcessGroup, device: Device) -> None:
    """1F1B over all stages, in the four modes of sending: losses and gradients of one process."""
    stages, stage, microbatches = group.size(), group.rank(), 5
    for batched, varying in ((True, False), (True, True), (False, False), (False, True)):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64, dtype=torch.float64, device=device.at) for _ in range(stages)]
        made = torch.Generator().manual_seed(1)
        lengths = [3 + (n % 3 if varying else 0) for n in range(microbatches)]
        batches = [torch.randn(n, 64, dtype=torch.float64, generator=made).to(device.at) for n in lengths]

        def chunk(x: Tensor | None, microbatch: int, layers: Any = layers, batches: Any = batches) -> Tensor:
            y = layers[stage](batches[microbatch] if x is None else x).tanh()
            return y.square().sum() if stage == stages - 1 else y

        config = SimpleNamespace(
            pipeline_dtype=torch.float64, batch_p2p_comm=batched, variable_seq_lengths=varying,
            pipeline_device=device.at,
        )  # fmt: skip
        losses = one_forward_one_backward(chunk, microbatches, P2PCommunicator(group, config), (3, 64))
        grads = [x.grad.clone() for x in layers[stage].parameters() if x.grad is not None]
        for layer in layers:
            layer.zero_grad()
        wanted = []
        for x in batches:
            for layer in layers:
                x = layer(x).tanh()
            wanted.append(x.square().sum())
            wanted[-1].backward()
        what = (batched, varying)
        if stage == stages - 1:
            assert [x.item() for x in losses] == [x.item() for x in wanted], what
        for found, x in zip(grads, layers[stage].parameters(), strict=True):
            torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=0, msg=str(what))


def run_named_in_time(group: ProcessGroup, device: Device) -> None:
    """Check mode names a disagreement on every rank within 10 s, and the communicator goes on."""
    x = torch.ones(4 + 2 * (group.rank() == 1), 8, device=device.at)
    right = torch.ones(4, 8, device=device.at)
    with p2p.check():
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(MismatchError, match="differ in shape"):
                mappings.reduce_from_tensor_model_parallel_region(x, group)
            assert time.monotonic() - started < 10
    for _ in range(2):
        summed = mappings.reduce_from_tensor_model_parallel_region(right.clone(), group)
        assert torch.equal(summed, right * group.size())


def run_initialized_again(group: ProcessGroup, device: Device) -> None:
    """``initialize`` makes groups of its own over the world that is there, three times; nothing of it is left."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert not [name for name in names if name in os.environ]
    for turn in range(3):
        tritoncomm.initialize(tensor_parallel=2)
        x = value((4, 4), "float32", group.rank()).to(device.at)
        out = collective.all_reduce(x.clone(), tritoncomm.ParallelMode.GLOBAL)
        assert torch.equal(out, sum(value((4, 4), "float32", each).to(device.at) for each in range(group.size()))), turn
        tritoncomm.destroy()


def run_lost(group: ProcessGroup, device: Device, kind: str, blocking: bool, folder: str) -> None:
    """The last rank is killed or raises before a sum that the others have called; ``blocking``: and wait for."""
    variables.FLIGHT.assign((64, folder))
    try:
        for step in range(1000):
            if step == 3 and group.rank() == group.size() - 1:
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyError("a mistake of the program")
            x = torch.ones(1000, device=device.at)
            if blocking:
                x = collective.all_reduce(x, group, async_op=True)[1].wait()
            else:
                x = mappings.reduce_from_tensor_model_parallel_region(x, group)
            assert x.sum().item() == 1000 * group.size()
    except PeerError as error:
        Path(folder, f"error-{group.rank()}").write_text(str(error))
        raise
    finally:
        variables.FLIGHT.assign((0, ""))


BOTH = [
    run_copies,
    run_almost_equal,
    run_sums,
    run_handles,
    run_orders,
    run_captured,
    run_pipeline,
    run_named_in_time,
    run_without_waits,
    run_experts,
]
FOUR = [run_mappings, run_grid, run_reshardings, run_ulysses, run_checked]


@pytest.mark.parametrize("function", BOTH)
def test_two_over_nccl(device: Device, nccl_pair: Pool, function: Any) -> None:
    nccl_pair.run(function, device, timeout=TIMEOUT)


@pytest.mark.parametrize("function", [*FOUR, *BOTH])
def test_four_over_nccl(device: Device, nccl_four: Pool, function: Any) -> None:
    nccl_four.run(function, device, world=4, timeout=TIMEOUT)


@pytest.mark.slow
def test_graphs_of_compiled_over_nccl(device: Device, nccl_pair: Pool) -> None:
    nccl_pair.run(run_graphs_of_compiled, device, timeout=TIMEOUT)


@pytest.mark.parametrize("blocking", [False, True], ids=["", "blocking"])
@pytest.mark.parametrize("kind", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_lost_rank_ends_its_peer_in_time(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, blocking: bool
) -> None:
    """A wait that blocks gets an error that names the call; NCCL's watchdog ends the process of any other."""
    monkeypatch.setattr("pool.GRACE_SECONDS", LIMIT_S + 25.0)
    # After an error torch's watchdog sleeps four times as long as its dump may take, a minute by default.
    settings = {"TORCH_NCCL_BLOCKING_WAIT": str(int(blocking)), "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
    ranks = device.ranks(device.backend, limit=timedelta(seconds=LIMIT_S), env=settings)
    try:
        started = time.monotonic()
        with pytest.raises(WorkerError) as told:
            ranks.run(run_lost, device, kind, blocking, str(tmp_path), timeout=TIMEOUT)
        seconds = time.monotonic() - started
    finally:
        ranks.stop()
    text, name = str(told.value), "all_reduce" if blocking else "reduce_from_tensor_model_parallel_region"
    assert ("exit code -9" if kind == "kill" else "a mistake of the program") in text
    assert "did not answer" not in text, text
    assert seconds < 30 + LIMIT_S + 20, text
    if blocking or device.backend != "nccl":
        error = (tmp_path / "error-0").read_text()
        assert error.startswith(f"{name}: "), error
        assert "ranks [0, 1]" in error, error
        record = json.loads((tmp_path / "tritoncomm-flight-0.json").read_text())
        assert record["calls"][-1]["name"] == name, record["calls"][-1]
    else:
        assert "exit code -6" in text, text
