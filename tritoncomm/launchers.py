"""Which rank of how many this process is: the variables of torchrun, Open MPI, PMI and Slurm."""

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from tritoncomm.errors import GroupError

__all__ = ["Launch", "first_host", "forget", "is_first", "local_rank", "rendezvous", "started_by", "world_size"]

_PORTS = range(20000, 32000)  # below what Linux hands out to connections
_FORGOTTEN = re.compile(
    r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|TORCHELASTIC_\w+"
    r"|OMPI_COMM_WORLD_\w+|PMI_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE)|PMIX_RANK|MPI_LOCALN?RANK(ID|S)|SLURM_(PROCID|LOCALID)"
)
# Launcher, variables of rank, size, rank on the node, ranks on the node. The first that has rank and size counts: under
# Slurm, mpirun's daemons are tasks of a step, and the ranks inherit the daemons' SLURM variables.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("PMIx", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMIx", "PMIX_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
_OWN_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # of one mpirun; a scheduler's job may run several
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_ASK = (
    "set MASTER_ADDR (a name or address of the node of rank 0) and MASTER_PORT (a free port there) for all ranks, for "
    "example `mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500` or `mpiexec -genv MASTER_ADDR node1 -genv ...`"
)
_HOST = re.compile(r"((?:[^,\[\]\s]|\[\w+(?:-\w+)?(?:,\w+(?:-\w+)?)*\])+)(?:,|$)")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process in its job, from the launcher's variables.

    Attributes:
        launcher: its name.
        rank: this process's among all.
        size: number of ranks.
        local_rank: this process's on its node, None if the launcher does not set it.
        local_size: ranks on this node, None if the launcher does not set it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def started_by(env: Mapping[str, str]) -> Launch | None:
    """Return the launcher that started this process; None for a process on its own.

    torchrun counts with its own variables only: RANK and WORLD_SIZE alone may be those of the nodes of a cluster.
    Slurm counts inside a step of srun only: a batch script has the job's variables, but one process.

    Raises:
        GroupError: the variables contradict each other, or a rank has no number of ranks.
    """
    launches = []
    for names in _LAUNCHERS:  # PMI and PMIx stand before Slurm
        launcher, rank, size, *_ = names
        if rank in env and _starts(env, launcher, rank, size):
            launches.append(_launch(env, *names))
    if launches:
        first, last = launches[0], launches[-1]
        # Under srun --mpi=pmi2 both have started this rank, and Slurm knows more of it.
        is_same_rank = (first.rank, first.size) == (last.rank, last.size)
        return last if first.launcher in ("PMI", "PMIx") and is_same_rank else first
    if "PMIX_RANK" in env:
        raise GroupError(
            f"PMIX_RANK is {env['PMIX_RANK']}, but no variable says how many ranks there are: start with mpirun or "
            "srun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    return None


def _starts(env: Mapping[str, str], launcher: str, rank: str, size: str) -> bool:
    """Whether a launcher's variables are complete enough to believe that it started this process."""
    return size in env and (launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in env)


def _launch(env: Mapping[str, str], launcher: str, *names: str) -> Launch:
    """Read a launcher's variables: ``names`` of rank, size, rank on the node, ranks on the node."""
    numbers = {name: _integer(env, name) for name in names if name in env}
    rank, size = numbers[names[0]], numbers[names[1]]
    if rank >= size:
        raise GroupError(f"{launcher} says that this is rank {rank} of {size} ({names[0]}, {names[1]})")
    return Launch(launcher, rank, size, numbers.get(names[2]), numbers.get(names[3]))


def local_rank(env: Mapping[str, str]) -> int | None:
    """Return LOCAL_RANK, None where it is not set.

    Raises:
        GroupError: it is no number of 0 or more.
    """
    return _integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else None


def world_size(env: Mapping[str, str]) -> int | None:
    """Return WORLD_SIZE, None where it is not set.

    Raises:
        GroupError: it is no number of 0 or more.
    """
    return _integer(env, "WORLD_SIZE") if "WORLD_SIZE" in env else None


def _integer(env: Mapping[str, str], name: str) -> int:
    """Return a variable as a number; raise if it is none, or negative."""
    text = env[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise GroupError(f"{name} is {text!r}, not a number of 0 or more")
    return int(text)


def rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables from another launcher's; nothing where RANK is set, or for a process on its own.

    On one node the ranks meet at 127.0.0.1, at a port that follows from the job. On several nodes Slurm says which node
    is the first. Other launchers do not, so MASTER_ADDR and MASTER_PORT have to be set there. Where a program sets them
    they are used in any case.

    Raises:
        GroupError: MASTER_ADDR or MASTER_PORT is missing, or the launcher's variables are invalid.
    """
    launch = None if "RANK" in env else started_by(env)
    if launch is None or launch.size == 1:
        return {}
    address = env.get("MASTER_ADDR") or _address(env, launch)
    port = env.get("MASTER_PORT") or _port(env, launch)
    if not address or not port:
        raise GroupError(f"{launch.launcher} started {launch.size} ranks and does not say where rank 0 is: {_ASK}")
    variables = {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.size), "MASTER_ADDR": address, "MASTER_PORT": port}
    if launch.local_rank is not None and "LOCAL_RANK" not in env:
        variables["LOCAL_RANK"] = str(launch.local_rank)
    return variables


def _address(env: Mapping[str, str], launch: Launch) -> str:
    """Return the address of the node of rank 0; empty where the launcher does not say it."""
    if _is_one_node(env, launch):
        return "127.0.0.1"
    if launch.launcher != "Slurm":
        return ""
    return first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", ""))


def _is_one_node(env: Mapping[str, str], launch: Launch) -> bool:
    """Whether all ranks of the job are on this node."""
    if launch.launcher == "Slurm":
        return env.get("SLURM_STEP_NUM_NODES") == "1"
    return launch.local_size == launch.size


def _port(env: Mapping[str, str], launch: Launch) -> str:
    """Return a port that follows from the job's name: the same on all ranks, and another for another job."""
    if launch.launcher == "Slurm":
        step = env.get("SLURM_STEP_ID", "0")
        job = env.get("SLURM_JOB_ID", "0") + ("" if step == "0" else f".{step}")
    else:
        names = [name for name in (*_OWN_JOBS, *_JOBS) if env.get(name)]
        job = env[names[0]] if names else ""
        if _is_one_node(env, launch) and (not names or names[0] in _JOBS):
            job = _starter(launch) or job  # a scheduler's job may hold several of this launcher's
    if not job:
        return ""
    number = int(job) if job.isascii() and job.isdecimal() and len(job) < 19 else zlib.crc32(job.encode())
    return str(_PORTS[number % len(_PORTS)])


def _starter(launch: Launch) -> str:
    """Return the nearest ancestor that is no rank, the launcher's process on this node; empty where /proc is closed."""
    # A rank's parent may be a shell of its own; MPICH's and Intel's launchers name the job in no variable.
    mark = next(f"{names[1]}=" for names in _LAUNCHERS if names[0] == launch.launcher).encode()
    pid = os.getppid()
    try:
        while any(one.startswith(mark) for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return ""
    return str(pid)


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm node list: ``rack[1-2]n[03-04],x`` is ``rack1n03``.

    Raises:
        GroupError: the list has no first host.
    """
    match = _HOST.match(hosts)
    if match is None:
        raise GroupError(f"cannot read a host name from the Slurm node list {hosts!r}: set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", match[1])


def forget(env: MutableMapping[str, str]) -> None:
    """Remove what makes a process a rank of a job, for one that starts a job of its own."""
    for name in [name for name in env if _FORGOTTEN.fullmatch(name)]:
        del env[name]


def is_first(launch: Launch, *, of_node: bool = False) -> bool:
    """Whether this is rank 0 of the job, or the first rank of its node where the launcher sets it."""
    if of_node and launch.local_rank is not None:
        return launch.local_rank == 0
    return launch.rank == 0
