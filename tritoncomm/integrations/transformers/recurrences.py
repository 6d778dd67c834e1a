"""Functions by which recurrent layers mix positions, the roles of their tensors, and the layers that call them.

Those of transformers' own models are found by name, in a table; those of other code by ``register_recurrence``.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from torch import nn
from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError
from tritoncomm.integrations.transformers.registration import registered as registrations
from tritoncomm.recurrent import Exchanged, Gathered, Role, Sliced, by_heads, conv_halo

__all__ = [
    "CONVOLUTION", "FUSED", "MODELS", "NAMES", "RECURRENCES", "STEPS", "Convolution", "Recurrence", "alternatives_of",
    "boundaries_of", "functions_of", "original_of", "register_convolution", "register_recurrence", "replaceable",
    "row_of", "unknown_of", "unregister_recurrence", "wrong_layer",
]  # fmt: skip

Boundaries = Literal["cu_seqlens", "seq_idx"] | None


@dataclass(frozen=True)
class Recurrence:
    """Roles of the tensors of a recurrence, and of its result; see ``recurrent.by_heads``."""

    roles: Mapping[int | str, Role] | None
    result: Exchanged
    boundaries: Boundaries = None

    def over(self, function: Callable[..., Any], group: ProcessGroup, boundaries: Boundaries) -> Callable[..., Any]:
        """Return ``function`` over shards of the sequence; ``boundaries`` are those of a package behind it."""
        return by_heads(function, group, self.roles, self.result, self.boundaries or boundaries)


@dataclass(frozen=True)
class Convolution:
    """Causal convolution with its positions in this dim; see ``recurrent.conv_halo``."""

    positions: int = 2

    def over(self, function: Callable[..., Any], group: ProcessGroup, boundaries: Boundaries) -> Callable[..., Any]:
        """Return ``function`` over shards of the sequence, documents apart in any case."""
        return conv_halo(function, group, self.positions)


def _recurrence(result: Exchanged, roles: Mapping[Role, str]) -> Recurrence:
    """Return the roles by name, from the names of every role."""
    return Recurrence({name: role for role, names in roles.items() for name in names.split()}, result)


CONVOLUTION = "causal_conv1d_fn"
_HEADS, _VALUES, _CHANNELS = Exchanged(), Exchanged(columns=3), Exchanged(2, 1)
RECURRENCES = {
    "torch_chunk_gated_delta_rule": _recurrence(_VALUES, {_HEADS: "query key g beta", _VALUES: "value"}),
    # Ling's layers pass the rotary embeddings too, which the function takes among others and drops.
    "chunk_kimi_delta_attention": _recurrence(
        _VALUES, {_HEADS: "query key g beta", _VALUES: "value", None: "position_embeddings"}
    ),
    "mamba2_chunk_scan": _recurrence(_VALUES, {_HEADS: "dt B C", _VALUES: "hidden_states", Sliced(): "A D dt_bias"}),
    "mamba_selective_scan": _recurrence(
        _CHANNELS, {_CHANNELS: "hidden_states dt z", Gathered(2): "B C", Sliced(): "A D delta_bias"}
    ),
}
# Functions that do both in one, where a package has them; without it they return None, and the layer calls the others.
FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
NAMES = (CONVOLUTION, *RECURRENCES)
# Functions of one step with a cache, which is refused over shards.
STEPS = (
    "causal_conv1d_update", "mamba2_selective_state_update", "mamba_selective_state_update",
    "recurrent_kimi_delta_attention", "torch_recurrent_gated_delta_rule",
)  # fmt: skip
MODELS = "transformers.models."
_LIBRARIES = ("builtins", "torch", "transformers")
_registered: list[tuple[Any, Recurrence | Convolution]] = []  # functions that are found by identity
# Modules of packages whose functions mix positions.
_PACKAGES = re.compile(
    r"fla\.ops\.(?!utils|attnres)|fla\.modules\.(causal_)?conv|causal_conv1d|mamba_ssm\.ops\.(selective_|triton\.s)"
)


def register_recurrence(
    function: Callable[..., Any],
    roles: Mapping[int | str, Role] | None = None,
    result: Exchanged = Exchanged(),  # noqa: B008  (a tuple, never changed)
    boundaries: Boundaries = None,
) -> None:
    """Let ``switch`` accept layers of any module, as of remote code, that mix positions by a function.

    A layer is a module whose methods call ``function`` as a global name of their file. Its forward takes the
    ``attention_mask`` of the model; modules inside of it that call such functions need none. All that mixes positions
    in it has to be registered, convolutions by ``register_convolution``; it is trusted in this, so compare a step
    with one process (``tritoncomm verify``). Models that were switched before need another ``switch``.

    Args:
        function: the very object that the layers call, not a wrapper of it.
        roles: of the tensors among its arguments, by position or name, as for ``recurrent.by_heads``.
        result: dims of its result.
        boundaries: argument by which it keeps packed documents apart; without it each is a call of its own.

    Raises:
        ArgumentError: ``function`` is registered with other roles, or has no parameter of a name in ``roles``.

    Example:
        ``register_recurrence(chunk_gla, {"q": Exchanged(), "k": Exchanged(), "v": Exchanged(columns=3), "g":
        Exchanged()}, Exchanged(columns=3), "cu_seqlens")``
    """
    parameters = _parameters_of(function, "register_recurrence")
    names = [name for name in roles or () if isinstance(name, str)]
    if parameters is not None and (missing := [name for name in names if name not in parameters]):
        raise ArgumentError(
            f"register_recurrence: {_label(function)} has no parameter {', '.join(missing)}; it has "
            f"{', '.join(parameters)}"
        )
    if boundaries is not None and parameters is not None and boundaries not in parameters:
        raise ArgumentError(f"register_recurrence: {_label(function)} has no parameter {boundaries}")
    _register(function, Recurrence(None if roles is None else dict(roles), result, boundaries), "register_recurrence")


def register_convolution(function: Callable[..., Any], positions: int = 2) -> None:
    """Let ``switch`` accept layers of any module that call a causal convolution; see ``register_recurrence``.

    Args:
        function: see ``recurrent.conv_halo``.
        positions: dim of the positions: 2 of ``[b, channels, n]``, or 1 of ``[b, n, channels]``.

    Raises:
        ArgumentError: ``function`` is registered otherwise, or another dim.
    """
    _parameters_of(function, "register_convolution")
    if positions not in (1, 2):
        raise ArgumentError(f"register_convolution: positions={positions!r}; they are dim 1 or 2 of three")
    _register(function, Convolution(positions), "register_convolution")


def unregister_recurrence(function: Callable[..., Any]) -> None:
    """Take back ``register_recurrence`` or ``register_convolution`` for the next ``switch``.

    Raises:
        ArgumentError: ``function`` is not registered.
    """
    kept = [(entry, row) for entry, row in _registered if entry is not function]
    if len(kept) == len(_registered):
        raise ArgumentError(f"unregister_recurrence: {_label(function)} is not registered")
    _registered[:] = kept
    _forget(function)


def _register(function: Callable[..., Any], row: Recurrence | Convolution, name: str) -> None:
    """Add a row, unless it is there."""
    before = next((before for entry, before in _registered if entry is function), None)
    if before is not None and before != row:
        raise ArgumentError(f"{name}: {_label(function)} is registered as {before}; unregister_recurrence() it first")
    if before is None:
        _registered.append((function, row))
        _forget(function)


def _forget(function: Callable[..., Any]) -> None:
    """Forget what was made of a function, and which layers call which functions."""
    for registration in registrations.values():
        registration.functions.pop(function, None)
    for cache in (functions_of, unknown_of, alternatives_of):
        cache.cache_clear()


def _parameters_of(function: Callable[..., Any], name: str) -> tuple[str, ...] | None:
    """Return the names of the parameters of a function; None where it takes any, or does not say."""
    if not callable(function):
        raise ArgumentError(f"{name}: needs a function, not {type(function).__name__}")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin function
        return None
    kinds = {parameter.kind for parameter in parameters.values()}
    return None if kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} else tuple(parameters)


def _label(function: Any) -> str:
    """Return the name of a function in errors."""
    return getattr(function, "__qualname__", None) or repr(function)


def row_of(name: str, module: str, function: Any) -> Recurrence | Convolution | None:
    """Return how a function computes over shards: one that is registered, or of transformers' under its name.

    Args:
        name: global name of the function in a module.
    """
    original = original_of(function)
    for entry, row in _registered:
        if entry is original:
            return row
    if not module.startswith(MODELS) or name not in NAMES:
        return None
    return Convolution() if name == CONVOLUTION else RECURRENCES[name]


def original_of(function: Any) -> Any:
    """Return the function that one of ours in a module stands for; any other one is its own."""
    ours, original = getattr(function, "tritoncomm_original", (None, None))
    return original if ours is function else function  # a wrapper around ours has a copy of the attribute


def replaceable(module: str, names: Mapping[str, Any]) -> list[str]:
    """Return the global names of a module whose functions mix positions in a layer."""
    if module.startswith(MODELS):
        names_of_table = (*NAMES, *FUSED)
        return [name for name in names if name in names_of_table or row_of(name, module, names[name]) is not None]
    if module.partition(".")[0] in _LIBRARIES:
        return []
    return [name for name, x in names.items() if row_of(name, module, x) is not None or _is_of_package(x)]


@lru_cache(maxsize=1024)
def functions_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the global names of functions with a row that a class of layers calls."""
    return tuple(sorted({name for module, name, x in _calls(kind) if row_of(name, module, x) is not None}))


