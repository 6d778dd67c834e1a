"""What a shard is stays with it: its layout, its sharing with others, and its place among the shards."""

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from shards import ranks_of, shard_of, sharded
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.errors import CommError, MismatchError, UnsupportedError
from tritoncomm.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    pickles,
    shard_parameters,
    utils,
)
from tritoncomm.tensor.layout import plain

FULL = torch.arange(1.0, 17.0).view(4, 4) / 8


@contextmanager
def swapping(on: bool) -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head.weight = self.embed.weight


def made(kind: Callable[[], nn.Module], seed: int, pg: ProcessGroup, dim: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = kind()
    name = "embed.weight" if isinstance(module, Tied) else "weight"
    shard_parameters(module, {name: ShardSpec([dim], [pg.tp_world_size()])}, pg)
    return module


KINDS: list[Callable[[], nn.Module]] = [Tied, lambda: nn.Linear(4, 6)]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("swaps", [False, True])
def test_conversions_and_loading_keep_the_layout(group: TorchGroup, swaps: bool) -> None:
    """``load_state_dict``, its ``assign=True``, casts and ``to``; tied parameters stay tied, gradients follow."""
    pg = ranks_of(group)
    with swapping(swaps):
        for kind in KINDS:
            for dim in (0, -1):
                for what in ("load", "assign", "double", "to"):
                    module, other = made(kind, 0, pg, dim), made(kind, 1, pg, dim)
                    spec = next(iter(module.parameters())).dist_spec  # pyright: ignore[reportAttributeAccessIssue]
                    wanted = utils.full_state_dict(other if what in ("load", "assign") else module)
                    if what in ("load", "assign"):
                        module.load_state_dict(other.state_dict(), assign=what == "assign")
                    else:
                        module.double() if what == "double" else module.to(torch.float64)
                    where = what, dim, swaps
                    parameters = list(module.parameters())
                    if isinstance(module, Tied) and what != "assign":  # torch assigns each name by itself
                        assert module.head.weight is module.embed.weight, where
                    for p in parameters:
                        assert type(p) is ColoParameter, where
                        assert p.requires_grad, where
                        assert p.is_leaf, where
                    assert parameters[0].dist_spec == spec, where  # pyright: ignore[reportAttributeAccessIssue]
                    for name, x in utils.full_state_dict(module).items():
                        assert torch.equal(x.float(), wanted[name].float()), where
                    if isinstance(module, Tied) and what == "assign":
                        continue
                    optimizer = torch.optim.SGD(parameters, 0.5)
                    sum((p * 2).sum() for p in parameters).backward()  # pyright: ignore[reportAttributeAccessIssue]
                    optimizer.step()
                    for name, x in utils.full_state_dict(module).items():
                        assert torch.allclose(x.float(), wanted[name].float() - 1), where


DEVICES = {"cuda", "pin_memory", "share_memory_", "xpu"}


def calls(x: Tensor, other: Tensor) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Any]]]:
    """Every function of torch that takes a tensor alone, or with another one, and returns one of them or a copy."""
    for function in torch.overrides.get_testing_overrides():
        name = torch.overrides.resolve_name(function) or ""
        short = name.rpartition(".")[2]
        if not name.startswith("torch.") or ".cuda" in name or "dropout" in name or short in DEVICES:
            continue
        for more in (False, True):
            call = (lambda x, y, f=function: f(x, y)) if more else (lambda x, _, f=function: f(x))
            a, b = x.clone(), other.clone()
            try:
                result = call(a, b)
            except Exception:  # it takes other arguments
                continue
            if not (isinstance(result, Tensor) and result.shape == x.shape and result.layout is torch.strided):
                continue
            if any(result is y or torch.equal(result.to(torch.complex128), y.to(torch.complex128)) for y in (a, b)):
                yield f"{name}{' with another' if more else ''}", call


