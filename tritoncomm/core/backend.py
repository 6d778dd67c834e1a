"""The only caller of torch.distributed collectives: direct process-group calls, one shim over the torch versions.

Tensors are contiguous and in wire order here; nothing is copied. `dist.*` wrappers cost 2 to 3 us more per call.
``name`` is the function that a caller knows: a collective that fails raises ``PeerError`` with it and the ranks.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

from tritoncomm import record, variables
from tritoncomm.errors import CommError, PeerError, UnsupportedError

__all__ = [
    "Handle",
    "InFlight",
    "Transfer",
    "Work",
    "advice",
    "all_gather",
    "all_gather_list",
    "all_reduce",
    "all_to_all",
    "batch",
    "broadcast",
    "carrier",
    "check_op",
    "cuda_backend",
    "default_device",
    "is_backend_error",
    "is_device_error",
    "is_nccl",
    "is_not_carried",
    "not_summed",
    "noted",
    "op_of",
    "raise_for",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_list",
    "refused",
    "released",
    "send_and_receive",
    "special",
]

Work = Any
Transfer = tuple[bool, int, Tensor]
"""One message: whether this rank sends it, the other end's rank in the group, and the tensor."""

_ranks: dict[ProcessGroup, Any] = getattr(distributed_c10d, "_pg_group_ranks", {})
_new_names = hasattr(ProcessGroup, "all_gather_single")
_float8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_")))
_integers = (torch.int16, torch.uint16, torch.uint32, torch.uint64)  # which neither Gloo nor NCCL knows
_raw = frozenset(_float8 + _integers)
special = _raw | {torch.complex32, torch.complex64, torch.complex128}
not_summed = special | {torch.bool}
"""What no backend adds up as it is: see ``carrier`` and ``op_of``."""


def carrier(x: Tensor) -> Tensor:
    """The same bytes in a dtype every backend moves; one dim more where an element is several of those.

    fp8 goes as uint8, 16-bit and wider unsigned integers as their bytes, complex numbers as pairs of reals.
    """
    if x.dtype in _raw:
        return (x if x.itemsize == 1 else x.unsqueeze(-1)).view(torch.uint8)
    return torch.view_as_real(x) if x.is_complex() else x


def op_of(op: Any, dtype: torch.dtype) -> Any:
    """The op that a backend is called with: the sum of bools is their maximum, as NCCL has it.

    Gloo adds the bytes, and 2 is no bool: ``torch.equal`` does not take it for ``True``, and 256 ranks add up to 0.
    """
    return ReduceOp.MAX if dtype is torch.bool and op == _SUM else op


def _options(kind: Any, asynchronous: bool, op: Any = None) -> Any:
    options = kind()
    options.asyncOp = asynchronous
    if op is not None:
        options.reduceOp = op
    return options


_gather_options = tuple(_options(AllgatherOptions, flag) for flag in (False, True))
_exchange_options = tuple(_options(dist.AllToAllOptions, flag) for flag in (False, True))
_NOT_CARRIED = (
    "No backend type associated with device type",
    "Could not run 'c10d::",
    "Copying from quantized Tensor",  # to the wire of an uneven collective
    "Batching rule not implemented for c10d::",  # under torch.func.vmap
)
_BLOCK_THE_HOST = ("", "gloo", "mpi")  # in ``wait`` of CUDA tensors; the first is no backend for them
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "HIP error", "HIP driver error")
_NO_MEMORY = "can't allocate memory"  # of the CPU: a bare RuntimeError
_SUM = ReduceOp.SUM
_sums = {
    kind: tuple(_options(kind, flag, _SUM) for flag in (False, True))
    for kind in (dist.ReduceScatterOptions, dist.AllreduceOptions)
}
_sum_scatter_options, _sum_options = _sums.values()


def raise_for(error: RuntimeError, failure: Exception) -> NoReturn:
    """Raise ``failure``, caused by ``error`` unless it is ``error``, without a frame that keeps either.

    A traceback has this frame: the circle would keep the group until the next garbage collection.
    """
    try:
        if failure is error:
            raise error
        raise failure from error
    finally:
        del error, failure


def is_not_carried(error: RuntimeError) -> bool:
    """Whether a backend refuses the kind of tensor, and no rank has failed."""
    return any(words in str(error) for words in _NOT_CARRIED)


