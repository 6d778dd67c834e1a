"""The command `tritoncomm`."""

import os
import sys
from importlib.metadata import version
from typing import Annotated

try:
    import typer
except ImportError as error:
    sys.exit(f"the command needs typer and rich ({error}): pip install 'tritoncomm[cli]'")

from tritoncomm_kernels import installed_triton

from tritoncomm import __version__, launchers
from tritoncomm.cli import bench, demo, doctor, plan, trace, tune, verify
from tritoncomm.cli._console import refuse, say, terminal, unwrapped
from tritoncomm.errors import GroupError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True)


def _version(asked: bool) -> None:
    """Print the versions and end the command, if ``--version`` is given."""
    if asked:
        triton = installed_triton.version() or "not installed"
        print(f"tritoncomm {__version__}, torch {version('torch')}, triton {triton}")
        raise typer.Exit(0)


def _about(
    context: typer.Context,
    asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and stop.")
    ] = False,
) -> None:
    """A communication layer for tensor, sequence and pipeline parallel training.

    Start with `demo` to see it train, `doctor` to see what a machine has, `plan` to see what a mapping costs. Under
    torchrun, mpirun or srun a command runs once, on rank 0, `doctor` once on every node, and `bench` on every rank.
    """
    if context.invoked_subcommand != "bench":  # it measures the ranks of the job
        _run_once(context.invoked_subcommand or "")


def _run_once(command: str) -> None:
    """Let one rank of the job, or of each node, run a command, which starts the ranks that it needs itself."""
    try:
        launch = launchers.started_by(os.environ)
    except GroupError as error:
        # ``doctor`` runs where the launcher's variables contradict each other, too, to report that.
        if command == "doctor":
            return
        raise refuse(error) from None
    if launch is None or launch.size == 1:
        return
    of_node = command == "doctor"
    if not launchers.is_first(launch, of_node=of_node):
        raise typer.Exit(0)
    where = "on the first rank of every node" if of_node else "on rank 0, and starts the ranks that it needs itself"
    line = f"{launch.launcher} started {launch.size} ranks: `tritoncomm {command}` runs once, {where}"
    say(terminal(stderr=True), line)


app.callback(help=unwrapped(_about.__doc__))(_about)
for _command, _epilog, _class in (
    (demo.demo, None, None),
    (tune.tune, None, None),
    (plan.plan, plan.EPILOG, None),
    (doctor.doctor, doctor.EPILOG, None),
    (trace.trace, trace.EPILOG, None),
    (verify.verify, verify.EPILOG, verify.Command),
    (bench.bench, bench.EPILOG, None),
):
    app.command(cls=_class, help=unwrapped(_command.__doc__), epilog=_epilog)(_command)


def main() -> None:
    """Entry point of the installed command."""
    app()
