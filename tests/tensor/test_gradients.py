"""Gradients of ColoTensors are ColoTensors: clipping, scaling and optimizers that take norms equal one process."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shards import ranks_of, shard_of
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup
from torch.nn.parallel import DistributedDataParallel

from tritoncomm import record, variables
from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    clip_grad_norm_,
    optimizers,
)
from tritoncomm.tensor.layout import plain

ADAMW: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "for-loop": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}
CLIPS: dict[str, Callable[[list[Any]], Any]] = {
    "clip_grad_norm_": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5),
    "clip_grad_norm_ without foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, foreach=False),
    "clip_grad_norm_ of order 1": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, 1.0),
    "clip_grad_norm_ of order 3.5": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, 3.5),
    "clip_grad_norm_ of order inf": lambda ps: nn.utils.clip_grad_norm_(ps, 0.5, math.inf),
    "get_total_norm": lambda ps: clip_with_norm(ps),
    "clip_grad_value_": lambda ps: nn.utils.clip_grad_value_(ps, 0.25),
    "clip_grad_value_ without foreach": lambda ps: nn.utils.clip_grad_value_(ps, 0.25, foreach=False),
}


def clip_with_norm(parameters: list[Any]) -> Tensor:
    total = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.5, total)
    return total


def values(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cases(group: TorchGroup) -> list[tuple[tuple[int, ...], Any, ProcessGroup | None]]:
    """Shapes with their layouts and process groups: uneven and empty shards, several dims, replicas, plain, pairs."""
    pg, world = ranks_of(group), group.size()
    several = ShardSpec([0, 1], [2, world // 2]) if world == 4 else ShardSpec([0, 1], [1, world])
    made: list[Any] = [
        ((8, 4), ShardSpec([0], [world]), pg),
        ((5, 3), ShardSpec([-1], [world]), pg),
        ((world + 1, 3), ShardSpec([0], [world]), pg),
        ((3,), ShardSpec([0], [world]), pg),
        ((4, 6), several, pg),
        ((3, 2), ReplicaSpec(), pg),
        ((2, 3), None, None),
    ]
    if world == 4:
        pairs = ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=2)
        made.append(((4, 2), ShardSpec([0], [2]), pairs))
        mine = pairs.tp_rank_list()  # the same tensor ranks as those of pairs, without data-parallel ones
        made.append(((3, 4), ShardSpec([-1], [2]), ProcessGroup(ranks=mine, tp_degree=2)))
    return made


def parameters_of(group: TorchGroup) -> tuple[list[Any], list[Any]]:
    """The parameters of one process, and the same ones with their layouts."""
    reference, own = [], []
    for index, (shape, spec, pg) in enumerate(cases(group)):
        full = values(shape, index)
        reference.append(nn.Parameter(full.clone()))
        if pg is None:
            own.append(nn.Parameter(full.clone()))
            continue
        own.append(ColoParameter(full.clone(), True, ColoTensorSpec(pg)))
        own[-1].set_dist_spec(spec)
    return reference, own


def loss_of(parameters: list[Any], step: int) -> Tensor:
    """Element-wise and a sum, for any layout."""
    total: Any = torch.zeros((), dtype=torch.float64)
    for index, p in enumerate(parameters):
        target = values(p.size(), 1000 * (step + 1) + index)
        total = total + ((p - target) * (1 + index)).pow(2).sum()
    return total


def close(found: Any, expected: Tensor, what: Any) -> None:
    if isinstance(found, ColoTensor):
        expected = shard_of(expected, found.dist_spec, found.process_group.tp_local_rank())
    torch.testing.assert_close(
        plain(found).detach(), expected.detach(), rtol=1e-9, atol=1e-12, msg=lambda m: f"{what}: {m}"
    )


def equal_steps(
    group: TorchGroup, make: Callable[..., torch.optim.Optimizer], between: Callable[[list[Any]], Any], steps: int = 4
) -> None:
    """Train both for some steps, with a call between backward and step, and compare what they compute."""
    reference, own = parameters_of(group)
    optimizers = [make(reference), make(own)]
    for step in range(steps):
        results = []
        for parameters, optimizer in zip((reference, own), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(parameters, step)
            loss.backward()
            results.append((loss, between(parameters)))
            optimizer.step()
        (expected_loss, expected), (loss, result) = results
        close(loss, expected_loss, ("loss", step))
        assert (result is None) == (expected is None)
        if result is not None:
            close(result, expected, ("norm", step))
        for index, (p, q) in enumerate(zip(reference, own, strict=True)):
            close(q.grad, p.grad, ("gradient", step, index))
            close(q, p, ("parameter", step, index))


def own_or_torch(parameters: list[Any]) -> Tensor:
    sharded = any(isinstance(p, ColoTensor) for p in parameters)
    return (clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_)(parameters, 0.5)


@pytest.mark.ranks(1, 2, pytest.param(4, marks=pytest.mark.slow))
def test_adamw_with_clipping_equals_one_process(group: TorchGroup) -> None:
    for form in ADAMW.values():
        equal_steps(group, form, CLIPS["clip_grad_norm_"])
    for clip in CLIPS.values():
        equal_steps(group, ADAMW["for-loop"], clip, 2)
    equal_steps(group, ADAMW["for-loop"], lambda ps: own_or_torch(ps), 2)


def test_clipping_gathers_all_norms_at_once(group: TorchGroup) -> None:
    """All shards share one all-gather, and a NaN of one rank is everybody's."""
    pg, world = ranks_of(group), group.size()
    own = [ColoParameter(values((8, 4), i), True, ColoTensorSpec(pg)) for i in range(5)]
    for p in own:
        p.set_dist_spec(ShardSpec([0], [world]))
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    with record.recording() as counted:
        nn.utils.clip_grad_norm_(own, 1.0)
    assert {name: each.calls for (name, _), each in counted.items()} == {"_foreach_norm": 1}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        gradients = [p.grad.to(dtype) for p in own]
        for norm in torch._foreach_norm(gradients, 2), torch._foreach_norm(gradients, math.inf):
            assert all(each.dtype is dtype and each.is_replicate() for each in norm)
    (wide,) = torch._foreach_norm([own[0].grad.to(torch.bfloat16)], 2, dtype=torch.float64)
    assert wide.dtype is torch.float64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no rule for these shards")
        (zeros,) = torch._foreach_norm([own[0].grad], 0)
    assert zeros.item() == 32, "an order that the norm of norms does not give"
    if group.rank() == world - 1:
        plain(own[2].grad)[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(own, 1.0, error_if_nonfinite=True)


NORMS: dict[str, Callable[[list[Any], float], Tensor]] = {
    "tensor.clip_grad_norm_": lambda ps, order: clip_grad_norm_(ps, 1.0, order),
    "clip_grad_norm_": lambda ps, order: nn.utils.clip_grad_norm_(ps, 1.0, order),
    "clip_grad_norm_ without foreach": lambda ps, order: nn.utils.clip_grad_norm_(ps, 1.0, order, foreach=False),
    "get_total_norm": lambda ps, order: nn.utils.get_total_norm([p.grad for p in ps], order),
}


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_a_nan_of_one_rank_is_in_every_rank_s_norm(group: TorchGroup) -> None:
    """Whatever the order and whoever has the NaN; Gloo's MAX and MIN would lose it."""
    pg, world = ranks_of(group), group.size()
    for who in range(world):
        for order in (math.inf, -math.inf, 2.0, 1.0, 3.5):
            for name, norm in NORMS.items():
                own = [ColoParameter(torch.ones(world, 2), True, ColoTensorSpec(pg)) for _ in range(2)]
                for p in own:
                    p.set_dist_spec(ShardSpec([0], [world]))
                    p.grad = torch.ones(p.shape)
                assert norm(own, order).isfinite(), (name, order)
                for p in own:
                    p.grad = torch.ones(p.shape)
                if group.rank() == who:
                    plain(own[0].grad)[0, 0] = math.nan
                assert norm(own, order).isnan(), (name, order, who)
                with pytest.raises(RuntimeError, match=r"finite|nan"):
                    nn.utils.get_total_norm([p.grad for p in own], order, error_if_nonfinite=True)
        own[1].grad, own[0].grad = None, torch.ones(own[0].shape)
        plain(own[0].grad)[0, 0] = group.rank() + 1
        assert clip_grad_norm_(own, 100.0, -math.inf) == 1, "an order that takes the least element"
        if group.rank() == who:
            plain(own[0].grad)[0, 0] = math.nan
        with pytest.raises(RuntimeError, match="is nan"):
            clip_grad_norm_(own, 1.0, math.inf, error_if_nonfinite=True)


EXTREMA: dict[str, Callable[[Any], Any]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "max along a dim": lambda x: x.max(0).values,
    "min along a dim": lambda x: x.min(0, keepdim=True).indices,
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.argmin(0),
    "norm": lambda x: torch.linalg.vector_norm(x, math.inf),
    "-norm": lambda x: torch.linalg.vector_norm(x, -math.inf, dim=0),
    "softmax": lambda x: x.softmax(0),
}


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_a_nan_of_one_rank_is_in_every_extremum(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    for who in range(world):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            full = values((world + 1, 3), who).to(dtype)
            full[who, 1] = math.nan
            for spec in (ShardSpec([0], [world]), ShardSpec([-1], [world])):
                x = ColoTensor(shard_of(full, spec, group.rank()), ColoTensorSpec(pg, spec), full.shape)
                for name, extremum in EXTREMA.items():
                    found = extremum(x).redistribute(ReplicaSpec())
                    torch.testing.assert_close(
                        plain(found), extremum(full), equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
                    )


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", ADAMW)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_"])
def test_an_inf_on_one_rank_skips_the_step_on_all(group: TorchGroup, form: str, unscale: bool) -> None:
    """An inf or NaN in one shard of one rank skips the step on every rank, and halves every rank's scale."""
    bad = math.nan if form == "foreach" else math.inf
    reference, own = parameters_of(group)
    optimizers = [ADAMW[form](reference), ADAMW[form](own)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3) for _ in range(2)]
    for step in range(4):
        for parameters, optimizer, scaler in zip((reference, own), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(parameters, step)).backward()
            if step == 1 and parameters is reference:
                reference[0].grad[-1, -1] = bad
            elif step == 1 and group.rank() == group.size() - 1:
                plain(own[0].grad)[-1, -1] = bad
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0 if step == 0 else 2.0)
        for index, (p, q) in enumerate(zip(reference, own, strict=True)):
            close(q, p, (form, unscale, step, index))


