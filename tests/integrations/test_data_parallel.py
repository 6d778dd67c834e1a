"""FSDP2, DistributedDataParallel and Megatron's own sum over a 16-bit wire: bit for bit sums by hand, in rank order."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bits import bits
from pool import Pool, mesh_of_four
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tritoncomm import collective, record, variables
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations import ddp, fsdp2

BF16 = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
RATE = 0.05


class Model(nn.Module):
    """Sizes that ranks do not divide, a frozen part, a recomputed one, and one that every other step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3, bias=False)
        self.again, self.sometimes = nn.Linear(10, 12), nn.Linear(10, 10)
        self.back = nn.Linear(12, 10)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.frozen(torch.tanh(self.first(x)))
        recomputed: Any = checkpoint(lambda y: self.back(torch.relu(self.again(y))), y, use_reentrant=False)
        y = y + recomputed
        if step % 2 == 0:  # at first, as torch cannot accumulate for a part that was never used
            y = y + self.sometimes(y)
        return self.last(y)


def made(dtype: torch.dtype = torch.float32) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Model().to(dtype)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def gradients(model: Model, weights: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    """Gradients in bf16 of one rank, as mixed precision computes them."""
    local = copy.deepcopy(model).to(BF16)
    local.load_state_dict({name: x.to(BF16) for name, x in weights.items()})
    local(batch(rank, step).to(BF16), step).float().square().mean().backward()
    return {name: p.grad for name, p in local.named_parameters() if p.grad is not None}


def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def mean(parts: Sequence[Tensor], factor: float | None = None) -> Tensor:
    return in_order(parts) * (1 / len(parts) if factor is None else 1 / factor)


def trained_by_hand(
    world: int, steps: int, reduce: Callable[[Sequence[Tensor]], Tensor] = mean, micro: int = 1
) -> dict[str, Tensor]:
    """Weights in fp32 after SGD with ``reduce`` of all ranks' gradients; micro-batches are added in fp32."""
    model = made()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(0, steps * micro, micro):
        every = [
            [gradients(model, weights, rank, step + i) for i in range(micro)] for rank in range(world)
        ]  # fmt: skip
        for name, weight in weights.items():
            parts = [[each[name] for each in grads if name in each] for grads in every]
            if parts[0]:
                weight -= RATE * reduce([p[0] if micro == 1 else in_order(p) for p in parts])
    return weights


def sharded(mesh: DeviceMesh, **options: Any) -> Model:
    model = made()
    for part in (model.first, model.frozen, model.again, model.sometimes):
        fully_shard(part, mesh=mesh, mp_policy=POLICY, **options)
    # ``back`` and ``last`` stay with the root
    return fully_shard(model, mesh=mesh, mp_policy=POLICY)  # type: ignore[return-value]


def train(model: Model, rank: int, steps: int, micro: int = 1, first: int = 0) -> dict[str, Tensor]:
    """Train by SGD; the whole weights."""
    assert isinstance(model, FSDPModule)
    for step in range(first, first + steps * micro, micro):
        for i in range(micro):
            model.set_requires_gradient_sync(i == micro - 1)
            model(batch(rank, step + i).to(BF16), step + i).float().square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
                    p.grad = None
    return whole(model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    full = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        full[name] = p.full_tensor().detach()
    return full


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert torch.equal(bits(x), bits(expected[name])), (name, (x - expected[name]).abs().max())


def run_fsdp(group: ProcessGroup, steps: int) -> float:
    """Bits of training; the bytes of the reduce-scatters, of those that fp32 would send."""
    world, rank = group.size(), group.rank()
    mesh = DeviceMesh.from_group(group, "cpu")
    expected = trained_by_hand(world, steps)
    model = sharded(mesh)
    assert "nothing unless" not in str(fsdp2.use(model, round_accumulated=True))
    report = fsdp2.use(model, wire=BF16)  # again: no comm on top of a comm
    assert report == (("model", "first", "frozen", "again", "sometimes"), BF16, False, False, None)
    assert str(report).splitlines()[0] == "fsdp2.use: 5 FSDP modules; gradients travel in bfloat16, not in float32"
    assert "saves nothing unless round_accumulated=True" in str(report)
    before = 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal before
        before += args[0].nbytes if args else kwargs["input_tensor"].nbytes
        return plain(self, *args, **kwargs)

    plain = fsdp2._ReduceScatter.__call__
    with mock.patch.object(fsdp2._ReduceScatter, "__call__", counted), record.recording() as counts:
        assert_equal(train(model, rank, steps), expected)
    if world == 1:
        return 0.5
    sent = sum(count.bytes_sent for (name, _), count in counts.items() if name == "reduce_scatter")
    return sent / (before * (world - 1) / world)


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_fsdp_sums_in_rank_order(pool: Pool, world: int) -> None:
    assert pool.run(run_fsdp, 20, world=world) == [0.5] * world


def run_ways(group: ProcessGroup) -> None:
    """Other ways to reduce: accumulated gradients, a factor of one's own, sums alone, shards of another dim."""
    world, rank = group.size(), group.rank()
    mesh = DeviceMesh.from_group(group, "cpu")

    model = sharded(mesh)
    fsdp2.use(model)
    assert_equal(train(model, rank, 3, micro=3), trained_by_hand(world, 3, micro=3))
    model = sharded(mesh)
    fsdp2.use(model, round_accumulated=True)
    rounded = trained_by_hand(world, 3, lambda parts: mean([part.to(BF16) for part in parts]), micro=3)
    assert_equal(train(model, rank, 3, micro=3), rounded)

    model = sharded(mesh)
    model.set_gradient_divide_factor(3.0)  # type: ignore[operator]
    for part in (model.first, model.frozen, model.again, model.sometimes):
        part.set_gradient_divide_factor(3.0)
    fsdp2.use(model)
    assert_equal(train(model, rank, 4), trained_by_hand(world, 4, lambda parts: mean(parts, 3.0)))

    # Accumulated gradients go by FSDP2's own sum, to which Gloo has no factor: the addends are scaled.
    model = sharded(mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(3.0)
    fsdp2.use(model)
    wanted = trained_by_hand(world, 3, lambda parts: in_order([part * torch.tensor(1 / 3) for part in parts]), micro=3)
    assert_equal(train(model, rank, 3, micro=3), wanted)

    model = sharded(mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    fsdp2.use(model)
    assert_equal(train(model, rank, 4), trained_by_hand(world, 4, lambda parts: in_order(parts) / world))

    model = sharded(mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.shape[-1] % world == 0 else Shard(0))
    fsdp2.use(model)
    assert_equal(train(model, rank, 4), trained_by_hand(world, 4))


def test_fsdp_in_other_ways(pool: Pool) -> None:
    pool.run(run_ways, world=2)


def run_hsdp(group: ProcessGroup) -> None:
    """Sums over the shards' group as by hand; the all-reduce over replicas is FSDP2's own."""
    rank = group.rank()
    mesh = mesh_of_four("replicas", "shards")
    model = sharded(mesh)
    assert "all-reduce between replicas (HSDP) stays in float32" in str(fsdp2.use(model))
    expected = trained_by_hand(4, 20, lambda parts: (mean(parts[:2]) + mean(parts[2:])) / 2)
    assert_equal(train(model, rank, 20), expected)


def run_nodes(group: ProcessGroup) -> None:
    """Two levels, and a group over nodes that says nothing about them."""
    world, rank = group.size(), group.rank()
    mesh = DeviceMesh.from_group(group, "cpu")
    with variables.NODE.override(2):
        model = sharded(mesh)
        with pytest.raises(UnsupportedError, match=r"^fsdp2.use: the group is on 2 nodes"):
            fsdp2.use(model)
        assert "sums of a node travel in float32 to other nodes" in str(fsdp2.use(model, exchange="node"))
        levels = trained_by_hand(world, 5, lambda parts: (in_order(parts[:2]) + in_order(parts[2:])) * 0.25)
        assert_equal(train(model, rank, 5), levels)


def test_replicas_and_nodes(pool: Pool) -> None:
    pool.run(run_hsdp, world=4)
    pool.run(run_nodes, world=4)


def run_refused(group: ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    with pytest.raises(ArgumentError, match="call fully_shard first"):
        fsdp2.use(made())
    for policy, dtype, text in (
        (MixedPrecisionPolicy(), torch.float32, "gradients in torch.float32, summed in the same dtype"),
        (
            MixedPrecisionPolicy(param_dtype=BF16),
            torch.float32,
            "gradients in torch.bfloat16, summed in the same dtype",
        ),
        (
            MixedPrecisionPolicy(reduce_dtype=torch.float32),
            torch.float32,
            "gradients in torch.float32, summed in torch",
        ),
        (MixedPrecisionPolicy(torch.float16, torch.float32), torch.float32, "gradients in torch.float16"),
    ):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
        fully_shard(model[0], mesh=mesh, mp_policy=POLICY)
        fully_shard(model[1], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=POLICY)
        with pytest.raises(UnsupportedError, match=f"module '1'.*{text}.*needs MixedPrecisionPolicy"):
            fsdp2.use(model)
        group_of_0 = model[0]._get_fsdp_state()._fsdp_param_groups[0]
        assert not isinstance(group_of_0._reduce_scatter_comm, fsdp2._ReduceScatter)  # all or none
    fsdp2.use(
        fully_shard(nn.Linear(4, 4).to(BF16), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    )
    model = sharded(mesh)
    with pytest.raises(ArgumentError, match="wire must be bfloat16 or float16"):
        fsdp2.use(made_of(torch.float32, mesh), wire=torch.float32)
    state: Any = model.first._get_fsdp_state()
    with (
        mock.patch.object(state, "_fsdp_param_groups", 2 * state._fsdp_param_groups),
        pytest.raises(UnsupportedError, match=r"module 'first' .* has 2 parameter groups"),
    ):
        fsdp2.use(model)


def made_of(dtype: torch.dtype, mesh: DeviceMesh) -> Any:
    return fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))


def run_restored(group: ProcessGroup) -> None:
    """What ``restore`` leaves is what was there; a dtype that changes after ``use`` travels in fp32."""
    world, rank = group.size(), group.rank()
    mesh = DeviceMesh.from_group(group, "cpu")
    model = sharded(mesh)
    groups = [m._get_fsdp_state()._fsdp_param_groups[0] for m in model.modules() if isinstance(m, FSDPModule)]
    before = [each._reduce_scatter_comm for each in groups]
    fsdp2.restore(model)
    fsdp2.use(model)
    train(model, rank, 1)
    fsdp2.restore(model)
    assert [each._reduce_scatter_comm for each in groups] == before
    assert not any("post_backward" in vars(each) for each in groups)
    # Somebody else's between two of ours; and one that calls ours, which sums in fp32 once it is restored.
    fsdp2.use(model)
    inner = groups[0]._reduce_scatter_comm
    for module in (m for m in model.modules() if isinstance(m, FSDPModule)):
        module.set_custom_reduce_scatter(before[0])
    fsdp2.use(model)
    fsdp2.restore(model)
    assert not any("post_backward" in vars(each) for each in groups)
    for each, comm in zip(groups, before, strict=True):
        each._reduce_scatter_comm = comm
    groups[0]._reduce_scatter_comm = inner
    plain = train(model, rank, 2, first=1)
    other = sharded(mesh)
    train(other, rank, 3)
    assert_equal(plain, whole(other))

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    late: Any = fully_shard(nn.Linear(6, 4, bias=False).to(BF16), mesh=mesh, mp_policy=policy)
    fsdp2.use(late)
    late.float()
    weight = late.weight.full_tensor().detach()
    late(batch(rank, 0)).square().mean().backward()
    grads = []
    for each in range(world):
        local = weight.clone().requires_grad_()
        (batch(each, 0) @ local.t()).square().mean().backward()
        grads.append(local.grad)
    assert torch.equal(late.weight.grad.full_tensor(), mean(grads))


def test_what_is_refused_and_restored(pool: Pool) -> None:
    pool.run(run_refused, world=2)
    pool.run(run_restored, world=2)


def run_ddp(group: ProcessGroup) -> int:
    """Gradients in buckets are the function's; bf16 ones are the sum by hand."""
    world, rank, compared = group.size(), group.rank(), 0
    for dtype in (BF16, torch.float32, torch.float16):
        wire = BF16 if dtype is torch.float32 else dtype
        every = []
        for each in range(world):
            local = made(dtype)
            local(batch(each, 0).to(dtype), 0).float().square().mean().backward()
            every.append({name: p.grad for name, p in local.named_parameters() if p.grad is not None})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = DistributedDataParallel(made(dtype), process_group=group, bucket_cap_mb=0.0002)
        model.register_comm_hook(group, ddp.wire_hook(wire=wire))
        for _ in range(2):  # buckets are rebuilt after the first
            model.zero_grad()
            model(batch(rank, 0).to(dtype), 0).float().square().mean().backward()
            for name, p in model.module.named_parameters():
                if p.grad is None:
                    continue
                parts = [each[name] for each in every]
                expected = mean([part.to(wire) for part in parts]).to(dtype)
                assert torch.equal(bits(p.grad), bits(expected)), (name, dtype)
                whole = parts[rank].clone()
                collective.all_reduce(whole, group, dist.ReduceOp.AVG, wire=wire)
                assert torch.equal(bits(p.grad), bits(whole))
                compared += 1
    return compared


def run_pickled(group: ProcessGroup) -> None:
    """The hook, and a model that has it, survive pickle and deepcopy, also after they were used."""
    hook = ddp.wire_hook(wire=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = DistributedDataParallel(made(torch.float32), process_group=group)
        model.register_comm_hook(group, hook)
        model(batch(group.rank(), 0), 0).square().mean().backward()
        model = DistributedDataParallel(made(torch.float32), process_group=group)
        model.register_comm_hook(None, hook)  # torch pickles no process group
        # It pickles models over the default group alone, which has all ranks of the pool.
        with mock.patch.object(DistributedDataParallel, "_check_default_group"):
            torch.save(model, stream := io.BytesIO())
            stream.seek(0)
            loaded = torch.load(stream, weights_only=False)
        assert torch.equal(loaded.module.state_dict()["first.weight"], model.module.state_dict()["first.weight"])
    for copied in (pickle.loads(pickle.dumps(hook)), copy.deepcopy(hook)):
        assert copied.options == hook.options
        assert copied is not hook


def test_the_hook_survives_pickle(pool: Pool) -> None:
    pool.run(run_pickled, world=2)


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_the_hook_of_ddp(pool: Pool, world: int) -> None:
    assert pool.run(run_ddp, world=world) == [3 * 2 * 9] * world