def run_walk(group: TorchGroup) -> int:
    """An operator that returns its argument, or a copy of one, keeps the shard's layout, or is refused by name."""
    pg, spec = ranks_of(group), ShardSpec([0], [group.size()])
    other, seen, gathered = FULL.flip(0) * 3, 0, []
    warnings.simplefilter("ignore")
    for name, call in list(calls(FULL, other)):
        x, y = sharded(FULL, spec, pg), sharded(other, spec, pg)
        expected = call(FULL.clone(), other.clone())
        try:
            result = call(x, y)
        except CommError:
            continue
        seen += 1
        if not isinstance(result, ColoTensor):
            assert ".data.__get__" in name, name
            continue
        if result.is_replicate():
            gathered.append(name)
            continue
        assert result.dist_spec == spec, name
        if result is x:  # a random fill, for one
            continue
        own = plain(result).detach().to(torch.complex128)  # which holds every other dtype
        assert result.dtype is expected.dtype, name
        assert torch.equal(own, shard_of(expected, spec, group.rank()).to(torch.complex128)), name
    assert {name.partition(" ")[0].rpartition(".")[2] for name in gathered} <= COMPUTES, gathered
    return seen


COMPUTES = {
    "block_diag", "chain_matmul", "msort", "slice_copy", "slice_inverse", "slice_scatter", "squeeze_copy", "sym_sum",
    "resize_as",
}  # fmt: skip
"""Operators that compute something, which on these values happens to be an argument; they warn that they gather."""


def test_no_operator_turns_a_shard_into_a_replica(pool: Pool) -> None:
    assert min(pool.run(run_walk, world=2)) > 100


@pytest.mark.ranks(2, 4)
def test_a_parameter_of_a_parameter(group: TorchGroup) -> None:
    pg, spec = ranks_of(group), ShardSpec([0], [group.size()])
    p = ColoParameter(FULL.clone(), True, ColoTensorSpec(pg))
    p.set_dist_spec(spec)
    for source in (p, p.detach(), sharded(FULL, spec, pg)):
        for needs in (True, False):
            q: Any = nn.Parameter(source, requires_grad=needs)
            assert (type(q), q.requires_grad, q.is_leaf, q.dist_spec) == (ColoParameter, needs, True, spec)
            assert q.data_ptr() == source.data_ptr()
            assert torch.equal(plain(q.to_replicate()), FULL)
            assert q.shared_param_modules == []
    assert type(p.detach()) is ColoTensor
    assert not isinstance(p.detach(), nn.Parameter)
    module = nn.Module()
    module.weight = nn.Parameter(p)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert isinstance(nn.Parameter(p[0]), nn.Parameter), "a view stays one"


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.filterwarnings("ignore:.*has no rule for these shards")
def test_parametrizations_are_right_or_refused(group: TorchGroup, name: str) -> None:
    pg, x = ranks_of(group), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for dim in (0, -1):
        layers = []
        for shards in (True, False):
            torch.manual_seed(0)
            layer = nn.Linear(4, 6)
            if shards:
                shard_parameters(layer, {"weight": ShardSpec([dim], [2])}, pg)
            try:
                torch.manual_seed(2)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    layers.append(getattr(nn.utils.parametrizations, name)(layer))
            except CommError:
                assert shards
        for layer in layers if len(layers) == 2 else ():
            layer.eval()
        if len(layers) == 2:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mine = layers[0](x)
            assert torch.allclose(plain(mine.to_replicate()), layers[1](x), atol=1e-5), (name, dim)


def test_copies_of_leaves_have_gradients_and_attributes(group: TorchGroup) -> None:
    """As torch's: a leaf keeps both, a parameter neither."""
    pg, spec = ranks_of(group), ShardSpec([0], [group.size()])
    x: Any = sharded(FULL, spec, pg).requires_grad_()
    (x * 2).sum().backward()
    x.note = ["a list"]
    twin, again = copy.deepcopy([x, x])
    assert twin is again
    assert twin.grad.dist_spec == spec
    assert torch.equal(plain(twin.grad), plain(x.grad))
    assert twin.grad.data_ptr() != x.grad.data_ptr()
    assert twin.note == x.note
    assert twin.note is not x.note
    assert twin.process_group is x.process_group
    p: Any = ColoParameter(FULL.clone(), True, ColoTensorSpec(pg))
    (p * 2).sum().backward()
    p.note = 1
    assert not hasattr(copy.deepcopy(p), "note")
    assert copy.deepcopy(p).grad is None


