"""Check of optimizers: only element-wise ones may update shards.

Parameters and their gradients are ColoTensors, whose norms are global. An optimizer that takes apart a full parameter,
or computes with its local memory (``.data``, state by ``numel()``), would take the shard for the parameter, silently.
"""

import inspect
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tritoncomm import variables
from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.layout import is_colo

__all__ = ["watch"]

_NAMES = "SGD Adam AdamW Adamax NAdam RAdam SparseAdam Adagrad Adadelta RMSprop Rprop ASGD"
_ELEMENTWISE = frozenset(inspect.unwrap(getattr(torch.optim, name).step) for name in _NAMES.split())
_REFUSED = {
    "Muon": "orthogonalizes the update of a full matrix",
    "Adafactor": "takes norms and means over rows and columns of a full parameter",
    "LBFGS": "takes dot products over all parameters",
}
_WRAPPERS = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")  # the wrapped optimizer steps and is checked itself
_warned: set[type[Optimizer]] = set()


def watch() -> None:
    """Register the check as a global step hook; called when the first ColoTensor is made."""
    # For an optimizer known to be element-wise the hook is one lookup, whatever its number of parameters.
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Reject a step of shards by an optimizer that is not element-wise; warn of unknown ones unless strict."""
    kind = type(optimizer)
    why_not = _why_not_by_element(kind)
    if why_not is None:
        return
    shards = [p for group in optimizer.param_groups for p in group["params"] if is_colo(p) and p.partitions]
    if not shards:
        return
    name, shapes = kind.__name__, ", ".join(str(list(p.global_shape)) for p in shards[:3])
    what = f"{len(shards)} sharded parameters ({shapes}{', ...' if len(shards) > 3 else ''})"
    if why_not:
        raise UnsupportedError(
            f"{name}.step: {name} {why_not}, and would treat each rank's shard as a full parameter; it has {what}. "
            "Use an element-wise optimizer for them (AdamW, SGD), or keep them replicated"
        )
    doubt = (
        f"{name} is not known to be element-wise, and steps {what}: norms of p and p.grad are those of the full "
        "parameter, but what it computes from p.data, p.grad.data, numel() or shape is that of each rank's shard"
    )
    if variables.STRICT.value:
        raise UnsupportedError(f"{name}.step: {doubt} ({variables.STRICT.name})")
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(doubt, stacklevel=3)


@lru_cache(maxsize=256)
def _why_not_by_element(kind: type[Optimizer]) -> str | None:
    """Return None for an element-wise optimizer, the reason to reject it, or an empty string for an unknown one."""
    for name, reason in _REFUSED.items():
        if issubclass(kind, getattr(torch.optim, name)):
            return reason
    if kind.__module__.startswith("torch.distributed.optim") and kind.__name__ in _WRAPPERS:
        return None
    # By function, not by class: a subclass counts as the class whose ``step`` it inherits.
    return None if inspect.unwrap(kind.step) in _ELEMENTWISE else ""
