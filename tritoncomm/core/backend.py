"""Calls of the backend: process-group collectives, their handles while in flight, and their errors in words.

No other module of eager mode calls a collective of torch.distributed. Tensors are contiguous and in rank order here,
and nothing is copied. Methods of the group are called instead of ``dist.*`` functions, which take 2 to 3 us more.
A collective returns None after its wait, or with ``asynchronous`` the work in flight; None too, if the backend
synchronises by itself. One that fails raises ``PeerError`` with ``name`` and the ranks.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions  # pyright: ignore[reportPrivateImportUsage]

from tritoncomm import record, variables
from tritoncomm.core.autograd import outside_graphs
from tritoncomm.core.memory import fills_storage, version_of
from tritoncomm.core.validation import members
from tritoncomm.errors import ArgumentError, CommError, PeerError, UnsupportedError

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
    "moved_as_bytes",
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
    "unsummed",
]

Work = Any


class Transfer(NamedTuple):
    """One message between this rank and the rank ``peer`` of the group."""

    peer: int
    tensor: Tensor
    is_send: bool


_ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = (
    ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    if hasattr(ProcessGroup, "all_gather_single")  # torch 2.13 and newer
    else ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
)
_float8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_")))
_integers = (torch.int16, torch.uint16, torch.uint32, torch.uint64)  # neither Gloo nor NCCL knows them
moved_as_bytes = frozenset(_float8 + _integers)
"""Dtypes that backends lack."""
special = moved_as_bytes | {torch.complex32, torch.complex64, torch.complex128}
not_summed = special | {torch.bool}
"""Dtypes that no backend adds up as they are: see ``carrier`` and ``op_of``."""


def carrier(x: Tensor) -> Tensor:
    """Return a view of ``x`` in a dtype that every backend moves; ``x`` itself if its dtype is one."""
    # Floats of one byte keep their shape. Integers become bytes and complex numbers pairs of reals, with one dim more.
    if x.dtype in moved_as_bytes:
        return (x if x.itemsize == 1 else x.unsqueeze(-1)).view(torch.uint8)
    return torch.view_as_real(x) if x.is_complex() else x


def op_of(op: Any, dtype: torch.dtype) -> Any:
    """Return the reduction to pass to a backend for ``op``: MAX for a sum of bools, else ``op``."""
    # NCCL takes that maximum by itself. Gloo adds bytes: torch.equal does not take 2 for True, and 256 ranks add up to
    # 0.
    return ReduceOp.MAX if dtype is torch.bool and op == _SUM else op


def _options(kind: Any, asynchronous: bool, op: Any = None) -> Any:
    """Make an object of ``kind``, torch's class of a collective's options."""
    options = kind()
    options.asyncOp = asynchronous
    if op is not None:
        options.reduceOp = op
    return options


# Options are made once, for calls that wait and for asynchronous ones: ``[asynchronous]`` selects.
_gather_options = tuple(_options(AllgatherOptions, flag) for flag in (False, True))
_exchange_options = tuple(_options(dist.AllToAllOptions, flag) for flag in (False, True))
_NOT_CARRIED = (
    "No backend type associated with device type",
    "Could not run 'c10d::",
    "Copying from quantized Tensor",  # into the wire of an uneven collective
    "Batching rule not implemented for c10d::",  # under torch.func.vmap
)
_BLOCK_THE_HOST = ("", "gloo", "mpi")  # backends whose wait does so for CUDA tensors; "" has no backend for them
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "HIP error", "HIP driver error")
_NO_MEMORY = "can't allocate memory"  # of the CPU: a bare RuntimeError
_SUM = ReduceOp.SUM
_sums = {
    kind: tuple(_options(kind, flag, _SUM) for flag in (False, True))
    for kind in (dist.ReduceScatterOptions, dist.AllreduceOptions)
}
_sum_scatter_options, _sum_options = _sums.values()


def raise_for(error: RuntimeError, failure: Exception) -> NoReturn:
    """Raise ``failure`` with ``error`` as its cause; just ``error`` if both are one object."""
    try:
        if failure is error:
            raise error
        raise failure from error
    finally:
        # The traceback keeps this frame: a circle of both names would keep the group alive until the next garbage
        # collection.
        del error, failure


def is_not_carried(error: RuntimeError) -> bool:
    """Whether ``error`` says that the backend does not take this kind of tensor; no rank has failed then."""
    return any(words in str(error) for words in _NOT_CARRIED)


def is_device_error(error: BaseException) -> bool:
    """Whether ``error`` is one of this rank's device, which any earlier kernel or copy may have caused."""
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return True
    # The text decides, not the type: a CUDA error that NCCL's watchdog reports is a DistBackendError. Errors of NCCL
    # mention CUDA without being errors of the device.
    text = str(error)
    return "NCCL error" not in text and any(words in text for words in _DEVICE_ERRORS)


