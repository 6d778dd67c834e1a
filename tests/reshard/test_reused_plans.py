"""Second executions of a plan: other memory, modes, layouts and threads, and a destroyed group."""

import gc
import threading
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from reshardings import Cases, layouts, local_of, ramp, run_cases, same
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from tritoncomm.core import ops
from tritoncomm.errors import ArgumentError, CommError, GroupError, MismatchError, ShapeError, UnsupportedError
from tritoncomm.reshard import (
    Layout,
    OwnedExchange,
    ReshardPlan,
    api,
    planner,
    request,
    reshard,
    reshard_plan,
)  # fmt: skip
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ReplicaSpec, ShardSpec
from tritoncomm.tensor import ProcessGroup as ColoGroup

case = Cases()


@case
def out_overwrites_a_pass_through_tensor(group: TorchGroup) -> None:
    """An ``out`` tensor shares memory with a pass-through tensor, which is copied before the exchange overwrites it."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    first, moves = local_of(rows, rank, full).clone(), local_of(rows, rank, full + 1000).clone()
    expected = local_of(columns, rank, full + 1000)
    plan = reshard_plan({"a": first, "b": moves}, rows, {"a": rows, "b": columns}, group=group)
    stays, kept = first.clone(), torch.empty_like(first)
    over = stays.view(-1)[: expected.numel()].view(expected.shape)
    others = (None, moves.t().contiguous().t(), torch.stack([moves, moves], -1)[..., 0], moves)
    for _ in range(2):
        for other in others:
            if other is not None:
                plan.execute({"a": stays, "b": other}, out={"a": kept, "b": torch.empty_like(expected)})
            for _ in range(2):
                stays.copy_(first)
                kept.fill_(-1)
                plan.execute({"a": stays, "b": moves}, out={"a": kept, "b": over})
                same(kept, first)
                same(over, expected)


@case
def freed_memory_is_rejected(group: TorchGroup) -> None:
    """Storage that was freed (as FSDP frees parameters) or shrunk is rejected by name, in first and later calls."""
    for path in ("torch", "triton"):
        with ops.path(path):
            free_memory(group, (0, 8))


def free_memory(group: TorchGroup, sizes: tuple[int, ...]) -> None:
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    for small in (0, 2**22):  # blocks that stay are copied directly, and through the staging memory
        for left in sizes:
            with mock.patch.object(planner, "_SMALL", small):
                shard = local_of(rows, rank, full)
                x = torch.cat([ramp(3), shard.flatten()])[3:].view(shard.shape)
                plan = reshard_plan([x], rows, columns, group=group)
            out = torch.empty_like(local_of(columns, rank, full))
            for calls in (0, 2):
                given = x.clone() if not calls else x
                for _ in range(calls):
                    same(plan.execute([given])[0], local_of(columns, rank, full))
                    plan.execute([given], out=[out])
                given.untyped_storage().resize_(left)
                for into in (None, [out]):
                    with pytest.raises(ArgumentError, match=r"^reshard: 0 has no memory"):
                        plan.execute([given], out=into)
                with pytest.raises(ArgumentError, match=r"^reshard: 0 has no memory"):
                    reshard([given], rows, columns, group=group)
            x = local_of(rows, rank, full).clone()
            plan.execute([x], out=[out])
            out.untyped_storage().resize_(left)
            with pytest.raises(ArgumentError, match=r"^reshard: out 0 has no memory"):
                plan.execute([x], out=[out])


@case
def equal_arguments_share_a_plan(group: TorchGroup) -> None:
    """Equal arguments share one plan, also if objects, forms, strides or results differ."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    request._plans.forget(group)
    planned = mock.Mock(wraps=request.Executor)

    def check(times: int, factor: float = 1, **options: Any) -> Any:
        x, expected = local_of(rows, rank, full) * factor, local_of(columns, rank, full) * factor
        given = options.pop("given", lambda x: {"a": x, "b": x + 1})(x)
        planned.reset_mock()
        with mock.patch.object(request, "Executor", planned):
            got = reshard(given, options.pop("source", rows), options.pop("target", columns), group=group, **options)
        assert planned.call_count == times, (planned.call_args, options)
        some = [got] if isinstance(got, Tensor) else list(got.values() if isinstance(got, dict) else got)
        for i, each in enumerate(some):
            same(each.detach(), (expected + i).to(each.dtype))
        return got

    assert check(1, 2).keys() == check(0, 3).keys()
    check(1, dtype=torch.bfloat16)
    check(0, dtype=torch.bfloat16)
    check(0, dtype=torch.float32)
    check(1, given=lambda x: x)
    check(0, given=lambda x: x)
    check(1, given=lambda x: [x, x + 1])
    check(0, given=lambda x: (x, x + 1))
    by_name = {"a": rows, "b": rows}
    check(0, source=by_name)
    by_name["b"] = columns  # the same dict
    if group.size() > 1:
        with pytest.raises(ShapeError):
            check(0, source=by_name)
    check(0, source={"a": rows, "b": rows})
    check(0, source=[rows, rows], target=[columns, columns])
    check(1, given=lambda x: {"b": x, "a": x + 1})
    check(0, given=lambda x: {"a": x.t().contiguous().t(), "b": x + 1})  # other strides
    check(1, bucket_bytes=2**20)
    for bad in ({"bucket_bytes": float(2**20)}, {"given": lambda x: {"a": x, "b": 3}}):
        with pytest.raises(ArgumentError):
            check(0, **bad)
    out = {name: torch.empty_like(local_of(columns, rank, full)) for name in "ab"}
    for _ in range(2):
        assert check(0, out=out) is out
    leaf = local_of(rows, rank, full).clone().requires_grad_()
    for times in (1, 0):
        got = check(times, given=lambda x: {"a": leaf, "b": leaf + 1})
        (got["a"].sum() + 2 * got["b"].sum()).backward()
        same(leaf.grad, torch.full_like(leaf, 3))
        leaf.grad = None
    with torch.no_grad():
        assert not check(0, given=lambda x: {"a": leaf, "b": leaf + 1})["a"].requires_grad
    assert check(0, given=lambda x: {"a": leaf, "b": leaf + 1})["a"].requires_grad
    request._plans.forget(group)  # on every rank: they compare a new one
    check(1)
    check(0)


