"""What is planted in the models of ``verify_cases`` and ``verify_others``, and what a report has to say of it."""

from collections.abc import Callable

from verify_cases import sequence, tensor
from verify_others import gated, rotary
from verify_programs import channels

from tritoncomm.verify import Case

__all__ = ["BUILDS", "FAULTS"]

BUILDS: dict[str, Callable[..., Case]] = {
    "tensor": tensor,
    "sequence": sequence,
    "gated": gated,
    "rotary": rotary,
    "channels": channels,
}
_OUT, _UP = "blocks.0.attention.out", "blocks.0.mlp.up"
_DOWN = "layers.0.gated.down"
# Kind, model: the first wrong module, and words of the report.
FAULTS: dict[tuple[str, str], tuple[str, str]] = {
    ("never summed", "tensor"): (_OUT, "never summed"),
    ("never summed", "gated"): (_DOWN, "never summed"),
    ("summed twice", "tensor"): (_OUT, "times the whole one"),
    ("summed twice", "gated"): (_DOWN, "times the whole one"),
    ("averaged", "tensor"): (_OUT, "is 1/"),
    ("averaged", "gated"): (_DOWN, "is 1/"),
    ("cast on the wire", "tensor"): (_OUT, "torch.bfloat16 appeared"),
    ("cast on the wire", "gated"): (_DOWN, "torch.bfloat16 appeared"),
    ("bias added W times", "tensor"): ("blocks.0.mlp.down", "bias was added"),
    ("bias added W times", "gated"): (_DOWN, "bias was added"),
    ("norm over the local hidden size", "tensor"): ("blocks.0.mlp.norm", "no collective ran inside"),
    ("norm over the local hidden size", "gated"): ("layers.0.gated.norm", "no collective ran inside"),
    ("softmax over local classes", "tensor"): ("loss", ""),
    ("softmax over local classes", "gated"): ("loss", ""),
    ("input gradient never summed", "tensor"): ("blocks.1.norm2", "was never summed"),
    ("input gradient never summed", "gated"): ("layers.1.norm1", ""),
    ("shards swapped", "tensor"): (_UP, "chunks in another order"),
    ("shards swapped", "gated"): (_DOWN, "chunks in another order"),
    ("fused chunks in another order", "tensor"): ("blocks.0.attention.qkv", ""),
    ("fused chunks in another order", "gated"): ("layers.0.gated.gate_up", ""),
    ("fused weight cut across its parts", "tensor"): ("blocks.0.attention", "between its modules"),
    ("fused weight cut across its parts", "gated"): ("layers.0.gated", "between its modules"),
    ("wrong mask", "tensor"): ("blocks.0.attention", "between its modules"),
    ("wrong mask", "sequence"): ("blocks.0.attention", "between its modules"),
    ("wrong mask", "gated"): ("layers.0.mix", ""),
    ("wrong mask", "rotary"): ("layers.0.attend", "between its modules"),
    ("loss divided by the ranks", "tensor"): ("head", "is 1/"),
    ("loss divided by the ranks", "sequence"): ("norm", "is 1/"),
    ("loss divided by the ranks", "gated"): ("layers.1.norm2", "is 1/"),
    ("loss divided by the ranks", "rotary"): ("classify", "is 1/"),
    ("gradient None on one rank", "tensor"): (_UP, "is None on rank 1"),
    ("gradient None on one rank", "sequence"): ("blocks.0.mlp.0", "is None on rank 1"),
    ("gradient None on one rank", "gated"): ("layers.0.gated.gate_up", "is None on rank 1"),
    ("gradient None on one rank", "rotary"): ("layers.0.up", "is None on rank 1"),
    ("one rank's weights are stale", "tensor"): ("blocks.1.mlp.up", "only rank 1 differs"),
    ("one rank's weights are stale", "sequence"): ("blocks.1.mlp.0", "only rank 1 differs"),
    ("one rank's weights are stale", "gated"): ("layers.1.gated.norm", "only rank 1 differs"),
    ("one rank's weights are stale", "rotary"): ("layers.1.up", "only rank 1 differs"),
    ("a layer skipped on one rank", "tensor"): ("blocks.1.norm2", "never ran on rank 1"),
    ("a layer skipped on one rank", "sequence"): ("blocks.1.norm2", "never ran on rank 1"),
    ("a layer skipped on one rank", "gated"): ("layers.1.norm1", "never ran on rank 1"),
    ("a layer skipped on one rank", "rotary"): ("layers.1.norm", "never ran on rank 1"),
    ("attention over local tokens", "sequence"): ("blocks.0.attention", "between its modules"),
    ("attention over local tokens", "rotary"): ("layers.0.attend", "between its modules"),
    ("shifted positions", "sequence"): ("positions", ""),
    ("shifted positions", "rotary"): ("layers.0.attend", ""),
    ("an uneven tail dropped", "sequence"): ("tokens", "the ranks hold"),
    ("an uneven tail dropped", "rotary"): ("words", "the ranks hold"),
    ("untied weights", "sequence"): ("head", "tied to"),
    ("untied weights", "gated"): ("output", "tied to"),
    ("gradients never summed", "sequence"): ("norm", "was never summed"),
    ("gradients never summed", "rotary"): ("classify", "was never summed"),
    ("gradients summed twice", "sequence"): ("norm", "times the whole one"),
    ("gradients summed twice", "rotary"): ("classify", "times the whole one"),
    ("gradients averaged", "sequence"): ("norm", "is 1/"),
    ("gradients averaged", "rotary"): ("classify", "is 1/"),
    ("loss over local tokens", "sequence"): ("norm", ""),
    ("loss over local tokens", "rotary"): ("classify", ""),
}