def is_backend_error(error: RuntimeError) -> bool:
    """Whether a transfer failed: an error of torch.distributed or of Gloo, not of the device or the CPU's memory."""
    if is_device_error(error):
        return False
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and _NO_MEMORY not in str(error))


def noted(error: RuntimeError, name: str, where: str) -> RuntimeError:
    """Add a note to ``error`` that says where it surfaced, report and return it; a ``CommError`` stays as it is."""
    if not isinstance(error, CommError):
        cause = "; an earlier kernel may have caused it" if is_device_error(error) else ""
        error.add_note(f"surfaced in {name}, {where}{cause}")
        record.failed(name, error)
    return error


def advice() -> str:
    """Return the last line of a ``PeerError``, how to find the rank at fault; "" in check mode, which names it."""
    if variables.CHECK.value:
        return ""
    record_too = "" if variables.FLIGHT.value[0] else ", or TRITONCOMM_FLIGHT=1 for a record"
    return f"\nrun again with TRITONCOMM_CHECK=1, which names the rank and its call{record_too}"


def _failure(error: RuntimeError, what: str, ranks: Any, name: str) -> Exception:
    """Return the exception to raise for ``error`` of a collective, and report it to the observer.

    Args:
        what: collective in words.
        ranks: global ranks of the group; None where torch does not know them.
    """
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
    """Tell the allocator that the current stream used ``buffers``: freed, their memory is reused only behind it."""
    # Without it the memory goes back to the stream that allocated it, which may be another one.
    for buffer in buffers:
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))


def _let_go(works: Iterable[Work], group: ProcessGroup | None, buffers: Sequence[Tensor]) -> None:
    """Order the current stream behind works that nobody will wait for, so that ``buffers``, on one device, can go."""
    # A destroyed group (None) took its works with it. Gloo's wait would block the host, and Gloo keeps all tensors
    # itself; nccl2 keeps the inputs of such works, but not their outputs.
    if group is None or not buffers or not buffers[0].is_cuda or cuda_backend(group) in _BLOCK_THE_HOST:
        return
    for each in works:
        for work in each.works if isinstance(each, _Works) else [each]:
            with suppress(RuntimeError):  # a work that failed uses nothing any more
                work.wait()
    released(buffers)


class InFlight:
    """A work in flight with its tensors. Dropped before its wait, it orders the current stream behind the work."""

    __slots__ = ("_buffers", "_group", "_work")

    def __init__(self, work: Work, group: "weakref.ref[ProcessGroup] | ProcessGroup", *buffers: Tensor) -> None:
        self._work, self._buffers = work, ()
        if buffers and buffers[0].is_cuda:  # Gloo keeps tensors in host memory itself
            self._buffers = buffers
            # Weakly, as a work in flight must not keep its group alive. Without buffers nobody reads ``_group``.
            self._group = weakref.ref(group) if isinstance(group, ProcessGroup) else group

    def __del__(self) -> None:
        if self._buffers and self._work is not None and not sys.is_finalizing():
            _let_go([self._work], self._group(), self._buffers)


class _Pending(InFlight):
    """A collective in flight. It keeps the ranks of its group, which an error names, and not the group."""

    __slots__ = ("_call", "_name", "_ranks", "_what")

    def __init__(self, work: Work, what: str, group: ProcessGroup, name: str, *buffers: Tensor) -> None:
        InFlight.__init__(self, work, group, *buffers)
        self._what, self._ranks, self._name = what, members.get(group), name
        self._call = record.current(name)

    def wait(self) -> None:
        """Order the current stream behind the collective, or block on the CPU; the buffers may be freed afterwards."""
        try:
            record.wait(self._call, self._work)
        except RuntimeError as error:
            raise_for(error, _failure(error, self._what, self._ranks, self._name))
        self._buffers = ()

    def is_completed(self) -> bool:
        """Whether the backend has finished."""
        return self._work.is_completed()


