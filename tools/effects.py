"""The record of effects: what users see of a call, on this tree and on another: ``python tools/effects.py BASE``.

A redesign may change nothing that a user has. For every case, rank and path the record has the bits of results and
gradients, their strides, whether they are views and which of them share memory, what became of the inputs, the
counters, the calls of the backend with numbers and dtypes of elements, peak memory, and errors with their texts. Both
trees run the cases of this one. Prints the cases that differ; exits 1 if there are any, 2 if a tree has no record.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from traffic import Held

__all__ = ["Effect", "differences", "main", "record_domain", "record_drawn"]

ROOT = Path(__file__).resolve().parents[1]
WORLDS = (1, 2, 3, 4)
PATHS = ("torch", "triton")
DRAWN = {"calls": 600, "reshardings": 300, "sums": 200, "attention": 200, "stages": 200, "hops": 200}
SEED = 1
SHOWN = 20
_CALLS = (
    "allreduce", "allgather", "all_gather_single", "_allgather_base", "reduce_scatter", "reduce_scatter_single",
    "_reduce_scatter_base", "alltoall", "all_to_all_single", "alltoall_base", "broadcast", "reduce", "gather",
    "scatter", "send", "recv", "barrier", "_start_coalescing", "_end_coalescing",
)  # fmt: skip
# Addresses in memory, of sockets (of errors that Gloo reports when another rank has raised), and of the tree; and the
# lines of its files.
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|/[^\s:]*/(?=tritoncomm/)|\[[0-9a-f.:]+\]:\d+|(?<=\.py):\d+")

Effect = dict[str, Any]
"""What one call does, in words and numbers that JSON holds."""
Record = dict[str, dict[str, Effect]]
"""Effects by case, and in a case by rank and path."""


class _Peak(TorchDispatchMode):
    """The new memory that is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if type(x) is Tensor and x.untyped_storage()._cdata not in known:  # a wrapper has no memory of its own
                self.held.add(x)
        return result


@contextmanager
def _backend_calls() -> Iterator[list[Any]]:
    """Yield the list of this process's calls of process groups: [name, dtypes and numbers of elements, numbers]."""
    found: list[Any] = []
    # What the class holds, as its attribute would be a function that binds no instance when it is set again.
    before = {name: vars(ProcessGroup)[name] for name in _CALLS if name in vars(ProcessGroup)}

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            tensors = [f"{str(x.dtype)[6:]} {x.numel()}" for x in leaves if isinstance(x, Tensor)]
            found.append([name, tensors, [x for x in leaves if type(x) is int]])
            return call.__get__(group)(*args, **kwargs)

        return noting

    for name, call in before.items():
        setattr(ProcessGroup, name, noted(name, call))
    try:
        yield found
    finally:
        for name, call in before.items():
            setattr(ProcessGroup, name, call)


def _digest(x: Tensor) -> str:
    """Hash the bits of a tensor as it is seen."""
    x = getattr(x, "inside", x).detach().resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(x.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if x.numel() else ""


def _seen(results: Any) -> list[Any]:
    """Return what a user sees of results: values, layouts, and which tensors share memory."""
    leaves, storages, seen = tree_leaves(results), {}, []
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor):
            seen.append(repr(x))
            continue
        kind, x = type(x).__name__, getattr(x, "inside", x)  # a wrapper has its data in another tensor
        first = storages.setdefault(x.untyped_storage().data_ptr(), i) if x.numel() else i
        flags = (x.requires_grad, kind, x.is_conj(), x.is_neg(), x._base is not None, first)
        seen.append([str(x.dtype)[6:], list(x.shape), list(x.stride()), *flags, _digest(x)])
    return seen


def _masked(error: BaseException) -> list[str]:
    """Return the type and the text of an error, without addresses and folders."""
    return [type(error).__name__, _ADDRESS.sub("", str(error))]


