"""Bounds of rounding: how far a rank's values may be from those of one process."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncomm.verify.recording import Call, Recording
from tritoncomm.verify.relations import difference

__all__ = ["Bounds", "Values", "largest", "wide"]

_FACTOR = 8  # of a bound, which has the root of the longest reduction, as errors of addends are independent
_OF_ROUNDING = 4  # of the distance of a step in 16 bits to the same in float64


class Values(NamedTuple):
    """Tensors to compare, in float64.

    Attributes:
        whole: of the run in one process.
        parts: of the ranks that have one, in rank order.
        bound: largest difference that rounding may make.
    """

    whole: Tensor
    parts: list[Tensor]
    bound: float

    @classmethod
    def of(cls, whole: Tensor, parts: Sequence[Tensor], bound: float) -> "Values":
        """Widen tensors of any dtype."""
        return cls(wide(whole), list(map(wide, parts)), bound)


class ChangeBound(NamedTuple):
    """Bound of a parameter's change, and where the change is more than rounding: 1 there, else 0."""

    bound: float
    is_known: Tensor


class Bounds:
    """Bounds of the tensors of a step, from its recording in one process.

    With a step in float64 beside it the bound of a tensor is four times its own distance to that. Else it is that of
    the narrowest dtype, of the longest reduction and of the largest magnitude.
    """

    def __init__(self, whole: Recording) -> None:
        self._whole = whole
        exact = [] if whole.exact is None else whole.exact.calls
        self._exact = {(call.name, call.number): call for call in exact}
        self._largest_gradient = max([largest(x) for x in whole.gradients.values() if x is not None], default=0.0)

    def of_parameter(self, whole: Tensor, parts: Sequence[Tensor]) -> float:
        """Return the bound of a parameter, which is only copied and cast."""
        return 4 * _eps([whole, *parts]) * largest(whole)

    def of_output(self, call: Call, j: int) -> float:
        """Return the bound of an output of a call."""
        return self._of_value(call, call.outputs[j], self.exact_output(call, j))

    def of_input(self, call: Call, key: str) -> float:
        """Return the bound of an input of a call."""
        exact = self._exact.get((call.name, call.number))
        place = None if exact is None else exact.inputs.get(key)
        return self._of_value(call, call.inputs[key], self._exact_tensor(place))

    def _of_value(self, call: Call, index: int, exact: Tensor | None) -> float:
        """Return the bound of a tensor of a call; ``exact`` is the one in float64."""
        x = self._whole.tensors[index]
        if (call.name, call.number) in self._exact:
            return _rounding(x, exact)
        return _FACTOR * torch.finfo(call.narrowest).eps * math.sqrt(call.reduction) * largest(x)

    def _exact_tensor(self, index: int | None) -> Tensor | None:
        """Return a tensor of the step in float64."""
        return None if index is None or self._whole.exact is None else self._whole.exact.tensors[index]

    def of_gradient(self, whole: Tensor, parts: Sequence[Tensor], exact: Tensor | None) -> float:
        """Return the bound of a gradient; ``exact`` is the one in float64, None without such a step.

        A gradient may be the rest of addends that cancel, as of a bias in front of a norm: the scale is the largest
        gradient of the model. Gradients that the program keeps in a narrower dtype than it computes in are rounded.
        """
        if exact is not None:
            return _rounding(whole, exact)
        eps = max(torch.finfo(self._whole.narrowest).eps, _eps([whole, *parts]))
        return _FACTOR * eps * math.sqrt(self._whole.reduction) * self._largest_gradient

    def of_backward(self, x: Tensor) -> float:
        """Return the bound of the gradient of an output."""
        return _FACTOR * torch.finfo(self._whole.narrowest).eps * math.sqrt(self._whole.reduction) * largest(x)

    def of_buffer(self, whole: Tensor) -> float:
        """Return the bound of a buffer after the step; one of integers has none."""
        is_exact = not (whole.is_floating_point() or whole.is_complex())
        return 0.0 if is_exact else self.of_backward(wide(whole))

    def change(self, name: str) -> Tensor:
        """Return what the step changed of a parameter, in float64."""
        return _change(self._whole, name)

    def of_change(self, name: str, change: Tensor) -> "ChangeBound":
        """Return the bound of the change of a parameter, and where it is known.

        An optimizer may divide a gradient by its size, as Adam does. An element whose gradient is nothing but rounding
        error then changes by a number that says nothing. So only elements with a large gradient are compared. Let ``b``
        be the bound of the gradient's error, and ``m`` its largest magnitude. A gradient of ``sqrt(b * m)`` or more has
        a relative error of at most ``sqrt(b / m)``, and the change of such an element has it, too.
        """
        gradient = self._whole.gradients.get(name)
        if gradient is None or not bool((gradient != 0).any()):  # deleted by the step, or set to zero
            gradient = self._whole.accumulated.get(name)
        parameter = self._whole.parameters[name]
        of_writing = 4 * _eps([parameter]) * max(largest(parameter), largest(change))  # the parameter is rounded
        is_known, relative_error = torch.ones_like(change), _FACTOR * torch.finfo(self._whole.narrowest).eps
        if gradient is not None and gradient.shape == parameter.shape:
            bound, most = self.of_gradient(gradient, [], self.exact_gradient(name)), largest(gradient)
            relative_error = math.sqrt(bound / most)  # sqrt(b / m); times m it is sqrt(b * m)
            is_known = (wide(gradient).abs() >= relative_error * most).to(change.dtype)
        of_dtype = 0.0  # what the dtype makes of it: the difference from the change in float64, where there is one
        if self._whole.exact is not None and name in self._whole.exact.parameters:
            of_dtype = _OF_ROUNDING * difference(change, _change(self._whole.exact, name))
        return ChangeBound(max(of_writing + _FACTOR * relative_error * largest(change), of_dtype), is_known)

    def of_loss(self, whole: Tensor) -> float:
        """Return the bound of the loss."""
        eps, reduction = torch.finfo(self._whole.narrowest).eps, self._whole.reduction
        bound = _FACTOR * eps * math.sqrt(reduction) * largest(whole)
        return bound if self._whole.exact is None else max(bound, _rounding(whole, self._whole.exact.loss))

    def exact_output(self, call: Call, j: int) -> Tensor | None:
        """Return an output in float64; None without a step in float64."""
        exact = self._exact.get((call.name, call.number))
        return self._exact_tensor(None if exact is None or j >= len(exact.outputs) else exact.outputs[j])

    def exact_gradient(self, name: str) -> Tensor | None:
        """Return a gradient in float64; None without a step in float64."""
        return None if self._whole.exact is None else self._whole.exact.gradients.get(name)


