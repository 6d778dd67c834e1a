"""The environment variables of the library, each read here only: at import, and again by ``initialize()``.

| variable | values | what it sets |
|---|---|---|
| TRITONCOMM_PATH | ``auto``, ``torch``, ``triton`` | the path of every pack and unpack |
| TRITONCOMM_CHECK | a switch, ``hash``, ``hash:N`` | ranks compare every call, or one digest every N collectives |
| TRITONCOMM_FLIGHT | a switch, a number, a folder | keep the last calls of this rank; dumps go to the folder |
| TRITONCOMM_FLIGHT_SIGNALS | a switch | SIGUSR1 and SIGTERM write the record too; needs TRITONCOMM_FLIGHT |
| TRITONCOMM_STRICT | a switch | an optimizer that may be wrong for shards raises, and does not warn |
| TRITONCOMM_NODE | a number | ranks per node for exchanges in two levels; by default as the launcher says |
| TRITONCOMM_MEGATRON | a switch, on if not set | off: ``patch_megatron()`` replaces nothing |
| TRITONCOMM_TABLE | a file, a folder, ``none`` | the tuned tables that apply (read by ``tritoncomm_kernels.tables``) |

With ``hash`` and ``hash:N`` ranks compare collectives only; p2p steps are compared with ``TRITONCOMM_CHECK=1``.

An empty variable is one that is not set. ``0``, ``false``, ``no`` and ``off`` switch off, in any case of the letters;
``1``, ``true``, ``yes`` and ``on`` switch on.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Literal, TypeVar, get_args

from tritoncomm_kernels import config, tables

from tritoncomm.errors import ArgumentError

__all__ = [
    "CHECK",
    "FLIGHT",
    "FLIGHT_SIGNALS",
    "HASH",
    "MEGATRON",
    "NODE",
    "PATH",
    "PATHS",
    "STRICT",
    "PathChoice",
    "Setting",
    "check_problem",
    "effective",
    "flight_of",
    "hash_interval",
    "is_on",
    "read",
    "set_check",
    "switch_problem",
    "unknown",
]

PathChoice = Literal["auto", "torch", "triton"]
PATHS: tuple[PathChoice, ...] = get_args(PathChoice)
HASH_EVERY, FLIGHT_CALLS = 1000, 4096
_ON = ("1", "true", "yes", "on")
_T = TypeVar("_T")


def is_on(text: str) -> bool:
    """Whether a switch is on: any text but an empty one, ``0``, ``false``, ``no`` and ``off``."""
    return text.strip().lower() not in ("", *tables.OFF)


def _path(text: str) -> str:
    """Return ``auto`` where nothing is forced. Other texts are returned unchanged: the first use rejects them."""
    return text if is_on(text) else "auto"


def _check_mode(text: str) -> bool:
    """Return ``_checks_every_call`` of the variable; warn of a text that is none of its values."""
    every = _checks_every_call(text)
    if problem := check_problem(text):
        taken = "every call is compared" if every else f"hash:{HASH_EVERY} is taken"
        warnings.warn(f"TRITONCOMM_CHECK {problem}; {taken}", RuntimeWarning, stacklevel=2)
    return every


def _megatron(text: str) -> str:
    """Return ``on`` or ``off``; a text that is no switch is returned unchanged: ``patch_megatron()`` rejects it."""
    return text if switch_problem(text) else "on" if is_on(text) or not text.strip() else "off"


def switch_problem(text: str) -> str:
    """Return the problem of a value of a switch in words; nothing if it is valid, or not set."""
    if not is_on(text) or text.strip().lower() in _ON:
        return ""
    return f"must be a switch (1, true, yes, on; 0, false, no, off), not {text!r}"


def check_problem(text: str) -> str:
    """Return the problem of a value of TRITONCOMM_CHECK in words; nothing if it is valid."""
    word = text.strip().lower()
    name, colon, interval = word.partition(":")
    if not is_on(text) or word in _ON or (name == "hash" and (not colon or _count(interval))):
        return ""
    return f"must be a switch (1, on, 0, off), hash or hash:N, not {text!r}"


def _checks_every_call(text: str) -> bool:
    """Whether a value of TRITONCOMM_CHECK means a comparison of every call, and not of digests."""
    return is_on(text) and not hash_interval(text)


def hash_interval(text: str) -> int:
    """Return the number of calls between two comparisons of digests; 0 where digests are off."""
    name, _, interval = text.strip().lower().partition(":")
    if name != "hash":
        return 0
    return _count(interval) or HASH_EVERY


def _count(text: str) -> int:
    """Return a number of calls; 0 for a text that is none, or that no counter reaches."""
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def flight_of(text: str) -> tuple[int, str]:
    """Return the number of calls to keep and the folder of dumps, from ``1``, ``10000``, ``/logs``, ``10000:/logs``."""
    if not is_on(text):
        return 0, ""
    number, _, folder = text.strip().partition(":")
    if not number.isdecimal():
        return FLIGHT_CALLS, "" if number.lower() in _ON else text.strip()
    return (_count(number) if _count(number) > 1 else FLIGHT_CALLS), folder


class Setting(Generic[_T]):
    """Value of a variable, or of the ``with`` block that overrides it; hot paths read ``value`` directly.

    Attributes:
        listeners: called after the value was set.
    """

    __slots__ = ("_blocks", "_default", "_parse", "listeners", "name", "value")

    def __init__(self, name: str, parse: Callable[[str], _T]) -> None:
        self.name, self._parse, self._blocks = name, parse, 0
        self.listeners: list[Callable[[], None]] = []
        self.value = self._default = parse(os.environ.get(name, ""))

    def read(self) -> None:
        """Take the variable's value of now. Inside a block it counts when the outermost one ends."""
        self.assign(self._parse(os.environ.get(self.name, "")))

    def assign(self, value: _T) -> None:
        """Let ``value`` count until the variable is read again; inside a block, when the outermost one ends."""
        self._default = value
        if not self._blocks:
            self._set(value)

    def _set(self, value: _T) -> None:
        """Let ``value`` count at once, and tell the listeners."""
        self.value = value
        for listener in self.listeners:
            listener()

    @contextmanager
    def override(self, value: _T) -> Iterator[None]:
        """Let ``value`` count inside the block, in every thread of the process."""
        before, self._blocks = self.value, self._blocks + 1
        self._set(value)
        try:
            yield
        finally:
            self._blocks -= 1
            # The outermost block ends with the variable's value, which may have been read again inside.
            self._set(before if self._blocks else self._default)


