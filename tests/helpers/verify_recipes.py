"""The recipes of `examples/verify_*.py` on ranks, as they are and with faults planted in their text."""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from outside.cases.families import Outcome, run_family
from torch.distributed import ProcessGroup

from tritoncomm import verify
from tritoncomm.integrations import transformers as integration
from tritoncomm.integrations.transformers import log_probabilities
from tritoncomm.verify import running

__all__ = ["FAULTS", "OF_TORCH", "OF_TRL", "RECIPES", "Fault", "run_in_job", "run_recipe", "summing_gather", "written"]

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_TORCH = ("ddp", "fsdp2", "parallelize_module", "pipelining", "shared_expert", "tensor_parallel")
OF_TRL = ("dpo",)  # which tools/outside runs, with TRL
RECIPES = (
    *OF_TORCH,
    "unchanged",
    "transformers",
    "hybrid",
    "vision",
    "log_probs",
    "experts",
    "accelerate",
    "deepspeed",
)


class Fault(NamedTuple):
    """A change of a recipe that makes the ranks' run wrong.

    Attributes:
        old, new: text of the recipe, and what stands there in its place.
        first: the first wrong module in the report.
        words: of the report.
    """

    recipe: str
    old: str
    new: str
    first: str
    words: str = ""


_SCALED = "register_forward_hook(lambda module, args, y: y * (1.01 if world > 1 else 1))"
FAULTS = (
    Fault("ddp", " if world > 1 else model", " if world > 2**9 else model", "3", "never averaged"),
    Fault("ddp", "x.chunk(world)[rank]", "x.chunk(world)[0]", "", "input is no part"),
    Fault("ddp", "    replica =", "    model[0].bias.requires_grad_(world == 1)\n    replica =", "0", "is None on"),
    Fault("ddp", "loss.backward()", "(loss * (2 if world > 1 else 1)).backward()", "3", "2 times"),
    Fault("fsdp2", ".mean() / 2)", ".mean() / (2 if world == 1 else 1))", "2", "is 2 times"),
    Fault("fsdp2", "(*blocks, model)", "blocks", "2", "never averaged"),
    Fault("fsdp2", "in x:", "in x[: 2 if world == 1 else 1]:", "0.0", "ran 1 times"),
    Fault("unchanged", "parameters(), 0.1)\n    x", "parameters(), 0.1 + rank)\n    x", "0", "0.weight after the step"),
    Fault("parallelize_module", ', "2": SequenceParallel()}', "}", "2", ""),
    Fault("parallelize_module", ".chunk(world, 1)[rank]", ".chunk(world, 1)[0]", "", "input is no part"),
    Fault("parallelize_module", "    x = torch", f"    model[1][2].{_SCALED}\n    x = torch", "1.2", "1.01 times"),
    Fault("pipelining", "y.square().mean())", "y.square().mean(), scale_grads=False)", "3.1", "is 4 times"),
    Fault("pipelining", "[x] if rank", "[x * 1.1] if rank", "", "input of 0"),
    Fault("pipelining", "    own = nn", f"    layers[-1][1].{_SCALED}\n    own = nn", "3.1", "1.01 times"),
    Fault("shared_expert", "dist.all_reduce(parameter.grad, group=group)", "pass", "shared", "was never summed"),
    Fault("shared_expert", "combining.wait())", "combining.wait() * (1.01 if world > 1 else 1))", "shared", ""),
    Fault("tensor_parallel", "x).relu()), self", "x).relu()) / self.group.size(), self", "", "of the addends"),
    Fault("tensor_parallel", "    x = torch", f"    model.up.{_SCALED}\n    x = torch", "up", "1.01 times"),
    Fault(
        "transformers", "    ids =", f"    model.model.layers[0].self_attn.o_proj.{_SCALED}\n    ids =",
        "model.layers.0.self_attn.o_proj", "1.01 times",
    ),
    Fault(
        "transformers", "    ids =", "    model.model.norm.weight.register_hook(lambda grad: grad * world)\n    ids =",
        "model.norm", "times",
    ),
    Fault("log_probs", "dist.all_reduce(parameter.grad, group=group)", "pass", "norm", "was never summed"),
    Fault("experts", "chunk(world)[rank]", "chunk(world)[0]", "model.embed_tokens", "rank 0 has 0, rank 1 has 0"),
    Fault("accelerate", "backward(losses[-1])", "backward(losses[-1] / (2 if world > 1 else 1))", "3", "is 1/2"),
    Fault("accelerate", "loader = accelerator.prepare(", "_ = accelerator.prepare(", "", "times in one process"),
    Fault("deepspeed", "engine.backward(loss)", "engine.backward(loss * 2)", "3", "is 2 times"),
    Fault("deepspeed", ".chunk(world)[rank]", ".chunk(world)[0]", "", "input is no part"),
)  # fmt: skip


