"""The command `tritoncomm plan`: arguments, tables, exit codes."""

import json
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tritoncomm_kernels import tables

from tritoncomm.cli import reshard
from tritoncomm.cli._console import paragraphs, refusing, say, table, terminal
from tritoncomm.cli.reshard import plan_reshard
from tritoncomm.core import cost
from tritoncomm.explain import LAYERS, OPS, Explanation, LayerArguments, explain
from tritoncomm.explain.steps import Movement, Step
from tritoncomm.parsing import counted, dtype_name, parse_dtype, parse_ints
from tritoncomm.reshard.api import BUCKET_BYTES

__all__ = ["EPILOG", "plan"]

_MIN_FIGURE, _MAX_FIGURE = 1e-9, 1e9
_RATE = (1e9, _MIN_FIGURE, f"more than 0, {_MIN_FIGURE:g} at least")
# Unit, minimum and its words of the figures that an option gives.
_FIGURES = {"latency": (1e-6, 0.0, "0 or more"), "node": (1, 1, "1 or more")}
_FIGURES |= dict.fromkeys(("link", "network", "memory"), _RATE)
EPILOG = paragraphs(
    "Examples:",
    "tritoncomm plan sp2hp --shape 4096,2,8192 --world 8",
    "tritoncomm plan sp2hp --shape 4096,2,8192 --world 8 --device 'NVIDIA H200'   (where it has a tuned table)",
    "tritoncomm plan all_to_all --shape 2,1024,32,128 --dim 2,1 --world 4   (Ulysses)",
    "   ... --strides 12582912,12288,128,1   (the same of one third of a fused qkv)",
    "tritoncomm plan all_to_all --shape 8,512 --world 2 --sizes 3,5 --out-sizes 3,1   (split sizes)",
    "tritoncomm plan ulysses --shape 2,1024,32,128 --heads 32,8 --world 8   (q, and fewer k and v heads)",
    "tritoncomm plan reduce_scatter --shape 8192,8192 --world 16 --wire bf16 --two-levels   (summed in fp32)",
    "tritoncomm plan dispatch --shape 4096,7168 --topk 8 --world 8   (rows of random experts)",
    "tritoncomm plan reshard --shape 8192,8192 --source 'S0*8' --target 'R*2,S1*4'   (layouts: shards, replicas)",
    "Mappings, by the short name or the full one: " + ", ".join(f"{short} ({name})" for short, name in OPS.items()),
    "Layers, of which the exchanges are explained: "
    + ", ".join(f"{short} ({layer.name})" for short, layer in LAYERS.items()),
    "Exits with 0, or with 2 for invalid arguments or when such a call would be refused.",
)


