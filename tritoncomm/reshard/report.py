"""A plan as a table."""

from tritoncomm.core.cost import Rates
from tritoncomm.parsing import counted
from tritoncomm.reshard.plan import Transfers

__all__ = ["text_of"]

_SHOWN = 12
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def text_of(plan: Transfers, rates: Rates) -> str:
    """Buckets, messages, bytes, launches, memory and predicted time of one rank, and the largest rank."""
    largest = max(int(plan.sent.max()), int(plan.received.max()))
    scale, unit = next((row for row in _UNITS if largest >= row[0]), _UNITS[-1])

    def amount(nbytes: float) -> str:
        return f"{nbytes / scale:.{3 if scale > 1 else 0}f}"

    rows = [
        (b.send.messages, b.recv.messages, b.send.nbytes, b.recv.nbytes, launches, len(b.local.tensor))
        for b, launches in zip(plan.buckets, plan.bucket_launches, strict=True)
    ]
    lines = [
        f"{counted(len(plan.items), 'tensor')} over {counted(len(plan.ranks), 'rank')}; rank "
        f"{plan.ranks[plan.position]} in {counted(sum(not b.is_quiet for b in plan.buckets), 'bucket')}:",
        f"{'bucket':<8}{'to':>5}{'from':>6}{f'{unit} sent':>13}{f'{unit} received':>16}{'launches':>10}{'copies':>8}",
    ]
    shown: list[tuple[str, tuple[int, ...]]] = [(str(place), row) for place, row in enumerate(rows[:_SHOWN])]
    if len(rows) > _SHOWN:
        shown.append(("...", _total(rows[_SHOWN:])))
    for label, (to, origin, sent, received, launches, copies) in [*shown, ("all", _total(rows))]:
        bytes_columns = f"{amount(sent):>13}{amount(received):>16}"
        lines.append(f"{label:<8}{to:>5}{origin:>6}{bytes_columns}{launches:>10}{copies:>8}")
    local, collective = plan.seconds(rates)
    lines += [
        f"all ranks: {amount(plan.sent.sum())} {unit} sent, {amount(plan.lacking.sum())} lacking, in "
        f"{counted(int(plan.messages.sum()), 'message')}",
        f"largest rank: {amount(plan.sent.max())} {unit} sent, {amount(plan.received.max())} received",
        f"extra memory: {amount(plan.largest)} {unit} at most on each side, {amount(plan.own_bytes)} for what stays",
        f"predicted, not measured: {local * 1e6:.1f} us of passes, {collective * 1e6:.1f} us of exchange, at {rates}",
    ]
    return "\n".join(lines)


def _total(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(row[column] for row in rows) for column in range(6))
