"""Cases to tune for: operations, shapes, ranks and dtypes, given one by one or derived from a model."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import product
from pathlib import Path

import torch
from tritoncomm_kernels import tables
from tritoncomm_kernels.dtypes import wide_type
from tritoncomm_kernels.tables import OPS

from tritoncomm.core.split import split_of
from tritoncomm.parsing import dtype_name, parse_ints

__all__ = ["MODELS", "Case", "Model", "can_sum", "from_model", "from_shapes", "parse_shape", "read_model", "sweep"]

_MAX_RANKS = {"pack": 2**16, "unpack": 2**16, "reduce": 64}


@dataclass(frozen=True)
class Case:
    """One call to tune for.

    Attributes:
        outer: number of rows; 1 for ``reduce``.
        row: elements of a row, split over the ranks; for ``reduce`` the elements of one part.
        note: origin in words.
    """

    op: str
    outer: int
    row: int
    world: int
    dtype: torch.dtype
    note: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """Key of a case in files; the note is not part of it."""
        return f"{self.op} {self.outer}x{self.row} world {self.world} {dtype_name(self.dtype)}"

    @property
    def run(self) -> int:
        """Elements of a row that go to one rank."""
        return split_of((self.outer, self.row), None, 1, self.world).run

    @property
    def unit(self) -> int:
        """Bytes per access with aligned pointers; for ``reduce`` bytes of one element."""
        size = self.dtype.itemsize
        return size if self.op == "reduce" else math.gcd(self.row * size, self.run * size, 16)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that is packed, or unpacked, or of all parts that are summed."""
        return self.outer * self.row * self.dtype.itemsize * (self.world if self.op == "reduce" else 1)


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer that its communication depends on; public facts of the published models.

    Attributes:
        hidden: width of the residual stream.
        head_dim: width of a query or key head.
        ffn: width of the (dense) feed-forward layer.
        value_head_dim: width of a value head, ``head_dim`` if it is 0.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    value_head_dim: int = 0


MODELS = {
    "llama3-8b": Model(4096, 32, 8, 128, 14336, 128256),
    "llama3-70b": Model(8192, 64, 8, 128, 28672, 128256),
    "qwen3-32b": Model(5120, 64, 8, 128, 25600, 151936),
    "deepseek-v3": Model(7168, 128, 128, 192, 18432, 129280, 128),
}


