"""Cross-compiles kernels without a GPU and counts what is in the machine code."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_AMD_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "b128": 16, "b64": 8, "b32": 4}


@dataclass(frozen=True)
class Code:
    """What one compiled kernel does per thread.

    Attributes:
        loads: bytes of every load from device memory, in order.
        stores: bytes of every store to device memory.
        loads_first: loads issued before the first store.
        registers: vector registers per thread.
        spills: bytes or registers that live in local memory.
    """

    loads: list[int]
    stores: list[int]
    loads_first: int
    registers: int
    spills: int


@lru_cache(maxsize=1)
def compiled_kernels() -> dict[str, ModuleType]:
    """The kernel modules once more, not interpreted, under names of their own."""
    folder = Path(__file__).parents[1] / "kernels" / "tritoncomm_kernels"
    modules: dict[str, ModuleType] = {}
    shadowed = {name: sys.modules[name] for name in list(sys.modules) if name.startswith("tritoncomm_kernels")}
    try:
        for name in shadowed:
            del sys.modules[name]
        with knobs.runtime.scope():
            knobs.runtime.interpret = False
            spec = importlib.util.spec_from_file_location(
                "tritoncomm_kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
            assert spec is not None
            assert spec.loader is not None
            package = importlib.util.module_from_spec(spec)
            sys.modules["tritoncomm_kernels"] = package
            spec.loader.exec_module(package)
        modules = {name.rpartition(".")[2]: sys.modules[name] for name in sys.modules if "tritoncomm_kernels." in name}
    finally:
        for name in [name for name in sys.modules if name.startswith("tritoncomm_kernels")]:
            del sys.modules[name]
        sys.modules.update(shadowed)
    return modules


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], target: str, warps: int = 4) -> Code:
    """Compile with 16-byte aligned pointers, as the launcher does, and read the machine code."""
    names = kernel.arg_names
    signature = {name: types.get(name, "i32") if name not in constants else "constexpr" for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    return _amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _nvidia(compiled.asm["cubin"])


def _nvidia(cubin: bytes) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        text = _run("nvdisasm", "-c", file.name)
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
    finally:
        os.unlink(file.name)
    operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)", text)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    local = sum(operation.startswith(("LDL", "STL")) for operation in operations)
    return _code(operations, ("LDG", "STG"), _nvidia_width, int(found[1]), int(found[2]) + local)


def _nvidia_width(operation: str) -> int:
    wide = re.search(r"\.(128|64)\b", operation)
    if wide:
        return int(wide[1]) // 8
    narrow = re.search(r"\.[US](8|16)\b", operation)
    return int(narrow[1]) // 8 if narrow else 4


def _amd(text: str) -> Code:
    operations = re.findall(r"^\s+((?:global|buffer|flat)_(?:load|store)_\w+)", text, flags=re.MULTILINE)
    registers, spills = (re.search(rf"\.{key}:\s*(\d+)", text) for key in ("vgpr_count", "vgpr_spill_count"))
    assert registers is not None
    assert spills is not None
    short = [re.sub(r"^\w+?_(load|store)", r"\1", operation) for operation in operations]
    return _code(short, ("load", "store"), _amd_width, int(registers[1]), int(spills[1]))


def _amd_width(operation: str) -> int:
    kind = operation.partition("_")[2]
    if kind in _AMD_WIDTHS:
        return _AMD_WIDTHS[kind]
    return 1 if "byte" in kind or kind in ("u8", "i8", "b8") else 2


def _code(operations: list[str], names: tuple[str, str], width: Any, registers: int, spills: int) -> Code:
    memory = [operation for operation in operations if operation.startswith(names)]
    kinds = [operation.startswith(names[0]) for operation in memory]
    loads = [width(operation) for operation, is_load in zip(memory, kinds, strict=True) if is_load]
    stores = [width(operation) for operation, is_load in zip(memory, kinds, strict=True) if not is_load]
    first_store = kinds.index(False) if False in kinds else len(kinds)
    return Code(loads, stores, sum(kinds[:first_store]), registers, spills)


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout
