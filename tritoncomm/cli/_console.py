"""What the commands share on the terminal: its width, and how a mistake is told."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

__all__ = ["refuse", "refusing", "terminal"]


def terminal(stderr: bool = False) -> Console:
    """Standard output or standard error; 110 columns where that is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 110, highlight=False, stderr=stderr)


def refuse(error: Exception, code: int = 2) -> typer.Exit:
    """One line on standard error, and the exit to raise."""
    terminal(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(code)


@contextmanager
def refusing(*more: type[Exception]) -> Iterator[None]:
    """What the user got wrong is one line on standard error and exit code 2, never a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, *more) as error:
        raise refuse(error) from None
