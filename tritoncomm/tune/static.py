"""Verdict on a candidate by its machine code, without a GPU: whether it may be used, and a cost.

    cost = instructions per 16 bytes * max(1, 64 KiB / bytes of loads in flight on one multiprocessor)

The instructions are those of one thread over the larger of what it loads and stores. Bytes in flight are the loads
issued before the first store, times the threads that fit by their registers; below 64 KiB (more than bandwidth times
latency asks for on any of the targets) a copy waits for memory. The cost orders candidates of one operation and unit on
one target. It is no time: caches, partial tiles and the memory system, which decide between close ones, are not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritoncomm_kernels.config import Config

from tritoncomm.tune.candidates import Candidate, candidates
from tritoncomm.tune.machine_code import TARGETS, Build, Code, build_all, compiled_kernels

__all__ = ["COST", "Check", "Verdict", "checks", "fault", "judge", "rank", "resident"]

COST = "instructions per 16 bytes x max(1, 65536 / bytes of loads in flight per multiprocessor)"
_IN_FLIGHT = 65536
_ELEMENT = {16: ("i64", 2), 8: ("i64", 1), 4: ("i32", 1), 2: ("i16", 1), 1: ("i8", 1)}
_SUMMED = {8: "fp64", 4: "fp32", 2: "bf16", 1: "i8"}
_SIZE = {"i64": 8, "i32": 4, "i16": 2, "i8": 1, "fp32": 4, "bf16": 2}
_GRANULE = 8  # in which threads get registers
# ptxas spills a few bytes of its own accord, for more programs at a time: 10 of a sum of 16 parts on sm_90, which an
# H200 ran at 0.94 of the copy roof.
_SPILLED = 16


@dataclass(frozen=True)
class Verdict:
    """Machine code of one candidate on one target.

    Attributes:
        pruned: reason against its use, empty if it may be used.
        cost: the static cost, lower is better.
        registers: vector registers per thread.
        spills: bytes or registers in local memory.
        widths: bytes of the accesses that occur.
        loads_in_flight: loads of a thread before its first store.
        bytes_in_flight: of one multiprocessor.
    """

    pruned: str
    cost: float
    instructions_per_16_bytes: float
    registers: int
    spills: int
    widths: list[int]
    loads_in_flight: int
    bytes_in_flight: int


@dataclass(frozen=True)
class Check:
    """One kernel that has to compile well with a tile.

    Attributes:
        width: bytes that every load and store should have, 0 if any will do.
        budget: registers a thread may have.
    """

    name: str
    build: Build
    width: int
    budget: int


def checks(op: str, unit: int, config: Config) -> list[Check]:
    """Return the checks of one tile: the plain operation first, then casts and sums that move in the same unit."""
    import triton.language as tl  # commands import this module where there is no Triton

    kernels = compiled_kernels()
    # A thread may have 64 registers where accesses are 4 bytes and wider, 128 otherwise and where parts are summed.
    # Sums of 16 parts may have any number, as one of the targets loads all parts ahead.
    if op == "reduce":
        # The ``unit`` of a sum is an element; its accesses have 16 bytes in any case.
        kernel = kernels["reduction"]._reduce_kernel
        return [
            Check("reduce", _sum(kernel, unit, parts=8, config=config), width=16, budget=128),
            Check("reduce of 16 parts", _sum(kernel, unit, parts=16, config=config), width=16, budget=512),
        ]
    kernel, unpack = kernels["address"]._copy_kernel, op == "unpack"
    element, vec = _ELEMENT[unit]
    build = _address(kernel, (element, element), vec, config, UNPACK=unpack)
    plain = Check(op, build, width=unit, budget=64 if unit >= 4 else 128)
    if unit != 16:
        return [plain]
    if op == "pack":
        cast = _address(kernel, ("fp32", "bf16"), 8, config, WIDE=tl.float32)
        return [plain, Check("pack fp32 to bf16", cast, width=16, budget=64)]
    summed = _address(kernel, ("fp32", "fp32"), 4, config, UNPACK=True, WIDE=tl.float32, ACCUMULATE=True)
    return [plain, Check("unpack and accumulate fp32", summed, width=16, budget=64)]


def _sum(kernel: Any, unit: int, parts: int, config: Config) -> Build:
    """Return the build of a reduce of ``parts`` parts with elements of ``unit`` bytes."""
    import triton.language as tl  # commands import this module where there is no Triton

    kind, vec = _SUMMED[unit], 16 // unit
    constants = {
        "VEC": vec, "PARTS": parts, "CHUNK": 0, "WIDE": {8: tl.float64, 1: tl.int8}.get(unit, tl.float32),
        "HAS_SCALE": False, "TAIL": False, "BLOCK": max(config.block_cols // unit, vec),
    }  # fmt: skip
    types = {"wire_ptr": f"*{kind}", "out_ptr": f"*{kind}", "scale": "fp32"}
    return Build(kernel, types, constants, config.num_warps)


def _address(kernel: Any, kinds: tuple[str, str], vec: int, config: Config, **changed: Any) -> Build:
    """Return the build of a pack or unpack with rows and wire of ``kinds``."""
    constants = {
        "VEC": vec, "OUTER_DIMS": 1, "STRIDED": False, "UNPACK": False, "WIDE": None, "HAS_SCALE": False,
        "ACCUMULATE": False, "EVICT_FIRST": config.evict_first, "BLOCK_ROWS": config.block_rows,
        "BLOCK_COLS": max(config.block_cols // max(_SIZE[kind] for kind in kinds), vec),
    }  # fmt: skip
    types = {"rows_ptr": f"*{kinds[0]}", "wire_ptr": f"*{kinds[1]}", "scale": "fp32"}
    return Build(kernel, types, constants | changed, config.num_warps)


def fault(code: Code, check: Check) -> str:
    """Return the reason why machine code is not good enough; empty if it is."""
    widths = sorted({*code.loads, *code.stores})
    if code.spills > _SPILLED:
        return f"{check.name}: spills {code.spills}"
    if code.registers > check.budget:
        return f"{check.name}: {code.registers} registers, more than {check.budget}"
    if check.width and widths != [check.width]:
        return f"{check.name}: accesses of {', '.join(map(str, widths))} bytes, not {check.width}"
    return ""


def judge(op: str, unit: int, tried: Sequence[Candidate], target: str) -> list[Verdict]:
    """Compile candidates for a target, and return their verdicts in order."""
    lists = [checks(op, unit, candidate.config(op, unit)) for candidate in tried]
    codes = iter(build_all([check.build for mine in lists for check in mine], target))
    verdicts = []
    for candidate, mine in zip(tried, lists, strict=True):
        read = [(next(codes), check) for check in mine]
        pruned = next(filter(None, (fault(code, check) for code, check in read)), "")
        verdicts.append(_verdict(read[0][0], candidate.num_warps, pruned, target))
    return verdicts


def _verdict(code: Code, warps: int, pruned: str, target: str) -> Verdict:
    """Return the verdict by the plain operation's machine code; ``pruned`` is the reason against its use, or empty."""
    # ``loads`` and ``stores`` have the bytes of each access.
    per_16 = code.instructions * 16 / max(sum(code.loads), sum(code.stores), 1)
    # Loads that a thread starts before it uses the first value. Their bytes, in all resident threads, hide the latency
    # of the memory. Where they are too few the cost grows in proportion.
    loads_before_use = code.loads[: code.loads_first]
    in_flight = resident(code.registers, warps, target) * sum(loads_before_use)
    cost = per_16 * max(1.0, _IN_FLIGHT / max(in_flight, 1))
    return Verdict(
        pruned=pruned,
        cost=round(cost, 2),
        instructions_per_16_bytes=round(per_16, 2),
        registers=code.registers,
        spills=code.spills,
        widths=sorted({*code.loads, *code.stores}),
        loads_in_flight=code.loads_first,
        bytes_in_flight=in_flight,
    )


def resident(registers: int, warps: int, target: str) -> int:
    """Return the threads of a kernel that one multiprocessor holds at a time."""
    limits = TARGETS[target]
    threads = warps * limits.warp_size
    each = -(-max(registers, 1) // _GRANULE) * _GRANULE
    return min(limits.threads // threads, limits.registers // (each * threads), limits.programs) * threads


def rank(op: str, unit: int, verdicts: dict[str, Verdict], target: str) -> list[Candidate]:
    """Return the candidates that may be used, cheapest first; ties go to fewer registers, then smaller tiles."""
    tried = candidates(op, unit, TARGETS[target].warp_size)
    usable = [one for one in tried if one.label in verdicts and not verdicts[one.label].pruned]
    return sorted(usable, key=lambda one: (verdicts[one.label].cost, verdicts[one.label].registers, one))
