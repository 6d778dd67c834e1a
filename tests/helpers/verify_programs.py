"""Right programs of other libraries, as users write them: for `tritoncomm verify`, which has to find them equal."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
import torch.nn.functional as F
from pool import mesh_of_four
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from verify_cases import Ranks, Row, SequenceAttention, sequence, tensor
from verify_others import gated, rotary

from tritoncomm import mappings, parallel
from tritoncomm.demo.plain_model import PlainTransformer, sharded
from tritoncomm.demo.settings import Settings
from tritoncomm.integrations.deepspeed import DistributedAttention
from tritoncomm.integrations.yunchang import SeqAllToAll4D
from tritoncomm.tensor import ProcessGroup
from tritoncomm.verify import Case

__all__ = ["PROGRAMS", "channels", "masked", "sampled"]

BATCH, LENGTH, CLASSES = 8, 8, 24


class Model(nn.Module):
    """Embedding, norm in fp32, an MLP that may be recomputed, a frozen layer, a head."""

    def __init__(self, recompute: bool = False, frozen: bool = True) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.norm = nn.Embedding(CLASSES, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.frozen = nn.Linear(16, 16) if frozen else nn.Identity()
        self.head = nn.Linear(16, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.recompute:
            y: Any = checkpoint(self.mlp, x, use_reentrant=False)
        else:
            y = self.mlp(x)
        return self.head(x + self.frozen(y))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.randint(CLASSES, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    return numbers[0], numbers[1]


def made(whole: dict[str, Tensor] | None, **options: Any) -> Model:
    model = Model(**options)
    if whole is not None:
        model.load_state_dict(whole)
    return model


def stepped(model: Any, ids: Tensor, targets: Tensor, parts: int = 1) -> Callable[[], Tensor]:
    """A step of one or several micro-batches."""

    def step() -> Tensor:
        total = torch.zeros(())
        for x, y in zip(ids.chunk(parts), targets.chunk(parts), strict=True):
            logits = model(x)
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / parts
            loss.backward()
            total += loss.detach()
        return total

    return step


def ddp(rank: int, world: int, group: Any, whole: Any, **options: Any) -> Case:
    ids, targets = (x.chunk(world)[rank] for x in batch())
    model = made(whole, **options)
    if world == 1:
        return Case(model, stepped(model, ids, targets))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = DistributedDataParallel(model, process_group=group)
    return Case(wrapped, stepped(wrapped, ids, targets), rename=lambda name: name.removeprefix("module."))


def fsdp(rank: int, world: int, group: Any, whole: Any, replicas: int = 1, parts: int = 1, **options: Any) -> Case:
    ids, targets = (x.unflatten(0, (parts, -1)).chunk(world, 1)[rank].flatten(0, 1) for x in batch())
    model = made(whole, **options)
    if world > 1:
        mesh = DeviceMesh.from_group(group, "cpu")
        if replicas > 1:
            mesh = mesh_of_four("replicas", "shards")
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
    return Case(model, stepped(model, ids, targets, parts))


def styled(rank: int, world: int, group: Any, whole: Any, styles: Any, in_sequence: bool) -> Case:
    model = made(whole, frozen=not in_sequence)
    if world > 1:
        mesh = DeviceMesh.from_group(group, "cpu")
        row, column = styles.RowwiseParallel, styles.ColwiseParallel
        plan = {"up": column(), "down": row(), "head": column(output_layouts=Replicate())}
        if in_sequence:
            plan = {
                "norm": styles.SequenceParallel(),
                "embed": row(input_layouts=Replicate(), output_layouts=Shard(1)),
                "up": column(input_layouts=Shard(1)),
                "down": row(output_layouts=Shard(1)),
                "head": column(input_layouts=Shard(1), output_layouts=Replicate()),
            }
        theirs.parallelize_module(model, mesh, plan)
    return Case(model, stepped(model, *batch()))


def ulysses(rank: int, world: int, group: Any, whole: Any, of: str) -> Case:
    """The model over sequence shards with the attention of another library."""
    case = sequence(rank, world, group, whole, length=8)
    assert isinstance(case.model, nn.Module)
    for module in case.model.modules():
        if isinstance(module, SequenceAttention) and world > 1:
            module.exchanged = _through(of, module.attend, group)  # type: ignore[method-assign]
    return case


def _through(of: str, attend: Callable[..., Tensor], group: Any) -> Callable[..., Tensor]:
    """Attention over all ranks' positions, as the library's users call it, around ``attend``."""
    if of == "deepspeed":
        around = DistributedAttention(attend, group, 2, 1)
        return lambda *parts: around(*parts, 0)

    def exchanged(*parts: Tensor) -> Tensor:
        y = attend(*(SeqAllToAll4D.apply(group, x, 2, 1) for x in parts))
        return SeqAllToAll4D.apply(group, y, 1, 2)

    return exchanged


def colo(rank: int, world: int, group: Any, whole: Any) -> Case:
    settings = Settings(ranks=world, layers=2, hidden=32, sequence=LENGTH, batch=BATCH, dtype="float64")
    model = PlainTransformer(settings)
    if whole is not None:
        model.load_state_dict(whole)
    if world > 1:
        model = sharded(model, ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=world))
    ids, targets = (x.t().contiguous() for x in batch())

    def step() -> Tensor:
        loss = model(ids, targets)
        loss.backward()
        return loss

    return Case(model, step)


class Channels(nn.Module):
    """Channels that are split: a bias that a norm takes away, complex weights, and a mixture of experts by rank."""

    def __init__(self, ranks: Ranks, experts: int = 4) -> None:
        super().__init__()
        world, rank = ranks.world, ranks.rank
        self.ranks = ranks
        self.up, self.norm = nn.Linear(16, 32 // world), nn.BatchNorm1d(32 // world)
        self.filter = nn.Parameter(torch.randn(32 // world, 5, dtype=torch.complex128))
        self.down = Row(ranks, 32, 16, True, "down")
        self.mixture = Mixture(ranks, [*range(rank * experts // world, (rank + 1) * experts // world)], experts)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(self.ranks.copy(x)))
        y = torch.fft.irfft(torch.fft.rfft(y.t(), n=BATCH, dim=1) * self.filter, n=BATCH, dim=1).t()
        return self.head(self.mixture(self.down(y)))


class Mixture(nn.Module):
    """Experts that one rank has, each under its number among all."""

    def __init__(self, ranks: Ranks, numbers: list[int], experts: int) -> None:
        super().__init__()
        self.ranks, self.router = ranks, nn.Linear(16, experts)
        self.experts = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for i in numbers})

    def forward(self, x: Tensor) -> Tensor:
        gates, x = self.ranks.copy(self.router(x).softmax(-1)), self.ranks.copy(x)
        shift = self.ranks.rank if self.ranks.has("another expert's gate") else 0
        parts = [gates[:, (int(i) + shift) % gates.shape[1], None] * expert(x) for i, expert in self.experts.items()]
        return self.ranks.sum(torch.stack(parts).sum(0))


def channels(rank: int, world: int, group: Any, whole: Any, fault: str = "") -> Case:
    model = Channels(Ranks(rank, world, group, fault))
    if whole is not None:
        dims = {"up": 0, "norm": 0, "filter": 0, "down.weight": 1}
        state = {}
        for name in model.state_dict():
            dim = next((dim for key, dim in dims.items() if name.startswith(key) and whole[name].dim()), None)
            state[name] = whole[name] if dim is None else whole[name].chunk(world, dim)[rank]
        model.load_state_dict(state)
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(4))

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return Case(model, step)


def pipeline(rank: int, world: int, group: Any, whole: Any, parts: int = 2) -> Case:
    """Stages that send to each other, several micro-batches, forward and backward one after the other."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    if whole is not None:
        layers.load_state_dict(whole)
    count = 4 // world
    stage = nn.Sequential(*layers[rank * count : (rank + 1) * count])
    ranks = dist.get_process_group_ranks(group) if world > 1 else [0]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))

    def renamed(name: str) -> str:
        number, dot, rest = name.partition(".")
        return f"{int(number) + rank * count}{dot}{rest}" if number else name

    def step() -> Tensor | None:
        total, kept = torch.zeros(()), []
        for micro in x.chunk(parts):
            received = micro
            if rank > 0:
                received = torch.empty_like(micro)
                dist.recv(received, ranks[rank - 1])
                received.requires_grad_()
            y = stage(received)
            if rank + 1 < world:
                dist.send(y.detach(), ranks[rank + 1])
            kept.append((received, y))
        for received, y in kept:
            if rank + 1 < world:
                gradient = torch.empty_like(y)
                dist.recv(gradient, ranks[rank + 1])
                y.backward(gradient)
            else:
                loss = y.square().mean() / parts
                loss.backward()
                total += loss.detach()
            if rank > 0:
                dist.send(received.grad, ranks[rank - 1])
        return total if rank + 1 == world else None

    return Case(stage, step, rename=renamed)


