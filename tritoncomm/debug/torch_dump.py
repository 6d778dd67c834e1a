"""Dumps for torch's flight-recorder analyser, made of flight records: one pickle per rank.

``torchfrtrace FOLDER`` compares the dumps of all ranks. It knows a fixed set of names, so an entry has the name of a
collective of torch; its only stack frame has our function, its arguments, and file and line of the program:

| entry | made of | sizes |
|---|---|---|
| ``all_reduce``, ``broadcast``, ``reduce`` | the same kind | of the tensor |
| ``_all_gather_base``, ``_reduce_scatter_base`` | even all-gathers and reduce-scatters | of input and result |
| ``ALLGATHER_coalesced``, ``REDUCE_SCATTER_coalesced`` | uneven ones | those that all ranks share, else empty |
| ``all_to_all`` | all-to-alls; Ulysses and reshardings | of input and result; empty |
| ``send``, ``recv`` | each end of a message, in a group of two ranks per direction | of the tensors |

A split sends nothing and has no entry. A call that issues several collectives has one entry. Records do not have the
backend, so every name begins with ``nccl:``.
"""

import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tritoncomm.debug.trace import REFUSED, Call, Message, Record, by_ranks, is_even, messages_of, text
from tritoncomm.errors import ArgumentError

__all__ = ["dumps_of", "write"]

Sizes = list[list[int]]

_PREFIX = "tritoncomm_rank_"
_VERSION = "2.10"  # of the format, as torch 2.13 writes it; the analysers of torch 2.11 to 2.15 read it
_NAMES = {
    "all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
    "split_reduce_scatter": "_reduce_scatter_base", "reshard": "all_to_all", "to_heads": "all_to_all",
    "to_sequence": "all_to_all",
}  # fmt: skip
_UNEVEN_NAMES = {"all_gather": "ALLGATHER_coalesced", "reduce_scatter": "REDUCE_SCATTER_coalesced"}
_ANY: Sizes = [[]]  # the analyser takes them for equal on all ranks, and compares no dtypes with them


def write(records: Sequence[Record], folder: Path) -> int:
    """Write one pickle ``tritoncomm_rank_RANK`` per record into a folder, and return the number of all entries.

    Makes the folder where it is missing.

    Raises:
        ArgumentError: the folder has pickles of other ranks, with which the analyser would compare these.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if others := {path.name for path in folder.glob(f"{_PREFIX}*")} - {f"{_PREFIX}{each.rank}" for each in records}:
        raise ArgumentError(f"{folder} has the dump {min(others)} of another job; name another folder")
    count = 0
    for rank, dump in dumps_of(records):
        (folder / f"{_PREFIX}{rank}").write_bytes(pickle.dumps(dump))
        count += len(dump["entries"])
    return count


def dumps_of(records: Sequence[Record]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Convert flight records into dumps in the format of torch's flight recorder; yield (rank, dump), one at a time.

    Of each group a dump has the calls from the first one that the records of all its ranks still have, because the
    analyser takes a call that one dump lacks for a difference. For the same reason the messages between two ranks are
    left out where one of their records has lost the first call of the group.
    """
    by_rank = {each.rank: each for each in records}
    firsts: dict[tuple[str, int], tuple[list[int], int]] = {}  # by group and rank: ranks of the group, first call
    for group in sorted({group for each in records for group in each.hashes}):
        for known_ranks, holders in by_ranks(group, records).items():
            ranks = sorted({*known_ranks, *(each.rank for each in holders)})
            # A member that has no calls of the group may have made some that its record has lost.
            first = max(by_rank[rank].oldest(group) for rank in ranks if rank in by_rank)
            firsts |= {(group, each.rank): (ranks, first) for each in holders}
    for record in records:
        dump = _Dump(record)
        for group in sorted(record.hashes):
            dump.add_calls(group, *firsts[group, record.rank])
            for peer in sorted(record.peers.get(group, set()) & by_rank.keys()):
                for message in messages_of(group, [record, by_rank[peer]]):
                    dump.add_message(group, message)
        yield record.rank, dump.finished()


