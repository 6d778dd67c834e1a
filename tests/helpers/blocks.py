"""Parallel blocks of a transformer as torch modules, for the tests of torch.compile."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from tritoncomm import mappings as m

__all__ = ["BLOCKS", "HIDDEN", "make_block"]

HIDDEN, HEADS = 16, 4


class Parallel(nn.Module):
    """A module over a group; what enters and leaves its parallel region with and without sequence parallelism."""

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence = group, sequence

    def enter(self, x: Tensor) -> Tensor:
        if self.sequence:
            return m.gather_from_sequence_parallel_region(x, group=self.group)
        return m.copy_to_tensor_model_parallel_region(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        if self.sequence:
            return m.reduce_scatter_to_sequence_parallel_region(x, self.group)
        return m.reduce_from_tensor_model_parallel_region(x, self.group)


class Norm(Parallel):
    """A norm right before a mapping and one right after it."""

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.before, self.after = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.enter(self.before(x)))


class Linear(Parallel):
    """A column-parallel linear whose output is gathered."""

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.column = nn.Linear(HIDDEN, 2 * HIDDEN // group.size())

    def forward(self, x: Tensor) -> Tensor:
        return m.gather_from_tensor_model_parallel_region(self.column(self.enter(x)), self.group).softmax(-1)


class MLP(Parallel):
    """Norm, column-parallel linear, row-parallel linear, residual."""

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.norm = nn.LayerNorm(HIDDEN)
        self.column = nn.Linear(HIDDEN, 4 * HIDDEN // group.size())
        self.row = nn.Linear(4 * HIDDEN // group.size(), HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(self.row(F.gelu(self.column(self.enter(self.norm(x))))))


class Attention(Parallel):
    """Causal attention over this rank's heads, ``[s, b, h]``."""

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // group.size())
        self.out = nn.Linear(HIDDEN // group.size(), HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.enter(self.norm(x))).unflatten(-1, (3, -1, HIDDEN // HEADS))
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 1, 3, 0, 4), is_causal=True)
        return x + self.leave(self.out(mixed.permute(2, 0, 1, 3).flatten(2)))


class Layer(Parallel):
    """Attention, then an MLP."""

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.attention, self.mlp = Attention(group, sequence), MLP(group, sequence)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class Checkpointed(Layer):
    """The MLP's activations, exchanges included, are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.mlp, self.attention(x), use_reentrant=False)


class Ulysses(Parallel):
    """Attention over the whole sequence and this rank's heads, the rest over this rank's part of the sequence.

    With ``sequence`` through Megatron's two mappings, which flatten to rows, else through the general one.
    """

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def to_heads(self, x: Tensor) -> Tensor:
        if self.sequence:
            return m.all_to_all_sp2hp(x, self.group).unflatten(0, (-1, x.shape[1])).unflatten(-1, (-1, HIDDEN // HEADS))
        return m.all_to_all_dims(x.unflatten(-1, (HEADS, -1)), 2, 0, self.group)

    def to_sequence(self, x: Tensor) -> Tensor:
        if self.sequence:
            return m.all_to_all_hp2sp(x.flatten(2), self.group).unflatten(0, (-1, x.shape[1]))
        return m.all_to_all_dims(x, 0, 2, self.group).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.to_heads(part).permute(1, 2, 0, 3) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(self.to_sequence(mixed.permute(2, 0, 1, 3)))


class Experts(Parallel):
    """Tokens to experts by split sizes, a linear there, and home; the sizes follow from the length."""

    def __init__(self, group: ProcessGroup, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.norm, self.expert = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        world, rank = self.group.size(), self.group.rank()
        spread = [1 + (to if self.sequence else 0) for to in range(world)]
        sent = [rows.shape[0] * part // sum(spread) for part in spread]
        sent[-1] += rows.shape[0] - sum(sent)
        received = [sent[rank]] * world
        there = m.all_to_all(self.group, rows, received, sent)
        return x + m.all_to_all(self.group, self.expert(there).relu(), sent, received).view(x.shape)


BLOCKS: dict[str, Callable[[ProcessGroup, bool], Parallel]] = {
    "norm": Norm,
    "linear": Linear,
    "mlp": MLP,
    "attention": Attention,
    "layer": Layer,
    "checkpointed": Checkpointed,
    "ulysses": Ulysses,
    "experts": Experts,
}


def make_block(name: str, group: ProcessGroup, sequence: bool) -> Parallel:
    """A block in float64, its parameters from a seed and the rank."""
    torch.manual_seed(group.rank())
    return BLOCKS[name](group, sequence).double()
