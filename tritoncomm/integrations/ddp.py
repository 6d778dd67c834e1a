"""A communication hook of DistributedDataParallel that averages gradients over a 16-bit wire, with sums in fp32."""

from collections.abc import Callable
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

Hook = Callable[[ProcessGroup | None, GradBucket], Future[Tensor]]


def wire_hook(
    *, wire: torch.dtype = torch.bfloat16, wire_between: torch.dtype | None = None, exchange: Levels | None = None
) -> Hook:
    """Return a hook for ``DistributedDataParallel.register_comm_hook(group, hook)``; None stands for all ranks.

    A bucket becomes ``collective.all_reduce(bucket, group, AVG, wire=wire)``. bf16 gradients travel as they are, are
    summed in fp32 in rank order, and are rounded once; gradients in fp32 are rounded to the wire, and the average
    travels in fp32. On a GPU the hook runs on a stream of its own, beside the rest of backward.

    Args:
        wire, wire_between, exchange: see ``collective.reduce_scatter``.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def average(state: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket of gradients in place."""
        group: Any = dist.group.WORLD if state is None else state
        gradients, options = bucket.buffer(), {"wire": wire, "wire_between": wire_between, "exchange": exchange}
        if not gradients.is_cuda:
            done: Future[Tensor] = Future()
            done.set_result(collective.all_reduce(gradients, group, ReduceOp.AVG, **options))
            return done
        device = gradients.device
        stream = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            done = Future(devices=[device])  # it notes the stream, which DDP orders its own behind
            done.set_result(collective.all_reduce(gradients, group, ReduceOp.AVG, **options))
        return done

    return average
