"""Recurrent layers over shards of the sequence: recurrences by heads, causal convolutions by a halo, documents apart.

Every rank holds a shard of the sequence with all heads. Each rank runs the recurrence over the full sequence for its
share of the heads; like attention, a recurrence is independent per head. A convolution of K taps gets the last K-1
positions before the shard. Parameters are whole on every rank, and their gradients are partial: they add up over the
group.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from inspect import Parameter, signature
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from tritoncomm.core.call import compare_arguments
from tritoncomm.core.documents import group_documents
from tritoncomm.core.heads import HeadLayout, HeadShare, split_heads
from tritoncomm.core.plan import Ints, check_split_sizes, located, normalize_sizes
from tritoncomm.core.validation import check_kind, checked_ints
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.groups import GroupLike, resolve_sequence
from tritoncomm.mappings import all_gather_dim
from tritoncomm.mappings.exchanges import exchange_rows
from tritoncomm.ulysses import to_heads, to_sequence

__all__ = ["Documents", "Exchanged", "Gathered", "Role", "Sliced", "by_heads", "conv_halo"]


class Exchanged(NamedTuple):
    """Role of a tensor with positions and heads, in these dims: a rank gets all positions of its heads.

    Attributes:
        columns: value dim, along which the recurrence is independent, too. It is split when there are more ranks than
            heads; if no tensor has one, that raises.
    """

    positions: int = 1
    heads: int = 2
    columns: int | None = None


class Gathered(NamedTuple):
    """Role of a tensor with positions, in this dim, and no heads: every rank gets all positions."""

    positions: int = 1


class Sliced(NamedTuple):
    """Role of a parameter with a part for every head, in this dim: a rank uses the parts of its heads."""

    heads: int = 0


_EXCHANGED = Exchanged()
Role = Exchanged | Gathered | Sliced | None
"""Role of an argument; None passes it on as it is."""
Documents = Sequence[int] | Sequence[Sequence[int]]
"""Global starts of packed documents, which begin with 0: of all rows of a batch, or of each."""
_Function = Callable[..., Any]


def by_heads(
    function: _Function,
    group: GroupLike | None = None,
    roles: Mapping[int | str, Role] | None = None,
    result: Exchanged = Exchanged(),  # noqa: B008  (a tuple, never changed)
    boundaries: Literal["cu_seqlens", "seq_idx"] | None = None,
) -> _Function:
    """Return a function over shards of the sequence that computes ``function``, a recurrence, on all positions.

    Forward: one all-to-all to the heads of this rank (one for each dtype), ``function``, one all-to-all back. Backward:
    likewise; the gradients of heads that several ranks read are added up in rank order. Heads are split as evenly as
    possible. Some tensors may have fewer heads, as keys that are shared among value heads. Of these a rank gets the
    heads that its own ones read, and ``function`` repeats them as it would in one process. Where heads are fewer than
    ranks, the ranks of a head split its columns.

    Args:
        group: ranks that hold the sequence (see ``groups.as_group``); the tensor group by default.
        roles: of every tensor among the arguments, by position or by name; numbers and others need none. By default
            all are ``Exchanged()``, ``[b, s, heads, ...]``, of three dims and more. A list, tuple or dict with tensors
            inside needs None.
        result: dims of the result, the first one if ``function`` returns a tuple; the others are returned as they are,
            those of this rank's heads.
        boundaries: argument by which ``function`` keeps documents apart, so that one call computes all of them:
            ``cu_seqlens``, int32 ``[documents + 1]`` of one row, to which all rows of the batch are joined (positions
            have to be dim 1); or ``seq_idx``, int32 ``[b, S]``. Without it ``function`` is called for each length of
            documents, which are the rows of its batch.

    Returns:
        A function with the arguments of ``function`` and two more by keyword. ``documents``: global starts of packed
        documents, which begin with 0, the same on every rank; of all rows of the batch, or a list for each. The
        recurrence starts anew at each, and of several results all but the first are None. ``sizes``: positions of
        every rank, where they differ.

    Raises:
        ArgumentError: a tensor without a role, or without the dims of its role; documents that do not ascend.
        ShapeError: fewer heads than ranks and no columns to split, or more ranks than columns of all heads; numbers of
            heads that do not divide, or sizes that do not fit.
        UnsupportedError: more than two different numbers of heads.

    Shape: ``[b, s, heads, d] -> [b, s, heads, d']`` by default.

    Example:
        ``by_heads(mamba2_chunk_scan, group, {"hidden_states": Exchanged(), "dt": Exchanged(), "A": Sliced(), "B":
        Exchanged(), "C": Exchanged(), "D": Sliced()})(hidden_states=x, dt=dt, A=A, B=B, C=C, D=D, chunk_size=64)``
    """
    name = "by_heads"
    ranks = resolve_sequence(group, name)
    if boundaries not in (None, "cu_seqlens", "seq_idx"):
        raise ArgumentError(f"{name}: boundaries={boundaries!r}; they are 'cu_seqlens', 'seq_idx' or None")
    if roles is not None and not isinstance(roles, Mapping):
        raise ArgumentError(f"{name}: roles must be a mapping from positions or names, not {type(roles).__name__}")
    for argument, role in (roles or {}).items():
        if not isinstance(role, Exchanged | Gathered | Sliced | None):
            kinds = "Exchanged(), Gathered(), Sliced() or None"
            raise ArgumentError(f"{name}: the role of {argument!r} must be {kinds}, not {role!r:.80}")
    if not isinstance(result, Exchanged):
        raise ArgumentError(f"{name}: result must be Exchanged(), not {result!r:.80}")
    if boundaries == "cu_seqlens" and any(
        role.positions != 1 for role in (result, *(roles or {}).values()) if isinstance(role, Exchanged | Gathered)
    ):
        raise ArgumentError(f"{name}: boundaries 'cu_seqlens' need positions in dim 1")
    return _ByHeads(function, ranks, roles, result, boundaries)


class _ShardedCall(NamedTuple):
    """Shards of the arguments of one call, and how they are exchanged.

    Attributes:
        roles: of the tensors among the arguments, by position or by name.
        exchanged: roles of the tensors with positions and heads.
        positions: of every rank.
        documents: global starts of the documents, and the end; of all rows of the batch, or of each.
        batch_size: rows of the batch.
        plan: layouts of the exchanges.
    """

    roles: dict[int | str, Role]
    exchanged: dict[int | str, Exchanged]
    positions: Ints
    documents: list[Ints]
    batch_size: int
    plan: "HeadPlan"


class _ByHeads:
    """Function over shards of the sequence that ``by_heads`` returns: exchange, compute, exchange back."""

    _NAME = "by_heads"

    def __init__(
        self,
        function: _Function,
        group: ProcessGroup,
        roles: Mapping[int | str, Role] | None,
        result: Exchanged,
        boundaries: Literal["cu_seqlens", "seq_idx"] | None,
    ) -> None:
        self.function, self.group, self.roles, self.result = function, group, roles, result
        self.boundaries: Literal["cu_seqlens", "seq_idx"] | None = boundaries
        self.parameters = _parameters_of(function)

    def __call__(
        self, *args: Any, documents: Documents | None = None, sizes: Sequence[int] | None = None, **kwargs: Any
    ) -> Any:
        """Compute the function; see ``by_heads`` for ``documents`` and ``sizes``."""
        arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        # In the order of the parameters: other ranks may name them in another one.
        arguments = {key: arguments[key] for key in _in_order(arguments, self.parameters)}
        call = self.plan(arguments, documents, sizes)
        returned = self.compute(self.to_heads(arguments, call), call)
        return self.to_sequence(returned, call)

    def plan(
        self, arguments: Mapping[int | str, Any], documents: Documents | None, sizes: Sequence[int] | None
    ) -> _ShardedCall:
        """Return the roles, the documents and the layouts of a call; check them."""
        name, world, parameters = self._NAME, self.group.size(), self.parameters
        labels = {key: parameters[key] if isinstance(key, int) and key < len(parameters) else key for key in arguments}
        roles = _roles_of(arguments, self.roles, labels, name)
        exchanged = {key: role for key, role in roles.items() if isinstance(role, Exchanged)}
        if not exchanged:
            raise ArgumentError(f"{name}: no argument is a tensor with positions and heads")
        if documents is not None and self.boundaries is not None and arguments.get(self.boundaries) is not None:
            raise ArgumentError(f"{name}: {self.boundaries} and documents both tell of documents; pass documents alone")
        x, role = next((arguments[key], role) for key, role in exchanged.items())
        batch_size = x.shape[_batch_dim(role)]
        positions = _sizes(sizes, x.shape[role.positions], x, self.group, name)
        heads = tuple([arguments[key].shape[role.heads] for key, role in exchanged.items()])
        columns = [0 if role.columns is None else arguments[key].shape[role.columns] for key, role in exchanged.items()]
        length = sum(positions)
        bounds = [(*starts, length) for starts in _starts(documents, length, batch_size, name)]
        for key, role in roles.items():
            if isinstance(role, Sliced) and arguments[key].shape[role.heads] != max(heads):
                size = arguments[key].shape[role.heads]
                raise ShapeError(f"{name}: {labels[key]!r} has {size} heads, not {max(heads)}")
        compare_arguments(
            name, self.group, documents=[row[:-1] for row in bounds], boundaries=self.boundaries, result=self.result,
            roles=[(labels[key], role) for key, role in roles.items()],
            others={str(labels[key]): value for key, value in arguments.items() if key not in roles},
        )  # fmt: skip
        make = plan_heads.__wrapped__ if is_compiling() else plan_heads
        split_columns = tuple(columns) if world > max(heads) else ()
        plan = make(heads, positions, world, name, split_columns)
        return _ShardedCall(roles, exchanged, positions, bounds, batch_size, plan)

    def to_heads(self, arguments: Mapping[int | str, Any], call: _ShardedCall) -> dict[int | str, Any]:
        """Return the arguments with all positions of this rank's heads."""
        local, plan, rank = dict(arguments), call.plan, self.group.rank()
        names = self._NAME, f"{self._NAME}.backward"
        tensors = [_as_heads(arguments[key], role, plan.splits, names[0]) for key, role in call.exchanged.items()]
        received = to_heads(tensors, plan.tensors, self.group, names)
        for (key, role), x in zip(call.exchanged.items(), received, strict=True):
            local[key] = _from_heads(x, role, arguments[key], 1 if plan.splits else None)
        for key, role in call.roles.items():
            if isinstance(role, Sliced):
                local[key] = local[key].narrow(role.heads, plan.heads.starts[rank], plan.heads.sizes[rank])
            elif isinstance(role, Gathered):
                local[key] = all_gather_dim(local[key], role.positions, self.group, sizes=call.positions)
        return local

    def compute(self, arguments: Mapping[int | str, Any], call: _ShardedCall) -> Any:
        """Return the results of the function, of every document by itself."""
        stops = call.documents
        if self.boundaries is not None and any(len(row) > 2 for row in stops):
            stops = stops * (call.batch_size if len(stops) == 1 else 1)
            return _with_boundaries(self.function, arguments, call.roles, stops, self.boundaries)
        return _by_documents(self.function, arguments, call.roles, stops, call.batch_size, self.result)

    def to_sequence(self, returned: Any, call: _ShardedCall) -> Any:
        """Return the results with the first one over this rank's positions of all heads."""
        plan, rank, result = call.plan, self.group.rank(), self.result
        out, *rest = returned if isinstance(returned, tuple) else (returned,)
        if plan.splits and (result.columns is None or out.shape[result.columns] != plan.out.shares[0].sizes[rank]):
            raise ShapeError(
                f"{self._NAME}: more ranks than heads need a result with the {plan.out.shares[0].sizes[rank]} columns "
                f"of this rank; it has the shape {list(out.shape)}, and is {result}"
            )
        names = self._NAME, f"{self._NAME}.backward"
        back = to_sequence(_as_heads(out, result, plan.splits, names[0]), plan.out, self.group, names)
        back = _from_heads(back, result, out, plan.heads.heads if plan.splits else None)
        return (back, *rest) if isinstance(returned, tuple) else back


def _parameters_of(function: _Function) -> tuple[str, ...]:
    """Return the names of the parameters of a function that may be positional; empty of a builtin function."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple([x.name for x in parameters if x.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)])


class HeadPlan(NamedTuple):
    """Layouts of the tensors of a recurrence, and of its result.

    Attributes:
        heads: share of the heads.
        splits: whether ranks split the columns of a head. A layout then has a head of one element for every column.
    """

    tensors: HeadLayout
    out: HeadLayout
    heads: HeadShare
    splits: bool = False


@lru_cache(maxsize=1024)  # plans of exchanges are looked up by the identity of a layout
def plan_heads(heads: Ints, positions: Ints, world: int, name: str, columns: Ints = ()) -> HeadPlan:
    """Return the layouts for tensors of these numbers of heads.

    Args:
        columns: for every tensor the number of columns that a head has, or 0 if it has none. Empty where ranks do not
            split columns, as there are enough heads.
    """
    total, fewer = max(heads), {n for n in heads if n != max(heads)}
    if len(fewer) > 1:
        raise UnsupportedError(f"{name}: {sorted(set(heads))} are more than two different numbers of heads")
    shared = fewer.pop() if fewer else total
    widths = {n for n in columns if n}
    try:
        if widths:
            return _split_columns(heads, columns, positions, world)
        of_heads, of_shared = split_heads(total, shared, world, ("heads", "heads of other tensors"))
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None
    shares = tuple([of_heads if n == total else of_shared for n in heads])
    inputs = HeadLayout(seq_dim=1, shares=shares, seq_sizes=positions)
    result = HeadLayout(seq_dim=1, shares=(of_heads,), seq_sizes=positions)
    return HeadPlan(inputs, result, of_heads)


def _split_columns(heads: Ints, columns: Ints, positions: Ints, world: int) -> HeadPlan:
    """Return the layouts where ranks split the columns of heads: a rank has columns of one head.

    A tensor without columns, or with fewer heads, is shared: a rank gets the head that belongs to its own one.
    """
    total, widths = max(heads), {n for n in columns if n}
    if len(widths) > 1 or any(n != total for n, width in zip(heads, columns, strict=True) if width):
        raise ShapeError(f"tensors with columns need as many heads and columns; they have {list(columns)}")
    if total % min(heads):
        raise ShapeError(f"{total} heads are no multiple of {min(heads)} heads of other tensors")
    width = widths.pop()
    if total * width < world:
        raise ShapeError(f"{total} heads of {width} columns are fewer than the {world} ranks that split them")
    of_columns, of_heads = split_heads(total * width, total, world)  # each column counts as a head of its own
    shares = []
    for n, is_split in zip(heads, columns, strict=True):
        group_size = total // n  # heads that share one head of this tensor
        shared = HeadShare(tuple([head // group_size for head in of_heads.starts]), (1,) * world, n)
        shares.append(of_columns if is_split else shared)
    return HeadPlan(
        HeadLayout(1, tuple(shares), positions), HeadLayout(1, (of_columns,), positions), of_heads, splits=True
    )


def _has_tensors(values: Any) -> bool:
    """Whether a container has tensors inside; those of no dims are numbers."""
    return any(isinstance(x, Tensor) and x.dim() for x in tree_leaves(values))


def _roles_of(
    arguments: Mapping[int | str, Any],
    roles: Mapping[int | str, Role] | None,
    labels: Mapping[int | str, int | str],
    name: str,
) -> dict[int | str, Role]:
    """Return the roles of the tensors among the arguments; reject a tensor without one.

    Args:
        labels: name of each argument, or its position where the function's parameters have no name.
    """
    parts: dict[int | str, Role] = {}
    for key, x in arguments.items():
        word = labels[key]
        is_left = roles is not None and roles.get(key, roles.get(word, _EXCHANGED)) is None
        if isinstance(x, list | tuple | dict) and not is_left and _has_tensors(x):
            raise ArgumentError(
                f"{name}: {word!r} has tensors inside, which would be those of a shard; pass each by itself, or give "
                "the role None"
            )
        if not isinstance(x, Tensor) or x.dim() == 0:
            continue
        role: Role = _EXCHANGED
        if roles is not None:
            if key not in roles and word not in roles:
                raise ArgumentError(f"{name}: the tensor {word!r} has no role; None passes it on as it is")
            role = roles[key] if key in roles else roles[word]
        if role is not None:
            highest_dim = max([dim for dim in role if dim is not None])
            if highest_dim >= x.dim() or (isinstance(role, Exchanged) and x.dim() < 3):
                raise ArgumentError(f"{name}: {word!r} of shape {tuple(x.shape)} cannot be {role}; see roles")
            parts[key] = role
    return parts


def _in_order(keys: Iterable[int | str], parameters: Sequence[str]) -> list[int | str]:
    """Return the positions and names of arguments in the order of the parameters; names that these lack are last."""
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    keys = sorted(keys, key=lambda key: (isinstance(key, str), str(key) if isinstance(key, str) else key))
    return sorted(keys, key=lambda key: key if isinstance(key, int) else numbers.get(key, len(numbers)))


def _as_heads(x: Tensor, role: Exchanged, splits: bool, name: str) -> Tensor:
    """Return a view or copy ``[b, s, heads, d]`` of a tensor with other dims, d being all that is left.

    Args:
        splits: whether a column counts as a head, in a tensor that has columns.
    """
    if type(x) is not Tensor and not is_compiling():
        check_kind(x, name)
    if splits and role.columns is not None:
        x = x.movedim((_batch_dim(role), role.positions, role.heads, role.columns), (0, 1, 2, 3)).flatten(2, 3)
    elif role[:2] != (1, 2):
        x = x.movedim((_batch_dim(role), *role[:2]), (0, 1, 2))
    return x if x.dim() == 4 else x.unsqueeze(3) if x.dim() == 3 else x.flatten(3)


def _from_heads(x: Tensor, role: Exchanged, like: Tensor, heads: int | None) -> Tensor:
    """Return a tensor ``[b, s, heads, d]`` in the dims of ``like``, with its own positions and heads.

    Args:
        heads: number of heads whose columns count as heads in x; None where heads do.
    """
    columns = () if heads is None or role.columns is None else (role.columns,)
    is_in_order = (role.positions, role.heads) == (1, 2) and not columns
    if is_in_order and like.dim() < 5:  # a tensor of three dims has got another one of size 1
        return x if like.dim() == 4 else x.squeeze(3)
    dims = _batch_dim(role), role.positions, role.heads, *columns
    if heads is not None and columns:
        x = x.unflatten(2, (heads, x.shape[2] // heads))
    rest = [size for dim, size in enumerate(like.shape) if dim not in dims]
    if x.dim() != like.dim() or len(rest) > 1:
        x = x.reshape(*x.shape[: len(dims)], *rest)
    return x.movedim(tuple(range(len(dims))), dims)


def _sizes(sizes: Sequence[int] | None, length: int, x: Tensor, group: ProcessGroup, name: str) -> Ints:
    """Return the positions of every rank, and check this rank's ``length``."""
    world, rank = group.size(), group.rank()
    positions = normalize_sizes(sizes, name)
    if positions is None:
        return (length,) * world if is_compiling() else _equal_sizes(length, world)
    try:
        check_split_sizes((sum(positions),), 0, world, positions)
        if positions[rank] != length:
            raise ShapeError(f"sizes {list(positions)}: this rank holds {length} positions")
    except ShapeError as error:
        raise located(error, x.shape, name, group) from None
    return positions


@lru_cache(maxsize=1024)
def _equal_sizes(length: int, world: int) -> Ints:
    """Return the positions of every rank where all hold as many: kept, as a job may have thousands of ranks."""
    return (length,) * world


def _starts(documents: Documents | None, length: int, batch: int, name: str) -> list[Ints]:
    """Return the global starts of documents, of all rows or of each; check that they ascend inside of the sequence."""
    if documents is None:
        return [(0,)]
    rows: Any = documents if len(documents) and isinstance(documents[0], Sequence) else [documents]
    rows = [checked_ints(row, f"{name}: documents") for row in rows]
    if len(rows) > 1 and len(rows) != batch:
        raise ArgumentError(f"{name}: documents of {len(rows)} rows, and the batch has {batch}")
    for row in rows:
        if not row or row[0] != 0 or any(a >= b for a, b in pairwise((*row, max(length, 1)))):
            raise ArgumentError(f"{name}: documents {list(row)[:8]} have to ascend from 0, below {length} positions")
    return rows[:1] if all(row == rows[0] for row in rows) else rows


def _by_documents(
    function: _Function,
    arguments: Mapping[int | str, Any],
    parts: Mapping[int | str, Role],
    rows: Sequence[Ints],
    batch_size: int,
    result: Exchanged,
) -> Any:
    """Call ``function`` for the documents of each length, and bring its results into the order of the batch.

    Args:
        rows: starts of the documents, and the end; of all rows of the batch, or of each.
    """
    if len(rows) == 1 and len(rows[0]) == 2:  # one document in every row
        return _call(function, arguments)
    split = {key: role for key, role in parts.items() if isinstance(role, Exchanged | Gathered)}
    groups = group_documents(tuple(rows), batch_size, arguments[next(iter(split))].device)
    tensors = {key: groups.split(arguments[key], _batch_dim(role), role.positions) for key, role in split.items()}
    results = [
        _call(function, {key: tensors[key][number] if key in tensors else x for key, x in arguments.items()})
        for number in range(len(groups.groups))
    ]
    is_tuple = isinstance(results[0], tuple)
    firsts = [returned[0] if is_tuple else returned for returned in results]
    batch = groups.join(firsts, _batch_dim(result), result.positions)
    return _with_none(batch, len(results[0]) - 1) if is_tuple else batch


def _call(function: _Function, arguments: Mapping[int | str, Any]) -> Any:
    """Call ``function`` with arguments by position and by name."""
    positional = sorted(key for key in arguments if isinstance(key, int))
    return function(
        *[arguments[key] for key in positional],
        **{key: x for key, x in arguments.items() if isinstance(key, str)},
    )


def _with_none(out: Any, count: int) -> tuple[Any, ...]:
    """Return a result with None in the place of ``count`` others, which are of documents or shards."""
    return (out, *[None] * count)


def _with_boundaries(
    function: _Function,
    arguments: Mapping[int | str, Any],
    parts: Mapping[int | str, Role],
    rows: Sequence[Ints],
    kind: Literal["cu_seqlens", "seq_idx"],
) -> Any:
    """Call ``function`` once for all documents; of several results return the first one, and None for the others.

    Args:
        rows: starts of the documents of every row, and the end.
    """
    tensors, batch_size, length = dict(arguments), len(rows), rows[0][-1]
    device = next(x for key, x in arguments.items() if isinstance(parts.get(key), Exchanged)).device
    starts = document_boundaries(tuple(rows), kind, device)
    if kind == "cu_seqlens":  # functions with these boundaries take one row, which all rows are joined to
        for key, role in parts.items():
            if isinstance(role, Exchanged | Gathered):
                tensors[key] = tensors[key].flatten(0, 1)[None]
    returned = _call(function, {**tensors, kind: starts})
    out, *rest = returned if isinstance(returned, tuple) else (returned,)
    if kind == "cu_seqlens":
        out = out[0].unflatten(0, (batch_size, length))
    return _with_none(out, len(rest)) if isinstance(returned, tuple) else out


def document_boundaries(rows: tuple[Ints, ...], kind: Literal["cu_seqlens", "seq_idx"], device: torch.device) -> Tensor:
    """Return the boundaries of documents: of all rows joined, or for each position the number of its document.

    Layers of a batch get the same tensor. Each would wait for its stream to copy one to a GPU, and fla keeps what it
    has computed, with a wait, for the last tensor.

    Args:
        rows: starts of the documents of every row, and the end.
    """
    return _make_boundaries(rows, kind, device) if is_compiling() else _kept_boundaries(rows, kind, device)


@lru_cache(maxsize=8)
def _kept_boundaries(rows: tuple[Ints, ...], kind: Literal["cu_seqlens", "seq_idx"], device: torch.device) -> Tensor:
    """Make the boundaries of a batch, which may be kept for a backward."""
    with torch.inference_mode(mode=False):
        return _make_boundaries(rows, kind, device)


def _make_boundaries(rows: tuple[Ints, ...], kind: Literal["cu_seqlens", "seq_idx"], device: torch.device) -> Tensor:
    if kind == "cu_seqlens":
        joined = [row * stops[-1] + start for row, stops in enumerate(rows) for start in stops[:-1]]
        return torch.tensor([*joined, len(rows) * rows[0][-1]], dtype=torch.int32, device=device)
    lengths = [torch.tensor([stop - start for start, stop in pairwise(stops)]) for stops in rows]
    numbers = [torch.arange(len(row)).repeat_interleave(row) for row in lengths]
    return torch.stack(numbers).to(device, torch.int32)


def _batch_dim(role: Exchanged | Gathered) -> int:
    """Return the dim of the rows of a batch: the first one without positions, heads or columns."""
    dims = (role.positions, role.heads, role.columns) if isinstance(role, Exchanged) else (role.positions,)
    dim = 0
    while dim in dims:
        dim += 1
    return dim


def _joined(results: list[Any], dim: int) -> Any:
    """Concatenate the first result of several calls along a dim; further results become None."""
    if not isinstance(results[0], tuple):
        return torch.cat(results, dim)
    return torch.cat([returned[0] for returned in results], dim), *[None] * (len(results[0]) - 1)


def conv_halo(function: _Function, group: GroupLike | None = None, positions: int = 2) -> _Function:
    """Return a function over shards of the sequence that computes ``function``, a causal convolution, in one call.

    Forward: the last K-1 positions before this rank's shard arrive in one all-to-all, from the neighbour alone unless
    shards have fewer. Backward: their gradients go back, and are added up. Positions before a document's start are
    zeros.

    Args:
        function: ``function(x, weight, bias, ...)`` of x ``[b, channels, n]`` and a weight of K taps in its last dim
            returns ``[b, channels, n]``, whose position i is of the positions ``i-K+1`` to i of x, with zeros in front.
            Of a tuple, the first is the result; the others are of a shard, and None takes their place.
        group: ranks that hold the sequence (see ``groups.as_group``); the tensor group by default.
        positions: dim of the positions in x and the result: 2, or 1 for ``[b, n, channels]``.

    Returns:
        A function with the arguments of ``function``, and ``documents`` and ``sizes`` as in ``by_heads``.

    Raises:
        ArgumentError: another dim of positions, or no weight.
        ShapeError: sizes that do not fit.
        UnsupportedError: another tensor than a bias, as a state or boundaries of documents, which are of a shard; a
            ``dilation``.

    Shape: ``[b, channels, s] -> [b, channels, s]``, or ``[b, s, channels] -> [b, s, channels]``.
    """
    name = "conv_halo"
    if positions not in (1, 2):
        raise ArgumentError(f"{name}: positions={positions!r}; they are dim 1 or 2 of three")
    return _ConvHalo(function, resolve_sequence(group, name), positions)


class _ConvHalo:
    """Function over shards of the sequence that ``conv_halo`` returns: a halo arrives, then one call for all.

    Attributes:
        parameters: names of the function's positional parameters.
        inputs: names of the first two, the tensor and its weight.
    """

    _NAME = "conv_halo"

    def __init__(self, function: _Function, group: ProcessGroup, dim: int) -> None:
        self.function, self.group, self.dim = function, group, dim
        self.parameters = _parameters_of(function)
        self.inputs = self.parameters[:2] if len(self.parameters) > 1 else ("x", "weight")

    def __call__(
        self, *args: Any, documents: Documents | None = None, sizes: Sequence[int] | None = None, **kwargs: Any
    ) -> Any:
        """Compute the function; see ``by_heads`` for ``documents`` and ``sizes``."""
        name, group, dim = self._NAME, self.group, self.dim
        args = *args, *[kwargs.pop(key) for key in self.inputs[len(args) :] if key in kwargs]
        if len(args) < 2:
            raise ArgumentError(f"{name}: needs {' and '.join(self.inputs)}")
        x, weight, *further = args
        if type(x) is not Tensor and not is_compiling():
            check_kind(x, name)
        if x.dim() != 3:
            dims = "[b, channels, s]" if dim == 2 else "[b, s, channels]"
            raise ShapeError(f"{name}: shape {tuple(x.shape)} is not {dims}")
        width = weight.shape[-1] - 1
        positions = _sizes(sizes, x.shape[dim], x, group, name)
        rows = _starts(documents, sum(positions), x.shape[0], name)
        extras = {**{str(index): value for index, value in enumerate(further, 2)}, **kwargs}
        for key, value in extras.items():
            if isinstance(value, Tensor) and (value.dim() > 1 or not value.is_floating_point()):
                raise UnsupportedError(
                    f"{name}: the argument {key}, {value.dtype} {list(value.shape)}, is no bias: states and boundaries "
                    "of documents would be those of a shard; pass documents"
                )
        bound = self.function.keywords if isinstance(self.function, partial) else {}
        dilation = {**bound, **dict(zip(self.parameters[2:], further, strict=False)), **kwargs}.get("dilation", 1)
        if dilation not in (1, (1,), [1]):
            raise UnsupportedError(
                f"{name}: dilation={dilation!r} reads more than the K-1 positions of the halo; "
                "pass a weight with zeros between its taps"
            )
        compare_arguments(name, group, documents=rows, taps=width + 1, others=extras)
        plan = (plan_halo.__wrapped__ if is_compiling() else plan_halo)(positions, width, group.rank())
        halo = _halo(x, width, plan, dim, group, name) if width else x.narrow(dim, 0, 0)

        def convolve(inputs: Tensor) -> Any:
            """Return the function of some positions, with the weight and the arguments behind it."""
            return self.function(inputs, weight, *further, **kwargs)

        if len(rows) == 1:
            return self._apart(convolve, x, halo, rows[0], plan.first)
        of_rows = zip(x.split(1), halo.split(1), rows, strict=True)
        return _joined(
            [self._apart(convolve, row, row_halo, starts, plan.first) for row, row_halo, starts in of_rows], 0
        )

    def _apart(self, function: Callable[[Tensor], Any], x: Tensor, halo: Tensor, starts: Ints, first: int) -> Any:
        """Convolve rows of a shard in one call, each document with zeros in front.

        Args:
            halo: the K-1 positions before the shard.
            starts: global starts of the documents.
            first: global position of the shard's first one.
        """
        dim, width = self.dim, halo.shape[self.dim]
        # The document that the shard begins in may have begun inside of the halo: what is of others becomes zeros.
        # Before the first document there are zeros already.
        begun = max([start for start in starts if start <= first])
        of_others = min(max(begun - (first - width), 0), width) if begun else 0
        if of_others:
            halo = torch.cat([_zeros(x, of_others, dim), halo.narrow(dim, of_others, width - of_others)], dim)
        inside = [start - first for start in starts if first < start < first + x.shape[dim]] if width else []
        extended = [halo, x]
        if inside:
            # K-1 zeros between documents, whose own results are left out.
            gap, (piece, *pieces) = _zeros(x, width, dim), x.tensor_split(inside, dim)
            extended = [halo, piece, *[part for piece in pieces for part in (gap, piece)]]
        if not width:
            # Functions may not take a shard without positions.
            extended = [halo, x] if x.shape[dim] else [_zeros(x, 1, dim), x]
        lengths = [piece.shape[dim] for piece in extended]
        returned = function(torch.cat(extended, dim) if sum(lengths) > lengths[1] else x)
        out, *rest = returned if isinstance(returned, tuple) else (returned,)
        if out.shape[dim] != sum(lengths):
            raise ShapeError(
                f"{self._NAME}: the function returned {out.shape[dim]} positions; as many as it gets are needed"
            )
        if inside:  # halo, piece, gap, piece, ...
            out = torch.cat(out.split(lengths, dim)[1::2], dim)
        else:
            out = out.narrow(dim, lengths[0], lengths[1])
        return _with_none(out, len(rest)) if isinstance(returned, tuple) else out


def _zeros(x: Tensor, count: int, dim: int) -> Tensor:
    """Return zeros like ``count`` positions of a tensor."""
    return x.new_zeros(*x.shape[:dim], count, *x.shape[dim + 1 :])


class _Columns(NamedTuple):
    """The first of a rank's positions, and a number of them."""

    start: int
    count: int


class _Halo(NamedTuple):
    """Halo of a rank's shard.

    Attributes:
        first: global position of the shard's first one.
        parts: positions that the rank sends, one part for every rank that gets some.
        sent, received: their numbers to and from every rank.
    """

    first: int
    parts: tuple[_Columns, ...]
    sent: Ints
    received: Ints


@lru_cache(maxsize=1024)
def plan_halo(positions: Ints, width: int, rank: int) -> _Halo:
    """Plan which of the last ``width`` positions before every shard lie on which rank."""
    firsts = tuple(accumulate(positions, initial=0))

    def overlap(source: int, target: int) -> _Columns:
        start = max(firsts[source], firsts[target] - width)
        stop = min(firsts[source + 1], firsts[target])
        return _Columns(start - firsts[source], max(stop - start, 0))

    world = len(positions)
    parts = [overlap(rank, target) if target > rank else _Columns(0, 0) for target in range(world)]
    recv_counts = tuple([overlap(source, rank).count if source < rank else 0 for source in range(world)])
    counts = tuple([columns.count for columns in parts])
    return _Halo(firsts[rank], tuple([columns for columns in parts if columns.count]), counts, recv_counts)


def _halo(x: Tensor, width: int, plan: _Halo, dim: int, group: ProcessGroup, name: str) -> Tensor:
    """Return the ``width`` positions before this rank's shard, which are in ``dim``; zeros before the first one."""
    # Backends want the positions in dim 0. One rank gets some unless shards are shorter than the halo.
    rows = x.movedim(dim, 0)
    parts = [rows.narrow(0, *columns) for columns in plan.parts] or [rows.narrow(0, 0, 0)]
    sent = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
    arrived = exchange_rows(sent, plan.received, plan.sent, group, (name, f"{name}.backward")).movedim(0, dim)
    missing = width - sum(plan.received)
    return torch.cat([_zeros(x, missing, dim), arrived], dim) if missing else arrived
