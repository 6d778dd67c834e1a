"""What ranks run to compare Megatron-core with and without ours: training, and single linear layers."""

import contextlib
import inspect
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron_cpu import LENGTH, VOCABULARY, core, gpt_chunks, groups, join, on_cpu, transformer_config
from megatron_gradients import sums_of_gradients
from megatron_verify import verified
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritoncomm import record
from tritoncomm.integrations import megatron
from tritoncomm.mappings.overwriting import is_overwriting

__all__ = ["CASES", "QUICK_STEPS", "Case", "Copies", "compare", "compile_linear", "linear_layers", "quick"]

BATCH, QUICK_STEPS = 2, 2


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        ranks: of the job.
        sizes: arguments of ``initialize_model_parallel``.
        settings: fields of Megatron's config.
        chunks: model chunks per rank.
        reference: fields that differ in the run of Megatron alone.
        cross_entropy: ours replaces Megatron's too; losses and gradients are close, not equal.
        steps: of training, four micro-batches each.
    """

    ranks: int = 2
    sizes: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    chunks: int = 1
    reference: dict[str, Any] = field(default_factory=dict)
    cross_entropy: bool = False
    steps: int = 20


_SEQUENCE = {"sequence_parallel": True}
_OVERLAP = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "add_bias_linear": False}
_INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
CASES = {
    "tensor-2": Case(sizes={"tensor_model_parallel_size": 2}),
    "tensor-2-sequence": Case(sizes={"tensor_model_parallel_size": 2}, settings=_SEQUENCE),
    "tensor-2-recompute": Case(sizes={"tensor_model_parallel_size": 2}, settings=_RECOMPUTE | _DROPOUT),
    "tensor-2-sequence-recompute": Case(
        sizes={"tensor_model_parallel_size": 2}, settings=_SEQUENCE | _RECOMPUTE | _DROPOUT
    ),
    "pipeline-2": Case(sizes={"pipeline_model_parallel_size": 2}),
    "tensor-2-pipeline-2-sequence": Case(
        4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, _SEQUENCE
    ),
    "interleaved-overlap": Case(sizes=_INTERLEAVED, settings=_OVERLAP, chunks=2),
    "interleaved-batched": Case(sizes=_INTERLEAVED, chunks=2, reference=_OVERLAP),
    "interleaved-4": Case(4, _INTERLEAVED | {"pipeline_model_parallel_size": 4}, {"num_layers": 8}, chunks=2),
    "experts-allgather": Case(
        sizes={"expert_model_parallel_size": 2}, settings=_EXPERTS | {"moe_token_dispatcher_type": "allgather"}
    ),
    "experts-alltoall": Case(
        sizes={"expert_model_parallel_size": 2}, settings=_EXPERTS | {"moe_token_dispatcher_type": "alltoall"}
    ),
    "tensor-2-cross-entropy": Case(sizes={"tensor_model_parallel_size": 2}, cross_entropy=True),
}


class Copies(TorchDispatchMode):
    """Messages by operator, bytes read and written by operators that only copy, and bytes of new memory."""

    _COPYING = frozenset(
        ("clone", "copy_", "cat", "_to_copy", "stack", "index", "index_select", "_unsafe_index", "slice_scatter")
    )
    _NEW = frozenset(("empty", "empty_like", "new_empty"))

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[str] = Counter()
        self.copied = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self.messages[name] += 1
        elif name in self._COPYING or name in self._NEW:
            size = (result[0] if isinstance(result, list | tuple) else result).nbytes
            self.copied += 2 * size if name in self._COPYING else 0
            self.allocated += size if name != "copy_" else 0
        return result


@dataclass
class Run:
    """What one run of a case gives: losses and gradients of every step, and counts of the last."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    messages: int
    copied: int
    allocated: int


def train(case: Case, settings: dict[str, Any]) -> Run:
    """Train by Megatron's schedule of the case."""
    with groups(**case.sizes) as state:
        sizes = {name: size for name, size in case.sizes.items() if not name.startswith("virtual")}
        if case.chunks > 1:
            sizes["virtual_pipeline_model_parallel_size"] = case.chunks
        torch.manual_seed(7)
        chunks = gpt_chunks(transformer_config(sizes, **settings), state, case.chunks)
        run = Run([], [], 0, 0, 0)
        for step in range(case.steps):
            for chunk in chunks:
                chunk.zero_grad(set_to_none=True)
            last = step == case.steps - 1
            with Copies() if last else contextlib.nullcontext() as copies:
                run.losses += _forward_backward(chunks, case, step)
            if copies is not None:
                run.messages, run.copied, run.allocated = sum(copies.messages.values()), copies.copied, copies.allocated
            named = {f"{i}.{name}": p for i, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}
            assert all(p.grad is not None for p in named.values())
            run.gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
            _update(named, state)
    return run