def is_device_error(error: BaseException) -> bool:
    """Whether a device of this rank reports an error, which any earlier kernel or copy may have caused.

    An error of NCCL does not count, whatever NCCL says of CUDA. An error of CUDA that torch's watchdog of NCCL has seen
    counts, although it comes as a DistBackendError.
    """
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "NCCL error" not in text and any(words in text for words in _DEVICE_ERRORS)


def is_backend_error(error: RuntimeError) -> bool:
    """Whether the backend reports a failed transfer: an error of torch.distributed, or a bare RuntimeError of Gloo."""
    if is_device_error(error):
        return False
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _NO_MEMORY not in str(error))


def noted(error: RuntimeError, name: str, where: str) -> RuntimeError:
    """Add to an error of the program the function in which it surfaced, and report it to the observer of ``record``.

    Python 3.10 has no notes on errors; there the error stays without one.
    """
    if not isinstance(error, CommError):
        add_note = getattr(error, "add_note", None)
        if add_note is not None:
            cause = "; an earlier kernel may have caused it" if is_device_error(error) else ""
            add_note(f"surfaced in {name}, {where}{cause}")
        record.failed(name, error)
    return error


def advice() -> str:
    """The last line of a ``PeerError``: how to find the rank that is to blame. Empty in check mode, which names it."""
    if variables.CHECK.value:
        return ""
    return "\nrun again with TRITONCOMM_CHECK=1, which names the rank and its call, or TRITONCOMM_FLIGHT=1 for a record"


def _failure(error: RuntimeError, what: str, ranks: Any, name: str) -> Exception:
    """``PeerError`` for an error of the backend, ``error`` itself for others, ``UnsupportedError`` for meta tensors."""
    rank = f" on rank {dist.get_rank()}" if dist.is_initialized() else ""
    where = f"in the {what} over ranks {list(ranks or ())}{rank}"
    if is_not_carried(error):
        return UnsupportedError(f"{name}: ranks {list(ranks or ())} do not carry such tensors: {error}")
    if not is_backend_error(error):
        return noted(error, name, where)
    failure = PeerError(f"{name}: the {what} over ranks {list(ranks or ())} failed{rank}: {error}{advice()}")
    record.failed(name, failure)
    return failure


def released(buffers: Iterable[Tensor]) -> None:
    """Let the allocator reuse device memory behind the current stream, which was ordered behind all uses of it.

    Without that the memory goes back to the stream on which it was made, which may be another one.
    """
    for buffer in buffers:
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))


def _let_go(works: Iterable[Work], group: ProcessGroup | None, buffers: Sequence[Tensor]) -> None:
    """Order the current stream behind works that nobody will wait for, before their buffers are freed.

    torch's nccl2 keeps the inputs of such works and not their outputs. Its ``wait`` does not block the host, as that of
    NCCL does not. Gloo's does, so nothing is done for it: it keeps all tensors itself.

    Args:
        works: in flight.
        group: which they belong to; None once it is destroyed, and its works with it.
        buffers: that the works read or write, on one device.
    """
    if group is None or not buffers or not buffers[0].is_cuda or cuda_backend(group) in _BLOCK_THE_HOST:
        return
    for each in works:
        for work in each.works if isinstance(each, _Works) else [each]:
            with suppress(RuntimeError):  # a work that failed uses nothing any more
                work.wait()
    released(buffers)


class InFlight:
    """Work in flight on a device, and the tensors that it uses: dropped, it orders the current stream behind the work.

    An exception between the start of a work and its wait drops it, too. It keeps its group weakly.
    """

    __slots__ = ("_buffers", "_group", "_work")

    def __init__(self, work: Work, group: "weakref.ref[ProcessGroup] | ProcessGroup", *buffers: Tensor) -> None:
        self._work, self._buffers = work, ()
        if buffers and buffers[0].is_cuda:  # Gloo keeps tensors in host memory itself
            self._buffers = buffers
            self._group = weakref.ref(group) if isinstance(group, ProcessGroup) else group

    def __del__(self) -> None:
        if self._buffers and self._work is not None and not sys.is_finalizing():
            _let_go([self._work], self._group(), self._buffers)