class Handle:
    """A collective in flight. It owns the buffers until ``wait()``, which returns the result.

    A handle that is dropped does not wait. For memory of a GPU the current stream is ordered behind the collective.
    """

    __slots__ = ("_buffers", "_finish", "_version", "_work", "result")

    def __init__(self, work: Work, result: Tensor, *buffers: Tensor, finish: Callable[[], Any] | None = None) -> None:
        # The first of the buffers is the one that is sent. One inside of a storage has the version of the whole.
        self._work, self.result, self._finish = work, result, finish
        self._buffers: tuple[Tensor, ...] = buffers
        self._version = version_of(buffers[0]) if buffers and fills_storage(buffers[0]) else None

    def wait(self) -> Tensor:
        """Order the current stream after the collective (on the CPU: block), unpack, and return the result.

        Raises:
            ArgumentError: a tensor that was sent has changed in place since the start: others may have either value.
            PeerError: another rank failed.
        """
        work, self._work = self._work, None
        is_changed = self._version is not None and version_of(self._buffers[0]) != self._version
        if work is not None:
            work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        released((self.result, *self._buffers))
        self._buffers, self._version = (), None
        if is_changed:
            raise ArgumentError(
                "wait: a tensor of an asynchronous collective has changed in place since its start, so that other "
                "ranks may have got either value; change it after wait(), or a copy"
            )
        return self.result

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not have to wait for the backend."""
        return self._work is None or self._work.is_completed()


def _run(
    call: Callable[..., Work],
    arguments: tuple[Any, ...],
    what: str,
    group: ProcessGroup,
    name: str,
    asynchronous: bool,
    buffers: Sequence[Tensor],
) -> Work:
    """Start a collective by ``call(*arguments)``, and wait for it unless ``asynchronous``.

    Args:
        what: collective in words, for errors.
        buffers: tensors that the work uses; may be a list that ``call`` fills.
    """
    try:
        work = call(*arguments)
        if work is None:  # the backend has synchronised by itself
            return None
        if asynchronous:
            return _Pending(work, what, group, name, *buffers)  # unpacked behind ``call``, which may have filled it
        work.wait()
    except RuntimeError as error:
        raise_for(error, _failure(error, what, members.get(group), name))


def _together(starts: Iterable[Callable[[], Work]], group: ProcessGroup, buffers: Sequence[Tensor]) -> list[Work]:
    """Call every function of ``starts`` and return their works; if one raises, release the earlier works first."""
    works: list[Work] = []
    try:
        for start in starts:
            works.append(start())
    except BaseException:
        _let_go(works, group, buffers)
        raise
    return works


def all_gather(out: Tensor, x: Tensor, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """All-gather ``x`` into ``out``, in rank order: ``out`` has world times the elements of ``x``."""
    if x.dtype in special:
        out, x = carrier(out), carrier(x)
    arguments = out, x, _gather_options[asynchronous]
    return _run(getattr(group, _ALL_GATHER), arguments, "all-gather", group, name, asynchronous, (out, x))


def reduce_scatter(out: Tensor, x: Tensor, op: Any, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """Reduce-scatter ``x``, in rank order, by ``op``: ``out`` is this rank's part of the result."""
    options = _sum_scatter_options[asynchronous]
    if op is not _SUM:
        options = _options(dist.ReduceScatterOptions, asynchronous, op)
    call = getattr(group, _REDUCE_SCATTER)
    return _run(call, (out, x, options), "reduce-scatter", group, name, asynchronous, (out, x))


def all_to_all(
    out: Tensor,
    x: Tensor,
    out_rows: tuple[int, ...],
    in_rows: tuple[int, ...],
    group: ProcessGroup,
    name: str,
    asynchronous: bool = False,
) -> Work:
    """Send chunk w of ``x`` to rank w, and receive the ranks' chunks into ``out``, in rank order.

    Args:
        out_rows, in_rows: rows of dim 0 from and to each rank; empty for equal chunks.
    """
    if x.dtype in special:
        out, x = carrier(out), carrier(x)
    arguments = out, x, out_rows, in_rows, _exchange_options[asynchronous]
    return _run(getattr(group, _ALL_TO_ALL), arguments, "all-to-all", group, name, asynchronous, (out, x))


