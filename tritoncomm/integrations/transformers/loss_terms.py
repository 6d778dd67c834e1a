"""Arithmetic on a loss in the source of forwards: terms that a model adds to what its loss function returned."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn

__all__ = ["forward_of", "loss_terms", "source_text"]


def loss_terms(module: nn.Module) -> Iterator[str]:
    """Yield the statements of a module's forwards that do arithmetic on a loss, with their conditions."""
    for kind in type(module).__mro__:
        if "forward" in vars(kind) and kind is not nn.Module:
            yield from _arithmetic(forward_of(kind))
            if ".forward(" not in source_text(forward_of(kind)):
                return


def forward_of(kind: type) -> Any:
    """Return the forward of a class behind its decorators."""
    return inspect.unwrap(kind.forward)


@lru_cache(maxsize=512)
def source_text(function: Any) -> str:
    """Return the source of a function; empty where there is none."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


@lru_cache(maxsize=512)
def _arithmetic(function: Any) -> tuple[str, ...]:
    """Return the statements of a function that do arithmetic on a loss, with their conditions; the last one first."""
    try:
        body = ast.parse(source_text(function)).body
    except SyntaxError:
        return ()
    texts = tuple(
        "".join([*(f"if {condition}: " for condition in conditions), ast.unparse(statement)])
        for statement, conditions in _statements(body, ())
        if any(_is_loss(operand) for node in ast.walk(statement) for operand in _operands(node))
    )
    return texts[::-1]


def _statements(body: Iterable[ast.AST], conditions: tuple[str, ...]) -> Iterator[tuple[ast.stmt, tuple[str, ...]]]:
    """Yield the statements of a body that hold no others, with the conditions around them."""
    for node in body:
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.match_case)]
        if inner:
            within = (*conditions, ast.unparse(node.test)) if isinstance(node, ast.If) else conditions
            yield from _statements(inner, within)
        elif isinstance(node, ast.stmt):
            yield node, conditions


def _operands(node: ast.AST) -> list[ast.expr]:
    """Return what an expression or a statement adds up, multiplies, or changes in place."""
    if isinstance(node, ast.BinOp):
        sides = [node.left, node.right]
        return [] if any(isinstance(side, ast.Tuple) for side in sides) else sides  # of an output that is a tuple
    if isinstance(node, ast.AugAssign):
        return [node.target]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("add_", "mul_"):
        return [node.func.value]
    return []


def _is_loss(node: ast.expr) -> bool:
    """Whether a name, an attribute or a key in an expression is that of a loss."""
    names = [getattr(part, "id", None) or getattr(part, "attr", None) or getattr(part, "value", None)
             for part in ast.walk(node)]  # fmt: skip
    return any(isinstance(name, str) and "loss" in name for name in names)
