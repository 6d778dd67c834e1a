"""What every part of the suite has in common as a command: its options, and how it ends."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from bench import guard
from bench.timing import write_json

__all__ = ["arguments", "finish"]


def arguments(description: str, what: str, rounds: int) -> argparse.Namespace:
    """The options of a part: ``json``, ``rounds``, ``only``.

    Args:
        description: of the part.
        what: the plural of what it measures.
        rounds: the default.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="PATH", help="also write the table there, with versions")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", default="", help=f"only {what} whose label contains this")
    return parser.parse_args()


def finish(
    part: str,
    rows: Sequence[Any],
    path: str | None,
    table: Callable[[Any], str],
    failures: Callable[[Any], list[str]],
    as_json: Callable[[Any], dict[str, Any]],
) -> int:
    """Print the table and what was missed, write the results if a path is given; the exit status.

    0 all is well, 1 something was missed, 2 nothing was measured.
    """
    if not rows:
        print("nothing has a label like that: see --only")
        return 2
    print(table(rows))
    missed = failures(rows) + [f"worse: {line}" for line in guard.against_committed(part, as_json(rows))]
    for line in missed:
        print("MISSED:", line)
    if path:
        print("written:", write_json(path, as_json(rows)))
    return 1 if missed else 0
