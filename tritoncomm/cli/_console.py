"""Console setup, tables and error reporting shared by the commands."""

import inspect
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["paragraphs", "refuse", "refusing", "say", "table", "terminal", "unwrapped"]


def terminal(stderr: bool = False) -> Console:
    """Return a console for standard output or standard error."""
    # Files and pipes have no width of their own.
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 80
    return Console(width=width, highlight=False, stderr=stderr)


def paragraphs(*lines: str) -> str:
    """Return an epilog of one paragraph per line."""
    return "\n\n".join(lines)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line of plain text, wrapped between words.

    An error in a file or a pipe is one line, for `grep`, and so is a line with a path longer than the terminal.
    """
    is_long = any(len(word) > console.width for word in line.split())
    in_one_piece = is_long or (console.stderr and not console.is_terminal)
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=in_one_piece)


def table(title: str, headings: Sequence[str], names: Collection[str]) -> Table:
    """Return an empty table; ``names`` are the headings of columns that fold where the terminal is narrow."""
    result = Table(
        title=escape(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=0,  # the box has a column between others already
    )
    for heading in headings:
        # Figures are right-aligned and keep their width.
        if heading in names:
            result.add_column(heading, overflow="fold")
        else:
            result.add_column(heading, justify="right", no_wrap=True)
    return result


def unwrapped(text: str | None) -> str:
    """Return a docstring as help text of one line per paragraph, which the terminal wraps; ``\\b`` blocks stay."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(one if one.startswith("\b") else " ".join(one.split()) for one in paragraphs)


def refuse(error: Exception, code: int = 2) -> typer.Exit:
    """Print one line on standard error and return the exit to raise."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"  # without the number
    say(terminal(stderr=True), f"error: {text}", "red")
    return typer.Exit(code)


@contextmanager
def refusing(*more: type[Exception]) -> Iterator[None]:
    """Report invalid arguments as one line on standard error and exit code 2, never as a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, *more) as error:
        raise refuse(error) from None
