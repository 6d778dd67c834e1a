"""Machine code of the kernels, cross-compiled without a GPU: its accesses, registers and instructions."""

import importlib
import math
import pkgutil
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from tritoncomm_kernels import installed_triton

__all__ = ["TARGETS", "Build", "Code", "Target", "build_all", "can_read", "compiled_kernels"]


@dataclass(frozen=True)
class Target:
    """A GPU architecture to compile for, and the capacity of one of its multiprocessors.

    Attributes:
        arch: Triton's name of it.
        raw: the disassembler's name of it, for ``cuda``.
        threads, programs: threads and programs at most.
        registers: registers of 32 bits.
    """

    backend: str
    arch: int | str
    warp_size: int
    raw: str = ""
    threads: int = 2048
    programs: int = 32
    registers: int = 65536


TARGETS = {
    "sm_80": Target("cuda", 80, 32, "SM80"),
    "sm_89": Target("cuda", 89, 32, "SM89", threads=1536, programs=24),
    "sm_90": Target("cuda", 90, 32, "SM90a"),
    "sm_100": Target("cuda", 100, 32, "SM100a"),
    "sm_103": Target("cuda", 103, 32, "SM103a"),
    "sm_120": Target("cuda", 120, 32, "SM120a", threads=1536, programs=24),
    "gfx90a": Target("hip", "gfx90a", 64, registers=4 * 512 * 64),
    "gfx942": Target("hip", "gfx942", 64, registers=4 * 512 * 64),
    "gfx950": Target("hip", "gfx950", 64, registers=4 * 512 * 64),
}
_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "b128": 16, "b64": 8, "b32": 4}


@dataclass(frozen=True)
class Build:
    """One kernel to compile.

    Attributes:
        kernel: a ``triton.jit`` function that is not interpreted (see ``compiled_kernels``).
        types: Triton's names of the argument types, ``*i64`` for a pointer; ``i32`` by default.
        divisible: names of integers that are multiples of 16, which an ordinary launch detects; pointers all are.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    divisible: tuple[str, ...] = ()


@dataclass(frozen=True)
class Code:
    """Accesses, registers and instructions of one compiled kernel, per thread.

    Attributes:
        loads, stores: bytes of every load from, and store to, device memory, in order.
        loads_first: loads issued before the first store.
        registers: vector registers per thread.
        spills: bytes or registers that live in local memory.
        instructions: all instructions of the kernel, padding left out.
        coalesced: the lanes of a warp have neighbouring elements of a row, in every load and store, as far as is seen.
    """

    loads: list[int]
    stores: list[int]
    loads_first: int
    registers: int
    spills: int
    instructions: int
    coalesced: bool = True


@lru_cache(maxsize=1)
def compiled_kernels() -> dict[str, ModuleType]:
    """Import the kernel modules once more, not interpreted whatever TRITON_INTERPRET is; return them by short names."""
    installed_triton.require()
    from triton import knobs  # commands import this module where there is no Triton

    shadowed = {name: sys.modules[name] for name in list(sys.modules) if name.startswith("tritoncomm_kernels")}
    try:
        for name in shadowed:
            del sys.modules[name]
        with knobs.runtime.scope():
            knobs.runtime.interpret = False
            package = importlib.import_module("tritoncomm_kernels")
            for module in pkgutil.iter_modules(package.__path__, "tritoncomm_kernels."):
                importlib.import_module(module.name)
        return {name.rpartition(".")[2]: sys.modules[name] for name in sys.modules if "tritoncomm_kernels." in name}
    finally:
        # The program's own modules come back, so that nobody else meets the second import.
        for name in [name for name in sys.modules if name.startswith("tritoncomm_kernels")]:
            del sys.modules[name]
        sys.modules.update(shadowed)


def build_all(builds: Sequence[Build], target: str) -> list[Code]:
    """Compile with 16-byte aligned pointers, as the launcher does, and read the machine code."""
    assembled = [_compile(one, target) for one in builds]
    if TARGETS[target].backend == "hip":
        codes = [_amd(asm["amdgcn"]) for asm in assembled]
    else:
        # One disassembler run reads all kernels, because most of its time is its start.
        codes = _nvidia([asm["cubin"] for asm in assembled], TARGETS[target].raw)
    return [replace(code, coalesced=_coalesced(asm["ttgir"])) for code, asm in zip(codes, assembled, strict=True)]


def _compile(one: Build, target: str) -> dict[str, Any]:
    """Compile a kernel for a target, and return its stages by Triton's names: ``ttgir``, ``cubin`` or ``amdgcn``."""
    import triton  # commands import this module where there is no Triton
    from triton.backends.compiler import GPUTarget  # likewise
    from triton.compiler import ASTSource  # likewise

    names = one.kernel.arg_names
    signature = {name: one.types.get(name, "i32") if name not in one.constants else "constexpr" for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in one.divisible]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    values = {(names.index(name),): value for name, value in one.constants.items()}
    source = ASTSource(one.kernel, signature, constexprs=values, attrs=attributes)
    options = {"num_warps": one.warps, "enable_fp_fusion": False}
    gpu = TARGETS[target]
    return triton.compile(source, target=GPUTarget(gpu.backend, gpu.arch, gpu.warp_size), options=options).asm


