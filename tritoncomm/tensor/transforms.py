"""Check of ``torch.func``: its transforms would compute with the local shard alone."""

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.layout import is_colo

__all__ = ["watch"]

# Where the transforms take a tensor: vmap; grad, vjp, jacrev and hessian; functionalize. No public function is called
# there, and ``__torch_function__`` is not: what comes out is a plain tensor with the memory of the shard.
# TODO: delete when torch asks subclasses of tensors there.
_ENTRIES = (
    ("torch._functorch.vmap", "_add_batch_dim"),
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),
    ("torch._functorch.eager_transforms", "_wrap_functional_tensor"),
)


def watch() -> None:
    """Let transforms refuse shards; called when the first ColoTensor is made. Replicas and other tensors pass."""
    for module_name, name in _ENTRIES:
        module: Any = importlib.import_module(module_name)
        setattr(module, name, _refusing_shards(getattr(module, name)))


def _refusing_shards(enter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that takes a tensor into a transform, with a check of the tensor."""

    @wraps(enter)
    def checked(x: Tensor, *args: Any) -> Any:
        if is_colo(x) and x.partitions:
            raise UnsupportedError(
                f"torch.func: a transform would compute with the local part of the ColoTensor {list(x.global_shape)}, "
                f"{x.dist_spec}; pass a replica, x.redistribute(ReplicaSpec()), or use torch.autograd.grad"
            )
        return enter(x, *args)

    return checked
