"""Many ranks on one GPU, as threads of one process: every mapping checked, and the local part of a call timed.

Run as ``make gpu-ranks``. Ranks run at the same time over torch's threaded process group, the kernels forced: forward
and backward of every mapping against its closed form, evenly and by split sizes, and every transition of a sharded
tensor. There an exchange is a copy inside the GPU, so no call is timed. What is timed, by CUDA events with the L2 cache
flushed, is what one rank does before or after its exchange: pack or unpack, ours against Megatron-LM's ``split`` and
``cat``, beside a contiguous copy of as many bytes, the roof. "share with the projected collective" is that time as a
share of the forward if the collective took what `tritoncomm plan` projects from published figures: a projection, not a
measurement. Results go to $OUT, or to ``bench/results/<device>/``, after every group. ``--dry`` runs everything on the
CPU with TRITON_INTERPRET=1 and small sizes, and writes nothing. Exits 0 when everything holds, 1 when something does
not, 2 without a CUDA device or a threaded process group.
"""

import argparse
import contextlib
import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.checks import Group, limit_run, run_check, summary
from bench.closed_forms import (
    MAPPINGS,
    against_closed_form,
    by_sizes,
    by_sizes_against_closed_form,
    whole_numbers,
)
from bench.device import Call, Device, destination
from bench.formulations import PEERS
from bench.threaded import ThreadedRanksError, available, launches_take_turns, run_ranks
from bench.timing import figures, quantile, versions, write_json
from tritoncomm import counters, mappings, tensor
from tritoncomm.core import ops
from tritoncomm.explain import explain
from tritoncomm.tensor.layout import plain

BUDGET_S = 150  # later checks are skipped, visibly
GRACE_S = 20  # for a check that began in time
WORLDS = (2, 4, 8)
DTYPES = (torch.bfloat16, torch.float32)
PEER, ROOF, SHARE = "split + cat", "roof", "share with the projected collective"
# What is timed: the mapping, its name in `tritoncomm plan`, its local step.
LOCAL = (
    ("sp2hp", "sp2hp", "pack"),
    ("hp2sp", "hp2sp", "unpack"),
    ("all_gather_last", "ag_last", "unpack"),
    ("reduce_scatter_last", "rs_last", "pack"),
)
LEFT_OUT = "left out: hops between stages, because the threaded group neither sends nor receives"


def check_mappings(group: Group, world: int, device: torch.device) -> None:
    """Every mapping on ranks that run at the same time."""

    def on_rank(rank: int, pg: ProcessGroup) -> Group:
        found = Group(group.name)
        backward_is_here(found, rank, pg, device)
        for dtype, name in itertools.product(DTYPES, MAPPINGS):
            against_closed_form(found, name, dtype, rank, pg, device)
        return found

    before = counters().get(("all_to_all_sp2hp", "triton"))
    gathered(group, run_ranks(world, on_rank))
    group.expect(counters().get(("all_to_all_sp2hp", "triton")) != before, "no kernel was launched")


def check_split_sizes(group: Group, world: int, device: torch.device) -> None:
    """Every mapping that takes split sizes, on ranks that run at the same time; zero sizes among them."""

    def on_rank(rank: int, pg: ProcessGroup) -> Group:
        found = Group(group.name)
        for dtype, name in itertools.product(DTYPES, by_sizes(world)):
            by_sizes_against_closed_form(found, name, dtype, rank, pg, device)
        return found

    gathered(group, run_ranks(world, on_rank))


def backward_is_here(group: Group, rank: int, pg: ProcessGroup, device: torch.device) -> None:
    """Without that ranks would wait for each other in autograd's one thread of the device."""
    x = whole_numbers((8, 16), torch.float32, rank, device).requires_grad_()
    threads: list[int] = []
    x.register_hook(lambda _: threads.append(threading.get_ident()))
    mappings.all_to_all_sp2hp(x, pg).sum().backward()
    group.expect(threads == [threading.get_ident()], f"rank {rank}: backward ran in another thread")


