"""Rebinding: objects replaced by identity in every loaded module of some packages, and the exact undo.

``from mappings import gather`` binds the object at the import, so setting ``mappings.gather`` reaches only callers that
look it up there. A rebinding compares every name of every loaded module with the originals.
"""

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from types import ModuleType
from typing import Any

from tritoncomm.integrations.changes import Changes

__all__ = ["Rebinding"]


class Rebinding:
    """Binds the names of loaded modules that refer to an original to its replacement, until ``undo``.

    Args:
        packages: top-level packages whose modules are searched, submodules included.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)
        self._swaps: list[tuple[Any, Any]] = []  # the pairs keep the ids below valid
        # Replacements by the id of the original, and the newest original by the id of the replacement.
        self._replacements: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}
        # Names, as (id of the module, name), that held a replacement already.
        self._imported: set[tuple[int, str]] = set()
        self._changes = Changes()

    def extend(self, swaps: Sequence[tuple[Any, Any]]) -> None:
        """Add (original, replacement) pairs; an original that was added before keeps its replacement."""
        swaps = [(original, replacement) for original, replacement in swaps if id(original) not in self._replacements]
        added = {id(replacement) for _, replacement in swaps} - self._originals.keys()
        self._swaps += swaps
        self._replacements |= {id(original): replacement for original, replacement in swaps}
        # Of several originals of one replacement the newest is the last, and stays.
        self._originals |= {id(replacement): original for original, replacement in swaps}
        # A module may have imported a replacement by itself; that name is not ours to restore.
        self._imported |= {(id(module), name) for module, name, value in self._bound(added)}

    def original(self, value: Any) -> Any:
        """Return the newest original of a replacement; return any other object itself."""
        return self._originals.get(id(value), value)

    @property
    def names(self) -> set[tuple[str, str]]:
        """(module, name) of every name that ``apply`` has bound and that still refers to a replacement."""
        return {
            (change.holder.__name__, change.name)
            for change in self._changes.values()
            if id(vars(change.holder).get(change.name)) in self._originals
        }

    def _bound(self, ids: Container[int]) -> Iterator[tuple[ModuleType, str, Any]]:
        """Yield (module, name, value) of every name whose value has one of these ids."""
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] not in self._packages or not isinstance(module, ModuleType):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in ids:
                    yield module, name, value

    def rebound(self) -> list[tuple[str, str, Any]]:
        """Return (module, name, value) of every name that ``apply`` has bound and that holds another object now."""
        values = [
            (change.holder.__name__, change.name, vars(change.holder).get(change.name))
            for change in self._changes.values()
        ]
        return [value for value in values if id(value[2]) not in self._originals.keys() | self._replacements.keys()]

    def apply(self) -> None:
        """Bind every name to its replacement, or none, where a module refuses to set a name."""
        with Changes() as changes:
            for module, name, original in self._bound(self._replacements):
                changes.set_attribute(module, name, self._replacements[id(original)])
        self._changes.extend(changes)

    def undo(self) -> Callable[[], None]:
        """Bind every name to the original again, in modules imported since ``apply`` too; return the exact redo.

        All names or none, where a module refuses to set a name.
        """
        # ``_originals`` has the original of each replacement, by the replacement's id. ``_bound`` finds all names that
        # hold one. Names that a module had bound to a replacement by itself are not ours.
        to_undo = [
            (module, name, replacement)
            for module, name, replacement in self._bound(self._originals)
            if (id(module), name) not in self._imported
        ]

        def redo() -> None:
            """Bind again exactly the names that were undone."""
            for module, name, replacement in to_undo:
                if vars(module).get(name) is not replacement:
                    self._changes.set_attribute(module, name, replacement)

        # A name gets the object that ``apply`` found there, and a name that was imported since gets the newest
        # original. A name that was rebound to a third object in between is left alone.
        try:
            self._changes.undo()
            for module, name, replacement in to_undo:
                if vars(module).get(name) is replacement:
                    setattr(module, name, self._originals[id(replacement)])
        except BaseException:
            redo()
            raise
        return redo
