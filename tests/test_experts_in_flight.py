"""Experts whose exchanges run beside other work: order of messages, gradients, and handles that nobody waits for."""

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bits import bits
from experts_twin import Routing, apply, apply_apart, draw_of
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tritoncomm
from tritoncomm import ArgumentError, MismatchError, p2p, record
from tritoncomm.core import backend
from tritoncomm.experts import Dispatched, RowsHandle, combine, dispatch, route

SECOND_IS_IDLE = (5, 0, 3, 4)


def routing_of(world: int, dtype: str = "float32", k: int = 3) -> Routing:
    return Routing(SECOND_IS_IDLE[:world], 16, k, 2, "even", dtype, "float32", 1, "torch", "eager", 1)


class Noted(Function):
    """The identity, which notes when its forward and its backward run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], name: str) -> Tensor:
        ctx.events, ctx.name = events, name
        events.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.events.append(f"{ctx.name}.backward")
        return grads[0], None, None


class Waited:
    """A work that notes its wait."""

    def __init__(self, work: Any, events: list[str], name: str) -> None:
        self.work, self.events, self.name = work, events, name

    def wait(self) -> None:
        self.events.append(f"wait {self.name}")
        self.work.wait()


def noting(events: list[str]) -> Any:
    """Note the start and the wait of every exchange of rows."""
    start = backend.all_to_all

    def started(out: Tensor, x: Tensor, *arguments: Any) -> Any:
        work, name = start(out, x, *arguments), arguments[3]
        if x.dtype is torch.int64:
            return work
        events.append(f"start {name}")
        return Waited(work, events, name)

    return mock.patch.object(backend, "all_to_all", started)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("frozen", ["nothing", "shared expert", "tokens", "weights"])
def test_what_runs_between_start_and_wait(group: ProcessGroup, frozen: str) -> None:
    """In backward the exchange of gradients is started by the wait of forward, on ranks without tokens, too."""
    drawn = draw_of(routing_of(group.size()), group.rank())
    x, weights = (drawn.x.clone().requires_grad_(frozen != "tokens"), drawn.weights.requires_grad_(frozen != "weights"))
    events: list[str] = []
    factor = torch.tensor(2.0, requires_grad=frozen != "shared expert")
    with noting(events):
        started = dispatch(x, drawn.ids, weights, 2 * group.size(), group, async_op=True)
        shared = Noted.apply(x * factor, events, "shared")
        dispatched = started.wait()
        results = dispatched.summed(dispatched.by_expert().rows * 3)
        back = combine(results, dispatched, async_op=True)
        head = Noted.apply(shared, events, "head")
        (back.wait() + head).sum().backward()
    forward = ["start dispatch", "shared", "wait dispatch", "start combine", "head", "wait combine"]
    backward = [
        "start combine.backward", "head.backward", "wait combine.backward",
        "start dispatch.backward", "shared.backward", "wait dispatch.backward",
    ]  # fmt: skip
    assert events == forward + backward


def gradients(out: Tensor, inputs: list[Tensor], again: bool = False) -> list[Tensor]:
    return [bits(x) for x in torch.autograd.grad(out.float().square().sum(), inputs, retain_graph=again)]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_more_than_once_and_in_anomaly_mode(group: ProcessGroup, dtype: str) -> None:
    routing, rank = routing_of(group.size(), dtype), group.rank()
    drawn = draw_of(routing, rank)
    half = drawn.scales[rank * 2 : rank * 2 + 2]

    def inputs() -> list[Tensor]:
        return [x.clone().requires_grad_() for x in (drawn.x, drawn.weights, half)]

    def layer(form: Any, given: list[Tensor]) -> Tensor:
        return form(given[0], drawn.ids, *given[1:], routing, group)

    plain = inputs()
    wanted = gradients(layer(apply, plain), plain)
    for anomaly in (False, True):
        given = inputs()
        with torch.autograd.set_detect_anomaly(anomaly, check_nan=True):
            out = layer(apply_apart, given)
            for again in (True, True, False):
                results = gradients(out, given, again)
                assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    # Two backward passes of a parameter add up, as hooks of every tensor of the layer run.
    given, seen = inputs(), []
    for x in given:
        x.register_hook(lambda grad: seen.append(grad.isfinite().all()))
    out = layer(apply_apart, given)
    out.register_hook(lambda grad: seen.append(grad.isfinite().all()))
    out.float().square().sum().backward(retain_graph=True)
    out.float().square().sum().backward()
    assert len(seen) == 8
    assert all(seen)
    for x, grad in zip(given, wanted, strict=True):
        assert x.grad is not None
        single = grad.view(x.dtype) if grad.dtype is not x.dtype else grad
        assert torch.equal(x.grad, single + single)


@pytest.mark.ranks(2)
def test_gradients_of_gradients(group: ProcessGroup) -> None:
    routing, rank = routing_of(2, "float64"), group.rank()
    drawn = draw_of(routing, rank)
    half = drawn.scales[rank * 2 : rank * 2 + 2]

    def second(form: Any) -> list[Tensor]:
        x, weights = drawn.x.clone().requires_grad_(), drawn.weights.double().requires_grad_()
        out = form(x, drawn.ids, weights, half, routing, group)
        cubes, squares = (torch.autograd.grad(y.sum(), (x, weights), create_graph=True) for y in (out**3, out**2))
        total = (cubes[0] * squares[0]).sum() + (cubes[1] * squares[1]).sum()
        return list(torch.autograd.grad(total, (x, weights)))

    for ours, plain in zip(second(apply_apart), second(apply), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2)
def test_grad_mode_is_that_of_the_start(group: ProcessGroup) -> None:
    drawn = draw_of(routing_of(2), group.rank())
    x = drawn.x.clone().requires_grad_()
    for at_start in (True, False):
        with torch.set_grad_enabled(at_start):
            started = dispatch(x, drawn.ids, drawn.weights, 4, group, async_op=True)
        with torch.set_grad_enabled(not at_start):
            assert started.wait().rows.requires_grad is at_start
            assert started.wait() is started.wait()
    with torch.inference_mode():
        dispatched = dispatch(x, drawn.ids, drawn.weights, 4, group, async_op=True).wait()
        assert combine(dispatched.rows, dispatched, async_op=True).wait().shape == x.shape


@pytest.mark.ranks(2)
def test_handles_that_nobody_waits_for(group: ProcessGroup) -> None:
    """Dropped in forward, or by an exception in backward: the next layer is right."""
    routing, rank = routing_of(2), group.rank()
    drawn = draw_of(routing, rank)
    half, x = drawn.scales[rank * 2 : rank * 2 + 2], drawn.x.clone().requires_grad_()

    def layer(form: Callable[..., Tensor]) -> list[Tensor]:
        out = form(x, drawn.ids, drawn.weights, half, routing, group)
        return [out.detach(), *torch.autograd.grad(out.sum(), x)]

    wanted = layer(apply)
    started = dispatch(x, drawn.ids, drawn.weights, 4, group, async_op=True)
    del started
    dispatched = dispatch(x, drawn.ids, drawn.weights, 4, group)
    combine(dispatched.rows, dispatched, async_op=True)
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip(layer(apply_apart), wanted, strict=True))

    # In backward: the gradients are under way, and the node that would wait for them does not run.
    def fails(grad: Tensor) -> None:
        raise ZeroDivisionError

    started = dispatch(x, drawn.ids, drawn.weights, 4, group, async_op=True)
    shared = Noted.apply(x * 2, [], "shared")
    dispatched = started.wait()
    out = combine(dispatched.rows, dispatched) + shared
    shared.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(layer(apply_apart), wanted, strict=True))
    del out, started, dispatched
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip(layer(apply_apart), wanted, strict=True))


@pytest.mark.ranks(1, 2)
def test_tensors_that_change_before_the_wait(group: ProcessGroup) -> None:
    """Over several ranks the tokens have been copied; rows of a combine are sent as they are, or have been copied."""
    world = group.size()
    x, ids, weights = torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    given = [x.clone(), ids.clone(), weights.clone()]
    started = dispatch(*given, 2 * world, group, async_op=True)
    for tensor in given:
        tensor += 1
    if world == 1:
        with pytest.raises(ArgumentError, match="have changed in place since; over one rank"):
            _ = started.wait().rows
    else:
        dispatched = started.wait()
        assert torch.equal(dispatched.rows, torch.ones(len(dispatched.rows), 16))
        assert torch.equal(dispatched.weights, torch.ones(len(dispatched.rows), 2))
    dispatched = dispatch(x, ids, weights, 2 * world, group)
    y = dispatched.rows * 2
    back = combine(y, dispatched, async_op=True)
    y += 1
    if world > 1:
        for _ in range(2):
            with pytest.raises(ArgumentError, match=r"combine: the rows have changed in place before wait\(\)"):
                back.wait()
        # A part of a storage has the version of the whole, and is copied.
        whole = torch.cat([dispatched.rows * 2, torch.ones(1, 16)])
        back = combine(whole[:-1], dispatched, async_op=True)
        whole += 1
        assert torch.equal(back.wait(), 2 * x)


@pytest.mark.ranks(3)
def test_check_mode_names_the_rank_and_the_call(group: ProcessGroup) -> None:
    last = group.rank() == 2
    x, ids = torch.zeros(2, 8 + 8 * last), torch.zeros(2, 1, dtype=torch.int64)
    with p2p.check():
        with pytest.raises(MismatchError, match="differ in shape"):
            dispatch(x, ids, torch.ones(2, 1), 3, group, async_op=True)
        with pytest.raises(MismatchError, match="differ in experts"):
            route(ids, 3 + 3 * last, group)
        with pytest.raises(MismatchError, match="differ in function"):
            _ = route(ids, 3, group) if last else dispatch(x, ids, torch.ones(2, 1), 3, group, async_op=True)


@pytest.mark.ranks(2)
def test_a_route_is_used_twice(group: ProcessGroup) -> None:
    """Its ids are a copy, and only rows are sent."""
    drawn = draw_of(routing_of(2), group.rank())
    ids = drawn.ids.to(torch.int32, copy=True)
    routed = route(ids, 4, group)
    ids.fill_(-1)
    wanted = dispatch(drawn.x, drawn.ids, drawn.weights, 4, group)
    with record.recording() as counted:
        for form in (False, True):
            result = routed.dispatch(drawn.x, drawn.weights, form)
            dispatched = result.wait() if isinstance(result, RowsHandle) else result
            assert isinstance(dispatched, Dispatched)
            assert torch.equal(dispatched.rows, wanted.rows)
            assert torch.equal(dispatched.experts, wanted.experts)
    assert {name for name, _ in counted} == {"dispatch"}
    with pytest.raises(tritoncomm.ShapeError, match="expected x"):
        routed.dispatch(torch.zeros(9, 16), torch.zeros(9, 3))
    with pytest.raises(tritoncomm.ShapeError, match="from 0 to 3; rank 0 has"):
        route(ids - 3 + 3 * group.rank() if len(ids) else ids, 4, group)
    with pytest.raises(ArgumentError, match="int64 or int32"):
        route(drawn.weights, 4, group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("routed", [False, True])
def test_waits_and_messages_of_a_checkpointed_layer(group: ProcessGroup, routed: bool) -> None:
    drawn = draw_of(routing_of(2), group.rank())
    x, calls, waits, cpu = drawn.x.clone().requires_grad_(), [], [], Tensor.cpu
    start = backend.all_to_all

    def counted(out: Tensor, sent: Tensor, *arguments: Any) -> Any:
        calls.append(sent.dtype)
        return start(out, sent, *arguments)

    def layer(x: Tensor, routed: Any) -> Tensor:
        dispatched = routed.dispatch(x, drawn.weights) if routed else dispatch(x, drawn.ids, drawn.weights, 4, group)
        return combine(dispatched.summed(dispatched.by_expert().rows * 2), dispatched)

    def read(x: Tensor) -> Any:
        waits.append(1)
        return cpu(x)

    with mock.patch.object(backend, "all_to_all", counted), mock.patch.object(Tensor, "cpu", read):
        made = route(drawn.ids, 4, group) if routed else None
        torch.utils.checkpoint.checkpoint(layer, x, made, use_reentrant=False).sum().backward()
    assert len(waits) == (1 if routed else 2)
    assert len(calls) == (7 if routed else 8)


class Block(nn.Module):
    """A router and a shared expert, which FSDP2 shards, and this rank's experts, which it leaves alone."""

    def __init__(self, rank: int, world: int, group: ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.group, self.router, self.shared = group, nn.Linear(16, 8), nn.Linear(16, 16)
        self.experts = nn.Parameter((torch.randn(8, 16, 16) / 4).chunk(world)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(3)
        if self.group is None:  # one process, token by token
            results = (x[:, None, None] @ self.experts[ids])[:, :, 0]
            return x + self.shared(x).tanh() + (results * weights[:, :, None]).sum(1)
        started = dispatch(x, ids, weights, 8, self.group, async_op=True)
        shared = self.shared(x)
        dispatched = started.wait()
        rows, counts = dispatched.by_expert()
        results = (rows[:, None] @ self.experts.repeat_interleave(counts, 0))[:, 0]
        back = combine(dispatched.summed(results), dispatched, async_op=True)
        return x + shared.tanh() + back.wait()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not reentrant"])
def test_blocks_under_fsdp2(group: ProcessGroup, checkpointed: bool | None) -> None:
    """Loss and gradients of one process; the exchanges and FSDP2's are of one group, in one order on all ranks."""
    rank, world = group.rank(), group.size()
    x = torch.randn(8 * world, 16, generator=torch.Generator().manual_seed(1))

    def step(blocks: list[nn.Module], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in blocks:
            run = torch.utils.checkpoint.checkpoint
            x = block(x) if checkpointed is None else run(block, x, use_reentrant=checkpointed)
        loss = x.square().mean()
        loss.backward()
        return loss.detach()

    single = [Block(0, 1, None) for _ in range(2)]
    wanted = step([*single], x)
    blocks = [Block(rank, world, group) for _ in range(2)]
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params={block.experts})
    loss = step([*blocks], x.chunk(world)[rank])
    dist.all_reduce(loss, group=group)
    torch.testing.assert_close(loss / world, wanted)
    for block, whole in zip(blocks, single, strict=True):
        for name, parameter in block.named_parameters():
            grad, expected = parameter.grad, whole.get_parameter(name).grad
            assert grad is not None
            assert expected is not None
            if name == "experts":  # of the ranks' losses, which are means of their own tokens
                grad, expected = grad / world, expected.chunk(world)[rank]
            else:
                assert isinstance(grad, DTensor)
                grad = grad.full_tensor()
            torch.testing.assert_close(grad, expected, msg=name)


class GatedExpert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(16, 16, generator=generator, dtype=torch.float64)) for _ in range(3)
        )

    def forward(self, x: Tensor, weights: Tensor | None) -> Tensor:
        hidden = nn.functional.silu(x @ self.gate) * (x @ self.up)
        return (hidden if weights is None else hidden * weights[:, None]) @ self.down


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_weights_before_the_last_product(group: ProcessGroup, alignment: int, path: str) -> None:
    """The same function as weights behind it, and no output of an expert is kept for backward."""
    rank, world = group.rank(), group.size()
    drawn = draw_of(routing_of(world, "float64"), rank)

    def results(inside: bool) -> tuple[list[Tensor], int]:
        layers = [GatedExpert(rank * 2 + i) for i in range(2)]
        x, weights = drawn.x.clone().requires_grad_(), drawn.weights.double().requires_grad_()
        kept: dict[int, Tensor] = {}
        dispatched = dispatch(x, drawn.ids, weights, 2 * world, group)
        rows, counts = dispatched.by_expert(alignment)
        factors = dispatched.expert_weights
        assert factors.dtype is torch.float64
        assert factors.shape == rows.shape[:1]
        sizes = [*counts.tolist(), len(rows) - sum(counts.tolist())]
        parts = zip(layers, rows.split(sizes)[:-1], factors.split(sizes)[:-1], strict=True)
        outputs = torch.cat(
            [*[layer(part, w if inside else None) for layer, part, w in parts], rows[sum(sizes[:-1]) :]]
        )
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
            summed = dispatched.summed(outputs, weighted=not inside)
        out = combine(summed, dispatched)
        out.backward(drawn.grad)
        grads = [x.grad, weights.grad, *[p.grad for layer in layers for p in layer.parameters()]]
        saved = sum([x.nbytes for x in kept.values() if x.is_floating_point()])
        return [out.detach(), *[grad for grad in grads if grad is not None]], saved

    with tritoncomm.path(path):
        (inside, saved), (behind, saved_behind) = results(True), results(False)
    assert len(inside) == len(behind) == 9
    for a, b in zip(inside, behind, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert saved == 0
    assert saved_behind > 0 or not len(inside[0])


@pytest.mark.ranks(1, 2)
def test_expert_weights_are_those_of_the_last_rows(group: ProcessGroup) -> None:
    drawn = draw_of(routing_of(group.size()), group.rank())
    weights = drawn.weights.clone().requires_grad_()
    dispatched = dispatch(drawn.x, drawn.ids, weights, 2 * group.size(), group)
    with pytest.raises(ArgumentError, match="by_expert"):
        _ = dispatched.expert_weights
    for alignment in (1, 8, 1):
        rows, _ = dispatched.by_expert(alignment)
        assert len(dispatched.expert_weights) == len(rows)
    for alignment in (1, 8, 1):
        rows, _ = dispatched.by_expert(alignment)
        scaled = dispatched.summed(rows * dispatched.expert_weights[:, None], weighted=False)
        torch.testing.assert_close(scaled, dispatched.summed(rows))
    plain = torch.autograd.grad(dispatched.expert_weights.sum(), weights)[0]
    assert torch.equal(plain, torch.ones_like(weights)) or group.size() > 1


@pytest.mark.ranks(1)
def test_a_frozen_router_keeps_no_outputs(group: ProcessGroup) -> None:
    """Over one rank; rows that travel have a gradient of their weights, whoever wants it."""
    drawn = draw_of(routing_of(1), 0)
    for wants in (False, True):
        x, weights, kept = drawn.x.clone().requires_grad_(), drawn.weights.clone().requires_grad_(wants), []
        dispatched = dispatch(x, drawn.ids, weights, 2, group)
        outputs = dispatched.by_expert().rows * 2
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            combine(dispatched.summed(outputs), dispatched).sum()
        assert any(x.data_ptr() == outputs.data_ptr() for x in kept) is wants


@pytest.mark.ranks(1, 2)
def test_rows_that_are_read_without_gradients_keep_theirs(group: ProcessGroup) -> None:
    drawn = draw_of(routing_of(group.size()), group.rank())
    for mode in (torch.no_grad, torch.inference_mode):
        grads = []
        for is_read in (False, True):
            x = drawn.x.clone().requires_grad_()
            dispatched = dispatch(x, drawn.ids, drawn.weights, 2 * group.size(), group)
            with mode():
                assert not is_read or not dispatched.rows.norm().requires_grad
            rows, _ = dispatched.by_expert()
            grads.append(torch.autograd.grad(combine(dispatched.summed(rows), dispatched).sum(), x)[0])
        assert torch.equal(*grads)
