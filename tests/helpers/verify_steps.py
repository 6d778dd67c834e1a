"""Programs whose faults no module shows: in wrappers, without a graph, in a narrow dtype, behind the model."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tritoncomm import verify
from tritoncomm.verify.widening import Widened

__all__ = ["STEPS", "judged"]

Whole = dict[str, Tensor] | None
Build = Callable[[int, int, Any, Whole, str], verify.Case]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """The same numbers in every dtype."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made, dtype=torch.float64).to(torch.get_default_dtype())


def loaded(model: Any, whole: Whole) -> Any:
    if whole is not None:
        model.load_state_dict({name: x.clone() for name, x in whole.items()})
    return model


def net(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(6, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, 3))


def averaged(model: nn.Module, world: int, group: Any) -> None:
    for parameter in model.parameters() if world > 1 else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(world)


def wrapped(rank: int, world: int, group: Any, whole: Whole, fault: str) -> verify.Case:
    """DistributedDataParallel, compiled or not; or other names that nobody renames."""
    model: Any = loaded(net(), whole)
    x, run = drawn(8, 6), model
    if world > 1:
        x = x.chunk(world)[rank]
        run = nn.parallel.DistributedDataParallel(model, process_group=group)
        if fault.startswith("compiled"):
            run = torch.compile(run, backend="eager")
    if world > 1 and fault == "names":
        run = nn.ModuleDict({"inner": model})

    def step() -> Tensor:
        loss = (run["inner"] if fault == "names" and world > 1 else run)(x).square().mean()
        loss.backward()
        if fault == "names":
            averaged(model, world, group)
        if fault.endswith("twice") and world > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        return loss

    return verify.Case(run, step)


class Encoders(nn.Module):
    """Two encoders without a graph, of which the second knows nothing of the first one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            image, text = self.image(x), self.text(other)
        return self.head(image + text)


def frozen(rank: int, world: int, group: Any, whole: Whole, fault: str) -> verify.Case:
    model = loaded(Encoders(), whole)
    x, other = drawn(4, 6), drawn(4, 6, seed=2)
    if fault and world > 1:
        getattr(model, fault).register_forward_hook(lambda module, args, y: 2 * y)

    def step() -> Tensor:
        loss = model(x, other).square().mean()
        loss.backward()
        return loss

    return verify.Case(model, step)


class Tables(nn.Module):
    """Rotary-like tables without a graph, in a list of layers that never runs itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.layers = Table(), nn.ModuleList(Turned() for _ in range(2))

    def forward(self, x: Tensor, start: int) -> Tensor:
        tables = self.tables(x, start)
        for layer in self.layers:
            x = layer(x, tables=tables)
        return x


