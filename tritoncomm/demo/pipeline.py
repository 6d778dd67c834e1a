"""The demo's model through a pipeline: a batch in micro-batches, one schedule step per training step."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from tritoncomm import collective, groups
from tritoncomm.demo.model import Transformer
from tritoncomm.groups import ParallelMode
from tritoncomm.p2p import P2PCommunicator
from tritoncomm.p2p.schedules import interleaved, one_forward_one_backward

__all__ = ["Pipeline"]


class Pipeline:
    """Forward and backward of one stage's part of the model, whose tensors live on ``device``."""

    def __init__(self, model: Transformer, device: torch.device) -> None:
        settings = model.settings
        config = SimpleNamespace(pipeline_dtype=settings.torch_dtype, pipeline_device=device)
        self._model, self._device = model, device
        self._communicator = P2PCommunicator(groups.get_group(ParallelMode.PIPELINE), config)
        self._shape = (settings.sequence // settings.tensor, settings.batch // settings.microbatches, settings.hidden)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``[sequence, batch]``, on every stage; gradients are added to ``.grad``."""
        settings = self._model.settings
        parts = (inputs.chunk(settings.microbatches, 1), targets.chunk(settings.microbatches, 1))
        work = [self._chunk(c, *parts, targets.numel()) for c in range(settings.virtual)]
        arguments = settings.microbatches, self._communicator, self._shape
        losses = interleaved(work, *arguments) if len(work) > 1 else one_forward_one_backward(work[0], *arguments)
        total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=settings.loss_dtype, device=self._device)
        return collective.all_reduce(total, ParallelMode.PIPELINE)  # zero everywhere but on the last stage

    def _chunk(
        self, chunk: int, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], count: int
    ) -> Callable[[Tensor | None, int], Tensor]:
        model = self._model
        is_last = self._communicator.is_pp_last_stage and chunk == model.settings.virtual - 1

        def work(x: Tensor | None, microbatch: int) -> Tensor:
            y = model.transform(model.embed(inputs[microbatch]) if x is None else x, chunk)
            return model.loss(y, targets[microbatch], count) if is_last else y

        return work
