"""What a sum over a 16-bit wire sends, how exact it is, and what training makes of it: the tables of docs/sums.md.

Bytes are those of the calls that a rank makes of its backend, counted by the code that runs in training, over groups
that only have a size. Errors and losses are computed on this machine's CPU; they do not depend on its speed.

    PYTHONPATH=.:kernels python bench/sums.py           # bytes and errors: prints both tables, writes docs/sums.svg
    PYTHONPATH=.:kernels python bench/sums.py --train   # trains the demo's model on 4 ranks, about five minutes
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.kept import keep
from tritoncomm.core import backend, wire_sum
from tritoncomm.core.node_exchange import Nodes
from tritoncomm.core.wire_chunks import sum_pass
from tritoncomm.demo.data import batches
from tritoncomm.demo.plain_model import PlainTransformer
from tritoncomm.demo.settings import Settings
from tritoncomm.integrations import fsdp2

__all__ = ["WAYS", "Way", "bytes_between_nodes", "errors", "ring_bytes"]

NODE, SIZES = 8, (8, 16, 64, 512, 1024, 4096)
PICTURE = Path(__file__).parents[1] / "docs" / "sums.svg"
RANKS, STEPS = 4, 300
SUMMED = {"fp32": "fp32, by Gloo", "bf16": "bf16, by Gloo", "ours": "a bf16 wire"}


class Way(NamedTuple):
    """A way of a sum: its words, and for two levels the dtype between nodes."""

    words: str
    between: torch.dtype | None


WAYS = (
    Way('`"flat"`', None),
    Way('`"node"`, fp32 between nodes', torch.float32),
    Way('`"node"`, bf16 between nodes', torch.bfloat16),
)


class _Group:
    """A group that has a size and a rank, and no peers."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.position = world, rank

    def size(self) -> int:
        return self.world

    def rank(self) -> int:
        return self.position