def _forward_backward(chunks: list[nn.Module], case: Case, step: int) -> list[Tensor]:
    """Losses of four micro-batches; empty where this rank has no last chunk."""
    generator = torch.Generator().manual_seed(
        100 * step + dist.get_rank() * ("expert_model_parallel_size" in case.sizes)
    )
    batches = [torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(4)]
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward_step(data: Iterator[Tensor], model: nn.Module, *_: Any) -> Any:
        ids = next(data)
        return model(ids, positions, mask, labels=ids.roll(-1, 1)), lambda out: (out.mean(), out.detach().mean())

    return core("pipeline_parallel.schedules").get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )


def _update(parameters: dict[str, nn.Parameter], state: Any) -> None:
    """A step of SGD, after the sums that Megatron's data-parallel wrapper would make."""
    tensor, data = state.get_tensor_model_parallel_group(), state.get_data_parallel_group()
    for p in parameters.values():
        assert p.grad is not None
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad, group=tensor)
        if getattr(p, "allreduce", True) and data.size() > 1:
            dist.all_reduce(p.grad, group=data)
    with torch.no_grad():
        for p in parameters.values():
            p.sub_(0.05 * p.grad)  # pyright: ignore


def compare(name: str, store: str, steps: int = 20, rank: int | None = None) -> dict[str, Any]:
    """Run a case with Megatron alone and with ours in one process per rank; what differs, and counts of both."""
    case, rank = replace(CASES[name], steps=steps), int(os.environ["RANK"]) if rank is None else rank
    with join(rank, case.ranks, store), on_cpu():
        theirs = train(case, case.settings | case.reference)
        with megatron.patched(cross_entropy=case.cross_entropy), record.recording() as counted:
            ours = train(case, case.settings)
    pairs = [(f"loss {i}", a, b) for i, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True))]
    for i, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        assert a.keys() == b.keys()
        pairs += [(f"step {i} {label}", a[label], b[label]) for label in a]
    return {
        "differing": [label for label, a, b in pairs if not torch.equal(a.view(torch.int32), b.view(torch.int32))],
        "distance": max((float((a - b).abs().max()) for _, a, b in pairs), default=0.0),
        "losses": [float(loss) for loss in ours.losses],
        "gradients": len(ours.gradients[0]),
        "nonzero": sum(bool(gradient.any()) for gradient in ours.gradients[0].values()),
        "messages": (theirs.messages, ours.messages),
        "copied": (theirs.copied, ours.copied),
        "allocated": (theirs.allocated, ours.allocated),
        "calls": {called: count.calls for (called, _), count in counted.items()},
    }


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[:1, :1, :1].expand(x.shape),
}


@dataclass(frozen=True)
class Linear:
    """One call of a linear function of Megatron's."""

    sequence_parallel: bool
    allreduce_dgrad: bool
    frozen: bool
    bias: bool
    layout: str
    gradient: str
    dtype: torch.dtype

    @classmethod
    def cases(cls) -> Iterator["Linear"]:
        ways = ((False, False), (False, True), (True, False))
        flags = itertools.product(ways, (False, True), (False, True))
        for (sequence, reduced), frozen, bias in flags:
            for layout, gradient in [("contiguous", name) for name in LAYOUTS] + [("transposed", "contiguous")]:
                yield cls(sequence, reduced, frozen, bias, layout, gradient, torch.float32)
            yield cls(sequence, reduced, frozen, bias, "sliced", "transposed", torch.bfloat16)

    def run(self, layers: Any, group: Any, grad: bool = True) -> tuple[list[Tensor], "Copies"]:
        """Output and gradients, on the same numbers whoever runs it; what it copied."""
        generator = torch.Generator().manual_seed(dist.get_rank(group) * self.sequence_parallel)
        world = group.size() if self.sequence_parallel else 1
        x = LAYOUTS[self.layout](torch.randn(6, 3, 8, generator=generator).to(self.dtype))
        assert x.is_contiguous() == (self.layout == "contiguous")
        x.requires_grad_(True)
        weight = torch.randn(10, 8, generator=generator).to(self.dtype).requires_grad_(not self.frozen)
        bias = torch.randn(10, generator=generator).to(self.dtype).requires_grad_(True) if self.bias else None
        gradient = LAYOUTS[self.gradient](torch.randn(6 * world, 3, 10, generator=generator).to(self.dtype))
        flags = (False, self.allreduce_dgrad, self.sequence_parallel)
        with Copies() as copies, torch.set_grad_enabled(grad):
            if self.frozen:
                out = layers.linear_with_frozen_weight(x, weight, bias, *flags, group)
            else:
                out = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, bias, *flags, tp_group=group)
            results = [out.detach().clone()]
            if grad:
                out.backward(gradient)
        return results + [each.grad for each in (x, weight, bias) if each is not None and each.grad is not None], copies


