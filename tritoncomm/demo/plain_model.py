"""The demo's transformer in plain torch modules; on several ranks its parameters become ColoParameters.

The modules do not depend on ranks: ``sharded`` lists the sharded weights by name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritoncomm.demo.settings import Settings
from tritoncomm.tensor import ProcessGroup, ShardSpec, shard_parameters

__all__ = ["PlainTransformer", "sharded"]

VOCABULARY = 256


class PlainAttention(nn.Module):
    """Causal self-attention; activations are ``[sequence, batch, hidden]``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        sequence, batch, hidden = x.size()
        qkv = self.qkv(x).view(sequence, batch, self.heads, 3, hidden // self.heads)
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        return self.out(mixed.flatten(2))


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = PlainAttention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PlainTransformer(nn.Module):
    """Byte-level language model: mean cross-entropy of the next byte."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        hidden = settings.hidden
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(settings.sequence, hidden)
        self.blocks = nn.ModuleList(PlainBlock(hidden, settings.heads) for _ in range(settings.layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of ``[sequence, batch]`` bytes and the bytes that follow them."""
        index = torch.arange(len(inputs), device=inputs.device)
        x = self.tokens(inputs) + self.positions(index).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        wide = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(wide, targets.flatten())


def sharded(model: PlainTransformer, pg: ProcessGroup) -> PlainTransformer:
    """The model with Megatron's shards: column- and row-parallel pairs, vocabulary-parallel embedding and head."""
    world = pg.tp_world_size()
    rows, columns = ShardSpec([0], [world]), ShardSpec([-1], [world])
    layouts = {
        "tokens.weight": rows, "head.*": rows, "*.qkv.*": rows, "*.up.*": rows,
        "*.attention.out.weight": columns, "*.down.weight": columns,
    }  # fmt: skip
    shard_parameters(model, layouts, pg)
    return model
