"""Training on ColoParameters: optimisers, clipping, checkpoints, recomputation, random operators, compute specs."""

import copy
import inspect
import random
import sys
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from pool import Pool
from shards import ranks_of, shard_of, sharded
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tritoncomm import p2p, record
from tritoncomm.debug import replicas
from tritoncomm.errors import ArgumentError, MismatchError, ShapeError, UnsupportedError
from tritoncomm.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    DeviceMesh,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    alpha_beta,
    check_replicas,
    colo_tensor,
    optimizers,
    shard_parameters,
    sharded_optimizer_state,
)
from tritoncomm.tensor.alpha_beta import measure_mesh
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.path_search import shortest_path
from tritoncomm.tensor.rules import random_ops
from tritoncomm.tensor.rules.table import RULES
from tritoncomm.tensor.sharding_spec import ShardingSpec
from tritoncomm.tensor.training import clip_grad_norm_

WIDTH, CLASSES = 8, 10


class Model(nn.Module):
    """An embedding, a column- and a row-parallel linear, norms, and a head whose classes can be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def layouts(world: int) -> dict[str, Any]:
    return {
        "tokens.*": ShardSpec([0], [world]), "up.*": ShardSpec([0], [world]), "down.weight": ShardSpec([-1], [world]),
        "head.*": ShardSpec([0], [world]),
    }  # fmt: skip


def both(pg: ProcessGroup) -> tuple[Model, Model]:
    """The model of one process, and the same one sharded."""
    torch.manual_seed(0)
    reference = Model().double()
    sharded = copy.deepcopy(reference)
    shard_parameters(sharded, layouts(pg.tp_world_size()), pg)
    return reference, sharded


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CLASSES, (5, 3), generator=generator), torch.randint(CLASSES, (5, 3), generator=generator)


def same_parameters(reference: nn.Module, sharded: nn.Module, pg: ProcessGroup, what: Any) -> None:
    for (name, p), (_, q) in zip(reference.named_parameters(), sharded.named_parameters(), strict=True):
        assert isinstance(q, ColoParameter), name
        torch.testing.assert_close(
            plain(q).detach(), shard_of(p.detach(), q.dist_spec, pg.tp_local_rank()), rtol=1e-9, atol=1e-9,
            msg=lambda m, name=name: f"{what} {name}: {m}",
        )  # fmt: skip


OPTIMISERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adam fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "lion-like nadam": partial(torch.optim.NAdam, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "rprop foreach": partial(torch.optim.Rprop, lr=0.01, foreach=True),
}


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(group: TorchGroup, name: str) -> None:
    pg = ranks_of(group)
    reference, sharded = both(pg)
    reference_optimizer, optimizer = OPTIMISERS[name](reference.parameters()), OPTIMISERS[name](sharded.parameters())
    for step in range(4):
        for model, optimiser in ((reference, reference_optimizer), (sharded, optimizer)):
            optimiser.zero_grad()
            loss = model(*data(step))
            loss.backward()
            if model is reference:
                expected = loss.detach()
            else:
                torch.testing.assert_close(plain(loss).detach(), expected, rtol=1e-10, atol=0)
            optimiser.step()
        same_parameters(reference, sharded, pg, (name, step))
    context = sharded_optimizer_state(optimizer)["state"]
    for number, p in enumerate(sharded.parameters()):
        for key, value in context[number].items():
            if isinstance(value, Tensor) and value.dim():
                assert isinstance(value, ColoTensor), (name, key)
                assert value.dist_spec == p.dist_spec, (name, key)


class Inherited(torch.optim.AdamW):
    """Another name, the same step."""


class Normalised(torch.optim.SGD):
    """An unknown optimizer, which divides by the norm of each gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad / p.grad.norm())


class OwnMuon(torch.optim.Muon):
    """A subclass of one that is refused."""