def check_transitions(group: Group, world: int, device: torch.device) -> None:
    """Every transition of a sharded tensor between dim 0, dim 1 and replicated, even and ragged."""

    def on_rank(rank: int, pg: ProcessGroup) -> Group:
        found, ranks = Group(group.name), tensor.ProcessGroup(tp_degree=world)
        for dtype, shape in itertools.product(DTYPES, ((16, 24), (9, 17))):
            for pair in itertools.permutations((0, 1, None), 2):
                transition(found, ranks, pair, whole_numbers(shape, dtype, 1, device))
        return found

    gathered(group, run_ranks(world, on_rank))


def transition(group: Group, ranks: tensor.ProcessGroup, pair: tuple[int | None, ...], full: Tensor) -> None:
    """One redistribution forward, and backward with a gradient that is the same on every rank."""
    rank, world = ranks.tp_local_rank(), ranks.tp_world_size()
    (source, old), (target, new) = ((dim, layout_of(dim, world)) for dim in pair)
    local = piece(full, source, rank, world).clone().requires_grad_()
    leaf = tensor.ColoTensor(local, tensor.ColoTensorSpec(ranks, old), full.shape)
    moved = leaf.redistribute(new)
    label = f"{pair} {tuple(full.shape)} {full.dtype}, rank {rank} of {world}"
    group.expect(torch.equal(plain(moved), piece(full, target, rank, world)), label)
    gradient = full * 3 + 1
    plain(moved).backward(piece(gradient, target, rank, world))
    back = piece(gradient, source, rank, world)
    group.expect(leaf.grad is not None and torch.equal(plain(leaf.grad), back), f"{label}, backward")


def layout_of(dim: int | None, world: int) -> Any:
    return tensor.ReplicaSpec() if dim is None else tensor.ShardSpec([dim], [world])


