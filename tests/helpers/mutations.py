"""Mutations of the product, each of which has to turn a test red: ``python tests/helpers/mutations.py [WORDS...]``.

Every mutation is made in a copy of the tree, and the tests that it names run there until the first failure. A mutation
that passes them survives, and the command exits with 1. WORDS select mutations by what they do. Errors of collection
do not count as red: a mutation that does not even import proves nothing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTATIONS", "ROOT", "Mutation", "main"]

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("tritoncomm", "kernels", "tests", "bench", "docs", "examples")
FILES = ("pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt")
TIMEOUT = 300
RED, SURVIVED = 1, 0  # exit status of pytest


@dataclass(frozen=True)
class Mutation:
    """One wrong line.

    Attributes:
        what: in words.
        file: relative to the root.
        old: occurs in the file exactly once.
        new: takes its place.
        tests: arguments of pytest.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "an asynchronous result is not waited for", "tritoncomm/core/handle.py",
        "            work.wait()\n", "            work.is_completed()\n", "tests/test_collective.py",
    ),
    Mutation(
        "an asynchronous result is not unpacked", "tritoncomm/core/handle.py",
        "            finish()\n", "            del finish\n", "tests/test_collective.py",
    ),
    Mutation(
        "a rank keeps another rank's shard", "tritoncomm/core/plan.py",
        "return rank * size, size", "return (world - 1 - rank) * size, size", "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "bytes sent count this rank too", "tritoncomm/core/plan.py",
        "own * (world - 1), math", "own * world, math", "tests/core/test_plan.py tests/test_record.py",
    ),
    Mutation(
        "this rank's split size is not checked", "tritoncomm/core/plan.py",
        " or sizes[rank] != shape[dim]:", ":", "tests/core/test_plan.py tests/test_errors.py",
    ),
    Mutation(
        "a ragged dim loses its last rows", "tritoncomm/core/address_map.py",
        "run = -(-shape[dim] // world) * inner", "run = shape[dim] // world * inner", "tests/core/test_address_map.py",
    ),
    Mutation(
        "send and receive counts are exchanged", "tritoncomm/core/uneven.py",
        "plan.recv_counts, plan.send_counts", "plan.send_counts, plan.recv_counts", "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a DTensor is sent as a plain tensor", "tritoncomm/core/validation.py",
        "type(x) is not Tensor or x.layout", "x.layout", "tests/test_errors.py",
    ),
    Mutation(
        "a sum overwrites a tensor that is referenced elsewhere", "tritoncomm/core/inplace.py",
        "references <= _temporary[0] and ", "", "tests/core/test_inplace.py",
    ),
    Mutation(
        "a sum overwrites memory of numpy", "tritoncomm/core/inplace.py",
        "        and storage.resizable()", "        # and storage.resizable()", "tests/core/test_inplace.py",
    ),
    Mutation(
        "the adjoint of an all-gather forgets to sum", "tritoncomm/mappings/functions.py",
        "-1, eager.all_gather, eager.reduce_scatter,\n", "-1, eager.all_gather, eager.split,\n",
        "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a second derivative takes a sum for a replica", "tritoncomm/mappings/functions.py",
        "args = (True, ctx.input_split_sizes", "args = (False, ctx.input_split_sizes", "tests/mappings",
    ),
    Mutation(
        "backward of all_to_all does not swap the split sizes", "tritoncomm/mappings/exchanges.py",
        "sizes = (ctx.input_split_sizes, ctx.output_split_sizes)",
        "sizes = (ctx.output_split_sizes, ctx.input_split_sizes)", "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a kernel reads past the end of a row", "kernels/tritoncomm_kernels/address.py",
        "(o < outer) & (c < row), (o < outer) & (c < cols)", "(o < outer) & (c < cols), (o < outer) & (c < cols)",
        "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "a kernel forgets the stride between ranks", "kernels/tritoncomm_kernels/address.py",
        "(w.to(tl.int64) * stride_rank + (c - w * run))", "(w.to(tl.int64) * run * outer + (c - w * run))",
        "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "a long sum skips parts", "kernels/tritoncomm_kernels/reduction.py",
        "part_ptr += REST * step", "part_ptr += step", "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "a damaged header is believed", "tritoncomm/p2p/header.py",
        "if words[2] != _checksum(words[:end]):", "if words[2] == 0:", "tests/p2p",
    ),
    Mutation(
        "gradients are posted in the order of activations", "tritoncomm/p2p/neighbours.py",
        "-source if is_gradient else source, target", "source, target", "tests/p2p/test_order.py",
    ),
    Mutation(
        "a neighbour is skipped", "tritoncomm/p2p/neighbours.py",
        "ranks[self.stage - 1] if prev", "ranks[self.stage - 2] if prev", "tests/p2p/test_stages.py",
    ),
    Mutation(
        "a received tensor is not waited for", "tritoncomm/p2p/transport.py",
        "for work, end, x in works:\n        try:\n            work.wait()",
        "for work, end, x in works:\n        try:\n            work.is_completed()", "tests/p2p/test_p2p.py",
    ),
    Mutation(
        "several tensors are not counted as copied", "tritoncomm/p2p/hop.py",
        "copied + each.bytes_copied", "copied", "tests/p2p",
    ),
    Mutation(
        "ids of the padding row of a vocabulary shard are not shifted", "tritoncomm/parallel.py",
        "self.padding_idx - start", "self.padding_idx", "tests/test_parallel.py",
    ),
    Mutation(
        "a forced kernel falls back without a word", "tritoncomm/core/ops.py",
        'if _forced.value == "triton":\n        raise UnsupportedError(\n',
        "if False:\n        raise UnsupportedError(\n",
        "tests/cli/test_explain.py tests/core/test_ops.py",
    ),
    Mutation(
        "a blocking all-gather is not waited for", "tritoncomm/core/backend.py",
        'work.wait()\n    except RuntimeError as error:\n        _fail(error, "all-gather"',
        'work.is_completed()\n    except RuntimeError as error:\n        _fail(error, "all-gather"',
        "tests/mappings/test_mappings.py tests/debug/test_faults.py",
    ),
    Mutation(
        "a segment of rows is read as contiguous", "kernels/tritoncomm_kernels/segment_kernel.py",
        "offset += r * gap", "offset += 0 * gap", "tests/kernels/test_segments.py",
    ),
    Mutation(
        "a part of a sum is left out", "kernels/tritoncomm_kernels/segment_kernel.py",
        "for _ in range(parts):", "for _ in range(parts - 1):", "tests/kernels/test_segments.py",
    ),
    Mutation(
        "an index that is no row is followed", "kernels/tritoncomm_kernels/row_copy.py",
        "is_row = (at >= 0) & (at < limit)", "is_row = (at >= 0) & (at <= limit)", "tests/kernels/test_rows.py",
    ),
    Mutation(
        "check mode agrees to everything", "tritoncomm/debug/check.py",
        "    if not differ:\n", "    if differ or not differ:\n", "tests/debug/test_check.py",
    ),
    Mutation(
        "ranks carry out different reshard plans", "tritoncomm/reshard/unanimous.py",
        "if all(each == [0, *halves] for each in theirs):", "if theirs:", "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "a sharded tensor of too many shards is accepted", "tritoncomm/tensor/redistribute.py",
        "if parts and count != world:", "if False:", "tests/tensor/test_tensor.py tests/tensor/test_fixes.py",
    ),
)  # fmt: skip


def copy_of(folder: Path) -> Path:
    """A copy of what the tests need."""
    tree = folder / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, tree / name)
    return tree


def run(mutation: Mutation, folder: Path) -> tuple[int, str]:
    """Exit status and the first failure of the tests that the mutation names."""
    tree = copy_of(folder)
    path = tree / mutation.file
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(tree / "kernels")))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *mutation.tests.split()], cwd=tree, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return RED, f"nothing within {TIMEOUT} s"
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, failures[0] if failures else (done.stdout + done.stderr).strip().splitlines()[-1]


def main(words: Sequence[str]) -> int:
    """Run every mutation, or those with one of ``words``; the number that were not seen."""
    chosen = [each for each in MUTATIONS if not words or any(word in each.what for word in words)]
    unseen = []
    for mutation in chosen:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            status, line = run(mutation, Path(folder))
        word = {RED: "red", SURVIVED: "SURVIVED"}.get(status, f"NOT RUN ({status})")
        print(f"{word:9} {time.monotonic() - begun:4.0f} s  {mutation.what}: {line[:120]}", flush=True)
        if status != RED:
            unseen.append(mutation.what)
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} mutations turn a test red")
    return min(len(unseen), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
