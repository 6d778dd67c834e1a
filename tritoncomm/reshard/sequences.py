"""``sequence_layout``: sequence-sharded tensors between contiguous, zigzag, striped and replicated tokens."""

from functools import lru_cache
from typing import Any, Literal

from torch import Tensor

from tritoncomm.core.function import outside_graphs
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import check_kind, checked_dim
from tritoncomm.errors import ArgumentError, CommError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.api import BUCKET_BYTES, Grad, formed, planned
from tritoncomm.reshard.boxes import KINDS, bounds_of
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.request import Options, members_of, refuse
from tritoncomm.reshard.specs import local_of, named

__all__ = ["sequence_layout"]

_NAME = "sequence_layout"
Kind = Literal["contiguous", "zigzag", "striped", "full"]
Side = tuple[str, Ints | None]
"""A kind, and where the packed sequences begin and end."""


@outside_graphs
def sequence_layout(
    x: Any,
    source: Kind | tuple[Kind, Any],
    target: Kind | tuple[Kind, Any],
    *,
    dim: int = 1,
    cu_seqlens: Any = None,
    group: GroupLike | None = None,
    grad: Grad = "replicated",
) -> Any:
    """Sequence-sharded tensors in another layout of the sequence, over a context- or sequence-parallel group.

    With ``S`` tokens and ``n`` ranks, rank ``r`` has, in this order:

    - ``contiguous``: tokens ``r*run`` to ``(r + 1)*run``, ``run = ceil(S / n)``;
    - ``zigzag``: chunks ``r`` and ``2n - 1 - r`` of ``2n`` chunks;
    - ``striped``: tokens ``r, r + n, r + 2n, ...``;
    - ``full``: all of them.

    Forward: from source to target. Backward: from target to source. Each is one pack, one all-to-all-v and one unpack
    for all tensors (per 256 MiB, as of ``reshard``) of exactly the tokens that ranks lack; the plan is cached. From
    ``full`` nothing is sent. Where the layouts are the same the tensors are handed back. Every rank of the group calls.
    Under torch.compile the graph breaks here. For other ranks, casts, ``out`` or a plan to keep, give
    ``Layout.sequence`` to ``reshard`` or ``reshard_plan``.

    Sources: ring attention's causal load balance as Megatron-LM's and TransformerEngine's context parallelism has it
    (zigzag), Brandon et al. 2023, "Striped Attention" (striped), TransformerEngine's THD format (packed).

    Args:
        x: this rank's local tensor, ``[.., local tokens, ..]``, or a sequence or mapping of them (q, k, v, position
            ids, labels at once), of any dtypes and other dims.
        source: the kind of the layout now; or ``(kind, cu_seqlens)``, where the sides are packed differently.
        target: of the result, as ``source``; ``("contiguous", None)`` has packed sequences as one.
        dim: of the sequence in every tensor.
        cu_seqlens: where packed sequences begin and end, ``0, ..., S``: ints or a tensor (one on a GPU is read, which
            waits for it). Each is laid out by itself, and a rank has its part of each, one after the other. None: one
            sequence of ``n`` times the local tokens; where ranks have different numbers of tokens, pass ``(0, S)``.
        group: of the ranks, in the order of the layouts; all ranks of the job by default.
        grad: as for ``reshard``; matters for ``full`` targets: whether their gradients are equal, or are summed.

    Returns:
        As ``x``: tensors ``[.., local tokens of the target, ..]``; of a DTensor or ColoTensor, its local tensor's.

    Raises:
        ShapeError: no such dim, boundaries that do not go from 0 to ``S``, a local tensor of another size, or a zigzag
            sequence that is no multiple of ``2n`` tokens.
        ArgumentError: no such kind, or what is no tensor, dim or boundary.
        MismatchError: another rank has other arguments, or refused its own. Nothing was sent; but see ``reshard``.
    """
    members = members_of(group, _NAME)
    try:
        layouts = _layouts(x, source, target, dim, cu_seqlens, members.ranks)
    except CommError as error:
        refuse(error, members, _NAME)
    request, plan = planned(x, *layouts, members, Options(_NAME, bucket_bytes=BUCKET_BYTES, grad=grad))
    return formed(x, plan.run(request.tensors, None), request.wraps)


def _layouts(
    x: Any, source: Any, target: Any, dim: Any, cu_seqlens: Any, ranks: Ints
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Of every tensor, by name."""
    packed = None if cu_seqlens is None else bounds_of(cu_seqlens, _NAME)
    sides = _side(source, packed, "source"), _side(target, packed, "target")
    made: tuple[dict[str, Layout], dict[str, Layout]] = ({}, {})
    for name, given in named(x, _NAME).items():
        if not isinstance(given, Tensor):
            raise ArgumentError(f"{_NAME}: {name} must be a tensor, not {type(given).__name__}")
        local = local_of(given)
        check_kind(local, _NAME)
        place = checked_dim(local, dim, _NAME)
        for layouts, layout in zip(made, _pair(tuple(local.shape), place, *sides, ranks), strict=True):
            layouts[name] = layout
    return made


def _side(given: Any, packed: Ints | None, what: str) -> Side:
    """A kind with its own boundaries, or with those of both sides."""
    kind = given
    if isinstance(given, tuple) and len(given) == 2:
        kind, bounds = given
        packed = None if bounds is None else bounds_of(bounds, f"{_NAME}: the {what}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ArgumentError(
            f"{_NAME}: the {what} must be one of {', '.join(KINDS)}, or one with its cu_seqlens, not {given!r:.80}"
        )
    return kind, packed


@lru_cache(maxsize=64)
def _pair(shape: Ints, dim: int, source: Side, target: Side, ranks: Ints) -> tuple[Layout, Layout]:
    """Both layouts of a tensor whose local shape this is."""
    (kind, bounds), (other, others) = source, target
    length = shape[dim] * (1 if kind == "full" else len(ranks))
    ends = [each[-1] for each in (bounds, others) if each is not None]
    shape = (*shape[:dim], ends[0] if ends else length, *shape[dim + 1 :])
    return Layout.sequence(shape, dim, kind, ranks, bounds), Layout.sequence(shape, dim, other, ranks, others)
