"""Dispatch and combine on real ranks, against the same exchange by hand, transformers' and Megatron-LM's.

Every row is forward and backward of a layer whose experts multiply elementwise, in CPU time of rank 0's thread; a row
"with waits" is of its clock, in which it waits for bytes and for cores that the ranks share. Ranks meet at a barrier
before each sample. "By hand" sends the same rows, one for each token and rank with ids and weights in its tail, by
plain operators of torch in one ``autograd.Function`` each way. It checks, counts and names nothing, and its own rows go
through the all-to-all. "transformers" is ``AllToAllEP``, "megatron" ``MoEAlltoAllTokenDispatcher`` without the fused
kernels of Transformer Engine: both send a row for each pair of a token and an expert. Counted besides: the bytes that
rank 0 sends to other ranks, forward and backward.

The ranks talk through Gloo over loopback: nothing here says anything about NCCL or links between GPUs. A row "on a stub
GPU" is the host's part of the way that runs on a GPU: Triton's launcher starts our kernels over a stub driver, which
runs nothing, and a group that moves nothing answers at once. The operators of torch, all of those by hand, run on the
CPU, on so few values that they take about as long as a launch.
``python bench/bench_experts.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm_kernels import torch_path

from bench import bench_launch
from bench.harness import Clock, Part, Row, Samples
from bench.hosts import cpu_device, helpers, missing_megatron, no_op_group, peer, real_ranks, run_backward
from bench.timing import interleaved, quiet_host
from tritoncomm.core import backend
from tritoncomm.experts import combine, dispatch, routing

INNER, WARM_UP = 5, 3


@dataclass(frozen=True)
class Case:
    """One layer on every rank; experts are drawn at random, all of a token differ.

    Attributes:
        waits: whether the time that rank 0 waits counts, too.
        is_stub: whether kernels are launched into nothing, and nothing moves.
    """

    tokens: int
    hidden: int
    k: int
    experts: int
    world: int
    waits: bool = False
    is_stub: bool = False

    @property
    def label(self) -> str:
        more = ", with waits" if self.waits else ", on a stub GPU" if self.is_stub else ""
        return f"{self.tokens} tokens of {self.hidden}, {self.k} of {self.experts} experts, world {self.world}{more}"


CASES = [
    Case(64, 64, 2, 8, 2),
    Case(64, 64, 8, 32, 2),
    Case(64, 64, 8, 32, 4),
    Case(512, 512, 8, 32, 4),
    Case(512, 512, 8, 32, 4, waits=True),
    Case(64, 64, 2, 8, 2, is_stub=True),
    Case(64, 64, 8, 32, 2, is_stub=True),
    Case(64, 64, 8, 32, 4, is_stub=True),
    Case(64, 64, 8, 64, 8, is_stub=True),
]


def expert_rows(rows: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """The least that experts may be: every row times its expert's factors."""
    return rows * scales[ids]


def doubled_rows(rows: Tensor, counts: Tensor, scales: Tensor) -> Tensor:
    """Experts on a stub GPU, where no counts are known."""
    return rows * 2


def rows_by_counts(rows: Tensor, counts: Tensor, scales: Tensor) -> Tensor:
    """The experts, whose rows follow each other."""
    numbers = torch.arange(len(counts)).repeat_interleave(counts, output_size=len(rows))
    return expert_rows(rows, numbers, scales)


@dataclass
class Plan:
    """An exchange by hand: rows to and from each rank, tokens of the sent rows, and places of each token's rows."""

    send: list[int]
    recv: list[int]
    tokens: Tensor
    places: Tensor
    is_row: Tensor