@case
def all_ranks_evict_the_same_plans(group: TorchGroup) -> None:
    """All ranks evict the same plans, whatever their tensors are; else one rank would compare digests alone."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    kept = local_of(rows, rank, full)
    others = [
        tuple(Layout.on_mesh((n, 8), range(group.size()), [dim]) for dim in (0, 1)) for n in range(8, 8 + 8 * 70, 8)
    ]
    for turn, (source, target) in enumerate(others):
        x = kept.t().contiguous().t() if rank and turn else kept.clone()
        # One rank reads every argument; on the other one the call looks like an earlier one.
        given = OrderedDict(x=x) if rank else {"x": x}
        same(reshard(given, rows, columns, group=group)["x"], local_of(columns, rank, full))
        more = ramp(*source.shape)
        same(reshard(local_of(source, rank, more), source, target, group=group), local_of(target, rank, more))
    assert group.size() == 1 or len(request._plans.get(group) or ()) == 64  # on one rank nothing moves


@case
def calls_that_look_alike_are_read_once(group: TorchGroup) -> None:
    """Another name, dtype or gradient is another call; a tensor that does not fit is refused as in a first one."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    x, expected = local_of(rows, rank, full), local_of(columns, rank, full)
    for tensors, source in (
        (x, rows), ([x, x], rows), ((x, x), [rows, rows]), ({"a": x, "b": x}, {"b": rows, "a": rows}),
    ):  # fmt: skip
        for calls in (1, 0):
            with mock.patch.object(api, "planned", wraps=api.planned) as read:
                results = reshard(tensors, source, columns, group=group)
            assert read.call_count <= calls, type(tensors)
            results = [results] if isinstance(results, Tensor) else results
            assert type(results) is (dict if type(tensors) is dict else list)
            for result in results.values() if isinstance(results, dict) else results:
                same(result, expected)
    for name in (1, True, 1.0, "1"):
        for _ in range(2):
            assert list(reshard({name: x}, rows, columns, group=group)) == [name]
    for wrong in (torch.cat([x, x]), x.to("meta"), 3):
        with pytest.raises(CommError):
            reshard(wrong, rows, columns, group=group)
    options: dict[str, Any]
    for options in ({"grad": "no"}, {"grad": ["replicated"]}, {"bucket_bytes": [1]}, {"bucket_bytes": float(2**28)}):
        with pytest.raises(ArgumentError):
            reshard(x, rows, columns, group=group, **options)


def first_of(plan: ReshardPlan, x: Tensor) -> Tensor:
    return plan.execute([x, x.clone()])[0] * 1


@case
def fake_tensors_and_make_fx(group: TorchGroup) -> None:
    """Fake tensors give fake results, and ``make_fx`` is rejected."""
    if group.size() > 1:
        return  # the modes are of one rank, and what they run sends nothing
    rows, columns = layouts(group)
    x = ramp(8, 12)
    other = x.clone()
    for targets in (columns, [columns, rows]):
        plan = reshard_plan([x, other], rows, targets, group=group)
        for _ in range(2):
            plan.execute([x, other])
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(plan.execute([x, other])[0], FakeTensor)
        with pytest.raises(UnsupportedError, match="make_fx does not record"):
            make_fx(partial(first_of, plan))(x)


