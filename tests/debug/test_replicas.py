"""Replicas of plain parameters: compared on demand, and in check mode after the optimizer's steps that update them."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import ArgumentError, MismatchError, debug, groups, p2p
from tritoncomm.debug import replicas

FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))]


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, bias=False))


def run_watched(group: ProcessGroup) -> list[str]:
    tritoncomm.destroy()
    model, rank, texts = _model(), group.rank(), []
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.5)
    other = torch.optim.SGD(model[1].parameters(), lr=0.5)
    debug.watch_replicas(model.named_parameters(), group)
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()
    try:
        with p2p.check():
            optimizer.step()
            model[1].weight.grad.mul_(1 + rank)
            optimizer.step()  # does not have the weight that is about to differ
            with pytest.raises(MismatchError) as caught:
                other.step()
            texts.append(str(caught.value))
            optimizer.step()
        other.step()  # outside of check mode nothing is compared
        debug.check_replicas(model[0].parameters(), group)
        with pytest.raises(MismatchError) as caught:
            debug.check_replicas(dict(model.named_parameters()), group)
        texts.append(str(caught.value))
        seen = weakref.ref(model[1].weight)
        del model, optimizer, other, caught
        gc.collect()
        assert seen() is None, "what is watched is not kept alive"
        with p2p.check():
            torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0).step()
        assert not replicas._watched, "and forgotten when it is gone"
    finally:
        replicas._watched.clear()
    return texts


def test_watched_parameters_are_compared_after_the_steps_that_update_them(pool: Pool) -> None:
    for after_step, on_demand in pool.run(run_watched, world=2):
        assert after_step.startswith("SGD.step: 1 of 1 parameters differ over ranks [0, 1]: 1.weight (norm ")
        assert on_demand.startswith("check_replicas: 1 of 3 parameters differ over ranks [0, 1]: 1.weight (norm ")
        for text in (after_step, on_demand):
            assert "on rank 0, norm " in text
            assert "on rank 1" in text


def run_others(group: ProcessGroup) -> tuple[str, str, str]:
    """Names that differ; tensors of all kinds that do not; nothing to compare."""
    tritoncomm.destroy()
    debug.check_replicas([], group)
    x = torch.arange(12, dtype=torch.float64).view(3, 4)
    same: list[Any] = [x.t(), x[:, 1], x[:0], x.sum(), x.bfloat16(), x.bool(), x.to(torch.complex64), x > 3]
    same += [torch.arange(16, dtype=torch.uint8).view(dtype) for dtype in (*FLOAT8, torch.uint16, torch.uint64)]
    debug.check_replicas(same, group)
    with pytest.raises(MismatchError, match="names, shapes or dtypes"):
        debug.check_replicas({"x": x} if group.rank() else {}, group)  # nobody waits for the rank without any
    texts = []
    odd = x.float() if group.rank() else x
    for given in ({f"of rank {group.rank()}": x}, [x, odd], [x, x][group.rank() :]):
        with pytest.raises(MismatchError) as caught:
            debug.check_replicas(given, group)
        texts.append(str(caught.value).partition("parameters have different names, shapes or dtypes: ")[2])
    return texts[0], texts[1], texts[2]


def test_views_dtypes_and_sizes_are_compared_and_names_have_to_be_the_same(pool: Pool) -> None:
    for texts in pool.run(run_others, world=2):
        assert texts == (
            "number 0 is of rank 0 [3, 4] float64 on rank 0, of rank 1 [3, 4] float64 on rank 1",
            "number 1 is parameter 1 [3, 4] float64 on rank 0, parameter 1 [3, 4] float32 on rank 1",
            "number 1 is parameter 1 [3, 4] float64 on rank 0, missing on rank 1",
        )


def run_alone(group: ProcessGroup) -> None:
    tritoncomm.destroy()
    debug.watch_replicas(_model().parameters(), group)
    debug.check_replicas(_model().parameters(), group)
    replicas._watched.clear()


def test_one_rank_has_nothing_to_compare(pool: Pool) -> None:
    pool.run(run_alone, world=1)


def run_destroyed(group: ProcessGroup) -> None:
    """What is watched over a group that was destroyed is forgotten, though the group itself is still referenced."""
    tritoncomm.destroy()
    made = groups.make_group("test", dist.get_process_group_ranks(group), "gloo")
    model, others = _model(), _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    debug.watch_replicas(model.named_parameters(), made)
    debug.watch_replicas(others.named_parameters(), group)
    torch.stack([p.sum() for p in model.parameters()]).sum().backward()
    try:
        with p2p.check():
            optimizer.step()
            dist.destroy_process_group(made)
            optimizer.step()
        assert len(replicas._watched) == 1
        del others
        debug.watch_replicas(model.named_parameters(), group)  # without check mode no step forgets the other model
        assert len(replicas._watched) == 1
    finally:
        replicas._watched.clear()


def test_a_destroyed_group_is_not_compared_over(pool: Pool) -> None:
    pool.run(run_destroyed, world=2)


class _Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (nn.Linear(1, 1), r"expected module.named_parameters\(\), not Linear"),
        (torch.ones(2), "expected a list of tensors, not Tensor"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "two parameters have one name"),
        ([torch.ones(1).as_subclass(_Wrapped)], "parameter 0 must be a plain tensor, not _Wrapped"),
        ([1.0], "parameter 0 must be a plain tensor, not float"),
        (3, "expected a list of tensors, not int"),
        ([("a", torch.ones(1), 0)], "longer tuples"),
        ([torch.ones(1, device="meta")], "parameter 0: a meta tensor has no data"),
        ([torch.ones(1).to_sparse()], "parameter 0: expected a strided tensor"),
    ],
)
def test_what_is_no_plain_parameter_is_refused(parameters: Any, words: str) -> None:
    for call in (debug.check_replicas, debug.watch_replicas):
        with pytest.raises(ArgumentError, match=words):
            call(parameters)
