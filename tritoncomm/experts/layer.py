"""The layer of experts on other ranks: ``dispatch`` and ``combine``, and the rows between them."""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core.autograd import outside_graphs
from tritoncomm.core.call import enter
from tritoncomm.core.memory import fills_storage, version_of
from tritoncomm.core.plan import Ints, located
from tritoncomm.core.validation import check_inputs, check_tensor
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.experts.listed_rows import PairLists, PairWeights, ScaleRows, SumRows, wide_of
from tritoncomm.experts.routing import Routing, find_routes, sort_pairs
from tritoncomm.experts.sent_rows import RowsCall, move_rows, start_rows
from tritoncomm.groups import GroupLike, resolve_experts
from tritoncomm.record import Span

__all__ = ["Dispatched", "ExpertRows", "Route", "RowsHandle", "combine", "dispatch", "route"]

T = TypeVar("T")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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

    def __init__(self, key: str, x: Tensor, is_callers: bool = False) -> None:
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


class RowsHandle(Generic[T]):
    """A ``dispatch`` or ``combine`` in flight.

    One that is dropped does not wait. For memory of a GPU the current stream is ordered behind the exchange.
    """

    __slots__ = ("_finish", "_is_recorded", "_result")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish, self._is_recorded = finish, torch.is_grad_enabled()

    @outside_graphs
    def wait(self) -> T:
        """Order the current stream after the exchange (on the CPU: block), and return the result of the call.

        Autograd records the call if grad mode was on at its start. Further calls return the same result.

        Raises:
            ArgumentError: a tensor that is sent has changed in place since the start.
            PeerError: another rank failed.
        """
        if self._finish is not None:
            with torch.set_grad_enabled(self._is_recorded):
                self._result = self._finish()
            self._finish = None
        return self._result