def linear_layers(store: str) -> dict[str, Any]:
    """Every linear case with and without ours: which differ in bits, in messages, or copy more; other functions too."""
    rank = int(os.environ["RANK"])
    wrong: dict[str, Any] = {"bits": [], "messages": [], "copied": []}
    with join(rank, 2, store), on_cpu(), groups(tensor_model_parallel_size=2) as state:
        layers, group = core("tensor_parallel.layers"), state.get_tensor_model_parallel_group()
        for case, grad in itertools.product(Linear.cases(), (True, False)):
            theirs, their_copies = case.run(layers, group, grad)
            with megatron.patched():
                ours, our_copies = case.run(layers, group, grad)
                copied, tries = our_copies.copied, 0
                # A thread of Gloo may refer to a gradient for longer, which autograd then copies into ``x.grad``.
                while _of_all(copied > their_copies.copied, group) and tries < 20:
                    copied, tries = min(copied, case.run(layers, group, grad)[1].copied), tries + 1
            label = f"{case} {grad=}"
            if len(ours) != len(theirs) or not all(map(_same_bits, ours, theirs)):
                wrong["bits"].append(label)
            if our_copies.messages != their_copies.messages:
                wrong["messages"].append(f"{label}: {their_copies.messages} -> {our_copies.messages}")
            # Gloo takes a strided tensor to gather, for a copy of its own; NCCL refuses it.
            refused = case.sequence_parallel and not case.frozen and case.layout != "contiguous"
            if copied > their_copies.copied and not refused:
                wrong["copied"].append(f"{label}: {their_copies.copied} -> {copied}")
        with megatron.patched():
            wrong["reductions"] = _reductions(group)
            wrong["second derivatives"] = [
                str(sequence) for sequence in (False, True) if not _second_derivatives_agree(layers, group, sequence)
            ]
        wrong["cross entropy"] = _cross_entropies()
    return wrong


def _of_all(condition: bool, group: Any) -> bool:
    """Whether the condition holds on a rank of the group."""
    holds = torch.tensor(int(condition))
    dist.all_reduce(holds, dist.ReduceOp.MAX, group=group)
    return bool(holds)


def _cross_entropies() -> list[str]:
    """Ways to call the cross entropy by which ours and Megatron's differ by more than rounding.

    With smoothing over several ranks it is compared with a closed form: Megatron smooths over each rank's own classes.
    """
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    function = core("tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    ways: dict[str, dict[str, Any]] = {"tensor group": {}}
    if "tp_group" in inspect.signature(function).parameters:
        ways |= {"own group": {"tp_group": alone}, "smoothed own group": {"label_smoothing": 0.1, "tp_group": alone}}
    wrong = []
    for label, arguments in ways.items():
        results = []
        for ours in (False, True):
            with megatron.patched(cross_entropy=True) if ours else contextlib.nullcontext():
                generator = torch.Generator().manual_seed(dist.get_rank())
                logits = torch.randn(6, 2, 8, generator=generator, requires_grad=True)
                target = torch.arange(12).view(6, 2) % 8
                loss = core("tensor_parallel.cross_entropy").vocab_parallel_cross_entropy(
                    logits * 1, target, **arguments
                )
                results.append((loss, *torch.autograd.grad(loss.sum(), logits)))
        if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True)):
            wrong.append(label)
    return wrong + [f"smoothing {a}" for a in (0.1, 0.9) if not _smoothed_agrees(a)]


