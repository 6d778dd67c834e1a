"""Two more architectures for the faults of ``verify_cases``: the fault decides what a report says, not the model.

``gated`` mixes tokens by a matrix, has a gated MLP whose two products are one weight, normalises behind each layer, and
its vocabulary is split, with tied weights. The ranks of ``rotary`` hold parts of the sequence; it rotates queries and
keys, and gathers the keys and values of fewer heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verify_cases import (
    BATCH,
    CLASSES,
    HIDDEN,
    INNER,
    Loss,
    Ranks,
    Row,
    ShardedNorm,
    gradients_summed,
    numbers,
    sizes_of,
    step_of,
)

from tritoncomm import mappings
from tritoncomm.verify import Case

__all__ = ["gated", "rotary"]

HEADS, KEY_HEADS = 4, 2
LENGTH = 6


class Mix(nn.Module):
    """Every token is a sum of those before it."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(torch.randn(LENGTH, LENGTH) / LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight if self.ranks.has("wrong mask") else self.weight.tril()) @ x


class Gated(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER // ranks.world, bias=False)
        self.norm, self.down = ShardedNorm(ranks, INNER), Row(ranks, INNER, HIDDEN, True, "out")

    def forward(self, x: Tensor) -> Tensor:
        if not self.ranks.has("input gradient never summed"):
            x = self.ranks.copy(x)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.norm(F.silu(gate) * up))


class Layer(nn.Module):
    def __init__(self, ranks: Ranks, number: int) -> None:
        super().__init__()
        self.skips = number == 1 and ranks.rank == 1 and ranks.has("a layer skipped on one rank")
        self.mix, self.norm1 = Mix(ranks), nn.LayerNorm(HIDDEN)
        self.gated, self.norm2 = Gated(ranks), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        x = x if self.skips else self.norm1(x)
        return self.norm2(x + self.gated(x))


class Vocabulary(nn.Module):
    """An embedding whose rows are split."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.weight = ranks, nn.Parameter(torch.randn(CLASSES // ranks.world, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        rows = len(self.weight)
        own = ids // rows == self.ranks.rank
        return self.ranks.sum(torch.where(own[..., None], self.weight[ids % rows], 0.0))


class GatedModel(nn.Module):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.vocabulary = Vocabulary(ranks)
        self.layers = nn.ModuleList(Layer(ranks, i) for i in range(2))
        self.output, self.loss = nn.Linear(HIDDEN, CLASSES // ranks.world, bias=False), Loss(ranks)
        if not ranks.has("untied weights"):
            self.output.weight = self.vocabulary.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.vocabulary(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.output(self.ranks.copy(x)), targets)


def gated(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None, fault: str = "") -> Case:
    """The model with a gated MLP and a vocabulary that are split."""
    ranks = Ranks(rank, world, group, fault)
    model = GatedModel(ranks)
    if whole is not None:
        own = {name: _part(name, x, ranks) for name, x in whole.items()}
        if ranks.has("one rank's weights are stale") and rank == 1:
            own["layers.1.gated.norm.weight"] = own["layers.1.gated.norm.weight"] + 0.1
        model.load_state_dict(own)
    return Case(model, step_of(model, ranks, LENGTH, "layers.0.gated.gate_up.weight"))


def _part(name: str, x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of a parameter."""
    world, rank = ranks.world, ranks.rank
    if "gate_up" in name and not ranks.has("fused weight cut across its parts"):
        gate, up = (each.chunk(world)[rank] for each in x.chunk(2))
        return torch.cat([up, gate] if ranks.has("fused chunks in another order") else [gate, up])
    if name.endswith("down.weight"):
        rank = (rank + 1) % world if name.startswith("layers.0") and ranks.has("shards swapped") else rank
        return x.chunk(world, 1)[rank]
    return (
        x.chunk(world)[rank] if any(part in name for part in ("vocabulary", "output", "gated.norm", "gate_up")) else x
    )


def _rotated(x: Tensor, start: int) -> Tensor:
    """Queries or keys ``[batch, tokens, heads, size]``, rotated by their positions from ``start`` on."""
    half = x.shape[-1] // 2
    angles = (start + torch.arange(x.shape[1]))[:, None] * 10.0 ** -torch.arange(half)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Rotary(nn.Module):
    def __init__(self, ranks: Ranks, sizes: list[int]) -> None:
        super().__init__()
        self.ranks, self.sizes, self.start = ranks, sizes, sum(sizes[: ranks.rank])
        size = HIDDEN // HEADS
        self.query, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.key, self.value = nn.Linear(HIDDEN, KEY_HEADS * size), nn.Linear(HIDDEN, KEY_HEADS * size)

    def forward(self, x: Tensor) -> Tensor:
        ranks, size, start = self.ranks, HIDDEN // HEADS, self.start
        placed = 0 if ranks.has("shifted positions") else start
        q, k, v = (each(x).unflatten(-1, (-1, size)) for each in (self.query, self.key, self.value))
        q, k = _rotated(q, placed), _rotated(k, placed)
        if ranks.world > 1 and not ranks.has("attention over local tokens"):
            k, v = (mappings.all_gather_dim(each, 1, ranks.group, sizes=self.sizes) for each in (k, v))
        else:
            start = 0
        seen = start + torch.arange(q.shape[1])[:, None] >= torch.arange(k.shape[1])
        mask = torch.ones_like(seen) if ranks.has("wrong mask") else seen
        q, k, v = q.transpose(1, 2), *(each.repeat_interleave(HEADS // KEY_HEADS, 2).transpose(1, 2) for each in (k, v))
        return self.output(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class RotaryLayer(nn.Module):
    def __init__(self, ranks: Ranks, sizes: list[int], number: int) -> None:
        super().__init__()
        self.skips = number == 1 and ranks.rank == 1 and ranks.has("a layer skipped on one rank")
        self.norm, self.attend = nn.RMSNorm(HIDDEN), Rotary(ranks, sizes)
        self.gate, self.up, self.down = (nn.Linear(*size) for size in [(HIDDEN, INNER)] * 2 + [(INNER, HIDDEN)])

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.skips else self.norm(x)
        return x + self.attend(y) + self.down(F.silu(self.gate(y)) * self.up(y))  # both of one input


class RotaryModel(nn.Module):
    def __init__(self, ranks: Ranks, sizes: list[int]) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, HIDDEN)
        self.layers = nn.ModuleList(RotaryLayer(ranks, sizes, i) for i in range(2))
        self.classify = nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.classify(x)


def rotary(
    rank: int, world: int, group: Any, whole: dict[str, Tensor] | None, fault: str = "", length: int = 9
) -> Case:
    """The model whose ranks hold parts of the sequence and gather keys and values."""
    ranks = Ranks(rank, world, group, fault)
    sizes = sizes_of(ranks, length)
    model = RotaryModel(ranks, sizes)
    if whole is not None:
        model.load_state_dict(whole)
        if ranks.has("one rank's weights are stale") and rank == 1:
            with torch.no_grad():
                model.layers[1].up.bias += 0.1
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    ids, targets = (each[:, mine] for each in numbers(length))

    def step() -> Tensor:
        total = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = total / (targets.numel() if ranks.has("loss over local tokens") else BATCH * length)
        (loss / world if ranks.has("loss divided by the ranks") else loss).backward()
        gradients_summed(model, ranks)
        if ranks.has("gradient None on one rank") and rank == 1:
            model.layers[0].up.weight.grad = None
        return loss

    return Case(model, step)