def plan(
    op: Annotated[
        str,
        typer.Argument(help="The mapping or layer, like sp2hp or ulysses; all are listed below.", show_default=False),
    ] = "",
    shape: Annotated[
        str, typer.Option(help="Input on one rank (reshard: on all), like 4096,2,8192 or 4096x2x8192.")
    ] = "",
    world: Annotated[int | None, typer.Option(help="Number of ranks; reshard has those of its layouts.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Element type of the input: torch's name, or bf16, fp32, fp8_e4m3.")
    ] = "bfloat16",
    dim: Annotated[str, typer.Option(help="The dim; scatter_dim,gather_dim for all_to_all.")] = "",
    device: Annotated[str, typer.Option(help="cuda, cpu, or the name of a GPU, for its tuned table.")] = "cuda",
    sizes: Annotated[str, typer.Option(help="Split sizes of the dim, like 3,5; all-to-all: what is sent.")] = "",
    out_sizes: Annotated[str, typer.Option(help="all-to-all: what every rank sends to this one.")] = "",
    rank: Annotated[int, typer.Option(help="Rank to report on; matters with --sizes and for reshard.")] = 0,
    strides: Annotated[str, typer.Option(help="x.stride() of an input that is not contiguous.")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="copy, reduce: overwrite_inputs is on.")] = False,
    heads: Annotated[str, typer.Option(help="ulysses: heads of q, and of k and v; by_heads: of each tensor.")] = "",
    taps: Annotated[int, typer.Option(help="conv_halo: taps of the convolution.")] = 0,
    topk: Annotated[int, typer.Option(help="dispatch, combine: experts of a token.")] = 0,
    wire: Annotated[str, typer.Option(help="reduce_scatter: bf16 or fp16 travels, summed in fp32.")] = "",
    two_levels: Annotated[bool, typer.Option("--two-levels", help="With --wire: in the node, then between.")] = False,
    source: Annotated[str, typer.Option(help="reshard: the layout before, like S0*8 or R*2,S1*4.")] = "",
    target: Annotated[str, typer.Option(help="reshard: the layout afterwards; @8 is its first rank.")] = "",
    bucket: Annotated[int, typer.Option(help="reshard: bytes of a bucket at most.")] = BUCKET_BYTES,
    latency: Annotated[float | None, typer.Option(help="Microseconds per step of a collective; 5, cpu 50.")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s a rank sends inside a node; 350, cpu 1.")] = None,
    network: Annotated[float | None, typer.Option(help="GB/s a rank sends to other nodes; 50, cpu 1.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB/s of a copy, read plus written; 4000, cpu 10.")] = None,
    node: Annotated[int | None, typer.Option(help="Ranks in a node; 8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain what a mapping does, without running it: path per step, passes, bytes, tiles, predicted time.

    Bytes are exactly those that `tritoncomm.counters()` would show. Times are predictions from the figures given here,
    nothing is measured.
    """
    console = terminal()
    with refusing():
        figures = {"latency": latency, "link": link, "network": network, "memory": memory, "node": node}
        rates = _rates("cpu" if device == "cpu" else "cuda", figures)
        if not op:
            raise ValueError(f"which mapping? There are {_mappings()}")
        if not shape:
            raise ValueError("--shape is missing: that of the input on one rank, like 4096,2,8192")
        if op == "reshard":
            if world is not None:
                raise ValueError("--world: the layouts of reshard have their ranks, --source 'S0*8' for example 8")
            planned = plan_reshard(shape, source, target, dtype, rank, bucket)
            if as_json:
                print(json.dumps(reshard.as_json(planned, rates), indent=1))
            else:
                say(console, planned.text(rates))
            return
        names = *OPS, *OPS.values(), *LAYERS, *(layer.name for layer in LAYERS.values())
        if op not in names:
            near = get_close_matches(op, (*names, "reshard"), 1)
            hint = f"did you mean {near[0]}? `tritoncomm plan` lists all" if near else f"there are {_mappings()}"
            raise ValueError(f"no mapping {op!r}; {hint}")
        if world is None:
            raise ValueError("--world is missing: the number of ranks")
        numbers = partial(parse_ints, minimum=0)
        multiprocessors = 0
        if device == "cuda" and torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            device, multiprocessors = gpu.name, gpu.multi_processor_count
        explanation = explain(
            op, numbers(shape, "--shape"), world, parse_dtype(dtype), parse_ints(dim, "--dim"), device, rates,
            overwrite, sizes=numbers(sizes, "--sizes") or None, rank=rank,
            out_sizes=numbers(out_sizes, "--out-sizes") or None, stride=numbers(strides, "--strides") or None,
            sm_count=multiprocessors,
            layer=LayerArguments(
                parse_ints(heads, "--heads"), taps, topk, parse_dtype(wire) if wire else None, two_levels
            ),
        )  # fmt: skip
    if as_json:
        print(json.dumps(_as_json(explanation), indent=1))
    else:
        _show(explanation, console)
        if device not in ("cpu", "cuda") and not tables.chosen(device, multiprocessors):
            say(console, f"no tuned table for {device!r}: built-in tiles and no crossover")


def _mappings() -> str:
    """Return the short names of all mappings and layers, in words."""
    return f"{', '.join((*OPS, *LAYERS))}, and reshard"


def _rates(kind: str, figures: dict[str, float | None]) -> cost.Rates:
    """Return the assumed figures of this kind of device, with ``figures`` that are not None in their place."""
    given: dict[str, Any] = {}
    for name, value in figures.items():
        unit, minimum, words = _FIGURES[name]
        if value is None:
            continue
        if not minimum <= value <= _MAX_FIGURE:  # NaN neither
            raise ValueError(f"--{name} must be {words}, and {_MAX_FIGURE:g} at most")
        given[name] = value * unit
    return replace(cost.DEFAULTS[kind], **given)


def _as_json(explanation: Explanation) -> dict[str, Any]:
    """Return a dry run as JSON holds it."""

    def direction(one: Movement) -> dict[str, Any]:
        """Return forward or backward with its totals."""
        local, collective = one.seconds
        steps = [asdict(step) | _traffic(step) for step in one.steps]
        totals = {"steps": steps, "path": one.path, "passes": one.passes, **_traffic(one)}
        return asdict(one) | totals | {"predicted_seconds": {"local": local, "collective": collective}}

    return {
        "mapping": explanation.op,
        "world": explanation.world,
        "dtype": dtype_name(explanation.dtype),
        "device": explanation.device,
        "forward": direction(explanation.forward),
        "backward": None if explanation.backward is None else direction(explanation.backward),
        "no_backward": explanation.no_backward,
        "assumed": asdict(explanation.rates),
        "projection": [asdict(share) | {"share": share.share} for share in explanation.projection],
    }


def _traffic(one: Step | Movement) -> dict[str, int]:
    """Return the bytes of a step or of a direction, by name."""
    return {name: getattr(one, name) for name in ("bytes_copied", "bytes_sent")}


def _show(explanation: Explanation, console: Console) -> None:
    """Print a dry run: a table and the kernels' tiles for each direction, the figures assumed, the projection."""
    dtype, ranks = dtype_name(explanation.dtype), counted(explanation.world, "rank")
    console.print(f"{explanation.op}: {dtype}, {ranks}, {explanation.device}", style="bold", markup=False)
    for direction, one in (("forward", explanation.forward), ("backward", explanation.backward)):
        if one is None:
            say(console, f"{direction}: none: {explanation.no_backward}")
            continue
        console.print(_direction_table(direction, one))
        for step in one.steps:
            if step.tile:
                say(console, f"  {step.name}: tile {step.tile} ({step.origin})")
            if step.misaligned:
                ranks = ", ".join(map(str, step.misaligned))
                say(console, f"  {step.name}: blocks of ranks {ranks} start at no multiple of 16 bytes:")
                say(console, "    NCCL copies them by single bytes (read in 2.28's source, not timed)")
    say(console, f"predicted, not measured:\n{explanation.rates}")
    if not explanation.projection:
        return
    shares = ["-" if share.share is None else f"{share.share:.0%}" for share in explanation.projection]
    say(console, "PROJECTION, not measured: share of pack and unpack in the predicted time")
    say(console, "  ranks" + "".join(f"{share.world:6}" for share in explanation.projection))
    say(console, "  share" + "".join(f"{share:>6}" for share in shares))


def _unit(largest: int) -> tuple[int, str, int]:
    """Return bytes, name and decimals of the unit for numbers up to ``largest`` bytes."""
    if largest >= 2**20:
        return 2**20, "MiB", 3
    return (2**10, "KiB", 3) if largest >= 2**13 else (1, "bytes", 0)


def _direction_table(direction: str, movement: Movement) -> Table:
    """Return the steps of forward or backward as a table, with their total in the last row."""
    unit_bytes, unit, digits = _unit(max(movement.bytes_copied, movement.bytes_sent))
    names = ("step", "path", "what")  # columns of text, which fold
    headings = (*names, f"{unit}\ncopied", f"{unit}\nsent", "predicted\nus")
    rows = table(f"{direction}: {list(movement.shape)} -> {list(movement.result)}", headings, names)

    def add(name: str, path: str, what: str, bytes_copied: int, bytes_sent: int, seconds: float) -> None:
        """Add a row, with bytes in the table's unit and the time in microseconds."""
        amounts = (f"{amount / unit_bytes:.{digits}f}" for amount in (bytes_copied, bytes_sent))
        rows.add_row(name, path, escape(what), *amounts, f"{seconds * 1e6:.1f}")

    for step in movement.steps:
        add(step.name, step.path, step.what, step.bytes_copied, step.bytes_sent, step.seconds)
    rows.add_section()
    passes = f"{movement.passes} pass{'' if movement.passes == 1 else 'es'} over memory"
    add("all", movement.path, passes, movement.bytes_copied, movement.bytes_sent, sum(movement.seconds))
    return rows
