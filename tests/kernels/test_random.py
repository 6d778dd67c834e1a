"""The kernels in the interpreter on random plans, against their torch twins."""

import pytest
import torch
import tritoncomm_kernels as kernels
from bits import bits, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import canaries_live, guarded
from tritoncomm_kernels import Segments, torch_path


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33, 128, 129]),
    st.lists(st.tuples(st.integers(0, 128), st.sampled_from([1, 2, 5, 16, 40])), min_size=1, max_size=5),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([torch.int8, torch.bfloat16, torch.int64]),
    st.sampled_from([(1, 1), (3, 4), (5, 4)]),
    st.sampled_from([0, 1, 8]),
)
def test_random_split_sizes(
    world: int, some: list[tuple[int, int]], unit: int, dtype: torch.dtype, outer: tuple[int, int], left: int
) -> None:
    """By value and in a table, empty and hot ranks, tiles of one row and more, rows with strides."""
    lengths = dict.fromkeys(range(world), 0) | {rank % world: unit * length for rank, length in some}
    sizes, (rows, block_rows) = tuple(lengths.values()), outer
    x = random_bits((rows, left + sum(sizes)), dtype)[:, left:]
    config = kernels.Config(block_rows, 16 * dtype.itemsize)
    wire, raw = guarded((x.numel(),), dtype)
    twin = torch.empty_like(wire)
    assert kernels.pack(x, wire, sizes=sizes, config=config) == torch_path.pack(x, twin, sizes=sizes)
    assert torch.equal(bits(wire), bits(twin))
    back = torch.empty_like(x)
    kernels.unpack(wire, back, sizes=sizes, config=config)
    assert torch.equal(bits(back), bits(x))
    assert canaries_live(raw)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_plans(data: st.DataObject) -> None:
    outer, row, world = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 40)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.int64]))
    left, extra = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    wide = random_bits((outer, left + row + extra), dtype) if left + row + extra else torch.empty(outer, 0, dtype=dtype)
    rows = wide[:, left : left + row]
    run = -(-row // world) + data.draw(st.integers(0, 2))
    wire, raw = guarded((world, outer, run), dtype)
    twin = torch.empty_like(wire)
    assert kernels.pack(rows, wire) == torch_path.pack(rows, twin)
    assert torch.equal(bits(wire), bits(twin))
    back = torch.empty_like(rows)
    kernels.unpack(wire, back)
    assert torch.equal(bits(back), bits(rows))
    assert canaries_live(raw)


BLOCKS = st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 40), st.integers(0, 9))


@settings(max_examples=200, deadline=None)
@given(st.lists(BLOCKS, max_size=4), st.booleans())
def test_overlaps_in_the_wire_are_refused(blocks: list[tuple[int, int, int, int]], padded: bool) -> None:
    """Exactly where two rows have a byte in common."""
    rows, taken = [], []
    for i, (count, row, at, step) in enumerate(blocks):
        tensor, size = (-1, 1) if padded and i == 0 else (0, 2)
        rows.append((tensor, 0, count, row, row, at, step))
        taken += [at + (r * (step or row) + k) * size + byte
                  for r in range(count) for k in range(row) for byte in range(size)]  # fmt: skip
    if len(set(taken)) == len(taken):
        table = Segments(rows, [torch.bfloat16])
        assert table.nbytes == len(taken)
        assert table.wire_bytes == max(taken, default=-1) + 1
    else:
        with pytest.raises(ValueError, match="belong to two rows"):
            Segments(rows, [torch.bfloat16])
