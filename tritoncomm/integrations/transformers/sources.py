"""Source of the files that define a model of transformers: what it calls, and by which names it makes masks."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

__all__ = ["REGISTRY", "calls_registry", "files_of", "masks_by_name", "source_of", "takes_keyword", "tree_of"]

REGISTRY = "ALL_ATTENTION_FUNCTIONS"


def calls_registry(kinds: list[type]) -> bool:
    """Whether a file that defines one of the classes mentions transformers' registry of attention functions."""
    return any(REGISTRY in source_of(name) for name in {name for kind in set(kinds) for name in files_of(kind)})


def files_of(kind: type) -> Iterator[str]:
    """Yield the modules of a class and its bases, but for torch's and transformers' own base classes."""
    for base in kind.__mro__:
        name = base.__module__
        if name.startswith("transformers.models.") or name.partition(".")[0] not in (
            "torch",
            "transformers",
            "builtins",
        ):
            yield name


@lru_cache(maxsize=256)
def source_of(name: str) -> str:
    """Return the source of a module; empty where there is none."""
    try:
        return inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):
        return ""


@lru_cache(maxsize=256)
def masks_by_name(name: str) -> bool:
    """Whether a module makes a mask inside ``if config._attn_implementation in (...)``, or ``== ...``."""
    for node in ast.walk(ast.parse(source_of(name))):
        if not isinstance(node, ast.If):
            continue
        compares = [each for each in ast.walk(node.test) if isinstance(each, ast.Compare)]
        named = any(
            isinstance(each, ast.Attribute) and each.attr == "_attn_implementation"
            for compare in compares
            for each in ast.walk(compare)
        )
        texts = [each for compare in compares for each in ast.walk(compare) if isinstance(each, ast.Constant)]
        targets = [
            each.id
            for statement in node.body
            for each in ast.walk(statement)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        ]
        if named and any(text.value == "sdpa" for text in texts) and any("mask" in target for target in targets):
            return True
    return False


def takes_keyword(kind: Any, name: str) -> bool:
    """Whether the forward of a class takes a keyword, by name or among further ones."""
    parameters = inspect.signature(kind.forward).parameters
    return name in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def tree_of(function: Any) -> ast.AST:
    """Return the syntax tree of a function; an empty one where there is no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], [])
