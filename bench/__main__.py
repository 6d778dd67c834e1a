"""Command that runs the benchmarks: ``python -m bench`` in a clone.

It prints ours against peers as ratios, draws them, and compares them with the committed figures. Every part runs in a
process of its own.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import pictures
from bench.hosts import missing_megatron
from tritoncomm import launchers

__all__ = ["Outcome", "main", "parts", "run"]

HERE = Path(__file__).resolve().parent
GPU = "gpu"
# What a part measures, and its seconds on two cores of a server.
PARTS = {
    "compiled": ("layers under torch.compile, against Megatron-LM and torch", 135),
    "end_to_end": ("mappings between 2 and 4 ranks over Gloo", 66),
    "experts": ("tokens to experts and back, against transformers", 60),
    "kernels": ("pack and unpack on a CPU, against torch's ways", 15),
    "launch": ("host time of a kernel's launch", 8),
    "many": ("new split sizes, many tensors, many ranks", 37),
    "mappings": ("host time of every mapping", 70),
    "megatron_step": ("a GPT's step with and without the patch", 57),
    "p2p": ("one hop of a pipeline", 26),
    "parallel": ("styles of parallelize_module", 22),
    "recurrent": ("exchanges of recurrent layers, against the same by hand", 12),
    "redistribution": ("sharded tensors, against DTensor", 55),
    "tensor": ("tensor-parallel layers, against DTensor", 60),
    "ulysses": ("attention's exchanges, against three libraries", 99),
    GPU: ("the kernels, against a plain copy and torch", 265),
}
FILES = {"mappings": "host_cost"}  # parts whose results have another name
MISSED, PROGRESS = "MISSED: ", "written:"
ABOUT = """Run the benchmarks, print ours against peers as ratios, draw them, compare them
with the committed figures.

Every ratio is measured in one run, peers interleaved with ours. The part gpu
measures the kernels, and needs a GPU."""
EXAMPLES = """examples:
  python -m bench --list
  python -m bench p2p
  python -m bench mappings --only "hp2sp 8" --rounds 20
  python -m bench mappings --plot --out figures
  python -m bench --check   (before a commit)

exits with 0; with 1 when a part fails, or when --check finds a missed target
or a worse ratio; with 2 for invalid arguments, or when nothing can be measured"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a part: its exit status (1: a target was missed, 2: it could not run), the targets, its last line."""

    part: str
    status: int
    missed: tuple[str, ...]
    last: str


