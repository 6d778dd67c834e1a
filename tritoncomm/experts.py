"""Experts on other ranks: each token crosses once per rank, and every sum has a fixed order.

``dispatch`` sends a token's row once to each rank that has one of its experts, ``combine`` sends one row back and adds
the ranks' parts up. Both are plain all-to-alls; nothing is added atomically, so equal calls give equal bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core.autograd import called, direct, outside_graphs
from tritoncomm.core.call import enter
from tritoncomm.core.memory import fills_storage, version_of
from tritoncomm.core.ops import dense, reinterpreted, resolved
from tritoncomm.core.plan import Ints, located
from tritoncomm.core.rows import RowRoutes, exchange_counts, row_passes, to_ranks, to_tokens
from tritoncomm.core.validation import check_inputs, check_tensor
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.groups import GroupLike, resolve_experts
from tritoncomm.record import Span

__all__ = ["Dispatched", "ExpertRows", "combine", "dispatch"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Lists(NamedTuple):
    """The pairs of a rank, (row, expert), sorted by expert; each expert's pairs are in the order of the rows.

    Attributes:
        pairs: ``[pairs]``, ``row*slots + slot``; -1 for a row of padding.
        rows: ``[pairs]``, the row alone; -1 likewise.
        index: ``[rows, slots]``, position of each (row, slot) in ``pairs``; out of range if another rank has the
            expert.
    """

    pairs: Tensor
    rows: Tensor
    index: Tensor


class _ByExpert(NamedTuple):
    """Pairs sorted by expert.

    Attributes:
        counts: ``[experts of this rank]``, pairs of each, padding included.
    """

    lists: _Lists
    counts: Tensor


@direct
class _SendRows(Function):
    """Forward: rows to the ranks that need them. Backward: their gradients back, added up in rank order."""

    @staticmethod
    def forward(
        ctx: Any, routes: RowRoutes, group: ProcessGroup, names: tuple[str, str], span: Span | None, *tensors: Tensor
    ) -> Any:
        _save_routes(ctx, routes, group, names)
        ctx.num_differentiable = min(len(tensors), 2)  # ids have no gradient
        span = span or enter(names[0], "to_ranks", group, tensors, (None,)) or Span(names[0])
        if len(tensors) < 3:
            return tuple(to_ranks([_rows(x) for x in tensors], routes, group, span))
        # Weights and ids are so short that one gather of both takes half of the time of two.
        x, weights, ids = tensors
        tail = torch.cat([reinterpreted(weights, torch.uint8), reinterpreted(ids, torch.uint8)], 1)
        rows, tail = to_ranks([_rows(x), tail], routes, group, span)
        size = weights.shape[1] * weights.itemsize
        # Copies, as a view that a backward keeps would keep the whole buffer.
        return rows, reinterpreted(tail[:, :size], weights.dtype), reinterpreted(tail[:, size:], ids.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sums = called(_ReturnRows, *_load_routes(ctx), None, *grads[: ctx.num_differentiable])
        return None, None, None, None, *sums, *[None] * (len(grads) - ctx.num_differentiable)


@direct
class _ReturnRows(Function):
    """Forward: rows back to the ranks and rows that they are of, added up in rank order. Backward: ``_SendRows``."""

    @staticmethod
    def forward(
        ctx: Any, routes: RowRoutes, group: ProcessGroup, names: tuple[str, str], span: Span | None, *tensors: Tensor
    ) -> Any:
        _save_routes(ctx, routes, group, names)
        sizes = routes.send_counts, routes.recv_counts  # each row comes back from where it was sent
        span = span or enter(names[0], "to_tokens", group, tensors, sizes) or Span(names[0])
        return tuple(to_tokens([_rows(x) for x in tensors], routes, group, span))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, None, *called(_SendRows, *_load_routes(ctx), None, *grads)


def _save_routes(ctx: Any, routes: RowRoutes, group: ProcessGroup, names: tuple[str, str]) -> None:
    """Save what a backward needs; tensors go with the graph, and where hooks of saved tensors put them."""
    ctx.group, ctx.names, ctx.counts = group, (names[1], names[1]), routes[:3]
    ctx.save_for_backward(routes.tokens, routes.index)


def _load_routes(ctx: Any) -> Sequence[Any]:
    """Return the arguments that a backward shares with its forward."""
    return RowRoutes(*ctx.counts, *ctx.saved_tensors), ctx.group, ctx.names


def _rows(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous rows, and without lazy bits."""
    x = resolved(x)
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


