"""How kernels are launched: under capture, on other streams, with hooks, beyond 2**31 accesses."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import tritoncomm_kernels as kernels
from bits import bits, random_bits
from devices import Device
from torch import Tensor
from torch.distributed import ProcessGroup
from triton import knobs
from tritoncomm_kernels import Copies, Segments

from tritoncomm import mappings
from tritoncomm.core import ops
from tritoncomm.reshard import Layout, reshard

SIZES = (16, 0, 5, 40, 3, 32)
MANY = (5,) * 18 + (6,)  # more than a launch takes by value


def summed(x: Tensor) -> Tensor:
    out = torch.empty(96, dtype=torch.int32, device=x.device)
    kernels.reduce(x.to(torch.int32), out)
    return out


def gathered(tensors: Sequence[Tensor]) -> Tensor:
    """Columns 1 to 90 of all rows of the tensors, three bytes further than they are aligned to."""
    row, nbytes = 90, sum(x.numel() // 96 for x in tensors) * 180
    wire, at, rows = torch.zeros(nbytes + 4, dtype=torch.uint8, device=tensors[0].device), 3, []
    for i, x in enumerate(tensors):
        rows.append((i, 1, x.numel() // 96, row, 96, at))
        at += x.numel() // 96 * row * 2
    kernels.gather_segments(tensors, wire, Segments(rows, [x.dtype for x in tensors]))
    return wire


def paired(tensors: Sequence[Tensor]) -> Tensor:
    """Columns 1 to 90 of all rows of the tensors, each in rows of 99 from its place in one result on."""
    many, x = len(tensors), tensors[0]
    made = torch.zeros(many, 8 * 99, dtype=x.dtype, device=x.device)
    rows = [(i, 1, each.numel() // 96, 90, 96, 0, 99) for i, each in enumerate(tensors)]
    kernels.copy_segments(tensors, list(made), Copies(rows, [each.dtype for each in tensors]))
    return made


def resharded(tensors: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """All of them, each into a new tensor."""
    rows, columns = (Layout.on_mesh(tensors[0].shape, [0], [dim]) for dim in (0, 1))
    results = reshard({str(i): x for i, x in enumerate(tensors)}, rows, columns, group=group)
    return torch.cat([results[str(i)] for i in range(len(tensors))])


# Every kind of local step on a ``[8, 96]`` tensor of 2-byte integers.
LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "pack": lambda x: ops.pack(x, 1, 4)[0],
    "pack-slice": lambda x: ops.pack(x[:, 16:80], 1, 4)[0],
    "pack-ragged": lambda x: ops.pack(x, 1, 5)[0],
    "pack-sizes": lambda x: ops.pack(x, 1, len(SIZES), SIZES)[0],
    "pack-many-sizes": lambda x: ops.pack(x, 1, len(MANY), MANY)[0],
    "unpack": lambda x: ops.unpack(x.view(4, 2, 96), (2, 384), 1, 4)[0],
    "unpack-sizes": lambda x: ops.unpack(x.view(-1), (8, 96), 1, len(SIZES), SIZES)[0],
    "unpack-many-sizes": lambda x: ops.unpack(x.view(-1), (8, 96), 1, len(MANY), MANY)[0],
    "reduce": summed,
    "segments": lambda x: gathered([x]),
    "segments-of-many": lambda x: gathered([*x[:7], *x, *x[1:]]),
    "copies": lambda x: paired([x]),
    "copies-of-many": lambda x: paired([*x[:7], *x, *x[1:]]),
}
# Mappings through the backend, of one rank.
ONE_RANK: dict[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    "gather_sp": lambda x, g: mappings.gather_from_sequence_parallel_region(x, group=g),
    "reduce_from": lambda x, g: mappings.reduce_from_tensor_model_parallel_region(x.float(), g),
    "rs_last": lambda x, g: mappings.reduce_scatter_last_dim_to_tensor_parallel_region(x.float(), g),
    "sp2hp": lambda x, g: mappings.all_to_all_sp2hp(x.float(), g),
    "all_to_all-sizes": lambda x, g: mappings.all_to_all(g, x.float(), [8], [8]),
    "all_to_all_dims-sizes": lambda x, g: mappings.all_to_all_dims(x.float(), 1, 0, g, scatter_sizes=(96,)),
}


@pytest.fixture(autouse=True)
def on_kernels() -> Iterator[None]:
    with ops.path("triton"):
        yield


def inputs(device: Device) -> tuple[Tensor, Tensor]:
    first, second = (random_bits((8, 96), torch.int16, seed, device.at) for seed in (1, 2))
    return first, second


def replayed(device: Device, call: Callable[[Tensor], Tensor], exchanges: bool = False) -> None:
    """A captured call, replayed with new values in the same memory, gives what the call gives."""
    x, fresh = inputs(device)
    expected = call(fresh)
    out, replay = device.captured(call, x, exchanges)
    x.copy_(fresh)
    for turn in range(2):
        out = replay(out)
        assert torch.equal(out, expected), turn
        out.zero_()


@pytest.mark.parametrize("name", LOCAL)
def test_capture(device: Device, name: str) -> None:
    replayed(device, LOCAL[name])


@pytest.mark.parametrize("name", ONE_RANK)
def test_capture_of_mappings(device: Device, one_rank: ProcessGroup, name: str) -> None:
    replayed(device, lambda x: ONE_RANK[name](x, one_rank), exchanges=True)


@pytest.mark.parametrize("count", [8, 17, 40])
def test_capture_of_reshardings(device: Device, one_rank: ProcessGroup, count: int) -> None:
    """Of tensors that are made anew for every call, into new ones."""
    replayed(device, lambda x: resharded([x + i for i in range(count)], one_rank))


@pytest.mark.parametrize("name", LOCAL)
def test_streams(device: Device, name: str) -> None:
    """Kernels run in the order of the current stream, tables of sizes included; behind a kernel that takes long."""
    x, fresh = inputs(device)
    expected = LOCAL[name](fresh)
    with device.side_stream():
        device.busy()
        x.copy_(fresh)
        out = LOCAL[name](x)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", LOCAL)
def test_local_steps_do_not_wait(device: Device, name: str) -> None:
    """The first call compiles; later ones, new sizes among them, only enqueue."""
    x, fresh = inputs(device)
    LOCAL[name](x)
    with device.waits_are_errors():
        LOCAL[name](fresh)
        ops.pack(fresh, 1, 3, (90, 5, 1))


@pytest.mark.parametrize("name", ONE_RANK)
def test_mappings_do_not_wait(device: Device, one_rank: ProcessGroup, name: str) -> None:
    """Forward, backward and a resharding of many tensors; no call waits for the device, which is busy."""
    x = inputs(device)[0].float().requires_grad_()
    gradient = torch.ones_like(ONE_RANK[name](x, one_rank))
    many = [x.detach() + n for n in range(40)]
    resharded(many, one_rank)
    device.busy()
    with device.waits_are_errors():
        ONE_RANK[name](x, one_rank).backward(gradient)
        resharded(many, one_rank)


@pytest.mark.parametrize("world", [3, 24])
def test_sizes_on_two_streams(device: Device, world: int) -> None:
    """Sizes met first on a stream that is busy, and again at once on one that is idle."""
    sizes = tuple(1 + n % 3 for n in range(world - 1))
    sizes += (96 - sum(sizes),)
    x, _ = inputs(device)
    expected = torch.cat([part.flatten() for part in x.split(sizes, 1)])
    side = device.side_stream()
    device.busy()
    first = ops.pack(x, 1, world, sizes)[0]
    with side:
        second = ops.pack(x, 1, world, sizes)[0]
    assert torch.equal(second.view(-1), expected)
    assert torch.equal(first.view(-1), expected)


@pytest.mark.parametrize("name", LOCAL)
def test_hooks(device: Device, name: str) -> None:
    """With a launch hook, as profilers set it, every launch is seen and gives the same bits; after it, too."""
    seen: list[object] = []
    (x, _), hook = inputs(device), knobs.runtime.launch_enter_hook
    expected = LOCAL[name](x)
    hook.add(seen.append)
    try:
        assert torch.equal(LOCAL[name](x), expected)
        count = len(seen)
        assert count >= device.pick(0, 1), "the hook saw no launch"
    finally:
        hook.remove(seen.append)
    assert torch.equal(LOCAL[name](x), expected)
    assert len(seen) == count


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (524288, 8196)), (torch.int8, (262144, 16388))], ids=["bfloat16", "int8"]
)
def test_accesses_beyond_32_bits(device: Device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """More than 2**31 accesses, because runs of an odd length leave 2 or 1 bytes to each."""
    device.require(40)
    rows, cols = shape = device.pick((8, 36), shape)
    x = random_bits(shape, dtype, 0, device.at)
    wire = ops.pack(x, 1, 4)[0].view(4, rows, cols // 4)
    for rank, shard in enumerate(x.chunk(4, 1)):
        assert torch.equal(bits(wire[rank]), bits(shard)), rank
    assert torch.equal(bits(ops.unpack(wire, shape, 1, 4)[0]), bits(x))
