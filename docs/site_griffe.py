"""Arguments of classes that are made by ``__new__``, which mkdocstrings does not read off the sources."""

from typing import Any

import griffe

__all__ = ["Constructors"]


class Constructors(griffe.Extension):
    """Shows a class with the parameters of ``__new__``, where it has one; ``__init__`` takes what is left then."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Called when a class has been read."""
        new = cls.members.get("__new__")
        if isinstance(new, griffe.Function):
            cls.set_member("__init__", griffe.Function("__init__", parameters=new.parameters, returns=None, parent=cls))
