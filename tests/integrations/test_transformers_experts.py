"""Expert parallelism of transformers with our implementation: losses and gradients of one process, and fewer bytes."""

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import ArgumentError, UnsupportedError, record
from tritoncomm.core import backend
from tritoncomm.integrations import transformers as ulysses
from tritoncomm.integrations.transformers import experts as ours

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
HYBRID = ("qwen3_5_moe_text", "nemotron_h")
# (ranks, ranks of tensor parallelism, ranks that share the experts)
LAYOUTS = (
    *((2, 1, 2), (4, 1, 4), (2, 2, 2), (4, 2, 4)),
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((4, 1, 2), (4, 2, 2))),
)
LENGTH = 12
PAGE = Path(__file__).parents[2] / "docs" / "experts.md"


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[int, Pool]]:
    """A job for each number of ranks: transformers makes its meshes over all of them."""
    pools = {world: Pool(world) for world in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as path:
        yield path


def saved(folder: str, name: str, **changes: Any) -> str:
    """Save a tiny model, with changes of its config; return its path."""
    path = Path(folder) / "-".join([name, *map(str, changes.values())])
    if not path.exists():
        from tiny_models import tiny  # imports transformers

        model: Any = tiny(name)
        if changes:
            for key, value in changes.items():
                setattr(model.config, key, value)
            torch.manual_seed(0)
            model = type(model)(model.config)
        model.save_pretrained(path)
    return str(path)


def loaded(path: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    return model.train() if not options else model


def distributed(path: str, group: ProcessGroup, tp: int, ep: int, name: str, **options: Any) -> Any:
    from transformers.distributed import DistributedConfig

    world = group.size()
    os.environ.update(RANK=str(group.rank()), WORLD_SIZE=str(world), LOCAL_RANK=str(group.rank()))
    config = DistributedConfig(tp_size=tp, fsdp_size=world // tp, ep_size=ep, ep_implementation=name)
    return loaded(path, distributed_config=config, **options).train()


def batch_of(number: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 60, (2 if length == LENGTH else 1, length), generator=torch.Generator().manual_seed(number))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def gradients(model: Any) -> dict[str, Tensor | None]:
    """By parameter, whole on every rank."""
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return grads


def prepared(model: Any, how: str) -> Any:
    """The model as a recipe has it."""
    if how == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif how == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" in name)
    elif how in ("eager", "batched_mm"):
        model.set_experts_implementation(how)
    return model


def differences(alone: Any, found: dict[str, Tensor | None], factor: float = 1.0) -> list[str]:
    """Parameters whose gradients are not those of one process."""
    problems = []
    for name, parameter in alone.named_parameters():
        grad, wanted = found[name], parameter.grad
        if wanted is None or not wanted.any():
            if grad is not None and grad.any():
                problems.append(f"{name} has a gradient, and has none in one process")
        elif grad is None:
            problems.append(f"{name} has no gradient")
        elif (off := (grad * factor - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)) > 1e-4:
            problems.append(f"{name} is off by {off:.2g} of its largest gradient")
    return problems


def train(group: ProcessGroup, path: str, tp: int, ep: int, how: str = "") -> str:
    """One backward over the batches of all ranks, against one process, which the first rank is."""
    ours.register_experts()
    number, batches = group.rank() // tp, group.size() // tp
    model = prepared(distributed(path, group, tp, ep, ours.NAME), how)
    length = 2 if how == "few tokens" else LENGTH
    with record.recording() as counted:
        loss = loss_of(model, batch_of(number, length))
        loss.backward()
    assert any(name == "dispatch" for name, _ in counted), "the layers did not dispatch by us"
    found = gradients(model)
    losses = [torch.zeros(()) for _ in range(group.size())]
    dist.all_gather(losses, loss.detach(), group=group)
    if group.rank():
        return ""
    alone, total = prepared(loaded(path).train(), how), []
    for other in range(batches):
        total.append(loss_of(alone, batch_of(other, length)))
        (total[-1] / batches).backward()
    problems = differences(alone, found)
    for rank, value in enumerate(losses):
        if abs(value - total[rank // tp]) > 2e-5:
            problems.append(f"the loss of rank {rank} is {value}, not {total[rank // tp]}")
    return "; ".join(problems)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_models(jobs: dict[int, Pool], folder: str, layout: tuple[int, int, int], name: str) -> None:
    world, tp, ep = layout
    assert jobs[world].run(train, saved(folder, name), tp, ep, world=world) == [""] * world


def clip_of_the_page() -> Callable[[Iterable[Tensor], float], Tensor]:
    """The function of docs/experts.md that clips by one norm of gradients on two meshes."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"Tensor": Tensor}
    exec(next(block for block in blocks if "def clip(" in block), names)
    return names["clip"]


def save_and_load(group: ProcessGroup, path: str, folder: str, tp: int, ep: int) -> str:
    """Two clipped steps, both kinds of checkpoint, and one more step over other numbers of ranks for the experts."""
    from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

    ours.register_experts()
    clip, batches = clip_of_the_page(), group.size() // tp

    def optimizer_of(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
        loss_of(model, batch_of(number * batches + group.rank() // tp)).backward()
        norm = clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def step_alone(number: int) -> Tensor:
        for other in range(batches):
            (loss_of(alone, batch_of(number * batches + other)) / batches).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer_alone.step()
        optimizer_alone.zero_grad()
        return norm

    alone, model = loaded(path).train(), distributed(path, group, tp, ep, ours.NAME)
    optimizer_alone, optimizer = optimizer_of(alone), optimizer_of(model)
    for number in range(2):
        norm, norm_alone = step(model, optimizer, number), step_alone(number)
        assert norm_alone > 0.5, "nothing is clipped"
        torch.testing.assert_close(norm, norm_alone, rtol=1e-5, atol=0)
    model.save_pretrained(f"{folder}/whole")
    model.save_pretrained(f"{folder}/shards", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, f"{folder}/optimizer")
    dist.barrier(group)
    weights = whole_weights(model)
    problems = [f"in one process {name} differs" for name in unequal(loaded(f"{folder}/whole"), weights)]
    step_alone(2)
    for other in (size for size in (1, 2, 4) if size != ep and size <= group.size()):
        for kind in ("whole", "shards"):
            again = distributed(f"{folder}/{kind}", group, tp, other, ours.NAME)
            problems += [f"{kind}, ep_size {other}: {name} differs" for name in unequal(again, weights)]
        resumed = optimizer_of(again)
        load_optimizer_distributed(again, resumed, f"{folder}/optimizer")
        step(again, resumed, 2)
        for name, weight in whole_weights(again).items():
            if (off := (weight - alone.get_parameter(name)).abs().max()) > 1e-5:
                problems.append(f"resumed with ep_size {other}: {name} is off by {off:.2g}")
    return "; ".join(problems)


def whole_weights(model: Any) -> dict[str, Tensor]:
    parameters = model.named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in parameters}


def unequal(model: Any, weights: dict[str, Tensor]) -> list[str]:
    """Parameters that do not have these bits."""
    return [name for name, weight in whole_weights(model).items() if not torch.equal(weight, weights[name])]


@pytest.mark.parametrize(
    "layout", [(2, 1, 2), *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((4, 1, 2), (4, 2, 4)))], ids=str
)
def test_checkpoints(jobs: dict[int, Pool], folder: str, tmp_path: Path, layout: tuple[int, int, int]) -> None:
    """Clipping over two meshes, and checkpoints that are loaded with other numbers of ranks for the experts."""
    world, tp, ep = layout
    path = saved(folder, "qwen3_moe")
    assert jobs[world].run(save_and_load, path, str(tmp_path), tp, ep, world=world) == [""] * world


def train_shards(group: ProcessGroup, path: str) -> str:
    """Sequence shards and experts over the same ranks: the logits and summed gradients of one process."""
    ours.register_experts()
    model = distributed(path, group, 1, group.size(), ours.NAME)
    ids = batch_of(0)
    ulysses.switch(model, ulysses.register(group, name=f"shards of {Path(path).name}"))
    batch = ulysses.shard_batch({"input_ids": ids, "labels": ids}, group)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    whole, found = loss.detach().clone(), gradients(model)
    dist.all_reduce(whole, group=group)
    if group.rank():
        return ""
    alone = loaded(path).train()
    total = alone(input_ids=ids, labels=ids, use_cache=False).loss
    total.backward()
    problems = differences(alone, found, group.size())  # FSDP averages, and shards add up
    if abs(whole - total) > 2e-5:
        problems.append(f"the losses add up to {whole}, not {total}")
    return "; ".join(problems)


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("world", [2, 4])
def test_recurrent_layers_over_sequence_shards(jobs: dict[int, Pool], folder: str, world: int, name: str) -> None:
    assert jobs[world].run(train_shards, saved(folder, name), world=world) == [""] * world


@pytest.mark.parametrize("how", ["checkpointing", "frozen", "eager", "batched_mm", "few tokens"])
@pytest.mark.parametrize("layout", [(2, 1, 2), (4, 1, 4), (4, 2, 4)], ids=str)
def test_recipes(jobs: dict[int, Pool], folder: str, layout: tuple[int, int, int], how: str) -> None:
    """A rank without rows, experts that nobody chose, and every implementation of the experts among them."""
    world, tp, ep = layout
    assert jobs[world].run(train, saved(folder, "qwen3_moe"), tp, ep, how, world=world) == [""] * world


def count_bytes(group: ProcessGroup, path: str, name: str) -> int:
    """Bytes that this rank's all-to-alls of a step send to other ranks."""
    import transformers.distributed.expert_parallel as module

    ours.register_experts()
    sent, start = [0], backend.all_to_all
    theirs, plain = module.all_to_all_single_autograd, module.all_to_all_single

    def count(x: Tensor, sizes: Any) -> None:
        rows = [len(x) // group.size()] * group.size() if not sizes else list(sizes)
        sent[0] += (sum(rows) - rows[group.rank()]) * x.shape[1] * x.itemsize

    def counted(out: Tensor, x: Tensor, recv: Any, send: Any, *args: Any, **kwargs: Any) -> Any:
        count(x, send)
        return start(out, x, recv, send, *args, **kwargs)

    def with_backward(x: Tensor, recv: Any, send: Any, *args: Any, **kwargs: Any) -> Any:
        count(x, send)
        count(x, recv)
        return theirs(x, recv, send, *args, **kwargs)

    def single(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        count(x, None)
        return plain(out, x, *args, **kwargs)

    with (
        mock.patch.object(backend, "all_to_all", counted),
        mock.patch.multiple(module, all_to_all_single_autograd=with_backward, all_to_all_single=single),
    ):
        loss_of(distributed(path, group, 1, group.size(), name), batch_of(group.rank())).backward()
    return sent[0]


def test_fewer_bytes_than_a_row_for_each_pair(jobs: dict[int, Pool], folder: str) -> None:
    """Four of 16 experts on 4 ranks: a token has experts on 2.7 ranks at random."""
    path = saved(folder, "qwen3_moe", num_experts=16, num_experts_per_tok=4)
    theirs, mine = (jobs[4].run(count_bytes, path, name, world=4) for name in ("all_to_all", ours.NAME))
    assert all(b < 0.9 * a for a, b in zip(theirs, mine, strict=True)), (theirs, mine)


def test_names() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    assert ours.register_experts() == ours.register_experts() == "tritoncomm"
    assert "tritoncomm" in EPImplementationInterface()
    with pytest.raises(ArgumentError, match="has an implementation 'all_to_all'"):
        ours.register_experts("all_to_all")
    with pytest.raises(ArgumentError, match="'all_to_all' is no implementation"):
        ours.unregister_experts("all_to_all")
    ours.unregister_experts()
    assert "tritoncomm" not in EPImplementationInterface()
    with pytest.raises(ArgumentError, match="is no implementation"):
        ours.unregister_experts()


def test_other_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.distributed import expert_parallel

    monkeypatch.delattr(expert_parallel, "EPImplementationInterface")
    with pytest.raises(UnsupportedError, match="no registry of expert parallelism"):
        ours.register_experts()
