"""The table of operator rules: documentation rows, and the function that describes a call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritoncomm.tensor.rules.engine import OperatorCall

__all__ = ["ROWS", "RULES", "Row", "rule"]

Describe = Callable[..., OperatorCall | None]


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the documentation.

    Attributes:
        accepts: supported layouts; others are gathered first.
        result: layout of the result.
        collectives: forward and backward.
    """

    operators: str
    accepts: str
    result: str
    collectives: str
    module: str


ROWS: list[Row] = []
RULES: dict[Any, Describe] = {}


def rule(
    *functions: Any,
    accepts: str = "any sharding",
    result: str = "same sharding",
    collectives: str = "none",
    named: str = "",
) -> Callable[[Describe], Describe]:
    """Register the decorated function, which describes a call from its arguments; None runs the call on replicas.

    Args:
        functions: the operators; a name stands for the function of torch and the method of tensors. Without any, only
            the row is added: ``dispatch`` calls the decorated function itself.
        named: the operators in the documentation; the names of ``functions`` by default.
    """

    def add(describe: Describe) -> Describe:
        names = dict.fromkeys(each if isinstance(each, str) else each.__name__ for each in functions)
        module = describe.__module__.rpartition(".")[2]
        ROWS.append(Row(named or ", ".join(names), accepts, result, collectives, module))
        for each in functions:
            for function in _called(each):  # a name stands for several
                assert function not in RULES, function
                RULES[function] = describe
        return describe

    return add


def _called(function: Any) -> list[Any]:
    if not isinstance(function, str):
        return [function]
    return [getattr(owner, function) for owner in (torch, Tensor) if hasattr(owner, function)]
