"""Writes through views of sharded dims land in the shard or are refused, in-place shape operators are refused."""

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from operator_cases import layouts_of
from pool import Pool
from shards import ranks_of, shard_of, sharded
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import (
    ColoParameter,
    ColoParamOpHook,
    ColoParamOpHookManager,
    ColoTensor,
    ColoTensorSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)
from tritoncomm.tensor.layout import is_view, plain
from tritoncomm.tensor.rules import views

Step = Callable[[Any], Any]


def full_value(x: Any) -> Tensor:
    """All elements of a tensor, plain, without a graph."""
    return plain(x.detach().redistribute(ReplicaSpec())) if isinstance(x, ColoTensor) else x.detach()


class Draw(random.Random):
    """Views and writes of a case, drawn identically on every rank."""

    def index(self, size: int) -> Any:
        """An integer or a slice of a dim."""
        if size and self.random() < 0.4:
            return self.randrange(-size, size)
        start = self.choice((None, self.randrange(size + 1)))
        return slice(start, self.choice((None, None, self.randrange(size + 2))), self.choice((None, 1, 2, 3)))

    def item(self, shape: tuple[int, ...]) -> Any:
        """A basic index: of all dims or some, with None or Ellipsis now and then."""
        result = [self.index(size) for size in shape[: self.randint(1, len(shape))]]
        if self.random() < 0.2:
            result.insert(self.randrange(len(result) + 1), None)
        if self.random() < 0.2:
            result = [..., *[self.index(size) for size in shape[len(shape) - 1 :]]]
        return result[0] if len(result) == 1 else tuple(result)

    def view(self, shape: tuple[int, ...]) -> tuple[str, Step]:
        """An operator that returns a view of a tensor of this shape, or may."""
        always: list[tuple[str, Step]] = [
            ("unsqueeze", lambda x: x.unsqueeze(0)),
            ("squeeze", lambda x: x.squeeze()),
            ("detach", lambda x: x.detach()),
            ("data", lambda x: x.data if is_view(x) or not isinstance(x, ColoTensor) else x.detach()),
            ("dots", lambda x: x[...]),
            ("flat", lambda x: x.view(-1)),
            ("flatten", lambda x: x.flatten()),
            ("same view", lambda x: x.view(shape)),
            ("view_as", lambda x: x.view_as(torch.empty(shape))),
        ]
        if not shape:
            return self.choice(always)
        dim, other, size = self.randrange(len(shape)), self.randrange(len(shape)), 0
        size = shape[dim]
        item, start = self.item(shape), self.randrange(size + 1)
        length, many = self.randint(0, size - start), self.randint(1, 3)
        order = self.sample(range(len(shape)), len(shape))
        result: list[tuple[str, Step]] = [
            (f"[{item}]", lambda x: x[item]),
            (f"[{item}] ", lambda x: x[item]),
            (f"[{item}]  ", lambda x: x[item]),
            (f"narrow {dim} {start} {length}", lambda x: x.narrow(dim, start, length)),
            (f"chunk {many} {dim}", lambda x: x.chunk(many, dim)[0]),
            (f"tensor_split {many} {dim}", lambda x: x.tensor_split(many, dim)[-1]),
            (f"transpose {dim} {other}", lambda x: x.transpose(dim, other)),
            (f"permute {order}", lambda x: x.permute(order)),
            (f"movedim {dim} {other}", lambda x: x.movedim(dim, other)),
            (f"expand {shape}", lambda x: x.expand(2, *shape)),
            (f"reshape {shape}", lambda x: x.reshape(shape)),
            ("rows", lambda x: x.reshape(-1, shape[-1])),
            ("mT", lambda x: x.mT if x.dim() > 1 else x),
            ("unfold", lambda x: x.unfold(dim, 1, 1)),
        ]
        if size:
            place = self.randrange(size)
            result += [
                (f"select {dim} {place}", lambda x: x.select(dim, place)),
                (f"unbind {dim} {place}", lambda x: x.unbind(dim)[place]),
                (f"split {dim}", lambda x: x.split(max(size // 2, 1), dim)[-1]),
                (f"as_strided {shape}", lambda x: x.as_strided((1,), (1,)) if 0 not in shape else x),
            ]
            if not dim:
                result.append(("last row", lambda x: list(x)[-1]))
            if size % 2 == 0:
                result.append((f"unflatten {dim}", lambda x: x.unflatten(dim, (2, size // 2))))
        if len(shape) > 1 and dim != other:
            result.append((f"diagonal {dim} {other}", lambda x: x.diagonal(0, dim, other)))
        return self.choice(result + always if self.random() < 0.3 else result)

    def write(self, shape: tuple[int, ...]) -> tuple[str, Callable[[Any, Any], Any]]:
        """A write into a tensor of this shape; the second argument makes a replica of a plain tensor."""
        values = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        part = values[tuple(slice(0, 1) if self.random() < 0.5 else slice(None) for _ in shape)]
        item = self.item(shape) if shape else ...
        result: list[tuple[str, Callable[[Any, Any], Any]]] = [
            ("fill_", lambda x, _: x.fill_(-3.0)),
            ("zero_", lambda x, _: x.zero_()),
            ("mul_", lambda x, _: x.mul_(2)),
            ("add_ tensor", lambda x, _: x.add_(values, alpha=2)),
            ("add_ broadcast", lambda x, _: x.add_(part)),
            ("add_ replica", lambda x, replica: x.add_(replica(part))),
            ("mul_ itself", lambda x, _: x.mul_(x)),
            ("copy_", lambda x, _: x.copy_(values)),
            ("copy_ replica", lambda x, replica: x.copy_(replica(values))),
            ("copy_ number", lambda x, _: x.copy_(torch.tensor(5, dtype=torch.int32))),
            ("clamp_", lambda x, _: x.clamp_(max=part)),
            ("masked_fill_", lambda x, _: x.masked_fill_(values % 2 == 0, 7.0)),
            ("addcmul_", lambda x, _: x.addcmul_(values, part, value=0.5)),
            ("relu inplace", lambda x, _: F.relu(x, inplace=True)),
            ("init.constant_", lambda x, _: nn.init.constant_(x, 0.25)),
            ("init.zeros_", lambda x, _: nn.init.zeros_(x)),
            ("iadd", lambda x, _: x.__iadd__(3)),
            (f"set [{item}] number", lambda x, _: x.__setitem__(item, 4.5)),
            (f"set [{item}] tensor", lambda x, _: x.__setitem__(item, values[item] + 1)),
            (f"set [{item}] ones", lambda x, _: x.__setitem__(item, torch.full((1, 1), 6.0))),
            (f"set [{item}] more", lambda x, _: _add_item(x, item)),
            ("foreach", lambda x, _: torch._foreach_add_([x], 1)),
            ("out", lambda x, _: torch.add(values, 1, out=x)),
            ("cumsum_", lambda x, _: x.cumsum_(0)),
            ("index_fill_", lambda x, _: x.index_fill_(0, torch.tensor([0]), 1.0)),
            ("set by mask", lambda x, _: x.__setitem__(values > 1, 0.0)),
            ("set by indices", lambda x, _: x.__setitem__(torch.tensor([0]), 0.0)),
            ("aten", lambda x, _: torch.ops.aten.mul_.Scalar(x, 2)),
            ("view again", lambda x, _: x.unsqueeze(0)[0].add_(1)),
            ("data", lambda x, _: (x if isinstance(x, ColoTensor) and not is_view(x) else x.data).sub_(1)),
        ]
        return self.choice(result)


def _add_item(x: Any, item: Any) -> None:
    x[item] += 2.0


def case(seed: int, world: int) -> tuple[Tensor, Any, list[tuple[str, Step]], tuple[str, Callable[[Any, Any], Any]]]:
    """A tensor, a layout, a chain of views of it and a write through the last."""
    draw = Draw(seed)
    shape = tuple(draw.choice((1, 2, 3, 4, 5, 8)) for _ in range(draw.randint(1, 4)))
    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    layouts = [spec for spec in layouts_of(shape, world) if spec is not None and spec != ReplicaSpec()]
    chain: list[tuple[str, Step]] = []
    view = full
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        step = draw.view(tuple(view.shape))
        try:
            view = step[1](view)
        except RuntimeError:
            continue  # not a view of these strides
        chain.append(step)
    return full, draw.choice(layouts), chain, draw.write(tuple(view.shape))


def run_case(seed: int, pg: ProcessGroup) -> str:
    """How the write ended: landed, refused, failed where torch raises too, or skipped.

    Checks the base against plain torch, and the view's own value where the write landed.
    """
    full, spec, chain, (_, write) = case(seed, pg.tp_world_size())
    base, x = full.clone(), sharded(full, spec, pg)
    expected, view = base, x
    for _, step in chain:
        expected, view = step(expected), step(view)
    torch.testing.assert_close(full_value(view), expected, rtol=0, atol=0)
    if 0 in expected.stride() and not is_view(view):
        return "skipped"  # torch refuses to write into expanded memory, a rank without elements has nothing to refuse
    try:
        write(expected, lambda tensor: tensor)
        failed = False
    except (RuntimeError, IndexError):
        failed, base = True, full
    try:
        write(view, lambda tensor: ColoTensor(tensor.clone(), ColoTensorSpec(pg)))
    except UnsupportedError:
        torch.testing.assert_close(full_value(x), full, rtol=0, atol=0)
        return "refused"
    except (RuntimeError, IndexError):
        assert failed
        torch.testing.assert_close(full_value(x), full, rtol=0, atol=0)
        return "failed"
    assert not failed
    torch.testing.assert_close(full_value(x), base, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(full_value(view), expected, rtol=1e-12, atol=1e-12)
    return "landed"


def run_cases(group: TorchGroup, first: int, count: int) -> list[str]:
    pg, ends = ranks_of(group), []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no rule for these shards")
        warnings.filterwarnings("ignore", message="Use of .* on expanded tensors is deprecated")
        for seed in range(first, first + count):
            torch.manual_seed(seed)
            try:
                ends.append(run_case(seed, pg))
            except Exception as error:
                full, spec, chain, write = case(seed, group.size())
                context = f"{list(full.shape)} {spec}: {[name for name, _ in chain]}, then {write[0]}"
                raise AssertionError(f"seed {seed} on {group.size()} ranks, {context}: {error}") from error
    return ends


@pytest.mark.parametrize(
    ("world", "first", "count"),
    [
        pytest.param(2, 0, 120, id="2"),
        pytest.param(4, 10_000, 80, id="4", marks=pytest.mark.slow),
        pytest.param((1, 3), 20_000, 30, id="ranks1and3"),
        pytest.param(1, 30_000, 30, id="1"),
    ],
)
def test_writes_through_views_land_or_are_refused(pool: Pool, world: Any, first: int, count: int) -> None:
    check_ends(pool.run(run_cases, first, count, world=world))


def check_ends(ends: list[list[str]]) -> None:
    """Every rank has the same outcome, and enough writes succeed."""
    assert all(each == ends[0] for each in ends)
    assert ends[0].count("landed") > len(ends[0]) / 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4])
def test_many_writes_through_views(pool: Pool, world: int) -> None:
    check_ends(pool.run(run_cases, 10**6 * world, 4000, world=world, timeout=550))


# Beside the writes that are drawn.
LANDS: dict[str, Step] = {
    "iteration": lambda x: [row.add_(1) for row in x],
    "detached": lambda x: x.detach()[0].fill_(8),
    "view of a view": lambda x: x[1:][::2].detach().data[1, 1:3].fill_(8),
    "itself": lambda x: x[1:3].mul_(x[1:3]),
    "the same memory": lambda x: _twice(x[1:3]),
    "copied": lambda x: copy.copy(x[1]).mul_(5),
    "numpy's integer": lambda x: _add_item(x, np.int64(1)),
    "a tensor's integer": lambda x: _add_item(x, torch.tensor(1)),
    "a tensor's integer in any dim": lambda x: _add_item(x, (slice(None), torch.tensor(1))),
    "augmented": lambda x: _add_item(x, 2),
    "augmented slice": lambda x: _add_item(x, (slice(1, None, 3), 1)),
    "parameter": lambda x: _descend(nn.Parameter(x[3])),
    "item by a mask of rows": lambda x: x.__setitem__(torch.arange(5) > 2, 3),
    "item by a mask": lambda x: x.__setitem__(x > 2, 3),
    "item by a mask of a column": lambda x: x.__setitem__((x[:, 1] > 4,), 3),
    "item by a plain mask": lambda x: x.__setitem__(torch.arange(20).view(5, 4) % 3 > 1, 2.5),
    "item by mask": lambda x: x[1].__setitem__(torch.tensor([True, False, True, False]), 3),
}
REFUSED: dict[str, Step] = {
    "diagonal": lambda x: x.diagonal().zero_(),
    "all, flat": lambda x: x.view(-1).zero_(),
    "flattened": lambda x: x.flatten()[0:2].zero_(),
    "as_strided": lambda x: x.as_strided((2,), (1,)).zero_(),
    "another dtype": lambda x: x[0].view(torch.int32).zero_(),
    "foreach": lambda x: torch._foreach_mul_([x[0], x[1]], 2),
    "fused": lambda x: torch._fused_sgd_(
        [x[0]], [x[1]], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False, maximize=False,
        is_first_step=False,
    ),
    "out": lambda x: torch.add(x[0], 1, out=x[1]),
    "several out": lambda x: torch.max(x[:4], 0, out=(x[0], torch.empty(4, dtype=torch.int64))),
    "eye_": lambda x: nn.init.eye_(x[:4]),
    "cumsum_": lambda x: x[1].cumsum_(0),
    "indices": lambda x: x[1].index_fill_(0, torch.tensor([1]), 3),
    "items by indices": lambda x: x.__setitem__(torch.tensor([1]), 3),
    "items by a list": lambda x: x.__setitem__([1, 2], 3),
    "more items": lambda x: _add_item(x, [1, 2]),
    "dropout": lambda x: F.dropout(x[1], inplace=True),
    "running mean": lambda x: F.batch_norm(x, x[1], torch.ones(4), training=True),
    "below autograd": lambda x: torch.ops.aten.add_.Scalar(x[1], 3),
    "other memory": lambda x: setattr(x[1], "data", torch.zeros(4)),
    "memory of a view": lambda x: setattr(ColoTensor(torch.zeros(4), ColoTensorSpec(x.process_group)), "data", x[1]),
    "in place transpose": lambda x: x[:2].t_(),
}  # fmt: skip


def _twice(x: Any) -> None:
    x[0].add_(x[0]).mul_(x.detach()[0])


def _descend(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(4)
    with torch.no_grad():  # as an optimiser does it
        parameter.add_(parameter.grad, alpha=-0.5)


def refusal(write: Step, x: Any) -> str:
    """Why a write is refused; nothing where it is not."""
    try:
        write(x)
    except UnsupportedError as error:
        return str(error)
    return ""


def check_examples(pg: ProcessGroup) -> None:
    """Writes that land, then writes that are refused and change nothing."""
    spec, full = ShardSpec([0], [pg.tp_world_size()]), torch.arange(20.0).view(5, 4)
    torch.manual_seed(1)
    for name, write in LANDS.items():
        x, expected = sharded(full, spec, pg), full.clone()
        write(x)
        write(expected)
        assert torch.equal(full_value(x), expected), name
    for name, write in REFUSED.items():
        x = sharded(full, spec, pg)
        assert refusal(write, x), name
        assert torch.equal(full_value(x), full), name


@pytest.mark.ranks(2, 4)
def test_writes_by_name(group: TorchGroup) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no rule for these shards")
        check_examples(ranks_of(group))


@pytest.mark.ranks(2, 4)
def test_the_padding_row_of_an_embedding_is_zero(group: TorchGroup) -> None:
    pg, spec = ranks_of(group), ShardSpec([0], [group.size()])
    for padding in (0, 4, 6):
        torch.manual_seed(1)
        module = nn.Embedding(7, 3, padding_idx=padding)
        held = module.weight.detach().clone()
        parameter = ColoParameter(held.clone(), True, ColoTensorSpec(pg))
        parameter.set_dist_spec(spec)
        module.weight = parameter
        module.reset_parameters()
        table = full_value(module.weight)
        assert not table[padding].any()
        assert table.ne(held).any(1).sum() == 6
        assert module.weight.requires_grad
        assert not module(torch.tensor([padding])).any()


@pytest.mark.ranks(4)
def test_random_fills_of_a_view_land(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.zeros(5, 4)
    x = sharded(full, ShardSpec([0], [group.size()]), pg)
    torch.manual_seed(3)
    rows = [x[0], x[3:5]]
    nn.init.normal_(rows[0])
    rows[1].uniform_(1, 2)
    for row, index in zip(rows, (0, slice(3, 5)), strict=True):
        assert full_value(row).ne(0).all()
        assert torch.equal(full_value(x)[index], full_value(row))
    assert not full_value(x)[1:3].any()


@pytest.mark.ranks(2, 4)
def test_gradients_of_a_write_are_refused(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.arange(1.0, 21.0).view(5, 4)
    spec, ones = ShardSpec([0], [group.size()]), torch.ones(4, requires_grad=True)
    leaf = sharded(full, spec, pg).requires_grad_()
    middle = leaf * 2
    plain_rows = sharded(full, spec, pg)
    for write in (
        lambda: leaf[0].fill_(1), lambda: middle[0].mul_(2), lambda: middle[1:].detach().requires_grad_().mul_(2),
        lambda: plain_rows[0].copy_(ones), lambda: plain_rows.__setitem__(0, ones), lambda: _add_item(middle, 0),
        lambda: leaf[0].normal_(), lambda: middle.__setitem__(slice(1, 3), 1),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match="has no gradient"):
            write()
    for x, expected in ((leaf, full), (middle, full * 2), (plain_rows, full)):
        assert torch.equal(full_value(x), expected)
    assert torch.equal(full_value(middle[1]), full[1] * 2)
    with torch.no_grad():
        leaf[0].fill_(9)
        leaf[1:3] = torch.zeros(4)
    changed = torch.cat([torch.full((1, 4), 9.0), torch.zeros(2, 4), full[3:]])
    assert torch.equal(full_value(leaf), changed)
    assert leaf.is_leaf
    assert leaf.requires_grad
    (leaf[0] * leaf[4]).sum().backward()
    expected = changed.clone().requires_grad_()
    (expected[0] * expected[4]).sum().backward()
    assert torch.equal(leaf.grad, shard_of(expected.grad, spec, pg.tp_local_rank()))


@pytest.mark.ranks(4)
def test_every_rank_counts_a_write(group: TorchGroup) -> None:
    torch.manual_seed(0)
    pg, full = ranks_of(group), torch.arange(1.0, 21.0).view(5, 4)
    for write in (lambda x: x[0].mul_(2), lambda x: x.__setitem__(0, 2.0), lambda x: x[0, 1].normal_()):
        x = sharded(full, ShardSpec([0], [group.size()]), pg).requires_grad_()
        y = x.exp()
        with torch.no_grad():
            write(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()  # on every rank, or one would wait for the others


def test_writes_in_inference_mode(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.arange(20.0).view(5, 4)
    spec = ShardSpec([0], [group.size()])
    outside = sharded(full, spec, pg)
    with torch.inference_mode():
        inside = sharded(full, spec, pg)
        for x in (inside, outside):
            x[0].fill_(3)
            x[1] += 2
        views = outside[2], inside[2]
    expected = full.clone()
    expected[0], expected[1] = 3, full[1] + 2
    assert torch.equal(full_value(inside), expected)
    assert torch.equal(full_value(outside), expected)
    with pytest.raises(UnsupportedError, match="inference mode"):
        views[1].fill_(4)
    assert torch.equal(full_value(inside), expected)
    views[0].fill_(4)
    expected[2] = 4
    assert torch.equal(full_value(outside), expected)


def test_a_view_is_a_snapshot_of_its_shard(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.arange(20.0).view(5, 4)
    spec = ShardSpec([0], [group.size()])
    x = sharded(full, spec, pg)
    first, second, both = x[0], x[0], x[0:2]
    first.fill_(5)
    assert torch.equal(full_value(second), full[0]), "a view is a snapshot"
    second.add_(1)  # reads the shard, not what the view shows
    assert full_value(x)[0].eq(6).all()
    both[1].zero_()
    assert not full_value(both)[1].any(), "views of one snapshot share its memory"
    assert first._base is x
    assert both[1]._base is x
    assert not x[0].numpy().flags.writeable
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="numpy has no rule for these shards")
        assert not x.numpy().flags.writeable
    copied = copy.deepcopy(both), pickle.loads(pickle.dumps(both)), both.clone(), both * 1, both.redistribute(spec)
    for other in copied:
        assert type(other) is ColoTensor
        other.zero_()
    assert full_value(x)[0].eq(6).all()
    replica = both.to_replicate()
    replica.fill_(4)
    assert full_value(x)[:2].eq(4).all()
    for share in (
        lambda: ColoTensor(both, ColoTensorSpec(pg)), lambda: ColoParameter(both), lambda: both.set_dist_spec(spec),
        lambda: ColoTensor.from_torch_tensor(both), lambda: ColoParameter.from_torch_tensor(both), both.to_dtensor,
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match="whose memory is a copy"):
            share()
    for change in (lambda y: y.set_dist_spec(ReplicaSpec()), lambda y: setattr(y, "data", torch.zeros_like(plain(y)))):
        x = sharded(full, spec, pg)
        view = x[0]
        change(x)
        with pytest.raises(UnsupportedError, match="other memory"):
            view.fill_(1)
        assert not full_value(x)[0].eq(1).all()


class Quiet(ColoParamOpHook):
    """A hook that does nothing."""

    def pre_forward(self, params: list[Tensor]) -> None: ...

    def post_forward(self, params: list[Tensor]) -> None: ...

    def pre_backward(self, params: list[Tensor]) -> None: ...

    def post_backward(self, params: list[Tensor]) -> None: ...


def test_writes_between_hooks(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.arange(20.0).view(5, 4)
    x = ColoParameter(full.clone(), True, ColoTensorSpec(pg))
    x.set_dist_spec(ShardSpec([0], [group.size()]))
    with ColoParamOpHookManager.use_hooks(Quiet()):
        recorded = x[4]
        with torch.no_grad():
            x[0].zero_()
            recorded.zero_()
            x[1].copy_(x[3])
            with pytest.raises(UnsupportedError):
                torch.add(x[3], 1, out=x[2])
    full[0], full[4], full[1] = 0, 0, full[3]
    assert torch.equal(full_value(x), full)


@pytest.mark.ranks(2, 4)
def test_a_shard_of_one_row_copies_where_the_whole_would(group: TorchGroup) -> None:
    pg = ranks_of(group)
    cases: list[tuple[tuple[int, ...], int, Step]] = [
        ((4, 3, 5), 1, lambda x: x.permute(0, 2, 1).reshape(-1, 3)),
        ((8, group.size(), 3), 1, lambda x: x.movedim(1, 0).flatten()),
        ((group.size(), 6), 0, lambda x: x.reshape(-1)),
        ((3, group.size(), 2), 1, lambda x: x.reshape(3, -1)),
    ]
    for shape, dim, reshape in cases:
        full = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x, expected = sharded(full, ShardSpec([dim], [group.size()]), pg), full.clone()
        reshape(expected).zero_()
        reshape(x).zero_()
        assert torch.equal(full_value(x), expected), shape
    x = sharded(torch.ones(8, 6), ShardSpec([0], [group.size()]), pg)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x[:, 1:5].view(32)


RESHAPES: dict[str, Step] = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ dim": lambda x: x.squeeze_(0),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "resize_": lambda x: x.resize_(2, 2),
    "resize_as_": lambda x: x.resize_as_(torch.zeros(3)),
    "torch.resize_as_": lambda x: torch.resize_as_(x, torch.zeros(3)),
    "set_": lambda x: x.set_(torch.zeros(6, 4)),
    "set_ nothing": lambda x: x.set_(),
    "as_strided_": lambda x: x.as_strided_((2,), (1,)),
    "torch.as_strided_": lambda x: torch.as_strided_(x, (2,), (1,)),
    "aten.t_": lambda x: torch.ops.aten.t_(x),
    "aten.squeeze_.default": lambda x: torch.ops.aten.squeeze_.default(x),
    "out of add": lambda x: torch.add(torch.ones(3), 1, out=x),
    "out of mul": lambda x: torch.mul(torch.ones(1, 6, 4), 1, out=x),
    "out of more": lambda x: torch.mul(x, torch.ones(1, 1, 1), out=x),
    "out of less": lambda x: torch.exp(torch.ones(4), out=x),
    "out of matmul": lambda x: torch.matmul(torch.ones(2, 3), torch.ones(3, 2), out=x),
    "out of sum": lambda x: torch.sum(torch.ones(2, 3), 0, out=x),
    "out of zeros": lambda x: torch.zeros(3, 3, out=x),
    "data": lambda x: setattr(x, "data", torch.zeros(3)),
    "data transposed": lambda x: setattr(x, "data", torch.zeros(plain(x).t().shape)),
}


@pytest.mark.ranks(1, 2)
def test_shapes_are_not_changed_in_place(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.arange(24.0).view(6, 4)
    world = group.size()
    for spec in (ReplicaSpec(), ShardSpec([0], [world]), ShardSpec([-1], [world])):
        for kind in (ColoTensor, ColoParameter):
            x: Any = sharded(full, spec, pg)
            if kind is ColoParameter:
                x = ColoParameter(plain(x), False, ColoTensorSpec(pg, spec))
            local = plain(x).shape
            for name, reshape in RESHAPES.items():
                context = refusal(reshape, x)
                assert context, (name, spec)
                operator = name.removeprefix("out of ").removeprefix("torch.").removeprefix("aten.")
                if operator not in ("less", "more"):
                    assert context.startswith(operator.split(".")[0].split()[0])
                assert (tuple(x.size()), x.shape, plain(x).shape) == ((6, 4), local, local), name
                assert torch.equal(full_value(x), full), name


def test_outputs_that_fit_are_written(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.arange(32.0).view(8, 4)
    for spec in (ReplicaSpec(), ShardSpec([0], [group.size()])):
        x = sharded(full, spec, pg)
        assert torch.add(x, torch.arange(4.0), out=x) is x
        assert torch.equal(full_value(x), full + torch.arange(4.0))
        x.data = plain(x) * 2
        assert torch.equal(full_value(x), (full + torch.arange(4.0)) * 2)
        assert isinstance(x, ColoTensor)
    x, index = ColoTensor(torch.zeros(4), ColoTensorSpec(pg)), ColoTensor(torch.zeros(4).long(), ColoTensorSpec(pg))
    made = torch.max(full, 0, out=(x, index))
    assert made[0] is x
    assert made[1] is index
    assert torch.equal(plain(x), full[7])
    assert plain(index).eq(7).all()
    assert torch.matmul(torch.ones(1, 8), full, out=ColoTensor(torch.zeros(1, 4), ColoTensorSpec(pg))).size() == (1, 4)
    with pytest.raises(UnsupportedError, match="cannot be resized"):
        torch.max(full, 0, out=(x, ColoTensor(torch.zeros(3).long(), ColoTensorSpec(pg))))
    assert torch.equal(plain(x), full[7])
    with pytest.raises(RuntimeError, match=r"dtype|cast"):
        torch.matmul(torch.ones(1, 8), full, out=ColoTensor(torch.zeros(1, 4).int(), ColoTensorSpec(pg)))


def test_a_copy_that_a_local_size_hides_is_seen_with_fake_tensors() -> None:
    """Their views raise a ValueError where those of other tensors raise a RuntimeError."""
    column, turned = ((4, 1), (1, 1), (4,), ((1, 0),)), ((4, 1), (1, 4), (4,), ((1, 0),))
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            assert not views._hides_copy.__wrapped__(*column)
            assert views._hides_copy.__wrapped__(*turned)
