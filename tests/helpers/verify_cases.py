"""Two parallel models as users write them, with a fault in them or none: for `tritoncomm verify`.

``tensor`` is a decoder with sharded weights, a fused qkv and a loss over a sharded vocabulary; ``sequence`` is one
whose ranks hold parts of the sequence, with tied embeddings. Both run on one rank, too, where nothing is sent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritoncomm import collective, mappings
from tritoncomm.verify import Case

__all__ = [
    "BATCH",
    "CLASSES",
    "HIDDEN",
    "INNER",
    "Loss",
    "Ranks",
    "Row",
    "SequenceAttention",
    "ShardedNorm",
    "gradients_summed",
    "numbers",
    "sequence",
    "sizes_of",
    "step_of",
    "tensor",
]

HIDDEN, HEADS, INNER, CLASSES, BATCH = 16, 4, 24, 32, 2


class Ranks:
    """The ranks of a run, and its fault."""

    def __init__(self, rank: int, world: int, group: Any, fault: str) -> None:
        self.rank, self.world, self.group, self.fault = rank, world, group, fault

    def __deepcopy__(self, memo: Any) -> "Ranks":
        return self

    def has(self, fault: str) -> bool:
        return self.world > 1 and self.fault == fault

    def sum(self, x: Tensor) -> Tensor:
        return x if self.world == 1 else mappings.reduce_from_tensor_model_parallel_region(x * 1, self.group)

    def copy(self, x: Tensor) -> Tensor:
        return x if self.world == 1 else mappings.copy_to_tensor_model_parallel_region(x, self.group)


class Row(nn.Module):
    """A linear layer whose input features are split."""

    def __init__(self, ranks: Ranks, inputs: int, outputs: int, bias: bool, name: str) -> None:
        super().__init__()
        self.ranks, self.name = ranks, name
        self.weight = nn.Parameter(torch.randn(outputs, inputs // ranks.world) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        ranks, y = self.ranks, F.linear(x, self.weight)
        if self.bias is not None and ranks.has("bias added W times"):
            return ranks.sum(y + self.bias)
        y = self.summed(y)
        return y if self.bias is None else y + self.bias

    def summed(self, y: Tensor) -> Tensor:
        ranks = self.ranks
        if self.name == "out" and ranks.world > 1:
            if ranks.fault == "never summed":
                return y
            if ranks.fault == "cast on the wire":
                return ranks.sum(y.bfloat16()).to(y.dtype)
            if ranks.fault == "averaged":
                return ranks.sum(y) / ranks.world
            if ranks.fault == "summed twice":
                return ranks.sum(ranks.sum(y))
        return ranks.sum(y)


class ShardedNorm(nn.Module):
    """RMS norm over a hidden dim that is split."""

    def __init__(self, ranks: Ranks, size: int) -> None:
        super().__init__()
        self.ranks, self.size = ranks, size
        self.weight = nn.Parameter(torch.ones(size // ranks.world))

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.has("norm over the local hidden size"):
            return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight
        squares = self.ranks.copy(self.ranks.sum(x.square().sum(-1, keepdim=True)))
        return x * (squares / self.size + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // ranks.world)
        self.out = Row(ranks, HIDDEN, HIDDEN, False, "out")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for part in self.qkv(self.ranks.copy(x)).chunk(3, -1)
        )
        causal = not self.ranks.has("wrong mask")
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.up, self.norm = nn.Linear(HIDDEN, INNER // ranks.world), ShardedNorm(ranks, INNER)
        self.down = Row(ranks, INNER, HIDDEN, True, "down")

    def forward(self, x: Tensor) -> Tensor:
        if not self.ranks.has("input gradient never summed"):
            x = self.ranks.copy(x)
        return self.down(self.norm(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, ranks: Ranks, number: int) -> None:
        super().__init__()
        self.skips = number == 1 and ranks.rank == 1 and ranks.has("a layer skipped on one rank")
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention(ranks)
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), MLP(ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(x if self.skips else self.norm2(x))


class Loss(nn.Module):
    """Cross entropy over classes that are split."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        ranks, classes = self.ranks, logits.shape[-1]
        first = ranks.rank * classes
        own = (targets >= first) & (targets < first + classes)
        picked = logits.gather(-1, (targets - first).clamp(0, classes - 1)[..., None])[..., 0]
        picked = ranks.sum(torch.where(own, picked, 0.0))
        sums = logits.exp().sum(-1)
        if not ranks.has("softmax over local classes"):
            sums = ranks.sum(sums)
        return (sums.log() - picked).mean()


class Decoder(nn.Module):
    def __init__(self, ranks: Ranks, length: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.tokens, self.positions = nn.Embedding(CLASSES, HIDDEN), nn.Embedding(length, HIDDEN)
        self.blocks = nn.ModuleList(Block(ranks, i) for i in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES // ranks.world, bias=False)
        self.loss = Loss(ranks)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.ranks.copy(self.norm(x))), targets)