@direct
class _SumRows(Function):
    """Forward: ``x[list] = sum of w[list, slot] * y[index[list, slot]]``. Backward: the other two below."""

    @staticmethod
    def forward(ctx: Any, lists: _Lists, name: str, y: Tensor, weights: Tensor | None) -> Tensor:
        _save_lists(ctx, lists, name, [y, weights] if weights is not None else [])
        started, (path, passes), y = record.now(), row_passes(y), _rows(y)
        weights = None if weights is None else dense(weights)
        out = y.new_empty(lists.index.shape[0], y.shape[1])
        record.add(name, path, passes.sum_rows(y, lists.index, weights, out), 0, started)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lists, y, weights = _load_lists(ctx)
        grad_weights = None if weights is None else called(_DotRows, lists, ctx.name, *grads, y)
        return None, None, called(_ScaleRows, lists, ctx.name, *grads, weights), grad_weights


@direct
class _ScaleRows(Function):
    """Forward: ``y[j] = w[list, slot] * x[list]`` for each pair j, zeros for padding. Backward: the other two."""

    @staticmethod
    def forward(ctx: Any, lists: _Lists, name: str, x: Tensor, weights: Tensor | None) -> Tensor:
        _save_lists(ctx, lists, name, [x, weights] if weights is not None else [])
        started, (path, passes), x = record.now(), row_passes(x), _rows(x)
        out = x.new_empty(lists.pairs.shape[0], x.shape[1])
        if weights is None:
            copied = passes.gather_rows(x, lists.rows, out)
        else:
            copied = passes.scale_rows(x, lists.pairs, dense(weights), out)
        record.add(name, path, copied, 0, started)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lists, x, weights = _load_lists(ctx)
        grad_weights = None if weights is None else called(_DotRows, lists, ctx.name, x, *grads)
        return None, None, called(_SumRows, lists, ctx.name, *grads, weights), grad_weights


@direct
class _DotRows(Function):
    """Forward: ``w[list, slot] = x[list] . y[j]`` for each pair j. Backward: the two above."""

    @staticmethod
    def forward(ctx: Any, lists: _Lists, name: str, x: Tensor, y: Tensor) -> Tensor:
        _save_lists(ctx, lists, name, [x, y])
        started, (path, passes) = record.now(), row_passes(x)
        out = x.new_zeros(lists.index.shape, dtype=_wide(x.dtype))
        record.add(name, path, passes.dot_rows(_rows(x), _rows(y), lists.pairs, out), 0, started)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        lists, x, y = _load_lists(ctx)
        return None, None, called(_SumRows, lists, ctx.name, y, *grads), called(_ScaleRows, lists, ctx.name, x, *grads)


def _save_lists(ctx: Any, lists: _Lists, name: str, tensors: Sequence[Tensor]) -> None:
    """Save the lists and the tensors, none or two, that a backward needs."""
    ctx.group, ctx.name = None, name if name.endswith(".backward") else f"{name}.backward"
    ctx.save_for_backward(lists.pairs, lists.rows, lists.index, *tensors)


def _load_lists(ctx: Any) -> Sequence[Any]:
    """Return the lists and the tensors that ``_save_lists`` saved, or None for each."""
    pairs, rows, index, *tensors = ctx.saved_tensors
    return _Lists(pairs, rows, index), *(tensors or (None, None))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of routing weights and sums: fp32, or fp64 for rows of fp64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class ExpertRows(NamedTuple):
    """Rows sorted by expert.

    Attributes:
        rows: ``[pairs, hidden]``, the rows of the first expert of this rank, then of the next; those of one expert are
            in the order of ``Dispatched.rows``.
        counts: ``[experts]``, int64, on the device: the number of rows of each expert, padding included.
    """

    rows: Tensor
    counts: Tensor


