"""Megatron-core on tritoncomm, unedited: ``patch()`` once Megatron is imported, ``unpatch()`` to undo it.

It replaces the tensor-parallel mappings, ``P2PCommunicator`` and the functions of the linear layers, which carry half
of the tensor-parallel traffic. Losses and gradients keep their bits. docs/integrations_megatron.md lists the calls that
stay Megatron's.
"""

import importlib
import inspect
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from tritoncomm import launchers, mappings, variables
from tritoncomm.errors import ArgumentError, GroupError, UnsupportedError
from tritoncomm.integrations import megatron_functions
from tritoncomm.integrations.rebinding import Rebinding
from tritoncomm.p2p import P2PCommunicator

__all__ = ["TESTED", "Report", "patch", "patched", "unpatch"]

TESTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
"""Versions of megatron-core that the tests compare with, bit for bit."""

_MAPPINGS, _LAYERS = "tensor_parallel.mappings", "tensor_parallel.layers"
_LINEAR = "linear_with_grad_accumulation_and_async_allreduce", "LinearWithGradAccumulationAndAsyncCommunication"
_FROZEN = "linear_with_frozen_weight", "LinearWithFrozenWeight"
_FP32_SUM = "reduce_scatter_with_fp32_accumulation"
_CROSS_ENTROPY = "vocab_parallel_cross_entropy"
# Arguments of the linear functions whose calls remain Megatron's, with the report's phrase. Not all releases have each.
_KEPT_ARGUMENTS = {
    "gradient_accumulation_fusion": "with gradient_accumulation_fusion",
    "grad_output_buffer": "with deferred embedding gradients (grad_output_buffer)",
    "gtp_remat_size": "with a gtp_remat_size other than 1",
    "output_dtype": "with an output_dtype other than the input's",
}
Swaps = list[tuple[Any, Any]]  # Megatron's, ours
Make = Callable[..., Sequence[Any]]  # from Megatron's objects to ours


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
        modules, names = {module for module, _ in self.replaced}, sorted({name for _, name in self.replaced})
        head = f"megatron-core {self.version}: {len(self.replaced)} names in {len(modules)} modules replaced"
        lines = [f"ours: {', '.join(names)}"] * bool(names) + [f"kept: {line}" for line in self.kept]
        indents = {"initial_indent": "  ", "subsequent_indent": "    ", "break_long_words": False}
        return "\n".join([head, *(part for line in lines for part in textwrap.wrap(line, 80, **indents))])


@dataclass(frozen=True)
class _Options:
    """Arguments of ``patch``."""

    cross_entropy: bool
    packages: tuple[str, ...]
    strict: bool


@dataclass(frozen=True)
class _Active:
    """A patch that is bound: its arguments, its names, and what its report says."""

    options: _Options
    rebinding: Rebinding
    version: str
    kept: tuple[str, ...]

    def report(self) -> Report:
        """Return the report on the names that are replaced now."""
        return Report(self.version, tuple(sorted(self.rebinding.names)), self.kept)


class _State:
    """Requested patch (``base``, or the last open context) and the active one.

    Attributes:
        originals: every object that a name of Megatron's has had, the newest last. ``importlib.reload`` makes new
            objects, and modules that imported a name before keep the older ones.
        replacements: by names the newest originals and our objects for them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.base: _Options | None = None
        self.contexts: list[tuple[object, _Options]] = []
        self.active: _Active | None = None
        self.originals: dict[tuple[str, str], list[Any]] = {}
        self.replacements: dict[tuple[str, ...], tuple[Sequence[Any], Sequence[Any]]] = {}

    def settle(self) -> None:
        """Apply the requested patch, all or nothing."""
        requested = self.contexts[-1][1] if self.contexts else self.base
        if variables.MEGATRON.value == "off":
            requested = None
        before = self.active
        if before is not None and before.options == requested:
            swaps, kept = _swaps(before.options)
            before.rebinding.extend(swaps)
            before.rebinding.apply()  # modules that were imported or reloaded since
            self.active = replace(before, kept=kept)
            return
        # All or nothing: if the requested patch fails, the earlier one is bound again.
        redo = None if before is None else before.rebinding.undo()
        try:
            self.active = None if requested is None else _activate(requested)
        except BaseException:
            if redo is not None:
                redo()
            raise

    def original(self, module: str, name: str) -> Any:
        """Return Megatron's own object of a name, replaced or not; raise where this version does not have it."""
        try:
            found = _core(module)
        except ModuleNotFoundError as error:
            if (
                error.name != f"megatron.core.{module}"
            ):  # what is missing is not this module, but Megatron or a part of it
                raise
            raise UnsupportedError(f"megatron.core.{module} is missing") from error
        if not hasattr(found, name):
            raise UnsupportedError(f"{found.__name__}.{name} is missing")
        value = getattr(found, name)
        return value if self.active is None else self.active.rebinding.original(value)

    def ours(self, names: tuple[str, ...], originals: Sequence[Any], make: Make) -> Sequence[Any]:
        """Return our objects for these originals, the same ones in every patch.

        ``Rebinding`` finds names by the identity of their objects: a block could not restore a name with another one.
        """
        before, _ = self.replacements.get(names, ((), ()))
        # After a reload the originals are other objects, for which ours are made anew.
        if list(map(id, before)) != list(map(id, originals)):
            self.replacements[names] = originals, make(*originals)
        return self.replacements[names][1]

    def all_originals(self, module: str, name: str, newest: Any) -> list[Any]:
        """Return the objects that the name has had, ``newest`` last."""
        others = [each for each in self.originals.get((module, name), []) if each is not newest]
        self.originals[module, name] = [*others, newest]
        return self.originals[module, name]


