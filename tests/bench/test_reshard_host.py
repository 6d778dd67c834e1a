"""Plans of real models of less memory, and their execution over a no-op group."""

from contextlib import nullcontext
from unittest import mock

import pytest

from bench import reshard_host
from bench.reshard_models import CASES, items_of
from tritoncomm.reshard import planner
from tritoncomm.reshard.api import BUCKET_BYTES

LESS = reshard_host.DIVISOR**2


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_divided_model_has_the_plan_of_the_model(case: reshard_host.Case) -> None:
    real, small = (
        planner.plan_transfers(items_of(case, divisor), range(case.world), 0, BUCKET_BYTES // divisor**2)
        for divisor in (1, reshard_host.DIVISOR)
    )
    assert len(small.buckets) == pytest.approx(len(real.buckets), rel=0.03)
    assert small.messages.sum() == pytest.approx(real.messages.sum(), rel=0.03)
    assert small.sent.sum() * LESS == pytest.approx(real.sent.sum(), rel=0.03)


def test_a_bucket_above_its_target_is_told() -> None:
    times = {"buckets": 300.0, "plan.execute": 109.0, "plan.execute(out=)": 90.0, "reshard": 200.0}
    assert not reshard_host.too_slow(times | {"the group alone": 9.0})
    assert reshard_host.too_slow(times | {"the group alone": 8.0})


def test_it_is_executed() -> None:
    counted = mock.Mock(wraps=reshard_host.backend.all_to_all)
    with mock.patch.object(reshard_host.backend, "all_to_all", counted):
        figures = reshard_host.model(nullcontext(), CASES[0], rounds=2)
    assert counted.call_count == figures["buckets"] * (1 + 3 * 2)
    assert figures["blocks that are copied directly"] > 1
    assert all(figures[name] > 0 for name in ("plan.execute", "plan.execute(out=)", "the group alone"))