class _Pending(InFlight):
    """A collective in flight. It keeps the ranks of its group, and not the group."""

    __slots__ = ("_call", "_name", "_ranks", "_what")

    def __init__(self, work: Work, what: str, group: ProcessGroup, name: str, *buffers: Tensor) -> None:
        InFlight.__init__(self, work, group, *buffers)
        self._what, self._ranks, self._name = what, _ranks.get(group), name
        self._call = record.current(name)

    def wait(self) -> None:
        """Order the current stream behind the collective (on the CPU: block); the buffers may be freed afterwards."""
        try:
            record.wait(self._call, self._work)
        except RuntimeError as error:
            raise_for(error, _failure(error, self._what, self._ranks, self._name))
        self._buffers = ()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class Handle:
    """A collective in flight; it owns the buffers until ``wait()``, which returns the finished result.

    A handle that is dropped waits for nothing. Where memory is on a GPU, its stream is ordered behind the collective.
    """

    __slots__ = ("_finish", "_kept", "_work", "result")

    def __init__(self, work: Work, result: Tensor, finish: Callable[[], Any] | None, *kept: Tensor) -> None:
        self._work, self.result, self._finish, self._kept = work, result, finish, kept

    def wait(self) -> Tensor:
        """Order the current stream after the collective (on the CPU: block), unpack, and return the result."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        released((self.result, *self._kept))
        self._kept = ()
        return self.result

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not have to wait for the backend."""
        return self._work is None or self._work.is_completed()


def _run(
    start: Callable[[], Work], what: str, group: ProcessGroup, name: str, asynchronous: bool, buffers: Sequence[Tensor]
) -> Work:
    """Start a collective and wait for it, or return what can be waited for; the hot ones below are written out.

    ``start`` may add to ``buffers``, which are those that the work uses.
    """
    try:
        work = start()
        if work is None:  # of a backend that synchronised by itself
            return None
        if asynchronous:
            return _Pending(work, what, group, name, *buffers)
        work.wait()
    except RuntimeError as error:
        raise_for(error, _failure(error, what, _ranks.get(group), name))


def _together(starts: Iterable[Callable[[], Work]], group: ProcessGroup, buffers: Sequence[Tensor]) -> list[Work]:
    """Start several works; where one cannot be started, those before it are let go of."""
    works: list[Work] = []
    try:
        for start in starts:
            works.append(start())
    except BaseException:
        _let_go(works, group, buffers)
        raise
    return works