_state = _State()
_warned: set[str] = set()


def patch(*, cross_entropy: bool = False, packages: Sequence[str] = ("megatron",), strict: bool = False) -> Report:
    """Let Megatron-core use tritoncomm, in all modules that are loaded now or later.

    Every name that refers to one of Megatron's mappings (their autograd classes and underscore helpers included), to
    its ``P2PCommunicator``, to its two linear functions or to ``reduce_scatter_with_fp32_accumulation`` is bound to
    ours, whichever module has imported it. Losses and gradients keep their bits, but for that sum: it is in rank order,
    and Megatron's in the order of ``torch.sum``. As in Megatron, ``reduce_from_tensor_model_parallel_region``
    overwrites its input, ``copy_to_tensor_model_parallel_region`` overwrites its gradient in backward, and
    sequence-parallel gathers of the linear layers use Megatron's global memory buffer. ``mappings.overwrite_inputs`` is
    not switched.

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
    return tuple(sorted((module, name) for module, name, value in rebound if _foreign(value)))


@contextmanager
def patched(
    *, cross_entropy: bool = False, packages: Sequence[str] = ("megatron",), strict: bool = False
) -> Iterator[Report]:
    """Run ``patch(...)`` for a block; the earlier patch, if any, holds again afterwards, with its own arguments.

    Blocks may be nested, and may overlap in several threads: the one entered last decides.
    """
    token, options = object(), _options(cross_entropy, packages, strict)
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


def _options(cross_entropy: bool, packages: Sequence[str], strict: bool) -> _Options:
    """Check the arguments of ``patch``, and return them."""
    if isinstance(packages, str) or not packages:
        raise ArgumentError(f"packages must be a list of top-level package names, not {packages!r}")
    if problem := variables.switch_problem(variables.MEGATRON.value):
        raise ArgumentError(f"{variables.MEGATRON.name} {problem}")  # or both sides of an A/B run would be ours
    imported = {"megatron", *(module.partition(".")[0] for module in sys.modules)}
    missing = [package for package in packages if package not in imported]
    if missing:
        raise ArgumentError(f"packages: nothing of {', '.join(map(repr, missing))} is imported yet; import it first")
    return _Options(bool(cross_entropy), tuple(packages), bool(strict))


def _report() -> Report:
    """Return the report of the patch that is bound, or of the one that TRITONCOMM_MEGATRON has switched off."""
    if _state.active is None:
        return Report(_core("package_info").__version__, (), (f"all names: {variables.MEGATRON.name} is off",))
    return _state.active.report()


def _core(name: str) -> Any:
    """Return a module of megatron-core; imported here, because Megatron is no dependency."""
    return importlib.import_module(f"megatron.core.{name}")


def _activate(options: _Options) -> _Active:
    """Bind the names of all loaded modules to our objects; warn of a version that was not tested."""
    swaps, kept = _swaps(options)
    version = _core("package_info").__version__
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


def _swaps(options: _Options) -> tuple[Swaps, tuple[str, ...]]:
    """Return (original, replacement) of every replaced object, and the report's lines on the kept ones."""
    swaps: Swaps = []
    replaced: set[str] = set()
    refused: list[str] = []
    others: list[str] = []  # lines on names that somebody has wrapped or replaced
    # A name is replaced if ours takes every call that Megatron's takes. A linear function decides which collectives its
    # autograd class runs, so an unknown argument of one may change the meaning of the other. Both or none are replaced.
    # Mappings only hand their arguments to their classes, which are judged by their own arguments.
    for module, names, replacements in _sets(options.cross_entropy):
        both = f" ({' and '.join(names)} are replaced together or not at all)" if len(names) > 1 else ""
        try:
            originals = tuple(_state.original(module, name) for name in names)
            found = [(name, _foreign(original)) for name, original in zip(names, originals, strict=True)]
            if lines := [f"megatron.core.{module}.{name} {why}: it stays{both}" for name, why in found if why]:
                others += lines
                continue
            ours = _state.ours(names, originals, replacements)
            for name, original, replacement in zip(names, originals, ours, strict=True):
                _check_signature(f"megatron.core.{module}.{name}", original, replacement)
        except UnsupportedError as error:
            refused.append(f"{error}{both}")
            continue
        for name, original, replacement in zip(names, originals, ours, strict=True):
            swaps += [(each, replacement) for each in _state.all_originals(module, name, original)]
            replaced.add(name)
    if not swaps:
        version = _core("package_info").__version__
        raise UnsupportedError("\n".join([f"nothing of megatron-core {version} can be replaced:", *refused, *others]))
    if refused:
        _tell_of_refused(refused, options.strict)
    others += _wrapped_elsewhere(swaps, replaced, options.packages)
    return swaps, (*_kept(options.cross_entropy, replaced), *refused, *others, *_unknown())


