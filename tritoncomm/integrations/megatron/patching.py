"""``patch``, ``unpatch`` and ``patched``: which patch of Megatron-core is asked for, and which one is bound."""

import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from tritoncomm import variables
from tritoncomm.errors import ArgumentError
from tritoncomm.integrations.megatron.rebinding import Rebinding
from tritoncomm.integrations.megatron.replacements import Options, Originals, core, swaps_of, why_foreign

__all__ = ["TESTED", "Report", "patch", "patched", "unpatch"]

TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Versions of megatron-core that the tests compare with, bit for bit."""


@dataclass(frozen=True)
class Report:
    """Report of ``patch``.

    Attributes:
        version: of megatron-core, as it says itself.
        replaced: (module, name) of every name that refers to ours now, in order.
        kept: a line for each call or name that remains Megatron's, with the reason. A name with unknown arguments is
            listed with its signature and ours; a name that somebody has wrapped or replaced stays theirs.
    """

    version: str
    replaced: tuple[tuple[str, str], ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        modules = {module for module, _ in self.replaced}
        names = sorted({name for _, name in self.replaced})
        head = f"megatron-core {self.version}: {len(self.replaced)} names in {len(modules)} modules replaced"
        lines = [f"ours: {', '.join(names)}"] * bool(names) + [f"kept: {line}" for line in self.kept]
        indents = {"initial_indent": "  ", "subsequent_indent": "    ", "break_long_words": False}
        return "\n".join([head, *(part for line in lines for part in textwrap.wrap(line, 80, **indents))])


@dataclass(frozen=True)
class _Active:
    """A patch that is bound: its arguments, its names, and what its report says."""

    options: Options
    rebinding: Rebinding
    version: str
    kept: tuple[str, ...]

    def report(self) -> Report:
        """Return the report on the names that are replaced now."""
        return Report(self.version, tuple(sorted(self.rebinding.names)), self.kept)


class _Context(NamedTuple):
    """A block of ``patched`` that is open.

    Attributes:
        token: tells blocks with equal options apart.
    """

    token: object
    options: Options


class _State:
    """Requested patch (``base``, or the last open context) and the active one.

    Attributes:
        originals: Megatron's own objects, and ours for them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.base: Options | None = None
        self.contexts: list[_Context] = []
        self.active: _Active | None = None
        self.originals = Originals(lambda: None if self.active is None else self.active.rebinding)

    def settle(self) -> None:
        """Apply the requested patch in place of the active one; if it fails, bind the active one again."""
        requested, active = self._requested(), self.active
        if active is not None and active.options == requested:
            swaps, kept_lines = swaps_of(active.options, self.originals)
            active.rebinding.extend(swaps)
            active.rebinding.apply()  # modules that were imported or reloaded since
            self.active = replace(active, kept=kept_lines)
            return
        bind_again = None if active is None else active.rebinding.undo()
        try:
            self.active = None if requested is None else _activate(requested)
        except BaseException:
            if bind_again is not None:
                bind_again()
            raise

    def _requested(self) -> Options | None:
        """Return the options of the block entered last, else those of ``patch``; None without, or if off."""
        if variables.MEGATRON.value == "off":
            return None
        return self.contexts[-1].options if self.contexts else self.base


_state = _State()


