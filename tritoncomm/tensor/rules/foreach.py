"""``torch._foreach_*`` and ``torch._fused_*`` of optimizers: run on local tensors, layouts kept."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm.core import eager
from tritoncomm.errors import UnsupportedError
from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.distspec import ReplicaSpec
from tritoncomm.tensor.elementwise import ELEMENTWISE
from tritoncomm.tensor.layout import is_colo, plain
from tritoncomm.tensor.rules.gradients import shards_by_group
from tritoncomm.tensor.rules.table import rule

__all__ = ["on_lists"]


@rule(
    named="torch._foreach_*, torch._fused_* (optimizers)",
    accepts="any sharding, the same at the same index of every list; plain tensors are local shards",
    collectives="none; norms: one all-gather of the local norms of all shards",
)
def on_lists(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists of tensors; tensors at the same index need one layout."""
    base = name.removeprefix("_foreach_").removesuffix("_")
    if base == "norm":
        return _norms(*args, **kwargs)
    if name.startswith("_foreach_") and base not in ELEMENTWISE:
        raise UnsupportedError(f"{name} has no rule for ColoTensors")
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    first_at: list[Any] = [None] * max(map(len, lists), default=0)  # the first ColoTensor at every index, as layout
    for each in lists:
        for index, x in enumerate(each):
            if not is_colo(x):
                continue
            if first_at[index] is None:
                first_at[index] = x
            first = first_at[index]
            if x.partitions != first.partitions or x.global_shape != first.global_shape:
                raise UnsupportedError(f"{name}: {x.dist_spec} beside {first.dist_spec} at index {index} of the lists")
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if not isinstance(result, list | tuple):
        return result

    def wrapped(x: Any, first: Any) -> Any:
        """Return a result as a ColoTensor of the layout at its index."""
        if is_colo(x) or first is None or not isinstance(x, Tensor):
            return x
        return first._wrap(x, first.process_group, first.dist_spec, first.global_shape)

    return type(result)(map(wrapped, result, first_at))


def _norms(self: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Return the norm of every tensor, for shards the global norm; shards share an all-gather per process group."""
    # The norm of the vector of local norms is not the global norm for orders up to 0. These, norms that need a
    # gradient, and those of integers or of no elements take the rule of one tensor.
    shards = [x for x in self if is_colo(x) and x.partitions]
    has_numbers = all(x.is_floating_point() and x.numel_global() for x in shards)
    if ord <= 0 or any(map(wants_grad, self)) or not has_numbers:
        return tuple(torch.linalg.vector_norm(x, ord, dtype=dtype) for x in self)
    norms = {id(x): torch.linalg.vector_norm(x, ord, dtype=dtype) for x in self if not (is_colo(x) and x.partitions)}
    for pg, indices in shards_by_group(shards):
        of_group: list[Any] = [shards[index] for index in indices]
        partial = torch.stack([_local_norm(plain(x), ord, dtype) for x in of_group])
        gathered = eager.all_gather(partial.unsqueeze(0), 0, pg.tp_process_group(), "_foreach_norm")
        for x, norm in zip(of_group, torch.linalg.vector_norm(gathered, ord, 0), strict=True):
            norms[id(x)] = x._wrap(norm.to(dtype or x.dtype), x.process_group, ReplicaSpec(), ())
    return tuple(norms[id(x)] for x in self)


def _local_norm(x: Tensor, ord: float, dtype: torch.dtype | None) -> Tensor:
    """Return the norm of a shard in fp32 or wider; 0 for an empty shard, which has no maximum."""
    wide = torch.promote_types(dtype or x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, ord, dtype=wide) if x.numel() else x.new_zeros((), dtype=wide)