class _Kept:
    """A tensor that a later call reads; of a caller's, the version that it had, or a copy of a part of a storage."""

    def __init__(self, key: str, x: Tensor, is_callers: bool) -> None:
        self.key, self.x = key, x.clone() if is_callers and not fills_storage(x) else x
        self.version = version_of(self.x) if is_callers else None

    def read(self, name: str) -> Tensor:
        """Return the tensor; raise if a caller's has changed in place."""
        if self.version is not None and version_of(self.x) != self.version:
            raise ArgumentError(
                f"{name}: the {self.key} of dispatch() have changed in place since; over one rank they are the tensors "
                "of the call. Change a copy, or change them after the last call that reads them"
            )
        return self.x


class Dispatched:
    """The rows that ``dispatch`` brought to this rank: each token with an expert here, once.

    Rows come from the other ranks in rank order, and then those of this rank; each rank's are in the order of its
    tokens.

    Over one rank nothing is sent or copied. These are the tensors of the call then, which must not change in place
    before they are read here; where they did, the methods raise.

    Attributes:
        counts: number of rows from each rank.
    """

    def __init__(self, routing: "_Routing", rows: Tensor, weights: Tensor, ids: Tensor) -> None:
        is_callers = routing.routes is None
        self.counts, self._routing, self._rows = routing.counts, routing, _Kept("rows", rows, is_callers)
        self._weights, self._ids = _Kept("weights", weights, is_callers), _Kept("ids", ids, is_callers)
        self._lists: dict[int, _Lists] = {}  # by alignment
        self._is_summed = False

    @property
    def rows(self) -> Tensor:
        """The rows ``[n, hidden]``, made when they are first read."""
        rows = self._rows.read("rows")
        if not rows.is_contiguous():
            self._rows = _Kept("rows", rows.contiguous(), False)
        return self._rows.x

    @property
    def weights(self) -> Tensor:
        """The routing weights of each row ``[n, k]``, fp32 (fp64 for rows of fp64)."""
        return self._weights.read("weights")

    @property
    def experts(self) -> Tensor:
        """Ids of each row ``[n, k]``, int32, from 0 for the first expert of this rank; -1 for experts of others."""
        local = self._ids.read("experts") - self._routing.first
        return torch.where((local >= 0) & (local < self._routing.experts), local, -1)

    @outside_graphs
    def by_expert(self, alignment: int = 1) -> "ExpertRows":
        """Gather the rows of each expert of this rank, for a grouped matrix product.

        Forward: one gather. Backward: the gradients of one row are added up in the order of its ids, in fp32 (fp64 for
        fp64), with one rounding.

        Args:
            alignment: number of which each expert's rows are a multiple, padded with rows of zeros.

        Returns:
            The rows and their counts by expert. With an alignment there may be rows of zeros after the last expert,
            as the host does not know the counts.

        Raises:
            ArgumentError: an alignment that is no positive integer.

        Example:
            Rows 0 and 1 whose ids here are (1, 0) and (1, -1): rows 0, 0, 1 and counts 1, 2.
        """
        if type(alignment) is not int or alignment < 1:
            raise ArgumentError(f"by_expert: alignment must be a positive int, not {alignment!r}")
        if self._is_summed:
            self._lists, self._is_summed = {}, False
        lists, counts = _sorted_pairs(self._ids.read("by_expert"), self._routing, alignment)
        self._lists[alignment] = lists
        return ExpertRows(_ScaleRows.apply(lists, "by_expert", self._rows.read("by_expert"), None), counts)

    @outside_graphs
    def summed(self, rows: Tensor) -> Tensor:
        """Add up the results of each row's experts, times the routing weights: the inverse of ``by_expert``.

        Forward: products and sums in the order of the row's ids, in fp32 (fp64 for fp64), with one rounding. Backward:
        a gather times the weights; the gradient of a weight is a dot product, added up in a fixed order.

        Args:
            rows: ``[pairs, any]``, results for the rows of a ``by_expert`` since the last ``summed``.

        Returns:
            ``[n, any]`` in the dtype of ``rows``: this rank's part of each row, for ``combine``.

        Raises:
            ArgumentError: ``by_expert`` was not called, or has made as many rows with two alignments.
            ShapeError: another number of rows.
        """
        if not self._lists:
            raise ArgumentError("summed: by_expert() was not called, which makes the rows that are summed")
        check_tensor(rows, "rows", "summed")
        _check_dtype(rows, "summed")
        numbers = {alignment: lists.pairs.shape[0] for alignment, lists in self._lists.items()}
        fitting = [alignment for alignment, number in numbers.items() if [number] == list(rows.shape[:-1])]
        if not fitting:
            expected = " or ".join([f"[{number}, any]" for number in numbers.values()])
            raise ShapeError(f"summed: expected {expected} as from by_expert(), not {list(rows.shape)}")
        if len(fitting) > 1 and len(rows):
            raise ArgumentError(
                f"summed: by_expert() has made {len(rows)} rows with each of the alignments {fitting}; call summed() "
                "before the next by_expert()"
            )
        weights, self._is_summed = self._weights.read("summed"), True
        return _SumRows.apply(self._lists[fitting[0]], "summed", rows, weights.to(_wide(rows.dtype)))