@case
def dtensors_of_another_layout_are_rejected(group: TorchGroup) -> None:
    """DTensors of another layout but an equal local shape are rejected, as sources and as ``out``."""
    if group.size() != 4:
        return
    rank, full = group.rank(), ramp(8, 12)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False)
    columns = Layout.on_mesh((8, 12), range(4), [1])

    def placed(*placements: Placement) -> DTensor:
        local = local_of(Layout.on_mesh((8, 12), mesh, placements), rank, full).clone()
        return DTensor.from_local(local, mesh, placements, run_check=False)

    one, other = placed(Shard(0), Replicate()), placed(Replicate(), Shard(0))
    assert one.to_local().shape == other.to_local().shape
    plan = reshard_plan({"w": one}, target=columns, group=group)
    for _ in range(2):
        same(plan.execute({"w": one})["w"], local_of(columns, rank, full))
        with pytest.raises(ShapeError, match=r"^reshard: w is laid out as"):
            plan.execute({"w": other})
        with pytest.raises(ShapeError, match=r"^reshard: w is laid out as"):
            reshard({"w": other}, Layout.of_dtensor(one), columns, group=group)
    every = placed(Replicate(), Replicate())
    plan = reshard_plan({"w": every}, target=columns, group=group)
    owned = OwnedExchange({"w": every}, {"w": 0}, group=group)
    for call in (plan.execute, lambda given: owned(given, lambda _, full: full)):
        with pytest.raises(UnsupportedError, match=r"^reshard: w: .* is partial"):
            call({"w": DTensor.from_local(full, mesh, [Replicate(), Partial()], run_check=False)})
    target = (mesh, [Shard(0), Replicate()])
    moves = placed(Shard(1), Replicate())
    plan = reshard_plan({"w": moves}, target={"w": target}, group=group)
    right, wrong = (DTensor.from_local(torch.zeros(4, 12), mesh, each, run_check=False)
                    for each in (target[1], [Replicate(), Shard(0)]))  # fmt: skip
    for call in (plan.execute, lambda given, out: reshard(given, target={"w": target}, group=group, out=out)):
        with pytest.raises(ShapeError, match=r"^reshard: out w is laid out as"):
            call({"w": moves}, out={"w": wrong})
        assert not wrong.to_local().any()
        call({"w": moves}, out={"w": right})
        same(right.to_local(), placed(*target[1]).to_local())


@case
def dtensors_over_submeshes_are_replicas_where_the_layout_says_so(group: TorchGroup) -> None:
    """Without a layout the ranks of two submeshes disagree, as they may have two tensors; another box is refused."""
    if group.size() != 4:
        return
    rank, full = group.rank(), ramp(8, 12)
    mine = [0, 2] if rank % 2 == 0 else [1, 3]
    mesh = DeviceMesh("cpu", torch.tensor(mine), _init_backend=False)
    local = full.chunk(2)[mine.index(rank)].clone()
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    columns = Layout.on_mesh((8, 12), range(4), [1])
    with pytest.raises(MismatchError, match="over 2 ranks"):
        reshard({"w": x}, None, columns, group=group)
    for _ in range(2):
        source = Layout.on_mesh((8, 12), [[0, 1], [2, 3]], [0, None])
        same(reshard({"w": x}, source, columns, group=group)["w"], local_of(columns, rank, full))
    for wrong in (Layout.on_mesh((8, 12), range(4), [0]), Layout.on_mesh((8, 12), [[2, 3], [0, 1]], [0, None])):
        with pytest.raises(ShapeError, match=r"^reshard: w is laid out as"):
            reshard({"w": x}, wrong, columns, group=group)


def colo_tensors_of_another_layout_are_rejected(group: TorchGroup) -> None:
    """ColoTensors of another layout but an equal local shape are rejected; all ranks of the job make the groups."""
    full = ramp(8, 12)
    spec = ColoTensorSpec(ColoGroup(tp_degree=4), ReplicaSpec())
    square, rows = full[:, :8].contiguous(), ShardSpec([0], [4])
    given = ColoTensor.from_torch_tensor(square, spec)
    plan = reshard_plan([given], target=ColoTensorSpec(given.process_group, rows))
    assert torch.equal(plan.execute([given])[0].to_replicate(), square)
    tall = ColoTensor.from_torch_tensor(torch.cat([square] * 4), spec).redistribute(rows)
    assert tall.size_local() == given.size_local()
    with pytest.raises(ShapeError, match=r"^reshard: 0 is laid out as"):
        plan.execute([tall])


