"""What the stub CUDA driver alone can show: the variants that are loaded, and accesses that a GPU would not forgive."""

import pytest
import torch
import tritoncomm_kernels as kernels
from bits import bits, random_bits
from devices import Stub
from fake_gpu.program import PtxError
from kernel_cases import SPLIT_SIZES, copies
from tritoncomm_kernels import copy, launch, torch_path


def test_sizes_share_a_variant(device: Stub) -> None:
    """Also those that Triton would specialise for."""
    before = set(device.fake.kernels)
    for rows, world, run in ((1, 2, 8), (16, 16, 16), (17, 3, 8), (5, 1, 24), (1, 1, 8), (64, 4, 128)):
        x = random_bits((rows, world * run), torch.bfloat16)
        wire, twin = (torch.empty(world, rows, run, dtype=torch.bfloat16) for _ in range(2))
        kernels.pack(x, wire, config=kernels.Config(4, 128))
        torch_path.pack(x, twin)
        assert torch.equal(bits(wire), bits(twin))
    assert len(set(device.fake.kernels) - before) <= 1


@pytest.mark.parametrize(
    ("world", "kernel"), [(1, "split"), (8, "split"), (16, "split"), (17, "table"), (130, "table")]
)
def test_split_sizes_go_by_value_up_to_16_ranks(device: Stub, world: int, kernel: str) -> None:
    """Beyond that in a table, in one step for every 128; equal, empty and hot ranks."""
    before = len(device.fake.launches)
    for sizes in ((8,) * world, tuple(8 * (w % 3) for w in range(world - 1)) + (200,)):
        copies(random_bits((5, sum(sizes)), torch.bfloat16), world, sizes)
    assert {name for name, _ in device.fake.launches[before:]} == {f"_copy_{kernel}_kernel"}


BOTH = (kernels.gather_segments, torch_path.gather_segments)
MODULES = (kernels, torch_path)


def test_ordinary_launch(device: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch for a Triton whose direct one is not known."""
    assert launch.is_direct(0)
    monkeypatch.setattr(launch, "_known_calls", lambda: False)
    assert not launch.is_direct(0)
    for sizes in SPLIT_SIZES[-7:-2]:
        copies(random_bits((3, 5, sum(sizes) + 8), torch.bfloat16).transpose(0, 1)[..., 8:], len(sizes), sizes)
    copies(random_bits((3, 96), torch.float32), 4)


def test_faults_are_seen(device: Stub) -> None:
    """The plan of one call with the tensors of another."""
    x, wire = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(4, 8, 16, dtype=torch.bfloat16)

    def planned(alignment: int) -> launch.Launch:
        layout = (x.shape, x.stride(), wire.shape, wire.stride(), None, False, False, None)
        call = copy._plan("pack", 0, x.dtype, wire.dtype, alignment, *layout)[0]
        assert call is not None
        return call

    shifted = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
    planned(0)(x, wire, 1.0)
    planned(2)(shifted, wire, 1.0)
    with pytest.raises(PtxError, match="no multiple of"):
        planned(0)(shifted, wire, 1.0)
    with pytest.raises(PtxError, match="from a buffer"):
        planned(0)(x, wire.view(-1)[:-8], 1.0)
    with pytest.raises(PtxError, match="from a buffer"):
        planned(0)(x.view(-1)[:-16], wire, 1.0)


def test_segments_are_one_launch_whatever_their_dtypes(device: Stub) -> None:
    """Of 20 tensors, aligned and not, with rows, tails and padding; a cast is a second launch, not a second pass."""
    dtypes = (torch.bfloat16, torch.float32, torch.int8, torch.complex64) * 5
    tensors = [random_bits((6, 40 + i), dtype, i) for i, dtype in enumerate(dtypes)]
    tensors[4] = torch.randn(6, 44).to(torch.bfloat16)  # which is cast
    rows, at = [(-1, 0, 1, 13, 0, 0)], 13
    for i, dtype in enumerate(dtypes):
        rows.append((i, i % 3, 5, 37, 40 + i, at))
        at += 5 * 37 * dtype.itemsize + i % 4
    wires = [torch.full((at,), 7, dtype=torch.uint8) for _ in range(2)]
    for carried, launches in ((dtypes, 1), ((torch.bfloat16, *dtypes[1:4], torch.float32, *dtypes[5:]), 2)):
        if launches == 2:
            rows = [(*row[:5], -(-row[5] // 4) * 12) for row in rows]
            wires = [torch.full((3 * at + 12,), 7, dtype=torch.uint8) for _ in range(2)]
        table, before = kernels.Segments(rows, carried), len(device.fake.launches)
        copied = [f(tensors, wire, table) for f, wire in zip(BOTH, wires, strict=True)]
        assert len(device.fake.launches) == before + launches
        assert copied[0] == copied[1]
        assert torch.equal(*wires)


def test_copies_are_one_launch_whatever_their_dtypes(device: Stub) -> None:
    """Of 12 tensors and targets, aligned and not, with gaps in the rows of both."""
    dtypes = (torch.bfloat16, torch.float32, torch.int8, torch.complex64) * 3
    tensors = [random_bits((6, 40 + i), dtype, i) for i, dtype in enumerate(dtypes)]
    rows = [(i, i % 3, 5, 37, 40 + i, (i % 4) * dtype.itemsize, 39 + i % 5) for i, dtype in enumerate(dtypes)]
    copies, before = kernels.Copies(rows, dtypes), len(device.fake.launches)
    results = [[torch.zeros(256, dtype=dtype) for dtype in dtypes] for _ in range(2)]
    copied = [module.copy_segments(tensors, targets, copies) for module, targets in zip(MODULES, results, strict=True)]
    assert len(device.fake.launches) == before + 1
    assert copied[0] == copied[1]
    for one, twin in zip(*results, strict=True):
        assert torch.equal(bits(one), bits(twin))


def test_sums_are_in_the_launch_of_the_copies(device: Stub) -> None:
    """Parts at several strides of the wire, next to bits that are copied and rows that have gaps on both sides."""
    tensors = [random_bits((9, 48), torch.bfloat16), torch.zeros(9, 40, dtype=torch.bfloat16)]
    rows = [(1, 0, 9, 24, 40, 4000 * part, 24 + 8 * part) for part in range(3)]
    rows += [(1, 25, 9, 3, 40, 12_000 + 100 * part) for part in range(2)] + [(0, 8, 9, 33, 48, 13_002, 40)]
    table, before = kernels.Segments(rows, [x.dtype for x in tensors]), len(device.fake.launches)
    wire = torch.randn(table.wire_bytes // 2).to(torch.bfloat16)
    results = []
    for module in (kernels, torch_path):
        targets = [x.clone() for x in tensors]
        module.scatter_segments(wire, targets, table, sums=True)
        results.append(targets)
    assert len(device.fake.launches) == before + 1
    for one, twin in zip(*results, strict=True):
        assert torch.equal(bits(one), bits(twin))
