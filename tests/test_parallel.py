"""Styles of ``parallelize_module``: values and gradients of one process, and of torch's styles."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as theirs
from pool import Pool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tritoncomm import ArgumentError, GroupError, UnsupportedError, parallel, record

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Block(nn.Module):
    """Norm, embedding and an MLP, with sizes that need not divide."""

    def __init__(self, vocab: int, width: int, hidden: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width, padding_idx=1), norm(width)
        self.up, self.down, self.head = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def plan_of(styles: Any, sequence: bool, **more: Any) -> dict[str, Any]:
    """A plan of torch's or of our styles: tensor parallel, with or without sequence parallelism."""
    row, col = styles.RowwiseParallel, styles.ColwiseParallel
    if not sequence:
        return {
            "embed": row(input_layouts=Replicate()),
            "up": col(),
            "down": row(),
            "head": col(output_layouts=Replicate(), **more),
        }
    return {
        "embed": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": styles.SequenceParallel(),
        "up": col(input_layouts=Shard(1)),
        "down": row(output_layouts=Shard(1)),
        "head": col(input_layouts=Shard(1), output_layouts=Replicate(), **more),
    }


def full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_a_block_is_that_of_one_process(
    group: ProcessGroup, sequence: bool, uneven: bool, norm: type[nn.Module]
) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    vocab, width, hidden = (19, 12, 26) if uneven else (24, 8, 16)
    plain = Block(vocab, width, hidden, norm)
    ids = torch.randint(vocab, (3, 8))
    ids[0, :3] = 1  # the padding
    expected = plain(ids)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    ours = theirs.parallelize_module(copy.deepcopy(plain).requires_grad_(), mesh, plan_of(parallel, sequence))
    for parameter in ours.parameters():
        parameter.grad = None
    again = copy.deepcopy(ours)
    for module in (ours, again):
        out = module(ids)
        assert type(out) is Tensor
        torch.testing.assert_close(out, expected, **CLOSE)
        (out * weights).sum().backward()
        for (name, parameter), wanted in zip(module.named_parameters(), plain.parameters(), strict=True):
            if parameter.grad is None:
                raise AssertionError(f"{name} has no gradient")
            torch.testing.assert_close(full(parameter.grad), wanted.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        again.up.weight.zero_()
        assert not torch.equal(again(ids), ours(ids)), "a copy has parameters of its own"
    for name, module in ours.named_children():
        assert isinstance(module, getattr(plain, name).__class__)


LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1), Shard(2))


def shard_of(x: Tensor, layout: Any, group: ProcessGroup) -> Tensor:
    if layout.is_replicate():
        return x
    size = x.shape[layout.dim]
    run = -(-size // group.size())
    start = min(group.rank() * run, size)
    return x.narrow(layout.dim, start, min(run, size - start)).contiguous()


def run_layouts(group: ProcessGroup, outputs: int) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(1)
    for kind in ("ColwiseParallel", "RowwiseParallel"):
        for before in LAYOUTS:
            for after in LAYOUTS:
                for as_dtensor in (False, True):
                    plain = nn.Linear(8, outputs)
                    x = torch.randn(4, 8, 8, requires_grad=True)
                    expected = plain(x)
                    weights = torch.randn_like(expected)
                    (expected * weights).sum().backward()
                    style = getattr(parallel, kind)(
                        input_layouts=before, output_layouts=after, use_local_output=not as_dtensor
                    )
                    module = theirs.parallelize_module(copy.deepcopy(plain), mesh, style)
                    module.zero_grad()
                    local = shard_of(x.detach(), before, group).requires_grad_()
                    out = module(DTensor.from_local(local, mesh, (before,)) if as_dtensor else local)
                    case = f"{kind} {before} {after} {as_dtensor}"
                    if as_dtensor:
                        assert out.shape == expected.shape, case
                        assert out.redistribute(mesh, (after,)).to_local().equal(out.to_local()), case
                        out = out.to_local()
                    torch.testing.assert_close(out, shard_of(expected, after, group), msg=case)
                    (out * shard_of(weights, after, group)).sum().backward()
                    assert local.grad is not None
                    torch.testing.assert_close(local.grad, shard_of(x.grad, before, group), msg=case)
                    for mine, wanted in zip(module.parameters(), plain.parameters(), strict=True):
                        torch.testing.assert_close(full(mine.grad), wanted.grad, msg=case)


@pytest.mark.parametrize(
    ("world", "outputs"), [(2, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 4), (4, 6), (2, 4)))]
)
def test_every_pair_of_layouts(pool: Pool, world: int, outputs: int) -> None:
    pool.run(run_layouts, outputs, world=world)


