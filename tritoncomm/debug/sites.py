"""Call sites: the file and line of the program that called this package.

A site is the code object of the program's function and the offset of an instruction in it, which takes no time to look
up. ``located`` makes file and line of it when a record is written or an error is raised.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tritoncomm.debug.texts import encodable

__all__ = ["OURS", "call_site", "leave_site", "located", "site_above", "source_of", "sources"]

_HERE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__path__[0])) + os.sep
# No public function returns the node whose backward runs; this one is there in torch 2.11 to 2.15.
_current_node: Any = torch._C._current_autograd_node
_frame = sys._getframe


def located(site: Any) -> tuple[str, int]:
    """Return (file name, line number) of a call site, which is (code object, instruction offset); ("", 0) for None.

    Bytes of the name that are not UTF-8 are escaped.
    """
    if site is None:
        return "", 0
    code, offset = site
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return encodable(code.co_filename), line or code.co_firstlineno


_PROGRAM, _ANY_TORCH, OURS = range(3)  # the program is 0, because hot paths only ask whether a file is another's
sources: dict[str, int] = {}
"""By file name: whether the file is the program's, torch's or this package's."""


def source_of(file: str) -> int:
    """Return 0 for a source file of the program, 1 for one of torch, 2 for one of ours; cache it in ``sources``."""
    source = OURS if file.startswith(_HERE) else _ANY_TORCH if file.startswith((_TORCH, "<frozen")) else _PROGRAM
    sources[file] = source
    return source


def call_site(depth: int = 1) -> Any:
    """Return the site from which the program called this package, as ``site_above`` finds it.

    Args:
        depth: frames between the caller of this function and the start of the search; fewer in a short stack.
    """
    try:
        frame = _frame(depth + 1)
    except ValueError:  # a thread that begins with a call of this package
        frame = _frame(depth)
    return site_above(frame)


def site_above(frame: Any) -> Any:
    """Return (code object, instruction offset) of the nearest frame of the program, from ``frame`` outward."""
    while True:
        code = frame.f_code
        try:
            source = sources[code.co_filename]
        except KeyError:
            source = source_of(code.co_filename)
        is_of_program = not source
        if is_of_program:
            if code.co_name != "<genexpr>":
                break
        # A backward has the site of its forward, which ``leave_site`` has stored on the node of autograd's graph.
        elif code.co_name == "backward" and (node := _current_node()) is not None:
            try:
                return node._tritoncomm_site
            except AttributeError:
                pass
        # No frame is the program's: the outermost one stands for it.
        if (caller := frame.f_back) is None:
            break
        frame = caller
    return code, frame.f_lasti


def leave_site(node: Any) -> None:
    """Store the call site of a forward on its autograd node, where ``site_above`` finds it in the backward."""
    node._tritoncomm_site = call_site()
