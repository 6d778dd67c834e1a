"""Ranks find each other by the variables of torchrun, Open MPI, PMI and Slurm, and say so where they cannot."""

import itertools
import os
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import run_job
from torch.distributed import TCPStore

from tritoncomm import GroupError, launchers

PORTS = launchers._PORTS
OMPI = "OMPI_COMM_WORLD_"


def join_in_turn(jobs: list[list[dict[str, str]]]) -> list[tuple[int, int, list[float], str | None]]:
    """For every job its rank, its size, the ranks that one collective sees, and LOCAL_RANK."""
    import torch
    import torch.distributed as dist

    import tritoncomm as tc

    answers, before = [], dict(os.environ)
    for ranks in jobs:
        os.environ.clear()
        os.environ.update(before | ranks[int(before["PLACE"])])
        tc.initialize(timeout=30)
        rank, size = dist.get_rank(), dist.get_world_size()
        ranks_seen = tc.mappings.all_gather_dim(torch.tensor([float(rank)]), 0, dist.group.WORLD).tolist()
        tc.destroy()
        answers.append((rank, size, ranks_seen, os.environ.get("LOCAL_RANK")))
    return answers


def open_mpi(rank: int, size: int, local: int | None = None) -> dict[str, str]:
    here = size if local is None else local
    return {
        f"{OMPI}RANK": str(rank), f"{OMPI}SIZE": str(size), f"{OMPI}LOCAL_RANK": str(rank % here),
        f"{OMPI}LOCAL_SIZE": str(here), "PMIX_RANK": str(rank),
    }  # fmt: skip


def pmi(rank: int, size: int, local: int | None = None) -> dict[str, str]:
    here = size if local is None else local
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALRANKID": str(rank % here), "MPI_LOCALNRANKS": str(here),
    }  # fmt: skip


def slurm(rank: int, size: int, number: str, hosts: str = "localhost", nodes: int = 1) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_JOB_ID": number,
        "SLURM_LOCALID": str(rank % max(size // nodes, 1)), "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_NUM_NODES": str(nodes),
    }  # fmt: skip


def test_two_processes_form_the_jobs_of_every_launcher() -> None:
    numbers = [str(port) for port in random.Random(os.getpid()).sample(range(len(PORTS)), 4)]
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": numbers[0], "SLURM_JOB_NODELIST": "localhost"}
    jobs = [
        [open_mpi(rank, 2) | {"PMIX_NAMESPACE": numbers[0]} for rank in range(2)],
        [open_mpi(rank, 2) | {"PMIX_NAMESPACE": numbers[1]} | batch for rank in range(2)],  # mpirun in a batch script
        [pmi(rank, 2) for rank in range(2)],  # the port follows from the process that started both
        [slurm(rank, 2, numbers[2]) for rank in range(2)],
        [  # srun --mpi=pmi2
            {"PMI_RANK": str(rank), "PMI_SIZE": "2"} | slurm(rank, 2, numbers[3], "localhost,x", 2) for rank in range(2)
        ],
        [batch, batch],  # two processes that no srun started
    ]
    first, second = run_job(join_in_turn, [{"PLACE": "0"}, {"PLACE": "1"}], jobs)
    local = ["1", "1", "1", "1", "0"]
    assert first == [(0, 2, [0.0, 1.0], "0")] * 5 + [(0, 1, [0.0], None)]
    assert second == [(1, 2, [0.0, 1.0], one) for one in local] + [(0, 1, [0.0], None)]


def test_a_job_of_torchrun_starts_again_after_destroy() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's: it outlives the groups
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    job = [agent | address | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    first, second = run_job(join_in_turn, [{"PLACE": "0"}, {"PLACE": "1"}], [job] * 4)
    assert first == [(0, 2, [0.0, 1.0], "0")] * 4
    assert second == [(1, 2, [0.0, 1.0], "1")] * 4


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"},  # a batch script
        {"SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"},  # a shell of salloc
        slurm(0, 1, "7"),
        open_mpi(0, 1),
        pmi(0, 1),
    ],
    ids=["batch", "salloc", "srun of one", "mpirun of one", "mpiexec of one"],
)
def test_a_process_that_is_alone_waits_for_nobody(variables: dict[str, str]) -> None:
    assert launchers.rendezvous(variables) == {}