def bytes_between_nodes(way: Way, world: int, elements: int = 0) -> tuple[int, int]:
    """Bytes that a rank sends inside its node and to other nodes, of a sum of bf16 over ``elements`` (4 a rank)."""
    elements = elements or 4 * world
    rank, sent = world // 2 + 1, [0, 0]
    group: Any = _Group(world, rank)

    def counted(out: Tensor, x: Tensor, out_rows: Any, in_rows: Any, *_: Any, **__: Any) -> None:
        rows = in_rows or (x.numel() // world,) * world
        assert sum(rows) == x.numel()
        assert sum(out_rows or (x.numel() // world,) * world) == out.numel()
        out.zero_()
        for peer, count in enumerate(rows):
            if peer != rank:
                sent[peer // NODE != rank // NODE] += count * x.itemsize

    nodes = Nodes(world // NODE, NODE, rank // NODE, rank % NODE) if way.between and world > NODE else None
    wire = wire_sum.Wire(torch.bfloat16, way.between or torch.float32, nodes)
    x, sizes = torch.zeros(elements, dtype=torch.bfloat16), (elements // world,) * world
    with mock.patch.object(backend, "all_to_all", counted):
        out = torch.empty(elements // world)
        wire_sum.sum_shards([x], ((x.shape, x.stride(), 0, sizes),), out, group, "sums", wire)
    return sent[0], sent[1]


def ring_bytes(world: int, elements: int, itemsize: int = 4) -> tuple[float, float]:
    """Bytes of a rank in a ring through the nodes, inside and between nodes: one rank of a node sends to the next."""
    whole = elements * itemsize * (world - 1) / world
    return (whole, 0.0) if world == NODE else (whole * (NODE - 1) / NODE, whole / NODE)


def errors(world: int, elements: int = 1 << 16) -> dict[str, float]:
    """Relative L2 errors against the sum in fp64, of normal bf16 gradients; results are rounded to bf16 in all ways."""
    made = torch.Generator().manual_seed(0)
    parts = torch.randn(world, elements, generator=made).bfloat16()
    exact = parts.double().sum(0)
    native, wide, levels = parts[0].clone(), parts[0].float(), []
    for part in parts[1:]:
        native, wide = native + part, wide + part.float()
    for node in parts.split(NODE):
        total = node[0].float()
        for part in node[1:]:
            total = total + part.float()
        levels.append(total)
    rounded = levels[0].bfloat16().float()
    for total in levels[1:]:
        rounded = rounded + total.bfloat16().float()
    ours = torch.empty(elements, dtype=torch.bfloat16)
    sum_pass(world, elements, torch.bfloat16).unpack(parts.view(-1), [ours])
    found = {"bf16": native, "fp32": wide.bfloat16(), "ours": ours, "ours, bf16 between nodes": rounded.bfloat16()}
    return {name: float((x.double() - exact).norm() / exact.norm()) for name, x in found.items()}


def _train(rank: int, store: str, way: str) -> None:
    """Train the demo's model with FSDP2 on this rank; rank 0 saves the losses."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    settings = replace(Settings(steps=100, layers=2, hidden=64, sequence=64, batch=16), dtype="bfloat16")
    model = PlainTransformer(settings)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if way == "bf16" else torch.float32)
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if way == "ours":
        fsdp2.use(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for part in range(STEPS // settings.steps):
        for inputs, targets in batches(replace(settings, seed=part)):
            loss = model(*(x.chunk(RANKS, 1)[rank].contiguous() for x in (inputs, targets)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().float().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / RANKS)
    if rank == 0:
        torch.save(losses, f"{store}.losses")
    dist.destroy_process_group()


def training() -> dict[str, list[float]]:
    """Losses of every step, by the way that gradients are summed."""
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("fp32", "bf16", "ours"):
            mp.spawn(_train, (f"{folder}/{way}", way), RANKS)
            losses[way] = torch.load(f"{folder}/{way}.losses")
    return losses


def picture() -> str:
    """Draw bytes between nodes against ranks, as shares of an fp32 ring's, as SVG."""
    left, top, width, height, most = 64, 40, 520, 220, 4.2
    sizes = SIZES[1:]

    def at(i: int, share: float) -> tuple[float, float]:
        return left + i * (width - left - 150) / (len(sizes) - 1), top + (1 - share / most) * (height - top)

    text = '<text x="{:.0f}" y="{:.0f}" font-size="12" font-family="sans-serif" fill="#333">{}</text>'
    shapes = [f'<rect width="{width}" height="{height + 50}" fill="white"/>']
    shapes.append(text.format(8, 20, "bytes between nodes of 8, as a share of an fp32 ring's"))
    for share in range(5):
        _, y = at(0, share)
        shapes += [f'<path d="M{left} {y:.0f}H{width - 150}" stroke="#ccc"/>', text.format(40, y + 4, share)]
    for i, world in enumerate(sizes):
        shapes.append(text.format(at(i, 0)[0] - 14, at(0, 0)[1] + 18, f"{world:,}"))
    for way, colour, words in zip(
        WAYS, ("#b85c00", "#4e79a7", "#3f7f38"), ("flat", "node, fp32", "node, bf16"), strict=True
    ):
        points = [at(i, _share(way, world)) for i, world in enumerate(sizes)]
        line = "L".join(f"{x:.0f} {y:.0f}" for x, y in points)
        shapes.append(f'<path d="M{line}" stroke="{colour}" stroke-width="2" fill="none"/>')
        shapes.append(text.format(points[-1][0] + 8, points[-1][1] + 4, f"{words}: {_share(way, sizes[-1]):.2f}"))
    shapes.append(text.format(left + 130, height + 40, "ranks"))
    body = "\n".join(shapes)
    size = f'viewBox="0 0 {width} {height + 50}" width="{width}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def _share(way: Way, world: int) -> float:
    """Bytes between nodes, as a share of an fp32 ring's; all bytes on one node."""
    elements = 4 * world
    sent, ring = bytes_between_nodes(way, world, elements), ring_bytes(world, elements)
    return sent[world > NODE] / ring[world > NODE]


def tables() -> str:
    """The tables of bytes and of errors."""
    lines = ["| ranks, on nodes of 8 | " + " | ".join(way.words for way in WAYS) + " |", "|---:|" + "---:|" * len(WAYS)]
    lines += [f"| {world:,} | " + " | ".join(f"{_share(way, world):.3f}" for way in WAYS) + " |" for world in SIZES]
    worlds = (4, 16, 64)
    found = {world: errors(world) for world in worlds}
    words = {
        "bf16": "bf16, rounded after every addition",
        "fp32": "fp32, rounded once",
        "ours": "a bf16 wire, rounded once",
        "ours, bf16 between nodes": "a bf16 wire, bf16 between nodes of 8",
    }
    lines += ["", "| sum of bf16 gradients | " + " | ".join(f"{world} ranks" for world in worlds) + " |"]
    lines.append("|---|" + "---:|" * len(worlds))
    lines += [
        f"| {text} | " + " | ".join(f"{found[w][name]:.1e}" for w in worlds) + " |" for name, text in words.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the tables and write the picture, or train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train the demo's model, and print its losses")
    if not parser.parse_args().train:
        shares, accuracy = tables().split("\n\n")
        print(shares, accuracy, sep="\n\n")
        keep("sums_bytes", shares.splitlines())
        keep("sums_errors", accuracy.splitlines())
        PICTURE.write_text(picture())
        return
    losses = training()
    table = ["| gradients are summed in | loss, mean of the last 20 steps | largest difference to fp32 of a step |"]
    table.append("|---|---:|---:|")
    for way, each in losses.items():
        apart = max(abs(a - b) for a, b in zip(each, losses["fp32"], strict=True))
        table.append(f"| {SUMMED[way]} | {sum(each[-20:]) / 20:.5f} | {apart:.1e} |")
    print(*table, sep="\n")
    keep("sums_training", table)


if __name__ == "__main__":
    main()
