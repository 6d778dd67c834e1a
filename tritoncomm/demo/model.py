"""A byte-level transformer with tensor, sequence and Ulysses parallelism; on one rank it is an ordinary one.

Activations are ``[sequence/world, batch, hidden]``. Attention exchanges the sequence for heads and back; the MLP
gathers the sequence, splits its hidden layer over the ranks and reduce-scatters the sequence again.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritoncomm import mappings
from tritoncomm.demo.settings import Settings

__all__ = ["VOCABULARY", "Transformer", "TransformerBlock", "causal_attention"]

VOCABULARY = 256


def causal_attention(qkv: Tensor) -> Tensor:
    """Attend causally: ``[sequence, batch, heads, (q, k, v), head_dim] -> [sequence, batch, heads*head_dim]``."""
    q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """Causal attention over the full sequence for this rank's heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.qkv = nn.Linear(
            hidden, 3 * hidden
        )  # columns are [head, (q, k, v), head_dim], so an all-to-all moves complete heads
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        local, batch, hidden = x.shape
        qkv = mappings.all_to_all_sp2hp(self.qkv(x))  # [sequence*batch, 3*hidden/world]
        qkv = qkv.view(-1, batch, qkv.shape[-1] // (3 * self.head_dim), 3, self.head_dim)
        mixed = mappings.all_to_all_hp2sp(causal_attention(qkv))  # [sequence/world*batch, hidden]
        return self.out(mixed.view(local, batch, hidden))


class ParallelMLP(nn.Module):
    """Column-parallel, GELU, row-parallel; this rank holds ``inner/world`` of the inner layer."""

    def __init__(self, hidden: int, rank: int, world: int) -> None:
        super().__init__()
        full_in, full_out = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        part = slice(rank * 4 * hidden // world, (rank + 1) * 4 * hidden // world)
        self.column_weight = nn.Parameter(full_in.weight.detach()[part].clone())
        self.column_bias = nn.Parameter(full_in.bias.detach()[part].clone())
        self.row_weight = nn.Parameter(full_out.weight.detach()[:, part].clone())
        self.bias = nn.Parameter(full_out.bias.detach().clone())  # added once, on the sequence shard

    def forward(self, x: Tensor) -> Tensor:
        x = mappings.gather_from_sequence_parallel_region(x)
        inner = F.gelu(F.linear(x, self.column_weight, self.column_bias))
        return mappings.reduce_scatter_to_sequence_parallel_region(F.linear(inner, self.row_weight)) + self.bias


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """The full model, or the blocks and ends of one pipeline stage; the weights are equal on any number of ranks.

    Args:
        rank: tensor-parallel rank.
        stage: pipeline stage; its chunk c is part ``c*pipeline + stage`` of the model's ``pipeline*virtual`` parts.
    """

    def __init__(self, settings: Settings, rank: int, stage: int = 0) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        self.settings, self.rank, hidden = settings, rank, settings.hidden
        # Every rank makes all layers in one order, so that the seed gives equal weights, and keeps its stage's layers.
        tokens, positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(settings.sequence, hidden)
        blocks = [
            TransformerBlock(hidden, Attention(hidden, settings.heads), ParallelMLP(hidden, rank, settings.tensor))
            for _ in range(settings.layers)
        ]
        norm, head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)
        if stage == 0:
            self.tokens, self.positions = tokens, positions
        # Chunk c of a stage is number c * stages + stage of the equal runs of layers.
        chunk_layers = settings.layers // (settings.pipeline * settings.virtual)
        starts = [(c * settings.pipeline + stage) * chunk_layers for c in range(settings.virtual)]
        self.chunks = nn.ModuleList(nn.Sequential(*blocks[start : start + chunk_layers]) for start in starts)
        if stage == settings.pipeline - 1:
            self.norm, self.head = norm, head

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the global batch ``[sequence, batch]``, equal on all ranks."""
        x = self.embed(inputs)
        for chunk in self.chunks:
            x = chunk(x)
        return self.loss(x, targets, targets.numel())

    def _sequence_shard(self) -> slice:
        length = self.settings.sequence // self.settings.tensor
        return slice(self.rank * length, (self.rank + 1) * length)

    def embed(self, inputs: Tensor) -> Tensor:
        """Embed this rank's part of the sequence: ``[sequence, batch] -> [sequence/world, batch, hidden]``."""
        mine = self._sequence_shard()
        index = torch.arange(mine.start, mine.stop, device=inputs.device)
        return self.tokens(inputs[mine]) + self.positions(index)[:, None]

    def transform(self, x: Tensor, chunk: int) -> Tensor:
        """Run one chunk's blocks."""
        return self.chunks[chunk](x)

    def loss(self, x: Tensor, targets: Tensor, count: int) -> Tensor:
        """Return the sum of the cross-entropies of all ranks over ``count``."""
        logits = self.head(self.norm(x)).flatten(0, 1).to(self.settings.loss_dtype)
        total = F.cross_entropy(logits, targets[self._sequence_shard()].flatten(), reduction="sum")
        return mappings.reduce_from_tensor_model_parallel_region(total / count)

    def replicated(self) -> list[nn.Parameter]:
        """Return the parameters replicated over the tensor ranks; their gradients cover this rank's sequence shard."""
        sharded = ("column_weight", "column_bias", "row_weight")
        return [p for name, p in self.named_parameters() if not name.endswith(sharded)]