@pytest.mark.ranks(2, 4)
def test_inputs_that_are_uneven_dtensors(group: ProcessGroup) -> None:
    """DTensors of 5 positions, and of 3 rows of ids, in other layouts than the styles expect."""
    mesh, made = DeviceMesh.from_group(group, "cpu"), torch.Generator().manual_seed(4)
    torch.manual_seed(0)  # of the parameters
    x, ids = torch.randn(2, 5, 8, generator=made), torch.randint(0, 6, (3, 5), generator=made)
    tokens = {"use_local_output": False}
    cases = [
        (nn.Linear(8, 6), parallel.ColwiseParallel(**tokens), x, 1),
        (nn.Linear(8, 6), parallel.ColwiseParallel(output_layouts=Replicate()), x, 1),
        (nn.Linear(8, 6), parallel.RowwiseParallel(), x, 1),
        (nn.LayerNorm(8), parallel.SequenceParallel(**tokens), x, 1),
        (nn.RMSNorm(8), parallel.SequenceParallel(**tokens), x, 1),
        (nn.Embedding(6, 8), parallel.ColwiseParallel(**tokens), ids, 0),
        (nn.Embedding(8, 8), parallel.RowwiseParallel(input_layouts=Replicate()), ids, 0),
    ]
    for plain, style, whole, dim in cases:
        module = copy.deepcopy(plain)
        theirs.parallelize_module(module, mesh, style)
        given = whole.clone().requires_grad_(whole.is_floating_point())
        expected = plain(given)
        expected.sum().backward()
        local = distribute_tensor(whole, mesh, [Shard(dim)]).requires_grad_(whole.is_floating_point())
        out = module(local)
        what = type(plain).__name__, type(style).__name__
        torch.testing.assert_close(full(out), expected, **CLOSE, msg=str(what))
        full(out).sum().backward()
        if whole.is_floating_point():
            torch.testing.assert_close(full(local.grad), given.grad, **CLOSE, msg=str(what))
        for mine, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), wanted.grad, **CLOSE, msg=str(what))


