"""The command `tritoncomm trace`: merges flight records, says where ranks diverged."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tritoncomm.cli._console import paragraphs, refusing, say, terminal
from tritoncomm.debug.trace import perfetto, read, story

__all__ = ["EPILOG", "trace"]

EPILOG = paragraphs(
    "Examples:",
    "torchrun ... train.py   (with TRITONCOMM_FLIGHT=/logs every rank writes its record where a call fails)",
    "tritoncomm trace /logs",
    "tritoncomm trace tritoncomm-flight-*.json --out job.json   (open it at ui.perfetto.dev)",
    "Exits with 0, and with 2 for what is no record: another file, a named pipe, a device.",
)


def trace(
    files: Annotated[list[Path], typer.Argument(help="Flight records, or folders that hold them.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Write one trace for Perfetto.", show_default=False)] = None,
) -> None:
    """Merge the flight records of ranks: where they diverged, who waits for whom, and one trace of all."""
    with refusing():
        records = read(files)
        if out is not None:
            out.write_text(json.dumps(perfetto(records)))
    console = terminal()
    for line in story(records):
        say(console, line)
    if out is not None:
        calls = sum(len(each.data["calls"]) for each in records)
        say(console, f"wrote {out}: {calls} calls of {len(records)} ranks")