class Normalised(torch.optim.Optimizer):
    """Divides every gradient by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad / p.grad.norm())


class NormalisedData(Normalised):
    """Steps of ``Normalised``, written into the local memory."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(0.1 * p.grad / p.grad.norm())


class Lamb(Normalised):
    """Adam whose update is scaled by the ratio of two norms, and noise that has to be the same for replicas."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p.grad)
            state["mean"].lerp_(p.grad, 0.1)
            state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            update = state["mean"] / (state["square"].sqrt() + 1e-6) + 0.01 * p
            ratio = torch.where(update.norm() > 0, p.norm() / update.norm(), 1.0)
            p.add_(update * ratio.clamp(max=10), alpha=-0.01)


class Centred(Normalised):
    """Subtracts the mean, and the largest element, of every gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * (p.grad - p.grad.mean()) / p.grad.abs().max())


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_optimizers_that_take_norms_equal_one_process(group: TorchGroup) -> None:
    for kind in (Normalised, NormalisedData, Lamb, Centred):
        optimizers._warned.clear()
        reference, own = parameters_of(group)
        with pytest.warns(UserWarning, match=f"{kind.__name__} is not known to be element-wise"):
            equal_steps(group, kind, lambda _: None)
        with variables.STRICT.override(True):
            optimizer = kind(own)
            before = [plain(p).detach().clone() for p in own]
            loss_of(own, 0).backward()
            with pytest.raises(UnsupportedError, match=rf"{kind.__name__}\.step: .*sharded.*TRITONCOMM_STRICT"):
                optimizer.step()
            assert all(torch.equal(plain(p), old) for p, old in zip(own, before, strict=True))
            ADAMW["fused"](own).step()
            kind(reference).zero_grad()
            loss_of(reference, 0).backward()
            kind(reference).step()


