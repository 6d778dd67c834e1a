"""Permission to write the result of an all-reduce into its input.

Torch cannot tell whether anything else still needs a tensor, so the permission is explicit. Code of this package gives
it for temporaries that it made itself, and callers give it by ``overwrite_inputs``.
"""

import threading

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tritoncomm.errors import ArgumentError

__all__ = ["is_overwriting", "may_overwrite", "may_overwrite_gradient", "overwrite_inputs"]


class _Switch(threading.local):
    """State of ``overwrite_inputs``, one for each thread."""

    is_on = False


_switch = _Switch()


class overwrite_inputs:
    """Let all-reduces of this thread write into their inputs, which is Megatron-LM's contract; off by default.

    A call switches at once. As a context manager it restores the former state at the end of the block, also after an
    exception. While it is on:

    - ``reduce_from_tensor_model_parallel_region`` writes the sum into its input and returns the input.
    - ``copy_to_tensor_model_parallel_region`` writes the sum of the gradients into the gradient that it receives.
      The state at the time of its forward counts, whichever thread runs backward.

    This saves one copy of the tensor. Off, both copy once and are right in every program.

    Switch it on where nothing else needs the input or the gradient. One gradient tensor goes to both branches of a
    sum: in ``copy_to_tensor_model_parallel_region(x) + residual`` the gradient of ``residual`` would be summed over
    the ranks as well, without an error.

    Some tensors are copied even so: leaves that require grad, views, subclasses, tensors that are not contiguous, and
    memory of numpy, DLPack, a file or another process. A gradient may be a view of its whole memory. A result of
    ``detach()`` or of a cast by ``view`` is no view to autograd: its source changes. Autograd's version counter is
    raised, so a backward that needs an overwritten tensor raises torch's "modified by an inplace operation".

    Inside a region of ``torch.compile`` it has no effect: compiled all-reduces never overwrite.

    Args:
        mode: whether all-reduces may overwrite.

    Raises:
        ArgumentError: ``mode`` is not a bool.

    Example:
        >>> with overwrite_inputs(True):
        ...     y = reduce_from_tensor_model_parallel_region(x @ w)  # no copy: the product is the result

    Source: Megatron-LM, ``megatron.core.tensor_parallel.mappings``.
    """

    def __init__(self, mode: bool) -> None:
        if not isinstance(mode, bool):
            raise ArgumentError(f"overwrite_inputs: mode must be a bool, not {mode!r:.80}")
        self._mode = mode
        self._former = None if is_compiling() else _switch.is_on  # None: no effect in a compiled region
        self.__enter__()  # a call switches at once, without ``with``

    def __enter__(self) -> None:
        if self._former is not None:
            _switch.is_on = self._mode

    def __exit__(self, *error: object) -> None:
        if self._former is not None:
            _switch.is_on = self._former


def is_overwriting() -> bool:
    """Whether this thread has switched ``overwrite_inputs`` on; False in a compiled region."""
    return not is_compiling() and _switch.is_on


def may_overwrite(x: Tensor) -> bool:
    """Whether ``x`` is an input that a permitted sum can be written into, and autograd can record that."""
    return (
        _has_own_memory(x)
        and not (x.requires_grad and (x.is_leaf or not torch.is_grad_enabled()))
        # Tensor._base is as private, and makes a Python object of the base. Torch 2.11 to 2.14 have it.
        and not x._is_view()
    )


def may_overwrite_gradient(grad: Tensor) -> bool:
    """Whether a permitted sum can be written into ``grad``: it spans its memory, as a view or not."""
    # Views count too: a linear layer of three dims gives its input a gradient that is a view of new memory.
    return _has_own_memory(grad) and grad.untyped_storage().nbytes() == grad.nbytes


def _has_own_memory(x: Tensor) -> bool:
    """Whether ``x`` is a contiguous plain tensor in memory that torch allocated for this process."""
    if is_compiling() or type(x) is not Tensor or x.layout is not torch.strided or not x.is_contiguous():
        return False
    if x.is_conj() or x.is_neg() or (x.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    try:
        storage = x.untyped_storage()
    except NotImplementedError:  # a tensor inside a transform of torch.func
        return False
    return storage.resizable() and not (x.is_cpu and storage.is_shared())
