"""Which optimizers may update shards: those whose update of an element depends on that element alone.

Every other optimizer computes something of a whole parameter (a norm, a mean, a matrix product), and on a shard it
computes that of the shard. No error would follow, only other values than those of one process.
"""

import inspect
import warnings
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.layout import is_colo

__all__ = ["watch"]

_NAMES = "SGD Adam AdamW Adamax NAdam RAdam SparseAdam Adagrad Adadelta RMSprop Rprop ASGD"
_ELEMENTWISE = frozenset(inspect.unwrap(getattr(torch.optim, name).step) for name in _NAMES.split())
_REFUSED = {
    "Muon": "orthogonalizes the update of a whole matrix",
    "Adafactor": "takes norms and means over rows and columns of a whole parameter",
    "LBFGS": "takes dot products over all parameters",
}
_WRAPPERS = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")  # the optimizer inside steps, and is checked, itself
_warned: set[type[Optimizer]] = set()


@cache
def watch() -> None:
    """Check every optimizer before it steps, from now on; called when the first ColoTensor is made.

    torch runs the hook in each step of the process. For an optimizer that is known to be element-wise it is one lookup,
    whatever the number of parameters.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The hook.

    Raises:
        UnsupportedError: an optimizer that computes something of whole parameters would step a shard.
    """
    verdict = _verdict(type(optimizer))
    if verdict is None:
        return
    shards = [p for group in optimizer.param_groups for p in group["params"] if is_colo(p) and p._parts]
    if not shards:
        return
    name, shapes = type(optimizer).__name__, ", ".join(str(list(p._global_shape)) for p in shards[:3])
    what = f"{len(shards)} sharded parameters ({shapes}{', ...' if len(shards) > 3 else ''})"
    if verdict:
        raise UnsupportedError(
            f"{name}.step: {name} {verdict}, and would take each rank's shard for a whole parameter; it has {what}. "
            "Use an element-wise optimizer for them (AdamW, SGD), or keep them replicated"
        )
    _warn(type(optimizer), what)


@cache
def _verdict(kind: type[Optimizer]) -> str | None:
    """None for an element-wise optimizer, the reason of one that is refused, an empty string for an unknown one.

    A subclass counts as the class whose ``step`` it inherits.
    """
    for name, reason in _REFUSED.items():
        if issubclass(kind, getattr(torch.optim, name)):
            return reason
    if kind.__module__.startswith("torch.distributed.optim") and kind.__name__ in _WRAPPERS:
        return None
    return None if inspect.unwrap(kind.step) in _ELEMENTWISE else ""


def _warn(kind: type[Optimizer], what: str) -> None:
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"{kind.__name__} is not known to be element-wise, and steps {what}: what it computes of a whole parameter (a "
        "norm, a mean, a factorization) it computes of each rank's shard. It is right only if the update of every "
        "element depends on that element alone",
        stacklevel=4,
    )