@pytest.mark.ranks(2, 4)
def test_hooks_see_the_global_gradient(group: TorchGroup) -> None:
    reference, own = parameters_of(group)
    norms: list[list[Any]] = [[], []]
    handles = []
    for parameters, seen in zip((reference, own), norms, strict=True):
        for p in parameters:
            handles.append(p.register_hook(lambda gradient: gradient / gradient.norm()))
            p.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(2 * p.grad.norm()))
    for _ in range(2):
        loss_of(reference, 0).backward()
        loss_of(own, 0).backward()
    for p, q in zip(reference, own, strict=True):
        close(q.grad, p.grad, "normalised twice")
    assert len(norms[1]) == 2 * len(own)
    for found, expected in zip(*reversed(norms), strict=True):
        close(found, expected, "seen after accumulation")
    for handle in handles:
        handle.remove()
    for parameters in (reference, own):
        for p in parameters:
            p.grad = None
        y = [p * 2 for p in parameters]
        for each in y:
            each.register_hook(lambda gradient: gradient * gradient.norm())
            each.register_hook(lambda gradient: None)
        loss_of(y, 1).backward()
    for p, q in zip(reference, own, strict=True):
        close(q.grad, p.grad, "hooks of results")
    world = group.size()
    square = ColoParameter(values((4, 4), 0), True, ColoTensorSpec(ranks_of(group)))
    square.register_hook(lambda gradient: (layouts.append(gradient.dist_spec), gradient.redistribute(answer[0]))[1])
    layouts: list[Any] = []
    answer = [ReplicaSpec()]
    square.pow(2).sum().backward()
    square.set_dist_spec(ShardSpec([0], [world]))
    answer = [ShardSpec([0], [world])]
    square.pow(2).sum().backward()
    assert layouts == [ReplicaSpec(), ShardSpec([0], [world])], "the layout that the leaf has by then"
    answer = [ShardSpec([1], [world])]
    with pytest.raises(UnsupportedError, match="register_hook: a gradient of"):
        square.pow(2).sum().backward()


