"""Mutations of the product, each of which has to turn a test red: ``python tools/mutations.py [WORDS...]``.

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

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("tritoncomm", "kernels", "tests", "tools", "bench", "docs", "examples")
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
        "make_fx records an exchange without its wait", "tritoncomm/core/validation.py",
        "    if _modes():\n        refuse_tracing(name)\n    if type(x) is not Tensor or x.layout",
        "    if type(x) is not Tensor or x.layout", "tests/core/test_compile.py",
    ),
    Mutation(
        "sizes that do not fit run where the shards do", "tritoncomm/tensor/rules/engine.py",
        "setdefault(label, size) != size and", "setdefault(label, size) < 0 and",
        "tests/tensor/test_sizes_that_do_not_fit.py",
    ),
    Mutation(
        "an inf is known to its rank only", "tritoncomm/tensor/rules/gradients.py",
        "in shards_by_group(gradients):", "in shards_by_group([]):", "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "the norm of a shard is taken for the global one", "tritoncomm/tensor/rules/foreach.py",
        "torch.linalg.vector_norm(gathered, ord, 0)", "partial", "tests/tensor/test_gradients.py",
    ),
    Mutation(
        "a rank keeps another rank's shard", "tritoncomm/core/plan.py",
        "return rank * size, size", "return (world - 1 - rank) * size, size", "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a ragged dim loses its last rows", "tritoncomm/core/split.py",
        "row, run = math.prod(shape[:dim]), shape[dim] * inner, -(-shape[dim] // world) * inner",
        "row, run = math.prod(shape[:dim]), shape[dim] * inner, shape[dim] // world * inner", "tests/core/test_ops.py",
    ),
    Mutation(
        "send and receive counts are exchanged", "tritoncomm/core/exchange.py",
        "wire, recv_counts, send_counts", "wire, send_counts, recv_counts",
        "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a sum overwrites a leaf", "tritoncomm/mappings/overwriting.py",
        "x.is_leaf or not torch", "not torch", "tests/mappings/test_overwriting.py",
    ),
    Mutation(
        "the adjoint of an all-gather forgets to sum", "tritoncomm/mappings/functions.py",
        "eager.reduce_scatter(grad_output, -1, ctx.group", "eager.split(grad_output, -1, ctx.group",
        "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "backward of all_to_all does not swap the split sizes", "tritoncomm/mappings/exchanges.py",
        "sizes = (ctx.input_split_sizes, ctx.output_split_sizes)",
        "sizes = (ctx.output_split_sizes, ctx.input_split_sizes)", "tests/mappings/test_mappings.py",
    ),
    Mutation(
        "a kernel forgets the stride between ranks", "kernels/tritoncomm_kernels/address.py",
        "(w.to(tl.int64) * stride_rank + k)", "(w.to(tl.int64) * run * outer + k)",
        "tests/kernels/test_kernels.py",
    ),
    Mutation(
        "exponentials keep the maximum of their tile", "kernels/tritoncomm_kernels/cross_entropy.py",
        "sum_exp * _exp(col_max - new_max, HAS_EX2) + terms", "sum_exp + terms",
        "tests/kernels/test_cross_entropy.py",
    ),
    Mutation(
        "a received tensor is not waited for", "tritoncomm/p2p/transport.py",
        "                work.wait()\n", "                work.is_completed()\n", "tests/p2p/test_communicator.py",
    ),
    Mutation(
        "a blocking collective is not waited for", "tritoncomm/core/backend.py",
        'work.wait()\n    except RuntimeError as error:\n        raise_for(error, _failure(error, what',
        'work.is_completed()\n    except RuntimeError as error:\n        raise_for(error, _failure(error, what',
        "tests/mappings/test_mappings.py tests/debug/test_faults.py",
    ),
    Mutation(
        "a dropped work leaves its memory at once", "tritoncomm/core/backend.py",
        "            _let_go([self._work], self._group(), self._buffers)", "            pass",
        "tests/core/test_in_flight.py",
    ),
    Mutation(
        "memory of a transfer goes back to the stream that made it", "tritoncomm/p2p/transport.py",
        "        released(self._buffers)\n", "", "tests/core/test_in_flight.py",
    ),
    Mutation(
        "check mode agrees to everything", "tritoncomm/debug/check.py",
        "if differ := difference(descriptors):", "if differ := difference(descriptors[:1]):",
        "tests/debug/test_check.py",
    ),
    Mutation(
        "a block is written at the place of its box", "tritoncomm/reshard/planner.py",
        "boxes[1, first:] = low + (target_box.at - target_box.start).T",
        "boxes[1, first:] = (target_box.at - target_box.start).T + 0 * low",
        "tests/reshard/test_bucket_passes.py",
    ),
    Mutation(
        "a source that leaves elements out is accepted", "tritoncomm/reshard/layout.py",
        "missing = self.elements - int(self.size.prod(1).sum())", "missing = 0 * self.elements",
        "tests/reshard/test_reshard.py",
    ),
    Mutation(
        "a plan is looked up without its targets", "tritoncomm/reshard/request.py",
        "return self.bucket_bytes, self.grad, self.name, self.moving",
        "return self.bucket_bytes, self.grad, self.name, tuple([(item.name, item.source) for item in self.moving])",
        "tests/reshard",
    ),
    Mutation(
        "blocks that stay are read after they were overwritten", "tritoncomm/reshard/execute.py",
        "if self._in_place else views, places", "if False else views, places", "tests/reshard",
    ),
    Mutation(
        "gradients of replicas are sent by one of them", "tritoncomm/reshard/execute.py",
        'sums = self.grad == "partial" and not self.transfers.sums', "sums = False",
        "tests/reshard/test_sequence_layout.py",
    ),
    Mutation(
        "a slab goes although a graph copies from it", "kernels/tritoncomm_kernels/device_table.py",
        "            slab.in_graph = True\n            return", "            return",
        "tests/kernels/test_device_table.py",
    ),
    Mutation(
        "results overwrite pass-through tensors before they are copied", "tritoncomm/reshard/api.py",
        "if pairs and share_memory(out, tensors):", "if False:", "tests/reshard/test_unusual_tensors.py",
    ),
    Mutation(
        "replicas with exchanged elements are equal", "tritoncomm/debug/replicas.py",
        ".to(torch.int64) + weights[: len(part)]", ".to(torch.int64) + weights[0]",
        "tests/debug/test_replicas.py tests/tensor/test_training.py",
    ),
    Mutation(
        "transformers: a batch that is not sharded passes", "tritoncomm/integrations/transformers/registration.py",
        "        if notes is None:\n            raise", "        if notes == 0:\n            raise",
        "tests/integrations/test_transformers.py",
    ),
    Mutation(
        "tables read the memory of tensors with lazy bits", "tritoncomm/core/ops.py",
        "        if x.is_neg() or x.is_conj():\n            return True\n",
        "        if x.is_neg() and x.is_conj():\n            return True\n",
        "tests/core/test_exchange.py",
    ),
    Mutation(
        "the even call is chosen between nodes", "tritoncomm/core/wire_chunks.py",
        "send_counts=nodes.across(of_nodes),", "send_counts=(),", "tests/test_wire_sum.py",
    ),
    Mutation(
        "a query head meets another kv head", "tritoncomm/core/heads.py",
        "starts = tuple([head for head, count in enumerate(ranks) for _ in range(count)])",
        "starts = tuple([kv_heads - 1 - head for head, count in enumerate(ranks) for _ in range(count)])",
        "tests/test_ulysses.py",
    ),
    Mutation(
        "a view of a sharded dim is taken for a replica", "tritoncomm/tensor/gathered_view.py",
        "_is_gathered: ClassVar[bool] = True", "_is_gathered: ClassVar[bool] = False", "tests/tensor/test_views.py",
    ),
    Mutation(
        "memory of a collective goes back to the stream that made it", "tritoncomm/core/backend.py",
        "        released((self.result, *self._buffers))\n", "", "tests/streams",
    ),
    Mutation(
        "a table is read before it was copied", "kernels/tritoncomm_kernels/device_table.py",
        "            current.wait_event(self._copied)\n", "", "tests/streams",
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