def _foreign(value: Any) -> str:
    """Return why an object is not Megatron's own, in words: somebody has wrapped or replaced it; else an empty text."""
    if hasattr(value, "__wrapped__"):
        return "is wrapped by somebody"
    owner = getattr(value, "__module__", None)
    if not isinstance(owner, str) or owner.partition(".")[0] in ("megatron", "tritoncomm"):
        return ""
    return f"is {owner}.{getattr(value, '__qualname__', type(value).__name__)}, which is not Megatron's"


def _tell_of_refused(refused: Sequence[str], strict: bool) -> None:
    """Raise, or warn once on the first rank of a node, of names that stay Megatron's because of their arguments."""
    text = "\n".join(["these names stay Megatron's, because tritoncomm does not know their arguments:", *refused])
    if strict:
        raise UnsupportedError(text)
    try:
        launch = launchers.started_by(os.environ)
    except GroupError:
        launch = None
    if text not in _warned and (launch is None or launchers.is_first(launch, of_node=True)):
        _warned.add(text)
        warnings.warn(f"tritoncomm.patch_megatron: {text}", stacklevel=6)


def _wrapped_elsewhere(swaps: Swaps, names: Set[str], packages: Sequence[str]) -> Iterator[str]:
    """Yield lines on names of other modules than their own whose objects somebody has wrapped or replaced there."""
    known = {id(value) for pair in swaps for value in pair}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] in packages and inspect.ismodule(module):
            for name in sorted(names & vars(module).keys()):
                value = vars(module)[name]
                if id(value) not in known and (why := _foreign(value)):
                    yield f"{module_name}.{name} {why}: it stays"


def _sets(cross_entropy: bool) -> Iterator[tuple[str, tuple[str, ...], Make]]:
    """Yield (module, names, function from originals to replacements) of names that are replaced all or none."""
    theirs = _core(_MAPPINGS)
    for name in mappings.__all__:
        if hasattr(theirs, name):
            owner = megatron_functions if name in megatron_functions.__all__ else mappings
            yield _MAPPINGS, (name,), _always(getattr(owner, name))
    yield "pipeline_parallel.p2p_communication", ("P2PCommunicator",), _always(P2PCommunicator)
    yield _LAYERS, _LINEAR, _linear
    yield _LAYERS, _FROZEN, _frozen_linear
    yield f"distributed.{_FP32_SUM}", (_FP32_SUM,), _fp32_sum
    if cross_entropy:
        yield "tensor_parallel.cross_entropy", (_CROSS_ENTROPY,), _cross_entropy


def _always(ours: Any) -> Make:
    """Return the function that gives ``ours`` for any original."""
    return lambda theirs: [ours]


def _linear(theirs: Any, linear_class: Any) -> Sequence[Any]:
    """Return our objects for Megatron's linear function of a trained weight, and for its autograd class."""
    for function in (theirs, _forward(linear_class)):
        _parameters(function)  # refuses one that cannot be read
    resolve = _state.original("utils", "get_tensor_model_parallel_group_if_none")
    buffers = _state.original("parallel_state", "get_global_memory_buffer")
    return megatron_functions.linear_functions(theirs, linear_class, resolve, buffers)


