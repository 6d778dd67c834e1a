"""The graph of a result keeps no process group."""

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from disagreement_rows import ROWS
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import GroupError

BY_HAND = {  # rows whose results have no graph, as they are not differentiable or the row is not
    "ulysses.to_sequence", "experts.route", "reshard.reshard_plan", "reshard.exchange_owned", "reshard.OwnedExchange",
    "debug.check_replicas", "tensor.check_replicas", "tensor.clip_grad_norm_",
}  # fmt: skip
LOCAL = {  # whose backward sends nothing
    "mappings.reduce_from_tensor_model_parallel_region", "tensor.sum", "tensor.linear", "tensor.embedding",
    "tensor.cross_entropy",
}  # fmt: skip
# Nor styles of parallelize_module: DTensor's caches keep their meshes, and those keep groups.
NAMES = [
    name for name, row in ROWS.items()
    if not name.startswith(("collective.", "mappings._", "parallel.")) and not row.is_backward and name not in BY_HAND
]  # fmt: skip


def run_destroyed(group: ProcessGroup, names: list[str]) -> dict[str, str]:
    """Problems by function, once the group of its result was destroyed; all ranks call."""
    tritoncomm.destroy()
    problems = {}
    for name in names:
        made: Any = dist.new_group(dist.get_process_group_ranks(group))
        dist.barrier(made)  # a rank whose call sends nothing would destroy the group while its peer still connects
        row, world = ROWS[name], made.size()
        x = torch.ones(row.shape(world), requires_grad=True)
        out = _first(row.call(made, x * 1, **row.options(world)))
        assert out.requires_grad, name
        dist.destroy_process_group(made)
        reference = weakref.ref(made)
        del made
        if reference() is not None:
            problems[name] = f"kept by {[type(each).__name__ for each in gc.get_referrers(reference())]}"
            continue
        try:
            out.sum().backward()
            problems[name] = "" if name in LOCAL else "no error"
        except GroupError as error:
            problems[name] = "" if "destroyed" in str(error) else str(error)
    return {name: problem for name, problem in problems.items() if problem}


def _first(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    return next(iter(out.values())) if isinstance(out, dict) else out[0]


def test_a_graph_keeps_no_group_and_its_backward_says_so(pool: Pool) -> None:
    """One that did could be freed, with the group, by Gloo's thread, which would wait for itself."""
    assert pool.run(run_destroyed, NAMES, world=8) == [{}] * 8
