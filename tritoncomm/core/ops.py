"""Local passes over tensors, pack, unpack and reduce, each on a path: a view, a copy by torch, or a Triton kernel."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from torch.autograd import profiler
from tritoncomm_kernels import TooLargeError, torch_path
from tritoncomm_kernels.config import crossover

from tritoncomm import record, variables
from tritoncomm.core.memory import PLAIN, contiguous_stride, has_wrapper
from tritoncomm.core.plan import Ints
from tritoncomm.core.split import Split, split_by, split_of
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.record import CopyPath
from tritoncomm.variables import PathChoice

if TYPE_CHECKING:
    from tritoncomm_kernels.launch import Launch

__all__ = [
    "PassResult", "Results", "SplitPass", "contiguous", "dense", "forced_path", "has_lazy", "pack", "pack_into",
    "path", "path_for", "reduce", "reinterpreted", "resolved", "split_pass", "unpack",
]  # fmt: skip

_CAT_ROW, _CAT_BYTES = 2048, 1 << 15  # torch.cat is faster for rows of at most, and wires of at least, these bytes
_forced = variables.PATH


class PassResult(NamedTuple):
    """Result of a pass.

    Attributes:
        tensor: the wire of a pack, the first tensor that an unpack filled.
        path: a view, a copy by torch, or a Triton kernel.
        copied: bytes read plus bytes written.
    """

    tensor: Tensor
    path: CopyPath
    copied: int


class Results(NamedTuple):
    """New tensors of an unpack, its path, and the bytes read plus bytes written."""

    tensors: list[Tensor]
    path: CopyPath
    copied: int


def path(name: PathChoice) -> AbstractContextManager[None]:
    """Force the path of every local pass of this process for a block: ``torch``, ``triton``, or ``auto`` for no force.

    The choice holds for all threads, because autograd runs the backward of GPU tensors in threads of its own.

    Raises:
        ArgumentError: ``name`` is none of the three.
    """
    if name not in variables.PATHS:
        raise ArgumentError(f"path must be one of {', '.join(variables.PATHS)}, not {name!r}")
    return _forced.override(name)


def path_for(
    x: Tensor, op: str = "pack", dim: int = -1, world: int = 1, sizes: Ints | None = None, shape: Ints | None = None
) -> CopyPath:
    """Return the path of a local pass: the forced one, else ``torch`` for CPU tensors and ``triton`` on GPUs.

    On a GPU with a tuned table, tensors below the crossover of the table take ``torch`` too.

    Args:
        x: tensor that is read, or the wire.
        op: name of the pass, a key of the table.
        dim, world, sizes: split of ``x``.
        shape: shape of the result where ``x`` is a wire; None where ``x`` is the tensor.
    """
    is_free = _forced.value == "auto"
    if is_free and not x.is_cuda:
        return "torch"
    if not is_free and forced_path() == "torch":  # not ``_forced.value``, as the function rejects unknown values
        return "torch"
    if type(x) not in PLAIN and has_wrapper((x,)):
        return "torch"
    return _path_on_gpu(x, op, dim, world, sizes, shape) if is_free else "triton"


def forced_path() -> PathChoice:
    """Return the choice of ``path`` or of the variable ``TRITONCOMM_PATH``: ``auto``, ``torch`` or ``triton``.

    Raises:
        ArgumentError: the variable has another value. It is checked at the first use, so that imports do not fail.
    """
    if _forced.value not in variables.PATHS:
        raise ArgumentError(f"{_forced.name} must be one of {', '.join(variables.PATHS)}, not {_forced.value!r}")
    return _forced.value


def _path_on_gpu(x: Tensor, op: str, dim: int, world: int, sizes: Ints | None, shape: Ints | None) -> CopyPath:
    """Return ``torch`` for a GPU tensor below the crossover of the tuned table, else ``triton``; see ``path_for``."""
    limits = crossover(op, x.get_device())  # None without a tuned table
    if limits is None or (nbytes := x.nbytes) >= limits.most:
        return "triton"
    if nbytes < limits.least:
        return "torch"
    # The crossover depends on the bytes per access of the kernel. Only sizes between the smallest and the largest
    # crossover pay for computing them.
    unit = x.element_size()
    if op != "reduce":
        layout = (x.shape, x.stride()) if shape is None else (shape, None)
        unit = math.gcd(split_by(*layout, dim, world, sizes).unit(unit), x.data_ptr() & 15)  # gcd with 0 keeps the unit
    return "torch" if nbytes < limits.by_unit[unit] else "triton"


class SplitPass(NamedTuple):
    """The pass of one tensor that is split over the ranks along one dim, which has a kernel of its own.

    Attributes:
        split: of a tensor of these strides; for ``results`` of a contiguous one.
    """

    split: Split

    @property
    def elements(self) -> int:
        """Number of elements of the wire."""
        return math.prod(self.split.wire_shape)

    def pack(self, tensors: Sequence[Tensor]) -> PassResult:
        """Bring the tensor into a new wire, or view it as one; see ``pack``."""
        _range = profiler._is_profiler_enabled and record.profiler_range("pack")
        (x,), split = tensors, self.split
        if x.is_neg() or x.is_conj():  # the copy without the bits may have other strides
            return pack(resolved(x), split.dim, split.world, split.sizes)
        if split.is_wire:
            # torch 2.15's all-to-all splits dim 0, which may be a dim of size 1 in front of the one that is split here.
            is_flat = split.sizes is not None or split.shape[0] % split.world
            return PassResult(x.view(-1) if is_flat else x, "view", 0)
        if split.ranks is None:
            wire = x.new_empty(split.wire_shape)
        else:  # almost every call is an even split
            if path_for(x, "pack", split.dim, split.world) == "torch":
                return PassResult(x.as_strided(*split.ranks).contiguous(), "torch", 2 * x.nbytes)
            wire = x.new_empty(split.ranks[0])
            if copied := _plain_copy("pack", x, wire, split):
                return PassResult(wire, "triton", copied)
        return PassResult(wire, *_pack_into(wire, x, split))

    def unpack(self, wire: Tensor, tensors: Sequence[Tensor]) -> PassResult:
        """Bring the wire into a tensor of the split's shape and any strides."""
        split = self.split
        return unpack(wire, split.shape, split.dim, split.world, split.sizes, out=tensors[0])

    def results(self, wire: Tensor, shapes: Sequence[Ints] = ()) -> Results:
        """Unpack the wire into a new contiguous tensor, whose shape is the split's."""
        _range = profiler._is_profiler_enabled and record.profiler_range("unpack")
        split = self.split
        if split.gathered is None or not wire.is_contiguous():
            out = wire.new_empty(split.shape)
        else:
            if path_for(wire, "unpack", split.dim, split.world, shape=split.shape) == "torch":
                return Results([_gathered(wire, split, split.gathered)], "torch", 2 * wire.nbytes)
            out = wire.new_empty(split.shape)
            if copied := _plain_copy("unpack", out, wire, split):
                return Results([out], "triton", copied)
        return Results([out], *_unpack_into(out, wire, split))