@pytest.mark.ranks(2, 4)
def test_gradients_that_are_returned_are_global(group: TorchGroup) -> None:
    """A penalty on the norm of the gradient: ``torch.autograd.grad`` returns ColoTensors, graph included."""
    reference, own = parameters_of(group)
    for parameters in (reference, own):
        loss = loss_of(parameters, 0)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        (loss + sum(g.norm() * g.mean() for g in gradients)).backward()  # pyright: ignore
    for p, q in zip(reference, own, strict=True):
        close(q.grad, p.grad, "penalty")
    (gradient, nothing) = torch.autograd.grad(loss_of(own[:1], 0), own[:2], allow_unused=True)
    assert nothing is None
    assert gradient.dist_spec == own[0].dist_spec
    gradient, zeros = torch.autograd.grad(loss_of(own[:1], 0), own[:2], materialize_grads=True)
    assert plain(zeros).eq(0).all()
    assert zeros.dist_spec == own[1].dist_spec
    before, doubled = plain(own[0].grad).clone(), own[0] * 2
    doubled.sum().backward(inputs=[doubled])
    assert doubled.grad.dist_spec == own[0].dist_spec
    assert torch.equal(plain(own[0].grad), before), "only the inputs have a new gradient"
    own[0].sum().backward(inputs=[own[0]])
    assert torch.equal(plain(own[0].grad), before + 1)
    (gradient,) = torch.autograd.grad(loss_of(own[:1], 0), own[0])
    assert gradient.size() == own[0].size()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create a reference cycle")
        loss_of(own, 0).backward(create_graph=True)
    assert all(q.grad.norm().grad_fn is not None for q in own)
    for q in own:
        q.grad = None  # ends the cycle