def sampled(rank: int, world: int, group: Any, whole: Any, ids: bool = False, mixed: bool = False) -> Case:
    """DDP over samples r, r + W, ..., as torch's DistributedSampler draws them; of numbers of tokens, too.

    With ``mixed`` the model itself exchanges its samples for others: a wrong gather, which looks alike.
    """
    first = nn.Embedding(24, 6) if ids else nn.Linear(6, 6)
    model = nn.Sequential(first, nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))
    if whole is not None:
        model.load_state_dict(whole)
    made = torch.Generator().manual_seed(3)
    x = torch.randint(24, (16,), generator=made) if ids else torch.randn(16, 6, generator=made)
    if mixed and world > 1:
        every = x
        x = x.chunk(world)[rank]
        model[0].register_forward_pre_hook(lambda module, args: (every[rank::world],))
    else:
        x = x[rank::world]
    called = DistributedDataParallel(model, process_group=group) if world > 1 else model

    def step() -> Tensor:
        loss = called(x).square().mean()
        loss.backward()
        return loss

    return Case(model, step)


class Stage(nn.Module):
    """A stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(self.norm(x)))


def pipelined(rank: int, world: int, group: Any, whole: Any) -> Case:
    """torch.distributed.pipelining without given shapes: each stage infers them by one more forward."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = nn.ModuleDict({str(i): Stage() for i in range(4)})
    if whole is not None:
        model.load_state_dict(whole)
    x, count = torch.randn(8, 6, generator=torch.Generator().manual_seed(4)), 4 // world
    if world == 1:

        def alone() -> Tensor:
            total = torch.zeros(())
            for y in x.chunk(4):
                for layer in model.values():
                    y = layer(y)
                loss = y.square().mean() / 4
                loss.backward()
                total += loss.detach()
            return total

        return Case(model, alone)
    own = nn.Sequential(*(model[str(i)] for i in range(rank * count, (rank + 1) * count)))
    stage = PipelineStage(own, rank, world, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, _: y.square().mean())

    def renamed(name: str) -> str | None:
        number, dot, rest = name.partition(".")
        return f"{int(number) + rank * count}{dot}{rest}" if number else None

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(*([x] if rank == 0 else []), target=x, losses=losses)
        return torch.stack(losses).mean() if losses else None

    return Case(own, step, rename=renamed)


