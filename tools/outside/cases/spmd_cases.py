"""The types of our mappings in words of spmd_types, torchtitan's checker, and what they compute: by its rulecheck.

Ranks are simulated in one process, where a rank is only known to who asks ``torch.distributed.get_rank``. So what takes
its shard of a replica by ``group.rank()`` cannot be checked there.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from spmd_types import rulecheck as checked
from spmd_types import rules
from spmd_types.rulecheck import rulecheck
from spmd_types.types import I, P, R, S
from torch import Tensor

from tritoncomm import collective, mappings

SIZE = (4, 6)
Mapping = Callable[[Tensor, Any], Tensor]


def moves(kind: str, before: Any, after: Any) -> Callable[[Any, Any], Any]:
    return lambda x, group: getattr(rules, kind)(x, group, src=before, dst=after)


CASES: dict[str, tuple[Mapping, Callable[[Any, Any], Any]]] = {
    "reduce_from_tensor_model_parallel_region": (
        lambda x, group: mappings.reduce_from_tensor_model_parallel_region(x.clone(), group),
        moves("all_reduce", P, I),
    ),
    "gather_from_tensor_model_parallel_region": (
        mappings.gather_from_tensor_model_parallel_region, moves("all_gather", S(1), I),
    ),
    "gather_from_sequence_parallel_region": (
        lambda x, group: mappings.gather_from_sequence_parallel_region(x, group=group), moves("all_gather", S(0), R),
    ),
    "reduce_scatter_to_sequence_parallel_region": (
        mappings.reduce_scatter_to_sequence_parallel_region, moves("reduce_scatter", P, S(0)),
    ),
    "all_gather_last_dim_from_tensor_parallel_region": (
        mappings.all_gather_last_dim_from_tensor_parallel_region, moves("all_gather", S(1), R),
    ),
    "reduce_scatter_last_dim_to_tensor_parallel_region": (
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region, moves("reduce_scatter", P, S(1)),
    ),
    "all_to_all_sp2hp": (mappings.all_to_all_sp2hp, moves("all_to_all", S(0), S(1))),
    "all_to_all_hp2sp": (mappings.all_to_all_hp2sp, moves("all_to_all", S(1), S(0))),
    "all_gather_dim": (lambda x, group: mappings.all_gather_dim(x, 1, group), moves("all_gather", S(1), R)),
    "reduce_scatter_dim": (lambda x, group: mappings.reduce_scatter_dim(x, 1, group), moves("reduce_scatter", P, S(1))),
    "all_to_all_dims": (lambda x, group: mappings.all_to_all_dims(x, 0, 1, group), moves("all_to_all", S(1), S(0))),
    "collective.all_gather": (lambda x, group: collective.all_gather(x, 0, group), moves("all_gather", S(0), R)),
    "collective.reduce_scatter": (
        lambda x, group: collective.reduce_scatter(x, 0, group), moves("reduce_scatter", P, S(0)),
    ),
    "collective.all_reduce": (lambda x, group: collective.all_reduce(x.clone(), group), moves("all_reduce", P, I)),
}  # fmt: skip


def function(mapping: Mapping, rule: Callable[[Any, Any], Any]) -> type[Any]:
    """A mapping as an autograd function with a type, which is what the checker takes."""

    class Typed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
            return mapping(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            raise NotImplementedError

        @staticmethod
        def spmd_typecheck(*, x: Any, group: Any) -> Any:
            return rule(x, group)

    return Typed


def _noise(like: Tensor, *key: object) -> Tensor:
    """In place of a generator that torch has for CUDA alone."""
    numbers = np.random.default_rng(zlib.crc32(repr(key).encode())).standard_normal(tuple(like.shape))
    return torch.from_numpy(numbers).to(like.dtype)


@pytest.mark.parametrize("name", CASES)
def test_the_type_is_what_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "_seeded_noise", _noise)
    report = rulecheck(function(*CASES[name]), (torch.randn(SIZE), "tp"), local_tensor_mode=True)
    assert report is not None
    assert len(report.checked) == 1, "its one placement"


def test_a_wrong_type_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "_seeded_noise", _noise)
    wrong = function(lambda x, group: mappings.all_gather_dim(x, 0, group), moves("all_gather", S(1), R))
    with pytest.raises(checked.RuleCheckError):
        rulecheck(wrong, (torch.randn(SIZE), "tp"), local_tensor_mode=True)
