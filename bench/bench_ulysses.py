"""Host cost of the Ulysses exchange against DeepSpeed's, yunchang's and ALST's, over a no-op process group.

Every row is forward and backward, in CPU time of the calling thread. Two things are counted beside the time: messages
(collectives), and the bytes that copying operators read and write. ``python bench/bench_ulysses.py`` prints the table,
``--only llama`` or another label measures some rows; ``--json PATH`` writes them with versions.
"""

import importlib
import logging
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from bench.guard import row_target
from bench.harness import Clock, Part, Row, Samples
from bench.hosts import no_op_group, run_backward
from bench.timing import quiet_host
from tritoncomm.integrations import deepspeed as our_deepspeed
from tritoncomm.integrations import transformers as our_transformers
from tritoncomm.integrations import yunchang as our_yunchang

COPIED_UNEVEN = {"sequence first": 0.60, "batch first": 0.85}  # bytes, of DeepSpeed's
COPIED_STEP = 0.95  # bytes, of ALST's
INNER = 10
COPIES = {"clone", "copy_", "cat", "_to_copy", "stack", "index", "index_select", "repeat_interleave"}
PEERS = "pip install --no-deps deepspeed==0.19.8 yunchang==0.6.4 transformers==5.23.0"

Call = Callable[[], Any]


