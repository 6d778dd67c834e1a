"""Story of a job in lines of text, from its flight records: where ranks diverged, and in which call each rank is.

Example::

    group 'tensor' of ranks 0-2: call 3 is the first that differs, in shape:
      rank 0: all_gather_dim(float32 [4, 8], dim=0) at train.py:13
      rank 1: all_gather_dim(float32 [4, 6], dim=0) at train.py:13
    no record of rank 3 of 4
    rank 0: in barrier() at train.py:14, call 4 of group 'tensor' of ranks 0-2; ranks 1-2 did not join it
"""

import re
from collections.abc import Mapping, Sequence

from tritoncomm.debug.texts import by_text, label_of, named_ranks, of_backward, one_line, table_of
from tritoncomm.debug.trace import Call, Record, fields_compared, messages_of, transfers, with_line

__all__ = ["by_ranks", "story"]

_MAX_LINES = 20
_Joined = dict[tuple[int, str, int], dict[int, bool]]
"""By rank, group and count of a p2p step: whether each peer joined it."""


def _with_group(call: Call, record: Record) -> str:
    """Return a call of a record with its line, its count and its group: ``f() at a.py:1, call 2 of group '0' ...``."""
    return f"{with_line(call)}, call {call['count']} of {_group_text(call['group'], record)}"


def _group_text(group: str, record: Record) -> str:
    """Return ``group 'tensor' of ranks 0-3``; ``group 'tensor'`` where the record does not have the group's ranks."""
    ranks, label = record.ranks(group), label_of(group)
    return f"group {label!r} of ranks {named_ranks(ranks).partition(' ')[2]}" if ranks else f"group {label!r}"


def story(records: Sequence[Record]) -> list[str]:
    """Describe in lines of text where the ranks of a job diverged, and the calls in which they were."""
    # Root causes before symptoms: mismatched calls and messages of each group, deadlock cycles, exceptions, missing and
    # foreign records; then the call in which each rank is blocked, and collectives that devices have not completed.
    joined: _Joined = {}
    lines: list[str] = []
    for group in sorted({group for each in records for group in each.hashes}):
        lines += _first_difference(group, records) + _message_lines(group, records, joined)
    by_rank = {each.rank: each for each in records}
    lines += _circle(by_rank, joined)
    lines += _of_ranks({each.rank: _uncaught(each) for each in records})
    lines += _job_lines(records)
    lines += _of_ranks({each.rank: _open_call(each, by_rank, joined) for each in records})
    lines += _of_ranks({each.rank: _open_collective(each, by_rank, joined) for each in records})
    rows_of_tables = [line for line in lines if line.startswith("  ")]
    missing_ranks = [line for line in lines if "did not join it" in line]
    for related in (rows_of_tables, missing_ranks):
        if (advice := of_backward(related)) and advice not in lines:
            lines.append(advice)
    lines = lines or ["the records agree, and no call was under way when they were written"]
    # The files may hold anything, so control characters are escaped.
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def _of_ranks(texts: Mapping[int, str]) -> list[str]:
    """Return lines ``ranks 0-1: TEXT``, without empty texts."""
    return [f"{named_ranks(ranks)}: {line}" for line, ranks in by_text(texts) if line]


def _circle(by_rank: Mapping[int, Record], joined: _Joined) -> list[str]:
    """Describe the first circle of ranks each of which is in a call that the next one did not join."""
    awaited = {
        rank: _behind(each.current, each, by_rank, joined)[0]
        for rank, each in by_rank.items()
        if each.current is not None and not each.current["error"]
    }
    for first in awaited:
        path = [first]
        # One of the awaited ranks is followed, until the path meets itself, a circle, or ends. Circles that this path
        # misses are found from their own ranks.
        while (after := next((rank for rank in awaited[path[-1]] if rank in awaited), None)) is not None:
            if after in path:
                circle = sorted(path[path.index(after) :])
                table = table_of({rank: _with_group(by_rank[rank].current or {}, by_rank[rank]) for rank in circle})
                return [f"ranks {circle} wait for each other in different calls:", *table.splitlines()]
            path.append(after)
    return []


def _job_lines(records: Sequence[Record]) -> list[str]:
    """Return a line for ranks that have no record, and lines for records that are not of one run of the job."""
    lines = []
    worlds = {each.rank: str(each.data["world"]) for each in records}
    if len(set(worlds.values())) > 1:
        sizes = ", ".join(f"{world} on {named_ranks(ranks)}" for world, ranks in by_text(worlds))
        lines.append(f"the records are of different runs: the world size is {sizes}")
    last = max(records, key=lambda each: each.start)
    if older := [each.rank for each in records if each.hashes and each.data["time"] < last.start]:
        why = f"rank {last.rank} started late, or the records are of different runs"
        lines.append(f"{named_ranks(older)} wrote before the first call in the record of rank {last.rank}: {why}")
    world, known = max(each.data["world"] for each in records), {each.rank for each in records}
    if absent := [rank for rank in range(world) if rank not in known]:
        lines.append(f"no record of {named_ranks(absent)} of {world}")
    return lines


