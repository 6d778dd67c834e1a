"""The exchange of experts by hand, to which the benchmark compares, has the values and gradients of ours."""

import pytest
import torch
from torch.distributed import ProcessGroup

from bench.bench_experts import Case, calls_of, megatron_on_cpu, missing_peers, sent_bytes

pytestmark = pytest.mark.skipif(bool(missing_peers()), reason=missing_peers())


@pytest.mark.ranks(2, 4)
def test_values_and_gradients_are_ours(group: ProcessGroup) -> None:
    """Sums have one order; a dot product of the weights' gradient by hand has that of torch."""
    case = Case(16, 32, 4, 16, group.size())
    with megatron_on_cpu():
        results = {provider: call() for provider, call in calls_of(case, group).items()}
    for ours, plain in zip(results["ours"][:2], results["by hand"][:2], strict=True):
        assert torch.equal(ours, plain)
    for provider in ("by hand", "transformers", "megatron"):
        for ours, other in zip(results["ours"], results[provider], strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)
    sent = sent_bytes(group, case)
    assert 0 < sent["ours"] < min(sent["transformers"], sent["megatron"])
