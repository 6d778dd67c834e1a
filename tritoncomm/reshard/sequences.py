"""``sequence_layout``: sequence-sharded tensors between contiguous, zigzag, striped and replicated tokens."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from tritoncomm.core.autograd import outside_graphs
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import check_kind, checked_dim
from tritoncomm.errors import ArgumentError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.api import BUCKET_BYTES, Grad, reshard_as
from tritoncomm.reshard.boxes import KINDS, bounds_of
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.names import named
from tritoncomm.reshard.request import local_of, participants_of, refusing

__all__ = ["sequence_layout"]

_NAME = "sequence_layout"
Kind = Literal["contiguous", "zigzag", "striped", "full"]


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
    """Bring sequence-sharded tensors to another layout of the sequence, over a context- or sequence-parallel group.

    With ``S`` tokens and ``n`` ranks, rank ``r`` has, in this order:

    - ``contiguous``: tokens ``r*run`` to ``(r + 1)*run``, ``run = ceil(S / n)``;
    - ``zigzag``: chunks ``r`` and ``2n - 1 - r`` of ``2n`` chunks;
    - ``striped``: tokens ``r, r + n, r + 2n, ...``;
    - ``full``: all tokens.

    Forward: from source to target. Backward: from target to source. Each is one pack, one all-to-all-v and one unpack
    for all tensors (per 256 MiB, as of ``reshard``) of exactly the tokens that ranks lack; the plan is cached. From
    ``full`` nothing is sent. Tensors whose layout is unchanged are returned as they are. Every rank of the group calls.
    Under torch.compile the graph breaks here. For other ranks, casts, ``out`` or a plan to keep, pass
    ``Layout.sequence`` to ``reshard`` or ``reshard_plan``.

    Sources: ring attention's causal load balance as Megatron-LM's and TransformerEngine's context parallelism has it
    (zigzag), Brandon et al. 2023, "Striped Attention" (striped), TransformerEngine's THD format (packed).

    Args:
        x: this rank's local tensor, ``[.., local tokens, ..]``, or a sequence or mapping of them (q, k, v, position
            ids, labels at once), of any dtypes and other dims.
        source: the kind of the layout before; or ``(kind, cu_seqlens)``, if the two sides are packed differently.
        target: the kind of the layout after, as ``source``; ``("contiguous", None)`` has packed sequences as one.
        dim: the sequence dim of every tensor.
        cu_seqlens: boundaries ``0, ..., S`` of packed sequences: ints or a tensor (reading one on a GPU waits for the
            GPU). Each sequence is laid out by itself, and a rank has its part of each, one after the other. None: one
            sequence of ``n`` times the local tokens; if ranks have different numbers of tokens, pass ``(0, S)``.
        group: the ranks, in the order of the layouts; all ranks of the job by default.
        grad: as for ``reshard``; matters for ``full`` targets: whether their gradients are equal, or are summed.

    Returns:
        Tensors ``[.., local tokens of the target, ..]`` in the form of ``x``; for a DTensor or ColoTensor, a local
        tensor.

    Raises:
        ShapeError: no such dim, boundaries that do not go from 0 to ``S``, a local tensor of another size, or a zigzag
            sequence that is no multiple of ``2n`` tokens.
        ArgumentError: no such kind, or an argument of another type.
        MismatchError: another rank has other arguments, or refused its own. Nothing was sent; but see ``reshard``.
    """
    participants = participants_of(group, _NAME)
    with refusing(participants, _NAME):
        layouts = _layouts(x, source, target, dim, cu_seqlens, participants.ranks)
    sides: list[Any] = [side if isinstance(x, Mapping) else list(side.values()) for side in layouts]
    if isinstance(x, Tensor):
        sides = [layout for (layout,) in sides]  # one tensor has one layout on each side
    options = None, BUCKET_BYTES, grad  # None: no cast
    return reshard_as(_NAME, group, x, sides[0], sides[1], options)


def _layouts(
    x: Any, source: Any, target: Any, dim: Any, cu_seqlens: Any, ranks: Ints
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Return the source and the target layouts of all sequence-sharded tensors of a call, by the tensors' names."""
    common = None if cu_seqlens is None else bounds_of(cu_seqlens, _NAME)
    divisions = _division(source, common, "source"), _division(target, common, "target")
    layouts: tuple[dict[str, Layout], dict[str, Layout]] = ({}, {})
    for name, tensor in named(x, _NAME).items():
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{_NAME}: {name} must be a tensor, not {type(tensor).__name__}")
        local = local_of(tensor)
        check_kind(local, _NAME)
        place = checked_dim(local, dim, _NAME)
        # Boundaries tell the length; without any, all ranks have as many tokens as this one.
        length = local.shape[place] * (1 if divisions[0][0] == "full" else len(ranks))
        length = next((bounds[-1] for _, bounds in divisions if bounds is not None), length)
        shape = (*local.shape[:place], length, *local.shape[place + 1 :])
        for by_name, (kind, bounds) in zip(layouts, divisions, strict=True):
            by_name[name] = Layout.sequence(shape, place, kind, ranks, bounds)
    return layouts


def _division(side: Any, common: Ints | None, what: str) -> tuple[str, Ints | None]:
    """Read one side of a call: return the kind of its layout and the boundaries of its packed sequences, if any.

    ``common`` are the boundaries of a side that has none of its own; ``what`` is ``source`` or ``target``, for errors.
    """
    kind, bounds = side, common
    if isinstance(side, tuple) and len(side) == 2:
        kind, own = side
        bounds = None if own is None else bounds_of(own, f"{_NAME}: the {what}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ArgumentError(
            f"{_NAME}: the {what} must be one of {', '.join(KINDS)}, or one with its cu_seqlens, not {side!r:.80}"
        )
    return kind, bounds