def _coalesced(text: str) -> bool:
    """Whether the lanes of a warp are along the rows of every tile that is read or written, in Triton's GPU dialect."""
    # Like ``#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [2, 16], ...``
    layout = r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\]"
    layouts = {
        name: ([int(n) for n in per_thread.split(",")], [int(n) for n in per_warp.split(",")])
        for name, per_thread, per_warp in re.findall(layout, text, re.MULTILINE)
    }
    # Like ``tt.load %3, %4 : tensor<32x64x!tt.ptr<f32>, #blocked>``
    access = r"(?:tt|amdg|amdgpu)\.(?:buffer_)?(?:load|store) .*tensor<([\dx]+)x(?:!tt\.ptr<)?\w+>?, (#\w+)>"
    tiles = re.findall(access, text)
    for shape, name in tiles:
        if name not in layouts:
            return False
        columns, (per_thread, per_warp) = int(shape.split("x")[-1]), layouts[name]
        lanes_along_row, lanes_of_warp = per_warp[-1], math.prod(per_warp)
        lanes_that_fit = columns // per_thread[-1]
        if lanes_along_row < min(lanes_of_warp, lanes_that_fit):
            return False
    return bool(tiles)


def _nvidia(cubins: Sequence[bytes], architecture: str) -> list[Code]:
    """Read the machine code of several kernels, by one call of the disassembler, which takes long to start.

    Args:
        architecture: the disassembler's name of the target.
    """
    texts = [_text_section(cubin) for cubin in cubins]
    with tempfile.TemporaryDirectory() as folder:
        raw, usages = Path(folder) / "raw", []
        for cubin in cubins:
            (Path(folder) / "cubin").write_bytes(cubin)
            usage = _run("cuobjdump", "--dump-resource-usage", f"{folder}/cubin")
            usages += re.findall(r"REG:(\d+) STACK:(\d+)", usage)
        raw.write_bytes(b"".join(texts))
        listing = _run("nvdisasm", "-ndf", "-b", architecture, str(raw))
    # Like ``/*0070*/  @!P0 LDG.E.128 R4, [R2.64] ;``
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing)
    operations = [(int(address, 16), operation) for address, operation in lines]
    codes, start = [], 0  # ``start`` is the address of a kernel among the texts of all, one after the other
    for text, (registers, stack) in zip(texts, usages, strict=True):
        mine = [name for address, name in operations if start <= address < start + len(text) and name != "NOP"]
        assert mine
        local_accesses = sum(operation.startswith(("LDL", "STL")) for operation in mine)
        spills = int(stack) + local_accesses
        codes.append(_code(mine, ("LDG", "STG"), _nvidia_width, int(registers), spills, len(mine)))
        start += len(text)
    return codes


def _text_section(cubin: bytes) -> bytes:
    """Return the machine code in a 64-bit ELF file: its section named ``.text.<kernel>``."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    # A header is (name, type, flags, address, offset, length); ``names`` is the section of the names.
    headers = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    strings = headers[names][4]
    sections = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin[strings + name :].startswith(b".text.")
    ]
    assert len(sections) == 1
    return sections[0]


def _nvidia_width(operation: str) -> int:
    """Return the bytes of a load or store: ``LDG.E.128`` has 16, ``LDG.E.U8`` 1, one without a number 4."""
    wide = re.search(r"\.(128|64)\b", operation)
    if wide:
        return int(wide[1]) // 8
    narrow = re.search(r"\.[US](8|16)\b", operation)
    return int(narrow[1]) // 8 if narrow else 4


def _amd(text: str) -> Code:
    """Read the assembly of one kernel, and the registers in the metadata behind it."""
    body = text.partition(".section")[0]
    every = re.findall(r"^\t([a-z]\w+)", body, flags=re.MULTILINE)
    memory = re.findall(r"^\t(?:global|buffer|flat)_((?:load|store)_\w+)", body, flags=re.MULTILINE)
    registers, spills = (int(re.findall(rf"\.{key}:\s*(\d+)", text)[0]) for key in ("vgpr_count", "vgpr_spill_count"))
    count = len([operation for operation in every if operation not in ("s_nop", "s_code_end")])
    return _code(memory, ("load", "store"), _amd_width, registers, spills, count)


def _amd_width(operation: str) -> int:
    """Return the bytes of a load or store: ``load_dwordx4`` has 16, ``load_ubyte`` 1, an unknown one 2."""
    kind = operation.partition("_")[2]
    if kind in _AMD_WIDTHS:
        return _AMD_WIDTHS[kind]
    return 1 if "byte" in kind or kind in ("u8", "i8", "b8") else 2


def _code(
    operations: list[str], names: tuple[str, str], width: Any, registers: int, spills: int, instructions: int
) -> Code:
    """Make the ``Code`` of a kernel from its operations in order; ``names`` are the starts of its loads and stores."""
    loads, stores = ([width(one) for one in operations if one.startswith(name)] for name in names)
    # True for a load and False for a store, so that ``takewhile`` ends at the first store.
    memory = (one.startswith(names[0]) for one in operations if one.startswith(names))
    return Code(loads, stores, sum(takewhile(bool, memory)), registers, spills, instructions)


def can_read(target: str) -> bool:
    """Whether the tools that read machine code of a target are installed; Triton brings NVIDIA's."""
    return TARGETS[target].backend == "hip" or all((_tools() / name).is_file() for name in ("nvdisasm", "cuobjdump"))


def _tools() -> Path:
    """Return the folder of NVIDIA's tools in the package of Triton."""
    import triton  # commands import this module where there is no Triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _run(tool: str, *arguments: str) -> str:
    """Run one of NVIDIA's tools, and return what it prints; raise if it fails."""
    return subprocess.run([_tools() / tool, *arguments], capture_output=True, text=True, check=True).stdout