def planned(ids: Tensor, experts: int, group: ProcessGroup) -> tuple[Plan, int]:
    """Exchange the counts; return the plan, and the number of pairs for this rank."""
    world, slots = group.size(), min(ids.shape[1], group.size())
    owners = ids // (experts // world)
    pairs = torch.zeros(world, dtype=torch.int64).scatter_add_(0, owners.view(-1), torch.ones_like(owners).view(-1))
    ranks = owners.sort(1).values
    ranks[:, 1:].masked_fill_(ranks[:, 1:] == ranks[:, :-1].clone(), world)
    ranks = ranks.sort(1).values[:, :slots]
    keys, order = ranks.reshape(-1).sort(stable=True)
    rows = torch.searchsorted(keys, torch.arange(world + 1)).diff()
    sent = torch.stack([rows, pairs], 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes, arriving = torch.stack([sent, received]).tolist()
    send, recv = [n for n, _ in sizes], [n for n, _ in arriving]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(ranks.shape)
    is_row = ranks < world
    return Plan(send, recv, order[: sum(send)] // slots, places.masked_fill(~is_row, 0), is_row), sum(
        n for _, n in arriving
    )


def to_ranks(plan: Plan, group: ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """One all-to-all of the tensors' rows side by side, as bytes."""
    wire = torch.cat([x.index_select(0, plan.tokens).view(torch.uint8) for x in tensors], 1)
    received = wire.new_empty(sum(plan.recv), wire.shape[1])
    dist.all_to_all_single(received, wire, plan.recv, plan.send, group=group)
    columns = received.split([x.shape[1] * x.itemsize for x in tensors], 1)
    return [column.view(x.dtype) for column, x in zip(columns, tensors, strict=True)]


def to_tokens(plan: Plan, group: ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Rows back by one all-to-all, and the sum of each token's rows."""
    wire = torch.cat([x.view(torch.uint8) for x in tensors], 1) if len(tensors) > 1 else tensors[0].view(torch.uint8)
    received = wire.new_empty(sum(plan.send), wire.shape[1])
    dist.all_to_all_single(received, wire, plan.send, plan.recv, group=group)
    sums = []
    for column, x in zip(received.split([x.shape[1] * x.itemsize for x in tensors], 1), tensors, strict=True):
        parts = column.view(x.dtype)[plan.places].float()
        total, *others = parts.masked_fill_(~plan.is_row[:, :, None], 0).unbind(1)
        for part in others:
            total += part
        sums.append(total.to(x.dtype))
    return sums


class ToRanks(torch.autograd.Function):
    """Rows, weights and ids to the ranks; the gradients of rows and weights back."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group, ctx.ints = plan, group, len(tensors) - 2
        return tuple(to_ranks(plan, group, *tensors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
        sums = to_tokens(ctx.plan, ctx.group, grad.contiguous(), grad_weights.contiguous())
        return None, None, *sums, *[None] * ctx.ints


class ToTokens(torch.autograd.Function):
    """Parts of rows back to their tokens, and added up; gradients to the ranks."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, group: ProcessGroup, y: Tensor) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return to_tokens(plan, group, y.contiguous())[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, to_ranks(ctx.plan, ctx.group, grad)[0]


class Gather(torch.autograd.Function):
    """Rows of pairs; gradients of one row's pairs are added up in order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, places: Tensor, is_pair: Tensor) -> Tensor:
        ctx.save_for_backward(places, is_pair)
        return rows.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places, is_pair = ctx.saved_tensors
        total, *others = grad[places].float().masked_fill_(~is_pair[:, :, None], 0).unbind(1)
        for part in others:
            total += part
        return total.to(grad.dtype), None, None, None


class Sum(torch.autograd.Function):
    """The weighted sum of each row's pairs, in order."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, places: Tensor, is_pair: Tensor, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, pairs)
        parts = y[places].float() * weights[:, :, None]
        total, *others = parts.masked_fill_(~is_pair[:, :, None], 0).unbind(1)
        for part in others:
            total += part
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, pairs = ctx.saved_tensors
        rows = grad.index_select(0, pairs // weights.shape[1]).float()
        grad_weights = torch.zeros_like(weights)
        grad_weights.view(-1)[pairs] = (rows * y.float()).sum(1)
        return (rows * weights.reshape(-1)[pairs, None]).to(y.dtype), grad_weights, None, None, None


def by_hand(x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, case: Case, group: ProcessGroup) -> Tensor:
    plan, pairs = planned(ids, case.experts, group)
    rows, row_weights, row_ids = ToRanks.apply(plan, group, x, weights, ids.int())
    number = case.experts // case.world
    local = row_ids - group.rank() * number
    keys = torch.where((local >= 0) & (local < number), local, number)
    ordered, order = keys.view(-1).sort(stable=True)
    chosen = order[:pairs]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(keys.shape)
    is_pair = keys < number
    places = places.masked_fill(~is_pair, 0)
    gathered = Gather.apply(rows, chosen // case.k, places, is_pair)
    results = (doubled_rows if case.is_stub else expert_rows)(gathered, ordered[:pairs], scales)
    return ToTokens.apply(plan, group, Sum.apply(results, row_weights, places, is_pair, chosen))


def ours(x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, case: Case, group: ProcessGroup) -> Tensor:
    dispatched = dispatch(x, ids, weights, case.experts, group)
    rows, counts = dispatched.by_expert()
    results = (doubled_rows if case.is_stub else rows_by_counts)(rows, counts, scales)
    return combine(dispatched.summed(results), dispatched)


def layer_of_transformers(scales: Tensor, case: Case, group: ProcessGroup) -> Callable[..., Tensor]:
    """``AllToAllEP`` over the same experts."""
    from transformers.distributed.expert_parallel import AllToAllEP

    layer: Any = object.__new__(AllToAllEP)
    results = doubled_rows if case.is_stub else expert_rows
    layer.experts_forward = lambda rows, ids, weights: results(rows, ids[:, 0], scales) * weights
    layer.num_local_experts = case.experts // case.world
    layer.ep_mesh = SimpleNamespace(get_group=lambda: group, size=group.size)
    layer.tp_mesh = SimpleNamespace(size=lambda: 1)
    return lambda x, ids, weights: layer(x, ids, weights)


class NoStream:
    """A stream, or an event, where everything is in order."""

    def wait_stream(self, stream: "NoStream") -> None: ...

    def record_event(self) -> "NoStream":
        return self

    def synchronize(self) -> None: ...


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Its dispatcher's streams are none, and its sizes are numbers of the host already."""

    def on_host(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return x.numpy() if as_numpy and x is not None else x

    stream = NoStream()
    with (
        cpu_device(),
        warnings.catch_warnings(action="ignore"),
        mock.patch.multiple(
            torch.cuda, Stream=NoStream, stream=lambda given: nullcontext(), current_stream=lambda: stream
        ),
        mock.patch.object(peer("transformer.moe.token_dispatcher"), "maybe_move_tensor_to_cpu", on_host),
    ):
        yield


def layer_of_megatron(ids: Tensor, scales: Tensor, case: Case, group: ProcessGroup) -> Callable[..., Tensor]:
    """``MoEAlltoAllTokenDispatcher`` without its fused kernels; experts multiply by the weights, as Megatron's do."""
    local = case.experts // case.world
    config = SimpleNamespace(
        num_moe_experts=case.experts, moe_router_topk=case.k, moe_permute_fusion=False, cuda_graph_impl="none",
        moe_pad_expert_input_to_capacity=False, moe_expert_capacity_factor=None,
        moe_router_padding_for_quantization=False,
    )  # fmt: skip
    indices = list(range(group.rank() * local, (group.rank() + 1) * local))
    groups = SimpleNamespace(ep=group, expt_tp=None, tp_ep=group)
    make = peer("transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    routed = torch.zeros(case.tokens, case.experts, dtype=torch.bool).scatter_(1, ids, True)

    def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        dispatcher = make(local, indices, config, groups)
        probs = torch.zeros(routed.shape).scatter(1, ids, weights)
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routed, probs))
        rows, counts, rows_probs = dispatcher.dispatch_postprocess(*sent)
        results = rows_by_counts(rows, counts, scales) * rows_probs[:, None]
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(results)))

    return forward


def inputs_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, ids, weights, this rank's factors, and a gradient of the result."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(case.tokens, case.hidden, generator=generator).requires_grad_()
    ids = torch.rand(case.tokens, case.experts, generator=generator).topk(case.k).indices
    weights = torch.rand(case.tokens, case.k, generator=generator).requires_grad_()
    scales = torch.randn(case.experts // case.world, case.hidden, generator=generator)
    return x, ids, weights, scales, torch.randn(x.shape, generator=generator)


def calls_of(case: Case, group: ProcessGroup) -> dict[str, Callable[[], list[Tensor]]]:
    """Forward and backward of each provider: the result, and the gradients of tokens and weights."""
    x, ids, weights, scales, gradient = inputs_of(case)
    forwards: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(x, ids, weights, scales, case, group),
        "by hand": lambda: by_hand(x, ids, weights, scales, case, group),
    }
    theirs = layer_of_transformers(scales, case, group)
    forwards["transformers"] = lambda: theirs(x, ids, weights)
    if not case.is_stub:
        megatrons = layer_of_megatron(ids, scales, case, group)
        forwards["megatron"] = lambda: megatrons(x, ids, weights)

    def both(forward: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            out = forward()
            return [
                out,
                *run_backward((out,), (gradient,), False, False, (x, weights), True, accumulate_grad=False),
            ]

        return call

    return {provider: both(forward) for provider, forward in forwards.items()}


def sent_bytes(group: ProcessGroup, case: Case) -> dict[str, int]:
    """Bytes that a step sends to other ranks; Megatron's counts, an all-gather, are left out."""
    import transformers.distributed.expert_parallel as module

    sent, start, plain = [0], backend.all_to_all, dist.all_to_all_single
    theirs = module.all_to_all_single_autograd

    def count(x: Tensor, sizes: Any) -> None:
        rows = list(sizes or [len(x) // case.world] * case.world)
        sent[0] += int(sum(rows) - rows[group.rank()]) * x[:1].nbytes

    def counted(out: Tensor, x: Tensor, recv: Any, send: Any, *rest: Any) -> Any:
        count(x, send)
        return start(out, x, recv, send, *rest)

    def with_backward(x: Tensor, recv: Any, send: Any, *rest: Any) -> Any:
        count(x, send)
        count(x, recv)
        return theirs(x, recv, send, *rest)

    def single(out: Tensor, x: Tensor, input_split_sizes: Any = None, **rest: Any) -> Any:
        count(x, None if input_split_sizes is None else input_split_sizes.tolist())
        return plain(out, x, input_split_sizes=input_split_sizes, **rest)

    result, calls = {}, calls_of(case, group)
    with (
        mock.patch.object(backend, "all_to_all", counted),
        mock.patch.multiple(module, all_to_all_single_autograd=with_backward, all_to_all_single=single),
        mock.patch.object(dist, "all_to_all_single", single),
        megatron_on_cpu(),
    ):
        for provider in ("ours", "transformers", "megatron"):
            sent[0] = 0
            calls[provider]()
            result[provider] = sent[0]
    return result


def clock(group: ProcessGroup, case: Case, rounds: int) -> Samples:
    """Microseconds of this thread for one call by provider; all ranks start a sample together."""
    with quiet_host(), megatron_on_cpu():
        order = list(calls_of(case, group).items())
        inner, now = (1, time.perf_counter) if case.waits else (INNER, time.thread_time)
        samples: Samples = {provider: [] for provider, _ in order}
        for i in range(-WARM_UP, rounds):
            for provider, call in order:
                dist.barrier(group)
                started = now()
                for _ in range(inner):
                    call()
                if i >= 0:
                    samples[provider].append((now() - started) / inner * 1e6)
            order.reverse()
    return samples


def clock_launches(case: Case, rounds: int) -> Samples:
    """Microseconds of a call on a stub GPU; every rank has sent what this one sends."""
    import transformers.distributed.expert_parallel as module

    exchange_counts, all_to_all = routing.exchange_counts, dist.all_to_all_single
    known = torch.empty(case.world, 4, dtype=torch.int64)

    def own_counts(counts: Tensor, *arguments: Any) -> None:
        exchange_counts(counts, *arguments)
        counts.copy_(known)  # which no kernel has counted

    def copied(out: Tensor, x: Tensor, *sizes: Any, **options: Any) -> None:
        all_to_all(out, x, *sizes, **options)
        out.copy_(x)  # by hand an index of what nobody wrote would be refused

    with (
        helpers("fake_gpu.device").Device().current(runs=False),
        no_op_group(case.world) as group,
        mock.patch.object(routing, "exchange_counts", own_counts),
        mock.patch.object(dist, "all_to_all_single", copied),
        mock.patch.object(module, "all_to_all_single", copied),
        warnings.catch_warnings(action="ignore"),
        quiet_host(),
    ):
        torch_path.sort_by_owner(inputs_of(case)[1], case.experts // case.world, 0, known)
        calls = calls_of(case, group)
        return dict(zip(calls, interleaved(list(calls.values()), rounds * 5, 1), strict=True))


def measure(case: Case, pool: Any, timer: Clock) -> Iterator[Row]:
    """One row of all providers."""
    if case.is_stub:
        sample_launches = partial(clock_launches, case, timer.rounds)
        yield timer.row(case.label, sample_launches, mode="stub GPU", limit=1.1, limit_with_spread=1.2)
        return
    sent = pool.run(sent_bytes, case, world=case.world)[0]

    def sample() -> Samples:
        return pool.run(clock, case, timer.rounds, world=case.world)[0]

    yield timer.row(case.label, sample, mode=f"world {case.world}", sent=sent)


def missing_peers() -> str:
    """Install command of a peer; empty where both are installed."""
    if not importlib.util.find_spec("transformers"):
        return "transformers is not installed: pip install transformers"
    return missing_megatron()


def missing() -> str:
    """Install command of a peer, or what the stub driver lacks; empty where nothing does."""
    return missing_peers() or bench_launch.missing()


def missed(row: Row) -> list[str]:
    """Rows that send as many bytes as a row for each pair."""
    sent = row.get("sent", {"ours": 0, "transformers": 1})
    return [] if sent["ours"] < sent["transformers"] else [f"{row['row']}: sends {sent}"]


PART = Part(
    name="experts",
    unit="microseconds of a thread per call, forward and backward, Gloo over loopback",
    cases=CASES,
    measure=measure,
    host=real_ranks,
    missing=missing,
    packages=("transformers", "megatron-core"),
    rounds=20,
    peer="by hand",
    targets=missed,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
