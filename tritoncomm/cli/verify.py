"""The command `tritoncomm verify`: arguments, lines, exit codes."""

from contextlib import nullcontext
from typing import Annotated, Any

import typer
import typer.core

from tritoncomm.cli._console import paragraphs, refuse, say, terminal
from tritoncomm.errors import ArgumentError
from tritoncomm.verify.comparison import Report
from tritoncomm.verify.processes import VerifyError
from tritoncomm.verify.running import DTYPES, TRANSFORMERS, Settings
from tritoncomm.verify.running import verify as run

__all__ = ["EPILOG", "Command", "verify"]

EPILOG = paragraphs(
    "Examples:",
    "tritoncomm verify model.py:build --ranks 4",
    "tritoncomm verify transformers llama --ranks 4",
    "tritoncomm verify model.py:build --dtype bfloat16 --skip 'layers.*.rotary'",
    "tritoncomm verify train.py:build --ranks 4 -- --layers 2   (the file's own arguments)",
    "FILE.py:build is a function build(rank, world, group, whole) that returns a tritoncomm.verify.Case.",
    "Exits with 0 when all is equal, 1 when something differs, 2 when nothing could be compared,",
    "3 for invalid arguments.",
)


class Command(typer.core.TyperCommand):
    """Command whose errors of usage end with 3: 2 says that nothing could be compared."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of click, which typer brings as a module of its own or not
            if hasattr(error, "exit_code"):
                error.exit_code = 3  # pyright: ignore
            raise


def verify(
    target: Annotated[str, typer.Argument(help="FILE.py:function of the case, or: transformers", metavar="TARGET")],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="With transformers: a model type, or a config file. Else, behind --: arguments of the file.",
            metavar="[MODEL | -- ARGS...]",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the parallel run.")] = 2,
    dtype: Annotated[str, typer.Option(help=f"Of parameters: {', '.join(DTYPES)}.")] = "float64",
    only: Annotated[list[str] | None, typer.Option(help="Pattern of modules to record; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Pattern of modules to leave out; may be repeated.")] = None,
    keep_values: Annotated[
        bool, typer.Option(help="Keep the values of parameters, which are drawn otherwise.")
    ] = False,
    keep_noise: Annotated[bool, typer.Option(help="Keep dropout and router noise, which are 0 otherwise.")] = False,
    full: Annotated[bool, typer.Option(help="With transformers: keep the sizes of the model.")] = False,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without a module, a collective or a printed line: a hang.")
    ] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare one training step on several ranks with the same step in one process, and name the first wrong module."""
    arguments = tuple(more or ())
    if target == "transformers" and len(arguments) == 1:
        target, arguments = f"{TRANSFORMERS}{arguments[0]}{':full' if full else ''}", ()
    elif target == "transformers" or full:
        raise refuse(ArgumentError("expected FILE.py:function, or: transformers MODEL [--full]"), 3)
    patterns = tuple(only or ()), tuple(skip or ())
    settings = Settings(
        target, ranks, dtype, keep_values, keep_noise, *patterns, seed, timeout, arguments, is_quiet=as_json
    )
    console = terminal()
    with nullcontext() if as_json else console.status("starting") as status:
        try:
            report = run(settings, (lambda text: None) if status is None else (lambda text: status.update(text)))
        except ArgumentError as error:
            raise refuse(error, 3) from None
        except VerifyError as error:
            report = Report(problem=str(error))
    if as_json:
        print(report.json())
        raise typer.Exit(_status(report))
    if "\n" in report.problem:  # a traceback
        say(terminal(stderr=True), report.problem)
    else:
        for line in (report.problem, *report.lines):
            if line:
                say(console, line)
    say(console, "all equal" if report.equal else "different" if not report.problem else "not comparable")
    raise typer.Exit(_status(report))


def _status(report: Report) -> int:
    """Return the exit status of a report."""
    return 2 if report.problem else 0 if report.equal else 1
