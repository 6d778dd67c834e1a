"""ColoTensors answer as plain torch does, or refuse what it refuses, where the two are easily apart."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import ranks_of, shard_of, sharded
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm import groups
from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ReplicaSpec,
    ShardSpec,
    shard_parameters,
)
from tritoncomm.tensor.group_registry import _register
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.utils import full_state_dict, load_full_state_dict

NO_SUCH_DIM: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(5),
    "mean": lambda x: x.mean((0, 2)),
    "all": lambda x: x.all(-3),
    "norm": lambda x: x.norm(2, 2),
    "count_nonzero": lambda x: x.count_nonzero(2),
    "amax": lambda x: x.amax(2),
    "max": lambda x: x.max(-4),
    "argmin": lambda x: x.argmin(3),
    "softmax": lambda x: x.softmax(3),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 5),
    "movedim": lambda x: x.movedim(2, 0),
    "flatten": lambda x: x.flatten(0, 2),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "squeeze": lambda x: x.squeeze(2),
    "unsqueeze": lambda x: x.unsqueeze(3),
    "cat": lambda x: torch.cat([x, x], 2),
    "stack": lambda x: torch.stack([x, x], 3),
    "split": lambda x: x.split(2, 2),
    "chunk": lambda x: x.chunk(2, 4),
    "unbind": lambda x: x.unbind(2),
    "narrow": lambda x: x.narrow(2, 0, 1),
    "select": lambda x: x.select(2, 0),
    "index_select": lambda x: x.index_select(3, torch.tensor([0])),
}


def every_layout(full: Tensor, group: TorchGroup) -> list[ColoTensor]:
    """A replica, and shards of every dim."""
    pg, specs = ranks_of(group), [ReplicaSpec(), *(ShardSpec([dim], [group.size()]) for dim in range(full.dim()))]
    return [sharded(full, spec, pg) for spec in specs]


@pytest.mark.parametrize("name", NO_SUCH_DIM)
def test_dims_that_do_not_exist(group: TorchGroup, name: str) -> None:
    full = torch.ones(4, 4)
    for x in (full, *every_layout(full, group)):
        with pytest.raises(IndexError, match="Dimension out of range"):
            NO_SUCH_DIM[name](x)


def test_dims_of_numbers_and_in_the_wrong_order(group: TorchGroup) -> None:
    warnings.simplefilter("ignore")  # what is refused is gathered first
    number, full = ColoTensor(torch.tensor(2.0), ColoTensorSpec(ranks_of(group))), torch.ones(2, 4)
    for call in (torch.sum, torch.mean, torch.amax, torch.all, torch.count_nonzero, torch.squeeze, torch.argmax):
        for dim in (0, -1):
            assert call(number, dim).size() == ()
    assert number.movedim(0, -1).size() == number.transpose(0, -1).size() == ()
    assert number.flatten().size() == number.unsqueeze(-1).size() == (1,)
    for x in (full, *every_layout(full, group)):
        with pytest.raises(RuntimeError, match="start_dim cannot come after end_dim"):
            x.flatten(1, 0)
        with pytest.raises(RuntimeError, match="expects a tensor with <= 2 dimensions"):
            x.unsqueeze(0).t()


def test_values_that_do_not_fit_are_not_assigned(group: TorchGroup) -> None:
    full = torch.zeros(8, 4)
    cases = (
        (slice(None), (2, 4)), (slice(None), (8, 2)), (..., (2, 1)), ((slice(None), 0), (2,)), (0, (2,)), (0, (2, 4)),
    )  # fmt: skip
    for index, shape in cases:
        with pytest.raises(RuntimeError, match="size"):
            full[index] = torch.ones(shape)
        for x in every_layout(full, group):
            with pytest.raises((RuntimeError, ValueError)):
                x[index] = torch.ones(shape)
            assert not plain(x).any()
    values = torch.arange(32.0).view(1, 1, 8, 4)
    for x in every_layout(full, group):
        x[:] = values
        assert torch.equal(plain(x.to_replicate()), values[0, 0])


def test_samplers_take_operands(group: TorchGroup) -> None:
    full = torch.tensor([0.0, 1.0, 1.0, 0.0])
    torch.manual_seed(0)
    for p in every_layout(full, group):
        for x in every_layout(torch.zeros(4), group):
            x.bernoulli_(p)
            assert torch.equal(plain(x.to_replicate()), full)
            assert torch.equal(plain(p.to_replicate()), full), "the probabilities are an operand"
        with pytest.raises(UnsupportedError, match="writes into a plain tensor"):
            torch.zeros(4).bernoulli_(p)


def test_gradients_of_samplers(group: TorchGroup) -> None:
    torch.manual_seed(0)
    for leaf in every_layout(torch.ones(4), group):
        leaf.requires_grad_()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            leaf.normal_()
        y = leaf * 2
        y.uniform_()
        y.sum().backward()
        assert leaf.grad is not None
        assert not leaf.grad.any(), "what was drawn does not depend on what was there"
        torch.nn.init.zeros_(leaf)
        assert not plain(leaf).any()


def test_a_write_into_a_plain_tensor_returns_it(group: TorchGroup) -> None:
    index = ColoTensor(torch.tensor([0, 2]), ColoTensorSpec(ranks_of(group)))
    x = torch.zeros(4)
    assert x.scatter_(0, index, 1.0) is x
    assert x.index_fill_(0, index, 2.0) is x
    assert x.tolist() == [2.0, 0.0, 2.0, 0.0]


def test_a_plain_tensor_cast_like_a_shard_stays_plain(group: TorchGroup) -> None:
    for x in every_layout(torch.ones(4, 2, dtype=torch.float64), group):
        y = torch.arange(3.0).to(x)
        assert type(y) is Tensor, "it has no layout of its own"
        assert torch.equal(y, torch.arange(3.0, dtype=torch.float64))


def test_where_of_a_mask_has_global_indices(group: TorchGroup) -> None:
    warnings.simplefilter("ignore")  # the shards are gathered
    full = torch.arange(12.0).view(4, 3) % 5
    for x in every_layout(full, group):
        for mine, wanted in zip(torch.where(x > 2), torch.where(full > 2), strict=True):
            assert torch.equal(plain(mine), wanted), "indices of the global tensor"


def test_means_of_half_precision_do_not_overflow(group: TorchGroup) -> None:
    full = torch.full((2, 70000), 2.0, dtype=torch.float16)
    for x in every_layout(full, group):
        x.requires_grad_()
        for result in (x.mean(), x.mean(1).sum() / 2):
            assert result.dtype is torch.float16
            assert float(plain(result)) == 2.0, "the sum is beyond the dtype"
        (gradient,) = torch.autograd.grad(x.mean(1).sum(), x)
        assert torch.equal(gradient, torch.full_like(plain(x), 1 / 70000))


def test_an_infinite_gradient_of_a_maximum_stays_there(group: TorchGroup) -> None:
    full, gradient, spec = (
        torch.eye(4)[:, :2].clone().requires_grad_(),
        torch.tensor([1.0, torch.inf]),
        ShardSpec([0], [2]),
    )
    full.max(0).values.backward(gradient)
    x = sharded(full.detach(), spec, ranks_of(group)).requires_grad_()
    plain(x.max(0).values).backward(gradient)
    assert full.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, shard_of(full.grad, spec, group.rank())), "only the maximum has a gradient"


def test_evaluation_draws_nothing(group: TorchGroup) -> None:
    """Evaluation draws nothing: seeds may differ between ranks, and the generator does not move."""
    torch.manual_seed(group.rank())
    state = torch.get_rng_state()
    for x in every_layout(torch.ones(2, 4, 3), group):
        for dropout in (F.dropout, F.alpha_dropout, F.dropout1d):
            assert torch.equal(plain(dropout(x, 0.5, False)), plain(x))
            assert torch.equal(plain(dropout(x, p=0.5, training=False)), plain(x))
        assert torch.equal(plain(F.rrelu(x)), plain(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_are_counted_by_group(group: TorchGroup) -> None:
    """A rank that raised between two draws begins with the others in the group that they make next."""
    ranks, draws = dist.get_process_group_ranks(group), (3 if group.rank() == 0 else 2, 4)
    for count in draws:
        made = groups.make_group("test", ranks, "gloo")
        _register(made, "gloo", tuple(ranks))
        torch.manual_seed(0)
        for _ in range(count):
            F.dropout(ColoTensor(torch.ones(4), ColoTensorSpec(ranks_of(group))))
        dist.barrier(made)
        dist.destroy_process_group(made)
    _register(group, "gloo", tuple(ranks))


def test_a_deepcopy_has_its_own_compute_spec(group: TorchGroup) -> None:
    for x in every_layout(torch.ones(4, 2), group):
        x.compute_spec = spec = ComputeSpec(ComputePattern.TP1D)
        first, second = copy.deepcopy([x, x])
        assert first is second
        assert first.compute_spec is not None
        first.compute_spec.set_output_replicate(False)
        assert spec.output_replicate, "the copy has a compute spec of its own"


def test_a_gradient_is_redistributed_with_its_tensor(group: TorchGroup) -> None:
    pg, spec = ranks_of(group), ShardSpec([0], [2])
    gradient = torch.arange(8.0).view(2, 4)
    for before, after in ((spec, ReplicaSpec()), (ReplicaSpec(), spec), (spec, ShardSpec([1], [2]))):
        p = ColoParameter(torch.ones(2, 4), True, ColoTensorSpec(pg))
        p.set_dist_spec(before)
        plain(p).backward(shard_of(gradient, before, group.rank()))
        p.set_dist_spec(after)
        torch.optim.SGD([p], 1.0).step()
        assert torch.equal(plain(p), shard_of(1 - gradient, after, group.rank()))


class Counting(nn.BatchNorm1d):
    """A module with state that is no tensor."""

    steps = 3

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


def test_full_states_of_buffers(group: TorchGroup) -> None:
    module = nn.Sequential(Counting(4))
    shard_parameters(module, {"0.weight": ShardSpec([0], [2])}, ranks_of(group))
    state = full_state_dict(module)
    changed = {**state, "0.weight": torch.arange(4.0), "0._extra_state": {"steps": 5}}
    load_full_state_dict(module, changed)
    assert torch.equal(full_state_dict(module)["0.weight"], torch.arange(4.0))
    assert module[0].steps == 5
    for shape in ((1,), ()):
        with pytest.raises(ValueError, match=r"0.running_mean is \[4\]"):
            load_full_state_dict(module, {**state, "0.running_mean": torch.full(shape, 7.0)})
    assert torch.equal(full_state_dict(module)["0.weight"], torch.arange(4.0)), "nothing has been loaded"


def test_addmm_under_autocast(group: TorchGroup) -> None:
    a, b = torch.eye(4), torch.arange(16.0).view(4, 4)
    for x in every_layout(b, group):
        with torch.autocast("cpu", torch.bfloat16):
            result: Any = torch.addmm(torch.ones(4), a, x)
        assert result.dtype is torch.bfloat16
        assert torch.equal(plain(result.redistribute(ReplicaSpec())), b.bfloat16() + 1)
