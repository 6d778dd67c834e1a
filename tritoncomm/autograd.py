"""``torch.autograd.Function`` without the Python around it, which takes as long as a small mapping does."""

from typing import Any

import torch

__all__ = ["direct"]

_base = torch.autograd.Function
_transformed = torch._C._are_functorch_transforms_active


def direct(cls: Any) -> Any:
    """Class decorator: ``apply`` is autograd's C++ entry, and the graph's node runs ``backward`` itself.

    For functions whose ``forward`` takes ctx first and is called by position. What is left out is the binding of
    defaults and a look at every argument for tensors that outlived a functorch transform. Inside such a transform, and
    for subclasses, ``apply`` stays the ordinary one; torch.compile does not see the difference. From torch 2.15 on the
    ordinary one is the C++ entry, and is left as it is.
    """
    cls._backward_cls.apply = cls.backward
    if not hasattr(_base.apply, "__func__"):
        return cls
    enter, ordinary = super(_base, cls).apply, _base.apply.__func__  # pyright: ignore[reportAttributeAccessIssue]

    def apply(called: Any, *args: Any) -> Any:
        return enter(*args) if called is cls and not _transformed() else ordinary(called, *args)

    cls.apply = classmethod(apply)
    return cls