def all_gather(out: Tensor, x: Tensor, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """``out = concat over ranks of x``, out has world times the elements of x."""
    if x.dtype in special:
        out, x = carrier(out), carrier(x)
    options = _gather_options[asynchronous]
    try:
        if _new_names:
            work = group.all_gather_single(out, x, options)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            work = group._allgather_base(out, x, options)
        if work is None:  # of a backend that synchronised by itself
            return None
        if asynchronous:
            return _Pending(work, "all-gather", group, name, out, x)
        work.wait()
    except RuntimeError as error:
        raise_for(error, _failure(error, "all-gather", _ranks.get(group), name))


def reduce_scatter(out: Tensor, x: Tensor, op: Any, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """``out = op over ranks of x[rank]``; x is in rank order with world times the elements of out."""
    options = _sum_scatter_options[asynchronous]
    if op is not _SUM:
        options = _options(dist.ReduceScatterOptions, asynchronous, op)
    try:
        if _new_names:
            work = group.reduce_scatter_single(out, x, options)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            work = group._reduce_scatter_base(out, x, options)
        if work is None:
            return None
        if asynchronous:
            return _Pending(work, "reduce-scatter", group, name, out, x)
        work.wait()
    except RuntimeError as error:
        raise_for(error, _failure(error, "reduce-scatter", _ranks.get(group), name))


def all_to_all(
    out: Tensor,
    x: Tensor,
    out_rows: tuple[int, ...],
    in_rows: tuple[int, ...],
    group: ProcessGroup,
    name: str,
    asynchronous: bool = False,
) -> Work:
    """Chunk w of x goes to rank w: equal chunks (no rows given), or that many rows of dim 0."""
    if x.dtype in special:
        out, x = carrier(out), carrier(x)
    options = _exchange_options[asynchronous]
    rows = (list(out_rows), list(in_rows)) if out_rows else ([], [])
    try:
        if _new_names:
            work = group.all_to_all_single(out, x, *rows, options)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            work = group.alltoall_base(out, x, *rows, options)
        if work is None:
            return None
        if asynchronous:
            return _Pending(work, "all-to-all", group, name, out, x)
        work.wait()
    except RuntimeError as error:
        raise_for(error, _failure(error, "all-to-all", _ranks.get(group), name))


def send_and_receive(
    sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], group: ProcessGroup, name: str
) -> Work:
    """One message to or from each of these ranks of the group, all in one batch; ranks without one do not call.

    For an exchange between two sets of ranks that have none in common. Neighbouring stages use ``p2p.transport``.
    """
    transfers = [(False, peer, x) for peer, x in receives] + [(True, peer, x) for peer, x in sends]
    tensors = [x for _, _, x in transfers]
    if any(x.is_meta for x in tensors):  # which Gloo takes, and sends nothing
        raise UnsupportedError(f"{name}: meta tensors have no data to send")
    return _run(lambda: _Works(batch(transfers, group)), "exchange", group, name, True, tensors)


def batch(transfers: Sequence[Transfer], group: ProcessGroup) -> list[Work]:
    """Start messages together; one work for all of them, or one for each where the backend does not batch.

    ``dist.batch_isend_irecv`` takes three times as long on the host, for its checks and objects. Where a message cannot
    be added to a batch it leaves the batch open, and later calls of the group would become part of it.
    """
    if not transfers:
        return []
    tensors, device = [x for _, _, x in transfers], transfers[0][2].device
    starts = [partial(_start, each, group) for each in transfers]
    if not (type(group) is ProcessGroup and group._get_backend(device).supports_coalescing):
        return _together(starts, group, tensors)
    group._start_coalescing(device)
    try:
        for start in starts:
            start()
    except BaseException:
        with suppress(RuntimeError):  # the first error matters more
            _let_go([group._end_coalescing(device)], group, tensors)
        raise
    return [group._end_coalescing(device)]


def _start(transfer: Transfer, group: ProcessGroup) -> Work:
    is_send, peer, x = transfer
    return (group.send if is_send else group.recv)([x], peer, 0)


class _Works:
    """Several works waited for as one."""

    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def all_gather_list(parts: list[Tensor], x: Tensor, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """``parts[w] = x of rank w``, of uneven sizes: a broadcast of every part that is not empty.

    torch's own all-gather into a list is no alternative: Gloo's wants equal sizes, and nccl2's takes two empty parts,
    which have one address, for one buffer and gathers equal sizes.
    """
    if x.dtype in special:
        parts, x = [carrier(part) for part in parts], carrier(x)

    def start() -> Work:
        if x.is_meta:  # shapes are propagated through all collectives
            return group.allgather([parts], [x], _gather_options[asynchronous])
        parts[group.rank()].copy_(x)
        return _rooted(group.broadcast, dist.BroadcastOptions, parts, group)

    return _run(start, "all-gather", group, name, asynchronous, parts)


def reduce_scatter_list(
    out: Tensor, parts: list[Tensor], op: Any, group: ProcessGroup, name: str, asynchronous: bool = False
) -> Work:
    """``reduce_scatter`` with uneven split sizes: a reduce of every part that is not empty.

    torch's own reduce-scatter of a list is no alternative: versions of nccl2 want equal sizes.
    """
    if out.dtype in special:
        out, parts = carrier(out), [carrier(part) for part in parts]
    op, buffers = op_of(op, out.dtype), [out]

    def start() -> Work:
        if out.is_meta:
            return group.reduce_scatter([out], [parts], _options(dist.ReduceScatterOptions, asynchronous, op))
        rank = group.rank()
        out.copy_(parts[rank])
        # NCCL writes on the root only. Gloo adds up in the memory of every rank, and parts may be views of an input.
        reads = is_nccl(backend_name(group, out))
        buffers[:] = [out if w == rank else part if reads else part.clone() for w, part in enumerate(parts)]
        return _rooted(group.reduce, dist.ReduceOptions, [x.detach() for x in buffers], group, op)

    return _run(start, "reduce-scatter", group, name, asynchronous, buffers)


def _rooted(call: Any, kind: Any, parts: list[Tensor], group: ProcessGroup, op: Any = None) -> Work:
    """Start a broadcast from, or a reduce to, rank w of every ``parts[w]`` that is not empty."""

    def start(w: int, part: Tensor) -> Work:
        options = _options(kind, True, op)  # they run at the same time on Gloo
        options.rootRank = w
        return call([part], options)

    starts = [partial(start, w, part) for w, part in enumerate(parts) if part.numel()]
    return _Works(_together(starts, group, parts))


def all_reduce(x: Tensor, op: Any, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """In place; the dtype is one the backend adds up (see ``carrier``)."""
    options = _sum_options[asynchronous] if op is _SUM else _options(dist.AllreduceOptions, asynchronous, op)
    try:
        work = group.allreduce([x], options)
        if work is None:
            return None
        if asynchronous:
            return _Pending(work, "all-reduce", group, name, x)
        work.wait()
    except RuntimeError as error:
        raise_for(error, _failure(error, "all-reduce", _ranks.get(group), name))


def broadcast(x: Tensor, src: int, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """In place; ``src`` is the rank inside the group."""
    options = _options(dist.BroadcastOptions, asynchronous)
    options.rootRank, options.rootTensor = src, 0
    return _run(lambda: group.broadcast([carrier(x)], options), "broadcast", group, name, asynchronous, [x])


def reduce(x: Tensor, dst: int, op: Any, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """In place; ``dst`` is the rank inside the group, elsewhere x is scratch afterwards."""
    options = _options(dist.ReduceOptions, asynchronous, op_of(op, x.dtype))
    options.rootRank = dst
    x = carrier(x).detach()  # an average is divided in place, which autograd refuses of a leaf
    return _run(lambda: group.reduce([x], options), "reduce", group, name, asynchronous, [x])


_bitwise = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def check_op(op: Any, x: Tensor, group: ProcessGroup, name: str) -> None:
    """Refuse what the backend would refuse, or get wrong, before anything is sent.

    Raises:
        UnsupportedError: names the function, the op, the dtype and the backend.
    """
    if op == ReduceOp.SUM and x.dtype not in _raw:
        return
    try:
        backend = backend_name(group, x)
    except RuntimeError as error:
        raise_for(error, _failure(error, "reduction", _ranks.get(group), name))
    problem = refused(op, x.dtype, backend)
    if problem:
        raise UnsupportedError(f"{name}: {backend} cannot reduce {x.dtype} with {op}: {problem}")


def backend_name(group: ProcessGroup, x: Tensor) -> str:
    """Name of the backend that carries tensors of ``x``'s device in ``group``."""
    return group._get_backend(x.device).name().lower()


def cuda_backend(group: ProcessGroup) -> str:
    """Name of the backend that carries CUDA tensors in ``group``, empty where none does."""
    if all(kind.type != "cuda" for kind in group._device_types):
        return ""
    return group._get_backend(torch.device("cuda")).name().lower()


def is_nccl(backend: str) -> bool:
    """Whether a name of a backend, or a configuration such as ``cpu:gloo,cuda:nccl``, has an implementation of NCCL.

    torch 2.15 has three of them: nccl-legacy, nccl2 and nccl-lazy.
    """
    return any(name.rpartition(":")[2].strip().lower().startswith("nccl") for name in backend.split(","))


def default_device(cuda: str) -> torch.device:
    """The current GPU where ``cuda``, the backend of CUDA tensors, is neither Gloo nor missing; else the CPU."""
    if cuda in ("", "gloo") or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def refused(op: Any, dtype: torch.dtype, backend: str) -> str:
    """Why ``backend`` cannot reduce ``dtype`` with ``op``, empty if it can."""
    if dtype in _integers:
        return "the backend has no such integers; cast to int32 or int64"
    if dtype in _raw:
        return "sums of 8-bit floats would have to be decoded first; cast, or exchange and reduce"
    if dtype.is_complex and op != ReduceOp.SUM and op != ReduceOp.AVG:
        return "complex numbers have no such reduction"
    if op in _bitwise and is_nccl(backend):
        return "NCCL has no bitwise reductions"
    if op in _bitwise and dtype.is_floating_point:
        return "bitwise reductions need integers or bool"
    if (
        op == ReduceOp.AVG
        and not (dtype.is_floating_point or dtype.is_complex)
        and (not is_nccl(backend) or dtype is torch.bool)
    ):
        return "an average needs a floating point dtype"
    return ""
