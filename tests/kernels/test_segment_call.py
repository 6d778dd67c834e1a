"""A table that is called for other addresses: the bits that gather_segments and scatter_segments write."""

import pytest
import torch
import tritoncomm_kernels as kernels
from bits import bits, random_bits
from devices import Device
from torch import Tensor
from tritoncomm_kernels import SegmentCall, Segments, torch_path


def placed(count: int, shift: int, seed: int, device: torch.device) -> list[Tensor]:
    """Tensors of one set of layouts at addresses of their own, that many elements off an aligned one."""
    sizes = [3 * (16 + i) for i in range(count)]
    made = [random_bits((n + 16,), torch.bfloat16, seed + i, device) for i, n in enumerate(sizes)]
    return [x[shift : shift + n].view(3, -1) for x, n in zip(made, sizes, strict=True)]


@pytest.mark.parametrize("count", [1, 16, 17])
def test_access_widths_of_other_addresses(device: Device, count: int) -> None:
    rows = [(i, 0, 3, 8, 16 + i, 48 * i) for i in range(count)]
    table = Segments(rows, [torch.bfloat16] * count)
    first = placed(count, 0, 0, device.at)
    wire, twin = (torch.zeros(table.wire_bytes, dtype=torch.uint8, device=device.at) for _ in range(2))
    gather, scatter = (SegmentCall(name, table, first, wire) for name in ("gather_segments", "scatter_segments"))
    for place, shift in enumerate((0, 0, 3, 8, 0)):
        tensors = placed(count, shift, 10 * place, device.at)
        gather(tensors, wire)
        torch_path.gather_segments(tensors, twin, table)
        assert torch.equal(wire, twin), (count, shift)
        results, expected = ([torch.zeros_like(x) for x in tensors] for _ in range(2))
        scatter(results, wire)
        torch_path.scatter_segments(wire, expected, table)
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(results, expected, strict=True))
    # The interpreter reads 16 bytes from any address, a GPU does not.
    assert len(gather._launches) == 2, "one for each alignment"


def test_sums(device: Device) -> None:
    table = Segments([(0, 0, 2, 8, 12, 0)], [torch.bfloat16])
    wire, x = torch.arange(16.0).bfloat16().to(device.at), torch.ones(2, 12, device=device.at)
    call = SegmentCall("scatter_segments", table, [x], wire, True)
    for _ in range(3):
        call([x], wire)
    assert torch.equal(x[:, :8], 1 + 3 * torch.arange(16.0, device=device.at).view(2, 8))
    assert torch.equal(x[:, 8:], torch.ones(2, 4, device=device.at))


def test_launches_of_few_alignments_are_kept(device: Device) -> None:
    table = Segments([(0, 0, 1, 4, 4, 0), (1, 0, 1, 4, 4, 4)], [torch.int8] * 2)
    memory, wire = random_bits((64,), torch.int8, 0, device.at), torch.zeros(8, dtype=torch.int8, device=device.at)
    call = SegmentCall("gather_segments", table, [memory[:4], memory[:4]], wire)
    for start in range(32):
        parts = [memory[start : start + 4], memory[start // 2 : start // 2 + 4]]
        call(parts, wire)
        assert torch.equal(wire, torch.cat(parts))
    assert len(call._launches) <= 16


def test_bad_tables_are_refused() -> None:
    table, wire = Segments([(0, 0, 1, 4, 4, 0)], [torch.float32]), torch.zeros(16, dtype=torch.uint8)
    call = kernels.SegmentCall("gather_segments", table, [torch.zeros(2)], wire)
    with pytest.raises(ValueError, match="ends beyond"):
        call([torch.zeros(2)], wire)