@pytest.mark.ranks(2, 4)
def test_a_gradient_is_one_object_over_autograds_memory(group: TorchGroup) -> None:
    """One object until it is replaced, over the memory that autograd adds to."""
    pg, world = ranks_of(group), group.size()
    p = ColoParameter(values((4, 4), 0), True, ColoTensorSpec(pg))
    assert p.grad is None
    for spec in (ShardSpec([0], [world]), ShardSpec([-1], [world]), ReplicaSpec()):
        p.set_dist_spec(spec)
        p.grad = None
        p.sum().backward()
        gradient = p.grad
        assert isinstance(gradient, ColoTensor)
        assert p.grad is gradient
        assert (gradient.dist_spec, gradient.process_group, gradient.requires_grad) == (spec, pg, False)
        assert gradient.size() == (4, 4)
        assert gradient._base is None
        p.sum().backward()
        assert p.grad is gradient, "added in place"
        assert plain(gradient).eq(2).all()
        p.grad *= 3
        p.grad += 1
        assert p.grad is gradient
        assert plain(gradient).eq(7).all()
        optimizer = torch.optim.SGD([p], lr=0.1)
        optimizer.zero_grad(set_to_none=False)
        assert plain(gradient).eq(0).all()
        p.grad = plain(gradient).clone() + 1
        assert p.grad.dist_spec == spec
        assert p.grad.norm().item() == 4.0
        optimizer.zero_grad()
        assert p.grad is None
        p.grad = torch.ones_like(p)
        del p.grad
        assert p.grad is None
    p.set_dist_spec(ShardSpec([0], [world]))
    if world == 4:
        other: Any = ShardSpec([0, 1], [2, 2])
        p.set_dist_spec(other)
        full = torch.arange(16.0, dtype=torch.float64).view(4, 4)
        p.grad = shard_of(full, other, pg.tp_local_rank()).clone()
        p.set_dist_spec(ShardSpec([1, 0], [2, 2]))
        close(p.grad, full, "another order of the same shards")
    else:
        other = ShardSpec([1], [world])
    elsewhere = ColoTensor(values((4, 4), 0), ColoTensorSpec(pg))
    elsewhere.set_dist_spec(ShardSpec([0, 1], [2, 2]) if world == 4 else ShardSpec([1], [world]))
    with pytest.raises(UnsupportedError, match="grad =: a gradient of"):
        p.grad = elsewhere
    leaf = ColoTensor(torch.ones(2, 3), ColoTensorSpec(pg, ShardSpec([0], [world]))).requires_grad_()
    y = leaf * 2
    y.retain_grad()
    y.sum().backward()
    for each in (leaf, y):
        assert each.grad is not None
        assert each.grad.dist_spec == ShardSpec([0], [world])


class Sum(nn.Module):
    """A loss of parameters and a batch."""

    def __init__(self, parameters: list[Any]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)

    def forward(self, batch: Tensor) -> Tensor:
        total: Any = torch.zeros((), dtype=torch.float64)
        for index, p in enumerate(self.all):
            total = total + (p * batch.mean() - index).pow(2).sum()
        return plain(total) if isinstance(total, ColoTensor) else total