def test_sparse_gradients_are_refused_in_forward(group: TorchGroup) -> None:
    pg, ids = ranks_of(group), torch.tensor([[1, 1, 3], [0, 5, 5]])
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for dim in (0, -1):
            layer = kind(8, 4, sparse=True, **({"mode": "sum"} if kind is nn.EmbeddingBag else {}))
            shard_parameters(layer, {"weight": ShardSpec([dim], [2])}, pg)
            with pytest.raises(UnsupportedError, match="sparse=True is not supported"):
                layer(ids)
    x = sharded(FULL, ShardSpec([0], [2]), pg)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in (lambda: x.to_sparse(), lambda: x.to_sparse_csr()):
            with pytest.raises(UnsupportedError, match="layouts are of strided tensors"):
                call()


def saved(x: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer


def loaded(buffer: io.BytesIO) -> Any:
    buffer.seek(0)
    return torch.load(buffer)


USES: dict[str, Callable[[Any, Any], Any]] = {
    "copy_": lambda p, x: p.detach().copy_(x),
    "data": lambda p, x: setattr(p, "data", x),
    "grad": lambda p, x: setattr(p, "grad", x),
    "add": lambda p, x: x + 1,
    "linear": lambda p, x: nn.functional.linear(torch.ones(1, 4), x),
    "redistribute": lambda p, x: x.redistribute(ReplicaSpec()),
    "to_dtensor": lambda p, x: x.to_dtensor(),
    "set_dist_spec": lambda p, x: x.set_dist_spec(ReplicaSpec()),
    "from_torch_tensor": lambda p, x: ColoTensor.from_torch_tensor(x, ColoTensorSpec(p.process_group)),
    "ColoParameter": lambda p, x: ColoParameter(x, True, ColoTensorSpec(p.process_group)),
    "nn.Parameter": lambda p, x: nn.Parameter(x),
    "checkpoint": lambda p, x: x.__create_write_items__("x", None),
    "foreach": lambda p, x: torch._foreach_add_([p.detach()], [x]),
    "a copy": lambda p, x: p.detach().copy_(x.clone().detach().to(torch.float64).cpu()),
    "saved again": lambda p, x: p.detach().copy_(loaded(saved(x))),
    "deepcopy": lambda p, x: p.detach().copy_(copy.deepcopy(x)),
}


def assigned(module: nn.Module, state: dict[str, Any]) -> None:
    """Load with ``assign=True``, which may fail, and run the module."""
    module.load_state_dict(state, assign=True)
    module(torch.ones(1, 4))


def run_loads(group: TorchGroup, folder: str) -> None:
    """Every rank loads every rank's file; where the shard is another one's, only questions and copies are answered."""
    pg, world, rank = ranks_of(group), group.size(), group.rank()
    linear = made(lambda: nn.Linear(4, 6), 3, pg)
    weight = {name: x.clone() for name, x in utils.full_state_dict(linear).items()}
    torch.save(linear.state_dict(), Path(folder) / f"{world}-{rank}.pt")
    dist.barrier(group)
    for saver in range(world):
        module = made(lambda: nn.Linear(4, 6), 4, pg)
        state = torch.load(Path(folder) / f"{world}-{saver}.pt")
        x = state["weight"]
        assert (tuple(x.size()), x.dist_spec) == ((6, 4), ShardSpec([0], [world]))
        assert tuple(x.shape) == tuple(shard_of(weight["weight"], x.dist_spec, saver).shape)
        assert torch.equal(x.reshard_local(), shard_of(weight["weight"], x.dist_spec, saver))
        assert repr(x).startswith("ColoTensor")
        if saver == rank:
            module.load_state_dict(state)
            assert type(x) is ColoTensor
            continue
        for use in USES.values():
            with pytest.raises(MismatchError, match=f"shard {saver} of {world} .* holds shard {rank}"):
                use(module.weight, x)
        refused = pytest.raises((RuntimeError, MismatchError), match=f"shard {saver} of {world}|size mismatch")
        with refused:
            module.load_state_dict(state)
        for swaps in (False, True):
            with swapping(swaps), refused:
                assigned(module, state)
        with pytest.raises((ValueError, MismatchError), match=f"shard {saver} of {world}|the state dict has"):
            utils.load_full_state_dict(module, state)


def test_a_file_of_another_rank(pool: Pool, tmp_path: Path) -> None:
    for world in (2, 4):
        pool.run(run_loads, str(tmp_path), world=world)


@pytest.mark.ranks(4)
def test_replicas_load_each_other_s_files(group: TorchGroup) -> None:
    """Data-parallel replicas of a shard hold the same one; a replicated tensor is everybody's."""
    pg = ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=2)
    spec = ShardSpec([0], [2])
    x = ColoTensor(shard_of(FULL, spec, pg.tp_local_rank()), ColoTensorSpec(pg, spec), FULL.shape)
    for each, own in ((x, 2), (ColoTensor(FULL.clone(), ColoTensorSpec(pg)), 1)):
        files: list[Any] = [None] * group.size()
        dist.all_gather_object(files, saved(each).getvalue(), group=group)
        for rank, file in enumerate(files):
            twin = torch.load(io.BytesIO(file))
            assert (type(twin) is ColoTensor) == (rank % own == group.rank() % own), (rank, own)


