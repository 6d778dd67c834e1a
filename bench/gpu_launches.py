"""Checks of how kernels are launched on a GPU: under capture, on other streams, with hooks, beyond 2**31 units."""

from collections.abc import Callable, Iterator

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from torch.distributed import ProcessGroup
from triton import knobs

from bench.checks import Group
from bench.gpu_groups import one_rank
from bench.setting import Setting, bits
from tritoncomm import mappings
from tritoncomm.core import ops

__all__ = ["check_capture", "check_hooks", "check_narrow_units", "check_streams"]

SIZES = (16, 0, 5, 40, 3, 32)
MANY = (5,) * 18 + (6,)  # more than a launch takes by value
SLEEP = 200_000_000  # cycles, about a tenth of a second
Call = Callable[[Tensor], Tensor]


def _local_calls() -> Iterator[tuple[str, Call]]:
    """Every kind of local step on a ``[8, 96]`` tensor of 2-byte integers."""
    yield "pack", lambda x: ops.pack(x, 1, 4)[0]
    yield "pack of a slice", lambda x: ops.pack(x[:, 16:80], 1, 4)[0]
    yield "pack that does not divide", lambda x: ops.pack(x, 1, 5)[0]
    yield "pack by sizes", lambda x: ops.pack(x, 1, len(SIZES), SIZES)[0]
    yield "pack by many sizes", lambda x: ops.pack(x, 1, len(MANY), MANY)[0]
    yield "unpack", lambda x: ops.unpack(x.view(4, 2, 96), (2, 384), 1, 4)[0]
    yield "unpack by sizes", lambda x: ops.unpack(x.view(-1), (8, 96), 1, len(SIZES), SIZES)[0]
    yield "unpack by many sizes", lambda x: ops.unpack(x.view(-1), (8, 96), 1, len(MANY), MANY)[0]
    yield "reduce", _summed


def _summed(x: Tensor) -> Tensor:
    out = torch.empty(96, dtype=torch.int32, device=x.device)
    kernels.reduce(x.to(torch.int32), out)
    return out


def _mappings(pg: ProcessGroup) -> Iterator[tuple[str, Call]]:
    """Mappings through the backend, of one rank."""
    yield "gather_sp", lambda x: mappings.gather_from_sequence_parallel_region(x, group=pg)
    yield "reduce_from", lambda x: mappings.reduce_from_tensor_model_parallel_region(x.float(), pg)
    yield "reduce_scatter_last", lambda x: mappings.reduce_scatter_last_dim_to_tensor_parallel_region(x.float(), pg)
    yield "sp2hp", lambda x: mappings.all_to_all_sp2hp(x.float(), pg)
    yield "all_to_all by sizes", lambda x: mappings.all_to_all(pg, x.float(), [8], [8])
    yield "all_to_all_dims by sizes", lambda x: mappings.all_to_all_dims(x.float(), 1, 0, pg, scatter_sizes=(96,))


def _made(setting: Setting) -> Tensor:
    return bits(setting, (8, 96), torch.int16)


def check_capture(group: Group, setting: Setting) -> None:
    """A captured call, replayed with new values in the same memory, gives what the call gives."""
    with one_rank(setting) as pg, ops.path("triton"):
        for calls in (_local_calls(), _mappings(pg)):
            for name, call in calls:
                x, fresh = _made(setting), _made(setting)
                want = call(fresh)
                out, replay = _captured(setting, call, x)
                x.copy_(fresh)
                for turn in range(2):
                    out = replay(out)
                    group.expect(torch.equal(out, want), f"{name}, replay {turn}")
                    out.zero_()


