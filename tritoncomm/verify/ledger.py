"""Ledger of a comparison: problems, what was compared, and what was not."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from tritoncomm.parsing import counted
from tritoncomm.verify.bounds import Values, is_below, largest
from tritoncomm.verify.relations import Found, Relation

__all__ = ["ALONE", "INSIDE", "OWN", "Ledger", "Problem", "figures"]

_SHOWN = 12  # problems of a kind in a report
# Why something was not compared.
ALONE: Final = "without a partner"
INSIDE: Final = "of no effect outside"
OWN: Final = "the ranks' own"


@dataclass
class Problem:
    """One line of a report, and the module that it is about."""

    module: str
    line: str


class Ledger:
    """Problems in their order, counts, and the names of what was not compared.

    Attributes:
        is_rounded: whether the step has 16 bits.
        counts: see ``Report``.
        done: what was compared by kind: outputs, parameters, gradients, changed, loss.
        left: names of what was not compared, by the reason.
        parts: sentences on tensors of which the ranks hold a part together.
    """

    def __init__(self, is_rounded: bool) -> None:
        self.is_rounded = is_rounded
        self.problems: list[Problem] = []
        self.left: dict[str, list[str]] = {}
        self.done = Counter[str]()
        self.parts: list[str] = []
        self.counts: dict[str, int] = dict.fromkeys(
            ("outputs", "parameters", "gradients", "changed", "compared", "ambiguous", "not checked", "alone"), 0
        )

    def add(self, module: str, line: str) -> None:
        self.problems.append(Problem(module, line))

    def count(self, kind: str) -> None:
        """Count a tensor that is compared."""
        self.counts["compared"] += 1
        self.done[kind] += 1

    def leave(self, reason: str, name: str) -> None:
        """Note what was not compared."""
        if name not in (names := self.left.setdefault(reason, [])):
            names.append(name)

    def relation(self, fit: Found, subject: str, whole: Tensor, count: int) -> Relation | None:
        """Return the relation that was found, also of ranks that hold a part of the tensor alone, which is noted."""
        if fit.relation is None and fit.partial is not None:
            part = fit.partial
            size, blocks = whole.numel(), part.blocks
            reason = f"{size // blocks * part.covered(count)} of {size} values"
            self.parts.append(f"of {subject} the ranks hold {reason} together ({part})")
        return fit.relation or fit.partial

    def is_unchecked(self, exact: Tensor | None, values: Values, fit: Found, kind: str, name: str) -> bool:
        """Whether a comparison of these values says nothing; note the tensor if so."""
        is_fine = values.bound <= largest(values.whole) / 10 or not bool((values.whole != 0).any())
        if not is_below(exact, values) and (is_fine or fit.relation is None):
            return False
        self.counts["compared"] -= 1
        self.done[kind] -= 1
        self.counts["not checked"] += 1
        subject = "16 bits" if self.is_rounded else "its dtype" if kind == "outputs" else "the largest gradient"
        self.leave(f"below the rounding of {subject}", f"{kind.removesuffix('s')} {name}".removeprefix("output "))
        return True

    def fold(self, before: int, reason: str, is_first: bool) -> None:
        """Shorten the list of problems from one on: wrong values make wrong gradients, of which no list is needed."""
        shown, more, end = (_SHOWN, " more", "") if is_first else (0, "", ", too")
        hidden = len(self.problems) - before - shown
        if hidden > 0:
            line = f"{reason} {counted(hidden, 'parameter')}{more} differ{end}"
            self.problems[before + shown :] = [Problem("", line)]


def figures(fit: Found, values: Values) -> str:
    """Return the difference and its bound in words."""
    return f"largest difference {fit.error:.1e}, at most {values.bound:.1e}"