def run_other_ranks(group: TorchGroup, folder: str) -> str:
    module = made(lambda: nn.Linear(4, 6), 4, ranks_of(group))
    pickles._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = torch.load(Path(folder) / "2-0.pt")
    words = "this file is of 2 ranks, and the job has .* or a distributed checkpoint"
    with pytest.raises((RuntimeError, MismatchError)):
        module.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"load_full_state_dict .* or a distributed checkpoint"):
        module.weight.detach().copy_(state["weight"])  # pyright: ignore[reportCallIssue]
    assert any(re.search(words, str(each.message)) for each in caught), [str(each.message) for each in caught]
    return type(state["weight"]).__name__


def test_a_file_of_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    pool.run(run_loads, str(tmp_path), world=2)
    assert set(pool.run(run_other_ranks, str(tmp_path), world=(2, 3))) == {"LoadedShard"}


@pytest.mark.ranks(4)
def test_a_file_of_as_many_other_ranks_names_them(group: TorchGroup) -> None:
    x = sharded(FULL, ShardSpec([0], [4]), ranks_of(group))
    function, (name, data, flag, (_, *state)) = x.__reduce_ex__(2)
    other = object.__new__(ProcessGroup)
    world, left_out = dist.get_world_size(), (group.rank() + 1) % 4
    other.__setstate__({"ranks": [*({*range(world)} - {left_out}), 99], "tp": 4, "dp": world // 4, "cpu": False})
    pickles._warned.clear()
    with pytest.warns(UserWarning, match=rf"of ranks \[.*\], and the job has 0 to {world - 1}\."):
        twin = function(name, data, flag, (other, *state))
    assert type(twin) is pickles.LoadedShard


def test_files_from_before_warn_once(group: TorchGroup) -> None:
    x = sharded(FULL, ShardSpec([0], [2]), ranks_of(group))
    function, (name, data, flag, state) = x.__reduce_ex__(2)
    pickles._warned.clear()
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            twin = function(name, data, flag, state[:5])
        assert len(caught) == times
        assert torch.equal(plain(twin), plain(x))