def _captured(setting: Setting, call: Call, x: Tensor) -> tuple[Tensor, Call]:
    """The result of a captured call and what replays it; in a dry run the call itself."""
    if setting.dry:
        return call(x), lambda _: call(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(x)  # compiles, and copies tables of sizes to the device
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events meanwhile
        out = call(x)

    def replay(out: Tensor) -> Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return out

    return out, replay


def check_streams(group: Group, setting: Setting) -> None:
    """Kernels run in the order of the current stream, tables of sizes included; behind a kernel that takes long."""
    with ops.path("triton"):
        for name, call in _local_calls():
            x, fresh = _made(setting), _made(setting)
            want = call(fresh)
            side = None if setting.dry else torch.cuda.Stream()
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                _sleep(setting)
                x.copy_(fresh)
                out = call(x)
            if side is not None:
                side.synchronize()
            group.expect(torch.equal(out, want), f"{name} on a side stream")
        for world in (3, 24):
            _first_on_another_stream(group, setting, world)


def _first_on_another_stream(group: Group, setting: Setting, world: int) -> None:
    """Sizes met first on a stream that is busy, and again at once on one that is idle."""
    sizes = tuple(1 + n % 3 for n in range(world - 1))
    sizes += (96 - sum(sizes),)
    x = _made(setting)
    want = torch.cat([part.reshape(-1) for part in x.split(sizes, 1)])
    side = None if setting.dry else torch.cuda.Stream()
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    _sleep(setting)
    first = ops.pack(x, 1, world, sizes)[0]
    with torch.cuda.stream(side):
        second = ops.pack(x, 1, world, sizes)[0]
    if side is not None:
        side.synchronize()
    group.expect(torch.equal(second.view(-1), want), f"{world} sizes on a stream beside the first one's")
    group.expect(torch.equal(first.view(-1), want), f"{world} sizes on the first stream")


def _sleep(setting: Setting) -> None:
    if not setting.dry:
        torch.cuda._sleep(SLEEP)


def check_hooks(group: Group, setting: Setting) -> None:
    """With a launch hook, as profilers set it, every launch is seen and gives the same bits; after it, too."""
    seen: list[object] = []
    hook, x = knobs.runtime.launch_enter_hook, _made(setting)
    with ops.path("triton"):
        wants = [(name, call, call(x)) for name, call in _local_calls()]
        hook.add(seen.append)
        try:
            for name, call, want in wants:
                before = len(seen)
                group.expect(torch.equal(call(x), want), f"{name} with a hook")
                group.expect(setting.dry or len(seen) > before, f"{name}: the hook saw no launch")
        finally:
            hook.remove(seen.append)
        for name, call, want in wants:
            before = len(seen)
            group.expect(torch.equal(call(x), want) and len(seen) == before, f"{name} after the hook")


def check_narrow_units(group: Group, setting: Setting) -> None:
    """Tensors of more than 2**31 accesses, because rows that are odd in length leave 2 or 1 bytes to each."""
    shapes = {torch.bfloat16: (524288, 8194), torch.int8: (262144, 16386)}
    if setting.dry:
        shapes = dict.fromkeys(shapes, (8, 34))
    elif (free := torch.cuda.mem_get_info()[0]) < 40 * 2**30:
        group.skipped = f"needs 40 GiB of free memory, there are {free / 2**30:.0f}"
        return
    for dtype, (rows, cols) in shapes.items():
        x = bits(setting, (rows, cols), dtype).view(dtype)
        wire = ops.pack(x, 1, 2)[0].view(2, rows, cols // 2)
        kind = torch.int16 if dtype is torch.bfloat16 else torch.int8
        for w in range(2):
            part = x[:, w * cols // 2 : (w + 1) * cols // 2].view(kind)
            group.expect(torch.equal(wire[w].view(kind), part), f"pack {dtype} {rows} x {cols}, rank {w}")
        back = ops.unpack(wire, (rows, cols), 1, 2)[0]
        group.expect(torch.equal(back.view(kind), x.view(kind)), f"unpack {dtype} {rows} x {cols}")
        del x, wire, back
        if not setting.dry:
            torch.cuda.empty_cache()