def _frozen_linear(theirs: Any, linear_class: Any) -> Sequence[Any]:
    """Return our objects for Megatron's linear function of a frozen weight, and for its autograd class."""
    _parameters(theirs)  # refuses one that cannot be read
    resolve = _state.original("utils", "get_tensor_model_parallel_group_if_none")
    return megatron_functions.frozen_linear_functions(theirs, linear_class, resolve)


def _fp32_sum(theirs: Any) -> Sequence[Any]:
    """Return our object for Megatron's reduce-scatter of gradients with sums in fp32, as a list of one."""
    return [megatron_functions.ReduceScatterWithFP32Accumulation(theirs)]


def _cross_entropy(theirs: Any) -> Sequence[Any]:
    """Return our object for Megatron's cross entropy ``theirs``, as a list of one."""
    group = _state.original("parallel_state", "get_tensor_model_parallel_group")
    return [megatron_functions.VocabParallelCrossEntropy(group)]


def _check_signature(label: str, theirs: Any, ours: Any) -> None:
    """Reject a function of Megatron's if ours does not take every call that it takes."""
    for suffix, expected, offered in _callables(label, theirs, ours):
        names, own = _parameters(expected), _parameters(offered)
        more = own[len(names) :]  # arguments that only ours has: a call of Megatron's leaves them out
        if len(names) > len(own) or any(p.default is p.empty for p in more) or not all(map(_takes, own, names)):
            signatures = f"({', '.join(map(str, names))}), ours takes ({', '.join(map(str, own))})"
            raise UnsupportedError(f"{label}{suffix} takes {signatures}")


def _takes(ours: inspect.Parameter, theirs: inspect.Parameter) -> bool:
    """Whether our parameter takes each value that Megatron's takes; one without a default may have any in ours."""
    is_same = (ours.name, ours.kind) == (theirs.name, theirs.kind)
    return is_same and (theirs.default is theirs.empty or theirs.default == ours.default)


def _parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters that a caller passes, without annotations, which may differ."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{function!r} has no signature") from error
    return [p.replace(annotation=p.empty) for p in parameters if p.name != "ctx"]


def _forward(autograd_class: Any) -> Any:
    """Return the function with the arguments of ``apply``: ``forward``, or ``apply`` of our classes without it."""
    return getattr(autograd_class, "forward", None) or getattr(autograd_class, "apply", None)


def _callables(label: str, theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (suffix of the name, Megatron's, ours) of a function, or of the functions that callers of a class call."""
    if inspect.isclass(theirs) != inspect.isclass(ours) or not callable(theirs):
        raise UnsupportedError(f"{label} is an object of {type(theirs).__name__}")
    if not inspect.isclass(theirs):
        yield "", theirs, ours
    elif ours is not P2PCommunicator:
        yield ".apply", _forward(theirs), _forward(ours)
    else:
        for member in inspect.classify_class_attrs(theirs):
            if member.defining_class is object or member.kind == "data":
                continue
            offered = inspect.getattr_static(ours, member.name, None)
            if offered is None or isinstance(offered, property) != (member.kind == "property"):
                raise UnsupportedError(f"{label}.{member.name}: tritoncomm has no such {member.kind}")
            if member.kind != "property":
                yield f".{member.name}", getattr(theirs, member.name), getattr(ours, member.name)


def _kept(cross_entropy: bool, replaced: Set[str]) -> Iterator[str]:
    """Yield the report's lines on calls of replaced names that remain Megatron's by design."""
    if linear := replaced & {_LINEAR[0], _FROZEN[0]}:
        taken = {p.name for name in linear for p in _parameters(_state.original(_LAYERS, name))}
        cases = [phrase for argument, phrase in _KEPT_ARGUMENTS.items() if argument in taken]
        yield f"linear layers {', '.join(cases)}, under autocast, or with weights of a tensor subclass"
    if _CROSS_ENTROPY in replaced:
        yield f"{_CROSS_ENTROPY} with label smoothing, which is over the local vocabulary there"
    elif not cross_entropy:
        yield f"{_CROSS_ENTROPY}: ours is opt-in, cross_entropy=True"
    extension = sys.modules.get("megatron.core.extensions.transformer_engine")
    if extension is not None and extension.HAVE_TE:
        yield "TransformerEngine's layers (TELinear and its kind): they call torch.distributed themselves"


def _unknown() -> Iterator[str]:
    """Yield the report's lines on mappings without a counterpart."""
    theirs = _core(_MAPPINGS)
    for name, value in vars(theirs).items():
        is_own = (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == theirs.__name__
        if is_own and name not in mappings.__all__:
            yield f"{theirs.__name__}.{name}: tritoncomm has no counterpart"