@pytest.mark.ranks(1, 2)
def test_optimizers_that_need_whole_parameters_are_refused(group: TorchGroup) -> None:
    """Refused by name, unknown once with a warning, element-wise in silence; replicas and plain tensors with any."""
    pg, world = ranks_of(group), group.size()
    full = torch.arange(16.0).view(4, 4)

    def parameter(layout: Any) -> nn.Parameter:
        p: Any = nn.Parameter(full.clone()) if layout is None else ColoParameter(full.clone(), True, ColoTensorSpec(pg))
        if layout is not None:
            p.set_dist_spec(layout)
        p.grad = torch.ones_like(plain(p)) if layout is not None else torch.ones_like(p)
        return p

    shard, reference = ShardSpec([0], [world]), ReplicaSpec()
    refused: list[Any] = [torch.optim.Muon, torch.optim.Adafactor, OwnMuon, torch.optim.LBFGS]
    for kind in refused:
        for layouts in ([None, None], [reference], [reference, shard], [shard]):
            parameters = [parameter(layout) for layout in layouts]
            optimiser = kind(parameters, lr=0.1)
            before = [plain(p).detach().clone() for p in parameters]

            def closure(parameters: Any = parameters) -> Tensor:
                return sum((plain(p) ** 2).sum() for p in parameters)  # type: ignore[return-value]

            step = partial(optimiser.step, closure) if kind is torch.optim.LBFGS else optimiser.step
            if shard in layouts and world > 1:
                with pytest.raises(UnsupportedError, match=rf"{kind.__name__}\.step: .*1 sharded .*\[4, 4\]"):
                    step()
                assert all(torch.equal(plain(p), old) for p, old in zip(parameters, before, strict=True)), kind
            elif layouts == [None, None] or kind is not torch.optim.LBFGS:
                step()
                assert not torch.equal(plain(parameters[0]), before[0]), kind
    for kind in (torch.optim.SGD, torch.optim.AdamW, Inherited, *(case.func for case in OPTIMISERS.values())):
        kind([parameter(shard)], lr=0.1).step()  # warnings are errors here
    optimizers._warned.clear()
    Normalised([parameter(reference), parameter(None)], lr=0.1).step()
    with pytest.warns(UserWarning, match="Normalised is not known") if world > 1 else nullcontext():
        Normalised([parameter(shard)], lr=0.1).step()
    Normalised([parameter(shard)], lr=0.1).step()


@pytest.mark.ranks(2)
def test_layouts_of_parameters_that_are_refused(group: TorchGroup) -> None:
    pg, rows, columns = ranks_of(group), ShardSpec([0], [group.size()]), ShardSpec([1], [group.size()])

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

    model = Tied()
    for layouts, words in (
        ({"first.weight": rows, "second.weight": columns}, "tied"),
        ({"first.weight": "x"}, "needs a dist spec"),
    ):
        with pytest.raises(ArgumentError, match=words):
            shard_parameters(model, layouts, pg)
        assert not any(isinstance(each, ColoParameter) for each in model.parameters())
    shard_parameters(model, {"second.weight": rows}, pg)  # the second name of the tied parameter
    assert model.first.weight is model.second.weight
    assert model.first.weight.partitions == ((0, group.size()),)
    with pytest.raises(ArgumentError, match="already"):
        shard_parameters(model, {"first.weight": columns}, pg)


@pytest.mark.ranks(2)
def test_norms_of_complex_gradients(group: TorchGroup) -> None:
    pg, full = ranks_of(group), torch.complex(torch.arange(8.0).view(4, 2), torch.ones(4, 2))
    plain_one = nn.Parameter(full.clone())
    plain_one.grad = full.clone()
    expected = torch.nn.utils.clip_grad_norm_([plain_one], 1.0)
    x = sharded(full, ShardSpec([0], [2]), pg).requires_grad_()
    x.grad = sharded(full, ShardSpec([0], [2]), pg)
    torch.testing.assert_close(clip_grad_norm_([x], 1.0), expected)
    with pytest.raises(ArgumentError, match="norm_type 0"):
        clip_grad_norm_([x], 1.0, norm_type=0)


def test_every_optimizer_of_torch_is_judged() -> None:
    every = {kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and kind.__name__ != "Optimizer"}
    unknown = {kind.__name__ for kind in every if optimizers._why_not_by_element(kind) == ""}
    assert not unknown, "a new optimizer of torch: element-wise, or not?"
    assert {kind.__name__ for kind in every if optimizers._why_not_by_element(kind)} == {"Muon", "Adafactor", "LBFGS"}