class Table(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(start, start + x.shape[0]).to(x.dtype)[:, None] / torch.arange(1, 7).to(x.dtype)
        return angles.cos(), angles.sin()


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(x * tables[0] + x.flip(-1) * tables[1])


def tables(rank: int, world: int, group: Any, whole: Whole, fault: str) -> verify.Case:
    """Ranks with parts of a sequence; with ``local`` each has the positions of the first."""
    model, x = loaded(Tables(), whole), drawn(8, 6).chunk(world)[rank]

    def step() -> Tensor:
        loss = model(x, 0 if fault == "local" else 8 // world * rank).square().mean()
        loss.backward()
        averaged(model, world, group)
        return loss

    return verify.Case(model, step)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda x: torch.optim.SGD(x, 0.1, momentum=0.9),
    "adam": lambda x: torch.optim.AdamW(x, 0.1),
    "adafactor": lambda x: torch.optim.Adafactor(x, 0.1),
}


class Attended(nn.Module):
    """Attention, of which softmax makes the gradient of the keys' bias zero, and a batch norm in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.flatten(0, -2).sum(0)
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


def optimized(rank: int, world: int, group: Any, whole: Whole, fault: str) -> verify.Case:
    """The step ends as every training loop does: with the optimizer, and no gradient left."""
    name, _, mistake = fault.partition(" ")
    model = loaded(Attended(), whole)
    x = drawn(4, 5, 6).chunk(world)[rank]
    optimizer = OPTIMIZERS[name](model.parameters()) if name in OPTIMIZERS else None

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if mistake != "local":
            averaged(model, world, group)
        if mistake == "buffer" and world > 1:
            model.seen.mul_(rank)
        if optimizer is None:  # a loop of one's own
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad * (2 if mistake == "rate" and world > 1 else 1)
                    parameter.grad = None
            return loss
        if mistake == "rate" and world > 1:
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return verify.Case(model, step)


def behind(rank: int, world: int, group: Any, whole: Whole, fault: str) -> verify.Case:
    """Classes and clipping behind the model; with ``labels`` each rank shifts its own, with ``clip`` clips its own."""
    model: Any = Attended() if fault == "clip keys" else net()
    model, x = loaded(model, whole), drawn(8, *(5,) * (fault == "clip keys"), 6).chunk(world)[rank]
    fault, labels = fault.partition(" ")[0], torch.arange(8).remainder(3)
    labels = labels.chunk(world)[rank].roll(1) if fault == "labels" and world > 1 else labels.chunk(world)[rank]

    def step() -> Tensor:
        logits = model(x)
        loss = F.cross_entropy(logits if logits.dim() == 2 else logits.mean(1), labels)
        loss.backward()
        if fault == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        averaged(model, world, group)
        if fault != "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    return verify.Case(model, step)


def policy(rank: int, world: int, group: Any, whole: Whole, fault: str) -> verify.Case:
    """FSDP2 that computes in bf16: gradients of a wide model are below the dtype's bound."""
    model, x = loaded(net(64), whole), drawn(8, 6).chunk(world)[rank]
    reduce = {"bf16": torch.bfloat16, "own": None}.get(fault, torch.float32)
    if world > 1:
        fully_shard(
            model, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce)
        )

    def step() -> Tensor:
        if world > 1:
            y = model(x)
        else:
            narrow = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
            y = torch.func.functional_call(model, narrow, (x.bfloat16(),))
        loss = y.float().square().mean() / (world if fault == "half" else 1)
        loss.backward()
        if world > 1 and fault in ("zero", "sign"):
            for parameter in model.parameters():
                parameter.grad.mul_(0 if fault == "zero" else -1)
        return loss

    return verify.Case(model, step)


def autocast(rank: int, world: int, group: Any, whole: Whole, fault: str) -> verify.Case:
    model, x = loaded(net(), whole), drawn(8, 6).chunk(world)[rank]

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        averaged(model, world, group)
        if fault == "zero" and world > 1:
            model.zero_grad(set_to_none=False)
        return loss

    return verify.Case(model, step)


STEPS: dict[str, Build] = {
    "wrapped": wrapped, "frozen": frozen, "tables": tables, "optimized": optimized, "behind": behind,
    "policy": policy, "autocast": autocast,
}  # fmt: skip


def judged(
    group: ProcessGroup, name: str, faults: tuple[str, ...], is_rounded: bool = False
) -> dict[str, verify.Report]:
    """The report on a program by its fault; of one in 16 bits with both sides in float64, too."""
    return {fault: _judged(group, STEPS[name], fault, is_rounded) for fault in faults}


def _judged(group: ProcessGroup, build: Build, fault: str, is_rounded: bool) -> verify.Report:
    before, dtypes = torch.get_default_dtype(), [torch.float64, torch.float32][: 1 + is_rounded]
    runs = []
    try:
        for dtype in dtypes:
            torch.set_default_dtype(dtype)
            with Widened() if is_rounded and dtype == torch.float64 else nullcontext():
                torch.manual_seed(0)
                alone = build(0, 1, None, None, fault)
                verify.draw(alone.model)  # pyright: ignore
                state = {name: x.clone() for name, x in alone.model.state_dict().items()}  # pyright: ignore
                whole = verify.record(alone, backward=True)
                mine = verify.record(build(group.rank(), group.size(), group, state, fault), backward=True)
            runs.append((whole, mine))
    finally:
        torch.set_default_dtype(before)
    whole, mine = runs[-1]
    if is_rounded:
        whole.exact, mine.exact = runs[0]
    return verify.compare(whole, mine, group)