_even_pass = lru_cache(maxsize=8192)(lambda *layout: SplitPass(split_of(*layout)))


def split_pass(shape: Ints, dim: int, world: int, sizes: Ints | None = None, stride: Ints | None = None) -> SplitPass:
    """Return the pass of a tensor of this shape and stride (None: contiguous), split as ``pack`` splits."""
    layout = shape, stride, dim, world
    return _even_pass(*layout) if sizes is None else SplitPass(split_by(*layout, sizes))


def pack(
    x: Tensor,
    dim: int,
    world: int,
    sizes: Ints | None = None,
    *,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
) -> PassResult:
    """Put ``x`` into rank order: ``wire[w] = chunk w of x along dim``, by one pass over memory or none.

    Args:
        x: tensor of any shape and strides.
        dim: dim that is split over the ranks.
        world: number of ranks.
        sizes: size of ``dim`` on every rank; by default as ``torch.chunk`` splits, padded with zeros on the wire.
        dtype: dtype of the wire, ``x.dtype`` by default.
        scale: factor applied before the one rounding.
        out: wire to fill: ``[world, outer, run]``, or flat with ``sizes``. ``outer`` is the product of the dims before
            ``dim``, ``run`` the elements of a rank's chunk behind them. A new one by default.

    Returns:
        The wire, the path (view, torch or triton) and the bytes read plus written. The wire is a view of ``x`` if ``x``
        already is in rank order. A new one is ``[world, *shape[:dim], shape[dim]/world, *shape[dim+1:]]`` of an even
        split, ``[world, outer, run]`` of an uneven one, and flat of one by ``sizes``.

    Traffic: reads ``x`` once, writes the wire once.
    """
    if scale is None and out is None and (dtype is None or dtype is x.dtype):
        return split_pass(x.shape, dim, world, sizes, x.stride()).pack((x,))
    x = resolved(x)
    split, _range = split_pass(x.shape, dim, world, sizes, x.stride()).split, record.profiler_range("pack")
    wire = x.new_empty(split.wire_shape, dtype=dtype) if out is None else out
    return PassResult(wire, *_pack_into(wire, x, split, scale))


