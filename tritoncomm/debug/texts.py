"""Texts that name ranks: runs of ranks, and tables with one line for every distinct text."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

__all__ = ["by_text", "encodable", "label_of", "named_ranks", "of_backward", "one_line", "table_of"]

_MAX_RUNS = 6
_MAX_CHARACTERS = 1000
_MAX_LINES = 40


def by_text(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Return ``[(text, ranks), ...]``: each distinct text once, with its ascending ranks, ordered by first rank."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank], []).append(rank)
    return list(ranks.items())


def encodable(text: str) -> str:
    """Return a text that can be encoded: bytes of a file name that are not UTF-8 are surrogates in it."""
    return text.encode("utf-8", "backslashreplace").decode()


def label_of(group: str) -> str:
    """Return the name of a group for readers: ``tensor`` of ``tensor.0-3.1f2e3d4c5b6a.1``, as ``make_group`` names it.

    The second group of a label over its ranks is ``tensor.2``.
    """
    made = re.fullmatch(r"(.+)\.\d+-\d+\.[0-9a-f]{12}\.(\d+)", group)
    return group if made is None else made[1] if made[2] == "1" else f"{made[1]}.{made[2]}"


def one_line(text: str) -> str:
    """Return a text as one line: its lines, without empty ones, joined by semicolons and cut after 1000 characters."""
    joined = "; ".join(line.strip() for line in text.splitlines() if line.strip()).replace(":; ", ": ")
    return joined if len(joined) <= _MAX_CHARACTERS else f"{joined[:_MAX_CHARACTERS]}..."


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as text: ``rank 7``, or the first six runs as ``ranks 0-3, 7``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_MAX_RUNS]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}{', ...' if len(runs) > _MAX_RUNS else ''}"


def table_of(texts: Mapping[int, str]) -> str:
    """Return a table: a line ``  ranks 0-3, 7: TEXT`` for each of the first 40 texts, and the number of others."""
    lines = [f"  {named_ranks(ranks)}: {text}" for text, ranks in by_text(texts)]
    more = [f"  and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)
    return "\n".join(lines[:_MAX_LINES] + more)


def of_backward(lines: Sequence[str]) -> str:
    """Return the likely cause where a backward waits for a rank that is elsewhere; empty for other lines of ranks."""
    # One line for every call of a table, or a line of a call that other ranks "did not join".
    are = {".backward(" in line for line in lines if "has ended with" not in line}
    are |= {False for line in lines if "did not join it" in line}
    return (
        "no backward runs on a rank whose input needed no gradient in forward: it has to need one on every rank of the "
        "group, or on none"
        if len(are) > 1
        else ""
    )
