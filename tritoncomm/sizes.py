"""Sizes of the parallel axes, from the arguments of ``initialize()`` or from a ColossalAI config."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tritoncomm.errors import ArgumentError, GroupError

__all__ = ["TENSOR_MODES", "Sizes", "read_sizes"]

TENSOR_MODES = (None, "1d", "sequence")
_KEYS = {"pipeline": ("size",), "tensor": ("size", "mode")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ranks along every axis.

    Attributes:
        tensor: ranks that share one layer.
        pipeline: stages.
        data: replicas, None for what is left over.
        context: ranks that share one sequence.
        expert: ranks of the data axis that share one set of experts.
        virtual_pipeline: model chunks per stage.
        tensor_mode: ColossalAI's mode of the tensor axis, one of ``TENSOR_MODES``.
    """

    tensor: int
    pipeline: int
    data: int | None
    context: int
    expert: int
    virtual_pipeline: int | None
    tensor_mode: str | None = None

    def of_world(self, world: int) -> tuple[int, int, int, int]:
        """Data, pipeline, context and tensor size for ``world`` ranks.

        Raises:
            GroupError: they do not multiply to ``world``, or ``expert`` does not divide the data size.
        """
        model = self.tensor * self.pipeline * self.context
        data = self.data if self.data is not None else world // max(model, 1)
        if min(self.tensor, self.pipeline, self.context) < 1 or data * model != world:
            raise GroupError(
                f"data {data} * pipeline {self.pipeline} * context {self.context} * tensor {self.tensor} is not "
                f"{world}, the number of ranks"
            )
        if self.expert < 1 or data % self.expert:
            raise GroupError(f"expert {self.expert} does not divide data {data}")
        return data, self.pipeline, self.context, self.tensor


def read_sizes(
    tensor: Any,
    pipeline: Any,
    data: Any,
    context: Any,
    expert: Any,
    virtual_pipeline: Any,
    mesh: Any,
    config: Any,
) -> Sizes:
    """The sizes that the arguments of ``initialize()`` give.

    Raises:
        ArgumentError: an argument of the wrong type, a key of ``config`` in the wrong place, or ``mesh`` or ``config``
            together with the sizes that they replace.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"mesh must be torch's DeviceMesh, not {type(mesh).__name__}; ours has .to_torch()")
    replaced = {"mesh": ("tensor", "pipeline", "data", "context"), "config": ("tensor", "pipeline")}
    given = {"tensor": tensor, "pipeline": pipeline, "data": data, "context": context}
    for name, source in (("mesh", mesh), ("config", config)):
        doubled = (
            []
            if source is None
            else [f"{size}={given[size]!r}" for size in replaced[name] if given[size] not in (1, None)]
        )
        if doubled:
            raise ArgumentError(f"{name} says the sizes of {', '.join(replaced[name])}: leave out {', '.join(doubled)}")
    mode = None
    if config is not None:
        if mesh is not None:
            raise ArgumentError("mesh and config both say the sizes: give one of them")
        tensor, pipeline, mode = _read_config(config)
    return Sizes(
        _integer("tensor", tensor),
        _integer("pipeline", pipeline),
        None if data is None else _integer("data", data),
        _integer("context", context),
        _integer("expert", expert),
        None if virtual_pipeline is None else _integer("virtual_pipeline", virtual_pipeline),
        mode,
    )


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} must be an integer, not {value!r} ({type(value).__name__})") from None


def _read_config(config: Any) -> tuple[Any, Any, str | None]:
    """Tensor size, pipeline size and tensor mode of ``dict(parallel=dict(pipeline=..., tensor=...))``."""
    if not isinstance(config, Mapping):
        raise ArgumentError(f"config must be a dict, not {type(config).__name__}")
    for name in _KEYS:
        if name in config:
            example = f"dict(parallel=dict({name}={config[name]!r}))"
            raise ArgumentError(f"config[{name!r}] belongs in config['parallel']: config={example}")
    parallel = config.get("parallel", {})
    if not isinstance(parallel, Mapping):
        raise ArgumentError(f"config['parallel'] must be a dict, not {type(parallel).__name__}")
    unknown = [name for name in parallel if name not in (*_KEYS, "data")]  # data is always derived from the others
    if unknown:
        raise ArgumentError(f"config['parallel'] has no key {unknown[0]!r}; it takes {', '.join(_KEYS)}")
    (pipeline, _), (tensor, mode) = (_read_axis(name, parallel.get(name, 1)) for name in _KEYS)
    return tensor, pipeline, mode


def _read_axis(name: str, value: Any) -> tuple[Any, str | None]:
    """Size and mode of one axis, given as a number or as a dict."""
    place = f"config['parallel'][{name!r}]"
    if not isinstance(value, Mapping):
        return _integer(place, value), None
    mode = value.get("mode")
    if mode not in TENSOR_MODES:
        raise ArgumentError(f"tensor mode {mode!r} is not supported; supported are {TENSOR_MODES}")
    unknown = [key for key in value if key not in _KEYS[name]]
    if unknown or "size" not in value:
        what = f"has no key {unknown[0]!r}" if unknown else "has no size"
        raise ArgumentError(f"{place} {what}; it takes {', '.join(_KEYS[name])}")
    return _integer(f"{place}['size']", value["size"]), mode