def _counted() -> dict[str, list[int]]:
    """Return the counters since the last reset: calls, bytes copied, bytes sent."""
    from tritoncomm import record  # of the tree that is recorded

    counted = {
        f"{name} {path}": [c.calls, c.bytes_copied, c.bytes_sent] for (name, path), c in record.counters().items()
    }
    record.reset()
    return counted


def record_domain(group: ProcessGroup, domain: str, path: Any) -> dict[str, Effect]:
    """Run every case of a domain on this rank, twice: as it is, and watched for its peak memory."""
    import effect_cases  # imports the tree that is recorded

    from tritoncomm.core import ops

    effects: dict[str, Effect] = {}
    _counted()
    for case in effect_cases.DOMAINS[domain](group):
        effect: Effect = {}
        with case.around(), ops.path(path):
            call, inputs = case.prepare()
            with _backend_calls() as effect["backend"]:
                try:
                    effect["results"] = _seen(call())
                except Exception as error:
                    effect["error"] = _masked(error)
            effect["inputs"] = [_digest(x) for x in inputs]
            effect["counters"] = _counted()
            peaks = []
            for _ in range(0 if "error" in effect or domain == "texts" else 1 if path == "triton" else 2):
                call, inputs = case.prepare()
                with _Peak() as peak:
                    result = call()
                peaks.append(peak.held.peak)
                del result
            effect["peak"] = min(peaks, default=0)  # Gloo's threads may hold tensors for longer
            _counted()
        assert case.name not in effects, case.name
        effects[case.name] = effect
    return effects


def record_drawn(group: ProcessGroup, domain: str, cases: Sequence[Any]) -> list[Effect]:
    """Run drawn cases of a fuzzer's domain on this rank: what came of them, counters and calls of the backend."""
    import fuzz_attention
    import fuzz_calls
    import fuzz_reshard
    import fuzz_stages
    import fuzz_states
    import fuzz_sums

    function = {
        "calls": fuzz_calls.run_call, "reshardings": fuzz_reshard.run_resharding, "sums": fuzz_sums.run_sum,
        "attention": fuzz_attention.run_attention, "stages": fuzz_stages.run_stages, "hops": fuzz_states.run_hop,
    }[domain]  # fmt: skip
    effects = []
    _counted()
    for case in cases:
        with _backend_calls() as calls:
            outcome = _ADDRESS.sub("", function(group, case))
        effects.append({"outcome": outcome, "backend": calls, "counters": _counted()})
    return effects


