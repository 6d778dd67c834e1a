"""Tuned tables: their format, whether one fits a device, and which files apply.

``chosen`` is read once per device; everything decided from it afterwards is a pure function. Without a table that fits,
the rules in ``config.py`` hold.
"""

import hashlib
import json
import os
import reprlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from tritoncomm_kernels import installed_triton

__all__ = [
    "EVICT_UNITS",
    "FORMAT",
    "OFF",
    "OPS",
    "UNITS",
    "Table",
    "TableError",
    "chosen",
    "digest",
    "expanded",
    "misfit",
    "read",
    "read_json",
    "source_hash",
    "table_in",
    "table_name",
    "user_folder",
    "variable",
]

FORMAT = 2  # 1 had no evict_first, which is off there
OPS = ("pack", "unpack", "reduce")
UNITS = (1, 2, 4, 8, 16)
EVICT_UNITS = (8, 16)  # of pack and unpack, in which evict_first may be on
VARIABLE = "TRITONCOMM_TABLE"
OFF = ("0", "false", "no", "off")
_SOURCES = ("address.py", "numerics.py", "reduction.py")  # what the machine code is made from
_BOUNDS = {"tile_bytes": (64, 2**17), "segment_bytes": (64, 2**16), "num_warps": (1, 16)}
_PER_THREAD = 512  # bytes of a tile; twice what `tune` tries, and what still compiles in a second
_FILE_BYTES = 2**25  # a search of everything writes about 1 MiB
_LARGEST = 2**62
_KEY = {"device": str, "sm_count": int, "source": str, "triton": str}


class TableError(ValueError):
    """A file that is no tuned table, or one of a format this version does not know."""


@dataclass(frozen=True)
class Table:
    """A tuned table.

    Attributes:
        device: name of the GPU, as its driver gives it.
        sm_count: multiprocessors of that GPU; a partition of a GPU has fewer under the same name.
        source: ``source_hash()`` of the kernels it was measured with.
        triton: version of Triton it was measured with.
        configs: ``{op: {unit_bytes: entry}}``; an entry has ``tile_bytes``, ``segment_bytes``, ``num_warps`` and
            ``evict_first``. Without the last one it is off; only ``EVICT_UNITS`` may have it on.
        crossover_bytes: ``{op: {unit_bytes: size}}``; smaller tensors are faster on torch's path.
        origin: path of the file.
    """

    device: str
    sm_count: int
    source: str
    triton: str
    configs: Mapping[str, Mapping[str, Mapping[str, int]]]
    crossover_bytes: Mapping[str, Mapping[str, int]]
    origin: str


def read(path: Any) -> Table:
    """Return the table in a file (a path or a resource of the package); reject a damaged file or a newer format."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != "measured":
        raise TableError("not a measured table")
    version = content.get("format")
    if type(version) is not int or version < 1:
        raise TableError("damaged: no format version")
    if version > FORMAT:
        raise TableError(f"of format {reprlib.repr(version)}, newer than {FORMAT}, the newest this version reads")
    for name, kind in _KEY.items():
        value: Any = content.get(name)
        if type(value) is not kind or (value < 1 if kind is int else not value.isprintable()):
            raise TableError(f"damaged: {name} is {reprlib.repr(value)}")
    configs, crossover = _section(content, "configs"), _section(content, "crossover_bytes")
    for op, units in configs.items():
        for unit, entry in units.items():
            _check_config(f"configs.{op}.{unit}", entry, op, int(unit))
    for op, units in crossover.items():
        for unit, size in units.items():
            if type(size) is not int or not 0 <= size <= _LARGEST:
                raise TableError(f"damaged: crossover_bytes.{op}.{unit} is {reprlib.repr(size)}")
    key = {name: content[name] for name in _KEY}
    return Table(**key, configs=configs, crossover_bytes=crossover, origin=str(path))


def read_json(path: Any) -> Any:
    """Return the content of a JSON file, unchecked; reject a file that is not regular, or larger than any table."""
    # A pipe would never end.
    if path.exists() and not path.is_file():
        raise TableError("not a regular file")
    with path.open("rb") as file:
        text = cast(bytes, file.read(_FILE_BYTES + 1))
    if len(text) > _FILE_BYTES:
        raise TableError(f"larger than {_FILE_BYTES >> 20} MiB")
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise TableError("not readable as JSON (nested too deeply)") from None
    except ValueError as error:
        raise TableError(f"not readable as JSON ({error})") from None


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return ``{op: {unit: ...}}`` with known ops and units."""
    section = content.get(name, {})
    if not isinstance(section, dict):
        raise TableError(f"damaged: {name} is {reprlib.repr(section)}")
    for op, units in section.items():
        if op not in OPS or not isinstance(units, dict) or not {str(unit) for unit in UNITS}.issuperset(units):
            form = f"{{op: {{unit: ...}}}} with ops {', '.join(OPS)} and units {', '.join(map(str, UNITS))} as texts"
            raise TableError(f"damaged: {name}.{reprlib.repr(op)[1:-1]} is {reprlib.repr(units)}; {name} is {form}")
    return section