def twice(rank: int, world: int, group: Any, whole: Any) -> Case:
    """FSDP2 over tensor parallelism: a dim of the weights is split twice, the inner ranks first."""
    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    if whole is not None:
        layers.load_state_dict(whole)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
    if world > 1:
        mesh = mesh_of_four("replicas", "tensor")
        plan = {"0": theirs.ColwiseParallel(), "2": theirs.RowwiseParallel()}
        theirs.parallelize_module(layers, mesh["tensor"], plan)
        fully_shard(layers, mesh=mesh["replicas"])
        x = x.chunk(2)[mesh["replicas"].get_local_rank()]

    def step() -> Tensor:
        loss = layers(x).square().mean()
        loss.backward()
        return loss

    return Case(layers, step)


class Masked(nn.Module):
    """A vocabulary over the ranks, padded to a multiple of them: lookups are masked and summed behind the embedding.

    The head's logits are of the ranks' parts of the vocabulary, and the loss is of all of them.
    """

    SIZE, WIDTH = 10, 8

    def __init__(self, rank: int, world: int, group: Any, fault: str) -> None:
        super().__init__()
        self.rank, self.group, self.fault, self.world = rank, group, fault, world
        self.rows = -(-self.SIZE // world)
        self.embed = nn.Embedding(self.rows, self.WIDTH)
        self.up, self.down = nn.Linear(self.WIDTH, 16 // world), nn.Linear(16 // world, self.WIDTH, bias=False)
        self.norm, self.head = nn.LayerNorm(self.WIDTH), nn.Linear(self.WIDTH, self.rows, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.rank * self.rows
        inside = (local >= 0) & (local < self.rows)
        x = self.embed(local.clamp(0, self.rows - 1))
        if self.fault != "mask":
            x = x * inside[..., None]
        x = self.norm(self.through("reduce_from_tensor_model_parallel_region", x))
        y = self.down(self.up(self.through("copy_to_tensor_model_parallel_region", x)).relu())
        if self.fault != "sum":
            y = self.through("reduce_from_tensor_model_parallel_region", y)
        logits = self.head(self.through("copy_to_tensor_model_parallel_region", x + y))
        if self.fault == "logits":
            logits = logits * 1.01
        return self.through("gather_from_tensor_model_parallel_region", logits)[..., : self.SIZE]

    def through(self, name: str, x: Tensor) -> Tensor:
        """A mapping, where there are several ranks."""
        return x if self.group is None else getattr(mappings, name)(x, group=self.group)


def masked(rank: int, world: int, group: Any, whole: Any, fault: str = "", frozen: bool = False) -> Case:
    """A padded vocabulary over the ranks; ``fault``: no mask, no sum behind the linears, or logits that are off."""
    model = Masked(rank, world, group, fault if world > 1 else "")
    model.embed.requires_grad_(not frozen)
    if whole is not None:
        state = {}
        for name, x in whole.items():
            dim = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0}.get(name)
            if dim is None:
                state[name] = x
            elif name in ("embed.weight", "head.weight"):
                padding = x.new_full((model.rows * world - len(x), x.shape[1]), 7.0)
                state[name] = torch.cat([x, padding]).chunk(world)[rank]
            else:
                state[name] = x.chunk(world, dim)[rank]
        model.load_state_dict(state)
    made = torch.Generator().manual_seed(3)
    ids, targets = torch.randint(Masked.SIZE, (2, 3, 5), generator=made)

    def step() -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss

    return Case(model, step)


PROGRAMS: dict[str, Callable[..., Case]] = {
    "sharded weights": tensor,
    "sequence of 7": sequence,
    "sequence of 8": partial(sequence, length=8),
    "one token per rank": partial(sequence, length=4),
    "gated": gated,
    "rotary, 9 tokens": rotary,
    "rotary, one token per rank": partial(rotary, length=4),
    "DeepSpeed's attention": partial(ulysses, of="deepspeed"),
    "yunchang's exchange": partial(ulysses, of="yunchang"),
    "ddp": ddp,
    "ddp, recomputed": partial(ddp, recompute=True),
    "fsdp2": fsdp,
    "fsdp2, recomputed": partial(fsdp, recompute=True),
    "fsdp2, micro-batches": partial(fsdp, parts=2),
    "hsdp": partial(fsdp, replicas=2),
    "torch's styles": partial(styled, styles=theirs, in_sequence=False),
    "torch's styles, sequence": partial(styled, styles=theirs, in_sequence=True),
    "our styles": partial(styled, styles=parallel, in_sequence=False),
    "our styles, sequence": partial(styled, styles=parallel, in_sequence=True),
    "ColoTensor": colo,
    "channels": channels,
    "pipeline": pipeline,
    "sampler": sampled,
    "sampler, token numbers": partial(sampled, ids=True),
    "torch's pipeline": pipelined,
    "fsdp2 over tensor parallel": twice,
    "padded vocabulary": masked,
}
