"""Prepared launch: one compiled variant per kind of call, called directly for about 2 us of host time.

``fn[grid](...)`` inspects every argument on every call (about 20 us). These kernels do not depend on the values:
integers are never specialised, and no access is wider than the host proved aligned. So the variant is looked up once,
and its ``run`` is called with raw pointers, past the Python in front of Triton's C launcher if that launcher is known.
The ordinary launch remains for the interpreter, for profilers that hook launches, for a current device that is not the
tensors', and for a Triton with an unknown launcher.
"""

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel

from tritoncomm_kernels.config import Config, config_for, device_key, lanes_of, tile_for
from tritoncomm_kernels.device_table import Content, Table, table_of
from tritoncomm_kernels.geometry import TooLargeError
from tritoncomm_kernels.numerics import INTERPRETED as _CONSTANT

_NAMES = ("int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
INTERPRETED = bool(_CONSTANT)  # asking the constant itself is a call
TRITON_TYPE: dict[torch.dtype, Any] = {getattr(torch, name): getattr(tl, name) for name in _NAMES}
# Triton's launcher is private, and its argument list changes between releases. The direct launch bypasses the two
# functions below and is taken only if their source has a known hash. A version number is no proof: NVIDIA's containers
# and ROCm's torch have builds of one number that differ. Tested with Triton 3.6, 3.7, 3.8 and 3.9.
# Missing public API: a call of a compiled kernel with raw pointers on a given stream. The public ``kernel[grid](...)``
# takes about 20 us.
# Expires: once such a call exists, or ``kernel[grid](...)`` takes less than 5 us, delete these tables, ``Variant``,
# ``_entry``, ``_known_calls`` and ``is_direct``. Until then a new release of Triton gets the ordinary launch, and
# ``tritoncomm doctor`` says so, until somebody compares its two functions and adds their hashes here.
_CALLS_RUN = "77d60bb58759c35a"  # CompiledKernel.__getitem__ of 3.6 to 3.9
_CALLS_C = {  # CudaLauncher.__call__, and whether the kernel's arguments go as one tuple
    "9412a64d532d5b5c": False,  # 3.6
    "152cac5293645963": True,  # 3.7
    "6afde16b206e5650": True,  # 3.8
    "7858736667eaebc1": True,  # 3.9
}
_HIP_THREADS = 2**32  # a launch of HIP has fewer threads
_INTERPRETED_TILE = 128 * 1024
_LIMIT = 2**31 - 2**20  # a tile may reach past the last row and column by its own size

# Two integers for every launch. Public are torch.cuda.current_device(), which initializes CUDA lazily, and
# torch.cuda.current_stream(), which makes an object (torch 2.11 to 2.13).
_current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel on one device: ``run(grid, 1, 1, stream, *fixed, *arguments)``.

    Attributes:
        fixed: arguments between the stream and the kernel's arguments.
        packed: whether the kernel's arguments go as one tuple.
        compiled: referenced, because Triton unloads the module with it.
    """

    run: Callable[..., None]
    fixed: tuple[Any, ...]
    packed: bool
    compiled: Any


_variants: dict[tuple[Any, ...], Variant | None] = {}


@dataclass
class Launch:
    """A call of a kernel, prepared for any pointers and any scale.

    Attributes:
        grid: number of programs where a call gives none.
        kernel: the ``triton.jit`` function: ``(first_ptr, second_ptr, scale, *more, *arguments, *constants)``, with a
            ``table_ptr`` after the first two if there is a table, and ``more`` as every call gives them.
        types: element types the kernel sees behind the two pointers.
        arguments: run-time integers.
        constants: compile-time arguments, in signature order.
        table: integers that the kernel reads on the device: a tuple as 32 bits each, which equal calls share.
    """

    kernel: Any
    device: int
    grid: int
    types: tuple[torch.dtype, torch.dtype]
    arguments: tuple[int, ...]
    constants: dict[str, Any]
    num_warps: int
    table: tuple[int, ...] | Content | None = None
    tail: tuple[Any, ...] = field(init=False)
    variants: dict[type, Variant | None] = field(init=False, default_factory=dict)
    resident: "Table | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.check_grid(self.grid)
        self.tail = (*self.arguments, *self.constants.values())

    def check_grid(self, grid: int) -> None:
        """Reject more programs than a launch may have."""
        if torch.version.hip:
            fits(self.kernel.__name__, (), grid * self.num_warps * lanes_of(self.device))

    def __call__(self, first: Tensor, second: Tensor, scale: float, *more: int, grid: int = 0) -> None:
        """Launch on the current stream of the tensors' device, by default with the prepared number of programs."""
        grid = grid or self.grid
        if not is_direct(self.device):
            self._launch_checked(first, second, scale, more, grid)
            return
        # Triton compiles an int and a float argument to different kernels.
        kind = scale.__class__
        if kind not in self.variants:
            self.variants[kind] = self._find_variant(scale, more)
        variant = self.variants[kind]
        if variant is None:
            self._launch_checked(first, second, scale, more, grid)
            return
        stream = _current_stream(self.device)  # pyright: ignore[reportOptionalCall]
        if self.table is None:
            arguments = (first.data_ptr(), second.data_ptr(), scale, *more, *self.tail)
        else:
            table_ptr = self.table_for(stream).data_ptr()
            arguments = (first.data_ptr(), second.data_ptr(), table_ptr, scale, *more, *self.tail)
        if variant.packed:  # from Triton 3.7 on a launcher takes the arguments as one tuple
            variant.run(grid, 1, 1, stream, *variant.fixed, arguments)
        else:
            variant.run(grid, 1, 1, stream, *variant.fixed, *arguments)

    def table_for(self, stream: int) -> Tensor:
        """Return the table on the device, for the current stream of the current device."""
        assert self.table is not None
        if self.resident is None:
            self.resident = table_of(self.table, self.device)
        return self.resident.on(stream)

    def _find_variant(self, scale: float, more: tuple[int, ...]) -> Variant | None:
        """Return the compiled variant, which launches of one kind share; None if it cannot be called directly."""
        key = (self.device, self.kernel, self.types, scale.__class__, self.num_warps, *self.constants.items())
        if key not in _variants:
            _variants[key] = self._compile(scale, more)
        return _variants[key]

    def _compile(self, scale: float, integers: tuple[int, ...]) -> Variant | None:
        """Compile for the current device without launching; the values of the integers do not matter."""
        sample = 2**40 if isinstance(scale, int) else scale  # a number that Triton takes for 64 bits
        # A dtype stands for a pointer: to 32-bit integers for a table that is a tuple, else to 64-bit ones.
        table = () if self.table is None else (torch.int32 if isinstance(self.table, tuple) else torch.int64,)
        compiled = self.kernel.warmup(
            *(*self.types, *table, sample, *integers, *self.arguments),
            grid=(1,),
            num_warps=self.num_warps,
            enable_fp_fusion=False,
            **self.constants,
        )
        if hasattr(compiled, "result"):  # a future, where Triton compiles asynchronously
            compiled = compiled.result()
        return _entry(compiled)

    def _launch_checked(self, first: Tensor, second: Tensor, scale: float, more: tuple[int, ...], grid: int) -> None:
        """Launch as Triton does, by ``kernel[grid](...)``: in the interpreter too."""
        with _quiet() if INTERPRETED else torch.cuda.device(self.device):
            pointers = [triton.reinterpret(x, TRITON_TYPE[t]) for x, t in zip((first, second), self.types, strict=True)]
            if self.table is not None:
                pointers.append(self.table_for(stream_of(self.device)))
            self.kernel[(grid,)](
                *(*pointers, scale, *more, *self.arguments),
                **self.constants,
                num_warps=self.num_warps,
                enable_fp_fusion=False,
            )


def _entry(compiled: Any) -> Variant | None:
    """Return the direct call of a compiled kernel: its C launcher if that is known, else ``run``, else None."""
    run, function, metadata = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
    if run is None or function is None or metadata is None:
        return None
    # The C launcher gets no scratch memory from here, so a kernel that needs some goes through ``run``.
    needs = [getattr(run, name, 1) for name in ("global_scratch_size", "profile_scratch_size")]
    packed = _CALLS_C.get(_source_hash(type(run).__call__))  # None: a launcher that is not known
    if packed is None or needs != [0, 0] or getattr(run, "gsan_enabled", False):
        return Variant(run, (function, metadata, None, None, None), packed=False, compiled=compiled)
    how = (function, run.launch_cooperative_grid, run.launch_pdl)
    no_scratch, no_launch_metadata, no_hooks = (None, None), None, (None, None)  # two memories, two hooks
    if not packed:
        fixed = (*how, *no_scratch, metadata, no_launch_metadata, *no_hooks)
        return Variant(run.launch, fixed, packed=False, compiled=compiled)
    kinds = (run.arg_annotations, run.kernel_signature)
    fixed = (*how, metadata, no_launch_metadata, *no_hooks, *no_scratch, *kinds)
    return Variant(run.launch, fixed, packed=True, compiled=compiled)


def launched(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch as Triton does, on the device of the first argument; Triton specialises integers by their values."""
    check_place(kernel.__name__, arguments[0])
    device = arguments[0].get_device()
    with _quiet() if INTERPRETED else torch.cuda.device(device):
        kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def stream_of(device: int) -> int:
    """Return the current stream of a device as an integer; 0 on the CPU."""
    if device < 0:
        return 0
    return torch.cuda.current_stream(device).cuda_stream if _current_stream is None else _current_stream(device)


def is_direct(device: int) -> bool:
    """Whether a compiled kernel may be called directly on ``device`` right now."""
    if device < 0 or INTERPRETED or _current_device is None or _current_stream is None or not _known_calls():
        return False
    # Profilers hook the ordinary launch, and would miss a direct one.
    runtime = knobs.runtime
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        return False
    return _current_device() == device


@lru_cache(maxsize=1)
def _known_calls() -> bool:
    """Whether Triton calls compiled kernels, and has hooks around them, as the direct launch assumes."""
    hooks = (getattr(knobs.runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook"))
    return _source_hash(CompiledKernel.__getitem__) == _CALLS_RUN and all(hasattr(hook, "calls") for hook in hooks)


@lru_cache(maxsize=16)
def _source_hash(function: Callable[..., Any]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a function's source; empty where it has none."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def launch_kind() -> str:
    """Return the launch on a GPU: ``C`` (into Triton's C launcher), ``run`` (through its Python), else ``ordinary``."""
    if not _known_calls():
        return "ordinary"
    if torch.version.hip:
        return "run"
    from triton.backends.nvidia.driver import CudaLauncher  # of the one backend that it is asked for

    return "C" if _source_hash(CudaLauncher.__call__) in _CALLS_C else "run"


def tile_on(
    device: int, op: str, unit_bytes: int, outer: int, cols_bytes: int, addresses_are_long: bool = False
) -> Config:
    """Return ``config_for`` on a device; in the interpreter a larger tile, because every program costs milliseconds."""
    if INTERPRETED:
        tile = tile_for(op, unit_bytes, outer, cols_bytes, _INTERPRETED_TILE, _INTERPRETED_TILE, Config.num_warps)
    else:
        tile = config_for(op, unit_bytes, outer, cols_bytes, **device_key(device), lanes=lanes_of(device))
    # A thread of narrow units has many addresses, which take registers: fewer rows, if they are long. The addresses of
    # unpack wait for the loads, and take more.
    if addresses_are_long and unit_bytes <= 2:
        most = (8 if op == "unpack" else 16) * unit_bytes * 32 * tile.num_warps
        return replace(tile, block_rows=max(min(tile.block_rows, most // tile.block_cols), 1))
    return tile


class RowsPlan(NamedTuple):
    """A launch over rows, whose numbers come with every call: they may be new in each.

    Attributes:
        rows: number of rows of a program.
        blocks: programs side by side in a row.
    """

    launch: Launch
    rows: int
    blocks: int

    def grid(self, name: str, rows: int, row: int) -> int:
        """Return the number of programs for ``rows`` rows of ``row`` units or elements, whichever the kernel counts."""
        grid = -(-rows // self.rows) * self.blocks
        fits(name, (rows, row, grid))
        self.launch.check_grid(grid)
        return grid


def tile_of_rows(unit_bytes: int, rows: int, row_bytes: int) -> Config:
    """Return the tile of rows by indices: unpack's without a device's tuned table."""
    # Addresses wait for the index, as unpack's wait for the wire.
    return tile_on(-1, "unpack", unit_bytes, rows, row_bytes, addresses_are_long=True)


def wire_order_tile(device: int, unit_bytes: int) -> Config:
    """Return the tile of a pack in the order of the wire: 32 bytes for every thread of 4 warps."""
    nbytes = _INTERPRETED_TILE if INTERPRETED else max(32, unit_bytes) * 4 * lanes_of(device)
    return Config(1, nbytes, 4)


def check_place(name: str, *tensors: Tensor) -> None:
    """Reject tensors no kernel can reach: on two devices, lazy views, or CPU tensors without the interpreter."""
    device = tensors[0].device
    for x in tensors:
        if x.device != device:
            raise ValueError(f"{name}: tensors are on {device} and {x.device}")
        if x.is_neg() or x.is_conj():
            raise ValueError(f"{name}: a lazy conjugate or negative view must be resolved first")
    if not tensors[0].is_cuda and not INTERPRETED:
        raise RuntimeError(f"{name}: {device} tensors need a GPU or TRITON_INTERPRET=1")


def fits(name: str, numbers: Iterable[int], threads: int = 0) -> None:
    """Reject sizes, strides, programs and (of a launch of HIP) threads that 32-bit integers cannot hold."""
    # Some Triton versions would truncate them silently.
    largest = max(numbers, default=0)
    if largest >= _LIMIT:
        raise TooLargeError(f"{name}: {largest} units do not fit the kernels' 32-bit integers")
    if threads >= _HIP_THREADS:
        raise TooLargeError(f"{name}: {threads} threads are more than a launch of HIP may have")


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore NumPy's warnings of overflow and NaN in the interpreter: kernels may meet both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