def by_ranks(group: str, records: Sequence[Record]) -> dict[tuple[int, ...], list[Record]]:
    """Return the records with calls over groups of this name, by the global ranks of their group."""
    holders: dict[tuple[int, ...], list[Record]] = {}
    for each in records:
        if group in each.hashes:
            holders.setdefault(tuple(each.ranks(group)), []).append(each)
    # Groups of different ranks may have one name. A record lacks the ranks if the group was destroyed before: it
    # belongs to the only group with known ranks, if there is one.
    if () in holders and len(holders) == 2:
        unknown = holders.pop(())
        for known in holders.values():
            known[:] = sorted(known + unknown, key=lambda each: each.rank)
    return holders


def _first_difference(group: str, records: Sequence[Record]) -> list[str]:
    """Describe the first collective over a group that its ranks made differently, or that some ranks did not make."""
    for ranks, holders in by_ranks(group, records).items():
        # The first call that the records of all ranks with calls of the group still have.
        oldest = max(each.oldest(group) for each in holders)
        first: dict[int, int] = {}  # by count: the hash in the first record that has the call
        differing = set[int]()
        for each in holders:
            hashes = each.hashes[group]
            for count, compared_hash in zip(hashes.counts, hashes.compared, strict=True):
                if count >= oldest and first.setdefault(count, compared_hash) != compared_hash:
                    differing.add(count)
        for count in sorted(differing):
            names, table = _compare(group, count, holders)
            if names:  # else no attribute that all of them have differs
                where = f"{_group_text(group, holders[0])}: call {count} is the first that differs"
                return [f"{where}, in {', '.join(names)}:", *table]
        if line := _missing_call(group, ranks, holders, records):
            return [line]
    return []


