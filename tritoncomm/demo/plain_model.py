"""The demo's transformer in plain torch modules; on several ranks its parameters become ColoParameters.

The modules do not depend on ranks: ``sharded`` lists the sharded weights by name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritoncomm.demo.model import VOCABULARY, TransformerBlock, causal_attention
from tritoncomm.demo.settings import Settings
from tritoncomm.tensor import ProcessGroup, ShardSpec, shard_parameters

__all__ = ["PlainTransformer", "sharded"]


class PlainAttention(nn.Module):
    """Causal self-attention; activations are ``[sequence, batch, hidden]``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        sequence, batch, hidden = x.size()
        qkv = self.qkv(x).view(sequence, batch, self.heads, 3, hidden // self.heads)
        return self.out(causal_attention(qkv))


class PlainMLP(nn.Module):
    """Two linear layers with GELU in between."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PlainTransformer(nn.Module):
    """Byte-level language model: mean cross-entropy of the next byte."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        self.loss_dtype, hidden = settings.loss_dtype, settings.hidden
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(settings.sequence, hidden)
        blocks = (
            TransformerBlock(hidden, PlainAttention(hidden, settings.heads), PlainMLP(hidden))
            for _ in range(settings.layers)
        )
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of ``[sequence, batch]`` bytes and the bytes that follow them."""
        index = torch.arange(len(inputs), device=inputs.device)
        x = self.blocks(self.tokens(inputs) + self.positions(index).unsqueeze(1))
        logits = self.head(self.norm(x)).flatten(0, 1).to(self.loss_dtype)
        return F.cross_entropy(logits, targets.flatten())


def sharded(model: PlainTransformer, pg: ProcessGroup) -> PlainTransformer:
    """Shard the model as Megatron does: column- and row-parallel pairs, vocabulary-parallel embedding and head."""
    world = pg.tp_world_size()
    rows, columns = ShardSpec([0], [world]), ShardSpec([-1], [world])
    layouts = {
        "tokens.weight": rows, "head.*": rows, "*.qkv.*": rows, "*.up.*": rows,
        "*.attention.out.weight": columns, "*.down.weight": columns,
    }  # fmt: skip
    shard_parameters(model, layouts, pg)
    return model