def send_and_receive(
    sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]], group: ProcessGroup, name: str
) -> Work:
    """Start all sends and receives as one batch, and return it in flight; ranks without a message do not call.

    Args:
        sends, receives: (rank in the group, tensor) of every message.
    """
    # Receives first. Ranks either only send or only receive where this is called, so that no order can deadlock.
    transfers = [Transfer(peer, x, is_send=False) for peer, x in receives]
    transfers += [Transfer(peer, x, is_send=True) for peer, x in sends]
    tensors = [transfer.tensor for transfer in transfers]
    # Gloo would take meta tensors and send nothing.
    if any(x.is_meta for x in tensors):
        raise UnsupportedError(f"{name}: meta tensors have no data to send")
    start = lambda: _Works(batch(transfers, group))  # noqa: E731
    return _run(start, (), "exchange", group, name, asynchronous=True, buffers=tensors)


def batch(transfers: Sequence[Transfer], group: ProcessGroup) -> list[Work]:
    """Start messages together; return one work for all of them, or one for each if the backend does not batch."""
    if not transfers:
        return []
    tensors, device = [transfer.tensor for transfer in transfers], transfers[0].tensor.device
    starts = [partial(_start, each, group) for each in transfers]
    if not (type(group) is ProcessGroup and group._get_backend(device).supports_coalescing):
        return _together(starts, group, tensors)
    # dist.batch_isend_irecv takes three times as long on the host, for its checks and objects. If it cannot add a
    # message, it leaves the batch open, and later calls of the group become part of it.
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
    """Start the send or receive of one message, and return torch's work."""
    call = group.send if transfer.is_send else group.recv
    return call([transfer.tensor], transfer.peer, 0)  # tag 0


