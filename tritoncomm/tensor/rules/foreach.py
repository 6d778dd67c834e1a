"""``torch._foreach_*`` and ``torch._fused_*`` of optimizers: run on local tensors, layouts kept."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.elementwise import ELEMENTWISE
from tritoncomm.tensor.layout import is_colo, wrap
from tritoncomm.tensor.rules.table import rule

__all__ = ["on_lists"]


@rule(
    named="torch._foreach_*, torch._fused_* (optimizers)",
    accepts="any sharding, the same at the same index of every list; plain tensors are local shards",
    collectives="none; norms: as norm",
)
def on_lists(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists of tensors.

    Raises:
        UnsupportedError: tensors at the same index have different layouts, or the operator is not element-wise.
    """
    base = name.removeprefix("_foreach_").removesuffix("_")
    if base == "norm":
        return tuple(torch.linalg.vector_norm(x, *args[1:], **kwargs) for x in args[0])
    if name.startswith("_foreach_") and base not in ELEMENTWISE:
        raise UnsupportedError(f"{name} has no rule for ColoTensors")
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
    likes: list[Any] = [None] * max(map(len, lists), default=0)
    for each in lists:
        for index, x in enumerate(each):
            if not is_colo(x):
                continue
            like = likes[index] = x if likes[index] is None else likes[index]
            if x.partitions != like.partitions or x.global_shape != like.global_shape:
                raise UnsupportedError(f"{name}: {x.dist_spec} beside {like.dist_spec} at index {index} of the lists")
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if not isinstance(result, list | tuple):
        return result
    return type(result)(
        x if is_colo(x) or like is None or not isinstance(x, Tensor)
        else wrap(x, like.process_group, like.dist_spec, like.global_shape)
        for x, like in zip(result, likes, strict=True)
    )  # fmt: skip
