"""Names of Megatron-core that are replaced: what ours is for each, which stay Megatron's, and why."""

import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from tritoncomm import launchers, mappings
from tritoncomm.errors import GroupError, UnsupportedError
from tritoncomm.integrations.megatron import functions
from tritoncomm.integrations.megatron.frozen_linear import frozen_linear_functions
from tritoncomm.integrations.megatron.rebinding import Rebinding
from tritoncomm.integrations.megatron.signatures import check_signature, forward_of, parameters_of
from tritoncomm.integrations.megatron.trained_linear import linear_functions
from tritoncomm.p2p import P2PCommunicator

__all__ = ["Options", "Originals", "Swaps", "core", "swaps_of", "why_foreign"]

MAPPINGS, LAYERS = "tensor_parallel.mappings", "tensor_parallel.layers"
LINEAR = "linear_with_grad_accumulation_and_async_allreduce", "LinearWithGradAccumulationAndAsyncCommunication"
FROZEN = "linear_with_frozen_weight", "LinearWithFrozenWeight"
FP32_SUM = "reduce_scatter_with_fp32_accumulation"
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
_warned = set[str]()


@dataclass(frozen=True)
class Options:
    """Arguments of ``patch``."""

    cross_entropy: bool
    packages: tuple[str, ...]
    strict: bool


class Originals:
    """Megatron's own objects by name, whether replaced or not, and our objects for them.

    Attributes:
        history: every object that a name of Megatron's has had, the newest last. ``importlib.reload`` makes new
            objects, and modules that imported a name before keep the older ones.
    """

    def __init__(self, rebinding: Callable[[], Rebinding | None]) -> None:
        self.history: dict[tuple[str, str], list[Any]] = {}
        self._rebinding = rebinding
        # By names the newest originals and our objects for them.
        self._replacements: dict[tuple[str, ...], tuple[Sequence[Any], Sequence[Any]]] = {}

    def of(self, module: str, name: str) -> Any:
        """Return Megatron's own object of a name, replaced or not; raise where this version does not have it."""
        try:
            found = core(module)
        except ModuleNotFoundError as error:
            if error.name != f"megatron.core.{module}":  # what is missing is Megatron, or a part of this module
                raise
            raise UnsupportedError(f"megatron.core.{module} is missing") from error
        if not hasattr(found, name):
            raise UnsupportedError(f"{found.__name__}.{name} is missing")
        value = getattr(found, name)
        rebinding = self._rebinding()
        return value if rebinding is None else rebinding.original(value)

    def ours(self, names: tuple[str, ...], originals: Sequence[Any], make: Make) -> Sequence[Any]:
        """Return our objects for these originals, the same ones in every patch.

        ``Rebinding`` finds names by the identity of their objects: a block could not restore a name with another one.
        """
        before, _ = self._replacements.get(names, ((), ()))
        # After a reload the originals are other objects, for which ours are made anew.
        if list(map(id, before)) != list(map(id, originals)):
            self._replacements[names] = originals, make(*originals)
        return self._replacements[names][1]

    def all_of(self, module: str, name: str, newest: Any) -> list[Any]:
        """Return the objects that the name has had, ``newest`` last."""
        others = [each for each in self.history.get((module, name), []) if each is not newest]
        self.history[module, name] = [*others, newest]
        return self.history[module, name]


def core(name: str) -> Any:
    """Return a module of megatron-core; imported here, because Megatron is no dependency."""
    return importlib.import_module(f"megatron.core.{name}")