class _Works:
    """Several works as one."""

    def __init__(self, works: list[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for each of the works."""
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all works have finished."""
        return all(work.is_completed() for work in self.works)


def all_gather_list(parts: list[Tensor], x: Tensor, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """All-gather tensors of uneven sizes: ``parts[w]`` receives the ``x`` of rank w."""
    if x.dtype in special:
        parts, x = [carrier(part) for part in parts], carrier(x)

    def start() -> Work:
        """Start the all-gather, which fills this rank's part by a copy."""
        if x.is_meta:  # programs propagate shapes through all collectives
            return group.allgather([parts], [x], _gather_options[asynchronous])
        # A broadcast for every part that is not empty. torch's own all-gather into a list is no alternative: Gloo
        # refuses uneven sizes. The nccl2 backend tells by their addresses whether the parts are one buffer. Empty parts
        # have the same address, so that it would mistake them for one buffer of equal parts.
        parts[group.rank()].copy_(x)
        return _rooted(group.broadcast, dist.BroadcastOptions, parts, group)

    return _run(start, (), "all-gather", group, name, asynchronous, parts)


def reduce_scatter_list(
    out: Tensor, parts: list[Tensor], op: Any, group: ProcessGroup, name: str, asynchronous: bool = False
) -> Work:
    """Reduce-scatter of uneven sizes by ``op``: ``parts[w]`` goes to rank w, ``out`` is this rank's result."""
    if out.dtype in special:
        out, parts = carrier(out), [carrier(part) for part in parts]
    op, buffers = op_of(op, out.dtype), [out]

    def start() -> Work:
        """Start the reduce-scatter, which reduces this rank's part in ``out``."""
        if out.is_meta:
            return group.reduce_scatter([out], [parts], _options(dist.ReduceScatterOptions, asynchronous, op))
        # Every part that is not empty is a reduce: versions of nccl2 want equal sizes in torch's own reduce-scatter of
        # a list.
        rank = group.rank()
        out.copy_(parts[rank])
        # NCCL writes on the root only. Gloo adds up in the memory of every rank, and parts may be views of an input.
        keeps_inputs = is_nccl(backend_name(group, out))
        # In place, because ``_run`` has the list: the work in flight uses these tensors.
        buffers[:] = [part if keeps_inputs or w == rank else part.clone() for w, part in enumerate(parts)]
        buffers[rank] = out
        return _rooted(group.reduce, dist.ReduceOptions, [x.detach() for x in buffers], group, op)

    return _run(start, (), "reduce-scatter", group, name, asynchronous, buffers)


def _rooted(call: Any, kind: Any, parts: list[Tensor], group: ProcessGroup, op: Any = None) -> Work:
    """Start one collective with root w for every ``parts[w]`` that is not empty; return all of them as one work.

    Args:
        call: ``group.broadcast`` or ``group.reduce``; ``kind`` is torch's class of its options.
    """

    def start(w: int, part: Tensor) -> Work:
        """Start the collective of ``part``, whose root is rank w."""
        options = _options(kind, asynchronous=True, op=op)  # they run at the same time on Gloo
        options.rootRank = w
        return call([part], options)

    starts = [partial(start, w, part) for w, part in enumerate(parts) if part.numel()]
    return _Works(_together(starts, group, parts))


def all_reduce(x: Tensor, op: Any, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """All-reduce ``x`` in place by ``op``; the dtype is one that backends add up."""
    options = _sum_options[asynchronous] if op is _SUM else _options(dist.AllreduceOptions, asynchronous, op)
    return _run(group.allreduce, ([x], options), "all-reduce", group, name, asynchronous, (x,))


def broadcast(x: Tensor, src: int, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """Broadcast ``x`` from rank ``src`` of the group, in place on the others."""
    options = _options(dist.BroadcastOptions, asynchronous)
    options.rootRank, options.rootTensor = src, 0
    return _run(group.broadcast, ([carrier(x)], options), "broadcast", group, name, asynchronous, [x])


def reduce(x: Tensor, dst: int, op: Any, group: ProcessGroup, name: str, asynchronous: bool = False) -> Work:
    """Reduce ``x`` by ``op`` into rank ``dst`` of the group, in place; elsewhere ``x`` is scratch."""
    options = _options(dist.ReduceOptions, asynchronous, op_of(op, x.dtype))
    options.rootRank = dst
    x = carrier(x).detach()  # an average is divided in place, which autograd refuses of a leaf
    return _run(group.reduce, ([x], options), "reduce", group, name, asynchronous, [x])


_bitwise = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def check_op(op: Any, x: Tensor, group: ProcessGroup, name: str) -> None:
    """Reject, before a byte is sent, a dtype that the group's backend would refuse or reduce to a wrong result."""
    if op == ReduceOp.SUM and x.dtype not in moved_as_bytes:
        return
    try:
        backend = backend_name(group, x)
    except RuntimeError as error:
        raise_for(error, _failure(error, "reduction", members.get(group), name))
    problem = refused(op, x.dtype, backend)
    if problem:
        raise UnsupportedError(f"{name}: {backend} cannot reduce {x.dtype} with {op}: {problem}")


@outside_graphs  # Dynamo cannot trace the backends of a group
def backend_name(group: ProcessGroup, x: Tensor) -> str:
    """Return the name, in lower case, of the backend that carries tensors of the device of ``x`` in ``group``."""
    return group._get_backend(x.device).name().lower()


def cuda_backend(group: ProcessGroup) -> str:
    """Return the name, in lower case, of the backend that carries CUDA tensors in ``group``; "" if none does."""
    if all(kind.type != "cuda" for kind in group._device_types):
        return ""
    return group._get_backend(torch.device("cuda")).name().lower()


def is_nccl(backend: str) -> bool:
    """Whether ``backend``, a name or a configuration such as ``cpu:gloo,cuda:nccl``, has an implementation of NCCL."""
    # The prefix decides, as torch 2.15 has three: nccl-legacy, nccl2 and nccl-lazy.
    return any(name.rpartition(":")[2].strip().lower().startswith("nccl") for name in backend.split(","))


def default_device(cuda: str) -> torch.device:
    """Return the current GPU; the CPU if there is none, or ``cuda``, the backend of CUDA tensors, is "gloo" or ""."""
    if cuda in ("", "gloo") or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def unsummed(dtype: torch.dtype) -> str:
    """Return the reason why no backend reduces a dtype of ``moved_as_bytes``."""
    if dtype in _integers:
        return "the backend has no such integers; cast to int32 or int64"
    return "sums of 8-bit floats would have to be decoded first; cast, or exchange and reduce"


def refused(op: Any, dtype: torch.dtype, backend: str) -> str:
    """Return the reason why ``backend`` cannot reduce ``dtype`` by ``op``; "" if it can."""
    if dtype in moved_as_bytes:
        return unsummed(dtype)
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
