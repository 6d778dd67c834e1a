"""Where the program called this package: file and line, looked up on the hot path and put into words later."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["OURS", "apply_has_no_frame", "call_site", "located", "source_of", "sources"]

_HERE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__path__[0])) + os.sep
_SITE = "_tritoncomm_site"
_current_node = torch._C._current_autograd_node
_frame = sys._getframe
apply_has_no_frame = not hasattr(torch.autograd.Function.apply, "__func__")  # from torch 2.15 on


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
    """Where the program called this package, ``depth`` frames up or further.

    A forward leaves it on its node of autograd's graph, where its backward finds it again.
    """
    node = _current_node()
    if node is not None and (site := getattr(node, _SITE, None)) is not None:
        return site
    forward = None
    try:
        frame = _frame(depth + 1)
    except ValueError:  # a thread that begins with a call of this package
        frame = _frame(depth)
    while True:
        code = frame.f_code
        try:
            source = sources[code.co_filename]
        except KeyError:
            source = source_of(code.co_filename)
        if not source:  # the program's
            if code.co_name != "<genexpr>":
                break
        elif code.co_name == "forward" and source == OURS:
            forward = frame
            if not apply_has_no_frame and (caller := frame.f_back) is not None:  # of ``apply``, not looked at
                frame = caller
        if (caller := frame.f_back) is None:
            break
        frame = caller
    site = code, frame.f_lasti
    # Reading the locals of a frame takes as long as walking over two, so it is done for forwards only.
    if forward is not None and (ctx := forward.f_locals.get("ctx")) is not None:
        setattr(ctx, _SITE, site)
    return site
