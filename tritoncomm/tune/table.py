"""The files of a search: read for going on, written whole or not at all."""

import json
import os
import reprlib
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from tritoncomm_kernels import tables

# Fields of one result: what static ranking says of a candidate, a time, a wrong output, the times of both paths.
_CANDIDATE = {"op": str, "unit": int, "tile_bytes": int, "segment_bytes": int, "num_warps": int}
_JUDGED = _CANDIDATE | {
    "pruned": str, "cost": float, "instructions_per_16_bytes": float, "registers": int, "spills": int, "widths": list,
    "loads_in_flight": int, "bytes_in_flight": int,
}  # fmt: skip
_TIMED = _CANDIDATE | {"case": str, "us": float}
_WRONG = _CANDIDATE | {"case": str, "wrong": str}
_PATHS = {"op": str, "unit": int, "bytes": int, "torch_us": float, "triton_us": float}

__all__ = ["measured_key", "resume", "static_key", "user_path", "write"]


def measured_key(device_name: str, sm_count: int) -> dict[str, Any]:
    """What a measured table is for; every field has to be equal for it to be used or gone on with."""
    return {"format": tables.FORMAT, "kind": "measured", "device": device_name, "sm_count": sm_count} | _versions()


def static_key(target: str) -> dict[str, Any]:
    """What a static ranking is for."""
    return {"format": tables.FORMAT, "kind": "static", "target": target} | _versions()


def _versions() -> dict[str, str]:
    return {"source": tables.source_hash(), "triton": triton.__version__}


def user_path(device_name: str, sm_count: int) -> Path:
    """Where ``config_for`` looks for the user's own table of a device."""
    return tables.table_in(tables.user_folder(), device_name, sm_count)


def resume(path: Path | None, key: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run left in a file, empty if there is no such file.

    A file that is damaged, of a newer format, or for something else is left out with one warning, and kept with
    ``.old`` at the end of its name.
    """
    if path is None or not path.is_file():
        return {}
    try:
        content = tables.read_json(path)
        reason = _difference(content, key)
    except tables.TableError as error:
        content, reason = {}, str(error)
    if not reason:
        return content
    kept = path.with_name(f"{path.name}.old")
    os.replace(path, kept)
    warnings.warn(f"{path} is not gone on with: {reason}; it is kept as {kept.name}", RuntimeWarning, stacklevel=2)
    return {}


def _difference(content: Any, key: dict[str, Any]) -> str:
    """Why a search cannot go on with what a file holds, empty if it can."""
    if not isinstance(content, dict):
        return "not an object"
    if isinstance(content.get("format"), int) and content["format"] > tables.FORMAT:
        return f"of format {reprlib.repr(content['format'])}, newer than {tables.FORMAT}"
    for name, value in key.items():
        if content.get(name) != value:
            return f"its {name} is {reprlib.repr(content.get(name))}, not {value!r}"
    kinds = (_JUDGED,) if key["kind"] == "static" else (_TIMED, _WRONG, _PATHS)
    for section, allowed in (("results", kinds), ("judged", (_JUDGED,))):
        results = content.get(section, {})
        if not isinstance(results, dict):
            return f"its {section} are damaged: {reprlib.repr(results)}"
        for name, one in results.items():
            if not any(_has(one, fields) for fields in allowed):
                return f"its {section} are damaged: {reprlib.repr(name)} is {reprlib.repr(one)}"
    return ""


def _has(one: Any, fields: Mapping[str, type]) -> bool:
    """Whether one result has these fields and no others, of these types; times are finite and positive."""
    if not isinstance(one, dict) or one.keys() != fields.keys():
        return False
    return all(map(_is_one, fields.values(), (one[name] for name in fields))) and (
        one["op"] in tables.OPS and one["unit"] in tables.UNITS
    )


def _is_one(kind: type, value: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and 0 <= value < 1e12
    if kind is int:
        return type(value) is int and 0 <= value < 2**62
    return type(value) is kind and (kind is not list or all(type(item) is int for item in value))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that people can read, in one step: a reader sees the old file or the new one, never half of one.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content | {"torch": torch.__version__}, indent=1, sort_keys=True) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