def patch(*, cross_entropy: bool = False, packages: Sequence[str] = ("megatron",), strict: bool = False) -> Report:
    """Let Megatron-core use tritoncomm, in all modules that are loaded now or later.

    Every name that refers to one of Megatron's mappings (their autograd classes and underscore helpers included), to
    its ``P2PCommunicator``, to its two linear functions or to ``reduce_scatter_with_fp32_accumulation`` is bound to
    ours, whichever module has imported it. Losses and gradients keep their bits, except for those that come from
    ``reduce_scatter_with_fp32_accumulation``: ours adds up in rank order, Megatron's in the order of ``torch.sum``. As
    in Megatron, ``reduce_from_tensor_model_parallel_region`` overwrites its input,
    ``copy_to_tensor_model_parallel_region`` overwrites its gradient in backward, and sequence-parallel gathers of the
    linear layers use Megatron's global memory buffer. ``mappings.overwrite_inputs`` is not switched.

    With ``TRITONCOMM_MEGATRON=off`` in the environment of every rank nothing is replaced, and the report says so: the
    other half of an A/B run of an unchanged launch script.

    A second call with equal arguments only reaches modules that were imported in between; with other arguments it
    replaces the first. The patch is one of the process: all threads see it. Objects that were made before keep their
    class (a ``P2PCommunicator`` in use), and so do names in local variables, default arguments and closures.

    These remain Megatron's: calls with fused gradient accumulation, with deferred embedding gradients, with weights
    that are gathered over a further axis (``gtp_remat_size``), with another ``output_dtype`` than the input's, or under
    autocast; TransformerEngine's layers, which call torch.distributed themselves; data-parallel and MoE bookkeeping.
    A name that somebody has wrapped (``__wrapped__``) or replaced by an object of a module that is not Megatron's stays
    theirs, and ``Report.kept`` says so.

    After ``importlib.reload`` of a module of Megatron's, call ``patch()`` again: the module's names are its own then.

    Args:
        cross_entropy: also replace ``vocab_parallel_cross_entropy`` by ours, which leaves the logits alone and sends
            one all-gather of two numbers a row instead of three all-reduces. It is off by default because it rounds
            differently (losses and gradients differ by about 1e-8 in fp32) and because on small vocabularies (16 x 32
            was measured) it takes twice Megatron's host time. Label smoothing stays Megatron's, which smooths over the
            local part of the vocabulary.
        packages: top-level packages whose modules are searched; add your own if it imports Megatron's mappings by name.
        strict: raise, and do not warn, where a name stays Megatron's because its arguments are not known.

    Returns:
        The replaced names, and the calls and names that remain Megatron's.

    Raises:
        ArgumentError: ``packages`` is not a list of names, or nothing of one of them is imported yet; or
            ``TRITONCOMM_MEGATRON`` is no switch.
        ImportError: megatron-core is not installed.
        UnsupportedError: not a single name can be replaced; or with ``strict`` one has unknown arguments. Such a name
            stays Megatron's: the first rank of a node warns of it once, and ``Report.kept`` has both signatures. This,
            and not the version number, decides: versions that are not in ``TESTED`` only get a warning.
    """
    options = _options(cross_entropy, packages, strict)
    with _state.lock:
        before = _state.base
        _state.base = options
        try:
            _state.settle()
        except BaseException:
            _state.base = before
            raise
        return _report()


def unpatch() -> tuple[tuple[str, str], ...]:
    """Bind every name to Megatron's own object again, also inside ``with patched()``; without a patch, nothing.

    Returns:
        (module, name) of every name that was ours and that somebody has rebound since: these are left alone.
    """
    with _state.lock:
        _state.base = None
        _state.contexts.clear()
        rebound = [] if _state.active is None else _state.active.rebinding.rebound()
        _state.settle()
    return tuple(sorted((module, name) for module, name, value in rebound if why_foreign(value)))


@contextmanager
def patched(
    *, cross_entropy: bool = False, packages: Sequence[str] = ("megatron",), strict: bool = False
) -> Iterator[Report]:
    """Run ``patch(...)`` for a block; the earlier patch, if any, holds again afterwards, with its own arguments.

    Blocks may be nested, and may overlap in several threads: the one entered last decides.
    """
    token = object()
    options = _options(cross_entropy, packages, strict)
    with _state.lock:
        _state.contexts.append(_Context(token, options))
        try:
            _state.settle()
        except BaseException:
            _state.contexts.pop()
            raise
        report = _report()
    try:
        yield report
    finally:
        with _state.lock:
            if any(context.token is token for context in _state.contexts):  # no unpatch() in between
                _state.contexts = [context for context in _state.contexts if context.token is not token]
                _state.settle()


def _options(cross_entropy: bool, packages: Sequence[str], strict: bool) -> Options:
    """Check the arguments of ``patch``, and return them."""
    if isinstance(packages, str) or not packages:
        raise ArgumentError(f"packages must be a list of top-level package names, not {packages!r}")
    if problem := variables.switch_problem(variables.MEGATRON.value):
        raise ArgumentError(f"{variables.MEGATRON.name} {problem}")  # or both sides of an A/B run would be ours
    imported = {"megatron", *(module.partition(".")[0] for module in sys.modules)}
    missing = [package for package in packages if package not in imported]
    if missing:
        raise ArgumentError(f"packages: nothing of {', '.join(map(repr, missing))} is imported yet; import it first")
    return Options(bool(cross_entropy), tuple(packages), bool(strict))


def _report() -> Report:
    """Return the report of the patch that is bound, or of the one that TRITONCOMM_MEGATRON has switched off."""
    if _state.active is None:
        return Report(core("package_info").__version__, (), (f"all names: {variables.MEGATRON.name} is off",))
    return _state.active.report()


def _activate(options: Options) -> _Active:
    """Bind the names of all loaded modules to our objects; warn of a version that was not tested."""
    swaps, kept = swaps_of(options, _state.originals)
    version = core("package_info").__version__
    if version.partition("+")[0] not in TESTED:  # inside of a git repository Megatron appends its commit
        warnings.warn(
            f"tritoncomm.integrations.megatron is tested with megatron-core {', '.join(TESTED)}; this is {version}, of "
            "which names with the same arguments are replaced; the report has the others",
            stacklevel=4,
        )
    rebinding = Rebinding(options.packages)
    rebinding.extend(swaps)
    rebinding.apply()
    return _Active(options, rebinding, version, kept)
