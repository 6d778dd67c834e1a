"""The command `tritoncomm verify`: arguments, lines, exit codes."""

from contextlib import nullcontext
from typing import Annotated

import typer

from tritoncomm.cli._console import paragraphs, refuse, say, terminal
from tritoncomm.errors import ArgumentError
from tritoncomm.verify.running import DTYPES, TRANSFORMERS, Settings, VerifyError
from tritoncomm.verify.running import verify as run

__all__ = ["EPILOG", "verify"]

EPILOG = paragraphs(
    "Examples:",
    "tritoncomm verify model.py:build --ranks 4",
    "tritoncomm verify transformers llama --ranks 4",
    "tritoncomm verify model.py:build --dtype bfloat16 --skip 'layers.*.rotary'",
    "FILE.py:build is a function build(rank, world, group, whole) that returns a tritoncomm.verify.Case.",
    "Exits with 0 when all is equal, 1 when something differs, 2 when nothing could be compared,",
    "3 for invalid arguments.",
)


def verify(
    target: Annotated[str, typer.Argument(help="FILE.py:function of the case, or: transformers", metavar="TARGET")],
    model: Annotated[str | None, typer.Argument(help="With transformers: a model type, or a config file.")] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare one training step on several ranks with the same step in one process, and name the first wrong module."""
    if target == "transformers" and model is not None:
        target = f"{TRANSFORMERS}{model}{':full' if full else ''}"
    elif model is not None or target == "transformers" or full:
        raise refuse(ArgumentError("expected FILE.py:function, or: transformers MODEL [--full]"), 3)
    settings = Settings(target, ranks, dtype, keep_values, keep_noise, tuple(only or ()), tuple(skip or ()), seed)
    console = terminal()
    with nullcontext() if as_json else console.status("starting") as status:
        try:
            report = run(settings, (lambda text: None) if status is None else (lambda text: status.update(text)))
        except ArgumentError as error:
            raise refuse(error, 3) from None
        except VerifyError as error:
            say(terminal(stderr=True), str(error))
            raise typer.Exit(2) from None
    if as_json:
        print(report.json())
    else:
        for line in (report.problem, *report.lines):
            if line:
                say(console, line)
        say(console, "all equal" if report.equal else "different" if not report.problem else "not comparable")
    raise typer.Exit(2 if report.problem else 0 if report.equal else 1)
