"""Layers around mappings under inductor: its output code has at most the passes that Megatron's mappings have."""

import pytest
import torch

from bench import bench_compiled
from bench.bench_compiled import CASES, Case, compiled, passes

ALONE = [
    Case((name,), (16, 32))
    for name in (
        "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region",
        "scatter_to_tensor_model_parallel_region", "gather_from_tensor_model_parallel_region",
        "scatter_to_sequence_parallel_region", "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region", "all_gather_last_dim_from_tensor_parallel_region",
        "reduce_scatter_last_dim_to_tensor_parallel_region", "all_to_all_sp2hp", "all_to_all_hp2sp",
    )
]  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) for case in (*CASES, *ALONE)],  # as `make bench` asserts
    ids=lambda case: case.label,
)
def test_passes_are_at_most_megatrons(case: Case) -> None:
    if reason := bench_compiled.missing():
        pytest.skip(reason)
    torch.compiler.reset()
    with bench_compiled.host() as host:
        ours, theirs = (compiled(case, host[name], host["group"]) for name in ("ours", "megatron"))
    assert 0 < ours.passes[0] <= theirs.passes[0]
    assert 0 < ours.passes[1] <= theirs.passes[1]


def test_a_pass_of_its_own_is_counted() -> None:
    """The opaque operators are passes, collectives and the counter are not."""
    code = """
import x
def call(self, args):
    cpp_fused_mul_0(a, b)
    buf1 = torch.ops.tritoncomm.pack.default(b, 1, 4, None, 'x')
    buf2 = torch.ops._c10d_functional.all_to_all_single.default(buf1, [4], [4], '0')
    torch.ops.tritoncomm.count.default(buf2, 'x', 12)
    extern_kernels.mm(buf2, w, out=buf3)
"""
    assert passes([code, code]) == 6
