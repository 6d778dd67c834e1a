"""Megatron-core on tritoncomm, unedited: ``patch()`` once Megatron is imported, ``unpatch()`` to undo it.

Replaced are the tensor-parallel mappings, ``P2PCommunicator``, and the linear layers' functions, in which half of the
tensor-parallel traffic is. Losses and gradients keep their bits. docs/integrations_megatron.md says what stays
Megatron's.
"""

import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from tritoncomm import mappings
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations import megatron_functions
from tritoncomm.integrations.rebinding import Rebinding
from tritoncomm.p2p import P2PCommunicator

__all__ = ["TESTED", "Report", "patch", "patched", "unpatch"]

TESTED = ("0.16.1",)
"""Versions of megatron-core that the tests compare with, bit for bit."""


_LINEAR = (
    "linear_with_grad_accumulation_and_async_allreduce",
    "linear_with_frozen_weight",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "LinearWithFrozenWeight",
)


@dataclass(frozen=True)
class Report:
    """What ``patch`` did.

    Attributes:
        version: of megatron-core.
        replaced: (module, name) of every name that refers to ours now, in order.
        kept: what remains Megatron's, and why.
    """

    version: str
    replaced: tuple[tuple[str, str], ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        modules = {module for module, _ in self.replaced}
        head = f"megatron-core {self.version}: {len(self.replaced)} names in {len(modules)} modules replaced"
        return "\n".join([head, *(f"  kept: {line}" for line in self.kept)])


@dataclass(frozen=True)
class _Options:
    cross_entropy: bool
    packages: tuple[str, ...]


@dataclass(frozen=True)
class _Active:
    options: _Options
    rebinding: Rebinding
    version: str
    kept: tuple[str, ...]

    def report(self) -> Report:
        return Report(self.version, tuple(sorted(self.rebinding.names)), self.kept)


class _State:
    """What should hold (``base``, and the open contexts above it), and what does."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.base: _Options | None = None
        self.contexts: list[tuple[object, _Options]] = []
        self.active: _Active | None = None

    def settle(self) -> None:
        """Make what holds what should hold; on an error nothing changes."""
        wanted = self.contexts[-1][1] if self.contexts else self.base
        before = self.active
        if before is not None and before.options == wanted:
            before.rebinding.apply()  # modules that were imported since
            return
        redo = None if before is None else before.rebinding.undo()
        try:
            self.active = None if wanted is None else _activate(wanted)
        except BaseException:
            if redo is not None:
                redo()
            raise


_state = _State()


def patch(*, cross_entropy: bool = False, packages: Sequence[str] = ("megatron",)) -> Report:
    """Let Megatron-core use tritoncomm, in all modules that are loaded and all that will be.

    Every name that refers to one of Megatron's mappings (their autograd classes and underscore helpers included), to
    its ``P2PCommunicator`` or to its two linear functions is bound to ours, whichever module has imported it. Losses
    and gradients are the same bits. As in Megatron, ``reduce_from_tensor_model_parallel_region`` overwrites its input,
    and sequence-parallel gathers of the linear layers use Megatron's global memory buffer.

    A second call with the same arguments only reaches modules that were imported in between; with other arguments it
    replaces the first. The patch is one of the process: all threads see it. Objects that were made before keep their
    class (a ``P2PCommunicator`` in use), and so do names in local variables, default arguments and closures.

    What remains Megatron's: calls with fused gradient accumulation, with deferred embedding gradients, or under
    autocast; TransformerEngine's layers, which call torch.distributed themselves; data-parallel and MoE bookkeeping.

    Args:
        cross_entropy: also replace ``vocab_parallel_cross_entropy`` by ours, which leaves the logits alone and sends
            one all-gather of two numbers a row instead of three all-reduces. It is off by default because it rounds
            differently (losses and gradients differ by about 1e-8 in fp32) and because on small vocabularies (16 x 32
            was measured) it takes twice Megatron's host time. Label smoothing stays Megatron's, which smooths over the
            local part of the vocabulary.
        packages: top-level packages whose modules are searched; add your own if it imports Megatron's mappings by name.

    Returns:
        What was replaced and what was not.

    Raises:
        ArgumentError: ``packages`` is not a list of names, or nothing of one of them is imported yet.
        ImportError: megatron-core is not installed.
        UnsupportedError: a function or method has other arguments than ours; nothing was replaced. This, and not the
            version number, decides whether a version works: versions that are not in ``TESTED`` only get a warning.
    """
    options = _options(cross_entropy, packages)
    with _state.lock:
        before = _state.base
        _state.base = options
        try:
            _state.settle()
        except BaseException:
            _state.base = before
            raise
        return _report()


def unpatch() -> None:
    """Bind every name to Megatron's own object again, also inside ``with patched()``; without a patch, nothing."""
    with _state.lock:
        _state.base = None
        _state.contexts.clear()
        _state.settle()


@contextmanager
def patched(*, cross_entropy: bool = False, packages: Sequence[str] = ("megatron",)) -> Iterator[Report]:
    """``patch(...)`` for a block; afterwards holds what held before, a patch with other arguments included.

    Blocks may be nested, and may overlap in several threads: the one entered last decides.
    """
    token, options = object(), _options(cross_entropy, packages)
    with _state.lock:
        _state.contexts.append((token, options))
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
            if any(each is token for each, _ in _state.contexts):  # no unpatch() in between
                _state.contexts = [each for each in _state.contexts if each[0] is not token]
                _state.settle()


def _options(cross_entropy: bool, packages: Sequence[str]) -> _Options:
    if isinstance(packages, str) or not packages:
        raise ArgumentError(f"packages must be a list of top-level package names, not {packages!r}")
    imported = {"megatron", *(module.partition(".")[0] for module in sys.modules)}
    missing = [package for package in packages if package not in imported]
    if missing:
        raise ArgumentError(f"packages: nothing of {', '.join(map(repr, missing))} is imported yet; import it first")
    return _Options(bool(cross_entropy), tuple(packages))


def _report() -> Report:
    assert _state.active is not None
    return _state.active.report()


def _core(name: str) -> Any:
    """A module of megatron-core; imported here, because Megatron is no dependency."""
    return importlib.import_module(f"megatron.core.{name}")


def _activate(options: _Options) -> _Active:
    swaps, unknown = _swaps(options.cross_entropy)
    for original, replacement in swaps:
        _check_signature(original, replacement)
    version = _core("package_info").__version__
    if version not in TESTED:
        warnings.warn(
            f"tritoncomm.integrations.megatron is tested with megatron-core {', '.join(TESTED)}; this is {version}, "
            "whose functions have the same arguments",
            stacklevel=4,
        )
    rebinding = Rebinding(swaps, options.packages)
    rebinding.apply()
    return _Active(options, rebinding, version, (*_kept(options.cross_entropy), *unknown))


def _swaps(cross_entropy: bool) -> tuple[list[tuple[Any, Any]], list[str]]:
    """(Megatron's, ours) of everything that is replaced, and a line for each mapping without a counterpart."""
    theirs, layers, state = _core("tensor_parallel.mappings"), _core("tensor_parallel.layers"), _core("parallel_state")
    swaps = [(getattr(theirs, name), _ours(name)) for name in mappings.__all__ if hasattr(theirs, name)]
    swaps.append((_named(_core("pipeline_parallel.p2p_communication"), "P2PCommunicator"), P2PCommunicator))
    originals = tuple(_named(layers, name) for name in _LINEAR)
    resolve_group = _core("utils").get_tensor_model_parallel_group_if_none
    linear = megatron_functions.linear_functions(*originals, resolve_group, state.get_global_memory_buffer)
    swaps += zip(originals, linear, strict=True)
    if cross_entropy:
        function = _core("tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
        group = state.get_tensor_model_parallel_group
        swaps.append((function, megatron_functions.cross_entropy_function(function, group)))
    known = {id(original) for original, _ in swaps}
    unknown = [
        f"{theirs.__name__}.{name}: tritoncomm has no counterpart"
        for name, value in vars(theirs).items()
        if inspect.isfunction(value) or inspect.isclass(value)
        if value.__module__ == theirs.__name__ and id(value) not in known
    ]
    return swaps, unknown


def _named(module: Any, name: str) -> Any:
    """What Megatron's ``module`` calls ``name``.

    Raises:
        UnsupportedError: this version does not have it.
    """
    if not hasattr(module, name):
        raise UnsupportedError(f"{module.__name__}.{name} is missing; this version of megatron-core is not supported")
    return getattr(module, name)


def _ours(name: str) -> Any:
    return getattr(megatron_functions if name in megatron_functions.__all__ else mappings, name)


def _check_signature(theirs: Any, ours: Any) -> None:
    """Refuse a function of Megatron's that takes calls which ours does not take.

    Raises:
        UnsupportedError: its name, and both signatures.
    """
    for name, expected, offered in _callables(theirs, ours):
        wanted, given = _parameters(expected), _parameters(offered)
        shared, more = given[: len(wanted)], given[len(wanted) :]
        if wanted != shared or any(p.default is p.empty for p in more):
            signatures = f"({', '.join(map(str, wanted))}), ours takes ({', '.join(map(str, given))})"
            raise UnsupportedError(f"{theirs.__module__}.{name} takes {signatures}; this version is not supported")


def _parameters(function: Any) -> list[inspect.Parameter]:
    """What a caller passes; annotations, which may differ, left out."""
    parameters = inspect.signature(function).parameters.values()
    return [p.replace(annotation=p.empty) for p in parameters if p.name != "ctx"]


def _callables(theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, Megatron's, ours) of a function, or of what is called on a class."""
    if not inspect.isclass(theirs):
        yield theirs.__name__, theirs, ours
    elif ours is P2PCommunicator:
        for name, method in vars(theirs).items():
            if inspect.isroutine(method):
                label = f"{theirs.__name__}.{name}"
                if not hasattr(ours, name):
                    raise UnsupportedError(f"{theirs.__module__}.{label}: tritoncomm has no such method")
                yield label, method, getattr(ours, name)
    else:
        forward = cast(Any, theirs).forward
        yield f"{theirs.__name__}.apply", forward, getattr(ours, "forward", None) or ours.apply


def _kept(cross_entropy: bool) -> Iterator[str]:
    """Lines of the report on what remains Megatron's."""
    yield "linear layers with gradient_accumulation_fusion, with deferred embedding gradients, or under autocast"
    if cross_entropy:
        yield "vocab_parallel_cross_entropy with label smoothing, which is over the local vocabulary there"
    else:
        yield "vocab_parallel_cross_entropy: ours is opt-in, cross_entropy=True"
    extension = sys.modules.get("megatron.core.extensions.transformer_engine")
    if extension is not None and extension.HAVE_TE:
        yield "TransformerEngine's layers (TELinear and its kind): they call torch.distributed themselves"
