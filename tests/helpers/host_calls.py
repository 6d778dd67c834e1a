"""The project's functions that a call enters: what its host time is made of, counted, so the same on every machine."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tritoncomm_kernels

import tritoncomm

__all__ = ["calls_of"]

_FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (tritoncomm, tritoncomm_kernels))


def calls_of(function: Callable[[], Any]) -> list[str]:
    """Names of the project's functions that ``function`` enters on this thread, in order."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDERS):
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
