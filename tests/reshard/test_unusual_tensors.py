"""Odd uses of resharding against gathering and slicing: views, empty tensors, kinds of tensors, modes, second calls."""

from unittest import mock

import pytest
import torch
from bits import random_bits
from reshardings import Cases, layouts, local_of, ramp, run_cases, same
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from traffic import Traffic

import tritoncomm
from tritoncomm import record
from tritoncomm.errors import ArgumentError, CommError, ShapeError, UnsupportedError
from tritoncomm.reshard import Layout, planner, reshard, reshard_plan

case = Cases()


@case
def views_as_sources(group: TorchGroup) -> None:
    """Columns, transposed, every other row, windows that overlap, a row for all, and a view at an odd address."""
    rows, columns = layouts(group)
    full, rank, plan = ramp(8, 12), group.rank(), None
    x = local_of(rows, rank, full)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    apart = torch.zeros(2 * x.shape[0], 24)[::2, 6:18].copy_(x)
    plan = reshard_plan(x, rows, columns, group=group)
    for given in (x.t().contiguous().t(), apart, shifted, x, torch.stack([x, x], 1)[:, 0], x):
        for _ in range(3):
            same(plan.execute(given), local_of(columns, rank, full))
    counted = torch.arange(100.0)
    windows = counted.as_strided(x.shape, (1, 1), 5 + rank * x.shape[0])
    same(reshard(windows, rows, columns, group=group), local_of(columns, rank, counted.as_strided((8, 12), (1, 1), 5)))
    same(plan.execute(torch.ones(12).expand(x.shape)), torch.ones(local_of(columns, rank, full).shape))


@case
def empty_views_with_an_offset(group: TorchGroup) -> None:
    """An empty view with an offset into a storage without bytes is accepted: a rank without rows has such columns."""
    rows, columns = layouts(group, (1, 12))
    rank, full = group.rank(), ramp(1, 12)
    wide = torch.zeros(local_of(rows, rank, full).shape[0], 20)
    x = wide[:, 5:17].copy_(local_of(rows, rank, full))
    plan = reshard_plan(x, rows, columns, group=group)
    out = torch.empty_like(local_of(columns, rank, full))
    for _ in range(3):
        same(reshard(x, rows, columns, group=group), local_of(columns, rank, full))
        same(plan.execute(x), local_of(columns, rank, full))
        same(plan.execute(x, out=out), local_of(columns, rank, full))
    back = torch.zeros(wide.shape)[:, 5:17]
    same(reshard(out, columns, rows, group=group, out=back), local_of(rows, rank, full))


@case
def results_are_independent(group: TorchGroup) -> None:
    """Every result has memory of its own, in the first and in later calls."""
    rows, columns = layouts(group)
    rank, names = group.rank(), ("a", "b", "c")
    given = {name: local_of(rows, rank, ramp(8, 12) + 100 * i) for i, name in enumerate(names)}
    before = {name: x.clone() for name, x in given.items()}
    plan = reshard_plan(given, rows, columns, group=group)
    kept = plan.execute(given)
    for _ in range(3):
        results = plan.execute(given)
        for i, x in enumerate(results.values()):
            same(x, local_of(columns, rank, ramp(8, 12) + 100 * i))
            assert (x._base, x.is_contiguous(), x.storage_offset()) == (None, True, 0)
            assert x.untyped_storage().nbytes() == x.nbytes
            assert (x.is_leaf, x.requires_grad, x.is_inference()) == (True, False, False)
            x.add_(1).resize_(0)
        assert all(torch.equal(given[name], before[name]) for name in names)
    for i, x in enumerate(kept.values()):
        same(x, local_of(columns, rank, ramp(8, 12) + 100 * i))


