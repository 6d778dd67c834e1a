"""Calls and attributes of some names in the source of a package."""

import ast
import inspect
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Call", "attributes", "calls"]


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        owner: the name before the dot, empty without one.
        name: of the function, method or class; of the class in ``name.apply(...)``.
        is_apply: it is ``name.apply(...)``.
        positional: number of arguments given by position, without ``*args``.
        keywords: names of the arguments given by name.
        is_open: it has ``*args`` or ``**kwargs``, so that more arguments may follow.
        place: file and line.
    """

    owner: str
    name: str
    is_apply: bool
    positional: int
    keywords: tuple[str, ...]
    is_open: bool
    place: str

    def binds(self, signature: inspect.Signature) -> bool:
        """Whether a function of this signature takes the call."""
        bind = signature.bind_partial if self.is_open else signature.bind
        try:
            bind(*range(self.positional), **dict.fromkeys(self.keywords))
        except TypeError:
            return False
        return True


def _nodes(folder: Path, pattern: str) -> Iterator[tuple[ast.AST, str]]:
    """(node, place) of every node of the files below ``folder`` in which the pattern is found; parsing takes long."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        if re.search(pattern, text):
            for node in ast.walk(ast.parse(text)):
                yield node, f"{path.relative_to(folder)}:{getattr(node, 'lineno', 0)}"


def calls(folder: Path, names: Set[str]) -> Iterator[Call]:
    """Every call of one of ``names`` in the Python files below ``folder``."""
    for node, place in _nodes(folder, rf"\b({'|'.join(sorted(names))})(\.apply)?\("):
        if isinstance(node, ast.Call):
            function, is_apply = node.func, False
            if isinstance(function, ast.Attribute) and function.attr == "apply":
                function, is_apply = function.value, True
            name = _last_name(function)
            if name in names:
                owner = _last_name(function.value) if isinstance(function, ast.Attribute) else ""
                positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
                keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
                is_open = positional + len(keywords) < len(node.args) + len(node.keywords)
                yield Call(owner, name, is_apply, positional, keywords, is_open, place)


def attributes(folder: Path, owner: str) -> Iterator[tuple[str, str]]:
    """(attribute, place) of every ``owner.attribute`` in the Python files below ``folder``."""
    for node, place in _nodes(folder, rf"\b{owner}\."):
        if isinstance(node, ast.Attribute) and _last_name(node.value) == owner:
            yield node.attr, place


def _last_name(expression: ast.expr) -> str:
    """``c`` of the expressions ``c`` and ``a.b.c``; empty for others."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""