PATH = Setting("TRITONCOMM_PATH", _path)
CHECK = Setting("TRITONCOMM_CHECK", _check_mode)
HASH = Setting(CHECK.name, hash_interval)
FLIGHT = Setting("TRITONCOMM_FLIGHT", flight_of)
FLIGHT_SIGNALS = Setting("TRITONCOMM_FLIGHT_SIGNALS", is_on)
STRICT = Setting("TRITONCOMM_STRICT", is_on)
NODE = Setting("TRITONCOMM_NODE", _count)
MEGATRON = Setting("TRITONCOMM_MEGATRON", _megatron)
_table = tables.variable()


_SETTINGS = (PATH, CHECK, HASH, FLIGHT, FLIGHT_SIGNALS, STRICT, NODE, MEGATRON)


def unknown() -> dict[str, str]:
    """Return, by name, what is wrong with variables of the environment that begin as ours and are none."""
    ours = sorted({setting.name for setting in _SETTINGS} | {tables.VARIABLE})
    names = sorted(name for name in os.environ if name.startswith("TRITONCOMM_") and name not in ours)
    return {name: f"no such variable; there are {', '.join(ours)}" for name in names}


def read() -> None:
    """Read all variables again. Kinds of GPU calls that were made before keep the tiles of the table they used."""
    global _table
    for name, problem in unknown().items():
        warnings.warn(f"{name}: {problem}", RuntimeWarning, stacklevel=3)
    for setting in _SETTINGS:
        setting.read()
    if tables.variable() != _table:
        _table = tables.variable()
        tables.chosen.cache_clear()
        config.crossover.cache_clear()


def set_check(check: bool | str) -> None:
    """Set check mode as ``initialize(check=...)`` does: by True, False, or a value of TRITONCOMM_CHECK."""
    text = check if isinstance(check, str) else "1" if check else ""
    if problem := check_problem(text):
        raise ArgumentError(f"initialize: check {problem}")
    CHECK.assign(_checks_every_call(text))
    HASH.assign(hash_interval(text))


def effective() -> dict[str, str]:
    """Return the effective value of every variable that ranks have to agree on, whatever the spelling."""
    check = "on" if CHECK.value else f"hash:{HASH.value}" if HASH.value else "off"
    megatron = {MEGATRON.name: MEGATRON.value}
    return {PATH.name: PATH.value, CHECK.name: check} | megatron | {tables.VARIABLE: tables.variable()}