@case
def out_tensors_are_reused(group: TorchGroup) -> None:
    """``out`` tensors are reused, replaced, and parameters; changed sources are read again."""
    rows, columns = layouts(group)
    rank, names = group.rank(), [f"w{i}" for i in range(17)]
    fulls = {name: ramp(8, 12) + 100 * i for i, name in enumerate(names)}
    given = {name: local_of(rows, rank, full) for name, full in fulls.items()}
    expected = {name: local_of(columns, rank, full) for name, full in fulls.items()}
    plan = reshard_plan(given, rows, columns, group=group)

    def check(out: dict[str, Tensor], more: float = 0.0) -> None:
        with record.recording() as counted:
            assert plan.execute(given, out=out) is out
        for name, x in out.items():
            same(x, expected[name] + more)
        assert counted["reshard", "torch"].bytes_copied == plan.bytes_copied

    out = {name: torch.empty_like(x) for name, x in expected.items()}
    check(out)
    for i in range(3):
        for x in given.values():
            x += 1
        check(out, i + 1.0)
    given["w3"].data = given["w3"].clone()
    check(out, 3.0)
    other = {name: torch.empty_like(x) for name, x in expected.items()}
    check(other, 3.0)
    check(out, 3.0)
    strided = other | {"w1": torch.zeros(other["w1"].shape[::-1]).t()}
    check_strided = plan.execute(given, out=strided)
    same(check_strided["w1"], expected["w1"] + 3.0)
    with torch.no_grad():
        parameters = {name: x.clone().requires_grad_() for name, x in out.items()}
        check(parameters, 3.0)
        check(parameters, 3.0)
    with pytest.raises(ArgumentError, match="out w0 requires grad"):
        plan.execute(given, out=parameters)
    check(out, 3.0)
    shared = out | {"w2": out["w1"]}
    with pytest.raises(ArgumentError, match="share memory"):
        plan.execute(given, out=shared)
    with pytest.raises(ArgumentError, match="the plan is for"):
        plan.execute(given, out={**out, "w17": out["w1"]})


@case
def later_tensors_are_checked(group: TorchGroup) -> None:
    """A wrong tensor in a later execution is rejected by name, and the plan stays usable."""
    rows, columns = layouts(group)
    x = local_of(rows, group.rank(), ramp(8, 12))
    plan = reshard_plan({"w": x}, rows, columns, group=group)
    for _ in range(3):
        plan.execute({"w": x})
    for given, kind, words in (
        ({"w": torch.ones(3, 5)}, ShapeError, "w is [3, 5]"),
        ({"w": x.flatten()}, ShapeError, "w is ["),
        ({"w": x.double()}, ArgumentError, "w is torch.float64"),
        ({"w": x.clone().requires_grad_()}, ArgumentError, "w requires grad"),
        ({"v": x}, ArgumentError, "the plan is for ['w']"),
        ({"w": x, "v": x}, ArgumentError, "the plan is for ['w']"),
        ([x], ArgumentError, "the plan is for ['w']"),
        (x, ArgumentError, "the plan is for ['w']"),
        ({"w": 3}, ArgumentError, "w"),
        ({"w": None}, ArgumentError, "w"),
        ({"w": x.to_sparse()}, ArgumentError, "w"),
        ({"w": x.to("meta")}, ArgumentError, "w"),
        (3, ArgumentError, "int"),
    ):
        with pytest.raises(kind) as caught:
            plan.execute(given)
        assert words in str(caught.value)
        same(plan.execute({"w": x})["w"], local_of(columns, group.rank(), ramp(8, 12)))