def numbers(length: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(CLASSES, (BATCH, length + 1), generator=made)
    return ids[:, :-1], ids[:, 1:]


def step_of(model: nn.Module, ranks: Ranks, length: int, name: str) -> Callable[[], Tensor]:
    """A step of a model that computes its loss; one rank may lose the gradient of the parameter ``name``."""
    ids, targets = numbers(length)

    def step() -> Tensor:
        loss = model(ids, targets)
        (loss / ranks.world if ranks.has("loss divided by the ranks") else loss).backward()
        if ranks.has("gradient None on one rank") and ranks.rank == 1:
            model.get_parameter(name).grad = None
        return loss

    return step


def tensor(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None, fault: str = "") -> Case:
    """The decoder with sharded weights."""
    ranks = Ranks(rank, world, group, fault)
    model = Decoder(ranks, 6)
    if whole is not None:
        own = {name: part(name, x, ranks) for name, x in whole.items()}
        if ranks.has("one rank's weights are stale") and rank == 1:
            own["blocks.1.mlp.up.weight"] = own["blocks.1.mlp.up.weight"] + 0.1
        model.load_state_dict(own)
    return Case(model, step_of(model, ranks, 6, "blocks.0.mlp.up.weight"))


def part(name: str, x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of a parameter."""
    world, rank = ranks.world, ranks.rank
    if ".qkv." in name and not ranks.has("fused weight cut across its parts"):
        q, k, v = (each.chunk(world)[rank] for each in x.chunk(3))
        return torch.cat([k, q, v] if ranks.has("fused chunks in another order") else [q, k, v])
    if any(part in name for part in (".qkv.", ".up.", "mlp.norm", "head")):
        if name == "blocks.0.mlp.up.weight" and ranks.has("shards swapped"):
            rank = (rank + 1) % world
        return x.chunk(world)[rank]
    if name.endswith(("out.weight", "down.weight")):
        return x.chunk(world, 1)[rank]
    return x


class SequenceAttention(nn.Module):
    def __init__(self, ranks: Ranks, sizes: list[int]) -> None:
        super().__init__()
        self.ranks, self.sizes = ranks, sizes
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        ranks = self.ranks
        parts = [part.unflatten(-1, (HEADS, HIDDEN // HEADS)) for part in self.qkv(x).chunk(3, -1)]
        if ranks.world == 1 or ranks.has("attention over local tokens"):
            return self.out(self.attend(*parts).flatten(2))
        return self.out(self.exchanged(*parts).flatten(2))

    def exchanged(self, *parts: Tensor) -> Tensor:
        group = self.ranks.group
        parts = tuple(mappings.all_to_all_dims(each, 2, 1, group, gather_sizes=self.sizes) for each in parts)
        return mappings.all_to_all_dims(self.attend(*parts), 1, 2, group, scatter_sizes=self.sizes)

    def attend(self, *parts: Tensor) -> Tensor:
        """Causal attention of ``[batch, tokens, heads, size]``."""
        q, k, v = (each.transpose(1, 2) for each in parts)
        causal = not self.ranks.has("wrong mask")
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


class SequenceBlock(nn.Module):
    def __init__(self, ranks: Ranks, sizes: list[int], number: int) -> None:
        super().__init__()
        self.skips = number == 1 and ranks.rank == 1 and ranks.has("a layer skipped on one rank")
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), SequenceAttention(ranks, sizes)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x if self.skips else x + self.mlp(self.norm2(x))


class SequenceDecoder(nn.Module):
    def __init__(self, ranks: Ranks, length: int, sizes: list[int]) -> None:
        super().__init__()
        self.ranks, self.start = ranks, sum(sizes[: ranks.rank])
        self.tokens, self.positions = nn.Embedding(CLASSES, HIDDEN), nn.Embedding(length, HIDDEN)
        self.blocks = nn.ModuleList(SequenceBlock(ranks, sizes, i) for i in range(2))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES, bias=False)
        if not ranks.has("untied weights"):
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        start = 0 if self.ranks.has("shifted positions") else self.start
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sizes_of(ranks: Ranks, length: int) -> list[int]:
    """How many tokens every rank has."""
    more = 0 if ranks.has("an uneven tail dropped") else length % ranks.world
    return [length // ranks.world + (r < more) for r in range(ranks.world)]


def gradients_summed(model: nn.Module, ranks: Ranks) -> None:
    """Add the gradients up over the ranks."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # as frameworks do, or ranks would wait
        if ranks.world > 1 and not ranks.has("gradients never summed"):
            collective.all_reduce(p.grad, ranks.group)
            if ranks.has("gradients summed twice"):
                collective.all_reduce(p.grad, ranks.group)
            if ranks.has("gradients averaged"):
                p.grad /= ranks.world


def sequence(
    rank: int, world: int, group: Any, whole: dict[str, Tensor] | None, fault: str = "", length: int = 7
) -> Case:
    """The decoder whose ranks hold parts of the sequence, which they do not divide."""
    ranks = Ranks(rank, world, group, fault)
    sizes = sizes_of(ranks, length)
    model = SequenceDecoder(ranks, length, sizes)
    if whole is not None:
        model.load_state_dict(whole)
        if ranks.has("one rank's weights are stale") and rank == 1:
            with torch.no_grad():
                model.blocks[1].mlp[0].weight += 0.1
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    ids, targets = (each[:, mine] for each in numbers(length))

    def step() -> Tensor:
        logits = model(ids)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        count = targets.numel() if ranks.has("loss over local tokens") else BATCH * length
        loss = total / count
        (loss / world if ranks.has("loss divided by the ranks") else loss).backward()
        gradients_summed(model, ranks)
        if ranks.has("gradient None on one rank") and rank == 1:
            model.blocks[0].mlp[0].weight.grad = None
        return loss

    return Case(model, step)
