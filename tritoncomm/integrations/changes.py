"""Changes to objects of other libraries and of the user, each with its undo.

What belongs to one owner is a list of changes, undone from the last to the first. What several owners share, a function
of a module, is replaced once, and put back when the last of them goes, in whatever order they came.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from types import TracebackType
from typing import Any, NamedTuple

from torch import nn
from torch._guards import CompileContext

from tritoncomm.errors import UnsupportedError

__all__ = ["Change", "Changes", "outdated", "outdated_end", "release", "settle", "share"]

_NOTHING: Any = object()  # the value of an attribute or key that is not there


class Change(NamedTuple):
    """Value of an attribute, or of a key of a mapping.

    Attributes:
        holder: object or mapping.
        name: attribute or key.
        value: None where it has none.
    """

    holder: Any
    name: str
    value: Any


class Changes:
    """Changes of one owner, each with its undo.

    As a context manager it undoes them if the block raises, and keeps them otherwise: the owner calls ``undo``. A copy
    by ``deepcopy`` or ``pickle``, together with the module that has the hooks, removes those of the copy; attributes
    and keys are set on one object, and a list with them cannot be copied.
    """

    def __init__(self) -> None:
        self._undos: list[Callable[[], list[Change] | None]] = []

    def add(self, undo: Callable[[], list[Change] | None]) -> None:
        """Add the undo of a change, such as ``handle.remove`` of a hook.

        Add it before a change that may stop halfway. It may be called twice, and then does nothing.
        """
        self._undos.append(undo)

    def set_attribute(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of an object, which is referred to weakly; also a parameter or a part of a module."""
        entry = _Entry(weakref.ref(holder), name, _attribute(holder, name), value, is_key=False)
        self._undos.append(entry.undo)  # first: an interrupt may come right after the change
        setattr(holder, name, value)

    def set_entry(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set the value of a key."""
        entry = _Entry(lambda: mapping, key, mapping.get(key, _NOTHING), value, is_key=True)
        self._undos.append(entry.undo)
        mapping[key] = value

    def extend(self, changes: "Changes") -> None:
        """Take over the changes of another list."""
        self._undos += changes._undos
        changes._undos = []

    def values(self) -> Iterator[Change]:
        """Yield what was set by ``set_attribute`` and ``set_entry``, with the values that it got."""
        for undo in self._undos:
            entry = getattr(undo, "__self__", None)
            if isinstance(entry, _Entry) and (holder := entry.holder()) is not None:
                yield Change(holder, entry.name, entry.value)

    def undo(self) -> list[Change]:
        """Undo all changes, the last one first; return those that somebody has replaced since, which are left alone.

        Raises:
            BaseException: the first one that an undo raised, once all others have run. The next call tries it again.
        """
        replaced: list[Change] = []
        error: BaseException | None = None
        for index in reversed(range(len(self._undos))):
            if index >= len(self._undos):  # the garbage collection of an owner has undone the last ones meanwhile
                continue
            undo = self._undos[index]
            try:
                replaced += undo() or []
                # Only now: an interrupt may come anywhere, and an undo may run twice, but has to run.
                if undo in self._undos:
                    self._undos.remove(undo)
            except BaseException as raised:
                error = error or raised
        if error is not None:
            raise error
        return replaced

    def __enter__(self) -> "Changes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            return
        try:
            self.undo()
        except BaseException:
            self.undo()  # nobody else has this list: once more what an interrupt has stopped
            raise


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute that an object has for itself; ``_NOTHING`` where its class alone has one."""
    own = getattr(holder, "__dict__", {})
    if name in own:
        return own[name]
    if hasattr(inspect.getattr_static(type(holder), name, None), "__set__"):  # a property, or a slot
        return getattr(holder, name, _NOTHING)
    if isinstance(holder, nn.Module):  # has its parameters, buffers and parts elsewhere
        tensors = {**dict(holder.named_parameters(recurse=False)), **dict(holder.named_buffers(recurse=False))}
        return {**dict(holder.named_children()), **tensors}.get(name, _NOTHING)
    return _NOTHING


class _Entry:
    """Attribute of an object, or key of a mapping, that is set."""

    def __init__(self, holder: Callable[[], Any], name: str, before: Any, value: Any, is_key: bool) -> None:
        self.holder, self.name, self.before, self.value, self.is_key = holder, name, before, value, is_key

    def undo(self) -> list[Change]:
        """Set the value before; if somebody else has set another one since, leave it, and return it as a change."""
        holder = self.holder()
        if holder is None:
            return []
        current = holder.get(self.name, _NOTHING) if self.is_key else _attribute(holder, self.name)
        if current is self.before:
            return []
        if current is not self.value:
            return [Change(holder, self.name, None if current is _NOTHING else current)]
        if self.is_key and self.before is _NOTHING:
            del holder[self.name]
        elif self.is_key:
            holder[self.name] = self.before
        elif self.before is _NOTHING:
            delattr(holder, self.name)
        else:
            setattr(holder, self.name, self.before)
        return []

    def __reduce__(self) -> Any:
        raise TypeError(f"{self.name} is set on one object, and a copy of the change would undo it there")


class _SharedAttribute:
    """Attribute of a module that is replaced as long as it has owners."""

    def __init__(self) -> None:
        self._changes = Changes()  # more than one where somebody else has replaced ours, and ours are around theirs
        self._owners: set[weakref.ref[Any]] = set()

    def acquire(self, owner: Any, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Add an owner, and replace the value unless ours is there."""
        # First: whoever is dropped from here on is not the last owner.
        self._owners.add(weakref.ref(owner, self._lose))
        try:
            current = vars(module)[name]
            if all(current is not change.value for change in self._changes.values()):
                self._changes.set_attribute(module, name, make(current))
        except BaseException:
            self.release(owner)
            raise

    def release(self, owner: Any) -> list[Change]:
        """Remove an owner; put the value back if it was the last."""
        self._owners.discard(weakref.ref(owner))
        return self.settle()

    def settle(self) -> list[Change]:
        """Put the value back if nobody needs ours."""
        return [] if self._owners else self._changes.undo()

    def _lose(self, owner: "weakref.ref[Any]", is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # the names of this module are None then
            return
        self._owners.discard(owner)
        if CompileContext.try_get() is None:  # a graph that is traced right now may have read ours; `settle` comes
            self.settle()


_shared: dict[tuple[str, str], _SharedAttribute] = {}  # by module and name


def share(owner: Any, module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of a module by ``make`` of its value, unless it is replaced for another owner.

    Args:
        owner: referred to weakly; one that is dropped needs the attribute no more.
        module: name in ``sys.modules``.
    """
    _shared.setdefault((module, name), _SharedAttribute()).acquire(owner, sys.modules[module], name, make)


def release(owner: Any, module: str, name: str) -> list[Change]:
    """End what ``share`` did for an owner; return what somebody else has set since, which is left alone."""
    return _shared[module, name].release(owner) if (module, name) in _shared else []


def settle() -> None:
    """Put back what has no owner any more, as after an interrupt in the middle of ``release``."""
    changes = Changes()
    for shared in _shared.values():
        changes.add(shared.settle)
    changes.undo()


def outdated(*_: Any, **__: Any) -> None:
    """Stand in for a hook before the forward of a model that an earlier release has switched, and that was saved so.

    Raises:
        UnsupportedError: in every forward, until the model is given to ``switch``.
    """
    raise UnsupportedError(
        "this model was switched by an earlier release of tritoncomm, and saved; call switch(model, name)"
    )


def outdated_end(*_: Any, **__: Any) -> None:
    """Stand in for a hook behind such a forward."""