class _Routing(NamedTuple):
    """A dispatch as its host knows it.

    Attributes:
        routes: None over one rank, where nothing moves.
        counts: rows of ``Dispatched`` from each rank.
        pairs: number of (row, expert) pairs of this rank.
        first, experts: first expert of this rank, and their number.
    """

    routes: RowRoutes | None
    group: ProcessGroup
    counts: Ints
    pairs: int
    first: int
    experts: int


@outside_graphs
def dispatch(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, group: GroupLike | None = None
) -> Dispatched:
    """Send each token's row to the ranks of its experts, once per rank.

    Forward: the ranks exchange their counts, the host waits for them, and one all-to-all carries rows, ids and weights.
    Backward: one all-to-all carries the gradients of rows and weights; those of a token are added up in rank order, in
    fp32 (fp64 for fp64), with one rounding. Rows that stay on this rank are not sent.

    Args:
        x: ``[tokens, hidden]``, fp16, bf16, fp32 or fp64; any number of tokens, also none.
        experts: ``[tokens, k]``, int64 or int32, ids from 0 to ``num_experts - 1``. Rank r has the r-th part of them.
            Equal ids of a token add up.
        weights: ``[tokens, k]``, routing weights, floating point; they travel in fp32 (fp64 for rows of fp64).
        num_experts: number of experts on all ranks, a multiple of their number.
        group: ranks that have the experts (see ``groups.as_group``); the expert group of ``initialize()`` by default.

    Returns:
        The rows for the experts of this rank.

    Raises:
        ShapeError: shapes that do not fit each other or the ranks; on every rank, before a row is sent, an id that is
            out of range.
        ArgumentError: other kinds of tensors or dtypes, or several devices.
        PeerError: another rank failed.

    Rounding: one for each rank's part of a token (``summed``), one for their sum (``combine``).
    """
    name = "dispatch"
    ranks = resolve_experts(group, name)
    _check(x, experts, weights, num_experts, ranks, name)
    span = enter(name, "to_ranks", ranks, (x, weights), (num_experts,)) or Span(name)
    weights = weights.to(_wide(x.dtype))
    routing = _route(experts, num_experts, ranks, name)
    if routing.routes is None:
        span.end("view", 0, 0)
        return Dispatched(routing, x, weights, experts.int())
    names = name, f"{name}.backward"
    return Dispatched(routing, *_SendRows.apply(routing.routes, ranks, names, span, x, weights, experts.int()))


