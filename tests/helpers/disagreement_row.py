"""One public function that ranks call together, as the tables of disagreements have it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["REPLICAS", "Row"]

REPLICAS = "different names, shapes or dtypes"  # the words of comparisons of replicas


@dataclass(frozen=True)
class Row:
    """A public function of collectives.

    Attributes:
        call: ``call(group, x, **options)``.
        shape, other: of ``x``, and another one that is as good, for a number of ranks.
        options: of every rank.
        differ: by kind, what the rank that differs adds to its options.
        words: by kind, what the error names, where it is not the kind itself.
        impossible: why a kind that the signature suggests cannot differ.
        is_backward: the forwards agree, and the backwards differ; a backward that is the identity has no row.
        function: whose signature says what can differ.
    """

    call: Callable[..., Any]
    shape: Callable[[int], tuple[int, ...]] = lambda w: (4 * w, 4 * w)
    other: Callable[[int], tuple[int, ...]] = lambda w: (8 * w, 4 * w)
    options: Callable[[int], dict[str, Any]] = lambda w: {}
    differ: Mapping[str, Callable[[int], dict[str, Any]]] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)
    is_backward: bool = False
    function: Any = None
