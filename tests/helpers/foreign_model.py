"""A model of code that is not transformers': attention, and a recurrence and a convolution under names of its own."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding

__all__ = ["ForeignForCausalLM", "decayed_sum", "foreign", "short_convolution", "step_by_step"]

assert ALL_ATTENTION_FUNCTIONS  # which attention goes through


def decayed_sum(q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, slope: Tensor) -> tuple[Tensor, None]:
    """``S = decay * slope * S + k v'``, ``o = q S``: q, k, v ``[b, s, heads, d]``, decay ``[b, s, heads]``."""
    state = torch.zeros(*q.shape[::2], q.shape[3], v.shape[3], dtype=q.dtype)
    outs = []
    for t in range(q.shape[1]):
        state = (decay[:, t] * slope)[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1), None


def step_by_step(q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor, slope: Tensor) -> tuple[Tensor, None]:
    """The recurrence again, which a layer takes in evaluation."""
    return decayed_sum(q, k, v, decay=decay, slope=slope)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal, by channel: ``[b, channels, s]``, a weight ``[channels, taps]``."""
    return nn.functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight))[
        ..., : x.shape[2]
    ]


class ShortConvolution(nn.Conv1d):
    """Part of a layer that gets no mask."""

    def forward(self, x: Tensor) -> Tensor:
        return short_convolution(x=x.transpose(1, 2), weight=self.weight.squeeze(1), bias=self.bias).transpose(1, 2)


class Mixer(nn.Module):
    """Convolution and recurrence; padding is zero in both."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        self.inputs, self.decay, self.out = (
            nn.Linear(size, 3 * size),
            nn.Linear(size, self.heads),
            nn.Linear(size, size),
        )
        self.slope = nn.Parameter(torch.linspace(0.5, 1, self.heads))
        self.convolution = ShortConvolution(3 * size, 3 * size, 4, groups=3 * size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[..., None]
        mixed = self.convolution(self.inputs(hidden_states))
        if attention_mask is not None:
            mixed = mixed * attention_mask[..., None]
        q, k, v = mixed.unflatten(-1, (3 * self.heads, -1)).chunk(3, 2)
        mix = decayed_sum if self.training else step_by_step
        out, _ = mix(q, k.tanh(), v, decay=self.decay(hidden_states).sigmoid(), slope=self.slope)
        return self.out(out.flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size)
        self.mixer = Mixer(config) if index % 2 == 0 else LlamaAttention(config, index)

    def forward(self, x: Tensor, tables: Any, mask: Any, padding: Any) -> Tensor:
        normed = self.norm(x)
        if isinstance(self.mixer, Mixer):
            return x + self.mixer(normed, attention_mask=padding)
        return x + self.mixer(normed, position_embeddings=tables, attention_mask=mask)[0]


class ForeignForCausalLM(PreTrainedModel):
    config_class, base_model_prefix, _supports_sdpa, _supports_attention_backend = LlamaConfig, "model", True, True
    config: LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.embed

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        x = self.embed(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        mask = create_causal_mask(self.config, x, attention_mask, None, position_ids)
        tables = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, tables, mask, attention_mask)
        logits = self.lm_head(x)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def foreign(seed: int = 0) -> ForeignForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = ForeignForCausalLM(config).double()
    for weight in model.parameters():
        if weight.dim() > 1:  # transformers' are so small that no layer would change a logit by 1e-5
            nn.init.normal_(weight, std=0.3)
    return model