def _drawn(domain: str, count: int) -> list[tuple[Any, Any]]:
    """Draw (world, case) of a fuzzer's domain: the same ones in every process."""
    import fuzz
    from hypothesis import HealthCheck, Phase, given, seed, settings

    cases: list[tuple[Any, Any]] = []

    @seed(SEED)
    @settings(max_examples=count, database=None, deadline=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(fuzz.DOMAINS[domain].cases)
    def take(case: Any) -> None:
        cases.append(case)

    take()
    return cases


def _recorded(domains: Sequence[str]) -> Record:
    """Record every domain over pools of one to four ranks, on both paths."""
    from pool import Pool

    pool, record = Pool(4), {}
    try:
        for domain in domains:
            started, before = time.monotonic(), len(record)
            if domain.startswith("drawn "):
                cases = _drawn(domain[6:], DRAWN[domain[6:]])
                for world in dict.fromkeys(world for world, _ in cases):
                    chosen = [(i, case) for i, (size, case) in enumerate(cases) if size == world]
                    sent = [case for _, case in chosen]
                    ranks = pool.run(record_drawn, domain[6:], sent, world=world, timeout=600)
                    for rank, effects in enumerate(ranks):
                        for (i, case), effect in zip(chosen, effects, strict=True):
                            name = f"{domain} {i}: {_ADDRESS.sub('', str(case))} over {world}"
                            record.setdefault(name, {})[f"rank {rank}"] = effect
            else:
                for world in WORLDS:
                    for path in PATHS if domain != "texts" else PATHS[:1]:
                        ranks = pool.run(record_domain, domain, path, world=world, timeout=900)
                        for rank, effects in enumerate(ranks):
                            for name, effect in effects.items():
                                record.setdefault(f"{domain}: {name} over {world}", {})[f"rank {rank} {path}"] = effect
            _check_in_step(record)
            print(f"{domain}: {len(record) - before} cases, {time.monotonic() - started:.0f} s", flush=True)
    finally:
        pool.stop()
    return record


def _check_in_step(record: Record) -> None:
    """Reject a record in which ranks lost each other: all later cases of their group fail alike, on every tree."""
    for name, effects in record.items():
        for who, effect in effects.items():
            text = str(effect.get("error", "")) + str(effect.get("outcome", ""))
            if "PeerError" in text:
                raise RuntimeError(f"{name}, {who}: ranks lost each other, so nothing behind it was compared: {text}")


def differences(base: Record, here: Record) -> list[tuple[str, str]]:
    """Return (field, text) of every case in which two records differ; a case of one record alone is one of them."""
    found = []
    for name in sorted(base.keys() | here.keys()):
        if name not in base or name not in here:
            found.append(("case", f"{name}: only {'here' if name in here else 'at the base'}"))
            continue
        for who in sorted(base[name].keys() | here[name].keys()):
            a, b = base[name].get(who, {}), here[name].get(who, {})
            for field in sorted(a.keys() | b.keys()):
                if a.get(field) != b.get(field):
                    found.append((field, f"{name}, {who}, {field}:\n  {a.get(field)}\n  {b.get(field)}"))
    return found


def _record_of(tree: Path, domains: Sequence[str], out: Path) -> Record:
    """Record a tree in a process of its own, by the cases of this one."""
    paths = [tree, tree / "kernels", ROOT / "tools", ROOT / "tests" / "helpers"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", str(Path(__file__)), "--record", str(out), "--domains", *domains]
    print(f"record of {tree}", flush=True)
    subprocess.run(command, cwd=tree, env=environment, check=True)
    return json.loads(out.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Record one tree, or compare the records of two."""
    domains = ["mappings", "many", "sums", "attention", "messages", "reshardings", "texts"]
    domains += [f"drawn {name}" for name in DRAWN]
    parser = argparse.ArgumentParser(description="The effects of calls on this tree and on another commit.")
    parser.add_argument("base", nargs="?", help="the commit to compare with, or a folder with another tree")
    parser.add_argument("--record", metavar="FILE", help="record the tree on the path into a file, and compare nothing")
    parser.add_argument(
        "--domains", nargs="+", default=domains, choices=domains, metavar="NAME", help=", ".join(domains)
    )
    parser.add_argument("--keep", metavar="FILE", help="record of the base: written if it is missing, else read")
    options = parser.parse_args(arguments)
    if options.record:
        Path(options.record).write_text(json.dumps(_recorded(options.domains)))
        return 0
    if not options.base:
        parser.error("BASE or --record FILE is needed")
    from bench.against import worktree  # the comparison alone needs it

    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(options.keep or f"{scratch}/base.json")
        try:
            if kept.is_file():
                base: Record = json.loads(kept.read_text())
            elif Path(options.base).is_dir():
                base = _record_of(Path(options.base), options.domains, kept)
            else:
                with worktree(options.base, ROOT) as tree:
                    base = _record_of(tree, options.domains, kept)
            here = _record_of(ROOT, options.domains, Path(scratch, "here.json"))
        except subprocess.CalledProcessError as error:
            print(f"no record: exit {error.returncode}")
            return 2
    found = differences(base, here)
    for _, text in found[:SHOWN]:
        print(text)
    effects, fields = sum(map(len, here.values())), dict(Counter(field for field, _ in found))
    print(f"{len(here)} cases, {effects} effects of ranks and paths; {len(found)} differences {fields}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