def parts() -> list[str]:
    """Names of the parts: ``bench_<part>.py``, and ``gpu`` for the kernels on a GPU."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py")) + [GPU]


def run(
    part: str, out: Path, rounds: int | None = None, only: str = "", follow: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Run one part in a process of its own; results go to ``out/<device>/<name>.json``, after every row.

    Args:
        part: one of ``parts()``.
        out: folder of the results.
        rounds: samples of every provider; the part's own default without it.
        only: cases whose label has all these words.
        follow: called with every line that the part prints, as it is printed, except missed targets.
    """
    paths = [str(HERE.parent), str(HERE.parent / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    launchers.forget(environment)
    if sys.stdout.isatty():
        environment["COLUMNS"] = str(shutil.get_terminal_size().columns)  # the part writes into a pipe
    command = [sys.executable, str(HERE / f"bench_{part}.py"), "--json", str(_results(part, out))]
    if part == GPU:
        command = [sys.executable, str(HERE / "gpu_bench.py")]
        environment["OUT"] = str(_results(part, out).parent)
    command += [*(("--rounds", str(rounds)) if rounds else ()), *(("--only", only) if only else ())]
    lines = [line for line in _lines(command, environment, follow) if line]
    last = next((line for line in reversed(lines[:-1]) if not line.startswith(PROGRESS)), "")
    missed = tuple(line.removeprefix(MISSED) for line in lines if line.startswith(MISSED))
    return Outcome(part, int(lines[-1]), missed, last)


def _lines(command: Sequence[str], environment: dict[str, str], follow: Callable[[str], None]) -> Iterator[str]:
    """Lines of the output of a process, then its exit status."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=both, text=True) as child:
        try:
            for line in map(str.rstrip, child.stdout or ()):
                if not line.startswith((MISSED, PROGRESS)):
                    follow(line)
                yield line
        except KeyboardInterrupt:
            child.wait(30)  # it is interrupted too, and writes the rows that it has
            raise
        yield str(child.wait())


def _results(part: str, out: Path) -> Path:
    device = torch.cuda.get_device_name(0) if part == GPU else "cpu"
    name = "".join(c if c.isalnum() else "-" for c in device.lower())
    return out.absolute() / name / f"{'gpu_bench' if part == GPU else FILES.get(part, part)}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="?", help="one part, see --list; by default all that this machine can run")
    parser.add_argument("--list", action="store_true", help="list the parts and stop")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only cases whose name, the text before the mode, has all these words",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds per row; fewer are quicker and noisier")
    parser.add_argument("--check", action="store_true", help="fail when a ratio is worse than the committed one")
    parser.add_argument("--plot", action="store_true", help="draw PNG and SVG into --out, or bench-results")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the results there, as <device>/<part>.json")
    return parser


def _runnable() -> list[str]:
    return [name for name in parts() if name != GPU or torch.cuda.is_available()]


def _without_peer(names: Sequence[str]) -> tuple[list[str], str]:
    """Parts that compare with Megatron-core where it is not installed, and how to install it."""
    texts = {name: (HERE / f"bench_{name}.py").read_text() for name in names if name != GPU}
    needed = [name for name, text in texts.items() if "megatron_part" in text or "missing_megatron" in text]
    problem = missing_megatron() if needed else ""
    return (needed, problem) if problem else ([], "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        for name in parts():
            phrase, seconds = PARTS[name]
            needed = "" if name in _runnable() else " (needs a GPU)"
            print(f"{name:<15}{phrase + needed:<58}{seconds:>4} s")
        return 0
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if options.part and options.part not in parts():
        parser.error(f"no part {options.part!r}; --list shows them")
    if options.part and options.part not in _runnable():
        parser.error("part gpu needs a CUDA device, and torch sees none here")
    if options.plot and (problem := pictures.problem()):
        parser.error(problem)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path("bench-results" if options.plot else scratch)
        outcomes = []
        names = [options.part] if options.part else _runnable()
        absent, problem = _without_peer(names)
        if problem:
            print(f"{problem}\nnot run: {', '.join(absent)}", flush=True)
        for name in [each for each in names if each not in absent]:
            print(f"{name}: us of ours at p20 (a fifth took less), ratio to each peer, ± spread", flush=True)
            outcomes.append(run(name, folder, options.rounds, options.only, lambda line: print(line, flush=True)))
        if options.plot:
            _draw([one.part for one in outcomes], folder)
    return _judged(outcomes, options.check)


def _draw(measured: Sequence[str], folder: Path) -> None:
    """Draw the results of these parts; one that measured nothing has no file."""
    for path in (_results(part, folder) for part in measured):
        if path.is_file():
            rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
            for picture in pictures.draw(f"{path.parent.name}/{path.stem}", rows, folder):
                print("drawn:", picture)


def _judged(outcomes: Sequence[Outcome], check: bool) -> int:
    """Print missed targets and parts without results; the exit status, 2 where no part could run."""
    status = 0
    idle = [one for one in outcomes if one.status == 2]
    for one in outcomes:
        for line in one.missed:
            print(f"missed, {one.part}: {line}")
        if one in idle:
            print(f"{one.part}: {one.last}")
        elif one.status not in (0, 1) or (one.status and not one.missed):
            print(f"{one.part} did not run: {one.last}")
            status = 1
        elif one.status and check:
            status = 1
    return 2 if len(idle) == len(outcomes) else status  # also where none was begun


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
