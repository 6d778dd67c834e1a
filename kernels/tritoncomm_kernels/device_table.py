"""Integers that kernels read on a device: copied there once, shared by streams and graphs.

Not to be confused with ``tables``, which are files of tuned tiles.
"""

from array import array
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Table", "addresses_on", "table_of", "table_on"]


class Table:
    """Integers on a device, copied there once from pinned memory and without a wait of the host.

    Attributes:
        tensor: on the device; on the CPU for the interpreter.
        source: the pinned copy, which has to live until it was read.
    """

    def __init__(self, content: Tensor, device: int) -> None:
        self.source = self.tensor = content
        self._device, self._streams = device, set[int]()
        if device < 0:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "split sizes of so many ranks, segments, and addresses of so many tensors need a table on the device, "
                "which cannot be copied there while a CUDA graph is captured: call once with the same tensors and "
                "sizes before the capture"
            )
        self.source = self.tensor.pin_memory()
        self.tensor = self.source.to(torch.device("cuda", device), non_blocking=True)
        stream = torch.cuda.current_stream(device)
        self._copied = torch.cuda.Event()
        self._copied.record(stream)
        self._streams.add(stream.cuda_stream)

    def on(self, stream: int) -> Tensor:
        """The tensor for kernels of ``stream``, which is the current one: another than the copy's waits for that once.

        A capture must not wait for what is outside of it. Its graph has the address and replays only after the device
        was synchronised, as ``torch.cuda.graph`` does before it captures; so the table stays, and no stream waits.
        """
        if self._device < 0:
            return self.tensor
        if torch.cuda.is_current_stream_capturing():
            _in_graphs.add(self)
        elif stream not in self._streams:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            self.tensor.record_stream(current)
            self._streams.add(stream)
        return self.tensor


_in_graphs: set[Table] = set()


@lru_cache(maxsize=1024)
def table_on(content: tuple[int, ...], device: int) -> Table:
    """One table per content and device."""
    return Table(torch.tensor(content, dtype=torch.int32, device="cpu"), device)


def table_of(content: Tensor | tuple[int, ...], device: int) -> Table:
    """The table of a tuple, or one of its own for a tensor."""
    return Table(content, device) if isinstance(content, Tensor) else table_on(content, device)


@lru_cache(maxsize=64)
def addresses_on(addresses: tuple[int, ...], device: int) -> Table:
    """Addresses of tensors on their device: copied there when they change, not while they are the same."""
    content = torch.frombuffer(array("q", addresses), dtype=torch.int64)  # a third of the time of torch.tensor
    return Table(content, device)