def _pack_into(wire: Tensor, x: Tensor, split: Split, scale: float | None = None) -> tuple[CopyPath, int]:
    """Pack ``x`` into a wire of any shape by ``pack_into``."""
    blocks = wire if split.sizes is not None else wire.view(split.world, split.outer, split.run)
    return pack_into(blocks, x, split, scale)


def pack_into(wire: Tensor, x: Tensor, split: Split, scale: float | None) -> tuple[CopyPath, int]:
    """Pack ``x`` into ``wire``; return the path (torch or triton) and the bytes read plus written.

    Args:
        wire: buffer ``[world, outer, run]``, or flat with ``sizes``.
        x: tensor of any strides.
        split: of ``x``, see ``split_of``.
        scale: factor applied before the one rounding; None for 1.
    """
    # ``walked`` is a split that kernels can walk by rows: this one, an equal one of fewer dims, or None.
    path, walked = path_for(x, "pack", split.dim, split.world, split.sizes), split.walked
    if walked is None or walked.rows is None or (walked is not split and not wire.is_contiguous()):
        _refuse_triton("pack", x, split.dim)  # raises only if triton is forced
        return "torch", _pack_blocks(wire, x, split, scale)
    if walked is not split:
        wire = wire.view(1, -1, walked.row)
    rows = x.as_strided(*walked.rows)
    if path == "triton":
        try:
            return path, kernels.pack(rows, wire, scale, sizes=walked.lengths)
        except TooLargeError as error:
            _leave_to_torch(error)  # raises only if triton is forced
    return "torch", torch_path.pack(rows, wire, scale, sizes=walked.lengths)