@pytest.mark.parametrize("kind", [open_mpi, pmi])
def test_several_nodes_ask_for_what_nobody_says(kind: Any) -> None:
    variables = kind(5, 8, 4) | {"SLURM_JOB_ID": "77"}
    with pytest.raises(
        GroupError, match=r"8 ranks and does not say where rank 0 is: set MASTER_ADDR .* and MASTER_PORT"
    ):
        launchers.rendezvous(variables)
    told = launchers.rendezvous(variables | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})
    assert told == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    }  # fmt: skip
    assert launchers.rendezvous(variables | {"MASTER_ADDR": "node1"})["MASTER_PORT"] == str(PORTS[77])
    del variables["SLURM_JOB_ID"]
    with pytest.raises(GroupError, match="MASTER_PORT"):
        launchers.rendezvous(variables | {"MASTER_ADDR": "node1"})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PMIX_RANK": "3"}, "PMIX_RANK is 3, but no variable says how many"),
        (open_mpi(2, 2), "rank 2 of 2"),
        (open_mpi(0, 2) | {f"{OMPI}SIZE": "two"}, f"{OMPI}SIZE is 'two', not a number"),
        (pmi(0, 2) | {"PMI_RANK": "-1"}, "PMI_RANK is '-1'"),
        (slurm(0, 2, "1", "", 2), "cannot read a host name"),
    ],
)
def test_variables_that_make_no_sense_are_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(GroupError, match=re.escape(words)):
        launchers.rendezvous(variables)


def test_torchrun_goes_first_and_pmix_takes_a_size_from_where_there_is_one() -> None:
    assert launchers.rendezvous(slurm(3, 4, "1") | {"RANK": "0"}) == {}
    launch = launchers.started_by({"PMIX_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})
    assert launch == launchers.Launch("PMIx", 1, 2, None, 2)
    inherited = slurm(0, 3, "1") | open_mpi(4, 8)  # a daemon of mpirun is a task of a step
    launch = launchers.started_by(inherited)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.size) == ("Open MPI", 4, 8)
    nodes = {"RANK": "1", "WORLD_SIZE": "2"}  # of a cluster's operator: RANK counts nodes
    assert launchers.started_by(nodes) is None


def test_ports_follow_from_jobs_and_steps() -> None:
    ports = {
        launchers.rendezvous(slurm(0, 2, number) | {"SLURM_STEP_ID": step})["MASTER_PORT"]
        for number, step in itertools.product(("123456", "123457"), ("0", "1", "2"))
    }
    assert len(ports) == 6
    assert all(int(port) in PORTS for port in ports)
    long = open_mpi(0, 2) | {"PMIX_NAMESPACE": "prterun-node-4711@1"}
    assert launchers.rendezvous(long)["MASTER_PORT"] == launchers.rendezvous(long)["MASTER_PORT"]


def test_nothing_of_a_job_is_left_for_a_job_of_its_own() -> None:
    kinds = [open_mpi(1, 2), pmi(1, 2), slurm(1, 2, "1")]
    torchrun = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x",
        "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    for chosen in itertools.product((False, True), repeat=4):
        variables = {"HOME": "/", "SLURM_JOB_ID": "1"}
        for taken, kind in zip(chosen, (*kinds, torchrun), strict=True):
            variables |= kind if taken else {}
        launchers.forget(variables)
        assert launchers.started_by(variables) is None
        assert variables["HOME"] == "/"
        assert "TORCHELASTIC_USE_AGENT_STORE" not in variables


names = st.text("abxyz-.", min_size=1, max_size=4)
numbers = st.integers(0, 120)
ranges = st.tuples(st.integers(0, 99), st.integers(0, 5), st.integers(1, 3)).map(lambda r: (r[0], r[0] + r[1], r[2]))
items = st.lists(st.one_of(numbers, ranges), min_size=1, max_size=3)
hosts = st.lists(st.lists(st.one_of(names, items), min_size=1, max_size=4), min_size=1, max_size=3)


def _written(parts: list[Any]) -> str:
    """One entry of a node list, as Slurm writes it."""
    out = ""
    for part in parts:
        if isinstance(part, str):
            out += part
        else:
            out += (
                "[" + ",".join(f"{i}" if isinstance(i, int) else f"{i[0]:0{i[2]}}-{i[1]:0{i[2]}}" for i in part) + "]"
            )
    return out


def _expanded(parts: list[Any]) -> list[str]:
    """All hosts of one entry, counted out."""
    columns = []
    for part in parts:
        column = [part] if isinstance(part, str) else []
        for item in () if isinstance(part, str) else part:
            first, last, width = (item, item, 1) if isinstance(item, int) else item
            column += [str(number).zfill(width) for number in range(first, last + 1)]
        columns.append(column)
    return ["".join(host) for host in itertools.product(*columns)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(hosts)
def test_the_first_host_is_the_first_of_all_hosts(entries: list[list[Any]]) -> None:
    text = ",".join(map(_written, entries))
    assert launchers.first_host(text) == _expanded(entries[0])[0]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu3", "gpu3"),
        ("gpu[03-07,12],x", "gpu03"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("n[1-2].cluster.local", "n1.cluster.local"),
        ("a[1,3-5]b,c7", "a1b"),
        ("node-001.cluster", "node-001.cluster"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert launchers.first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",a", "[", "a[1", "a[]", "a[1-]", "a]b", "a[[1]]", "a b", "n[1-2]]"])
def test_a_list_without_a_first_host(nodes: str) -> None:
    with pytest.raises(GroupError, match="node list"):
        launchers.first_host(nodes)