def piece(full: Tensor, dim: int | None, rank: int, world: int) -> Tensor:
    """This rank's piece as ``torch.chunk`` cuts; the last ones may be empty."""
    if dim is None:
        return full
    size = full.shape[dim]
    step = -(-size // world)
    start = min(rank * step, size)
    return full.narrow(dim, start, min(step, size - start))


def gathered(group: Group, ranks: list[Group]) -> None:
    """What all ranks found, as one."""
    for found in ranks:
        group.checks += found.checks
        group.failures += found.failures


CHECKS = {"mappings": check_mappings, "split sizes": check_split_sizes, "sharded tensors": check_transitions}


def local_calls(name: str, step: str, shape: tuple[int, int], world: int, device: torch.device) -> dict[str, Call]:
    """The step before or after the exchange on one rank whose tensor has this shape."""
    tokens, hidden = shape
    if step == "pack":
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
        calls: dict[str, Call] = {"ours": lambda: ops.pack(x, 1, world)[0]}
    else:
        outer = tokens // world if name == "hp2sp" else tokens
        x = torch.randn(world, outer, hidden, dtype=torch.bfloat16, device=device)
        calls = {"ours": lambda: ops.unpack(x, (outer, world * hidden), 1, world)[0]}
    calls[PEER] = partial(PEERS[step][PEER], x, world, x.dtype)
    return calls


def time_local_parts(group: Group, device: Device, worlds: Sequence[int], rounds: int, rows: list[Any]) -> None:
    """A row for every mapping and number of ranks; what is timed is compared before."""
    shape = (16, 64) if device.dry else (4096, 8192)
    for world, (name, short, step) in itertools.product(worlds, LOCAL):
        calls = local_calls(name, step, shape, world, device.device)
        ours, theirs = (calls[provider]().flatten().view(torch.int16) for provider in ("ours", PEER))
        group.expect(torch.equal(ours, theirs), f"{name}, world {world}: {step} and {PEER} differ")
        rows.append(measure(device, calls, (name, short, step), shape, world, rounds))
        print(line(rows[-1]), flush=True)


def measure(
    device: Device,
    calls: dict[str, Call],
    mapping: tuple[str, str, str],
    shape: tuple[int, int],
    world: int,
    rounds: int,
) -> dict[str, Any]:
    """A row of the local part of one mapping, and what the plan projects for the whole forward."""
    name, short, step = mapping
    moved = 2 * calls["ours"]().nbytes
    samples = device.times({ROOF: device.roof(moved), **calls}, rounds)
    middle = {provider: quantile(times, 0.5) for provider, times in samples.items()}
    local, collective = (seconds * 1e6 for seconds in explain(short, shape, world).forward.seconds)
    shares = {provider: round(middle[provider] / (middle[provider] + collective), 3) for provider in ("ours", PEER)}
    return figures(
        f"{name} {shape[0]}x{shape[1]} bfloat16 world {world}, local part",
        samples,
        case={"op": name, "step": step, "shape": shape, "world": world},
        moved=moved,
        share_of_roof=round(middle[ROOF] / middle["ours"], 3),
        plan={"local_us": local, "collective_us": collective, "share": round(local / (local + collective), 3)},
        **{SHARE: shares},
    )


def line(row: dict[str, Any]) -> str:
    ours, plan, shares = row["us"]["ours"], row["plan"], row[SHARE]
    return (
        f"{row['row']:58} {ours['median']:9.1f} us ({ours['p20']:.1f}-{ours['p80']:.1f})"
        f"  roof {row['share_of_roof']:5.2f}  {row['ratio'][PEER]:5.2f} of {PEER}\n"
        f"    projection: {plan['collective_us']:.1f} us for the collective; the local part would be"
        f" {shares['ours']:.1%} of the forward ({PEER}: {shares[PEER]:.1%}),"
        f" and the plan says {plan['local_us']:.1f} us, {plan['share']:.1%}"
    )


def run(device: Device, worlds: Sequence[int], rounds: int) -> dict[str, Any]:
    """All checks and timings, printed; the content of the results file, which is written after every group."""
    started = time.monotonic()
    print(f"{device.name}, torch {torch.__version__}, triton {triton.__version__}")
    print("ranks are threads; seconds of these checks are the host's, and say nothing about speed")
    groups: list[Group] = []
    content: dict[str, Any] = {
        "device": device.name,
        "versions": versions(),
        "unit": "microseconds per call",
        "rows": [],
        "groups": [],
        "left_out": [LEFT_OUT],
    }

    def add(label: str, check: Callable[..., None], **arguments: Any) -> None:
        groups.append(run_check(label, partial(check, **arguments), started + BUDGET_S))
        content["groups"].append(groups[-1].result())
        save(device, content)

    with ops.path("triton"), launches_take_turns() if device.dry else contextlib.nullcontext():
        for world, (what, check) in itertools.product(worlds, CHECKS.items()):
            add(f"{what}: {world} ranks in threads", check, world=world, device=device.device)
        print(LEFT_OUT)
        rates = explain("sp2hp", (8, 8), 2).rates
        print(f"local parts are measured; collectives and the plan's figures are a projection from {rates.source}")
        add("local parts, timed", time_local_parts, device=device, worlds=worlds, rounds=rounds, rows=content["rows"])
    summary(groups, started)
    return content


def save(device: Device, content: dict[str, Any]) -> str:
    """Write the results file, in a dry run none; what was written."""
    if device.dry:
        return "dry run: nothing written"
    return f"written: {write_json(destination(device, 'gpu_ranks'), content)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Many ranks on one GPU, as threads of one process.")
    parser.add_argument("--dry", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, choices=WORLDS, help="numbers of ranks")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("gpu_ranks: no CUDA device here; nothing was tested")
        return 2
    if options.dry and os.environ.get("TRITON_INTERPRET") != "1":
        print("gpu_ranks: --dry needs TRITON_INTERPRET=1")
        return 2
    try:
        available()
    except ThreadedRanksError as error:
        print(f"gpu_ranks: {error}; nothing was tested")
        return 2
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if not options.dry:
        limit_run(BUDGET_S + GRACE_S)
    device = Device(options.dry)
    content = run(device, options.worlds, 2 if options.dry else options.rounds)
    print(save(device, content))
    return 1 if any(group["failures"] for group in content["groups"]) else 0


if __name__ == "__main__":
    sys.exit(main())