@lru_cache(maxsize=1024)
def alternatives_of(kind: type[nn.Module]) -> tuple[frozenset[str], ...]:
    """Return sets of these names: of each, a forward has to call one.

    Transformers' layers call all. Others may choose among several recurrences, as between training and evaluation;
    what they have no row for raises an error inside of them.
    """
    sets: dict[Any, set[str]] = {}
    for module, name, x in _calls(kind):
        row = row_of(name, module, x)
        if row is not None:
            sets.setdefault(name if module.startswith(MODELS) else type(row), set()).add(name)
    return tuple(map(frozenset, sets.values()))


@lru_cache(maxsize=1024)
def unknown_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of functions without a row that kernels may replace, and that a layer of transformers calls."""
    return tuple(
        sorted({
            name
            for module, name, x in _calls(kind)
            if module.startswith(MODELS)
            and _is_replaced(x)
            and name not in (*FUSED, *STEPS)
            and row_of(name, module, x) is None
        })
    )  # fmt: skip


def wrong_layer(sharded_layers: Collection[nn.Module]) -> str | None:
    """Return the reason why a recurrent layer is wrong over shards, or None.

    Args:
        sharded_layers: recurrent layers that compute over shards.
    """
    nested = {id(part) for layer in sharded_layers for part in layer.modules() if part is not layer}
    for layer in sharded_layers:
        kind = type(layer)
        if "attention_mask" not in inspect.signature(kind.forward).parameters and id(layer) not in nested:
            return f"{kind.__name__} takes no attention_mask, by which it would get the documents of a batch"
        # Whether it calls a registered convolution, so that an ``nn.Conv1d`` in it has the weights alone.
        calls_convolution = any(
            isinstance(row_of(name, module, function), Convolution) for module, name, function in _calls(kind)
        )
        for part in layer.modules():
            is_served = functions_of(type(part)) or (calls_convolution and isinstance(part, nn.Conv1d))
            if isinstance(part, nn.Conv1d | nn.Conv2d | nn.RNNBase) and not is_served:
                return (
                    f"{type(part).__name__} in {kind.__name__} mixes positions, and would stop at the end of every "
                    "shard; let the layer call a function, and give that to register_convolution()"
                )
    return None


def _calls(kind: type[nn.Module]) -> Iterator[tuple[str, str, Any]]:
    """Yield the functions that methods of a class call by a global name: module of the class, name, function."""
    for base in kind.__mro__:
        if not base.__module__.startswith(MODELS) and base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for value in vars(base).values():
            method: Any = inspect.unwrap(value) if callable(value) else None
            code = getattr(method, "__code__", None)
            for name in () if code is None else code.co_names:
                if name in method.__globals__ or name in NAMES:
                    yield base.__module__, name, method.__globals__.get(name)


def _is_of_package(function: Any) -> bool:
    """Whether a function, but no kernel, is one of a package of recurrences or causal convolutions."""
    return inspect.isfunction(function) and _PACKAGES.match(original_of(function).__module__) is not None


def _is_replaced(function: Any) -> bool:
    """Whether a function is one of a layer's that transformers replaces by that of a package, where there is one."""
    inner = getattr(function, "__wrapped__", None)
    code = getattr(function, "__code__", None)
    return inner is not None and code is not None and code.co_filename.endswith("hub_kernels.py")


def boundaries_of(function: Callable[..., Any]) -> Boundaries:
    """Return the argument by which a package's function behind one of transformers keeps documents apart; or None."""
    # A public way to the package's function is missing in transformers (read in 5.23 and 5.24). Without its name every
    # document is a call of its own.
    inner = inspect.unwrap(function, stop=_is_replaced)
    if not inspect.isfunction(inner):
        return None
    variables = inspect.getclosurevars(inner).nonlocals
    names = variables.get("applicable_params", ()) if variables.get("is_new_implementation") else ()
    # Of mamba_ssm's two the other one is for states.
    return "seq_idx" if "seq_idx" in names else "cu_seqlens" if "cu_seqlens" in names else None