class _Dump:
    """The dump of one rank while it is made, at first without groups and entries.

    Attributes:
        record: flight record of the rank.
        groups: the process groups of the entries by name, in torch's format.
        entries: the collectives and transfers of the rank, in torch's format.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.groups: dict[str, dict[str, str]] = {}
        self.entries: list[dict[str, Any]] = []

    def add_calls(self, group: str, ranks: Sequence[int], first: int) -> None:
        """Add a process group, and an entry for each call of this rank over it that sent something.

        Args:
            group: name of the group.
            ranks: global ranks of the group, in ascending order.
            first: count of the first call to add.
        """
        self.add_group(group, ranks, "tritoncomm")
        for count, call in self.record.calls[group].items():
            kind, split = call["kind"], call["arguments"].get("sizes")
            if count < first or kind not in _NAMES or call["error"].startswith(REFUSED):
                continue
            is_uneven = kind in _UNEVEN_NAMES and split is not None and not is_even("sizes", split)
            sizes = _sizes(call, ranks.index(self.record.rank), len(ranks))
            if is_uneven:
                sizes = (_ANY, sizes[1]) if kind == "all_gather" else (sizes[0], _ANY)
            dtype = call["arguments"].get("dtype") or call["dtype"]
            self.add(call, group, count, (_UNEVEN_NAMES if is_uneven else _NAMES)[kind], sizes, [str(dtype)])

    def add_group(self, name: str, ranks: Sequence[int], description: str) -> None:
        """Add a process group by name, with its global ranks and a description for the analyser to print."""
        self.groups[name] = {"name": name, "desc": description, "ranks": str(list(ranks))}

    def add(
        self, call: Call, group: str, count: int, name: str, sizes: tuple[Sizes, Sizes], dtypes: Sequence[str]
    ) -> None:
        """Add an entry, of a collective or of one end of a message.

        Args:
            call: of this package.
            group: name of a group that was added before.
            count: number of the collective on its group, or of the message between its ranks.
            name: torch's name of the collective; ``send 0->1`` or ``recv 1<-0`` for an end of a message.
            sizes: of the tensors that are sent, and of the tensors that arrive.
            dtypes: of the tensors.
        """
        number = call.get("number")
        active = [each for each in self.record.data["active"] if number is not None and each["number"] == number]
        state = "completed" if call["end"] else "started"
        if active and call["end"]:  # it was issued, and the device has not completed it
            state = "started" if active[0]["state"].startswith("started") else "scheduled"
        is_message = name.startswith(("send", "recv"))
        self.entries.append({
            "pg_id": list(self.groups).index(group), "process_group": (group, self.groups[group]["desc"]),
            "collective_seq_id": count, "p2p_seq_id": count if is_message else 0, "is_p2p": is_message,
            "profiling_name": f"nccl:{name}", "input_sizes": sizes[0], "output_sizes": sizes[1],
            "input_dtypes": list(dtypes), "output_dtypes": list(dtypes), "state": state,
            "retired": state == "completed", "time_created_ns": call["start"],
            "time_discovered_started_ns": None if state == "scheduled" else call["start"],
            "time_discovered_completed_ns": call["end"] if state == "completed" else None, "timeout_ms": 0,
            "thread_id": str(call["thread"]), "thread_name": "",
            "frames": [{"name": text(call), "filename": call["file"], "line": call["line"]}],
        })  # fmt: skip

    def add_message(self, group: str, message: Message) -> None:
        """Add this rank's end of a message, ``send`` or ``recv``, in a group of the message's sender and receiver.

        The analyser compares shapes. An end that does not know them gets those of the sender, with which it agrees.

        Args:
            group: name of the group that the message was sent over.
            message: from this rank or to it.
        """
        is_send = message.sender == self.record.rank
        ranks, end = sorted((message.sender, message.receiver)), message.sent if is_send else message.received
        if end is None:
            return
        specs = end.specs
        if message.sent is not None and message.sent.specs is not None and message.fits():
            specs = message.sent.specs
        sizes = [shape if _is_shape(shape) else [] for shape, _ in specs or ()]
        channel = f"{group} {message.sender}->{message.receiver}"
        self.add_group(channel, ranks, "tritoncomm p2p")
        source, target = ranks.index(message.sender), ranks.index(message.receiver)
        name, pair = (f"send {source}->{target}", (sizes, [])) if is_send else (f"recv {target}<-{source}", ([], sizes))
        self.add(end.call, channel, message.count, name, pair, [str(dtype) for _, dtype in specs or ()])

    def finished(self) -> dict[str, Any]:
        """Return the dump, with its entries in the order of their start and numbered from 0.

        The analyser drops entries whose number is below the first number of another dump.
        """
        self.entries.sort(key=lambda entry: entry["time_created_ns"])
        entries = [entry | {"record_id": i, "op_id": i} for i, entry in enumerate(self.entries)]
        return {"version": _VERSION, "pg_config": self.groups, "pg_status": {}, "entries": entries}


def _sizes(call: Call, place: int, world: int) -> tuple[Sizes, Sizes]:
    """Return the sizes of the input and of the result of a collective call on one rank.

    Both are ``_ANY`` where ranks may differ in them (Ulysses, reshardings), and where the arguments of the call make no
    sense, because a file may hold anything.

    Args:
        call: of the rank.
        place: of the rank in its group.
        world: number of ranks in the group.
    """
    kind, shape, arguments = call["kind"], call["shape"], call["arguments"]
    if kind in ("reshard", "to_heads", "to_sequence"):
        return _ANY, _ANY
    try:
        if kind == "split_reduce_scatter":  # one flat buffer, in which each tensor's shards are padded to one size
            shards = [
                math.prod(each) // (each[dim] or 1) * -(-each[dim] // world)
                for each, dim in zip(shape, arguments["dims"], strict=True)
            ]
            shape, result = [sum(shards) * world], [sum(shards)]
        else:
            result = [*shape]
        if kind in ("all_gather", "reduce_scatter"):
            dim, split = arguments["dim"], arguments["sizes"]
            even = shape[dim] * world if kind == "all_gather" else shape[dim] // world
            result[dim] = even if split is None else sum(split) if kind == "all_gather" else split[place]
        elif kind == "all_to_all_single" and arguments["out_sizes"] is not None:
            result[0] = sum(arguments["out_sizes"])
        elif kind == "all_to_all":
            scattered, gathered = arguments["scatter_sizes"], arguments["gather_sizes"]
            dim = arguments["scatter_dim"]
            result[dim] = result[dim] // world if scattered is None else scattered[place]
            dim = arguments["gather_dim"]
            result[dim] = result[dim] * world if gathered is None else sum(gathered)
    except (TypeError, ValueError, LookupError):
        return _ANY, _ANY
    return ([shape], [result]) if _is_shape(shape) and _is_shape(result) else (_ANY, _ANY)


def _is_shape(value: Any) -> bool:
    """Whether a value of a JSON file is a list of integers of 0 or more."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