@outside_graphs
def combine(y: Tensor, dispatched: Dispatched) -> Tensor:
    """Send each row's part back to the rank of its token, and add the parts of a token up in rank order.

    Forward: one all-to-all, and a sum in fp32 (fp64 for fp64) with one rounding. Backward: one all-to-all. Rows that
    stay on this rank are not sent.

    Args:
        y: ``[n, any]``, this rank's part of each row of ``dispatched``, as ``Dispatched.summed`` returns it.

    Returns:
        ``[tokens, any]`` in the dtype of ``y``.

    Raises:
        ShapeError: another number of rows.
        ArgumentError: other kinds of tensors or dtypes.
        PeerError: another rank failed.
    """
    name, routing = "combine", dispatched._routing
    check_tensor(y, "y", name)
    check_inputs([y], name)
    _check_dtype(y, name)
    if y.dim() != 2 or y.shape[0] != sum(routing.counts):
        raise ShapeError(f"{name}: expected [{sum(routing.counts)}, any], a row for each that was dispatched, not "
                         f"{list(y.shape)}")  # fmt: skip
    if routing.routes is None:
        return y
    return _ReturnRows.apply(routing.routes, routing.group, (name, f"{name}.backward"), None, y)[0]


def _check_dtype(x: Tensor, name: str) -> None:
    """Reject rows whose sums have no wide type here."""
    if x.dtype not in _DTYPES:
        raise ArgumentError(f"{name}: rows must be fp16, bf16, fp32 or fp64, not {x.dtype}")


def _check(x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, group: ProcessGroup, name: str) -> None:
    """Check the arguments of ``dispatch`` on this rank; values of ids are checked by ``_route``."""
    for key, argument in (("x", x), ("experts", experts), ("weights", weights)):
        check_tensor(argument, key, name)
    check_inputs([x], name)
    _check_dtype(x, name)
    if experts.dtype not in (torch.int64, torch.int32) or not weights.is_floating_point():
        raise ArgumentError(f"{name}: experts must be int64 or int32 and weights floating point, not {experts.dtype} "
                            f"and {weights.dtype}")  # fmt: skip
    if not x.device == experts.device == weights.device:
        raise ArgumentError(f"{name}: x, experts and weights are on {x.device}, {experts.device} and {weights.device}")
    if x.dim() != 2 or experts.dim() != 2 or experts.shape[0] != x.shape[0] or weights.shape != experts.shape:
        raise ShapeError(f"{name}: expected x [tokens, hidden], experts and weights [tokens, k], not {list(x.shape)}, "
                         f"{list(experts.shape)} and {list(weights.shape)}")  # fmt: skip
    if not experts.shape[1] or type(num_experts) is not int or num_experts < 1 or num_experts % group.size():
        error = ShapeError(f"{num_experts} experts and {experts.shape[1]} of them for a token: at least one each, and "
                           "a multiple of the ranks")  # fmt: skip
        raise located(error, x.shape, name, group)


class _SentRows(NamedTuple):
    """Rows that this rank sends, before the ranks know each other's numbers.

    Attributes:
        order: ``[tokens*slots]``, slots of ``ranks`` sorted by the rank that the row goes to, this rank's own last, and
            behind them the slots of none.
        slots: ``[tokens, min(k, world)]``, ranks of each token in order and each once; ``world + 1`` is none.
        counts: ``[world, 3]``, rows to each rank, pairs (token, expert) there, and ids of no expert.
    """

    order: Tensor
    slots: Tensor
    counts: Tensor


def _route(experts: Tensor, num_experts: int, group: ProcessGroup, name: str) -> _Routing:
    """Find the rows for each rank, exchange their numbers, and wait for these on the host."""
    world, rank, (tokens, k) = group.size(), group.rank(), experts.shape
    local = num_experts // world
    owners = _bucket_of(torch.div(experts, local, rounding_mode="floor").long(), world)
    pairs = owners.new_zeros(world + 1).scatter_add_(0, owners.reshape(-1), owners.new_ones(tokens * k))
    pairs, wrong = pairs.split_with_sizes((world, 1))
    if world == 1:
        _raise_if_wrong(wrong.tolist(), num_experts, group, name)
        return _Routing(None, group, (tokens,), tokens * k, 0, local)
    rows = _sort_rows(owners, pairs, wrong, rank)
    received = exchange_counts(rows.counts, group, name)
    sent, arriving = torch.stack([rows.counts, received]).tolist()  # the host waits
    _raise_if_wrong([count for _, _, count in arriving], num_experts, group, name)
    routes = _plan_routes(rows, [count for count, *_ in sent], [count for count, *_ in arriving], rank)
    counts = tuple([count for count, *_ in arriving])
    return _Routing(routes, group, counts, sum([count for _, count, _ in arriving]), rank * local, local)


