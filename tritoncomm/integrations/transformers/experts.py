"""Expert parallelism of Hugging Face transformers over ``tritoncomm.experts``: one row for each token and rank.

``register_experts()``, then ``DistributedConfig(ep_size=..., ep_implementation="tritoncomm")``.
"""

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tritoncomm.core.plan import chunk_sizes
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.experts import combine, dispatch
from tritoncomm.integrations.changes import Changes
from tritoncomm.mappings import all_gather_dim, split_dim

__all__ = ["NAME", "register_experts", "unregister_experts"]

NAME = "tritoncomm"
_MODULE = "transformers.distributed.expert_parallel"
_added: dict[str, Changes] = {}  # to transformers' registry, by name


def register_experts(name: str = NAME) -> str:
    """Add an implementation of expert parallelism to transformers; returns ``name``.

    It dispatches this rank's tokens, each at most once to a rank, however many of its experts are there; sorts the rows
    by expert, runs the module's own experts on them with weights of 1, and adds up the results, times the weights of
    their tokens, in a fixed order. The ranks of a
    tensor-parallel group, which share a batch, each dispatch their chunk of the tokens, and gather the results.

    Args:
        name: for ``DistributedConfig(ep_implementation=name)``.

    Raises:
        ArgumentError: transformers has another implementation of that name.
        UnsupportedError: this release of transformers has no registry of implementations (5.23 and 5.24 have one).
    """
    implementations = _transformers().EPImplementationInterface()
    kind = _implementation()
    if name in implementations and implementations[name] is not kind:
        raise ArgumentError(f"register_experts: transformers has an implementation {name!r}; pass another name")
    if name not in _added or name not in implementations:
        with Changes() as added:
            added.set_entry(type(implementations)._global_mapping, name, kind)
            _added[name] = added
    return name


def unregister_experts(name: str = NAME) -> None:
    """Remove what ``register_experts`` added; models that were made with it keep it.

    Raises:
        ArgumentError: ``register_experts`` did not add ``name``.
    """
    implementations = _transformers().EPImplementationInterface()
    if name not in _added or name not in implementations or implementations[name] is not _implementation():
        raise ArgumentError(f"unregister_experts: {name!r} is no implementation that register_experts() added")
    _added[name].undo()
    del _added[name]


def _transformers() -> ModuleType:
    """Import the module of transformers that has the registry."""
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("transformers"):
            raise
        module = None
    if module is None or not hasattr(module, "EPImplementationInterface"):
        raise UnsupportedError(
            "register_experts: transformers has no registry of expert parallelism; install 5.23 or 5.24"
        )
    return module


@lru_cache(maxsize=1)
def _implementation() -> type:
    """Define the implementation, on the base class of the installed transformers."""
    base: Any = _transformers().EPImplementation

    class TokenRowsEP(base):
        """Experts of one module, reached by ``dispatch`` and ``combine``."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.group = ep_mesh.get_group()
            self.shared = tp_mesh.get_group()

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            tensors = [hidden_states, top_k_index, top_k_weights]
            sizes = chunk_sizes(len(hidden_states), self.shared.size())
            if len(sizes) > 1:
                tensors = [split_dim(x, 0, self.shared, sizes=sizes) for x in tensors]
            out = self.on_ranks(*tensors)
            if len(sizes) > 1:  # the gradient of a result that all of these ranks have is the same on each
                out = all_gather_dim(out, 0, self.shared, tensor_parallel_output_grad=False, sizes=sizes)
            return out

        def on_ranks(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            """Run the experts of all ranks on this rank's tokens."""
            dispatched = dispatch(x, ids, weights, self.num_local_experts * self.group.size(), self.group)
            rows, counts = dispatched.by_expert()
            return combine(dispatched.summed(_outputs(self, rows, counts)), dispatched)

    return TokenRowsEP


def _outputs(layer: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Run the experts of this rank on rows sorted by expert, with one id and a weight of 1 for each."""
    if not len(rows):
        # An expert's loop skips experts without rows. So one row runs and is cut off: parameters get gradients of
        # zeros, and the backward of this rank takes part in the exchange and in FSDP's reductions.
        single = rows.new_zeros(1, rows.shape[1]) + rows.sum(0, keepdim=True)
        return layer.experts_forward(single, counts.new_zeros(1, 1), rows.new_ones(1, 1))[:0]
    numbers = torch.arange(len(counts), device=counts.device)
    ids = numbers.repeat_interleave(counts, output_size=len(rows))[:, None]
    return layer.experts_forward(rows, ids, rows.new_ones(len(rows), 1))