def swaps_of(options: Options, originals: Originals) -> tuple[Swaps, tuple[str, ...]]:
    """Return (original, replacement) of every replaced object, and the report's lines on the kept ones."""
    swaps: Swaps = []
    replaced: set[str] = set()
    refused: list[str] = []  # lines on names with arguments that ours do not take
    others: list[str] = []  # lines on names that somebody has wrapped or replaced
    # Each set of names is replaced as a whole, or not at all. A linear function and its autograd class are one set: the
    # function decides which collectives the class runs, so an unknown argument of one may change the meaning of the
    # other. A mapping and its class are two: it only passes its arguments on.
    for module, names, replacements in _sets(options.cross_entropy, originals):
        both = f" ({' and '.join(names)} are replaced together or not at all)" if len(names) > 1 else ""
        try:
            objects = tuple(originals.of(module, name) for name in names)
            found = [(name, why_foreign(original)) for name, original in zip(names, objects, strict=True)]
            if lines := [f"megatron.core.{module}.{name} {why}: it stays{both}" for name, why in found if why]:
                others += lines
                continue
            ours = originals.ours(names, objects, replacements)
            for name, original, replacement in zip(names, objects, ours, strict=True):
                check_signature(f"megatron.core.{module}.{name}", original, replacement)
        except UnsupportedError as error:
            refused.append(f"{error}{both}")
            continue
        for name, original, replacement in zip(names, objects, ours, strict=True):
            swaps += [(each, replacement) for each in originals.all_of(module, name, original)]
            replaced.add(name)
    if not swaps:
        version = core("package_info").__version__
        raise UnsupportedError("\n".join([f"nothing of megatron-core {version} can be replaced:", *refused, *others]))
    if refused:
        _tell_of_refused(refused, options.strict)
    others += _wrapped_elsewhere(swaps, replaced, options.packages)
    return swaps, (*_kept(options.cross_entropy, replaced, originals), *refused, *others, *_unknown())


def why_foreign(value: Any) -> str:
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
                if id(value) not in known and (why := why_foreign(value)):
                    yield f"{module_name}.{name} {why}: it stays"


def _sets(cross_entropy: bool, originals: Originals) -> Iterator[tuple[str, tuple[str, ...], Make]]:
    """Yield (module, names, function from originals to replacements) of names that are replaced all or none."""
    theirs = core(MAPPINGS)
    for name in mappings.__all__:
        if hasattr(theirs, name):
            owner = functions if name in functions.__all__ else mappings
            yield MAPPINGS, (name,), _always(getattr(owner, name))
    yield "pipeline_parallel.p2p_communication", ("P2PCommunicator",), _always(P2PCommunicator)
    yield LAYERS, LINEAR, partial(_linear, originals)
    yield LAYERS, FROZEN, partial(_frozen_linear, originals)
    yield f"distributed.{FP32_SUM}", (FP32_SUM,), _fp32_sum
    if cross_entropy:
        yield "tensor_parallel.cross_entropy", (_CROSS_ENTROPY,), partial(_cross_entropy, originals)


def _always(ours: Any) -> Make:
    """Return the function that gives ``ours`` for any original."""
    return lambda theirs: [ours]


def _linear(originals: Originals, theirs: Any, linear_class: Any) -> Sequence[Any]:
    """Return our objects for Megatron's linear function of a trained weight, and for its autograd class."""
    for function in (theirs, forward_of(linear_class)):
        parameters_of(function)  # refuses one that cannot be read
    resolve = originals.of("utils", "get_tensor_model_parallel_group_if_none")
    buffers = originals.of("parallel_state", "get_global_memory_buffer")
    return linear_functions(theirs, linear_class, resolve, buffers)


def _frozen_linear(originals: Originals, theirs: Any, linear_class: Any) -> Sequence[Any]:
    """Return our objects for Megatron's linear function of a frozen weight, and for its autograd class."""
    parameters_of(theirs)  # refuses one that cannot be read
    resolve = originals.of("utils", "get_tensor_model_parallel_group_if_none")
    return frozen_linear_functions(theirs, linear_class, resolve)


def _fp32_sum(theirs: Any) -> Sequence[Any]:
    """Return our object for Megatron's reduce-scatter of gradients with sums in fp32, as a list of one."""
    return [functions.ReduceScatterWithFP32Accumulation(theirs)]


def _cross_entropy(originals: Originals, theirs: Any) -> Sequence[Any]:
    """Return our object for Megatron's cross entropy ``theirs``, as a list of one."""
    group = originals.of("parallel_state", "get_tensor_model_parallel_group")
    return [functions.VocabParallelCrossEntropy(group)]


def _kept(cross_entropy: bool, replaced: Set[str], originals: Originals) -> Iterator[str]:
    """Yield the report's lines on calls of replaced names that remain Megatron's by design."""
    if linear := replaced & {LINEAR[0], FROZEN[0]}:
        taken = {p.name for name in linear for p in parameters_of(originals.of(LAYERS, name))}
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
    theirs = core(MAPPINGS)
    for name, value in vars(theirs).items():
        is_own = (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == theirs.__name__
        if is_own and name not in mappings.__all__:
            yield f"{theirs.__name__}.{name}: tritoncomm has no counterpart"
