"""Recurrent layers over shards of the sequence, by the functions of their modules that mix positions.

Most of transformers' call a causal convolution of their module, and a recurrence. Between ``enter_layer``
and ``exit_layer``, and nowhere else, these functions compute over the shards of all ranks. No forward is written
again, and there is no list of models.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache, partial, wraps
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.integrations import changes
from tritoncomm.integrations.transformers import forwards
from tritoncomm.integrations.transformers.batch_notes import BatchNotes, notes_of
from tritoncomm.integrations.transformers.recurrences import (
    FUSED,
    MODELS,
    Convolution,
    Recurrence,
    alternatives_of,
    boundaries_of,
    functions_of,
    replaceable,
    row_of,
    unknown_of,
)

__all__ = ["Functions", "enter_layer", "exit_layer", "keywords", "parameters_of", "recurrent_layers", "restore"]


_CACHES = ("cache", "cache_params", "past_key_values")  # names of one argument in 5.24, and in releases before
_MASK = "create_recurrent_attention_mask"


class _Layer:
    """Running forward of a recurrent layer.

    Attributes:
        module: the layer, by a weak reference.
        group: the ranks over which it computes.
        functions: over their shards, by the original, for all layers of the group.
        notes: of its batch.
        outer: forward of another layer that this one runs in.
        called: functions of the table that the layer has called, by name.
        is_in_exchange: whether one of them runs, which may call another one of ours.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup,
        functions: dict[Any, Callable[..., Any]],
        notes: BatchNotes,
        outer: "_Layer | None",
    ) -> None:
        self.module = ref(module)
        self.group = group
        self.functions = functions
        self.notes = notes
        self.outer = outer
        self.called: set[str] = set()
        self.is_in_exchange = False


class _RunningLayer(threading.local):
    """Innermost forward of a layer in this thread."""

    def __init__(self) -> None:  # in every thread; torch.compile guards on the names that are there
        self.layer: _Layer | None = None


_running = _RunningLayer()
_owners: "WeakSet[Functions]" = WeakSet()


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that call functions of the table, and no others that mix positions."""
    return [module for module in model.modules() if functions_of(type(module)) and not unknown_of(type(module))]


class Functions:
    """Owner of our functions in the modules of a model. A copy of the model has another owner of the same functions.

    Attributes:
        name: in ``register``.
        is_released: whether the modules have functions of their own again, unless there are other owners.
    """

    def __init__(self, name: str, functions: Iterable[tuple[str, str]], is_released: bool = False) -> None:
        self.name = name
        self.is_released = is_released
        self._functions = tuple(functions)
        _owners.add(self)
        try:
            for module, function in () if is_released else self._functions:
                make = _mask_of_layers if function == _MASK else partial(_over_shards, module, function)
                changes.share(self, module, function, make)
        except BaseException:
            self.release()
            raise

    @classmethod
    def of(cls, model: nn.Module, name: str) -> "Functions | None":
        """Replace the functions that the layers of a model call; None where they call none."""
        kinds = {base for part in model.modules() for base in type(part).__mro__}
        modules = {key: vars(sys.modules[key]) for key in sorted({kind.__module__ for kind in kinds} & {*sys.modules})}
        functions = [(module, x) for module, names in modules.items() for x in replaceable(module, names)]
        if not functions and not recurrent_layers(model):
            return None
        return cls(name, [*functions, *[(module, _MASK) for module, names in modules.items() if _MASK in names]])

    def release(self) -> "list[changes.Change]":
        """Put the functions back that no other owner needs; return what is left alone."""
        owned = changes.Changes()
        owned.add(changes.settle)
        for module, function in self._functions:
            owned.add(partial(changes.release, self, module, function))
        left = owned.undo()
        self.is_released = True
        return left

    def __reduce__(self) -> Any:
        return Functions, (self.name, self._functions, self.is_released)


def _layer() -> _Layer | None:
    """Return the innermost running forward of a layer; forget those that ended without their hooks."""
    while _running.layer is not None and not forwards.is_running(_running.layer.module()):
        _running.layer = _running.layer.outer
    return _running.layer


def keywords(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords for the forward of a model that was entered: without a cache, unless somebody asks for it."""
    # Where the model makes no mask for its layers, it hands down the one that it gets.
    # The classes of layers, and those that they are based on, as a parametrized one is.
    kinds = {kind.__module__ for layer in recurrent_layers(model) for kind in type(layer).__mro__}
    forward = forwards.innermost()
    if forward is None or any(hasattr(sys.modules.get(kind), _MASK) for kind in kinds):
        return {"use_cache": False, **kwargs}
    forwards.keep_mask(kwargs.get("attention_mask"))
    return {"use_cache": False, **kwargs, "attention_mask": forward.notes.layer_mask}


def _mask_of_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the padding mask of recurrent layers; over shards it returns the batch's mask."""

    @wraps(original)
    def mask(config: Any, *args: Any, **kwargs: Any) -> Any:
        # Layers get the mask as an argument, which checkpoints keep, so that a recomputation sees the same mask; a
        # global might be another batch's by then.
        forward = forwards.innermost()
        model: Any = None if forward is None else forward.model()
        if forward is None or forward.whole is not None:  # no model of ours, or one that has the whole batch
            return original(config, *args, **kwargs)
        is_of_model = any(config is getattr(part, "config", None) for part in model.modules())
        return forward.notes.layer_mask if is_of_model else original(config, *args, **kwargs)

    return mask