def test_optimizers_are_watched_once_there_are_colo_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: OrderedDict[int, Any] = OrderedDict()
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", hooks)
    colo_tensor._watch_uses.cache_clear()
    before = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    before.step()
    assert not hooks
    for _ in range(2):
        ColoTensor(torch.ones(2), None)
    assert list(hooks.values()) == [optimizers._before_step]
    colo_tensor._watch_uses.cache_clear()
    hooks.clear()
    copy.deepcopy(ColoTensor._rebuild(torch.ones(2), False, (ProcessGroup(), ReplicaSpec(), None, (2,), True)))
    assert list(hooks.values()) == [optimizers._before_step]


@pytest.mark.ranks(1, 2, 4)
def test_replicas_are_compared(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    _, module = both(pg)
    replicas = [name for name, p in module.named_parameters() if not p.partitions]  # type: ignore[attr-defined]
    shards = [name for name, p in module.named_parameters() if p.partitions]  # type: ignore[attr-defined]
    assert bool(shards) == (world > 1)
    with record.recording() as counted:
        check_replicas(module)
    calls = sum(each.calls for each in counted.values())
    assert calls == (2 if world > 1 else 0), "two all-gathers, however many parameters"
    liar = group.rank() == world - 1
    for name in replicas + shards:
        p = plain(module.get_parameter(name)).detach()
        if liar:
            p.view(-1)[-1:].view(torch.int64).bitwise_xor_(1)
        if world > 1 and name in replicas:
            with pytest.raises(MismatchError, match=rf"1 of {len(replicas)} parameters differ over .*: {name} \(norm"):
                check_replicas(module)
        else:
            check_replicas(module)  # ranks hold different shards anyway
        if liar:
            p.view(-1)[-1:].view(torch.int64).bitwise_xor_(1)
    check_replicas(module)
    module(*data(0)).backward()
    for p in module.parameters():  # by the norm of the local gradient, as of another rank
        plain(p.grad).mul_(1 / (1 + group.rank()))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(module.named_parameters(), lr=0.1)
    with p2p.check(), pytest.raises(MismatchError, match=r"SGD\.step: .*norm\.weight") if world > 1 else nullcontext():
        optimizer.step()
    if world > 1:
        with pytest.raises(MismatchError, match=r"norm\.weight"):
            check_replicas(module)
    module.extra = nn.Parameter(torch.ones(2 + liar))  # a plain parameter belongs to the ranks of the others
    if world > 1:
        with pytest.raises(MismatchError, match="different names, shapes"):
            check_replicas(module)
    odd = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match="pass the process group"):
        check_replicas(odd)
    with torch.no_grad():
        odd.weight.fill_(group.rank())
        odd.bias.fill_(0)
    if world > 1:
        with pytest.raises(MismatchError, match=r"1 of 2 parameters differ .*weight .*norm 0 on rank 0, norm 2"):
            check_replicas(odd, pg)


