"""Writes through views of sharded dims land in the shard or are refused, in-place shape operators are refused."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from test_tensor import piece, ranks_of
from test_tensor_rules import layouts_of
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec
from tritoncomm.tensor.distspec import _DistSpec
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.snapshot import is_view

Step = Callable[[Any], Any]


def sharded(full: Tensor, spec: _DistSpec, pg: ProcessGroup) -> ColoTensor:
    return ColoTensor(piece(full, spec, pg.tp_local_rank()).clone(), ColoTensorSpec(pg, spec), full.shape)


def whole(x: Any) -> Tensor:
    """All elements of a tensor, plain, without a graph."""
    return plain(x.detach().redistribute(ReplicaSpec())) if isinstance(x, ColoTensor) else x.detach()


class Draw(random.Random):
    """Views and writes of a case, drawn alike on every rank."""

    def index(self, size: int) -> Any:
        """An integer or a slice of a dim."""
        if size and self.random() < 0.4:
            return self.randrange(-size, size)
        start = self.choice((None, self.randrange(size + 1)))
        return slice(start, self.choice((None, None, self.randrange(size + 2))), self.choice((None, 1, 2, 3)))

    def item(self, shape: tuple[int, ...]) -> Any:
        """A basic index: of all dims or some, with None or Ellipsis now and then."""
        found = [self.index(size) for size in shape[: self.randint(1, len(shape))]]
        if self.random() < 0.2:
            found.insert(self.randrange(len(found) + 1), None)
        if self.random() < 0.2:
            found = [..., *[self.index(size) for size in shape[len(shape) - 1 :]]]
        return found[0] if len(found) == 1 else tuple(found)

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
        found: list[tuple[str, Step]] = [
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
            found += [
                (f"select {dim} {place}", lambda x: x.select(dim, place)),
                (f"unbind {dim} {place}", lambda x: x.unbind(dim)[place]),
                (f"split {dim}", lambda x: x.split(max(size // 2, 1), dim)[-1]),
                (f"as_strided {shape}", lambda x: x.as_strided((1,), (1,)) if 0 not in shape else x),
            ]
            if not dim:
                found.append(("last row", lambda x: list(x)[-1]))
            if size % 2 == 0:
                found.append((f"unflatten {dim}", lambda x: x.unflatten(dim, (2, size // 2))))
        if len(shape) > 1 and dim != other:
            found.append((f"diagonal {dim} {other}", lambda x: x.diagonal(0, dim, other)))
        return self.choice(found + always if self.random() < 0.3 else found)

    def write(self, shape: tuple[int, ...]) -> tuple[str, Callable[[Any, Any], Any]]:
        """A write into a tensor of this shape; the second argument makes a replica of a plain tensor."""
        values = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        part = values[tuple(slice(0, 1) if self.random() < 0.5 else slice(None) for _ in shape)]
        item = self.item(shape) if shape else ...
        found: list[tuple[str, Callable[[Any, Any], Any]]] = [
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
        return self.choice(found)


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
    wanted, view = base, x
    for _, step in chain:
        wanted, view = step(wanted), step(view)
    torch.testing.assert_close(whole(view), wanted, rtol=0, atol=0)
    if 0 in wanted.stride() and not is_view(view):
        return "skipped"  # torch refuses to write into expanded memory, a rank without elements has nothing to refuse
    try:
        write(wanted, lambda tensor: tensor)
        failed = False
    except (RuntimeError, IndexError):
        failed, base = True, full
    try:
        write(view, lambda tensor: ColoTensor(tensor.clone(), ColoTensorSpec(pg)))
    except UnsupportedError:
        torch.testing.assert_close(whole(x), full, rtol=0, atol=0)
        return "refused"
    except (RuntimeError, IndexError):
        assert failed
        torch.testing.assert_close(whole(x), full, rtol=0, atol=0)
        return "failed"
    assert not failed
    torch.testing.assert_close(whole(x), base, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole(view), wanted, rtol=1e-12, atol=1e-12)
    return "landed"


def run_cases(group: TorchGroup, first: int, count: int) -> list[str]:
    pg, ends = ranks_of(group), []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no rule for these shards")
        warnings.filterwarnings("ignore", message="Use of .* on expanded tensors is deprecated")
        for seed in range(first, first + count):
            try:
                ends.append(run_case(seed, pg))
            except Exception as error:
                full, spec, chain, write = case(seed, group.size())
                told = f"{list(full.shape)} {spec}: {[name for name, _ in chain]}, then {write[0]}"
                raise AssertionError(f"seed {seed} on {group.size()} ranks, {told}: {error}") from error
    return ends


WORLDS: list[tuple[Any, int, int]] = [(2, 0, 250), (4, 10_000, 250), ((1, 3), 20_000, 60), (1, 30_000, 40)]


@pytest.mark.parametrize(("world", "first", "count"), WORLDS, ids=["2", "4", "ranks1and3", "1"])
def test_writes_through_views_land_or_are_refused(pool: Pool, world: Any, first: int, count: int) -> None:
    ends = pool.run(run_cases, first, count, world=world)
    assert all(each == ends[0] for each in ends), "ranks disagree"
    assert ends[0].count("landed") > count / 3
