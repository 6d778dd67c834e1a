"""The environment variables of the library, each read here only: at import, and again by ``initialize()``.

| variable | values | what it sets |
|---|---|---|
| TRITONCOMM_PATH | ``auto``, ``torch``, ``triton`` | the path of every pack and unpack |
| TRITONCOMM_CHECK | a switch | a header before every message, compared with what its receiver expects |
| TRITONCOMM_TABLE | a file, a folder, ``none`` | the tuned tables that apply (read by ``tritoncomm_kernels.tables``) |

An empty variable is one that is not set. ``0``, ``false``, ``no`` and ``off`` switch off, in any case of the letters.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from tritoncomm_kernels import config, tables

__all__ = ["CHECK", "PATH", "PATHS", "Setting", "effective", "is_on", "read"]

PATHS = ("auto", "torch", "triton")
_T = TypeVar("_T")


def is_on(text: str) -> bool:
    """Whether a switch is on: any text but an empty one, ``0``, ``false``, ``no`` and ``off``."""
    return text.strip().lower() not in ("", *tables.OFF)


def _path(text: str) -> str:
    """``auto`` where nothing is forced. Other texts are returned unchanged: the first use refuses them."""
    return text if is_on(text) else "auto"


class Setting(Generic[_T]):
    """The value of a variable, or of the ``with`` block that overrides it.

    Attributes:
        value: the current value; read directly on hot paths.
    """

    __slots__ = ("_blocks", "_default", "_parse", "name", "value")

    def __init__(self, name: str, parse: Callable[[str], _T]) -> None:
        self.name, self._parse, self._blocks = name, parse, 0
        self.value = self._default = parse(os.environ.get(name, ""))

    def read(self) -> None:
        """Take the variable's value of now. Inside a block it counts when the outermost one ends."""
        self._default = self._parse(os.environ.get(self.name, ""))
        if not self._blocks:
            self.value = self._default

    @contextmanager
    def override(self, value: _T) -> Iterator[None]:
        """Let ``value`` count inside the block, in every thread of the process."""
        before, self.value, self._blocks = self.value, value, self._blocks + 1
        try:
            yield
        finally:
            self._blocks -= 1
            self.value = before if self._blocks else self._default


PATH = Setting("TRITONCOMM_PATH", _path)
CHECK = Setting("TRITONCOMM_CHECK", is_on)
_table = tables.variable()


def read() -> None:
    """Read all variables again. Kinds of GPU calls that were made before keep the tiles of the table they used."""
    global _table
    PATH.read()
    CHECK.read()
    if tables.variable() != _table:
        _table = tables.variable()
        tables.chosen.cache_clear()
        config.crossover.cache_clear()


def effective() -> dict[str, str]:
    """The effective value of every variable: ranks with equal values behave identically, whatever the spelling."""
    return {PATH.name: PATH.value, CHECK.name: "on" if CHECK.value else "off", tables.VARIABLE: tables.variable()}