def _compare(group: str, count: int, holders: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Return the attributes in which ranks differ in a call, and a table of its first 20 distinct forms."""
    # A form is the hash of the attributes that ranks compare, and the hash of those that are printed. Records of one
    # form hold equal calls, so that only the first of them is read.
    forms: dict[tuple[int, int], list[Record]] = {}
    for record in holders:
        column = record.hashes[group]
        if count in column.counts:
            index = column.counts.index(count)
            forms.setdefault((column.compared[index], column.shown[index]), []).append(record)
    # The first record for each hash of compared attributes.
    differing: dict[int, Record] = {}
    for (compared, _), alike in forms.items():
        differing.setdefault(compared, alike[0])
    first, *others = (fields_compared(record.calls[group][count]) for record in list(differing.values())[:_MAX_LINES])
    names = [key for key in first if any(key in other and other[key] != first[key] for other in others)]
    lines = [
        f"{named_ranks([record.rank for record in alike])}: {with_line(alike[0].calls[group][count])}"
        for alike in list(forms.values())[:_MAX_LINES]
    ]
    return names, _shortened(lines, len(forms), "  ")


def _shortened(lines: Sequence[str], count: int, indent: str = "") -> list[str]:
    """Return the first 20 lines, indented, and the number of the others out of ``count``, if there are others."""
    rest = [f"and {count - _MAX_LINES} more"] if count > _MAX_LINES else []
    return [f"{indent}{line}" for line in [*lines[:_MAX_LINES], *rest]]


def _missing_call(group: str, ranks: Sequence[int], holders: Sequence[Record], records: Sequence[Record]) -> str:
    """Name the ranks that lack the first call that not all made, if it has ended on a rank that made it; else "".

    Args:
        ranks: of the group; empty where they are not known.
        holders: records of these ranks with calls over the group.
    """
    if any(group in record.hops for record in holders):  # stages of a pipeline make different numbers of p2p steps
        return ""
    # A rank of the group without any call over it has a record that is not among the holders'.
    members = [record for record in records if record.rank in ranks] or holders
    count = min(record.count(group) for record in members) + 1  # number of the first call that not all made
    issuer = next((record for record in holders if count in record.hashes[group].counts), None)
    if issuer is None:
        return ""
    call = issuer.calls[group][count]
    if not call["end"]:  # a rank is in the call, which has a line of its own
        return ""
    # The call was asynchronous, as it ended without the other ranks.
    behind = [record.rank for record in members if record.count(group) < count and not record.is_before(call)]
    where = f"did not join {_with_group(call, issuer)}, which rank {issuer.rank} issued"
    return f"{named_ranks(behind)} {where}" if behind else ""


def _message_lines(group: str, records: Sequence[Record], joined: _Joined) -> list[str]:
    """Describe, for each sender and receiver, the first message whose ends differ, and the first that was not sent.

    ``joined`` gets the p2p steps over the group in which their ranks still were.
    """
    lines, by_rank = list[str](), {each.rank: each for each in records}
    differing, unsent = set[tuple[int, int]](), set[tuple[int, int]]()
    open_ones = {
        (each.rank, call["group"], call["count"]) for each in records for call in (each.current, each.issued) if call
    }
    for each in messages_of(group, records):
        channel = each.sender, each.receiver
        for (rank, peer), end, other in (
            (channel, each.sent, each.received),
            (channel[::-1], each.received, each.sent),
        ):
            if end is not None and (step := (rank, group, end.call["count"])) in open_ones:
                peers = joined.setdefault(step, {})
                # A peer joined the step if it posted the other end of every message between the two.
                peers[peer] = peers.get(peer, True) and other is not None
        if each.received is None:
            continue
        call = each.received.call
        if each.sent is None and channel not in unsent:
            unsent.add(channel)
            # Only a receive that has ended is described, an asynchronous one. In an open receive the rank still waits,
            # and has a line of its own.
            if call["end"] and not by_rank[each.sender].is_before(call):
                posted = f"whose receive is posted by {with_line(call)}"
                lines.append(f"rank {each.sender} did not send message {each.count} to rank {each.receiver}, {posted}")
        elif each.sent is not None and not each.fits() and channel not in differing:
            differing.add(channel)
            where = f"message {each.count} from rank {each.sender} to rank {each.receiver}"
            lines.append(f"{where} is the first whose ends differ:")
            lines += table_of({each.sender: with_line(each.sent.call), each.receiver: with_line(call)}).splitlines()
    return _shortened(lines, len(lines))


def _open_call(record: Record, by_rank: Mapping[int, Record], joined: _Joined) -> str:
    """Describe the call that a rank was in, or failed in, when it wrote its record, and which ranks did not join it."""
    if (call := record.current) is None:
        return ""
    line = f"{'failed in' if call['error'] else 'in'} {_with_group(call, record)}"
    if call["error"]:
        line += f": {_error_text(call['error'])}"
    return line + _absent(call, record, by_rank, joined)


def _absent(call: Call, record: Record, by_rank: Mapping[int, Record], joined: _Joined) -> str:
    """Return which ranks have not joined a call, as an addition to a line: ``; rank 2 did not join it``."""
    late, early, unknown = _behind(call, record, by_rank, joined)
    line = f"; {named_ranks(late)} did not join it" if late else ""
    line += f"; {named_ranks(early)} wrote the record before it" if early else ""
    return line + (f"; no record of {named_ranks(unknown)}" if unknown else "")


def _behind(
    call: Call, record: Record, by_rank: Mapping[int, Record], joined: _Joined
) -> tuple[list[int], list[int], list[int]]:
    """Return the ranks that did not join a call, those whose record is older than the call, those without a record."""
    group = call["group"]
    if call["kind"] == "hop":
        # A peer that ``_message_lines`` has not noted is not known to have stayed away.
        peers = joined.get((record.rank, group, call["count"]), {})
        behind = sorted(rank for rank, has_joined in peers.items() if not has_joined)
        ranks = {peer for _, peer, _ in transfers(call, record.rank)}
    else:
        ranks = {*record.ranks(group)} - {record.rank}
        behind = sorted(rank for rank in ranks & by_rank.keys() if by_rank[rank].count(group) < call["count"])
    too_old = [rank for rank in behind if by_rank[rank].is_before(call)]
    did_not_join = [rank for rank in behind if rank not in too_old]
    return did_not_join, too_old, sorted(ranks - by_rank.keys())


def _open_collective(record: Record, by_rank: Mapping[int, Record], joined: _Joined) -> str:
    """Describe the oldest collective that a rank's device has not completed, and which ranks did not join its call."""
    active = min(record.data["active"], key=lambda each: each["created"], default=None)
    if active is None:
        return ""
    if record.issued is None:
        where = f"torch's collective {active['sequence']} of {_group_text(active['group'], record)}"
        return f"the device has not completed {active['name']}, {where}, of no call in the record ({active['state']})"
    line = f"the device has not completed {_with_group(record.issued, record)} ({active['state']})"
    return line + _absent(record.issued, record, by_rank, joined)


def _uncaught(record: Record) -> str:
    """Return ``ended by an uncaught ValueError: ...`` for a rank that an error ended, outside of a call; else empty."""
    reason = str(record.data.get("reason"))
    is_error = reason.startswith("uncaught ") and not record.is_explained
    return f"ended by an {_error_text(reason)}" if is_error else ""


def _error_text(text: str) -> str:
    """Return an error as one line, without the places in C++ files and the stacks of Gloo and torch, and our advice."""
    text = re.sub(r"\[[^\]\s]*\.(cc|cpp|h|hpp):\d+\] ", "", text)
    text = re.split(r"\nException raised from |\nC\+\+ CapturedTraceback", text)[0]
    return one_line("\n".join(line for line in text.splitlines() if not line.startswith("run again with ")))
