"""Sizes and layout of the demo, and the limits of its losses' difference to those of one process."""

from dataclasses import dataclass

import torch

from tritoncomm.parsing import counted

__all__ = ["LIMITS", "Settings"]

LIMITS = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 2e-3}
"""Largest relative difference of a step's loss, per dtype: ranks sum in another order than one process.

bfloat16 on a CPU: rounding alone came to 2e-4 (2 ranks, 100 steps; 4 ranks, 60), a gradient that is not summed to 1e-2.
"""


@dataclass(frozen=True)
class Settings:
    """One run; the sizes of the model are in tokens and elements.

    ``ranks`` processes are ``pipeline`` stages of ``ranks / pipeline`` tensor ranks each; a stage works on ``virtual``
    chunks of the model, and with a pipeline the batch goes through it in ``microbatches`` parts. With ``tensor_layer``
    the model is made of plain modules whose parameters are ColoParameters.
    """

    ranks: int = 2
    pipeline: int = 1
    virtual: int = 1
    microbatches: int = 4
    steps: int = 60
    text: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    sequence: int = 128
    batch: int = 8
    learning_rate: float = 1e-3
    seed: int = 0
    timeout: float = 120.0
    tensor_layer: bool = False

    def __post_init__(self) -> None:
        if min(self.ranks, self.pipeline, self.virtual) < 1 or self.ranks % self.pipeline:
            stages = counted(self.pipeline, "pipeline stage")
            raise ValueError(f"{counted(self.ranks, 'rank')} cannot be split into {stages}")
        if self.heads % self.tensor or self.sequence % self.tensor:
            ranks = counted(self.tensor, "tensor rank")
            raise ValueError(f"{self.heads} heads and {self.sequence} positions do not divide over {ranks}")
        if self.tensor_layer and self.pipeline > 1:
            raise ValueError("the tensor layer's demo has one pipeline stage")
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError("virtual stages need a pipeline of two stages or more")
        if self.layers % (self.pipeline * self.virtual):
            stages = f"{counted(self.pipeline, 'stage')} of {counted(self.virtual, 'chunk')}"
            raise ValueError(f"{counted(self.layers, 'layer')} cannot be split into {stages}")
        uneven = self.batch % self.microbatches or (self.virtual > 1 and self.microbatches % self.pipeline)
        if self.pipeline > 1 and uneven:
            raise ValueError(
                f"{self.microbatches} micro-batches do not fit {self.pipeline} stages and batch {self.batch}"
            )
        if not 1 <= self.steps <= 100:
            raise ValueError(f"steps must be 1 to 100, not {self.steps}")
        if self.dtype not in LIMITS:
            raise ValueError(f"dtype must be one of {', '.join(LIMITS)}, not {self.dtype!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, not {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda was asked for, but torch sees no GPU")

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks of one stage."""
        return self.ranks // self.pipeline

    @property
    def limit(self) -> float:
        """Largest relative difference of a loss to the single process."""
        return LIMITS[self.dtype]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Element type of parameters and activations."""
        return getattr(torch, self.dtype)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Element type of the loss."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def on_gpu(self) -> bool:
        """Whether the tensors live on a GPU."""
        return self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())

    def backend(self) -> str:
        """Return NCCL with a GPU per rank; otherwise Gloo, which carries CUDA tensors of a shared GPU too."""
        return "nccl" if self.on_gpu() and torch.cuda.device_count() >= self.ranks > 1 else "gloo"
