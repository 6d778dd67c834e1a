"""Check that replicated parameters are bit-identical on all ranks: on demand, and in check mode after every step."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from tritoncomm.debug.replicas import Comparison, after_steps, compare_all
from tritoncomm.errors import ArgumentError
from tritoncomm.tensor.layout import is_colo, plain
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["check_replicas"]


def check_replicas(module: nn.Module, pg: ProcessGroup | None = None, *, data_parallel: bool = True) -> None:
    """Compare replicated parameters across ranks, bit for bit; nothing is changed.

    Replicas, and parameters that are not ColoTensors, are compared over their tensor-parallel ranks. They diverge if
    ranks update them differently: after a scaling by the norm of each rank's shards (of ``p.grad.data``), after
    different seeds, or after a state dict that was loaded on some ranks only. All ranks call.

    Reads every parameter once. Each group sends two all-gathers, of 16 bytes and of 16 bytes a parameter.

    Args:
        module: the same on every rank.
        pg: process group of parameters that are not ColoTensors; that of the first ColoTensor by default.
        data_parallel: whether to compare all parameters, shards included, over the data-parallel ranks as well.

    Raises:
        MismatchError: parameters differ, or their names, shapes or dtypes. Raised after all groups have compared, on
            every rank of a group with a difference; lists the parameters with their 2-norms by rank.
        ArgumentError: no parameter is a ColoTensor, and no ``pg`` is given.
    """
    _check(dict(module.named_parameters()), pg, data_parallel, "check_replicas")


def _check(parameters: dict[str, Any], pg: ProcessGroup | None, data_parallel: bool, name: str) -> None:
    comparisons = _comparisons(parameters, pg, data_parallel)
    compared = {name for each in comparisons for name in each.names}
    compare_all(comparisons, parameters, {key: plain(parameters[key]) for key in parameters if key in compared}, name)


def _check_after_step(optimizer: Optimizer) -> None:
    """``check_replicas`` of the parameters that an optimizer has just updated, if there are ColoTensors among them."""
    parameters = {}
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
        parameters |= dict(zip(names, group["params"], strict=True))
    if any(map(is_colo, parameters.values())):
        _check(parameters, None, True, f"{type(optimizer).__name__}.step")


after_steps(_check_after_step)


def _comparisons(parameters: dict[str, Any], pg: ProcessGroup | None, data_parallel: bool) -> list[Comparison]:
    """The comparisons by group, in the same order on every rank."""
    pg = next((p.process_group for p in parameters.values() if is_colo(p)), None) if pg is None else pg
    if pg is None:
        raise ArgumentError("check_replicas: no parameter is a ColoTensor; pass the process group as pg")
    by_group: dict[tuple[str, tuple[int, ...]], Comparison] = {}
    for name, p in parameters.items():
        own: ProcessGroup = p.process_group if is_colo(p) else pg
        sides = []
        if own.tp_world_size() > 1 and not (is_colo(p) and p.partitions):
            sides.append(("tensor-parallel ", own.tp_rank_list() or [], own.tp_process_group()))
        if own.dp_world_size() > 1 and data_parallel:
            sides.append(("data-parallel ", own.dp_rank_list() or [], own.dp_process_group()))
        for what, ranks, group in sides:
            by_group.setdefault((what, tuple(ranks)), Comparison(what, ranks, group, [])).names.append(name)
    return list(by_group.values())
