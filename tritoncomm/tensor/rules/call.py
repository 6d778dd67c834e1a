"""An operator seen as sets of labels: which dim of which operand is the same as which dim of the result.

A label that is cut is cut in every operand that has it. An operand without it takes part whole, and its gradient is
summed over the ranks; a result without it is a sum over the ranks, unless the operator says that it deals with that
label itself. That is all the engine has to know to run an operator on pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.core.plan import chunk_sizes

__all__ = ["Call", "Cut", "Labels", "Operand", "Parts"]

Labels = tuple[Any, ...]
Parts = tuple[tuple[Any, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The labels that are cut, and where this rank is.

    Attributes:
        parts: (label, pieces) in the order in which ranks count through them; empty when nothing is cut.
        sizes: of every label, of the whole.
        rank: of this process in ``group``.
        group: the tensor-parallel group; None when nothing is cut.
    """

    parts: Parts
    sizes: dict[Any, int]
    rank: int
    group: TorchGroup | None

    def has(self, label: Any) -> bool:
        """Whether the label is cut."""
        return any(label == each for each, _ in self.parts)

    def piece(self, label: Any) -> tuple[int, int]:
        """(start, size) of what this rank has of a label: everything when it is not cut."""
        rank, found = self.rank, (0, self.sizes[label])
        for each, count in reversed(self.parts):
            rank, index = divmod(rank, count)
            if each == label:
                pieces = chunk_sizes(self.sizes[label], count)
                found = sum(pieces[:index]), pieces[index]
        return found

    def all_pieces(self, label: Any) -> tuple[int, ...]:
        """Sizes of the pieces of the only cut label, by rank."""
        ((_, count),) = self.parts
        return chunk_sizes(self.sizes[label], count)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument.

    Attributes:
        tensor: a ColoTensor, or a plain tensor that every rank holds whole.
        labels: one per dim; None for a dim that cannot be cut.
        is_piece: the plain tensor is this rank's piece already.
    """

    tensor: Tensor
    labels: Labels
    is_piece: bool = False


@dataclass(slots=True)
class Call:
    """One call of an operator.

    Attributes:
        operands: the tensors that go in.
        results: labels of every tensor that comes out, in order.
        run: computes on the pieces: ``run(cut, *pieces, *late)``, any structure of tensors; without the late ones where
            a sum over the ranks follows.
        whole: labels that must not be cut.
        own: labels that ``run`` deals with when they are cut; the engine sums nothing over them.
        late: operands that must not be summed, labelled like the result.
        finish: ``finish(result, *late)`` after a sum over the ranks; None for nothing.
        after: what the sum over the ranks goes through; None for nothing.
        prefer: the operand whose cut is taken whatever it costs, by index: a weight with a compute spec.
        legal: a further condition on (label, pieces).
        gather: whether a result that is cut is made whole.
        scatter: dim of the result that is cut by the sum over the ranks; None leaves the sum whole.
        sizes: of the labels, filled in from the operands.
        result_sizes: of the labels in the result, where they are others.
        gathered: sharded operands and their gathered copies, where the operator runs on replicas; from the engine.
    """

    operands: Sequence[Operand]
    results: Sequence[Labels]
    run: Callable[..., Any]
    whole: frozenset[Any] = frozenset()
    own: frozenset[Any] = frozenset()
    late: Sequence[Operand] = ()
    finish: Callable[..., Any] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    prefer: int | None = None
    legal: Callable[[Any, int, dict[Any, int]], bool] | None = None
    gather: bool = False
    scatter: int | None = None
    sizes: dict[Any, int] = field(default_factory=dict)
    result_sizes: dict[Any, int] = field(default_factory=dict)
    gathered: Sequence[tuple[Any, Tensor]] = ()
