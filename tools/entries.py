"""Entries into functions of this library in named calls: ``python tools/entries.py [TREE]``.

Counts the frames that start in files of the package and its kernels in the sixth call of each kind, over torch's fake
process group of four ranks, by ``sys.setprofile``. A number that no machine's load changes, and a floor of host time.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["entries", "main"]

ROOT = Path(__file__).resolve().parents[1]
WORLD, WARM = 4, 5


def entries() -> dict[str, dict[str, int]]:
    """Return the entries of every named call of the tree on the path, by function."""
    import torch
    import torch.distributed as dist
    import tritoncomm_kernels
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tritoncomm import collective, mappings
    from tritoncomm.reshard import Layout, reshard
    from tritoncomm.ulysses import UlyssesAttention

    ours = tuple(os.path.dirname(str(each.__file__)) + os.sep for each in (mappings, tritoncomm_kernels))
    ours = (os.path.dirname(ours[0].rstrip(os.sep)) + os.sep, ours[1])
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=WORLD)
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(8, 16, requires_grad=True)
    plain, heads = x.detach(), [torch.ones(2, 4, 8, 16) for _ in range(3)]
    many = [torch.ones(8, 6), torch.ones(16), torch.ones(4, 4)]
    source, target = (Layout.on_mesh((32, 16), range(WORLD), [dim]) for dim in (0, 1))
    attention = UlyssesAttention(group, attention=lambda q, k, v: q)
    grad = torch.ones(32, 4)
    calls: dict[str, Callable[[], Any]] = {
        "sp2hp with gradient": lambda: mappings.all_to_all_sp2hp(x, group).backward(grad),
        "sp2hp": lambda: mappings.all_to_all_sp2hp(plain, group),
        "all_gather_dim 1": lambda: mappings.all_gather_dim(plain, 1, group),
        "reduce_scatter": lambda: collective.reduce_scatter(plain, 1, group),
        "Ulysses forward": lambda: attention(*heads),
        "split_reduce_scatter of three": lambda: collective.split_reduce_scatter(many, [0, 0, 0], group),
        "sum over a wire": lambda: collective.reduce_scatter(plain, 0, group, wire=torch.bfloat16),
        "reshard": lambda: reshard(plain, source, target, group=group),
    }
    found = {}
    for name, call in calls.items():
        names: Counter[str] = Counter()

        def note(frame: FrameType, event: str, argument: Any, names: Counter[str] = names) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(ours):
                names[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1

        for _ in range(WARM):
            call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        found[name] = dict(names)
    dist.destroy_process_group()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the entries of this tree, beside those of another if one is given."""
    parser = argparse.ArgumentParser(description="Entries into functions of ours in named calls.")
    parser.add_argument("base", nargs="?", help="a commit, or a folder with another tree")
    parser.add_argument("--functions", metavar="CALL", help="list the functions that this call of this tree enters")
    parser.add_argument("--count", action="store_true", help="print the entries of the tree on the path as JSON")
    options = parser.parse_args(arguments)
    if options.count:
        print(json.dumps(entries()))
        return 0
    from bench.against import worktree  # the comparison alone needs it

    columns = {"here": _counted(ROOT)}
    if options.functions:
        for name, count in columns["here"][options.functions].items():
            print(f"{count:6} {name}")
        return 0
    if options.base and Path(options.base).is_dir():
        columns = {"base": _counted(Path(options.base)), **columns}
    elif options.base:
        with worktree(options.base, ROOT) as tree:
            columns = {"base": _counted(tree), **columns}
    for name in columns["here"]:
        print(f"{name:32}" + "".join(f"{sum(column[name].values()):6}" for column in columns.values()))
    return 0


def _counted(tree: Path) -> dict[str, dict[str, int]]:
    """Count the entries of a tree in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "kernels")))}
    command = [sys.executable, "-P", str(Path(__file__)), "--count"]
    done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