@case
def threads_execute_one_plan(group: TorchGroup) -> None:
    """Eight threads execute one plan with tensors of more strides than its cache of steps holds."""
    if group.size() > 1:
        return
    rows, columns = layouts(group, (2, 2))
    plan = reshard_plan([torch.ones(2, 2)], rows, columns, group=group)
    memory, errors = ramp(100), []

    def work(thread: int) -> None:
        try:
            for i in range(20):
                x = memory.as_strided((2, 2), (2 + (5 * i + thread) % 40, 1), 0)
                same(plan.execute([x])[0], x.flip(1))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []


def destroyed_groups_are_named(group: TorchGroup) -> None:
    """A plan does not keep its group alive, and names the destroyed group in ``execute``."""
    rows, columns = layouts(group)
    x = local_of(rows, group.rank(), ramp(8, 12))
    own = dist.new_group(list(range(group.size())), backend="gloo")
    plans = [reshard_plan([x, x.clone()], rows, [columns, target], group=own) for target in (rows, columns)]
    out = [torch.empty(local_of(each, group.rank(), ramp(8, 12)).shape) for each in (columns, rows)]
    for plan in plans:
        for _ in range(2):
            plan.execute([x, x.clone()])
    plans[0].execute([x, x.clone()], out=out)
    dist.barrier(group)
    gone = weakref.ref(own)
    dist.destroy_process_group(own)
    del own
    gc.collect()
    assert gone() is None
    for plan in plans:
        with pytest.raises(GroupError, match=r"^reshard: the process group of this plan was destroyed"):
            plan.execute([x, x.clone()])
    with pytest.raises(GroupError, match=r"^reshard: the process group of this plan was destroyed"):
        plans[0].execute([x, x.clone()], out=out)


@case
def out_shares_memory_through_another_storage(group: TorchGroup) -> None:
    """``out`` shares memory with a source through another storage: the addresses tell."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    x, expected = local_of(rows, rank, full), local_of(columns, rank, full)
    memory = np.zeros(200, np.float32)
    given = torch.from_numpy(memory[: x.numel()]).view(x.shape)
    out = torch.from_numpy(memory[16 : 16 + expected.numel()]).view(expected.shape)
    for _ in range(3):
        given.copy_(x)
        reshard(given, rows, columns, group=group, out=out)
        same(out, expected)
    given.copy_(x)
    if group.size() > 1:
        with pytest.raises(ArgumentError, match=r"^reshard: out shares memory with the tensors"):
            reshard(given, rows, columns, group=group, out=out, bucket_bytes=64)
    beside = torch.from_numpy(memory[x.numel() : x.numel() + expected.numel()]).view(expected.shape)
    reshard(given, rows, columns, group=group, out=beside, bucket_bytes=64)
    same(beside, expected)


@case
def outs_that_cannot_be_written_are_rejected(group: TorchGroup) -> None:
    """Inference tensors and self-overlapping tensors as ``out`` are rejected, and names that are no strings."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    x, expected = local_of(rows, rank, full), local_of(columns, rank, full)
    plan = reshard_plan(torch.float32, rows, columns, group=group)
    same(plan.execute(x), expected)
    with torch.inference_mode():
        frozen = torch.zeros_like(expected)
        plan.execute(x, out=frozen)
        same(frozen, expected)
        frozen.zero_()
    windows = torch.zeros(100).as_strided(expected.shape, (1, 2))
    for out, message in (
        (frozen, "out tensor is an inference tensor"),
        (windows, "elements of out tensor share memory"),
    ):
        for call in (plan.execute, lambda given, out: reshard(given, rows, columns, group=group, out=out)):
            with pytest.raises(ArgumentError, match=f"^reshard: {message}"):
                call(x, out=out)
        assert not out.any()
    apart = torch.zeros(expected.shape[1], 2 * expected.shape[0])[:, ::2].t()
    plan.execute(x, out=apart)
    same(apart, expected)
    numbered: Any = {0: x}
    with pytest.raises(CommError, match="names must be strings"):
        OwnedExchange(numbered, {"0": 0}, rows, group=group)


@pytest.mark.ranks(1, 2, pytest.param(4, marks=pytest.mark.slow))
def test_reused_plans(group: TorchGroup) -> None:
    run_cases(case, group)


def test_what_all_ranks_of_the_job_make(pool: Pool) -> None:
    pool.run(colo_tensors_of_another_layout_are_rejected, world=8)
    pool.run(destroyed_groups_are_named, world=8)
