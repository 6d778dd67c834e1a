"""Ranks that die, stop, raise or come late: every survivor gets an error in time that names function and ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from leftovers import nothing_left

from tritoncomm import MismatchError, PeerError, debug, variables
from tritoncomm import mappings as m
from tritoncomm.experts import combine, dispatch
from tritoncomm.p2p import P2PCommunicator
from tritoncomm.reshard import Layout, reshard
from tritoncomm.ulysses import UlyssesAttention

START, TIMEOUT, SLACK = 60.0, 3.0, 5.0  # seconds: until processes run, of the group, and how late an error may come
WORLD, VICTIM = 3, 1
FAULTS = "kill", "stop", "raise", "delay"
SHAPE = (256, 64)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


def _fault(kind: str) -> None:
    """What happens to the victim instead of its next call."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "raise":
        raise KeyError("a mistake of the program")
    time.sleep(2 * TIMEOUT + SLACK)


class _Faulty(torch.autograd.Function):
    """Forward: identity. Backward: the fault."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _fault(ctx.kind)
        return grads[0], None


def _collective(group: Any, rank: int, kind: str) -> None:
    for step in range(100):
        if rank == VICTIM and step == 3:
            _fault(kind)
        m.reduce_from_tensor_model_parallel_region(torch.ones(SHAPE), group)


def _hop(group: Any, rank: int, kind: str) -> None:
    stages = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))
    for step in range(100):
        if rank == VICTIM and step == 3:
            _fault(kind)
        x = stages.recv_forward(SHAPE, rank == 0)
        grad = stages.send_forward_recv_backward(torch.ones(SHAPE) if x is None else x, SHAPE, rank == WORLD - 1)
        stages.send_backward(torch.ones(SHAPE) if grad is None else grad, rank == 0)


def _backward(group: Any, rank: int, kind: str) -> None:
    x = torch.ones(SHAPE, requires_grad=True)
    y = m.copy_to_tensor_model_parallel_region(x, group)
    if rank == VICTIM:
        y = _Faulty.apply(y, kind)
    z = m.all_gather_dim(m.copy_to_tensor_model_parallel_region(y, group), 0, group)
    z.sum().backward()


def _reshard(group: Any, rank: int, kind: str, first: int = 3) -> None:
    shape = (255, 63)
    rows, columns = (Layout.on_mesh(shape, range(WORLD), [dim]) for dim in (0, 1))
    for step in range(100):
        if rank == VICTIM and step == first:
            _fault(kind)
        reshard({"w": torch.ones(85, 63)}, rows, columns, group=group)


def _new_plan(group: Any, rank: int, kind: str) -> None:
    """The victim does not come to the comparison of plans."""
    _reshard(group, rank, kind, 0)


def _to_others(group: Any, rank: int, kind: str) -> None:
    """A resharding from the other ranks to the victim: one batch of messages, larger than what a socket buffers."""
    shape = (2048, 2048)
    senders = [each for each in range(WORLD) if each != VICTIM]
    source, target = Layout.on_mesh(shape, senders, [0]), Layout.on_mesh(shape, [VICTIM], [None])
    for step in range(100):
        if rank == VICTIM and step == 3:
            _fault(kind)
        reshard({"w": torch.ones(source.local_shape(rank) or (0,))}, source, target, group=group)


def _attention(group: Any, rank: int, kind: str) -> None:
    attention = UlyssesAttention(group)
    for step in range(100):
        if rank == VICTIM and step == 3:
            _fault(kind)
        attention(*torch.ones(3, 1, 8, WORLD, 8))


def _attention_backward(group: Any, rank: int, kind: str) -> None:
    q, k, v = torch.ones(3, 1, 8, WORLD, 8, requires_grad=True)
    out = UlyssesAttention(group)(q, k, v)
    if rank == VICTIM:
        out = _Faulty.apply(out, kind)
    out.sum().backward()


def _experts(group: Any, rank: int, kind: str, between: bool = False) -> None:
    """The victim does not come to a dispatch, or to the combine after it."""
    ids = torch.arange(WORLD).expand(8, WORLD)
    for step in range(100):
        if rank == VICTIM and step == 3 and not between:
            _fault(kind)
        dispatched = dispatch(torch.ones(8, 16), ids, torch.ones(8, WORLD), WORLD, group)
        if rank == VICTIM and step == 3:
            _fault(kind)
        combine(dispatched.rows, dispatched)


def _combine(group: Any, rank: int, kind: str) -> None:
    _experts(group, rank, kind, between=True)


def _experts_backward(group: Any, rank: int, kind: str) -> None:
    x, ids = torch.ones(8, 16, requires_grad=True), torch.arange(WORLD).expand(8, WORLD)
    dispatched = dispatch(x, ids, torch.ones(8, WORLD), WORLD, group)
    out = combine(dispatched.rows, dispatched)
    if rank == VICTIM:
        out = _Faulty.apply(out, kind)
    out.sum().backward()


def _replicas(group: Any, rank: int, kind: str) -> None:
    parameters = list(torch.nn.Linear(4, 4).requires_grad_(False).parameters())
    for x in parameters:
        x.fill_(1.0)
    for step in range(100):
        if rank == VICTIM and step == 3:
            _fault(kind)
        debug.check_replicas(parameters, group)


# What is called, how errors of it begin, and the ranks that they name.
PLACES: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "collective": (_collective, ("reduce_from_tensor_model_parallel_region: ",), "ranks [0, 1, 2]"),
    "hop": (_hop, ("recv_forward: ", "send_forward_recv_backward: ", "send_backward: "), "rank 1"),
    "backward": (_backward, ("copy_to_tensor_model_parallel_region.backward: ",), "ranks [0, 1, 2]"),
    "reshard": (_reshard, ("reshard: ",), "ranks [0, 1, 2]"),
    "new-plan": (_new_plan, ("reshard: ",), "ranks [0, 1, 2]"),
    "to-others": (_to_others, ("reshard: ",), "ranks [0, 1, 2]"),
    "attention": (_attention, ("UlyssesAttention: ",), "ranks [0, 1, 2]"),
    "attention-backward": (_attention_backward, ("UlyssesAttention.backward: ",), "ranks [0, 1, 2]"),
    "dispatch": (_experts, ("dispatch: ", "combine: "), "ranks [0, 1, 2]"),
    "combine": (_combine, ("combine: ",), "ranks [0, 1, 2]"),
    "experts-backward": (_experts_backward, ("combine.backward: ",), "ranks [0, 1, 2]"),
    "replicas": (_replicas, ("check_replicas: ",), "ranks [0, 1, 2]"),
}


def broken(kind: str, place: str, check: bool) -> Any:
    """(type, text, seconds) of the error of this rank."""
    rank = int(os.environ["RANK"])
    variables.CHECK.assign(check)
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.environ["STORE"], WORLD), rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    group = dist.group.WORLD
    m.all_gather_dim(torch.ones(2), 0, group)  # connects
    started = time.monotonic()
    try:
        PLACES[place][0](group, rank, kind)
    except (PeerError, MismatchError) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return None


def _survive(tmp_path: Path, kind: str, place: str, check: bool = False) -> None:
    store = str(tmp_path / "store")
    ranks = [{"RANK": str(rank), "STORE": store} for rank in range(WORLD)]
    answers = run_job(broken, ranks, kind, place, check, timeout=TIMEOUT + SLACK + 20, lost=(VICTIM,))
    for rank in (0, 2):
        assert isinstance(answers[rank], tuple), (rank, answers)
        name, text, seconds = answers[rank]
        assert seconds < TIMEOUT + SLACK, (rank, text, seconds)
        _, functions, ranks = PLACES[place]
        assert text.startswith(functions), text
        assert ranks in text, text
        if check and place != "hop":
            assert "rank 1" in text, text
        assert name == "PeerError" or check


@pytest.mark.parametrize("place", ["collective", "hop", "dispatch"])
def test_a_rank_that_is_killed_ends_the_job_in_time(tmp_path: Path, place: str) -> None:
    _survive(tmp_path, "kill", place)


@pytest.mark.slow
@pytest.mark.parametrize("check", [False, True], ids=["", "check"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FAULTS)
def test_survivors_get_an_error_in_time(tmp_path: Path, kind: str, place: str, check: bool) -> None:
    _survive(tmp_path, kind, place, check)


_ENDS = """
import os, sys
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from tritoncomm import CommError, mappings, p2p

rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40))
with p2p.check():
    mappings.all_gather_dim(torch.ones(2), 0, dist.group.WORLD)
    if rank:
        raise KeyError("a mistake")
    try:
        if sys.argv[3] == "hop":
            config = SimpleNamespace(pipeline_dtype=torch.float32)
            p2p.P2PCommunicator(dist.group.WORLD, config).recv_backward((2,), False)
        else:
            mappings.all_gather_dim(torch.ones(2), 0, dist.group.WORLD)
    except CommError as error:
        print(type(error).__name__, error)
"""
_SAID = {
    "collective": (
        "MismatchError all_gather_dim: rank 1 will not come to this call:",
        "rank 0: all_gather_dim(float32 [2], dim=0) at <string>:",
    ),
    "hop": ("PeerError recv_backward: ", "from rank 1"),
}


@pytest.mark.parametrize("place", ["collective", pytest.param("hop", marks=pytest.mark.slow)])
def test_a_rank_that_ends_is_named_before_the_timeout(tmp_path: Path, place: str) -> None:
    """In check mode, which waits over the store: that has no connection that closes."""
    commands = [[sys.executable, "-c", _ENDS, str(rank), str(tmp_path / "store"), place] for rank in range(2)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        (text, errors), (_, error) = (each.communicate(timeout=35) for each in ranks)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert "KeyError" in error
    for words in _SAID[place]:
        assert words in text, (text, errors)
    assert "rank 1: has ended with KeyError: 'a mistake'" in text
