"""The files of a search: read for going on, written whole or not at all."""

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
from tritoncomm_kernels import tables

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
        content = json.loads(path.read_text(encoding="utf-8"))
        reason = _difference(content, key)
    except ValueError as error:
        content, reason = {}, f"not readable as JSON ({error})"
    if not reason:
        return content
    kept = path.with_name(f"{path.name}.old")
    os.replace(path, kept)
    warnings.warn(f"{path} is not gone on with: {reason}; it is kept as {kept.name}", RuntimeWarning, stacklevel=2)
    return {}


def _difference(content: Any, key: dict[str, Any]) -> str:
    if not isinstance(content, dict):
        return "not an object"
    if isinstance(content.get("format"), int) and content["format"] > tables.FORMAT:
        return f"of format {content['format']}, newer than {tables.FORMAT}"
    for name, value in key.items():
        if content.get(name) != value:
            return f"its {name} is {content.get(name)!r}, not {value!r}"
    if not all(isinstance(content.get(name, {}), dict) for name in ("results", "crossovers")):
        return "its results are damaged"
    return ""


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
