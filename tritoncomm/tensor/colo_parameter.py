"""A ColoTensor as a module parameter."""

import sys
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.const import TensorType
from tritoncomm.tensor.elementwise import QUERIES
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.param_op_hook import ColoParamOpHookManager, params_in
from tritoncomm.tensor.tensor_spec import ColoTensorSpec

__all__ = ["ColoParameter"]

_NEW_PARAMETER: CodeType = torch.nn.Parameter.__new__.__code__


class ColoParameter(ColoTensor, torch.nn.Parameter):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A sharded parameter; the hooks of ``ColoParamOpHookManager`` run around its operators.

    Args:
        data: the local tensor, shared and not copied; None is an empty tensor.
        requires_grad: as of ``nn.Parameter``.
        spec: process group and layout; None is a replica over ``ProcessGroup()``.

    Attributes:
        shared_param_modules: (module, name) pairs that hold the same parameter, maintained by the caller.
    """

    _type = TensorType.MODEL

    def __new__(
        cls, data: Tensor | None = None, requires_grad: bool = True, spec: ColoTensorSpec | None = None
    ) -> "ColoParameter":
        parameter = cls._make(data, requires_grad, spec)
        parameter.shared_param_modules = []
        return parameter

    shared_param_modules: list[Any]

    def detach(self) -> Any:
        """Return a ColoTensor over the same memory, as ``nn.Parameter.detach`` returns a tensor.

        ``nn.Parameter(p)``, which asks for the class of its argument and knows no other way to copy, gets a
        ColoParameter. No public name says how a subclass takes part in that (torch 2.11 to 2.15).
        """
        if sys._getframe(1).f_code is not _NEW_PARAMETER:
            return super().detach()
        return type(self)._rebuild(plain(self).detach(), requires_grad=False, state=self._state())

    @staticmethod
    def from_torch_tensor(
        tensor: Tensor, requires_grad: bool = True, spec: ColoTensorSpec | None = None
    ) -> "ColoParameter":
        """Return a parameter over the tensor's memory."""
        return ColoParameter(tensor.detach(), requires_grad, spec)

    @classmethod
    def _rebuild(cls, data: Tensor, requires_grad: bool, state: tuple[Any, ...]) -> Any:
        """Make a parameter from its parts, as ``ColoTensor._rebuild`` does; it starts without shared modules."""
        parameter: Any = super()._rebuild(data, requires_grad, state)
        parameter.shared_param_modules = []
        return parameter

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return super().__repr__().replace("ColoTensor", "ColoParameter", 1)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # No hooks run around names with two leading underscores, as ``__get__`` of an attribute.
        name = getattr(func, "__name__", "")
        if not ColoParamOpHookManager.has_hook() or name.startswith("__"):
            return super().__torch_function__(func, types, args, kwargs)
        run, kwargs = cls._runner(types), kwargs or {}
        if run is None:
            return NotImplemented
        # A query returns no tensor of a graph, so autograd has nothing to call the backward hooks from.
        params = params_in([*args, *kwargs.values()], ColoParameter)
        in_graph = name not in QUERIES
        return ColoParamOpHookManager.around(params, partial(run, func), tuple(args), kwargs, in_graph)


ColoTensor._parameter_class = ColoParameter