class Dispatched:
    """The rows that ``dispatch`` brought to this rank: each token with an expert here, once.

    Rows come from the other ranks in rank order, and then those of this rank; each rank's are in the order of its
    tokens.

    Over one rank nothing is sent or copied. These are the tensors of the call then, which must not change in place
    before they are read here; where they did, the methods raise.
    """

    def __init__(self, routing: Routing, rows: Tensor, weights: Tensor, ids: Tensor) -> None:
        is_callers = routing.routes is None
        self._routing, self._rows = routing, _Kept("rows", rows, is_callers)
        self._weights, self._ids = _Kept("weights", weights, is_callers), _Kept("ids", ids, is_callers)
        self._lists: dict[int, PairLists] = {}  # by alignment, the last one behind
        self._is_summed = False

    @property
    def counts(self) -> Ints:
        """Number of rows from each rank."""
        return self._routing.counts

    @property
    def rows(self) -> Tensor:
        """The rows ``[n, hidden]``, made when they are first read."""
        rows = self._rows.read("rows")
        if rows.is_contiguous():
            return rows
        with torch.set_grad_enabled(rows.requires_grad):  # later calls read them with gradients
            rows = rows.contiguous()
        if not rows.is_inference() or self._rows.x.is_inference():
            self._rows = _Kept("rows", rows)
        return rows

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
    def by_expert(self, alignment: int = 1) -> ExpertRows:
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
        if self._is_summed:  # the next ``summed`` gets rows of this call or of a later one, not of calls before
            self._lists, self._is_summed = {}, False
        lists, counts = sort_pairs(self._ids.read("by_expert"), self._routing, alignment)
        self._lists.pop(alignment, None)  # so that the newest lists come last
        self._lists[alignment] = lists
        return ExpertRows(ScaleRows.apply(lists, "by_expert", self._rows.read("by_expert"), None), counts)

    @property
    @outside_graphs
    def expert_weights(self) -> Tensor:
        """The routing weight of each row of the last ``by_expert``, ``[pairs]``, fp32 (fp64 for fp64), 0 for padding.

        Forward and backward copy. Multiply the activations before an expert's last product with them, and pass its
        results to ``summed(weighted=False)``: that is the same function up to rounding, as the product is linear.
        Then no output of an expert is kept for backward, but the multiplication keeps the activations.

        Raises:
            ArgumentError: ``by_expert`` was not called.
        """
        name = "expert_weights"
        if not self._lists:
            raise ArgumentError(f"{name}: by_expert() was not called, whose rows have these weights")
        lists = next(reversed(self._lists.values()))
        return PairWeights.apply(lists.pairs, lists.index, name, self._weights.read(name))

    @outside_graphs
    def summed(self, rows: Tensor, *, weighted: bool = True) -> Tensor:
        """Add up the results of each row's experts, times the routing weights: the inverse of ``by_expert``.

        Forward: products and sums in the order of the row's ids, in fp32 (fp64 for fp64), with one rounding. Backward:
        a gather times the weights; the gradient of a weight is a dot product, added up in a fixed order.

        Args:
            rows: ``[pairs, any]``, results for the rows of a ``by_expert`` since the last ``summed``.
            weighted: False adds up the results as they are; see ``expert_weights``.

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
        num_rows = {alignment: lists.pairs.shape[0] for alignment, lists in self._lists.items()}
        fitting = [alignment for alignment, number in num_rows.items() if rows.dim() == 2 and number == len(rows)]
        if not fitting:
            expected = " or ".join([f"[{number}, any]" for number in num_rows.values()])
            raise ShapeError(f"summed: expected {expected} as from by_expert(), not {list(rows.shape)}")
        if len(fitting) > 1 and len(rows):
            raise ArgumentError(
                f"summed: by_expert() has made {len(rows)} rows with each of the alignments {fitting}; call summed() "
                "before the next by_expert()"
            )
        self._is_summed = True
        weights = self._weights.read("summed").to(wide_of(rows.dtype)) if weighted else None
        return SumRows.apply(self._lists[fitting[0]], "summed", rows, weights)


class Route:
    """Ranks to which the tokens of a call go, and the numbers of rows that all ranks send; made by ``route``."""

    def __init__(self, routing: Routing, experts: Tensor, num_experts: int) -> None:
        self._routing, self._num_experts = routing, num_experts
        self._ids = experts.to(torch.int32, copy=True)

    @overload
    def dispatch(self, x: Tensor, weights: Tensor, async_op: Literal[False] = False) -> Dispatched: ...
    @overload
    def dispatch(self, x: Tensor, weights: Tensor, async_op: bool) -> Dispatched | RowsHandle[Dispatched]: ...
    @outside_graphs
    def dispatch(self, x: Tensor, weights: Tensor, async_op: bool = False) -> Any:
        """Send each token's row as the function ``dispatch`` does, without its exchange of counts and its wait.

        Args:
            x, weights: ``[tokens, hidden]`` and ``[tokens, k]`` for the ids of the route.
            async_op: as of the function.
        """
        name, routing = "dispatch", self._routing
        _check(x, self._ids, weights, self._num_experts, routing.group, name)
        span = enter(name, "to_ranks", routing.group, (x, weights), (self._num_experts,)) or Span(name)
        return _send(routing, span, x, weights, self._ids, async_op)


@outside_graphs
def route(experts: Tensor, num_experts: int, group: GroupLike | None = None) -> Route:
    """Find the ranks to which tokens go: the part of ``dispatch`` for which the host waits.

    ``route(experts, num_experts, group).dispatch(x, weights)`` has the result of ``dispatch(x, experts, weights,
    num_experts, group)``. Found before an activation checkpoint, a route is used again when the checkpoint runs again:
    no counts are exchanged then, and the host does not wait.

    Args:
        experts, num_experts, group: as of ``dispatch``; the ids are copied.

    Raises:
        ShapeError, ArgumentError, PeerError: as ``dispatch``.
    """
    name = "route"
    ranks = resolve_experts(group, name)
    check_tensor(experts, "experts", name)
    _check_ids(experts, num_experts, ranks, name, experts)
    span = enter(name, "to_ranks", ranks, (experts,), (num_experts,)) or Span(name)
    result = Route(find_routes(experts, num_experts, ranks, name), experts, num_experts)
    span.end("view", 0, 0)
    return result


@overload
def dispatch(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, group: GroupLike | None = None
) -> Dispatched: ...
@overload
def dispatch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    group: GroupLike | None = None,
    *,
    async_op: Literal[True],
) -> RowsHandle[Dispatched]: ...
@outside_graphs
def dispatch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    group: GroupLike | None = None,
    *,
    async_op: bool = False,
) -> Any:
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
        async_op: return a handle as soon as the rows are under way, after the wait for the counts. What runs until its
            ``wait()``, as a shared expert, runs beside the all-to-all; in backward, what autograd recorded between
            the two calls runs beside the all-to-all of the gradients.

    Returns:
        The rows for the experts of this rank, or a handle whose ``wait()`` returns them.

    Raises:
        ShapeError: shapes that do not fit each other or the ranks; on every rank, before a row is sent, an id that is
            out of range.
        ArgumentError: other kinds of tensors or dtypes, or several devices.
        PeerError: another rank failed.

    Rounding: none here; ``summed`` rounds each rank's part of a token once, and ``combine`` their sum once.
    """
    name = "dispatch"
    ranks = resolve_experts(group, name)
    _check(x, experts, weights, num_experts, ranks, name)
    span = enter(name, "to_ranks", ranks, (x, weights), (num_experts,)) or Span(name)
    return _send(find_routes(experts, num_experts, ranks, name), span, x, weights, experts.int(), async_op)