def restore(names: Collection[str]) -> None:
    """Take our functions out of the modules, but for those that other names of ``register`` need."""
    owned = changes.Changes()
    owned.add(changes.settle)
    for owner in _owners:
        if owner.name in names:
            owned.add(owner.release)
    owned.undo()
    # Those that an interrupt has left have the group.
    forwards.innermost()
    _layer()


def _over_shards(module: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes ``original``, and inside of a layer over the shards of its group.

    Args:
        name: global name of ``original`` in ``module``.
    """
    # Transformers' models hand all keywords down to these functions. Tensors that a function does not name are left
    # out: boundaries of documents, for example, would be those of a shard. What other code passes has a role.
    is_of_transformers = module.startswith(MODELS)
    parameters = inspect.signature(original).parameters if is_of_transformers else {}
    boundaries = boundaries_of(original)

    @wraps(original)
    def over_shards(*args: Any, **kwargs: Any) -> Any:
        layer = _layer()
        if layer is None:
            if not is_of_transformers and (forward := forwards.innermost()) is not None and forward.is_sharded:
                _checked_row(module, name, original, type(forward.model()))
            return original(*args, **kwargs)
        if layer.is_in_exchange:  # called by a function of ours, which has all positions
            return original(*args, **kwargs)
        if name in FUSED:
            return None  # as where its package is missing: the layer then calls the others
        layer.called.add(name)
        if is_of_transformers:
            kwargs = {key: x for key, x in kwargs.items() if key in parameters or not isinstance(x, Tensor)}
        functions = {} if is_compiling() else layer.functions
        if original not in functions:  # reading its signature takes as long as a small exchange
            row = _checked_row(module, name, original, type(layer.module()))
            functions[original] = row.over(original, layer.group, boundaries)
        layer.is_in_exchange = True
        try:
            return functions[original](*args, documents=layer.notes.documents, **kwargs)
        finally:
            layer.is_in_exchange = False

    function: Any = over_shards
    function.tritoncomm_original = over_shards, original
    return over_shards


def _checked_row(module: str, name: str, function: Any, caller: type) -> Recurrence | Convolution:
    """Return how a function computes over shards; reject one that nobody has registered."""
    row = row_of(name, module, function)
    if row is None:
        raise UnsupportedError(
            f"{caller.__name__} calls {name} of {function.__module__}, which is not registered, and would compute on a "
            "shard alone; call register_recurrence() or register_convolution()"
        )
    return row


def enter_layer(
    layer: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    group: ProcessGroup,
    functions: dict[Any, Callable[..., Any]],
    label: str,
) -> Any:
    """Open the scope of a layer's forward, and give it this rank's columns of the padding mask.

    Args:
        functions: by the original function the one over the shards of the group; filled when a layer calls it.
    """
    names = parameters_of(type(layer))
    outer = _layer()
    if "attention_mask" not in names and outer is not None and outer.group is group:
        _running.layer = _Layer(layer, group, functions, outer.notes, outer)
        return None
    arguments = dict(zip(names, args, strict=False)) | kwargs
    notes = notes_of(arguments.get("attention_mask"), label)
    if notes is None and group.size() == 1:
        return None
    if notes is None:
        raise ArgumentError(
            f"{label}: no batch of shard_batch came here, so that this rank's samples would count as a part of one "
            f"sequence of {group.size()} ranks; call the whole model, model(**shard_batch(batch, group))"
        )
    shape = tuple(arguments[names[0]].shape[:2])
    if notes.shape is not None and shape != notes.shape:
        raise ShapeError(
            f"{label}: {shape[0]} rows of {shape[1]} positions, and a batch of shard_batch of {notes.shape[0]} rows of "
            f"{notes.shape[1]}; slice the rows of all of its entries alike"
        )
    if any(arguments.get(key) is not None for key in _CACHES):
        raise UnsupportedError(
            f"{label}: a cache of states is not supported over shards; pass use_cache=False, and generate after "
            "switch(model, 'sdpa')"
        )
    # Without padding ``columns`` is None, as in one process: by a mask of ones a layer would multiply its input.
    index = names.index("attention_mask")
    if index < len(args):
        args = (*args[:index], notes.columns, *args[index + 1 :])
    else:
        kwargs = {**kwargs, "attention_mask": notes.columns}
    _running.layer = _Layer(layer, group, functions, notes, outer)
    return args, kwargs


def parameters_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the parameters of a module's forward."""
    return (_parameters.__wrapped__ if is_compiling() else _parameters)(kind)


@lru_cache(maxsize=1024)
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def exit_layer(layer: nn.Module, result: Any, name: str) -> None:
    """Close the scope; reject a forward that skipped a function, and so computed a shard alone."""
    running = _running.layer
    if running is None or running.module() is not layer:
        return
    _running.layer = running.outer
    if result is None or is_compiling():  # it is None where the forward has raised
        return
    if names := [
        " or ".join(sorted(functions)) for functions in alternatives_of(type(layer)) if not functions & running.called
    ]:
        raise UnsupportedError(
            f"{name}: {type(layer).__name__} did not call {', '.join(names)} as switch() left it, as if a kernel took "
            "its place, and a shard alone gives other numbers; load the model without kernels, or call switch() again"
        )
