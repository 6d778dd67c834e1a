"""Checks over process groups on one GPU: NCCL with one rank, Gloo with two processes, NCCL with two where it can."""

import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import tritoncomm
from bench.checks import Group, tried
from bench.closed_forms import (
    MAPPINGS,
    SUMS_FORWARD,
    against_closed_form,
    by_sizes,
    by_sizes_against_closed_form,
    whole_numbers,
)
from bench.setting import FLOATS, INTEGER, Setting, bits, make_setting
from tritoncomm import collective, mappings
from tritoncomm.core import eager, ops
from tritoncomm.p2p import P2PCommunicator

__all__ = [
    "check_async",
    "check_compile",
    "check_cuda_graphs",
    "check_initialize",
    "check_one_rank",
    "check_p2p",
    "check_two_processes",
    "check_two_processes_nccl",
    "one_rank",
]

PROCESS_S = 100
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
Work = Callable[[Group, int, ProcessGroup, Setting], None]


def check_initialize(group: Group, setting: Setting) -> None:
    """Alone, several times in one process: groups, a collective through each of them, and nothing left behind."""
    backend = "gloo" if setting.dry else None
    x = whole_numbers((8, 16), torch.float32, 1, setting.device)
    with mock.patch.dict(os.environ):
        for name in LAUNCHER:
            os.environ.pop(name, None)
        for turn in range(3):
            mesh = tritoncomm.initialize(backend=backend)
            group.expect(mesh.device_type == setting.device.type, f"turn {turn}: a mesh of {mesh.device_type}")
            with eager.force_single_rank_collectives():
                out = mappings.gather_from_tensor_model_parallel_region(x)
                summed = collective.all_reduce(x.clone(), tritoncomm.ParallelMode.DATA)
                on_cpu = collective.all_reduce(torch.ones(3), dist.group.WORLD)
            group.expect(torch.equal(out, x) and torch.equal(summed, x), f"turn {turn}: values")
            group.expect(torch.equal(on_cpu, torch.ones(3)), f"turn {turn}: a CPU tensor over the same group")
            tritoncomm.destroy()
            group.expect(not dist.is_initialized(), f"turn {turn}: destroy() left a default group")
            if not setting.dry:
                group.expect(torch.cuda.current_device() == 0, f"turn {turn}: another current device")


def check_one_rank(group: Group, setting: Setting) -> None:
    """One rank through the backend: every mapping is the identity there, up to the shape, in both directions."""
    with one_rank(setting) as pg:
        for dtype in setting.dtypes:
            kind = INTEGER[dtype.itemsize]
            for name, mapping in MAPPINGS.items():
                if name in SUMS_FORWARD and dtype not in FLOATS and dtype not in (torch.int32, torch.int64):
                    continue
                x = bits(setting, (8, 2, 16), dtype).view(dtype)
                if name in SUMS_FORWARD:
                    x = bits(setting, (8, 2, 16), torch.int8).to(dtype)
                label = f"{name} {dtype}"
                out = tried(group, label, mapping, x, pg)
                if out is None:
                    continue
                group.expect(torch.equal(out.reshape(-1).view(kind), x.reshape(-1).view(kind)), label)
                if dtype in FLOATS:
                    leaf = bits(setting, (8, 2, 16), torch.int8).to(dtype).requires_grad_()
                    result = mapping(leaf, pg)
                    gradient = bits(setting, tuple(result.shape), torch.int8).to(dtype)
                    result.backward(gradient)
                    group.expect(torch.equal(leaf.grad.view(-1), gradient.reshape(-1)), f"{label}, backward")


def check_async(group: Group, setting: Setting) -> None:
    """Handles waited for on a side stream; the inputs are overwritten right after the call has been waited for."""
    with one_rank(setting) as pg:
        for n in (64,) if setting.dry else (64, 4096, 1_000_000):
            for name in ("all_gather", "reduce_scatter", "all_reduce"):
                x = bits(setting, (2, n), torch.int8).float()
                want = x.clone()
                side = None if setting.dry else torch.cuda.Stream()
                with torch.cuda.stream(side):
                    if side is not None:
                        side.wait_stream(torch.cuda.default_stream())
                    if name == "all_reduce":
                        out, handle = collective.all_reduce(x, pg, async_op=True)
                    else:
                        out, handle = getattr(collective, name)(x, 1, pg, async_op=True)
                    group.expect(tuple(out.shape) == (2, n), f"{name}: the result has its shape before wait()")
                    result = handle.wait()
                    kept = result.clone()
                    x.fill_(-1)
                if side is not None:
                    torch.cuda.default_stream().wait_stream(side)
                group.expect(torch.equal(kept, want), f"{name}, {n} columns")