def unpack(
    wire: Tensor,
    shape: Sequence[int],
    dim: int,
    world: int,
    sizes: Ints | None = None,
    *,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> PassResult:
    """Concatenate the ranks' shards of a wire along ``dim``, by one pass over memory: the inverse of ``pack``.

    Args:
        wire: contiguous shards in rank order.
        shape: shape of the result.
        dim: dim along which the shards are concatenated.
        world: number of ranks.
        sizes: size of ``dim`` on every rank; by default as ``torch.chunk`` splits.
        dtype: dtype of the result, ``wire.dtype`` by default.
        scale: factor applied before the one rounding.
        out: tensor of ``shape``, of any strides, to fill. A new one by default.
        accumulate: add to ``out`` instead of overwriting it.

    Returns:
        The result, which is never a view of the wire; the path (torch or triton); the bytes read plus written.

    Traffic: reads the wire once, writes the result once, and reads it too when accumulating.
    """
    over = split_pass(tuple(shape), dim, world, sizes, None if out is None else out.stride())
    if out is None and scale is None and (dtype is None or dtype is wire.dtype):
        (out,), path, copied = over.results(wire)
        return PassResult(out, path, copied)
    split, _range = over.split, record.profiler_range("unpack")
    if out is None:
        out = wire.new_empty(split.shape, dtype=dtype)
    return PassResult(out, *_unpack_into(out, wire, split, scale, accumulate))


def _gathered(wire: Tensor, split: Split, layout: tuple[Ints, Ints, Ints | None]) -> Tensor:
    """Concatenate the shards of a contiguous, even wire by torch: ``cat`` where rows are short, else one strided copy.

    Args:
        layout: ``split.gathered``.
    """
    size, stride, shards = layout
    if shards is None:
        return wire.as_strided(size, stride).clone(memory_format=torch.contiguous_format)
    if wire.nbytes >= _CAT_BYTES and split.row * wire.itemsize <= _CAT_ROW:  # a strided copy takes its time per run
        return torch.cat((wire if wire.shape == shards else wire.view(shards)).unbind(0), split.dim)
    return wire.as_strided(size, stride).reshape(split.shape)


def _unpack_into(
    out: Tensor, wire: Tensor, split: Split, scale: float | None = None, accumulate: bool = False
) -> tuple[CopyPath, int]:
    """Unpack a wire of any shape; return the path and the bytes copied."""
    wire = wire.reshape((split.world, split.outer, split.run) if split.sizes is None else (-1,))
    path = path_for(out, "unpack", split.dim, split.world, split.sizes)
    if split.rows is None:
        _refuse_triton("unpack", out, split.dim)  # raises only if triton is forced
        return "torch", _unpack_blocks(wire, out, split, scale, accumulate)
    rows = out.as_strided(*split.rows)
    if path == "triton":
        try:
            return path, kernels.unpack(wire, rows, scale, accumulate=accumulate, sizes=split.lengths)
        except TooLargeError as error:
            _leave_to_torch(error)  # raises only if triton is forced
    return "torch", torch_path.unpack(wire, rows, scale, accumulate=accumulate, sizes=split.lengths)


def _refuse_triton(name: str, x: Tensor, dim: int) -> None:
    """Raise if the path ``triton`` is forced: no kernel reads ``x`` split along ``dim``."""
    if _forced.value == "triton":
        raise UnsupportedError(
            f"{name}: path triton is forced, but no kernel walks shape {tuple(x.shape)} with strides {x.stride()} "
            f"split along dim {dim} (more than three outer dims, or a row that one stride cannot walk)"
        )


def _leave_to_torch(error: TooLargeError) -> None:
    """Return, so that torch copies a tensor too large for the kernels' integers; raise if ``triton`` is forced."""
    if _forced.value == "triton":
        raise UnsupportedError(f"path triton is forced, but {error}") from error


def reduce(
    wire: Tensor, *, dtype: torch.dtype | None = None, scale: float | None = None, out: Tensor | None = None
) -> PassResult:
    """Sum the ranks' parts of a wire in rank order: ``out = (wire[0] + wire[1] + ...) * scale``.

    The sum is in fp32, with one rounding at the end.

    Args:
        wire: ``[world, ...]``, each part contiguous.
        dtype: dtype of the result, ``wire.dtype`` by default.
        scale: factor applied to the sum.
        out: contiguous tensor of shape ``wire.shape[1:]`` to fill. A new one by default.

    Returns:
        The sum, the path (torch or triton) and the bytes read plus written.

    Traffic: reads the wire once, writes the result once.
    """
    _range = profiler._is_profiler_enabled and record.profiler_range("reduce")
    if out is None:
        out = wire.new_empty(wire.shape[1:]) if dtype is None else wire.new_empty(wire.shape[1:], dtype=dtype)
    flat, total = wire, out
    if wire.dim() != 2:  # each part contiguous, while the parts may be apart
        flat = wire.flatten(1) if wire.dim() > 2 else wire[:, None]
        total = out.view(-1)
    if path_for(wire, "reduce") == "triton":
        try:
            return PassResult(out, "triton", kernels.reduce(flat, total, scale))
        except TooLargeError as error:
            _leave_to_torch(error)  # raises only if triton is forced
    return PassResult(out, "torch", torch_path.reduce(flat, total, scale))


def contiguous(x: Tensor) -> tuple[Tensor, int]:
    """Return ``x``, copied by torch if it is strided or has lazy bits, and the bytes that this copied."""
    if x.is_neg() or x.is_conj():
        return resolved(x).contiguous(), 2 * x.nbytes
    return (x, 0) if x.is_contiguous() else (x.contiguous(), 2 * x.nbytes)


def has_lazy(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor has a lazy conjugate or negative bit: its memory is not its values."""
    for x in tensors:  # noqa: SIM110  (a generator takes three times as long)
        if x.is_neg() or x.is_conj():
            return True
    return False


def resolved(x: Tensor) -> Tensor:
    """Return ``x`` itself if it has no lazy conjugate or negative bit, else a copy with the values computed."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def dense(x: Tensor) -> Tensor:
    """Return ``x`` itself if its memory is that of a contiguous tensor without lazy bits, else a copy or a view.

    For ``contiguous()`` the strides of dims of size 1 do not matter; a view as another dtype and kernels read them.
    """
    x = resolved(x).contiguous()
    # Uncached: numbers of rows may be new in every call.
    return x.as_strided(x.shape, contiguous_stride.__wrapped__(x.shape)) if 1 in x.shape else x


def reinterpreted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the memory of ``x``, made dense, as elements of another dtype, in the last dim."""
    return dense(x).view(dtype)


def _plain_copy(name: str, x: Tensor, wire: Tensor, split: Split) -> int:
    """Launch the kernel ``pack`` or ``unpack`` of an even copy without cast or scale between ``x`` and its wire.

    Returns the bytes copied; 0 if no kernel fits, and nothing was copied.
    """
    if wire.is_conj() or wire.is_neg():
        return 0
    # Almost every call is such a copy, so its launch is kept as a whole: no view of the tensor is made.
    key = name, x.get_device(), x.dtype, (x.data_ptr() | wire.data_ptr()) & 15
    prepared = split.launches.get(key)
    if prepared is None:
        prepared = split.launches[key] = _prepared(split, *key)
    launch, copied = prepared
    if launch is not None:
        launch(x, wire, 1.0)  # by the scale 1
    return copied


def _prepared(split: Split, name: str, device: int, dtype: torch.dtype, alignment: int) -> "tuple[Launch | None, int]":
    """Return the launch of ``_plain_copy`` and the bytes that it copies; (None, 0) if no kernel fits.

    Args:
        alignment: the last four bits of either address, combined by "or".
    """
    if split.rows is None or 0 in split.shape:
        return None, 0
    try:
        return kernels.plain_copy(name, device, dtype, alignment, *split.rows, split.world)
    except TooLargeError:
        return None, 0


def _pack_blocks(wire: Tensor, x: Tensor, split: Split, scale: float | None) -> int:
    """Pack ``x``, whose layout no kernel reads, by one strided torch copy per rank; return the bytes copied."""
    if scale is not None and not (x.dtype.is_floating_point and wire.dtype.is_floating_point):
        raise ArgumentError(f"pack: a scale needs floating point tensors, not {x.dtype} and {wire.dtype}")
    for block, shard in _blocks(wire, x, split):
        if scale is None:
            block.copy_(shard)
        else:
            # A scale takes a second pass, in fp32 at least, so that the value is rounded once. From fp64 to 16 bits it
            # is rounded twice, as in the kernels.
            wide = torch.promote_types(torch.promote_types(x.dtype, wire.dtype), torch.float32)
            value = shard.to(wide) * scale  # not in place: a shard of that type is the caller's memory
            block.copy_(value.float() if wide is torch.float64 and wire.itemsize == 2 else value)
    return x.nbytes + wire.nbytes


def _unpack_blocks(wire: Tensor, out: Tensor, split: Split, scale: float | None, accumulate: bool) -> int:
    """Unpack ``wire`` into ``out``, whose layout no kernel reads, by one strided copy per rank; return bytes copied."""
    if scale is not None or accumulate:
        raise UnsupportedError("unpack: scale and accumulate need a result whose split dims one stride can walk")
    for block, shard in _blocks(wire, out, split):
        shard.copy_(block)
    return out.nbytes + out.numel() * wire.element_size()


def _blocks(wire: Tensor, x: Tensor, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each rank (its part of ``wire``, its shard of ``x``), views of one shape; zero the wire's padding."""
    shape, dim, sizes = split.shape, split.dim, split.sizes
    step, start = -(-shape[dim] // split.world), 0  # ``step`` is the size of a full shard, which is rounded up
    for w in range(split.world):
        size = sizes[w] if sizes is not None else max(0, min(step, shape[dim] - start))
        shard = x.narrow(dim, start, size)
        if sizes is not None:
            index_elements = split.outer * (split.row // max(shape[dim], 1))  # of one index of the dim; 1: it is empty
            at = start * index_elements
            yield wire[at : at + shard.numel()].view(shard.shape), shard
        else:
            block = wire[w].view(*shape[:dim], step, *shape[dim + 1 :])
            if size < step:
                block.narrow(dim, size, step - size).zero_()
            yield block.narrow(dim, 0, size), shard
        start += size