def _smoothed_agrees(a: float) -> bool:
    """Whether a smoothed loss and its gradient are those of one process: a/(C - 1) for each class but the target."""
    parts = [torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]
    full, own = torch.cat(parts, -1).requires_grad_(), parts[dist.get_rank()].requires_grad_()
    classes = full.shape[-1]
    target = torch.arange(12).view(6, 2) * 5 % classes
    wanted = torch.full_like(full, a / (classes - 1)).scatter(-1, target[..., None], 1 - a)
    expected = -(wanted * full.log_softmax(-1)).sum(-1)
    with megatron.patched(cross_entropy=True):
        loss = core("tensor_parallel.cross_entropy").vocab_parallel_cross_entropy(own * 1, target, a)
    (gradient,), (full_gradient,) = (torch.autograd.grad(each.sum(), x) for each, x in ((loss, own), (expected, full)))
    pairs = (loss, expected), (gradient, full_gradient.chunk(len(parts), -1)[dist.get_rank()])
    return all(torch.allclose(mine, true, rtol=1e-5, atol=1e-6) for mine, true in pairs)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _second_derivatives_agree(layers: Any, group: Any, sequence: bool) -> bool:
    """Gradients of the squared gradients of ``sum(y ** 3)`` by x and weight, against one process."""
    world, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(3)
    full_x = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    full_weight = torch.randn(10, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    full = _squared_gradient(lambda x, weight: torch.matmul(x, weight.t()), full_x, full_weight)
    x = (full_x.chunk(world)[rank] if sequence else full_x).detach().clone().requires_grad_(True)
    weight = full_weight.chunk(world)[rank].detach().clone().requires_grad_(True)
    linear = layers.linear_with_grad_accumulation_and_async_allreduce
    ours = _squared_gradient(
        lambda x, weight: linear(x, weight, None, False, not sequence, sequence, tp_group=group), x, weight
    )
    expected = full[0].chunk(world)[rank] if sequence else full[0], full[1].chunk(world)[rank]
    return all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(ours, expected, strict=True))