@contextmanager
def one_rank(setting: Setting) -> Iterator[ProcessGroup]:
    """A group of this process alone whose calls go through the backend."""
    with _world(setting, 0, 1, setting.backend, _free_port()) as pg, eager.force_single_rank_collectives():
        yield pg


@contextmanager
def _world(setting: Setting, rank: int, world: int, backend: str, port: int) -> Iterator[ProcessGroup]:
    """A process group over ``world`` processes."""
    bound = {"device_id": setting.device} if backend == "nccl" else {}
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, **bound)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def check_two_processes(group: Group, setting: Setting) -> None:
    _two_processes(group, setting, "gloo", _mappings)


def check_p2p(group: Group, setting: Setting) -> None:
    """CUDA tensors over Gloo go through the host; posted together and one by one."""
    _two_processes(group, setting, "gloo", _p2p)


def check_compile(group: Group, setting: Setting) -> None:
    _two_processes(group, setting, "gloo", _compiled)


def check_two_processes_nccl(group: Group, setting: Setting) -> None:
    """The whole of it over NCCL, where it takes two ranks: on two GPUs, or on one from NCCL 2.30 on."""
    if setting.dry:
        group.skipped = "needs a GPU"
        return
    settings = {}
    if torch.cuda.device_count() < 2:
        version = torch.cuda.nccl.version()
        if version < (2, 30):
            group.skipped = f"needs two GPUs, or NCCL 2.30 for two ranks on one; this is {version}"
            return
        settings = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    with mock.patch.dict(os.environ, settings):
        _two_processes(group, setting, "nccl", _mappings, _p2p, _compiled)


def _mappings(group: Group, rank: int, pg: ProcessGroup, setting: Setting) -> None:
    """Every mapping against its closed form, on the triton path; evenly and by split sizes."""
    with ops.path("triton"):
        for dtype in (torch.float32,) if setting.dry else (torch.bfloat16, torch.float32, torch.float64):
            for name in MAPPINGS:
                against_closed_form(group, name, dtype, rank, pg, setting.device)
            for name in by_sizes(pg.size()):
                by_sizes_against_closed_form(group, name, dtype, rank, pg, setting.device)


def _p2p(group: Group, rank: int, pg: ProcessGroup, setting: Setting) -> None:
    """An activation goes to the second stage and its gradient comes back; one tensor, strided ones, several."""
    shape, device = torch.Size((6, 2, 8)), setting.device
    for batched in (True, False):
        for varying in (False, True):
            config = SimpleNamespace(
                pipeline_dtype=torch.float32,
                batch_p2p_comm=batched,
                variable_seq_lengths=varying,
                pipeline_device=device,
            )
            stage, label = P2PCommunicator(pg, config), f"rank {rank}, batched {batched}, varying {varying}"
            for turn in range(3):
                act, grad = (whole_numbers(tuple(shape), torch.float32, turn + n, device) for n in (1, 5))
                if turn == 1:
                    act, grad = act.transpose(0, 1).contiguous().transpose(0, 1), grad.flip(0)
                if rank == 0:
                    leaf = act.clone().requires_grad_()
                    back = stage.send_forward_recv_backward(leaf * 2, shape, False)
                    group.expect(_is(back, grad), f"{label}, turn {turn}: gradient")
                    (leaf * 2).backward(back)
                    group.expect(_is(leaf.grad, grad * 2), f"{label}, turn {turn}: backward")
                else:
                    x = stage.recv_forward(shape, False)
                    group.expect(_is(x, act * 2) and x.requires_grad, f"{label}, turn {turn}: activation")
                    stage.send_backward(grad, False)
            many = [whole_numbers((3, n), torch.float32, n, device) for n in (1, 5, 16)]
            if rank == 0:
                stage.send_forward(many, False)
            else:
                received = stage.recv_forward([tuple(x.shape) for x in many], False)
                group.expect(all(map(_is, received, many)), f"{label}: several tensors")


def _is(got: Tensor | None, want: Tensor) -> bool:
    return got is not None and got.device == want.device and torch.equal(got.detach(), want)


