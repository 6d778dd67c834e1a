"""NaN, ties, empty shapes and second derivatives of operators on shards, as torch has them."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shards import ranks_of, sharded
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import ReplicaSpec, ShardSpec

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "norm 1": lambda x: x.norm(1),
    "norm 2": lambda x: x.norm(2),
    "norm inf": lambda x: x.norm(math.inf),
    "norm 1 of rows": lambda x: x.norm(1, 1),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "amax of columns": lambda x: x.amax(0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of columns": lambda x: x.max(0)[0],
}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_beside_nan(group: TorchGroup, name: str) -> None:
    nan = math.nan
    for rows in (
        [[1.0, nan, 0.0, 2.0], [3.0, 3.0, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-3.0, 4.0, 3.0, 4.0]],
        [[nan, nan, 1.0, 2.0], [1.0, nan, 5.0, 5.0], [0.0, -2.0, nan, 1.0], [7.0, 7.0, 2.0, 7.0]],
        [[1.0, 7.0, 7.0, 2.0], [3.0, 3.0, -9.0, 0.0], [7.0, 0.0, -9.0, 0.0], [-3.0, 4.0, 3.0, 7.0]],
    ):
        full = torch.tensor(rows, requires_grad=True)
        expected = NUMBERS[name](full)
        expected.sum().backward()
        for spec in (ReplicaSpec(), ShardSpec([0], [group.size()]), ShardSpec([-1], [group.size()])):
            x = sharded(full.detach(), spec, ranks_of(group)).requires_grad_()
            out = NUMBERS[name](x)
            torch.testing.assert_close(whole(out), expected.detach(), equal_nan=True)
            out.sum().backward()
            torch.testing.assert_close(whole(x.grad), full.grad, equal_nan=True, msg=f"{rows} {spec}")


def whole(x: Any) -> Tensor:
    return x.detach().redistribute(ReplicaSpec()).as_subclass(Tensor) if hasattr(x, "redistribute") else x


EMPTY: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "unbind": ((0, 3), lambda x: x.unbind(0)),
    "list": ((0, 3), list),
    "unbind of columns": ((3, 0), lambda x: x.unbind(1)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", EMPTY)
def test_no_results(group: TorchGroup, name: str) -> None:
    shape, call = EMPTY[name]
    for dim in (0, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replicas run it
            assert len(call(sharded(torch.ones(shape), ShardSpec([dim], [2]), ranks_of(group)))) == 0


@pytest.mark.ranks(2)
def test_losses_without_numbers(group: TorchGroup) -> None:
    """Cross entropy without classes is NaN; soft targets keep the dtype; integers are refused, as torch does."""
    pg, specs = ranks_of(group), [ShardSpec([dim], [2]) for dim in (0, 1)]
    warnings.simplefilter("ignore")  # replicas run what has no rule
    for spec in specs:
        logits, targets = (sharded(torch.ones(3, 0), spec, pg) for _ in range(2))
        assert whole(F.cross_entropy(logits, targets)).isnan().all()
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            full, soft = torch.randn(4, 6).to(dtype), torch.randn(4, 6).softmax(1).to(dtype)
            torch.distributed.broadcast(full, 0, group=group)
            torch.distributed.broadcast(soft, 0, group=group)
            for reduction in ("mean", "sum", "none"):
                expected = F.cross_entropy(full, soft, reduction=reduction)
                loss = F.cross_entropy(sharded(full, spec, pg), sharded(soft, spec, pg), reduction=reduction)
                torch.testing.assert_close(whole(loss), expected)
        for call in (
            lambda x: x.softmax(1),
            lambda x: x.log_softmax(0),
            lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64)),
        ):
            with pytest.raises((NotImplementedError, RuntimeError)):
                call(sharded(torch.ones(4, 6, dtype=torch.int64), spec, pg))
        with pytest.raises((NotImplementedError, RuntimeError)):
            sharded(torch.ones(4, 6, dtype=torch.bool), spec, pg).argmax(0)
        torch.testing.assert_close(
            whole(sharded(torch.ones(4, 6, dtype=torch.int64), spec, pg).softmax(1, dtype=torch.float32)),
            torch.full((4, 6), 1 / 6),
        )


SECOND: dict[str, Callable[..., Any]] = {
    "linear": lambda x, w, b: (F.linear(x, w, b) ** 2).sum(),
    "addmm": lambda x, w, b: (torch.addmm(b, x, w.t()) ** 2).sum(),
}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", SECOND)
def test_second_gradients(group: TorchGroup, name: str) -> None:
    """Of a product with a bias, in every layout of the operands: the bias is added on one rank."""
    made = torch.Generator().manual_seed(5)
    full = [torch.randn(*shape, generator=made, dtype=torch.float64) for shape in ((4, 8), (4, 8), (4,))]

    def second(leaves: list[Any]) -> list[Tensor]:
        grads = torch.autograd.grad(SECOND[name](*leaves), leaves, create_graph=True)
        sum((grad**2).sum() for grad in grads).backward()
        return [whole(leaf.grad) for leaf in leaves]

    expected = second([x.clone().requires_grad_() for x in full])
    for dims in ((1, 1, None), (None, 0, None), (None, 0, 0), (0, None, None), (1, 1, 0)):
        specs = [ReplicaSpec() if dim is None else ShardSpec([dim], [group.size()]) for dim in dims]
        leaves = [sharded(x, spec, ranks_of(group)).requires_grad_() for x, spec in zip(full, specs, strict=True)]
        for mine, wanted in zip(second(leaves), expected, strict=True):
            torch.testing.assert_close(mine, wanted, msg=str(dims))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_gradients_that_are_missing(group: TorchGroup, reduction: str) -> None:
    """They raise, also where the incoming gradient is a constant."""
    x = sharded(torch.ones(4, 6), ShardSpec([1], [2]), ranks_of(group)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3])
    for loss in (F.cross_entropy(x, targets, reduction=reduction).sum(), x.amax(1).sum(), x.norm(math.inf)):
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(UnsupportedError, match="no derivative"):
            (grad**2).sum().backward()
    (grad,) = torch.autograd.grad(F.cross_entropy(x, targets), x)
    assert not grad.requires_grad