def _squared_gradient(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    gradients = torch.autograd.grad((linear(x, weight) ** 3).sum(), (x, weight), create_graph=True)
    return torch.autograd.grad((gradients[0] ** 2).sum() + (gradients[1] ** 2).sum(), (x, weight))


def compile_linear(store: str, backend: str) -> list[str]:
    """A column-parallel and a row-parallel layer under torch.compile, which should be as in eager mode; what is not."""
    rank, wrong = int(os.environ["RANK"]), []
    with join(rank, 2, store), on_cpu(), groups(tensor_model_parallel_size=2), megatron.patched():
        layers = core("tensor_parallel.layers")
        for sequence in (False, True):
            torch.manual_seed(5)
            config = transformer_config({"tensor_model_parallel_size": 2}, sequence_parallel=sequence)
            common = {"config": config, "init_method": nn.init.normal_, "bias": True}
            column = layers.ColumnParallelLinear(32, 64, gather_output=False, **common)
            row = layers.RowParallelLinear(64, 32, input_is_parallel=True, skip_bias_add=False, **common)
            pair = nn.ModuleList([column, row])

            def both(x: Tensor, column: Any = column, row: Any = row) -> Tensor:
                return row(torch.tanh(column(x)[0]))[0]

            results = []
            for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
                x = torch.linspace(-1, 1, 4 * 3 * 32).view(4, 3, 32).requires_grad_(True)
                pair.zero_grad()
                out = function(x)
                out.square().sum().backward()
                results.append([out.detach(), x.grad, *(p.grad for p in pair.parameters())])
            for i, (a, b) in enumerate(zip(*results, strict=True)):
                if a is None or b is None or (a - b).abs().max() > 1e-5 * a.abs().max():
                    wrong.append(f"{sequence=} result {i}")
    return wrong


def quick(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Six cases of training and all linear layers in one job of four ranks, because Megatron takes seconds to import.

    Ranks 0 and 1 are one job for some of them, 2 and 3 another. Returns the results of the cases by name, and the
    functions that differ.
    """
    rank, found = int(os.environ["RANK"]), {}
    halves = ("tensor-2", "tensor-2-sequence", "pipeline-2"), ("experts-allgather", "experts-alltoall")
    trained = {name: compare(name, f"{folder}/{name}", QUICK_STEPS, rank % 2) for name in halves[rank // 2]}
    if rank < 2:
        found = linear_layers(f"{folder}/linear")
        found["verify"] = verified(f"{folder}/verify", ["sequence", "experts, all-to-all"], True)
    trained["interleaved-4"] = compare("interleaved-4", f"{folder}/interleaved-4", QUICK_STEPS)
    found["modules"] = pipelines_of_modules(f"{folder}/modules")
    found["gradients"] = sums_of_gradients(f"{folder}/gradients")
    return trained, found


def pipelines_of_modules(store: str) -> tuple[list[Any], list[Any], str]:
    """Numbers that this rank receives from Megatron's communicator of modules without ours and with it.

    Two modules of two stages each, one after the other. Returns the module of the inner communicator's class as well.
    """
    rank = int(os.environ["RANK"])
    new_group, enumerated = dist.new_group, dist.new_subgroups_by_enumeration
    on_gloo = {
        "new_group": lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "gloo"}),
        "new_subgroups_by_enumeration": lambda *args, **kwargs: enumerated(*args, **{**kwargs, "backend": "gloo"}),
    }
    with join(rank, 4, store), on_cpu(), mock.patch.multiple(dist, **on_gloo):
        grids = {}
        for offset, name in enumerate(("encoder", "decoder")):
            grids[name] = core("hyper_comm_grid").HyperCommGrid([1, 1, 2, 1], ["tp", "cp", "pp", "dp"], 2 * offset)
            for dims in ("tp", "cp", "pp", "dp"):
                grids[name].create_pg([dims])
        theirs, _ = _pass_through_modules(grids)
        with megatron.patched():
            ours, used = _pass_through_modules(grids)
    return theirs, ours, used


def _pass_through_modules(grids: dict[str, Any]) -> tuple[list[Any], str]:
    config = core("model_parallel_config").ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    module = core("pipeline_parallel.multimodule_communicator")
    topology = {"encoder": ["decoder"], "decoder": []}
    communicator = module.MultiModulePipelineCommunicator(grids, topology, config, {"s": 0, "b": 1, "h": 2})
    (name, info), shape = *communicator.rank_module_map.items(), (5, 2, 3)
    stage, received = dist.get_rank(), []
    if stage:
        received.append(*communicator.recv_forward(shape).values())
    x = received[0].detach() * 3 + stage if stage else torch.arange(30.0).view(shape)
    if stage < 3:
        communicator.send_forward({name: x})
        received.append(*communicator.recv_backward(shape).values())
    gradient = received[-1].detach() / 7 if stage < 3 else x.cos()
    if stage:
        communicator.send_backward({"encoder" if stage == 2 else name: gradient})
    return [each.tolist() for each in received], type(info.p2p_communicator).__module__


def _reductions(group: Any) -> list[str]:
    """Check which inputs and gradients the all-reduces overwrite under the patch; return the wrong cases."""
    theirs = core("tensor_parallel.mappings")
    reduce, copy = theirs.reduce_from_tensor_model_parallel_region, theirs.copy_to_tensor_model_parallel_region
    leaf, plain = torch.full((4, 3), 2.0, requires_grad=True), torch.full((4, 3), 2.0)
    saved = torch.full((4, 3), 2.0)
    inputs: dict[str, tuple[Any, bool]] = {
        "result": (leaf * 1.0, True),
        "without grad": (plain.clone(), True),
        "strided result": ((leaf * 1.0).t().contiguous().t(), False),
        "leaf": (leaf, False),
        "view of a leaf": (leaf.view(12), False),
        "view of a result": ((leaf * 1.0).view(12), False),
        "numpy": (torch.from_numpy(plain.numpy().copy()), False),
    }
    wrong = []
    for label, (x, overwritten) in inputs.items():
        y = reduce(x, group=group)
        if bool((x == 4.0).all()) != overwritten or not bool((y == 4.0).all()):
            wrong.append(label)
        if y.requires_grad != x.requires_grad:
            wrong.append(f"{label}: requires_grad")
    with torch.no_grad():
        y = reduce(leaf, group=group)
        if bool((leaf == 4.0).any()) or y.requires_grad:
            wrong.append("leaf without grad mode")
    for label, out in (("saved by its producer", torch.sigmoid(leaf)), ("saved by another", saved)):
        other = leaf * saved
        try:
            (reduce(out, group=group).sum() + other.sum()).backward()
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                continue
        wrong.append(label)
    whole = torch.full((8, 3), 2.0)
    gradients: dict[str, tuple[Any, bool]] = {
        "gradient": (torch.full((4, 3), 2.0), True),
        "strided gradient": (torch.full((3, 4), 2.0).t(), False),
        "gradient inside of another": (whole[:4], False),
        "gradient of numpy": (torch.from_numpy(plain.numpy().copy()), False),
    }
    for label, (gradient, overwritten) in gradients.items():
        x = torch.ones(4, 3, requires_grad=True)
        copy(x, group=group).backward(gradient)
        if bool((gradient == 4.0).all()) != overwritten or not bool((x.grad == 4.0).all()):
            wrong.append(label)
    if is_overwriting():
        wrong.append("the patch has switched overwrite_inputs on")
    return wrong