@pytest.mark.ranks(2)
def test_ids_out_of_range(group: ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    module = theirs.parallelize_module(nn.Embedding(6, 4), mesh, parallel.RowwiseParallel(input_layouts=Replicate()))
    for wrong in (6, -1):
        with pytest.raises(IndexError, match="6 rows"):
            module(torch.tensor([0, wrong]))


class Odd(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Kept(nn.Linear):
    """A subclass that keeps forward."""


class More(nn.Linear):
    """One with a parameter of its own."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.ones(4))


def normed(*sizes: int) -> nn.Module:
    """A weight that a hook makes of two parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(nn.Linear(*sizes))


def test_what_is_left_to_torch_and_what_is_refused(group: ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    x = torch.randn(2, 4, 8)
    for module in (Odd(8, 4), nn.Linear(8, 4, bias=False), Kept(8, 4)):
        expected = module(x)
        style = parallel.ColwiseParallel(output_layouts=Replicate())
        out = theirs.parallelize_module(copy.deepcopy(module), mesh, style)
        assert isinstance(out, type(module))
        torch.testing.assert_close(full(out(x)), expected)
        if type(module) is not Odd:
            torch.testing.assert_close(full(out(input=x)), expected)
    for make in (More, normed):  # left to torch
        torch.manual_seed(0)
        module = make(8, 4)
        expected = module(x)
        out = theirs.parallelize_module(module, mesh, parallel.ColwiseParallel(output_layouts=Replicate()))
        torch.testing.assert_close(full(out(x)), expected)
    parametrized = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    with pytest.raises(KeyError, match="parameter name can"):  # torch's refusal
        theirs.parallelize_module(parametrized, mesh, parallel.ColwiseParallel())
    dropout = theirs.parallelize_module(nn.Dropout(0.0), mesh, parallel.SequenceParallel())
    torch.testing.assert_close(full(dropout(x)), x)
    with pytest.raises(NotImplementedError):
        theirs.parallelize_module(nn.Conv1d(2, 2, 1), mesh, parallel.ColwiseParallel())
    frozen = theirs.parallelize_module(nn.Linear(8, 4).requires_grad_(False), mesh, parallel.RowwiseParallel())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    tiny = nn.Embedding(1, 4)  # the last rank has no row
    looked = theirs.parallelize_module(copy.deepcopy(tiny), mesh, parallel.RowwiseParallel(input_layouts=Replicate()))
    torch.testing.assert_close(full(looked(torch.zeros(3, dtype=torch.int64))), tiny(torch.zeros(3, dtype=torch.int64)))
    column = theirs.parallelize_module(nn.Linear(8, 4), mesh, parallel.ColwiseParallel())
    alone = DeviceMesh("cpu", torch.tensor([dist.get_rank()]), _init_backend=False)
    with pytest.raises(ArgumentError, match="came to a module on"):
        column(DTensor.from_local(x, alone, (Replicate(),), run_check=False))
    with pytest.raises(ArgumentError, match="has to be reduced first"):
        column(DTensor.from_local(x, mesh, (Partial(),), run_check=False))
    with pytest.raises(ArgumentError, match="this ColwiseLinear is sharded already; apply one plan once"):
        theirs.parallelize_module(column, mesh, parallel.ColwiseParallel())
    square = DeviceMesh("cpu", torch.arange(2).view(1, 2), mesh_dim_names=("dp", "tp"), _init_backend=False)
    with pytest.raises(GroupError, match=r"a mesh of 2 dims is not one group; pass mesh\['dp'\] or mesh\['tp'\]"):
        theirs.parallelize_module(nn.Linear(8, 4), square, parallel.ColwiseParallel())
    turned = DeviceMesh("cpu", torch.tensor([1, 0]), _init_backend=False)
    with pytest.raises(GroupError, match="ascend"):
        theirs.parallelize_module(nn.Linear(8, 4), turned, parallel.ColwiseParallel(), src_data_rank=None)


class Tied(nn.Module):
    """An embedding and a head of one weight; ``head`` is the class of the head."""

    def __init__(self, head: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(8, 4), head(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return full(self.head(full(self.embed(ids))))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("head", [nn.Linear, Odd], ids=["ours", "torch's"])
@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")], ids="-".join)
def test_shared_parameters_stay_shared(group: ProcessGroup, head: type[nn.Linear], order: tuple[str, str]) -> None:
    """Over steps of an optimizer with momentum, whichever module comes first, and whoever's style runs it."""
    mesh, ids = DeviceMesh.from_group(group, "cpu"), torch.arange(8)
    plan = {
        "embed": parallel.RowwiseParallel(input_layouts=Replicate()),
        "head": parallel.ColwiseParallel(output_layouts=Replicate()),
    }
    model, alone = Tied(head), Tied(head)
    theirs.parallelize_module(model, mesh, {name: plan[name] for name in order})
    assert model.embed.weight is model.head.weight
    for each in (model, alone):
        optimizer = torch.optim.SGD(each.parameters(), 0.05, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            each(ids).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(full(model.embed.weight), alone.embed.weight, **CLOSE)


@pytest.mark.parametrize("head", [nn.Linear, Odd], ids=["ours", "torch's"])
def test_shared_parameters_that_a_plan_unties_are_refused(group: ProcessGroup, head: type[nn.Linear]) -> None:
    mesh, ids = DeviceMesh.from_group(group, "cpu"), torch.arange(8)
    col = parallel.ColwiseParallel(output_layouts=Replicate())
    with pytest.raises(ArgumentError, match=r"is shared with a module that holds it as .* styles that agree"):
        theirs.parallelize_module(Tied(head), mesh, {"embed": col, "head": col})
    one = theirs.parallelize_module(Tied(head), mesh, {"head": col})
    with torch.no_grad():
        torch.testing.assert_close(one(ids), Tied(head)(ids))  # copies are right until one is trained
    with pytest.raises(UnsupportedError, match=r"weight was shared with a module that is not in the plan"):
        one(ids).sum().backward()
    frozen = Tied(head)
    frozen.embed.weight.requires_grad_(False)
    theirs.parallelize_module(frozen, mesh, {"embed": parallel.RowwiseParallel(input_layouts=Replicate())})
    assert not frozen.embed.weight.requires_grad


def test_sums_are_in_place(group: ProcessGroup) -> None:
    """One all-reduce forward and one backward; with sequence parallelism all-gather and reduce-scatter."""
    mesh = DeviceMesh.from_group(group, "cpu")
    x = torch.randn(2, 4, 8, requires_grad=True)
    mlp = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    theirs.parallelize_module(mlp, mesh, {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()})
    record.reset()
    mlp(x).sum().backward()
    counts = {name: (count.calls, count.bytes_copied) for (name, _), count in record.counters().items()}
    assert counts == {
        "reduce_from_tensor_model_parallel_region": (1, 0),
        "copy_to_tensor_model_parallel_region.backward": (1, 0),
    }, "sums are in place"


@pytest.mark.parametrize(
    "sequence", [pytest.param(False, id="tensor", marks=pytest.mark.slow), pytest.param(True, id="sequence")]
)
def test_compiles_into_one_graph(group: ProcessGroup, sequence: bool) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    model = theirs.parallelize_module(Block(24, 8, 16, nn.LayerNorm), mesh, plan_of(parallel, sequence))
    ids = torch.randint(24, (3, 8))
    expected = model(ids)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(ids)
    torch.testing.assert_close(out, expected)
    for mine, wanted in zip(torch.autograd.grad(out.square().sum(), list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(full(mine), full(wanted), **CLOSE)


@pytest.mark.parametrize("output", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_the_bias_does_not_widen_what_autocast_made_narrow(group: ProcessGroup, output: Any) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    layer = theirs.parallelize_module(
        nn.Linear(8, 4), mesh, parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=output)
    )
    x = torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is nn.Linear(8, 4)(x).dtype is torch.bfloat16
    layer(x).sum().backward()
    assert layer.bias.grad is not None
    assert layer.bias.grad.dtype is torch.float32


def test_collectives_are_seen_under_the_names_of_torch_distributed(group: ProcessGroup) -> None:
    """As docs/parallelize_module.md says: by torch's own counter of collectives."""
    mesh = DeviceMesh.from_group(group, "cpu")
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    theirs.parallelize_module(mlp, mesh, {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()})
    x = torch.randn(2, 8, requires_grad=True)
    with CommDebugMode() as seen:
        mlp(x).sum().backward()
    assert {str(name): count for name, count in seen.get_comm_counts().items()} == {"c10d.allreduce_": 2}


def test_the_bias_takes_its_gradient_from_the_gathered_one(group: ProcessGroup) -> None:
    """As torch's style: no message of its own where the output is sharded by tokens; frozen it takes none."""
    mesh, world = DeviceMesh.from_group(group, "cpu"), group.size()
    torch.manual_seed(0)
    plain = nn.Linear(8, 4).double()
    style = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    layer = theirs.parallelize_module(copy.deepcopy(plain), mesh, style)
    x = torch.randn(2 * world, 3, 8, dtype=torch.float64)
    whole, shard = plain(x), layer(x)
    torch.testing.assert_close(shard, whole.chunk(world)[group.rank()])
    whole.square().sum().backward()
    with record.recording() as counted:
        shard.square().sum().backward(create_graph=False)
    assert {name: count.calls for (name, _), count in counted.items()} == {"reduce_scatter_dim.backward": 1}
    torch.testing.assert_close(full(layer.bias.grad), plain.bias.grad)
    twice = torch.autograd.grad(layer(x).pow(3).sum(), layer.bias, create_graph=True)[0]
    torch.testing.assert_close(full(twice), torch.autograd.grad(plain(x).pow(3).sum(), plain.bias)[0])
    layer.bias.requires_grad_(False)
    layer.zero_grad()
    layer(x).sum().backward()
    assert layer.bias.grad is None
    assert layer.weight.grad is not None


class Named(nn.Linear):
    """A linear layer of another name, with a cache that is not saved."""

    cached: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "cached"}


def test_a_subclass_is_pickled(group: ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    layer, x = theirs.parallelize_module(Named(8, 4), mesh, parallel.ColwiseParallel()), torch.randn(2, 8)
    layer.cached = group
    for made in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert isinstance(made, Named)
        assert type(made) is type(layer)
        assert made.cached is None
        assert torch.equal(made(x), layer(x))
        assert made.weight is not layer.weight


@pytest.mark.parametrize("bias", [True, False])
def test_second_gradients_of_parameters(group: ProcessGroup, bias: bool) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias))
    x = torch.randn(3, 4)
    found = []
    for styles in (parallel, theirs):
        plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
        model = theirs.parallelize_module(copy.deepcopy(plain), mesh, plan, src_data_rank=None)
        model[0].weight.requires_grad_(not bias)  # one parameter of a layer may be frozen
        parameters = [each for each in model.parameters() if each.requires_grad]
        first = torch.autograd.grad(model(x).square().sum(), parameters, create_graph=True)
        assert all(isinstance(each, DTensor) for each in first)
        assert [each.placements for each in first] == [each.placements for each in parameters]
        second = torch.autograd.grad(sum(full(each).square().sum() for each in first), parameters)
        found.append([full(each) for each in (*first, *second)])
    for ours, others in zip(*found, strict=True):
        torch.testing.assert_close(ours, others, **CLOSE)
