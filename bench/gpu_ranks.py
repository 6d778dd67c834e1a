"""The local part of mappings on one GPU: what a rank does before or after its collective.

The second part of ``make gpu-ranks``; the first checks many ranks, as threads, on the one GPU. There an exchange is a
copy inside the GPU, so no call is timed. What is timed, by CUDA events with the L2 cache flushed, is pack or unpack,
ours against Megatron-LM's ``split`` and ``cat``, beside a contiguous copy of as many bytes, the roof. "share with the
projected collective" is that time as a share of the forward if the collective took what `tritoncomm plan` projects from
published figures: a projection, not a measurement. Results go to $OUT, or to ``bench/results/<device>/``, after every
row. ``--dry`` runs everything on the CPU with TRITON_INTERPRET=1 and small sizes, and writes nothing. Exits 1 when
results differ, 2 without a CUDA device.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.device import Call, Device, gpu_main
from bench.formulations import PEERS
from bench.harness import Clock, Part, Row
from bench.timing import figures, quantile
from tritoncomm.core import ops
from tritoncomm.explain import explain

WORLDS = (2, 4, 8)
PEER, ROOF, SHARE = "split + cat", "roof", "share with the projected collective"


@dataclass(frozen=True)
class Case:
    """A mapping of ``world`` ranks, its name in `tritoncomm plan`, and its local step."""

    world: int
    name: str
    short: str
    step: str

    @property
    def label(self) -> str:
        return f"{self.name} world {self.world}"


CASES = [
    Case(world, *mapping)
    for world in WORLDS
    for mapping in (
        ("sp2hp", "sp2hp", "pack"),
        ("hp2sp", "hp2sp", "unpack"),
        ("all_gather_last", "ag_last", "unpack"),
        ("reduce_scatter_last", "rs_last", "pack"),
    )
]


def calls(case: Case, shape: tuple[int, int], device: torch.device) -> dict[str, Call]:
    """The step before or after the collective on one rank whose tensor has this shape."""
    (tokens, hidden), world = shape, case.world
    if case.step == "pack":
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device)
        ours: Call = lambda: ops.pack(x, 1, world)[0]  # noqa: E731
    else:
        outer = tokens // world if case.name == "hp2sp" else tokens
        x = torch.randn(world, outer, hidden, dtype=torch.bfloat16, device=device)
        ours = lambda: ops.unpack(x, (outer, world * hidden), 1, world)[0]  # noqa: E731
    return {"ours": ours, PEER: partial(PEERS[case.step][PEER], x, world, x.dtype)}


def measure(case: Case, device: Device, clock: Clock) -> Iterator[Row]:
    """The local part, compared before, and what the plan projects for the forward."""
    shape = (16, 64) if device.dry else (4096, 8192)
    timed = calls(case, shape, device.device)
    ours, theirs = (call().flatten().view(torch.int16) for call in timed.values())
    assert torch.equal(ours, theirs), f"{case.label}: {case.step} and {PEER} differ"
    moved = 2 * ours.nbytes
    samples = device.times({ROOF: device.copies(moved), **timed}, clock.rounds)
    middle = {provider: quantile(times, 0.5) for provider, times in samples.items()}
    local, collective = (seconds * 1e6 for seconds in explain(case.short, shape, case.world).forward.seconds)
    row = figures(
        f"{case.name} {shape[0]}x{shape[1]} bfloat16 world {case.world}, local part",
        samples,
        case={"op": case.name, "step": case.step, "shape": shape, "world": case.world},
        moved=moved,
        share_of_roof=round(middle[ROOF] / middle["ours"], 3),
        plan={"local_us": local, "collective_us": collective, "share": round(local / (local + collective), 3)},
        **{SHARE: {provider: round(middle[provider] / (middle[provider] + collective), 3) for provider in timed}},
    )
    yield row
    plan, shares = row["plan"], row[SHARE]
    print(
        f"    projection: {plan['collective_us']:.1f} us for the collective; the local part would be"
        f" {shares['ours']:.1%} of the forward ({PEER}: {shares[PEER]:.1%}),"
        f" and the plan says {plan['local_us']:.1f} us, {plan['share']:.1%}"
    )


PART = Part(
    name="gpu_ranks",
    cases=CASES,
    measure=measure,
    rounds=50,
    peer=None,
    budget_s=30,
)

if __name__ == "__main__":
    sys.exit(gpu_main(PART, ops.path("triton")))
