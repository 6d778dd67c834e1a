"""Replace objects by identity in every loaded module of some packages, and undo it exactly.

``from mappings import gather`` binds the object when it is imported, so setting ``mappings.gather`` reaches only those
who look it up there. Here every name of every loaded module is compared with the originals.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = ["Rebinding"]


class Rebinding:
    """Binds the names of loaded modules that refer to an original to its replacement, until ``undo``.

    Args:
        swaps: (original, replacement) pairs; a replacement stands for one original only.
        packages: top-level packages whose modules are searched, submodules included.
    """

    def __init__(self, swaps: Sequence[tuple[Any, Any]], packages: Sequence[str]) -> None:
        self._swaps, self._packages = tuple(swaps), tuple(packages)  # the pairs keep the ids below valid
        self._replacements = {id(original): replacement for original, replacement in swaps}
        self._originals = {id(replacement): original for original, replacement in swaps}
        # A module may have imported a replacement by itself; that name is not ours to restore.
        self._imported = {(id(module), name) for module, name, _ in self._bound_to(self._originals)}
        self.names: set[tuple[str, str]] = set()

    def _bound_to(self, objects: Mapping[int, Any]) -> Iterator[tuple[ModuleType, str, Any]]:
        """(module, name, counterpart) of every name that refers to one of ``objects``."""
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] not in self._packages or not isinstance(module, ModuleType):
                continue
            for name, value in list(vars(module).items()):
                if id(value) in objects:
                    yield module, name, objects[id(value)]

    def apply(self) -> None:
        """Bind every name to the replacement; all of them, or, where one cannot be set, none."""
        done: list[tuple[ModuleType, str, Any]] = []
        try:
            for module, name, replacement in self._bound_to(self._replacements):
                original = vars(module)[name]
                setattr(module, name, replacement)
                done.append((module, name, original))
        except BaseException:
            for module, name, original in done:
                setattr(module, name, original)
            raise
        self.names.update((module.__name__, name) for module, name, _ in done)

    def undo(self) -> Callable[[], None]:
        """Bind every name to the original again, in modules that were imported since ``apply`` too.

        A name that has been rebound to a third object in between is left alone.

        Returns:
            What takes this back, without looking at any other name.
        """
        names, undone = self.names, []
        for module, name, original in self._bound_to(self._originals):
            if (id(module), name) not in self._imported:
                setattr(module, name, original)
                undone.append((module, name, self._replacements[id(original)]))
        self.names = set()

        def redo() -> None:
            self.names = names
            for module, name, replacement in undone:
                setattr(module, name, replacement)

        return redo