def read_model(name: str) -> Model:
    """Return a model by its name, or from a JSON file with the fields of ``Model``."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"model {name!r} is none of {', '.join(MODELS)}, and there is no file of that name")
    try:
        content = tables.read_json(path)
    except tables.TableError as error:
        raise ValueError(f"model {name}: {error}") from None
    is_required = {field.name: field.default is MISSING for field in fields(Model)}
    known = ", ".join(is_required)
    if not isinstance(content, dict):
        raise ValueError(f"model {name}: not an object with the fields {known}")
    unknown = sorted(set(content) - set(is_required))
    missing = [field for field, needed in is_required.items() if needed and field not in content]
    if unknown or missing:
        what = f"no field {', '.join(missing)}" if missing else f"unknown field {', '.join(unknown)}"
        raise ValueError(f"model {name}: {what} (the fields are {known})")
    for size, value in content.items():
        least = 1 if is_required[size] else 0  # 0 is the default of the others
        if type(value) is not int or value < least:
            raise ValueError(f"model {name}: {size} must be a positive integer, not {value!r}")
    return Model(**content)


def from_model(
    model: Model, world: int, tokens: int, dtype: torch.dtype, ops: Iterable[str] = OPS, name: str = ""
) -> list[Case]:
    """Return the calls around the collectives of one layer stack, ``world`` tensor-parallel ranks wide.

    Args:
        tokens: tokens of one micro-batch on all ranks, sequence length times batch.
        name: put into the notes.
    """
    value = model.value_head_dim or model.head_dim
    sizes = {"heads": model.heads, "ffn": model.ffn, "hidden": model.hidden, "tokens": tokens}
    if tokens < 1:
        raise ValueError(f"tokens must be positive, not {tokens}")
    if world < 2:
        raise ValueError(f"--tensor-parallel must be 2 or more, not {world}")
    for what, size in sizes.items():
        if size % world:
            raise ValueError(f"{what} {size} does not divide over {world} tensor-parallel ranks")
    local = tokens // world
    # An all-gather along the last dim unpacks full rows of all tokens, and a reduce-scatter along it packs them. The
    # all-to-all from positions to heads packs each rank's tokens, and the one back unpacks them.
    widths = {
        "hidden": (tokens, model.hidden),
        "feed-forward": (tokens, model.ffn),
        "vocabulary": (tokens, model.vocab),
        "query heads, exchanged": (local, model.heads * model.head_dim),
    }
    if model.kv_heads % world == 0:
        widths["key heads, exchanged"] = (local, model.kv_heads * model.head_dim)
    widths["attention output, exchanged"] = (local, model.heads * value)
    cases = [
        Case(op, outer, row, world, dtype, f"{name} {what}".strip())
        for op in ("pack", "unpack")
        for what, (outer, row) in widths.items()
    ]
    # A sum over a wire of another dtype reduces ``world`` parts of a rank's shard of the residual stream.
    cases.append(Case("reduce", 1, local * model.hidden, world, dtype, f"{name} residual stream".strip()))
    return list(dict.fromkeys(case for case in cases if case.op in ops))


def from_shapes(
    shapes: Sequence[tuple[int, ...]], worlds: Sequence[int], dtypes: Sequence[torch.dtype], ops: Sequence[str]
) -> list[Case]:
    """Return every combination; the last dim of a shape is split, and for ``reduce`` a shape is of one part."""
    for op, world in product(ops, worlds):
        if not 1 <= world <= _MAX_RANKS[op]:
            raise ValueError(f"world {world} is not in 1..{_MAX_RANKS[op]}, the ranks that {op} takes")
    cases = []
    for op, shape, world, dtype in product(ops, shapes, worlds, dtypes):
        row = math.prod(shape) if op == "reduce" else shape[-1]
        cases.append(Case(op, math.prod(shape) // row, row, world, dtype))
    return list(dict.fromkeys(cases))


def sweep(ops: Iterable[str] = OPS) -> list[Case]:
    """Return the default cases: about 64 MiB for 8 ranks in every unit, short and long runs, and 16 and 256 MiB."""
    cases = []
    for op in ("pack", "unpack"):
        for run in (512, 64, 16384, 200, 100, 1026):  # bytes per rank and row: units of 16, 16, 16, 8, 4 and 2
            cases.append(Case(op, max(2**26 // (8 * run), 1), 8 * run // 2, 8, torch.bfloat16, f"runs of {run} bytes"))
        cases.append(Case(op, 2**26 // (8 * 513), 8 * 513, 8, torch.int8, "runs of 513 bytes"))
        # ``evict_first`` won at 16 MiB and lost at 256 on an H200: one size alone would choose for all.
        for mib in (16, 256):
            cases.append(Case(op, mib * 2**20 // (8 * 512), 2048, 8, torch.bfloat16, f"runs of 512 bytes, {mib} MiB"))
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int8):
        cases.append(Case("reduce", 1, 2**23 // dtype.itemsize, 8, dtype, "parts of 8 MiB"))
    return [case for case in cases if case.op in ops]


def parse_shape(text: str) -> tuple[int, ...]:
    """Return ``4096x8192`` or ``4096,1,8192`` as a tuple of positive sizes."""
    shape = parse_ints(text, "--shape", 1)
    if not shape:
        raise ValueError("--shape is empty; give sizes like 4096x8192")
    return shape


def can_sum(dtype: torch.dtype) -> bool:
    """Whether ``reduce`` adds up elements of ``dtype``."""
    try:
        wide_type("reduce", dtype, dtype, scaled=False, summed=True)
    except TypeError:
        return False
    return True
