"""Where the program called this package: file and line, looked up on the hot path and put into words later."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["OURS", "call_site", "leave_site", "located", "site_above", "source_of", "sources"]

_HERE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__path__[0])) + os.sep
_current_node: Any = torch._C._current_autograd_node
_frame = sys._getframe


def located(site: Any) -> tuple[str, int]:
    """File and line of a ``Call.site``; ("", 0) for None."""
    if site is None:
        return "", 0
    code, offset = site
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return code.co_filename, line or code.co_firstlineno


_PROGRAM, _ANY_TORCH, OURS = range(3)  # zero is the program, as hot paths know
sources: dict[str, int] = {}  # whose a file is


def source_of(file: str) -> int:
    """Whose a file is that ``sources`` has not yet."""
    kind = OURS if file.startswith(_HERE) else _ANY_TORCH if file.startswith((_TORCH, "<frozen")) else _PROGRAM
    sources[file] = kind
    return kind


def call_site(depth: int = 1) -> Any:
    """Where the program called this package, ``depth`` frames up or further."""
    try:
        frame = _frame(depth + 1)
    except ValueError:  # a thread that begins with a call of this package
        frame = _frame(depth)
    return site_above(frame)


def site_above(frame: Any) -> Any:
    """The program's frame that is ``frame`` or called it, as code and offset.

    Of a backward it is where the program called the forward, which has left it on its node of autograd's graph.
    """
    while True:
        code = frame.f_code
        try:
            source = sources[code.co_filename]
        except KeyError:
            source = source_of(code.co_filename)
        if not source:  # the program's
            if code.co_name != "<genexpr>":
                break
        elif code.co_name == "backward" and (node := _current_node()) is not None:
            try:
                return node._tritoncomm_site
            except AttributeError:
                pass
        if (caller := frame.f_back) is None:
            break
        frame = caller
    return code, frame.f_lasti


def leave_site(node: Any) -> None:
    """Leave it on a node of autograd's graph, whose forward has called the caller of this."""
    try:
        frame = _frame(4)
    except ValueError:  # a thread that begins with a forward
        frame = _frame(3)
    node._tritoncomm_site = site_above(frame)
