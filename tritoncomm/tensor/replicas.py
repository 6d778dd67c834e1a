"""Check that replicated parameters are bit-identical on all ranks: on demand, and in check mode after every step."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tritoncomm import variables
from tritoncomm.core import eager
from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.tensor.layout import is_colo, plain
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["check_replicas"]

_CHUNK = 1 << 20
_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # the odd multipliers of SplitMix64 as signed integers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_NAMED = 10


class _Comparison(NamedTuple):
    """Parameters that have to be equal across a group."""

    what: str
    ranks: list[int]
    group: TorchGroup
    names: list[str]


def check_replicas(module: nn.Module, pg: ProcessGroup | None = None, *, data_parallel: bool = True) -> None:
    """Compare replicated parameters across ranks, bit for bit; nothing is changed.

    Replicas, and parameters that are not ColoTensors, are compared over their tensor-parallel ranks. They diverge if
    ranks update them differently: after ``torch.nn.utils.clip_grad_norm_``, which scales by the norm of each rank's
    shards, after different seeds, or after a state dict that was loaded on some ranks only. All ranks call.

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
    rows = _fingerprints({name: plain(parameters[name]).detach() for name in parameters if name in compared})
    problems = [text for each in comparisons if (text := _compare(each, parameters, rows))]
    if problems:
        raise MismatchError(f"{name}: " + "; ".join(problems))


def _check_after_step(optimizer: Optimizer, *args: Any) -> None:
    """``check_replicas`` of the parameters that an optimizer has just updated, if there are ColoTensors among them."""
    parameters = {}
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
        parameters |= dict(zip(names, group["params"], strict=True))
    if any(map(is_colo, parameters.values())):
        _check(parameters, None, True, f"{type(optimizer).__name__}.step")


_hooks: list[Any] = []


def _follow_check_mode() -> None:
    """In check mode every step of an optimizer ends with a comparison."""
    if variables.CHECK.value and not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_check_after_step))
    elif not variables.CHECK.value and _hooks:
        _hooks.pop().remove()


variables.CHECK.listeners.append(_follow_check_mode)
_follow_check_mode()


def _comparisons(parameters: dict[str, Any], pg: ProcessGroup | None, data_parallel: bool) -> list[_Comparison]:
    """The comparisons by group, in the same order on every rank."""
    pg = next((p.process_group for p in parameters.values() if is_colo(p)), None) if pg is None else pg
    if pg is None:
        raise ArgumentError("check_replicas: no parameter is a ColoTensor; pass the process group as pg")
    by_group: dict[tuple[str, tuple[int, ...]], _Comparison] = {}
    for name, p in parameters.items():
        own: ProcessGroup = p.process_group if is_colo(p) else pg
        sides = []
        if own.tp_world_size() > 1 and not (is_colo(p) and p.partitions):
            sides.append(("tensor-parallel", own.tp_rank_list() or [], own.tp_process_group()))
        if own.dp_world_size() > 1 and data_parallel:
            sides.append(("data-parallel", own.dp_rank_list() or [], own.dp_process_group()))
        for what, ranks, group in sides:
            by_group.setdefault((what, tuple(ranks)), _Comparison(what, ranks, group, [])).names.append(name)
    return list(by_group.values())


def _compare(each: _Comparison, parameters: dict[str, Any], rows: dict[str, Tensor]) -> str:
    """A description of the differences over a group; empty if there are none."""
    over = f"over {each.what} ranks {each.ranks}"
    signature = [(name, tuple(parameters[name].shape), str(parameters[name].dtype)) for name in each.names]
    table = torch.stack([rows[name].to(rows[each.names[0]].device) for name in each.names])
    header = hashlib.sha256(repr(signature).encode()).digest()
    mine = table.new_tensor([[int.from_bytes(header[at : at + 8], "big", signed=True) for at in (0, 8)]])
    headers = eager.all_gather(mine, 0, each.group, None, "check_replicas")
    if bool((headers != mine).any()):
        return f"{over} the modules have parameters of different names, shapes or dtypes"
    gathered = eager.all_gather(table.unsqueeze(0), 0, each.group, None, "check_replicas").cpu()
    differ = (gathered[..., 0] != gathered[0, :, 0]).any(0).nonzero().flatten().tolist()
    if not differ:
        return ""
    shown = [f"{each.names[at]} ({_by_rank(gathered[:, at], each.ranks)})" for at in differ[:_MAX_NAMED]]
    more = f" and {len(differ) - _MAX_NAMED} more" if len(differ) > _MAX_NAMED else ""
    return f"{len(differ)} of {len(each.names)} parameters differ {over}: {', '.join(shown)}{more}"


def _by_rank(column: Tensor, ranks: Sequence[int]) -> str:
    """The 2-norm of every distinct value, and the ranks that have it."""
    norms = column[:, 1].contiguous().view(torch.float64).tolist()
    by_digest: dict[int, list[int]] = {}
    for position, digest in enumerate(column[:, 0].tolist()):
        by_digest.setdefault(digest, []).append(position)
    return ", ".join(
        f"norm {norms[positions[0]]:.9g} on ranks {[ranks[position] for position in positions]}"
        for positions in by_digest.values()
    )


def _fingerprints(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name ``[digest, bits of the 2-norm]``, int64, on the tensor's device."""
    weights = {device: _weights(device) for device in {x.device for x in tensors.values()}}
    return {name: _fingerprint(x, weights[x.device]) for name, x in tensors.items()}


def _weights(device: torch.device) -> Tensor:
    """A pseudo-random number for each position of a chunk."""
    return _mixed(torch.arange(_CHUNK, dtype=torch.int64, device=device))


def _mixed(x: Tensor) -> Tensor:
    """A bijective 64-bit mix (SplitMix64), in place."""
    for shift, odd in ((32, _MULTIPLIERS[0]), (29, _MULTIPLIERS[1])):
        x.mul_(odd).bitwise_xor_(
            (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        )  # clears the sign bits of torch's arithmetic shift
    return x.mul_(_MULTIPLIERS[0])


def _fingerprint(x: Tensor, weights: Tensor) -> Tensor:
    """The sum modulo 2**64 of the elements' bits, each mixed with its position; and the 2-norm.

    Mixing is bijective, so a change of one element is always detected; others are missed with a probability of about
    2**-64. The integer sum is independent of order, hence of device and number of threads.
    """
    x = x.resolve_conj().resolve_neg().reshape(-1)
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    digest, squares = weights.new_zeros(()), torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.split(len(weights)):
        bits = part.view(_BITS[x.element_size()]).to(torch.int64) + weights[: len(part)]
        digest = digest * _MULTIPLIERS[1] + _mixed(bits).sum()
        squares += part.to(torch.float64).square().sum()
    return torch.stack([digest, squares.sqrt().view(torch.int64)])