def _send(routing: Routing, span: Span, x: Tensor, weights: Tensor, ids: Tensor, async_op: bool) -> Any:
    """Send the rows of a ``dispatch``, and end its span; return what it returns."""
    weights = weights.to(wide_of(x.dtype))
    if routing.routes is None:
        span.end("view", 0, 0)
        dispatched = Dispatched(routing, x, weights, ids)
        return RowsHandle(lambda: dispatched) if async_op else dispatched
    call = RowsCall(
        routing.routes, routing.group, ("dispatch", "dispatch.backward"), is_return=False, is_apart=async_op
    )
    if not async_op:
        return Dispatched(routing, *move_rows(call, x, weights, ids, span=span))
    finish = start_rows(call, x, weights, ids, span=span)
    return RowsHandle(lambda: Dispatched(routing, *finish()))


@overload
def combine(y: Tensor, dispatched: Dispatched, async_op: Literal[False] = False) -> Tensor: ...
@overload
def combine(y: Tensor, dispatched: Dispatched, async_op: Literal[True]) -> RowsHandle[Tensor]: ...
@outside_graphs
def combine(y: Tensor, dispatched: Dispatched, async_op: bool = False) -> Any:
    """Send each row's part back to the rank of its token, and add the parts of a token up in rank order.

    Forward: one all-to-all, and a sum in fp32 (fp64 for fp64) with one rounding. Backward: one all-to-all. Rows that
    stay on this rank are not sent.

    Args:
        y: ``[n, any]``, this rank's part of each row of ``dispatched``, as ``Dispatched.summed`` returns it. With
            ``async_op`` it must not change in place before the wait.
        async_op: return a handle as soon as the rows are under way; see ``dispatch``.

    Returns:
        ``[tokens, any]`` in the dtype of ``y``, or a handle whose ``wait()`` returns it.

    Raises:
        ShapeError: another number of rows.
        ArgumentError: other kinds of tensors or dtypes.
        PeerError: another rank failed.
    """
    name, routing = "combine", dispatched._routing
    check_tensor(y, "y", name)
    check_inputs([y], name)
    _check_dtype(y, name)
    if y.dim() != 2 or y.shape[0] != routing.rows:
        raise ShapeError(f"{name}: expected [{routing.rows}, any], a row for each that was dispatched, not "
                         f"{list(y.shape)}")  # fmt: skip
    if routing.routes is None:
        return RowsHandle(lambda: y) if async_op else y
    # ``is_apart``: other work runs between the start and the wait.
    call = RowsCall(routing.routes, routing.group, (name, f"{name}.backward"), is_return=True, is_apart=async_op)
    if not async_op:
        return move_rows(call, y)[0]
    finish = start_rows(call, y)
    return RowsHandle(lambda: finish()[0])


def _check_dtype(x: Tensor, name: str) -> None:
    """Reject rows whose sums have no wide type here."""
    if x.dtype not in _DTYPES:
        raise ArgumentError(f"{name}: rows must be fp16, bf16, fp32 or fp64, not {x.dtype}")


def _check(x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, group: ProcessGroup, name: str) -> None:
    """Check the arguments of ``dispatch`` on this rank; values of ids are checked by ``find_routes``."""
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
    _check_ids(experts, num_experts, group, name, x)


def _check_ids(experts: Tensor, num_experts: int, group: ProcessGroup, name: str, x: Tensor) -> None:
    """Check the ids ``[tokens, k]`` of a call with ``x``, whose shape an error names."""
    if experts.dtype not in (torch.int64, torch.int32) or experts.dim() != 2:
        raise ArgumentError(f"{name}: experts must be [tokens, k] of int64 or int32, not {list(experts.shape)} of "
                            f"{experts.dtype}")  # fmt: skip
    if not experts.shape[1] or type(num_experts) is not int or num_experts < 1 or num_experts % group.size():
        error = ShapeError(f"{num_experts} experts and {experts.shape[1]} of them for a token: at least one each, and "
                           "a multiple of the ranks")  # fmt: skip
        raise located(error, x.shape, name, group)