@case
def gradient_and_inference_modes(group: TorchGroup) -> None:
    """Later calls run under other modes than the first: gradients, inference, dispatch."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    expected = local_of(columns, rank, full)
    x = local_of(rows, rank, full).requires_grad_()
    plan = reshard_plan(x, rows, columns, group=group)
    for _ in range(3):
        with torch.no_grad():
            y = plan.execute(x)
        assert not y.requires_grad
        same(y, expected)
        y = plan.execute(x)
        same(y, expected)
        (grad,) = torch.autograd.grad((y * 3).sum(), x)
        same(grad, torch.full_like(x, 3))
        with torch.inference_mode():
            y = plan.execute(x)
            assert y.is_inference()
            same(plan.execute(x.detach()), expected)
        with Traffic() as traffic:
            same(plan.execute(x.detach()), expected)
        assert traffic.allocated >= y.nbytes
    held = plan.execute(torch.nn.Parameter(x.detach()))
    held.sum().backward(retain_graph=True)
    held.sum().backward()
    loss = (plan.execute(x) ** 2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@case
def the_same_tensor_twice(group: TorchGroup) -> None:
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    x = local_of(rows, rank, full).requires_grad_()
    plan = reshard_plan([x, x, x[:]], rows, columns, group=group)
    for _ in range(3):
        one, two, three = plan.execute([x, x, x[:]])
        same(one, local_of(columns, rank, full))
        assert one.data_ptr() != two.data_ptr() or not one.numel()
        (grad,) = torch.autograd.grad((one + 2 * two + 3 * three).sum(), x)
        same(grad, torch.full_like(x, 6))


@case
def empty_requests(group: TorchGroup) -> None:
    """No tensors, no elements, or no part of a layout."""
    rows, columns = layouts(group, (0, 5))
    assert reshard({}, rows, columns, group=group) == {}
    assert reshard([], rows, columns, group=group) == []
    plan = reshard_plan({"w": torch.float32}, rows, columns, group=group)
    for _ in range(3):
        shape = columns.local_shape(group.rank())
        assert plan.execute({"w": torch.empty(rows.local_shape(group.rank()) or 0)})["w"].shape == shape
    first = Layout.replicated((), [0])
    everywhere = Layout.replicated((), range(group.size()))
    for _ in range(3):
        x = torch.tensor(7.0) if group.rank() == 0 else torch.empty(0)
        same(reshard(x, first, everywhere, group=group), torch.tensor(7.0))


@case
def kinds_of_tensors(group: TorchGroup) -> None:
    """Every dtype keeps its bits, lazy views are resolved, and tensors that are not strided are rejected by name."""
    rows, columns = layouts(group)
    rank = group.rank()
    for dtype in (torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2, torch.int16, torch.uint8):
        full = random_bits((8, 12), dtype)
        same(reshard(local_of(rows, rank, full), rows, columns, group=group), local_of(columns, rank, full))
        for other in (torch.float32, torch.int64):
            with pytest.raises(UnsupportedError, match="cannot be cast"):
                reshard(local_of(rows, rank, full), rows, columns, group=group, dtype=other)
    z = torch.complex(ramp(8, 12), -ramp(8, 12))
    x = local_of(rows, rank, z)
    same(reshard(x.conj(), rows, columns, group=group), local_of(columns, rank, z.conj().resolve_conj()))
    same(reshard(x.conj().imag, rows, columns, group=group), local_of(columns, rank, ramp(8, 12)))
    w = x.clone().requires_grad_()
    y = reshard(w, rows, columns, group=group)
    (y.real * 3 + y.imag * 2).sum().backward()
    same(w.grad, torch.full_like(w, 3 + 2j))
    for wrong in (x.real.to("meta"), x.real.to_sparse()):
        with pytest.raises(CommError, match="reshard"):
            reshard(wrong, rows, columns, group=group)


@case
def out_in_views_and_sources(group: TorchGroup) -> None:
    """``out`` is a view with gaps, or a source; ``out`` tensors that share elements are rejected."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    x, expected = local_of(rows, rank, full), local_of(columns, rank, full)
    plan = reshard_plan({"a": x, "b": x}, rows, columns, group=group)
    memory = torch.full((8, 40), -1.0)
    width = expected.shape[1]
    out = {"a": memory[:, 1 : 1 + width], "b": memory[:, 20 : 20 + width]}
    for _ in range(2):
        assert plan.execute({"a": x, "b": x + 1}, out=out) is out
        same(out["a"], expected)
        same(out["b"], expected + 1)
        assert (memory[:, 0] == -1).all()
    with pytest.raises(ArgumentError, match="out b"):
        plan.execute({"a": x, "b": x}, out={"a": expected, "b": expected})
    with pytest.raises(ArgumentError, match="share memory"):
        plan.execute({"a": x, "b": x}, out={"a": expected.clone(), "b": torch.ones(1, 1).expand(expected.shape)})
    crossing = {"a": memory[:, :width], "b": memory[:, width - 1 : 2 * width - 1]}
    with pytest.raises(ArgumentError, match="out a and out b share memory"):
        plan.execute({"a": x, "b": x}, out=crossing)
    with pytest.raises(ArgumentError, match="out has"):
        reshard({"a": x}, rows, columns, group=group, out={"b": expected})