class Counted(TorchDispatchMode):
    """Collectives, and bytes read plus written by copies."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = self.copied_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace in ("c10d", "_c10d_functional", "deepspeed"):
            self.messages += 1
        elif name in COPIES:
            self.copied_bytes += 2 * out.nbytes
        return out


def counted(calls: dict[str, Call]) -> dict[str, dict[str, int]]:
    """Messages and copies of one call of every provider."""
    made: dict[str, dict[str, int]] = {"messages": {}, "copied bytes": {}}
    for provider, call in calls.items():
        call()
        with Counted() as counts:
            call()
        made["messages"][provider], made["copied bytes"][provider] = counts.messages, counts.copied_bytes
    return made


@dataclass(frozen=True)
class Case:
    """One kind of call: ``make`` returns it for every provider, given the group and the case."""

    kind: str
    world: int
    heads: tuple[int, int]
    batch: int
    seq: int
    seq_dim: int
    head_dim: int
    make: Callable[["Case", ProcessGroup], dict[str, Call]]

    @property
    def uneven(self) -> bool:
        return bool(self.heads[1] % self.world) and self.heads[1] > self.world

    @property
    def order(self) -> str:
        return "batch first" if self.seq_dim else "sequence first"

    @property
    def label(self) -> str:
        heads, shape = "/".join(map(str, self.heads)), [self.batch, self.seq, self.head_dim]
        return f"{self.kind}, world {self.world}, heads {heads}, {shape}, {self.order}"

    def local(self, heads: int) -> Tensor:
        """A local tensor with all heads."""
        lead = (self.batch, self.seq) if self.seq_dim else (self.seq, self.batch)
        return torch.randn(*lead, heads, self.head_dim, requires_grad=True)


def both(forward: Callable[[], Tensor], gradient: Tensor, leaves: tuple[Tensor, ...]) -> Call:
    """Forward and backward."""
    return lambda: run_backward((forward(),), (gradient,), False, False, leaves, True, accumulate_grad=False)


def attend(seq_dim: int) -> Callable[..., Tensor]:
    """Causal attention on what the exchange made."""
    into, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if seq_dim else ((1, 2, 0, 3), (2, 0, 1, 3))

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = query.permute(into), key.permute(into), value.permute(into)
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).permute(back)

    return attention


def distributed_attention(case: Case, group: ProcessGroup) -> dict[str, Call]:
    leaves = tuple(case.local(heads) for heads in (case.heads[0], case.heads[1], case.heads[1]))
    gradient = torch.randn(leaves[0].shape)
    calls = {}
    for provider, module in (("ours", our_deepspeed), ("deepspeed", imported("deepspeed.sequence.layer"))):
        layer = module.DistributedAttention(attend(case.seq_dim), group, 2, case.seq_dim)
        calls[provider] = both(lambda layer=layer: layer(*leaves, 1 - case.seq_dim), gradient, leaves)
    return calls


def seq_all_to_all(case: Case, group: ProcessGroup) -> dict[str, Call]:
    """To heads and back."""
    x, heads = case.local(case.heads[0]), case.heads[1]
    gradient = torch.randn(x.shape)

    def call(function: Any) -> Call:
        def forward() -> Tensor:
            args = 1 - case.seq_dim, None, None, None, True, heads
            there = function(group, x, 2, case.seq_dim, *args)
            return function(group, there, case.seq_dim, 2, *args)

        return both(forward, gradient, (x,))

    theirs = imported("deepspeed.sequence.layer")._SeqAllToAll.apply
    return {"ours": call(our_deepspeed._SeqAllToAll.apply), "deepspeed": call(theirs)}


def yunchang_4d(case: Case, group: ProcessGroup) -> dict[str, Call]:
    x = case.local(case.heads[0])
    return yunchang_calls("SeqAllToAll4D", x, (2, 1), group)


def yunchang_5d(case: Case, group: ProcessGroup) -> dict[str, Call]:
    x = torch.randn(case.batch, case.seq, 3, case.heads[0], case.head_dim, requires_grad=True)
    return yunchang_calls("SeqAllToAll5D", x, (3, 1), group)


def yunchang_calls(name: str, x: Tensor, dims: tuple[int, int], group: ProcessGroup) -> dict[str, Call]:
    gradient = torch.randn(x.shape)
    calls = {}
    for provider, module in (("ours", our_yunchang), ("yunchang", imported("yunchang.comm.all_to_all"))):
        apply = getattr(module, name).apply
        calls[provider] = both(lambda apply=apply: apply(group, apply(group, x, *dims), *dims[::-1]), gradient, (x,))
    return calls


def llama(case: Case, group: ProcessGroup) -> dict[str, Call]:
    """A step of a small Llama on this rank's shard."""
    transformers = imported("transformers")
    heads, kv_heads = case.heads
    config = transformers.LlamaConfig(
        hidden_size=heads * case.head_dim, intermediate_size=64, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=64, head_dim=case.head_dim, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(64, (case.batch, case.seq * case.world))
    batch = our_transformers.shard_batch({"input_ids": ids, "labels": ids}, group)
    our_transformers.unregister()
    names = {"ours": our_transformers.register(group), "alst": alst(case, group)}

    def step(name: str) -> Call:
        def run() -> None:
            model.config._attn_implementation_internal = name
            model.zero_grad()
            model(**batch, use_cache=False).loss.backward()

        return run

    return {provider: step(name) for provider, name in names.items()}


def alst(case: Case, group: ProcessGroup) -> str:
    """DeepSpeed's attention for transformers, under a name of its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = imported("deepspeed.runtime.sequence_parallel.ulysses_sp").UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS["sdpa"], batch_size=case.batch, attn_head_count=case.heads[0],
        attn_head_size=case.head_dim, kv_head_count=case.heads[1], num_hidden_layers=2, process_group=group,
        seq_length_is_variable=True,
    )  # fmt: skip
    type(ALL_ATTENTION_FUNCTIONS).register("alst", lambda module, *args, **kwargs: attention(module, *args, **kwargs))
    return "alst"


def imported(module: str) -> Any:
    """A module of a peer, without its warnings and log."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        return importlib.import_module(module)


def missing() -> str:
    """Install command of the peers; empty where they are installed."""
    try:
        for module in ("deepspeed.sequence.layer", "yunchang.comm.all_to_all", "transformers"):
            imported(module)
    except ImportError as error:
        return f"{error.name} is not installed: {PEERS}"
    return ""


HEADS = {2: [(8, 8), (8, 2), (5, 5), (14, 7)], 4: [(8, 8), (8, 4), (6, 6), (12, 6)]}
CASES = [
    *(
        Case("attention", world, heads, 2, 16, seq_dim, 16, distributed_attention)
        for world in HEADS
        for heads in HEADS[world]
        for seq_dim in (1, 0)
    ),
    *(
        Case("exchange", world, heads, 2, 16, seq_dim, 16, seq_all_to_all)
        for world in HEADS
        for heads in HEADS[world]
        for seq_dim in (1, 0)
    ),
    Case("exchange", 4, (8, 8), 1, 16, 1, 16, seq_all_to_all),
    Case("attention", 4, (8, 8), 1, 16, 1, 16, distributed_attention),
    *(Case("yunchang 4D", world, (8, 8), batch, 16, 1, 16, yunchang_4d) for world in (2, 4) for batch in (1, 2)),
    *(Case("yunchang 5D", world, (8, 8), batch, 16, 1, 16, yunchang_5d) for world in (2, 4) for batch in (1, 2)),
    Case("yunchang 4D", 4, (32, 32), 1, 256, 1, 64, yunchang_4d),
    Case("exchange", 4, (30, 30), 2, 128, 1, 64, seq_all_to_all),
    Case("llama", 2, (8, 8), 2, 16, 1, 8, llama),
    Case("llama", 2, (8, 4), 1, 128, 1, 8, llama),
    Case("llama", 2, (8, 1), 2, 16, 1, 8, llama),
    Case("llama", 4, (8, 8), 1, 16, 1, 8, llama),
    Case("llama", 4, (8, 2), 2, 8, 1, 8, llama),
]


@contextmanager
def host() -> Iterator[dict[int, ProcessGroup]]:
    """No-op groups of two and four ranks, of which this process is the first, also for DeepSpeed."""
    with no_op_group(4) as group:
        imported("deepspeed.comm").init_distributed("fake", verbose=False)
        pair = dist.new_group([0, 1])
        assert isinstance(pair, ProcessGroup)
        try:
            yield {2: pair, 4: group}
        finally:
            our_transformers.unregister()


def sampled(calls: dict[str, Call], rounds: int, inner: int) -> Samples:
    """Microseconds of this thread per call, the providers taking turns."""
    timers = {provider: timeit.Timer(call, timer=time.thread_time) for provider, call in calls.items()}
    samples: Samples = {provider: [] for provider in calls}
    with quiet_host():
        for timer in timers.values():
            timer.timeit(2 * inner)
        order = list(timers)
        for _ in range(rounds):
            for provider in order:
                samples[provider].append(timers[provider].timeit(inner) / inner * 1e6)
            order.reverse()
    return samples


def measure(case: Case, groups: dict[int, ProcessGroup], clock: Clock) -> Iterator[Row]:
    """One row: forward and backward of every provider."""
    calls = case.make(case, groups[case.world])
    is_step = case.kind == "llama"
    inner = 3 if is_step or case.seq > 64 else INNER
    if hasattr(clock, "calls"):  # pytest-benchmark repeats ours
        clock.calls.append(calls["ours"])
        clock.repeats.append(inner)
    mode = "step" if is_step else "exchange"
    more = row_target() | counted(calls)
    yield clock.row(case.label, lambda: sampled(calls, clock.rounds, inner), mode=mode, **more)


def targets(row: Row) -> list[str]:
    """Messages and copied bytes that a row misses."""
    (peer,) = row["ratio"]
    copied, messages, name = row["copied bytes"], row["messages"], row["row"]
    share = copied["ours"] / max(copied[peer], 1)
    case = next(case for case in CASES if case.label == name)
    wanted = []
    if case.kind == "attention" and messages["ours"] * 2 > messages[peer]:
        wanted.append(f"{name}: {messages['ours']} messages, {peer} {messages[peer]}")
    most = COPIED_STEP if case.kind == "llama" else COPIED_UNEVEN[case.order] if case.uneven else None
    if most is not None and share > most:
        wanted.append(f"{name}: copies {share:.2f} of {peer}'s bytes, at most {most}")
    return wanted


PART = Part(
    name="ulysses",
    unit="microseconds per call",
    cases=CASES,
    measure=measure,
    host=host,
    rounds=60,
    missing=missing,
    packages=("deepspeed", "yunchang", "transformers"),
    targets=targets,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
