"""Description of an operator call: dims carry labels, as in einsum.

Sharding a label shards every operand that has it; operands without it are replicated (their gradients are all-reduced);
results without it are partial (all-reduced), unless the rule handles the label itself (``own``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.core.plan import chunk_sizes

__all__ = ["Call", "Labels", "Operand", "Parts", "Sharding"]

Labels = tuple[Any, ...]
Parts = tuple[tuple[Any, int], ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharded labels, and the position of this rank.

    Attributes:
        parts: (label, number of shards), ranks assigned row-major; empty if nothing is sharded.
        sizes: global size of every label.
        rank: of this process in ``group``.
        group: the tensor-parallel group; None if nothing is sharded.
    """

    parts: Parts
    sizes: dict[Any, int]
    rank: int
    group: TorchGroup | None

    def has(self, label: Any) -> bool:
        """Whether the label is sharded."""
        return any(label == each for each, _ in self.parts)

    def shard(self, label: Any) -> tuple[int, int]:
        """(start, size) of this rank's shard of a label; the full range if it is not sharded."""
        rank, bounds = self.rank, (0, self.sizes[label])
        for each, count in reversed(self.parts):
            rank, index = divmod(rank, count)
            if each == label:
                sizes = chunk_sizes(self.sizes[label], count)
                bounds = sum(sizes[:index]), sizes[index]
        return bounds

    def shard_sizes(self, label: Any) -> tuple[int, ...]:
        """Shard sizes of the only sharded label, by rank."""
        ((_, count),) = self.parts
        return chunk_sizes(self.sizes[label], count)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument.

    Attributes:
        tensor: a ColoTensor, or a plain replicated tensor.
        labels: one per dim; None for a dim that cannot be sharded.
        is_local: the plain tensor is a local shard already.
    """

    tensor: Tensor
    labels: Labels
    is_local: bool = False


@dataclass(slots=True)
class Call:
    """One call of an operator.

    Attributes:
        operands: the input tensors.
        results: labels of every output tensor, in order.
        run: computes on local tensors: ``run(sharding, *operands, *late)`` returns any structure of tensors; without
            the late ones if the result is partial and ``finish`` is set.
        replicated: labels that must not be sharded.
        own: labels that ``run`` handles when they are sharded; results are not reduced over them.
        late: operands that must not be summed (a bias), labelled like the result.
        finish: ``finish(result, *late)`` after a partial result is reduced; None for nothing.
        after: applied to the reduced result; None for nothing.
        prefer: index of the operand whose sharding is used at any cost: a weight with a compute spec.
        legal: a further condition on (label, number of shards, sizes).
        gather: whether a sharded result is gathered.
        scatter: dim along which a partial result is reduce-scattered; None all-reduces it.
        sizes: global sizes of the labels, taken from the operands.
        result_sizes: global sizes of labels whose size differs in the result.
        gathered: sharded operands and their gathered copies if no sharding is legal; set by ``execute``.
    """

    operands: Sequence[Operand]
    results: Sequence[Labels]
    run: Callable[..., Any]
    replicated: frozenset[Any] = frozenset()
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