@case
def options(group: TorchGroup) -> None:
    """Buckets of any size are accepted; names that are equal as text, and vmap, are rejected."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    x, expected = local_of(rows, rank, full), local_of(columns, rank, full)
    for limit in (16 * group.size(), 100, 2**62):
        same(reshard(x, rows, columns, group=group, bucket_bytes=limit), expected)
    assert list(reshard({7: x, "k": x}, rows, columns, group=group)) == [7, "k"]
    with pytest.raises(ArgumentError, match="'7'"):
        reshard({7: x, "7": x}, rows, columns, group=group)
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.func.vmap(lambda each: reshard(each, rows, columns, group=group))(torch.stack([x, x]))


@case
def out_in_conjugate_and_negative_views(group: TorchGroup) -> None:
    """``out`` is a conjugate or negative view: values are right, and passes are counted once."""
    rows, columns = layouts(group)
    rank, full = group.rank(), torch.complex(ramp(8, 12), ramp(8, 12) + 1)
    expected = local_of(columns, rank, full)
    into = torch.zeros_like(expected).conj()
    assert reshard(local_of(rows, rank, full), rows, columns, group=group, out=into) is into
    same(into.resolve_conj(), expected)
    negative = torch.zeros_like(expected).conj().imag
    assert negative.is_neg()
    reshard(local_of(rows, rank, full.imag.contiguous()), rows, columns, group=group, out=negative)
    same(negative.resolve_neg(), expected.imag.contiguous())
    x, plain, sizes = local_of(rows, rank, full), torch.zeros_like(expected), []
    for out in (None, plain, into):
        with record.recording() as counts:
            reshard(x, rows, columns, group=group, out=out)
        sizes.append(sum(each.bytes_copied for each in counts.values()))
    assert sizes[1:] == [sizes[0], sizes[0] + 2 * plain.nbytes]


@case
def autograd_notices_written_outs(group: TorchGroup) -> None:
    """Autograd notices that ``out`` tensors were written: a graph that saved them raises."""
    rows, columns = layouts(group)
    x = local_of(rows, group.rank(), ramp(8, 12))
    out, leaf = torch.ones(local_of(columns, group.rank(), ramp(8, 12)).shape), torch.ones((), requires_grad=True)
    plan = reshard_plan(x, rows, columns, group=group)
    for path in ("torch", "triton"):
        with tritoncomm.path(path):
            for _ in range(3):
                y = (leaf * out).sum()
                plan.execute(x, out=out)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.backward()


@case
def pass_through_tensors_are_returned(group: TorchGroup) -> None:
    """Pass-through tensors are returned as they are beside moved tensors, in every call."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    given = {name: local_of(rows, rank, full + i).contiguous() for i, name in enumerate("abcd")}
    targets = {"a": rows, "b": columns, "c": rows, "d": columns}
    plan = reshard_plan(given, rows, targets, group=group)

    def check(given: dict[str, Tensor]) -> dict[str, Tensor]:
        results = plan.execute(given)
        assert list(results) == list(given)
        for i, (name, x) in enumerate(results.items()):
            same(x.detach(), local_of(targets[name], rank, full + i))
        return results

    for _ in range(3):
        results = check(given)
        assert results["a"] is given["a"]
        assert results["c"] is given["c"]
    assert check(dict(given, a=given["a"].clone()))["a"] is not given["a"]  # other memory
    check(dict(given, c=given["c"].t().contiguous().t()))
    check(given)  # other strides were the last ones
    check(given)
    parameter = dict(given, a=given["a"].clone().requires_grad_())
    with pytest.raises(ArgumentError, match="a requires grad, but did not"):
        plan.execute(parameter)
    with torch.no_grad():
        check(parameter)
        handed = check(parameter)["a"]
        assert not handed.requires_grad
        assert handed.data_ptr() == parameter["a"].data_ptr()
    with pytest.raises(ArgumentError, match="a requires grad, but did not"):
        plan.execute(parameter)
    check(given)
    for wrong, message in ((None, "a must be a tensor"), (given["a"].to("meta"), "a: a meta tensor"),
                           (given["a"][:-1], "a "), (given["a"].double(), "a is torch.float64")):  # fmt: skip
        with pytest.raises(CommError, match=f"^reshard: {message}"):
            plan.execute(dict(given, a=wrong))
    check(given)
    again = plan.execute(dict(given, a=given["c"]))  # one tensor twice
    assert again["a"] is again["c"] is given["c"]


