"""Hops as Megatron-LM's configuration describes them: batched or not, shapes known or not, timed or not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError, GroupError, MismatchError, UnsupportedError
from tritoncomm.p2p import engine
from tritoncomm.p2p.devices import default_device
from tritoncomm.p2p.fast_path import exchange_plain
from tritoncomm.p2p.neighbours import Line
from tritoncomm.p2p.shapes import Shape, as_shape, describe
from tritoncomm.p2p.transport import keep

__all__ = ["Hops"]

_COMMON = "Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"


def _present(**tensors: Tensor | None) -> dict[str, Sequence[Tensor]]:
    return {key: [tensor] for key, tensor in tensors.items() if tensor is not None}


def _only(hop: engine.Hop, key: str) -> Tensor | None:
    """The one tensor received from a side, or None.

    Raises:
        MismatchError: more than one came (only a header can say so).
    """
    received = hop.received.get(key)
    if received is None:
        return None
    if key in hop.problems:  # its handle raises, once the message has been taken
        return received[0] if received else None
    if len(received) != 1:
        raise MismatchError(f"{hop.name}: {hop.line} expects one tensor, got {len(received)}")
    return received[0]


_SENDS, _RECEIVES = ("send_next", "send_prev"), ("recv_prev", "recv_next")
_UNTIMED = nullcontext()


@contextmanager
def _running(timers: Any, name: str) -> Iterator[None]:
    timers(name, log_level=2).start()
    try:
        yield
    finally:
        timers(name).stop()


class Hops:
    """A stage of ``pp_group`` that starts hops as ``config`` says."""

    def __init__(self, pp_group: ProcessGroup, config: Any) -> None:
        if not isinstance(pp_group, ProcessGroup):
            raise GroupError(f"P2PCommunicator: pp_group must be a process group with this rank, not {pp_group!r}")
        self.pp_group, self.config = pp_group, config
        self._line = Line.of(pp_group)
        self._where: torch.device | None = None
        self._alone = self._line.stages == 1
        self.next_rank: int | None = self._line.next
        self.prev_rank: int | None = self._line.prev
        self.virtual_pipeline_model_parallel_size = getattr(config, "virtual_pipeline_model_parallel_size", None)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank is the first of the group."""
        return self._line.stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank is the last of the group."""
        return self._line.stage == self._line.stages - 1

    @property
    def total_stages(self) -> int:
        """Ranks in the group."""
        return self._line.stages

    @property
    def current_stage(self) -> int:
        """This rank's place in the group."""
        return self._line.stage

    def _setting(self, name: str, default: Any) -> Any:
        return getattr(self.config, name, default)

    @property
    def _lengths_vary(self) -> bool:
        return bool(self._setting("variable_seq_lengths", False) or self._setting("mtp_standalone", False))

    def _timed(self, name: str) -> Any:
        """A context that runs Megatron's timer, if there is one."""
        timers = getattr(self.config, "timers", None)
        return _UNTIMED if timers is None else _running(timers, name)

    def _device(self, *tensors: Tensor | None) -> torch.device:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                return tensor.device
        if self._where is None:
            chosen = self._setting("pipeline_device", None)
            self._where = default_device(self.pp_group) if chosen is None else torch.device(chosen)
        return self._where

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Tell the neighbours the shapes of what they are about to get; (from the stage before, from the one after).

        Any number of dims; ``[0, 0, 0]`` for a side that nothing is received from.
        """
        sends = _present(send_next=tensor_send_next, send_prev=tensor_send_prev)
        receives = tuple(key for key, wanted in (("recv_prev", recv_prev), ("recv_next", recv_next)) if wanted)
        device = self._device(tensor_send_next, tensor_send_prev)
        found = engine.exchange_headers(self._line, "_communicate_shapes", sends, receives, device)
        shapes = {}
        for key, contents in found.items():
            if len(contents.specs) != 1:
                sent = f"rank {self._line.peer(key)} sent {describe(contents.specs)}"
                raise MismatchError(f"_communicate_shapes: {self._line} expects one tensor, but {sent}")
            shapes[key] = list(contents.specs[0][0])
        return shapes.get("recv_prev", [0, 0, 0]), shapes.get("recv_next", [0, 0, 0])

    def _incoming(self, shapes: Sequence[Any] | None, key: str, name: str, varies: bool) -> engine.Incoming:
        dtype = self._setting("pipeline_dtype", None)
        if dtype is None:
            subject = "pipeline_dtype" if key == "recv_prev" else "dtype"
            raise RuntimeError(f"{subject} must be provided if {key} is True")
        if shapes is None:
            raise RuntimeError(f"tensor_shape must be specified if {key} is True. {_COMMON}")
        if varies:
            return engine.Incoming(None, dtype)
        return engine.Incoming(tuple([(as_shape(shape, name), dtype) for shape in shapes]))

    def _start(
        self,
        name: str,
        *,
        send_next: Sequence[Tensor | None] = (),
        send_prev: Sequence[Tensor | None] = (),
        recv_prev: bool = False,
        recv_next: bool = False,
        shapes: Sequence[Any] | None = None,
        overlap: bool = False,
    ) -> engine.Hop:
        """One hop; ``shapes`` are those of either side."""
        config = self.config
        batched = bool(getattr(config, "batch_p2p_comm", True))
        if getattr(config, "use_ring_exchange_p2p", False):
            raise UnsupportedError(f"{name}: use_ring_exchange_p2p needs a patched torch; leave it off")
        if overlap and batched:
            raise AssertionError(f"{name}: overlap_p2p_comm needs batch_p2p_comm=False")
        varies = self._lengths_vary
        receives = {}
        if recv_prev:
            receives["recv_prev"] = self._incoming(shapes, "recv_prev", name, varies)
        if recv_next:
            receives["recv_next"] = self._incoming(shapes, "recv_next", name, varies)
        sends, device = {}, None
        for key, tensors in (("send_next", send_next), ("send_prev", send_prev)):
            given = [x for x in tensors if x is not None]
            if given:
                sends[key] = given
                for x in given:
                    if not isinstance(x, Tensor):
                        raise ArgumentError(f"{name}: expected tensors, not {type(x).__name__}")
                device = device or given[0].device
        device = device or self._device()
        return engine.exchange(self._line, name, sends, receives, device, batched=batched, with_header=varies)

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Up to four transfers at once; (from the stage before, from the stage after, handles).

        The handles are None once waited for. Where nothing was posted, and without ``wait_on_reqs``, they are a dict
        (``batch_p2p_comm`` off) or an empty list.
        """
        sends, receives = (tensor_send_next, tensor_send_prev), (recv_prev, recv_next)
        return self._single("_communicate", sends, receives, tensor_shape, wait_on_reqs)

    def _single(
        self,
        name: str,
        sends: tuple[Tensor | None, Tensor | None],
        receives: tuple[bool, bool],
        shape: Any,
        wait: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """One tensor at most each way; ``sends`` to (next, previous), ``receives`` from (previous, next)."""
        config = self.config
        batched = getattr(config, "batch_p2p_comm", True)
        announced = getattr(config, "variable_seq_lengths", False) or getattr(config, "mtp_standalone", False)
        general = announced or self._alone or getattr(config, "use_ring_exchange_p2p", False)
        if not general and (wait or not batched) and not engine._check.value:
            result, (to_next, to_prev), (from_prev, from_next) = None, sends, receives
            if not (from_prev or from_next):
                result = exchange_plain(self._line, name, to_next, to_prev, None, None, None, None, batched, wait)
            elif shape is not None:
                dtype, device = getattr(config, "pipeline_dtype", None), self._device(to_next, to_prev)
                first, second = shape if from_prev else None, shape if from_next else None
                result = exchange_plain(self._line, name, to_next, to_prev, first, second, dtype, device, batched, wait)
            if result is not None:
                return result
        hop = self._start(
            name,
            send_next=sends[:1],
            send_prev=sends[1:],
            recv_prev=receives[0],
            recv_next=receives[1],
            shapes=None if shape is None else [shape],
            overlap=not wait,
        )
        handles: Any = None
        if not wait:
            handles = hop.handles()
            keep((*hop.headers, *hop.posted.values()))
        else:
            hop.wait()
            handles = None if hop.posted else ([] if self._setting("batch_p2p_comm", True) else {})
        return _only(hop, "recv_prev"), _only(hop, "recv_next"), handles