def _check_config(place: str, entry: Any, op: str, unit: int) -> None:
    """Reject an entry of ``configs`` with other fields or with values out of bounds; ``place`` names it in errors."""
    if not isinstance(entry, dict) or set(entry) - {"evict_first"} != set(_BOUNDS):
        form = '{"tile_bytes": 8192, "segment_bytes": 1024, "num_warps": 4}'
        raise TableError(f"damaged: {place} is {reprlib.repr(entry)}; it has the form {form}")
    evict_first = entry.get("evict_first", False)
    if type(evict_first) is not bool or (evict_first and (op == "reduce" or unit not in EVICT_UNITS)):
        raise TableError(f"damaged: {place}.evict_first is {reprlib.repr(evict_first)}")
    for name, (low, high) in _BOUNDS.items():
        value = entry[name]
        least = max(low, unit) if name.endswith("_bytes") else low  # they hold at least one unit
        if type(value) is not int or not least <= value <= high or value & (value - 1):
            raise TableError(f"damaged: {place}.{name} is {reprlib.repr(value)}, no power of two from {low} to {high}")
    if entry["tile_bytes"] > _PER_THREAD * 32 * entry["num_warps"]:
        raise TableError(f"damaged: {place}.tile_bytes is more than {_PER_THREAD} for each of its threads")


def misfit(table: Table, device_name: str, sm_count: int, *, exact: bool = True) -> str:
    """Return the reason why the table does not apply to a device; empty if it does.

    Args:
        sm_count: multiprocessors of the device, 0 if unknown.
        exact: whether the version of Triton has to be the table's too.
    """
    if table.device != device_name or sm_count not in (0, table.sm_count):
        return f"for {table.device} with {table.sm_count} SMs, not {device_name} with {sm_count}"
    if table.source != source_hash():
        return "measured with other kernels than these; `tritoncomm tune` makes a new one"
    if exact and table.triton != (triton := installed_triton.version()):
        return f"measured with Triton {table.triton}, not {triton or 'without any'}; `tritoncomm tune` makes a new one"
    return ""


@lru_cache(maxsize=64)
def chosen(device_name: str, sm_count: int) -> tuple[Table, ...]:
    """Return the tables that apply to a device, in order of precedence: the user's own, then the one in the package."""
    named, key = variable(), (device_name, sm_count)
    # TRITONCOMM_TABLE names the only file to look at instead, or a folder of files named as the user's own are. A file
    # that does not apply is ignored with one warning; so is one that the variable names and that does not exist.
    if named == "none":
        return ()
    if named:
        return tuple(_usable(named, lambda: _named_file(named, *key), key, exact=True, required=True))
    # The package's table also serves a Triton of another version than its own: it is not ``exact``.
    shipped = resources.files("tritoncomm_kernels") / "configs" / table_name(device_name)
    own = _usable("of this user", lambda: table_in(user_folder(), *key), key, exact=True)
    return (*own, *_usable(str(shipped), lambda: shipped, key, exact=False))


def _usable(
    name: str, locate: Callable[[], Any], key: tuple[str, int], *, exact: bool, required: bool = False
) -> list[Table]:
    """Return the table in a file, or nothing with a warning of the reason; no warning if the file does not exist."""
    try:
        path = locate()  # may raise, as for a home directory that does not exist
        name = str(path)
        table = read(path)
        reason = misfit(table, *key, exact=exact)
        if not reason:
            return [table]
    except (OSError, TableError) as error:
        if isinstance(error, FileNotFoundError) and not required:
            return []
        reason = str(error)
    warnings.warn(f"tuned table {name} is ignored: {reason}", RuntimeWarning, stacklevel=4)
    return []


def _named_file(named: str, device_name: str, sm_count: int) -> Path:
    """Return the file that TRITONCOMM_TABLE names, or the device's file in a folder that it names."""
    place = expanded(named)
    return table_in(place, device_name, sm_count) if place.is_dir() else place


def expanded(text: str) -> Path:
    """Return a path with ``~`` and ``~user`` resolved; raise ``FileNotFoundError`` without such a user or home."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise FileNotFoundError(f"{text}: no such user, or no home directory") from None


def variable() -> str:
    """Return the value of TRITONCOMM_TABLE: a file, a folder, ``none`` (or any spelling of off), or empty."""
    value = os.environ.get(VARIABLE, "").strip()
    return "none" if value.lower() in ("none", *OFF) else value


def digest(device_name: str, sm_count: int) -> str:
    """Return a hash of a device's tiles and crossovers, independent of the files; ``built in`` without any."""
    contents = [[one.configs, one.crossover_bytes] for one in chosen(device_name, sm_count)]
    contents = [one for one in contents if any(one)]  # a search that was stopped early leaves an empty one
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:8] if contents else "built in"


def table_name(device_name: str, sm_count: int | None = None) -> str:
    """Return the file name of a device's table, with the number of multiprocessors for a user's own."""
    name = "".join(c if c.isalnum() else "-" for c in device_name.lower())
    return f"{name}.json" if sm_count is None else f"{name}-{sm_count}.json"


def table_in(folder: Path, device_name: str, sm_count: int) -> Path:
    """Return the path of a device's table in a folder; without ``sm_count`` that of its largest partition."""
    if sm_count:
        return folder / table_name(device_name, sm_count)
    start = table_name(device_name, 0).removesuffix("0.json")
    parts = [path for path in folder.glob(f"{start}*.json") if path.stem.removeprefix(start).isdecimal()]
    return max(parts, key=lambda path: int(path.stem.removeprefix(start)), default=folder / f"{start}N.json")


def user_folder() -> Path:
    """Return the folder of the user's own tables: ``$XDG_CACHE_HOME/tritoncomm`` or ``~/.cache/tritoncomm``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else expanded("~/.cache")) / "tritoncomm"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the kernels' source files."""
    folder = resources.files("tritoncomm_kernels")
    text = "".join((folder / name).read_text(encoding="utf-8") for name in _SOURCES)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