@pytest.mark.ranks(4)
def test_copies_of_shards_are_compared_over_data_parallel_ranks(group: TorchGroup) -> None:
    pg = ProcessGroup(ranks=list(range(4)), tp_degree=2)
    _, module = both(pg)
    check_replicas(module)
    if group.rank() == 2:  # replicas of ranks 2 and 3 differ, and the copies of ranks 0 and 2
        plain(module.norm.bias).detach()[0] = -0.0
        plain(module.up.weight).detach()[0, 0] += 1
    wrong = {0: ["data"], 1: [], 2: ["tensor", "data"], 3: ["tensor"]}[group.rank()]
    for data_parallel in (True, False):
        expected = [what for what in wrong if data_parallel or what == "tensor"]
        if not expected:
            check_replicas(module, data_parallel=data_parallel)
            continue
        with pytest.raises(MismatchError) as caught:
            check_replicas(module, data_parallel=data_parallel)
        for what, text in (
            ("tensor", "over tensor-parallel ranks [2, 3]: norm.bias"),
            ("data", "over data-parallel ranks [0, 2]"),
        ):
            assert (text in str(caught.value)) == (what in expected)
        assert ("up.weight" in str(caught.value)) == ("data" in expected), "a shard is compared with its copies only"


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.int8, torch.int64, torch.uint16, torch.bool,
], ids=str)  # fmt: skip
def test_a_fingerprint_sees_every_change(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_CHUNK", 7)  # so that small tensors have several chunks
    weights, draw = replicas._mixed(torch.arange(7)), random.Random(str(dtype))

    def digest(x: Tensor) -> int:
        return int(replicas._fingerprint(x, weights)[0])

    for size in (1, 2, 6, 7, 8, 30):
        bits = torch.tensor(
            [draw.getrandbits(8) & (1 if dtype is torch.bool else 255) for _ in range(size * dtype.itemsize)]
        )
        x = bits.to(torch.uint8).view(dtype)
        seen = {digest(x)}
        assert digest(x.clone()) == digest(x.view(1, -1).expand(2, -1)[1]) == digest(x)
        changed = []
        for at in range(len(bits)):
            other = bits.clone()
            other[at] ^= 1 << (0 if dtype is torch.bool else draw.randrange(8))
            changed.append(other)
        distinct = {tuple(each.tolist()): each for each in changed}
        for each in distinct.values():
            seen.add(digest(each.to(torch.uint8).view(dtype)))
        assert len(seen) == 1 + len(distinct)
        swapped = x.roll(1) if dtype.is_floating_point and dtype.itemsize > 1 else x
        assert (digest(swapped) == digest(x)) == torch.equal(swapped.view(torch.uint8), x.view(torch.uint8))
    assert digest(torch.zeros(0, dtype=dtype)) == 0
    assert len(set(replicas._mixed(torch.arange(-500, 500) << 50).tolist())) == 1000


def run_save(group: TorchGroup, folder: str) -> None:
    pg = ranks_of(group)
    _, sharded = both(pg)
    optimiser = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    sharded(*data(0)).backward()
    optimiser.step()
    state = {"model": sharded.state_dict(), "optimiser": optimiser.state_dict()["state"]}
    dcp.save(state, checkpoint_id=folder, process_group=group)


def run_load(group: TorchGroup, folder: str) -> None:
    pg = ranks_of(group)
    reference, sharded = both(pg)
    optimiser = torch.optim.AdamW(reference.parameters(), lr=0.01)
    reference(*data(0)).backward()
    optimiser.step()
    mine = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    sharded(*data(7)).backward()
    mine.step()  # other values, to be replaced
    state = {"model": sharded.state_dict(), "optimiser": mine.state_dict()["state"]}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    sharded.load_state_dict(state["model"])
    same_parameters(reference, sharded, pg, "loaded")
    for p, q in zip(reference.parameters(), sharded.parameters(), strict=True):
        moment = mine.state[q]["exp_avg"]
        expected = shard_of(optimiser.state[p]["exp_avg"], moment.dist_spec, pg.tp_local_rank())
        torch.testing.assert_close(plain(moment), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints(pool: Pool, tmp_path: Path) -> None:
    for save, load in ((4, 2), (2, 4), (1, 4), (4, 1)):
        folder = str(tmp_path / f"{save}-{load}")
        pool.run(run_save_quietly, folder, world=save)
        pool.run(run_load_quietly, folder, world=load)


def run_save_quietly(group: TorchGroup, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_save(group, folder)


def run_load_quietly(group: TorchGroup, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_load(group, folder)


@pytest.mark.ranks(2, 4)
def test_a_loss_is_recomputed_on_shards(group: TorchGroup) -> None:
    """Backward of a ColoTensor computes again on ColoTensors, not on their local tensors."""
    pg = ranks_of(group)
    gradients = []
    for again in (False, True):
        _, module = both(pg)
        ids, targets = data(0)
        loss = checkpoint(module, ids, targets, use_reentrant=False) if again else module(ids, targets)
        assert isinstance(loss, ColoTensor)
        loss.backward()
        gradients.append([p.grad for p in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(plain(one), plain(other))


@pytest.mark.ranks(2, 4)
def test_recomputed_activations_drop_the_same_elements(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    torch.manual_seed(1)
    full = torch.randn(8, 8, dtype=torch.float64)
    grads = []
    for again in (False, True):
        torch.manual_seed(2)
        x = ColoTensor(
            shard_of(full, ShardSpec([0], [world]), pg.tp_local_rank()), ColoTensorSpec(pg, ShardSpec([0], [world]))
        )
        w = ColoParameter(full.clone(), True, ColoTensorSpec(pg))
        x.requires_grad_()

        def block(x: Any, w: Any) -> Any:
            return F.dropout(F.gelu(F.linear(F.dropout(x, 0.3), w)), 0.5) @ F.dropout(w, 0.1)

        y = checkpoint(block, x, w, use_reentrant=False) if again else block(x, w)
        assert y.dist_spec == ShardSpec([0], [world])
        plain(y).sum().backward()
        grads.append((x.grad, w.grad))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def everybodys(x: Tensor, group: TorchGroup) -> list[Tensor]:
    result = [torch.empty_like(x) for _ in range(group.size())]
    torch.distributed.all_gather(result, x, group=group)
    return result


def test_all_random_operators_of_torch_are_known() -> None:
    """An operator that draws by itself on every rank would make replicas of different values."""
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    packets = {name: getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)}
    public = [name for name in packets if any(callable(getattr(place, name, None)) for place in (torch, Tensor, F))]
    drawing = {
        name for name, packet in packets.items() if name in public
        and any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())
    }  # fmt: skip
    ours = random_ops.RANDOM_ELEMENTWISE | random_ops.SAMPLERS | random_ops.RANDOM_ON_REPLICAS | random_ops.RECURRENT
    ours |= {getattr(function, "__name__", "") for function in RULES}
    without_tensors = {"rand", "randn", "randint", "randperm"}
    distributions = {"_standard_gamma", "_sample_dirichlet"}
    of_backends = {name for name in drawing if name.startswith(("_", "miopen"))} - distributions
    assert {"binomial", "lstm", "dropout"} | distributions < drawing
    assert drawing - ours - without_tensors - of_backends == set()


@pytest.mark.ranks(2, 4)
def test_random_operators(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    random_ops._calls.clear()
    torch.manual_seed(5)
    ones = torch.ones(32, 16)
    replica = ColoTensor(ones.clone(), ColoTensorSpec(pg))
    shard = replica.redistribute(ShardSpec([0], [world]))
    draws: dict[str, Any] = {
        "dropout": lambda x: F.dropout(x, 0.5),
        "rand_like": torch.rand_like,
        "bernoulli": lambda x: torch.bernoulli(x * 0.5),
        "normal_": lambda x: x.clone().normal_(),
        "dropout2d": lambda x: F.dropout2d(x.view(8, 16, 2, 2), 0.5),
        "multinomial": lambda x: torch.multinomial(x.to_replicate(), 4),
        "binomial": lambda x: torch.binomial(x * 9, x / 2),
        "gamma": lambda x: torch.distributions.Gamma(x, x).sample(),
    }
    for name, draw in draws.items():
        same = everybodys(plain(draw(replica)), group)
        assert all(torch.equal(same[0], x) for x in same), name
        if name in ("multinomial", "binomial", "gamma"):
            continue
        out = draw(shard)
        assert out.size(0) == draw(replica).size(0)
        apart = everybodys(plain(out), group)
        assert not any(torch.equal(apart[0], x) for x in apart[1:]), name
    kept = F.dropout(shard, 0.25).to_replicate()
    assert 0.65 < float((plain(kept) != 0).double().mean()) < 0.85
    assert float(plain(kept).max()) == pytest.approx(1 / 0.75)
    q = ColoTensor(torch.randn(2, 4, 8, 4), ColoTensorSpec(pg))
    out = everybodys(plain(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)), group)
    assert all(torch.equal(out[0], x) for x in out)
    torch.manual_seed(5)
    first = plain(F.dropout(shard, 0.5))
    torch.manual_seed(5)
    assert torch.equal(first, plain(F.dropout(shard, 0.5)))
    random_ops._calls.clear()
    torch.manual_seed(5 + group.rank())
    for draw in (lambda x: F.dropout(x, 0.5), draws["binomial"], lambda x: torch.poisson(x)):
        random_ops._calls.clear()
        with pytest.raises(MismatchError, match="same seed on all tensor-parallel ranks"):
            draw(replica)
    random_ops._calls.clear()
    layers = nn.LSTM(16, 16, 2, dropout=0.5)
    expected = layers.eval()(ones)[0]
    torch.testing.assert_close(plain(layers(replica)[0]), expected)  # draws nothing
    with pytest.raises(MismatchError, match="same seed on all tensor-parallel ranks"):
        layers.train()(replica)


@pytest.mark.ranks(2, 4)
def test_initialisers_do_not_depend_on_the_layout(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    for init in (
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.normal_,
        nn.init.trunc_normal_,
        nn.init.ones_,
    ):
        values = []
        for spec in (ReplicaSpec(), ShardSpec([0], [world]), ShardSpec([1], [world])):
            torch.manual_seed(3)
            p = ColoParameter(torch.empty(8, 12), True, ColoTensorSpec(pg))
            p.set_dist_spec(spec)
            assert init(p) is p
            values.append(plain(p.to_replicate()).detach())
        assert all(torch.equal(values[0], x) for x in values), init
    torch.manual_seed(3)
    expected = nn.init.kaiming_uniform_(torch.empty(4000, 12))
    bound = float(
        plain(
            nn.init.kaiming_uniform_(
                ColoParameter(torch.empty(4000 // world, 12), True, ColoTensorSpec(pg, ShardSpec([0], [world])))
            )
        )
        .detach()
        .abs()
        .max()
    )
    assert bound == pytest.approx(float(expected.abs().max()), rel=0.01)


def run_compute_specs(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 8).double(), torch.randn(12, 8).double(), torch.randn(12).double()
    full = F.linear(x, w, b)
    rank = pg.tp_local_rank()

    def weight(spec: Any, gather: bool = True, shard: int | None = None) -> ColoParameter:
        compute = ComputeSpec(ComputePattern.TP1D)
        compute.set_output_replicate(gather)
        compute.set_output_shard(shard)
        p = ColoParameter(w.clone(), True, ColoTensorSpec(pg, ReplicaSpec(), compute))
        p.set_dist_spec(spec)
        return p

    def close(result: Any, spec: Any, expected: Tensor = full) -> None:
        assert result.dist_spec == spec, (result.dist_spec, spec)
        torch.testing.assert_close(plain(result).detach(), shard_of(expected, spec, rank))

    column, row = ShardSpec([0], [world]), ShardSpec([-1], [world])
    close(F.linear(x, weight(column), b), ReplicaSpec())
    close(F.linear(x, weight(column, gather=False), b), row)
    open_table = weight(row, gather=False)
    by_columns_of_mat2 = ColoTensor(w.t().contiguous(), ColoTensorSpec(pg, ReplicaSpec(), open_table.compute_spec))
    by_columns_of_mat2.set_dist_spec(row)
    for by_column in (  # contract of ColossalAI: a compute spec of its own, where the output stays sharded
        lambda: F.linear(x, weight(column, gather=False), b),
        lambda: torch.addmm(b, x, by_columns_of_mat2),
        lambda: F.embedding(torch.tensor([3, 1]), open_table),
        lambda: F.embedding_bag(torch.tensor([[3, 1]]), open_table),
    ):
        one, other = by_column(), by_column()
        assert one.is_shard_1dcol()
        assert (one.has_compute_pattern(ComputePattern.TP1D), one.compute_spec.output_replicate) == (True, True)
        assert one.compute_spec is not other.compute_spec, "a new one each time"
        assert not (one + 1).has_compute_spec()
    for reference in (
        F.linear(x, weight(column), b), F.linear(x, weight(row, gather=False), b),
        F.embedding(torch.tensor([3, 1]), weight(column, gather=False)), F.linear(x, weight(row, shard=0), b),
        F.linear(sharded(x, column, pg), weight(ReplicaSpec(), gather=False), b),
    ):  # fmt: skip
        assert not reference.has_compute_spec(), reference
    close(F.linear(x, weight(row), b), ReplicaSpec())
    close(F.linear(x, weight(row, shard=0), b), column)
    ragged = F.linear(x[:3], w, b)
    close(F.linear(x[:3], weight(row, shard=0), b), column, ragged)
    cut_weight = weight(row, shard=0)
    with record.recording() as counted:
        F.linear(ColoTensor(shard_of(x, row, rank), ColoTensorSpec(pg, row)), cut_weight, b)
    assert [name for name, _ in counted] == ["reduce_scatter_dim"], counted
    sequence = ColoTensor(shard_of(x, column, rank), ColoTensorSpec(pg, column)).requires_grad_()
    with record.recording() as counted:
        y = F.linear(sequence, weight(column, gather=False), b)
        plain(y).backward(shard_of(torch.ones_like(full), row, rank))
    assert {name for name, _ in counted} >= {"all_gather_dim", "reduce_scatter_dim"}, counted
    assert sequence.grad is not None
    torch.testing.assert_close(sequence.grad, shard_of(torch.ones_like(full) @ w, column, rank))
    table = ColoParameter(w.clone(), True, ColoTensorSpec(pg, ReplicaSpec(), ComputeSpec(ComputePattern.TP1D)))
    table.set_dist_spec(row)
    ids = torch.tensor([3, 1, 11])
    close(F.embedding(ids, table), ReplicaSpec(), w[ids])
    with pytest.raises(IndexError, match="12 rows"):
        F.embedding(torch.tensor([12]), weight(column))
    with pytest.raises(UnsupportedError, match="max_norm"):
        F.embedding(ids, weight(column), max_norm=1.0)


def run_compute_specs_of_one_rank(group: TorchGroup) -> None:
    """A result has the spec that it has on more ranks: sharded by columns with a compute spec, or neither."""
    pg = ranks_of(group)
    assert pg.tp_world_size() == 1
    x, ids, bags, full = torch.randn(2, 4), torch.tensor([1]), torch.tensor([[3, 1]]), torch.randn(4, 4)
    column, row = ShardSpec([0], [1]), ShardSpec([-1], [1])
    for spec in (column, row, ReplicaSpec()):
        for gather in (True, False):
            compute = ComputeSpec(ComputePattern.TP1D)
            compute.set_output_replicate(gather)
            weight = ColoParameter(full.clone(), True, ColoTensorSpec(pg, ReplicaSpec(), compute))
            weight.set_dist_spec(spec)
            by_lookup = spec == row and not gather
            for result, is_column, expected in (
                (F.linear(x, weight), spec == column and not gather, F.linear(x, full)),
                (torch.addmm(x, x, weight), by_lookup, torch.addmm(x, x, full)),
                (F.embedding(ids, weight), by_lookup, F.embedding(ids, full)),
                (F.embedding_bag(bags, weight), by_lookup, F.embedding_bag(bags, full)),
            ):
                assert (result.is_shard_1dcol(), result.has_compute_spec()) == (is_column,) * 2, (spec, gather)
                assert result.dist_spec == (row if is_column else ReplicaSpec())
                assert is_column == result.has_compute_pattern(ComputePattern.TP1D)
                torch.testing.assert_close(plain(result.to_replicate()).detach(), expected)
                assert not (result * 2).has_compute_spec()
                plain((result * 2).sum()).backward()


def test_compute_specs(pool: Pool) -> None:
    pool.run(run_compute_specs_of_one_rank, world=1)
    pool.run(run_compute_specs, world=2)
    pool.run(run_compute_specs, world=4)


@pytest.mark.ranks(2, 4)
def test_writing_into_pieces(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    full = torch.arange(32.0).view(8, 4)
    x = ColoTensor(
        shard_of(full, ShardSpec([0], [world]), pg.tp_local_rank()), ColoTensorSpec(pg, ShardSpec([0], [world]))
    )
    x[:, 1] = 7.0
    full[:, 1] = 7.0
    x[:, 2:] = torch.arange(2.0)
    full[:, 2:] = torch.arange(2.0)
    x[:, 0] = torch.arange(8.0)
    full[:, 0] = torch.arange(8.0)
    assert torch.equal(plain(x.to_replicate()), full)
    x[...] = ColoTensor(full * 2, ColoTensorSpec(pg))
    assert torch.equal(plain(x.to_replicate()), full * 2)
    for index in (torch.tensor([1]), [0, 2]):
        with pytest.raises(UnsupportedError, match="redistribute it first"):
            x[index] = 0.0
    with pytest.raises(UnsupportedError, match="plain tensor"):
        full[0] = x[:, 0].to_replicate()[:4]
    with pytest.raises(ShapeError, match="do not broadcast"):
        x + torch.ones(3, 4)
    x += torch.ones(4)
    assert torch.equal(plain(x.to_replicate()), full * 2 + 1)


def test_modules_are_sharded_by_name(group: TorchGroup) -> None:
    pg = ranks_of(group)
    model = Model()
    with pytest.raises(ArgumentError, match=r"middle\.weight matches none"):
        shard_parameters(model, {"middle.weight": ShardSpec([0], [2])}, pg)
    assert not any(isinstance(p, ColoParameter) for p in model.parameters())
    model.head.weight = model.tokens.weight
    shard_parameters(model, {"tokens.weight": ShardSpec([0], [2])}, pg)
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.dist_spec == ShardSpec([0], [2])  # type: ignore[attr-defined]
    assert model.norm.weight.is_replicate()  # type: ignore[attr-defined]


def test_a_mesh_is_measured_where_its_groups_move_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        """A group as torch makes it for ``cpu:gloo,cuda:nccl``, or for one backend."""

        def __init__(self, **backends: str) -> None:
            self._backends, self._device_types = backends, [torch.device(kind) for kind in backends]

        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(name=lambda: self._backends[device.type])

    seen: list[Any] = []
    where: Any = alpha_beta.default_device
    monkeypatch.setattr(alpha_beta, "default_device", lambda name: seen.append(where(name)) or torch.device("meta"))
    monkeypatch.setattr(alpha_beta.eager, "all_reduce", lambda x, *_, **__: seen.append(x.device.type))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    cuda, cpu = torch.device("cuda", 3), torch.device("cpu")
    for backends, expected in (
        ({"cpu": "gloo", "cuda": "nccl"}, cuda), ({"cuda": "nccl"}, cuda), ({"cuda": "NCCL2"}, cuda),
        ({"cpu": "gloo", "cuda": "gloo"}, cpu), ({"cpu": "gloo"}, cpu),
    ):  # fmt: skip
        seen.clear()
        alpha_beta._microseconds(Group(**backends), 8, 1)  # type: ignore[arg-type]
        assert seen == [expected, "meta", "meta", "meta"], backends


@pytest.mark.ranks(4)
def test_a_mesh_is_measured(group: TorchGroup) -> None:
    ranks = torch.distributed.get_process_group_ranks(group)
    mesh = DeviceMesh(torch.tensor(ranks), (2, 2), init_process_group=True)
    result = measure_mesh(mesh, large=1 << 16, repeats=3)
    assert result.mesh_shape == (2, 2)
    numbers = torch.tensor([result.mesh_alpha, result.mesh_beta], dtype=torch.float64)
    assert bool((numbers[0] > 0).all())
    assert all(torch.equal(numbers, other) for other in everybodys(numbers, group))
    source, target = (ShardingSpec(result, (8, 8), dims) for dims in ({0: [0]}, {1: [0]}))
    path = shortest_path(source, target)
    assert path.cost > 0
    with pytest.raises(ShapeError, match="sizes"):
        measure_mesh(mesh, small=8, large=8)


def test_the_documented_training_runs(group: TorchGroup) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tensor.md").read_text()
    example = text[text.index("## Training") :].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"torch": torch, "pg": ranks_of(group)}
    exec(example, names)
    model, ids = names["model"], names["ids"]
    torch.manual_seed(0)
    before = names["Model"]()(ids, ids + 1).item()
    assert names["loss"].item() == pytest.approx(before, rel=1e-5)
    assert model(ids, ids + 1).item() < before


class Seen(TorchDispatchMode):
    """Every operator, as profilers and counters see it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_pieces(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    full = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (F.gelu(full) * full).sum().backward()
    spec = ShardSpec([0], [world])
    for mode in (Seen(), FlopCounterMode(display=False)):
        x = ColoTensor(shard_of(full.detach(), spec, pg.tp_local_rank()), ColoTensorSpec(pg, spec)).requires_grad_()
        with mode, record.recording() as counted:
            (F.gelu(x) * x).sum().backward()
        assert {name for name, _ in counted} == {"reduce_from_tensor_model_parallel_region"}, counted
        assert x.grad is not None
        assert full.grad is not None
        torch.testing.assert_close(plain(x.grad), shard_of(full.grad, spec, pg.tp_local_rank()))