def written(folder: Path, recipe: str, fault: Fault | None) -> Path:
    """A file with a recipe, in which a fault may stand."""
    text = (EXAMPLES / f"verify_{recipe}.py").read_text()
    if fault is not None:
        assert text.count(fault.old) == 1, fault
        text = text.replace(fault.old, fault.new)
    (path := folder / f"verify_{recipe}.py").write_text(text)
    return path


@contextmanager
def summing_gather() -> Iterator[None]:
    """A gather of log-probabilities whose backward reduces and scatters: losses are right, and gradients too large."""
    gather = log_probabilities.all_gather_dim
    with mock.patch.object(log_probabilities, "all_gather_dim", lambda x, dim, group, **_: gather(x, dim, group)):
        yield


@cache
def _alone() -> ProcessGroup:
    """The group of this rank alone."""
    return dist.new_subgroups(1)[0]


def _launch(group: ProcessGroup) -> dict[str, str]:
    """The variables that torchrun would set on this rank."""
    rank, world = group.rank(), group.size()
    launch = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29501}
    return {name: str(value) for name, value in launch.items()} | {"MASTER_ADDR": "127.0.0.1"}


def run_recipe(
    group: ProcessGroup,
    recipe: str,
    fault: Fault | None,
    mistaken: Callable[[], AbstractContextManager[Any]] = nullcontext,
    dtype: torch.dtype = torch.float64,
) -> verify.Report:
    """The report on a recipe, in which a fault may stand; the ranks run it inside of a mistake of ours."""
    variables = _launch(group)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    joined = mock.patch.object(dist, "init_process_group", running._joined)
    try:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, variables), joined:
            path = written(Path(folder), recipe, fault)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _report(group, str(path), mistaken)
    finally:
        torch.set_default_dtype(before)


def _report(group: ProcessGroup, path: str, mistaken: Callable[[], AbstractContextManager[Any]]) -> verify.Report:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    build = running.builder(f"{path}:build")
    torch.manual_seed(0)
    group_alone = _alone()
    with mock.patch.dict(os.environ, alone):
        first: Any = build(0, 1, group_alone, None)
        verify.draw(first.model)
        state = {name: x.clone() for name, x in first.model.state_dict().items()}
        whole = verify.record(first)
    torch.manual_seed(0)
    _unregister()
    try:
        with mistaken():
            ranks = verify.record(build(group.rank(), group.size(), group, state))
        return verify.compare(whole, ranks, group)
    finally:
        _unregister()


def _unregister() -> None:
    """Take back what a recipe has registered, which has a name of its own in a process."""
    if "transformers" in sys.modules:
        integration.unregister()


def run_in_job(group: ProcessGroup, kind: str, micro_batches: int) -> Outcome:
    """``run_family`` with the variables that a launcher sets."""
    with mock.patch.dict(os.environ, _launch(group)), mock.patch.object(dist, "init_process_group", running._joined):
        return run_family(group, kind, micro_batches)