@case
def pass_through_tensors_with_gradients(group: TorchGroup) -> None:
    """Moved tensors are in the graph beside pass-through tensors; under no_grad no result requires grad."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    given = {name: local_of(rows, rank, full).clone().requires_grad_() for name in "ab"}
    plan = reshard_plan(given, rows, {"a": rows, "b": columns}, group=group)
    for _ in range(3):
        results = plan.execute(given)
        assert results["a"] is given["a"]
        results["b"].sum().backward()
        same(given["b"].grad, torch.ones(given["b"].shape))
        given["b"].grad = None
        with torch.no_grad():
            results = plan.execute(given)
        assert not any(x.requires_grad for x in results.values())
        same(results["b"], local_of(columns, rank, full))
        with torch.inference_mode():
            same(plan.execute(given)["b"], local_of(columns, rank, full))
    with torch.no_grad():
        same(plan.execute(given)["b"], local_of(columns, rank, full))  # the last one was in inference mode


@case
def pass_through_tensors_are_copied_into_out(group: TorchGroup) -> None:
    """Pass-through tensors are copied into ``out``: equal memory, other memory, shared memory."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    stays, moves = (local_of(rows, rank, full + 100 * i).contiguous() for i in range(2))
    expected = [local_of(rows, rank, full), local_of(columns, rank, full + 100)]
    plan = reshard_plan({"a": stays, "b": moves}, rows, {"a": rows, "b": columns}, group=group)

    def check(given: dict[str, Tensor], out: dict[str, Tensor]) -> None:
        before = [x._version for x in out.values()]
        assert plan.execute(given, out=out) is out
        assert all(x._version > version for x, version in zip(out.values(), before, strict=True))
        for x, result in zip(out.values(), expected, strict=True):
            same(x, result)

    given = {"a": stays, "b": moves}
    outs = [{"a": torch.empty_like(expected[0]), "b": torch.empty_like(expected[1])} for _ in range(2)]
    for out in (outs[0], outs[0], outs[1], outs[1] | {"a": outs[0]["a"]}, outs[1]):
        for x in out.values():
            x.fill_(-1)
        check(given, out)
    stays += 1
    expected[0] += 1
    check(given, outs[1])
    leaf = torch.ones((), requires_grad=True)
    y = (leaf * outs[1]["a"]).sum()
    check(given, outs[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    other = moves.clone()
    check({"a": stays, "b": other}, outs[0])
    for _ in range(3):
        memory = other.clone()
        plan.execute({"a": stays, "b": memory}, out={"a": memory, "b": outs[0]["b"]})
        same(memory, expected[0])
        same(outs[0]["b"], expected[1])
    # Two plans have one exchange. Here it moves a tensor into memory of a pass-through tensor.
    same_exchange = reshard_plan({"a": stays, "b": moves}, rows, {"a": rows, "b": columns}, group=group)
    assert same_exchange._executor is plan._executor
    into = stays.view(expected[1].shape)
    plan.execute(given, out=outs[0])
    kept = {"a": torch.empty_like(stays), "b": into}
    same_exchange.execute({"a": expected[0].clone(), "b": moves}, out=kept)
    same(into, expected[1])
    stays.copy_(expected[0])
    plan.execute(given, out={"a": outs[0]["a"], "b": into})
    same(outs[0]["a"], expected[0])
    same(into, expected[1])


@case
def direct_blocks_without_a_pack(group: TorchGroup) -> None:
    """Direct blocks without a pack, from and into views with an offset, in any form, and summed in backward."""
    rows, columns = layouts(group)
    rank, full = group.rank(), ramp(8, 12)
    with mock.patch.object(planner, "_SMALL", 0):
        x = torch.zeros(3, *local_of(rows, rank, full).shape)[1].copy_(local_of(rows, rank, full))
        out = torch.zeros(2, *local_of(columns, rank, full).shape)[1]
        plan = reshard_plan([x, x + 1], rows, columns, group=group, bucket_bytes=64)
        assert any(len(bucket.direct.tensor) for bucket in plan.transfers.buckets)
        more = torch.empty_like(out)
        for i in range(3):
            x += 1
            results = plan.execute([x, x + 1])
            same(results[0], local_of(columns, rank, full + i + 1))
            same(results[1], local_of(columns, rank, full + i + 2))
            plan.execute([x, x + 1], out=[out, more])
            same(out, results[0])
            same(more, results[1])
        for form in (list, tuple, dict):
            given = form([x, x + 1]) if form is not dict else {"0": x, "1": x + 1}
            results = plan.execute(given)
            assert type(results) is (dict if form is dict else list)
            same(results["1" if form is dict else 1], more)
        same(plan.execute({"1": x + 1, "0": x})["1"], more)
        for wrong in ([x], [x, x, x], {"0": x}, {"0": x, "2": x}):
            with pytest.raises(ArgumentError, match="the plan is for"):
                plan.execute(wrong)
        every = Layout.replicated((8, 12), range(group.size()))
        leaf = x.detach().clone().requires_grad_()
        summed = reshard_plan(leaf, rows, every, group=group, grad="partial", bucket_bytes=64)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(summed.execute(leaf).sum() * (rank + 1), leaf)
            same(gradient, torch.full_like(leaf, sum(range(1, group.size() + 1))))


@case
def wrong_outs_are_rejected(group: TorchGroup) -> None:
    """``out`` tensors that cannot be written are rejected by name, by a plan too, and on all ranks together."""
    rows, columns = layouts(group)
    x, out = local_of(rows, group.rank(), ramp(8, 12)), torch.empty(local_of(columns, group.rank(), ramp(8, 12)).shape)
    plan = reshard_plan({"w": x}, rows, columns, group=group)
    for each in (None, out.to("meta"), out.to_sparse()):
        with pytest.raises(ArgumentError, match=r"^reshard: out w"):
            plan.execute({"w": x}, out={"w": each})
        with pytest.raises(ArgumentError, match=r"^reshard: out w"):
            reshard({"w": x}, rows, columns, group=group, out={"w": each})
    plan.execute({"w": x}, out={"w": out})
    same(out, local_of(columns, group.rank(), ramp(8, 12)))


@pytest.mark.ranks(1, 2, pytest.param(4, marks=pytest.mark.slow))
def test_unusual_tensors(group: TorchGroup) -> None:
    run_cases(case, group)
