"""What a rank holds in a training step over sequence shards, by kind: measured, and by a formula.

``python -m bench.memory`` trains a Llama of random weights for two steps on 1, 2 and 4 ranks, on one GPU or on CPUs,
and prints the bytes of the second step. FSDP2 shards fp32 weights, gradients and AdamW's states over all ranks and
computes in bf16; the ranks share every sequence. On a GPU bytes are those that torch's allocator has handed out;
buffers of NCCL, workspaces of libraries and fragmentation come on top. On CPUs they are those of live storages, without
peaks.
``--write`` writes the committed file, and the table of docs/trainer.md.
"""

import argparse
import gc
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.guard import RESULTS
from bench.timing import versions, write_json

__all__ = [
    "FILE", "LARGE", "LLAMA_8B", "PAGE", "RUNS", "SMALL", "Bytes", "Llama", "Run", "distances", "main", "measure",
    "needed", "with_table",
]  # fmt: skip

FILE = RESULTS / "nvidia-h200" / "memory" / "llama.json"  # not one of the files with ratios
PAGE = Path(__file__).resolve().parents[1] / "docs" / "trainer.md"
BEGIN, END = "<!-- memory -->\n", "<!-- end of memory -->\n"
GIB = 2**30


class Llama(NamedTuple):
    """Sizes of a Llama.

    Attributes:
        hidden, inner: columns of the hidden states, and between the two products of the MLP.
        heads, kv_heads, head: numbers of heads, and columns of one.
        is_tied: whether the head has the weights of the embedding.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    is_tied: bool

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        projections = self.hidden * self.head * 2 * (self.heads + self.kv_heads)
        return projections + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside of the layers, which are one unit of FSDP here."""
        return (1 if self.is_tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside


LARGE = Llama(8, 2048, 8192, 32, 8, 64, 128_256, True)
SMALL = Llama(4, 128, 512, 8, 2, 16, 1000, True)
LLAMA_8B = Llama(32, 4096, 14_336, 32, 8, 128, 128_256, False)


class Run(NamedTuple):
    """A measured step.

    Attributes:
        length: positions of the one sequence of a batch, on all ranks together.
        is_checkpointed: layers are checkpointed.
    """

    ranks: int
    length: int
    is_checkpointed: bool


RUNS = [
    Run(1, 16_384, False), Run(1, 16_384, True), Run(1, 65_536, True),
    Run(2, 16_384, False), Run(2, 16_384, True), Run(2, 65_536, True),
    Run(4, 16_384, False), Run(4, 16_384, True), Run(4, 65_536, True),
]  # fmt: skip


@dataclass(frozen=True)
class Bytes:
    """Bytes of a rank, by kind.

    Attributes:
        weights, gradients, optimizer: shards in fp32, and AdamW's two states of each weight.
        activations: that the forward leaves for the backward, the logits left out. With them come the bf16 weights that
            FSDP keeps gathered from forward to backward: those outside of the layers.
        logits: and their gradients in the loss, at the peak, which is where backward begins.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    def peak(self) -> float:
        """The largest sum of what is there at one time: gradients appear as logits and activations go."""
        return self.weights + self.optimizer + max(self.activations + self.logits, self.gradients)


def needed(model: Llama, run: Run) -> Bytes:
    """The formula.

    Of every position the forward keeps in a layer of this eager model, in bf16 unless said otherwise: for both norms
    their input (fp32), its normalized copy and the result, 8 bytes a column; q, k and v as attention gets them; its
    result; 4 tensors of the MLP's inner columns. Over several ranks the result of attention is there twice, by heads
    and by positions. Of a checkpointed layer it keeps the input. The last norm comes once. Logits in fp32 are there
    three times when their gradient is computed.
    """
    positions = run.length / run.ranks
    q, kv = model.heads * model.head, model.kv_heads * model.head
    layer = 16 * model.hidden + 2 * (q + 2 * kv + q * (2 if run.ranks > 1 else 1)) + 8 * model.inner + 4 * model.heads
    if run.is_checkpointed:
        layer = 2 * model.hidden
    gathered = 2 * model.outside
    shard = 4 * model.parameters / run.ranks
    activations = positions * (model.layers * layer + 8 * model.hidden) + gathered
    return Bytes(shard, shard, 2 * shard, activations, 3 * 4 * positions * model.vocabulary)


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the storages of the results."""
        result = function(*args, **(kwargs or {}))
        self.note(result)
        return result

    def note(self, tensors: Any) -> None:
        """Note the storages of tensors; of a DTensor that of its shard."""
        for x in tree_leaves(tensors):
            x = x.to_local() if isinstance(x, DTensor) else x
            if type(x) in (Tensor, nn.Parameter):
                reference = StorageWeakRef(x.untyped_storage())
                self._storages[reference.cdata] = reference

    def nbytes(self) -> int:
        """Bytes of all noted storages that are still there."""
        total = 0
        for reference in self._storages.values():
            storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            total += 0 if storage is None else storage.nbytes()
        return total


@contextmanager
def _counter(device: torch.device) -> Iterator[Any]:
    """A function without arguments that returns the bytes of this rank."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        yield lambda: torch.cuda.memory_allocated(device)
        return
    with Live() as live:
        yield live.nbytes


def _build(model: Llama, device: torch.device) -> Any:
    """The Llama, with all its weights on every rank."""
    import transformers  # takes seconds, and only these processes need it

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=model.hidden, intermediate_size=model.inner, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head,
        vocab_size=model.vocabulary, tie_word_embeddings=model.is_tied, use_cache=False,
        max_position_embeddings=1 << 17,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return transformers.LlamaForCausalLM(config).train()


def _step(sizes: Llama, run: Run, device: torch.device, group: dist.ProcessGroup, name: str) -> dict[str, float]:
    """Bytes of the second of two steps."""
    from tritoncomm.integrations.transformers import shard_batch, switch

    with _counter(device) as count:
        start = count()
        model = _build(sizes, device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if run.ranks > 1:
            switch(model, name)
        if run.is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        found = {"weights": count() - start}
        ids = torch.randint(sizes.vocabulary, (1, run.length), generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(2):
            batch: Any = {"input_ids": ids, "labels": ids.clone()}
            if run.ranks > 1:
                batch = shard_batch(batch, group)
            before = count()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            loss = model(**batch).loss
            found["forward"] = count() - before  # activations, and logits once
            (loss * run.ranks).backward()
            del loss, batch
            gc.collect()
            found["gradients"] = count() - before
            if device.type == "cuda":
                found["peak"] = torch.cuda.max_memory_allocated(device) - before  # activations and logits
            optimizer.step()
            optimizer.zero_grad()
        found["optimizer"] = count() - start - found["weights"]
        del model, optimizer
        gc.collect()
    return found


def _work(rank: int, sizes: Llama, runs: Sequence[Run], port: int, device: str, folder: str) -> None:
    world = runs[0].ranks
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
        if world > torch.cuda.device_count():
            sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
            from pool import SHARING

            os.environ.update(SHARING, NCCL_HOSTID=f"tritoncomm-{rank}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    bound: dict[str, Any] = {"device_id": place} if device == "cuda" else {}
    dist.init_process_group("nccl" if bound else "gloo", rank=rank, world_size=world, **bound)
    from tritoncomm.integrations.transformers import register  # by which time CUDA may see its devices

    group = dist.group.WORLD
    assert group is not None
    name = register(group)
    rows = [{"run": run._asdict(), "bytes": _step(sizes, run, place, group, name)} for run in runs]
    if rank == 0:
        Path(folder, f"{world}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure(sizes: Llama, runs: Sequence[Run], device: str) -> list[dict[str, Any]]:
    """Rows of ``{"run": ..., "bytes": ...}`` of the first rank, in the order of ``runs`` by ranks."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in dict.fromkeys(run.ranks for run in runs):
            with socket.socket() as server:
                server.bind(("127.0.0.1", 0))
                port = server.getsockname()[1]
            chosen = [run for run in runs if run.ranks == ranks]
            mp.spawn(_work, (sizes, chosen, port, device, folder), nprocs=ranks)
            rows += json.loads(Path(folder, f"{ranks}.json").read_text())
    return rows


def distances(sizes: Llama, row: Mapping[str, Any]) -> dict[str, float]:
    """How far each measured number is from the formula's, relative to the formula's."""
    formula = needed(sizes, Run(**row["run"]))
    expected = {
        "weights": formula.weights, "gradients": formula.gradients, "optimizer": formula.optimizer,
        "forward": formula.activations + formula.logits / 3, "peak": formula.activations + formula.logits,
    }  # fmt: skip
    return {name: value / expected[name] - 1 for name, value in row["bytes"].items()}


def table(content: Mapping[str, Any]) -> str:
    """The rows of a file beside the formula, in GiB."""
    lines = [
        "| ranks | positions | layers checkpointed | activations and logits | by formula | after forward | by formula |"
    ]
    lines.append("|---:|---:|---|---:|---:|---:|---:|")
    for row in content["rows"]:
        run = Run(**row["run"])
        formula = needed(LARGE, run)
        numbers = [
            row["bytes"]["peak"], formula.activations + formula.logits,
            row["bytes"]["forward"], formula.activations + formula.logits / 3,
        ]  # fmt: skip
        cells = [f"{number / GIB:.1f}" for number in numbers]
        word = "yes" if run.is_checkpointed else "no"
        lines.append(f"| {run.ranks} | {run.length:,} | {word} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, content: Mapping[str, Any]) -> str:
    """A page with the table between its two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(content) + END + rest.split(END)[1]


def main() -> int:
    """Measure and print, and write what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", action="store_true", help="write the committed file, and the table of its page")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("memory: no CUDA device here; --device cpu counts a small model")
        return 2
    on_gpu = options.device == "cuda"
    sizes, runs = (LARGE, RUNS) if on_gpu else (SMALL, [Run(n, 512, flag) for n in (1, 2) for flag in (False, True)])
    rows = measure(sizes, runs, options.device)
    for row in rows:
        print(*(f"{name} {value}" for name, value in row["run"].items()), sep=", ")
        for name, distance in distances(sizes, row).items():
            print(f"    {name:10} {row['bytes'][name] / GIB:10.4f} GiB, {distance:+.1%} of the formula")
    if options.write and on_gpu:
        content = {"device": torch.cuda.get_device_name(), "rows": rows, "unit": "bytes"}
        write_json(FILE, {**content, "versions": versions("transformers")})
        PAGE.write_text(with_table(PAGE.read_text(), content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