@pytest.mark.ranks(4)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "bucket views"])
@pytest.mark.parametrize("to_none", [False, True], ids=["zeros", "none"])
def test_data_parallel_with_clipping_equals_one_process(group: TorchGroup, views: bool, to_none: bool) -> None:
    """Two pairs with a batch each: DDP averages what the clipping then takes the norm of."""
    pg = ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=2)
    own: list[Any] = []
    for index, spec in enumerate((ShardSpec([0], [2]), ShardSpec([-1], [2]), ReplicaSpec())):
        own.append(ColoParameter(values((4, 6), index), True, ColoTensorSpec(pg)))
        own[-1].set_dist_spec(spec)
    reference = Sum([nn.Parameter(values((4, 6), index)) for index in range(3)])
    module = DistributedDataParallel(Sum(own), process_group=pg.dp_process_group(), gradient_as_bucket_view=views)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (reference, module)]
    addresses = []
    for step in range(4):
        batches = [values((3,), 10 * step + part) for part in range(2)]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        (sum(reference(batch) for batch in batches) / 2).backward()  # pyright: ignore
        module(batches[pg.dp_local_rank()]).backward()
        addresses.append([p.grad.data_ptr() for p in own])
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (reference, module)]
        close(norms[1], norms[0], ("norm", step))
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(reference.all, own, strict=True):
            close(q, p, (views, to_none, step))
    if views and not to_none:
        assert addresses[1:] == addresses[1:2] * 3, "the gradients stay views of the buckets"


def test_collectives_of_torch_take_the_local_gradient(group: TorchGroup) -> None:
    """Collectives of torch on a gradient are those of its local memory, as an averaging by hand needs them."""
    pg, world = ranks_of(group), group.size()
    p = ColoParameter(values((4, 2), 0), True, ColoTensorSpec(pg))
    p.set_dist_spec(ShardSpec([0], [world]))
    p.grad = torch.full(p.shape, 1.0 + group.rank(), dtype=p.dtype)
    dist.all_reduce(p.grad, group=group)
    assert plain(p.grad).eq(world * (world + 1) / 2).all()
    dist.broadcast(p.grad.mul_(1 + group.rank()), dist.get_global_rank(group, world - 1), group=group)
    assert plain(p.grad).eq(world * world * (world + 1) / 2).all()
    gathered = [torch.empty(p.shape, dtype=p.dtype) for _ in range(world)]
    dist.all_gather(gathered, p.grad, group=group)
    assert all(torch.equal(each, plain(p.grad)) for each in gathered)


def test_states_of_optimizers_load_as_before(group: TorchGroup) -> None:
    """Saved states have the names, shapes and layouts of the parameters; one with plain tensors continues the same."""
    for make in (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        ADAMW["for-loop"], ADAMW["foreach"], ADAMW["fused"],
    ):  # fmt: skip
        results = []
        for form in ("continued", "loaded", "loaded as plain tensors"):
            _, own = parameters_of(group)
            optimizer = make(own)
            for step in range(4):
                if step == 2 and form != "continued":
                    state = optimizer.state_dict()
                    for index, p in enumerate(own):
                        for name, value in state["state"][index].items():
                            if isinstance(value, Tensor) and value.dim():
                                assert type(value) is (ColoTensor if isinstance(p, ColoTensor) else Tensor), name
                                assert value.size() == p.size()
                                assert getattr(value, "dist_spec", None) == getattr(p, "dist_spec", None)
                                if form == "loaded as plain tensors":
                                    state["state"][index][name] = plain(value)
                    optimizer = make(own)
                    optimizer.load_state_dict(state)
                optimizer.zero_grad()
                loss_of(own, step).backward()
                optimizer.step()
            results.append([plain(p).detach() for p in own])
        for continued, *others in zip(*results, strict=True):
            assert all(torch.equal(continued, each) for each in others)