def _change(run: Recording, name: str) -> Tensor:
    """Return what a step changed of a parameter, in float64."""
    before = run.parameters[name]
    return wide(run.changed.get(name, before)) - wide(before)


def is_below(exact: Tensor | None, values: Values) -> bool:
    """Whether the values in float64 are below their bound, so that a comparison says nothing."""
    return exact is not None and largest(exact) <= values.bound and all(bool(x.isfinite().all()) for x in values.parts)


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float64; a complex one with its parts in a last dim."""
    return torch.view_as_real(x.to(torch.complex128)) if x.is_complex() else x.to(torch.float64)


def largest(x: Tensor) -> float:
    """Return the largest finite magnitude, at least a number that is not zero."""
    if not x.numel():
        return 1.0
    return max(float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-30)


def _eps(tensors: Sequence[Tensor]) -> float:
    """Return the rounding of the narrowest dtype among some tensors; integers have none."""
    return max(torch.finfo(x.dtype).eps if x.is_floating_point() or x.is_complex() else 0.0 for x in tensors)


def _rounding(x: Tensor, exact: Tensor | None) -> float:
    """Return the bound of a step in 16 bits: four times the distance to the same step in float64."""
    eps = torch.finfo(x.dtype).eps * largest(x)
    if exact is None or exact.shape != x.shape:
        return _FACTOR * eps
    return max(_OF_ROUNDING * difference(wide(x), wide(exact)), eps)
