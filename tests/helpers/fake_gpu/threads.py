"""Runs a program on the CPU: all threads of a launch at once, one numpy operation per instruction.

Covers what Triton makes of the kernels here and raises on anything else. Every access to device memory has to be
aligned to its own width and inside a buffer that was handed over. Threads that part at a branch meet again at the
smallest address; between barriers all of them run in step, so a missing barrier does not show.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from fake_gpu.arithmetic import BITS, OPERATIONS, SIGNED, UNSIGNED, Array, constant
from fake_gpu.program import Instruction, Program, PtxError

__all__ = ["Buffer", "run"]

_REGISTER = re.compile(r"%(p|rs|rd|r)(\d+)$")
_WIDTH = {"rs": 16, "r": 32, "rd": 64}


@dataclass
class Buffer:
    """Device memory: ``data`` as bytes, seen at ``address`` by the kernel."""

    address: int
    data: Array


def run(
    program: Program, grid: int, arguments: Mapping[str, int], buffers: Sequence[Buffer], shared_bytes: int = 0
) -> None:
    """Execute ``grid`` blocks.

    Args:
        program: what to run.
        grid: number of blocks along x.
        arguments: raw bits of every parameter, by name.
        buffers: all the memory there is.
        shared_bytes: shared memory of a block.

    Raises:
        PtxError: see there.
    """
    _Run(program, grid, arguments, buffers, shared_bytes).all()


@dataclass
class _Run:
    program: Program
    grid: int
    arguments: Mapping[str, int]
    buffers: Sequence[Buffer]
    shared_bytes: int
    registers: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        threads = self.program.threads
        self.count = self.grid * threads
        thread, block = (np.arange(self.count, dtype=np.uint32) % threads, np.arange(self.count) // threads)
        self.block = block
        self.special = {
            "%tid.x": thread,
            "%ctaid.x": block.astype(np.uint32),
            "%nctaid.x": np.full(self.count, self.grid, np.uint32),
            "%ntid.x": np.full(self.count, threads, np.uint32),
            "%laneid": thread % 32,
            "global_smem": np.zeros(self.count, np.uint32),
        }
        self.shared = np.zeros((self.grid, self.shared_bytes), np.uint8)

    def all(self) -> None:
        """One instruction after the other, each for the threads that are there."""
        at = np.zeros(self.count, np.int64)
        end = len(self.program.instructions)
        old = np.seterr(all="ignore")
        try:
            while True:
                here = int(at.min(initial=end))
                if here == end:
                    return
                active = at == here
                instruction = self.program.instructions[here]
                guarded = active & self._guard(instruction.guard)
                name = instruction.operation
                if name.startswith("bra"):
                    at[active] = here + 1
                    at[guarded] = self.program.labels[instruction.operands[0]]
                elif name == "brx.idx":
                    places = np.array(
                        [self.program.labels[one] for one in self.program.targets[instruction.operands[1]]]
                    )
                    at[active] = here + 1
                    at[guarded] = places[self.read(instruction.operands[0], "u32")[guarded]]
                elif name in ("ret", "exit"):
                    at[active] = here + 1
                    at[guarded] = end
                else:
                    self._step(instruction, guarded)
                    at[active] = here + 1
        finally:
            np.seterr(**old)

    def _guard(self, guard: str) -> Array | bool:
        if not guard:
            return True
        value = self.registers[guard.lstrip("!")]
        return ~value if guard.startswith("!") else value

    def _step(self, instruction: Instruction, active: Array) -> None:
        name, *kinds = instruction.operation.split(".")
        operands = instruction.operands
        if name in ("ld", "st") and kinds[0] in ("global", "shared", "shared::cta"):
            self._access(instruction, active)
        elif name in ("stmatrix", "ldmatrix"):
            self._move_matrices(instruction, active)
        elif name == "ld" and kinds[0] == "param":
            self._write(operands[0], self._param(operands[1][1:-1].strip(), kinds[1]), active)
        elif name == "bar" or name == "barrier":
            whole = active.reshape(self.grid, -1)
            if not (whole.all(1) | ~whole.any(1)).all():
                raise PtxError("a barrier that only some threads of a block reach")
        elif name == "redux":
            self._write(operands[0], self._reduced(kinds, operands), active)
        elif name == "shfl":
            self._write(operands[0], self._shuffled(kinds, operands), active)
        elif name == "mov" and operands[0].startswith("{"):
            low, high = operands[0].strip("{} ").replace(",", " ").split()
            value = self.read(operands[1], kinds[0])
            half = BITS[kinds[0]] // 2
            self._write(low, value & value.dtype.type(2**half - 1), active)
            self._write(high, value >> value.dtype.type(half), active)
        else:
            known = OPERATIONS.get(name)
            if known is None:
                raise PtxError(f"unknown instruction {instruction.operation}")
            self._write(operands[0], known(self, kinds, operands[1:]), active)

    def _param(self, name: str, kind: str) -> Array:
        bits = BITS[kind]
        value = np.asarray(self.arguments[name] & (2**bits - 1), np.uint64).astype(UNSIGNED[bits])
        wide = value.view(SIGNED[bits]).astype(np.int64) if kind[0] == "s" else value
        return np.broadcast_to(wide, self.count)

    def read(self, operand: str, kind: str) -> Array:
        """The bits of an operand as unsigned integers as wide as ``kind``; booleans for predicates."""
        if kind == "pred":
            return self.registers[operand] if operand[0] == "%" else np.full(self.count, operand != "0")
        bits = BITS[kind]
        if operand.startswith("{"):
            low, high = operand.strip("{} ").replace(",", " ").split()
            half = f"b{bits // 2}"
            parts = [self.read(part, half).astype(UNSIGNED[bits]) for part in (low, high)]
            return parts[0] | parts[1] << UNSIGNED[bits](bits // 2)
        if operand in self.special:
            value = self.special[operand]
        elif operand in self.registers:
            value = self.registers[operand]
        elif _REGISTER.match(operand):  # never written: half of a packed register that nobody needs
            value = np.full(self.count, 2**bits - 1, UNSIGNED[bits])
        elif operand.startswith("%"):
            raise PtxError(f"unknown register {operand}")
        else:
            value = np.broadcast_to(constant(operand, bits), self.count)
        return value.astype(UNSIGNED[bits])

    def _write(self, register: str, value: Array, active: Array) -> None:
        match = _REGISTER.match(register)
        kind = match[1] if match else ""
        if kind == "p":
            value = value.astype(bool)
        else:
            bits = _WIDTH.get(kind, value.dtype.itemsize * 8)  # inline assembly names registers as it likes
            if value.dtype.kind == "f":
                value = value.view(UNSIGNED[value.dtype.itemsize * 8])
            value = value.astype(SIGNED[bits]).view(UNSIGNED[bits]) if value.dtype.kind == "i" else value
            value = value.astype(UNSIGNED[bits])
        before = self.registers.get(register)
        self.registers[register] = value if before is None else np.where(active, value, before)

    def _address(self, text: str) -> Array:
        base, _, offset = text.strip("[] ").partition("+")
        at = self.read(base.strip(), "b64" if base.strip().startswith("%rd") else "b32")
        return at.astype(np.int64) + int(offset or 0)

    def _access(self, instruction: Instruction, active: Array) -> None:
        name, space, *kinds = instruction.operation.replace("::cta", "").split(".")  # its own block's memory
        lanes = next((int(kind[1:]) for kind in kinds if re.match(r"v\d", kind)), 1)
        kind = kinds[-1]
        memory, registers = (1, 0) if name == "ld" else (0, 1)
        targets = instruction.operands[registers].strip("{} ").replace(",", " ").split()
        if len(targets) != lanes:
            raise PtxError(f"{instruction.operation} with {len(targets)} registers")
        address, width = self._address(instruction.operands[memory])[active], BITS[kind] // 8
        if (address % (width * lanes)).any():
            raise PtxError(f"{instruction.operation} at an address that is no multiple of {width * lanes}")
        for i, target in enumerate(targets):
            if name == "ld":
                value = np.zeros(self.count, UNSIGNED[BITS[kind]])
                value[active] = self._load(space, address + i * width, width, active)
                self._write(target, value.view(SIGNED[BITS[kind]]) if kind[0] == "s" else value, active)
            else:
                self._store(space, address + i * width, self.read(target, kind)[active], width, active)

    def _move_matrices(self, instruction: Instruction, active: Array) -> None:
        """8 x 8 matrices of 16 bits: thread t has columns 2 (t % 4) and the next of row t // 4, with ``trans`` rows
        2 (t % 4) and the next of column t // 4. The address of row r is in thread r of the matrix's eighth of the warp.
        """
        name, _, _, shape, number, *rest = instruction.operation.split(".")
        if shape != "m8n8" or not active.all():
            raise PtxError(f"unknown instruction {instruction.operation}")
        at, registers = (1, 0) if name == "ldmatrix" else (0, 1)
        lane, address = np.arange(self.count), self._address(instruction.operands[at])
        if (address % 16).any():
            raise PtxError(f"{instruction.operation} at an address that is no multiple of 16")
        names = instruction.operands[registers].strip("{} ").replace(",", " ").split()
        for i, register in enumerate(names[: int(number[1:])]):
            first, row, pair = lane // 32 * 32 + 8 * i, lane % 32 // 4, 2 * (lane % 4)
            places = [address[first + pair + j] + 2 * row if "trans" in rest else address[first + row] + 2 * (pair + j)
                      for j in (0, 1)]  # fmt: skip
            if name == "ldmatrix":
                low, high = (self._load("shared", place, 2, active).astype(np.uint32) for place in places)
                self._write(register, low | high << 16, active)
            else:
                for j, place in enumerate(places):
                    half = (self.read(register, "b32") >> 16 * j).astype(np.uint16)
                    self._store("shared", place, half, 2, active)

    def _load(self, space: str, address: Array, width: int, active: Array) -> Array:
        if space == "shared":
            return self._shared(width)[self.block[active], self._inside(address, width)]
        out = np.zeros(len(address), UNSIGNED[width * 8])
        for chosen, data, index in self._places(address, width):
            out[chosen] = data[index]
        return out

    def _store(self, space: str, address: Array, value: Array, width: int, active: Array) -> None:
        if space == "shared":
            self._shared(width)[self.block[active], self._inside(address, width)] = value
            return
        for chosen, data, index in self._places(address, width):
            data[index] = value[chosen]

    def _shared(self, width: int) -> Array:
        return self.shared[:, : self.shared_bytes // width * width].view(UNSIGNED[width * 8])

    def _inside(self, address: Array, width: int) -> Array:
        if len(address) and not (address.min() >= 0 and address.max() + width <= self.shared_bytes):
            raise PtxError("an access outside shared memory")
        return address // width

    def _places(self, address: Array, width: int) -> Iterator[tuple[Array, Array, Array]]:
        """Which accesses go to which buffer, as elements of ``width`` bytes, and where in it."""
        found = np.zeros(len(address), bool)
        for buffer in self.buffers:
            first = -buffer.address % width
            data = buffer.data[first : first + (len(buffer.data) - first) // width * width]
            start = buffer.address + first
            chosen = (address >= start) & (address + width <= start + len(data))
            if chosen.any():
                found |= chosen
                yield chosen, data.view(UNSIGNED[width * 8]), (address[chosen] - start) // width
        if not found.all():
            at = int(address[~found][0])
            places = ", ".join(
                f"{at - buffer.address:+d} from a buffer of {len(buffer.data)}" for buffer in self.buffers
            )
            raise PtxError(f"an access outside, in bytes: {places}")

    def _shuffled(self, kinds: Sequence[str], operands: Sequence[str]) -> Array:
        value, lane = self.read(operands[1], "b32"), np.arange(self.count)
        if kinds[1] == "idx" and operands[3] == "31":
            return value[lane // 32 * 32 + (self.read(operands[2], "b32") & 31)]
        if kinds[1] == "up":  # the first lanes keep their values
            return value[np.where(lane % 32 >= int(operands[2]), lane - int(operands[2]), lane)]
        if kinds[1] != "bfly":
            raise PtxError(f"unknown instruction shfl.{'.'.join(kinds)}")
        return value[lane ^ int(operands[2])]

    def _reduced(self, kinds: Sequence[str], operands: Sequence[str]) -> Array:
        """The sum of integers, or the largest or smallest number, of each warp; NaN is left out."""
        reduce = _REDUX.get(".".join(kinds))
        if reduce is None or (self.read(operands[2], "b32") != 0xFFFFFFFF).any():
            raise PtxError(f"unknown instruction redux.{'.'.join(kinds)} of {operands[2]}")
        value = self.read(operands[1], kinds[-1])
        warps = (value.view(np.float32) if kinds[-1] == "f32" else value).reshape(-1, 32)
        return np.repeat(reduce(warps, axis=1).astype(warps.dtype), 32)


_REDUX = {"sync.add.s32": np.add.reduce, "sync.add.u32": np.add.reduce}
_REDUX |= {"sync.max.f32": np.fmax.reduce, "sync.min.f32": np.fmin.reduce}