class Exchange(nn.Module):
    """Linears and a norm around all-to-alls; ``uneven`` ones go by split sizes."""

    def __init__(self, group: ProcessGroup, uneven: bool) -> None:
        super().__init__()
        self.group, self.uneven = group, uneven
        self.norm, self.first, self.last = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.norm(x))
        if not self.uneven:
            there = mappings.all_to_all_sp2hp(hidden, self.group).relu()
            return x + self.last(mappings.all_to_all_hp2sp(there, self.group))
        heads = tuple(3 + 2 * n if n else 16 - sum(3 + 2 * m for m in range(1, self.group.size())) for n in range(2))
        there = mappings.all_to_all_dims(hidden, 1, 0, self.group, scatter_sizes=heads).relu()
        home = mappings.all_to_all_dims(there, 0, 1, self.group, gather_sizes=heads)
        return x + self.last(home)


def _compiled(group: Group, rank: int, pg: ProcessGroup, setting: Setting) -> None:
    """Forward and backward of exchanges through inductor against eager, at two lengths."""
    backend = "aot_eager" if setting.dry else "inductor"
    for uneven in (False, True):
        torch.manual_seed(rank)
        layer = Exchange(pg, uneven).to(setting.device)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for tokens in (8, 12):
            x = torch.randn(tokens, 16, device=setting.device)
            results = []
            for function in (layer, compiled):
                leaf = x.clone().requires_grad_()
                out = function(leaf)
                results.append((out.detach(), *torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])))
            near = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*results, strict=True))
            group.expect(near, f"rank {rank}, {tokens} tokens, uneven {uneven}: compiled differs from eager")


def check_cuda_graphs(group: Group, setting: Setting) -> None:
    """``mode="reduce-overhead"`` around mappings of a group that moves nothing: nothing is skipped, replays are right.

    The fake group's all-gather joins this rank's own tensor to itself.
    """
    from torch._dynamo.utils import counters
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    pg, norm = dist.group.WORLD, nn.LayerNorm(16).to(setting.device)
    try:
        for name, dim in (("gather_from_sequence_parallel_region", 0), ("gather_from_tensor_model_parallel_region", 1)):
            torch._dynamo.reset()
            counters.clear()
            how = {"backend": "aot_eager"} if setting.dry else {"mode": "reduce-overhead"}
            compiled = torch.compile(partial(_gathered, name, norm, pg), fullgraph=True, **how)
            for turn in range(5):
                x = torch.randn(8, 16, device=setting.device)
                leaf = x.clone().requires_grad_()
                if not setting.dry:
                    torch.compiler.cudagraph_mark_step_begin()
                out = compiled(leaf)
                want = torch.cat([norm(x).relu()] * 2, dim).detach()
                group.expect(torch.allclose(out, want, rtol=1e-4, atol=1e-5), f"{name}, turn {turn}")
                out.sum().backward()
                group.expect(
                    leaf.grad is not None and bool(leaf.grad.isfinite().all()), f"{name}, turn {turn}: backward"
                )
            group.expect(not counters["inductor"]["cudagraph_skips"], f"{name}: CUDA graphs were skipped")
    finally:
        dist.destroy_process_group()


def _gathered(name: str, norm: nn.Module, pg: ProcessGroup, x: Tensor) -> Tensor:
    return getattr(mappings, name)(norm(x), group=pg).relu()


def _process(rank: int, world: int, port: int, dry: bool, backend: str, works: tuple[Work, ...], results: Any) -> None:
    """One of several processes; the results of every work are sent when it has ended."""
    warnings.simplefilter("ignore")
    several = backend == "nccl" and torch.cuda.device_count() >= world
    setting = make_setting(dry, rank if several else 0)
    with _world(setting, rank, world, backend, port) as pg:
        for work in works:
            group = Group(work.__name__)
            try:
                work(group, rank, pg, setting)
            except Exception:
                group.failures.append(f"rank {rank}: {traceback.format_exc(limit=-3)}")
            results.put((group.checks, group.failures[:20]))
            if group.failures and group.failures[-1].startswith(f"rank {rank}: Traceback"):
                return  # the other rank may be anywhere


def _two_processes(group: Group, setting: Setting, backend: str, *works: Work) -> None:
    """``works`` in two processes of one group."""
    context, world = mp.get_context("spawn"), 2
    results = context.SimpleQueue()
    start = partial(context.Process, target=_process, daemon=False)
    shared = (world, _free_port(), setting.dry, backend, works, results)
    workers = [start(args=(rank, *shared)) for rank in range(world)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + PROCESS_S
    for rank, worker in enumerate(workers):
        worker.join(max(1.0, end - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
            group.failures.append(f"rank {rank} did not end within {PROCESS_S} s")
        elif worker.exitcode:
            group.failures.append(f"rank {rank} ended with code {worker.exitcode}")
    while not results.empty():
        checks, failures = results.get()
        group.checks += checks
        group.failures += failures
    group.expect(group.checks > 0, "no process checked anything")
