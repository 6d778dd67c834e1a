"""A communication hook of DistributedDataParallel that averages gradients over a 16-bit wire, with sums in fp32."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    ReduceOp,
)
from torch.futures import Future

from tritoncomm import collective
from tritoncomm.core.node_exchange import Levels

__all__ = ["wire_hook"]


def wire_hook(
    *, wire: torch.dtype = torch.bfloat16, wire_between: torch.dtype | None = None, exchange: Levels | None = None
) -> "_WireHook":
    """Return a hook for ``DistributedDataParallel.register_comm_hook(model.process_group, hook)``.

    The state is the process group of the model; None stands for all ranks of the job, as with torch's own hooks. The
    hook can be pickled, by itself and inside of a model.

    A bucket becomes ``collective.all_reduce(bucket, group, AVG, wire=wire)``. bf16 gradients travel as they are, are
    summed in fp32 in rank order, and are rounded once; gradients in fp32 are rounded to the wire, and the average
    travels in fp32. On a GPU the hook runs on a stream of its own, beside the rest of backward.

    Args:
        wire, wire_between, exchange: see ``collective.reduce_scatter``.
    """
    return _WireHook({"wire": wire, "wire_between": wire_between, "exchange": exchange})


class _WireHook:
    """The hook that ``wire_hook`` returns; torch calls it with the state and a bucket."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.__name__ = self.__qualname__ = "wire_hook"  # DDP asks a hook for both, as functions have them

    def __call__(self, state: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket of gradients in place."""
        group: Any = dist.group.WORLD if state is None else state
        gradients = bucket.buffer()
        if not gradients.is_cuda:
            done: Future[Tensor] = Future()
            done.set_result(collective.all_reduce(gradients, group, ReduceOp.AVG, **self.options))
            return done
        device = gradients.device
        stream = self.streams.get(device) or self.streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            done = Future(devices=[device])  # it notes the stream, which DDP orders its own behind
            done.set_result(collective.all_reduce(gradients, group, ReduceOp.AVG, **self.options))
        return done

    def __reduce__(self) -> tuple[Any, ...]:
        return _WireHook, (self.options,)  # streams are of a process
