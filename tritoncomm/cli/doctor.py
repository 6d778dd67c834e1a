"""The command `tritoncomm doctor`: arguments, table, exit codes."""

import json
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tritoncomm.cli._console import paragraphs, table, terminal
from tritoncomm.doctor import Finding, examine
from tritoncomm.parsing import counted

__all__ = ["EPILOG", "doctor"]

_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
EPILOG = paragraphs(
    "Examples:",
    "tritoncomm doctor   (on a machine that will train, with the variables of the job set)",
    "tritoncomm doctor --json   (for a job's log)",
    "tritoncomm doctor --no-self-test",
    "Exits with 0 when all is well (no GPU is a note), 1 for a problem, 2 for invalid arguments.",
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    self_test: Annotated[bool, typer.Option(help="Let two ranks exchange known values (seconds).")] = True,
) -> None:
    """Look at torch, Triton, backends, GPUs, links, tuned table and variables; let two ranks exchange known values."""
    console = terminal()
    with nullcontext() if as_json else console.status("examining this machine"):
        findings = list(examine(self_test))
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"ok": not problems, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        console.print(_findings_table(findings))
        console.print(counted(problems, "problem") if problems else "all well")
    raise typer.Exit(1 if problems else 0)


def _findings_table(findings: list[Finding]) -> Table:
    """Return the findings as a table, one row each."""
    rows = table("", names := ("what", "level", "how it is", "what to do"), names)
    for one in findings:
        rows.add_row(escape(one.name), _MARKS[one.level], escape(one.value), escape(one.advice))
    return rows
