"""The command ``tritoncomm trace``: where the ranks of a job diverged, from their flight records."""

from pathlib import Path
from typing import Annotated

import typer

from tritoncomm.cli._console import paragraphs, refusing, say, terminal
from tritoncomm.debug.story import story
from tritoncomm.debug.trace import read, write_perfetto

__all__ = ["EPILOG", "trace"]

EPILOG = paragraphs(
    "Examples:",
    "torchrun ... train.py   (with TRITONCOMM_FLIGHT=/logs every rank writes its record where a call fails)",
    "tritoncomm trace /logs",
    "tritoncomm trace tritoncomm-flight-*.json --out job.json   (open it at ui.perfetto.dev)",
    "Exits with 0, and with 2 for files that are no records, as named pipes, devices and other JSON.",
)


def trace(
    files: Annotated[list[Path], typer.Argument(help="Flight records, or folders that hold them.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Write one trace for Perfetto.", show_default=False)] = None,
) -> None:
    """Merge the flight records of ranks: where they diverged, who waits for whom, one trace."""
    with refusing():
        records = read(files)
        if out is not None:
            write_perfetto(records, out)
        lines = story(records)
    console = terminal()
    for line in lines:
        say(console, line)
    if out is not None:
        calls = sum(len(hashes.counts) for each in records for hashes in each.hashes.values())
        say(console, f"wrote {out}: {calls} calls of {len(records)} ranks")