def _bucket_of(numbers: Tensor, count: int) -> Tensor:
    """Return, in place, numbers from 0 to ``count - 1`` as they are, and ``count`` for all others."""
    return numbers.clamp_(-1, count).remainder_(count + 1)  # -1 is ``count`` modulo ``count + 1``


def _sort_rows(owners: Tensor, pairs: Tensor, wrong: Tensor, rank: int) -> _SentRows:
    """Sort the rows of each token by the ranks that they go to.

    Args:
        owners: ``[tokens, k]``, rank of each expert.
        pairs, wrong: ``[world]`` and ``[1]``, pairs of each rank, and ids of no expert.

    Example:
        Rank 0 of two, tokens with experts on the ranks (1, 0) and (1, 1): slots (0, 1) and (1, 3). Rows to rank 1 are
        slots 1 and 2, the one that stays is slot 0: order 1, 2, 0, 3, and counts of rows 1, 2.
    """
    world, k = len(pairs), owners.shape[1]
    slots = owners.sort(1).values
    behind = slots[:, 1:]
    behind.masked_fill_(behind == slots[:, :-1], world + 1)
    if k > world:
        slots = slots.sort(1).values[:, :world]
    ranks = slots.reshape(-1)
    keys, order = ranks.masked_fill(ranks == rank, world).sort(stable=True)
    rows = torch.searchsorted(keys, torch.arange(world + 2, device=keys.device)).diff()
    rows, staying = rows.split_with_sizes((world, 1))
    rows[rank : rank + 1] = staying
    return _SentRows(order, slots, torch.stack([rows, pairs, wrong.expand(world)], 1))


def _plan_routes(rows: _SentRows, send: list[int], recv: list[int], rank: int) -> RowRoutes:
    """Return the routes once the host knows the rows to and from each rank."""
    local = send[rank]
    send[rank] = recv[rank] = 0
    order, slots = rows.order, rows.slots
    index = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    tokens = torch.div(order[: sum(send) + local], slots.shape[1], rounding_mode="floor")
    return RowRoutes(tuple(send), tuple(recv), local, tokens, index.view(slots.shape))


def _raise_if_wrong(counts: Sequence[int], num_experts: int, group: ProcessGroup, name: str) -> None:
    """Raise if a rank, in the order of the group, has ids out of range."""
    if any(counts):
        ranks = dist.get_process_group_ranks(group)
        wrong = ", ".join([f"rank {rank} has {count}" for rank, count in zip(ranks, counts, strict=True) if count])
        raise ShapeError(f"{name}: experts must be from 0 to {num_experts - 1}; {wrong} that are not")


def _sorted_pairs(ids: Tensor, routing: _Routing, alignment: int) -> _ByExpert:
    """Sort the pairs of rows and experts of this rank by expert."""
    (rows, slots), number = ids.shape, routing.experts
    keys, order = _bucket_of(ids - routing.first, number).reshape(-1).sort(stable=True)
    bounds = torch.searchsorted(keys, torch.arange(number + 1, device=keys.device, dtype=keys.dtype))
    counts, pairs = bounds.diff(), order[: routing.pairs]
    places = torch.arange(order.shape[0], device=order.device)
    if alignment == 1:
        index = torch.empty_like(order).scatter_(0, order, places)
    else:
        padded = torch.div(counts + (alignment - 1), alignment, rounding_mode="floor") * alignment
        # The host knows a bound only: every expert with rows may need ``alignment - 1`` more.
        total = (routing.pairs + min(number, routing.pairs) * (alignment - 1)) // alignment * alignment
        shift = padded.cumsum(0) - padded - bounds[:-1]
        places = places[: routing.pairs] + shift[keys[: routing.pairs].long()]
        index = order.new_full(order.shape, -1).scatter_(0, pairs, places)
        pairs, counts = order.new_full((total,), -1).scatter_(0, places, pairs), padded
    lists = _Lists(pairs, torch.div(pairs, slots, rounding_mode="floor"), index.view(rows, slots))
    return _ByExpert(lists, counts)
