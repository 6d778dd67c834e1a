"""What the library raises; every error is also the built-in kind a caller would expect."""

__all__ = [
    "ArgumentError",
    "CommError",
    "GroupError",
    "MismatchError",
    "PeerError",
    "ShapeError",
    "UnsupportedError",
]


class CommError(Exception):
    """Base of everything this library raises on purpose."""


class ShapeError(CommError, ValueError):
    """A shape, dim or split list does not describe a split over the ranks."""


class ArgumentError(CommError, TypeError):
    """An argument has the wrong type."""


class GroupError(CommError, ValueError):
    """There is no usable process group."""


class UnsupportedError(CommError, ValueError):
    """The backend, the dtype and the operation do not go together."""


class PeerError(CommError, RuntimeError):
    """A transfer or a collective failed: another rank is gone, or did not come in time."""


class MismatchError(CommError, ValueError):
    """Ranks make calls that do not belong together: a sender and its receiver, or the ranks of a collective."""
