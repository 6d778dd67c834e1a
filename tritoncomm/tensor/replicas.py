"""Do the ranks that should hold the same parameters hold the same bits."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.core import eager
from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.tensor.layout import is_colo, plain
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["check_replicas"]

_CHUNK = 1 << 20
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # the odd multipliers of SplitMix64 as signed integers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMED = 10


class _Comparison(NamedTuple):
    """Parameters that have to be equal over a group."""

    what: str
    ranks: list[int]
    group: TorchGroup
    names: list[str]


def check_replicas(module: nn.Module, pg: ProcessGroup | None = None, *, data_parallel: bool = True) -> None:
    """Compare the parameters that several ranks hold, bit for bit; nothing is changed.

    Replicas are compared over their tensor-parallel ranks, parameters that are no ColoTensors as well. They drift apart
    where ranks update them differently: after ``torch.nn.utils.clip_grad_norm_``, which scales by the norm of each
    rank's shards, after different seeds, or after a state dict that was loaded on some ranks only. All ranks call.

    Reads every parameter once. Each group sends two all-gathers, of 16 bytes and of 16 bytes a parameter.

    Args:
        module: with the same parameters on every rank.
        pg: the ranks of parameters that are no ColoTensors; those of the first ColoTensor by default.
        data_parallel: whether to compare all parameters, shards included, over the data-parallel ranks too.

    Raises:
        MismatchError: names the parameters that differ, with their 2-norms by rank; on every rank of a group in which
            one differs, after all groups have compared. Or ranks whose modules have other names, shapes or dtypes.
        ArgumentError: no parameter is a ColoTensor, and no ``pg`` is given.
    """
    parameters = dict(module.named_parameters())
    comparisons = _comparisons(parameters, pg, data_parallel)
    wanted = {name for each in comparisons for name in each.names}
    rows = _fingerprints({name: plain(parameters[name]).detach() for name in parameters if name in wanted})
    problems = [text for each in comparisons if (text := _compare(each, parameters, rows))]
    if problems:
        raise MismatchError("check_replicas: " + "; ".join(problems))


def _comparisons(parameters: dict[str, Any], pg: ProcessGroup | None, data_parallel: bool) -> list[_Comparison]:
    """What is compared over which group, in the same order on every rank."""
    pg = next((p.process_group for p in parameters.values() if is_colo(p)), None) if pg is None else pg
    if pg is None:
        raise ArgumentError("check_replicas: no parameter is a ColoTensor; pass the process group as pg")
    found: dict[tuple[str, tuple[int, ...]], _Comparison] = {}
    for name, p in parameters.items():
        own: ProcessGroup = p.process_group if is_colo(p) else pg
        sides = []
        if own.tp_world_size() > 1 and not (is_colo(p) and p._parts):
            sides.append(("tensor-parallel", own.tp_rank_list() or [], own.tp_process_group()))
        if own.dp_world_size() > 1 and data_parallel:
            sides.append(("data-parallel", own.dp_rank_list() or [], own.dp_process_group()))
        for what, ranks, group in sides:
            found.setdefault((what, tuple(ranks)), _Comparison(what, ranks, group, [])).names.append(name)
    return list(found.values())


def _compare(each: _Comparison, parameters: dict[str, Any], rows: dict[str, Tensor]) -> str:
    """What differs over a group; nothing when all is equal."""
    over = f"over {each.what} ranks {each.ranks}"
    told = [(name, tuple(parameters[name].shape), str(parameters[name].dtype)) for name in each.names]
    table = torch.stack([rows[name].to(rows[each.names[0]].device) for name in each.names])
    header = hashlib.sha256(repr(told).encode()).digest()
    mine = table.new_tensor([[int.from_bytes(header[at : at + 8], "big", signed=True) for at in (0, 8)]])
    headers = eager.all_gather(mine, 0, each.group, None, "check_replicas")
    if bool((headers != mine).any()):
        return f"{over} the modules have parameters of different names, shapes or dtypes"
    gathered = eager.all_gather(table.unsqueeze(0), 0, each.group, None, "check_replicas").cpu()
    differ = (gathered[..., 0] != gathered[0, :, 0]).any(0).nonzero().flatten().tolist()
    if not differ:
        return ""
    shown = [f"{each.names[at]} ({_by_rank(gathered[:, at], each.ranks)})" for at in differ[:_NAMED]]
    more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
    return f"{len(differ)} of {len(each.names)} parameters differ {over}: {', '.join(shown)}{more}"


def _by_rank(column: Tensor, ranks: Sequence[int]) -> str:
    """The 2-norm of every value that there is, and the ranks that have it."""
    norms = column[:, 1].contiguous().view(torch.float64).tolist()
    by_digest: dict[int, list[int]] = {}
    for place, digest in enumerate(column[:, 0].tolist()):
        by_digest.setdefault(digest, []).append(place)
    return ", ".join(
        f"norm {norms[places[0]]:.9g} on ranks {[ranks[place] for place in places]}" for places in by_digest.values()
    )


def _fingerprints(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By name ``[digest, bits of the 2-norm]``, int64, on the tensor's device."""
    weights = {device: _weights(device) for device in {x.device for x in tensors.values()}}
    return {name: _fingerprint(x, weights[x.device]) for name, x in tensors.items()}


def _weights(device: torch.device) -> Tensor:
    """A number without a pattern for each place of a chunk."""
    return _mixed(torch.arange(_CHUNK, dtype=torch.int64, device=device))


def _mixed(x: Tensor) -> Tensor:
    """Other 64 bits for every 64 bits, each of which depends on all of them; in place."""
    for shift, odd in ((32, _ODD[0]), (29, _ODD[1])):
        x.mul_(odd).bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))  # torch shifts the sign in
    return x.mul_(_ODD[0])


def _fingerprint(x: Tensor, weights: Tensor) -> Tensor:
    """The sum of the elements' bits modulo 2**64, each mixed with its place; and the 2-norm.

    Mixing is one to one, so a change of one element is always seen; others go unseen with a chance of about 2**-64. The
    sum is the same in any order, so devices and numbers of threads make no difference.
    """
    x = x.resolve_conj().resolve_neg().reshape(-1)
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    digest, squares = weights.new_zeros(()), torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.split(len(weights)):
        bits = part.view(_BITS[x.element_size()]).to(torch.int64) + weights[: len(part)]
        digest = digest * _ODD[1] + _mixed(bits).sum()
        squares += part.to(torch.float64).square().sum()
    return torch.stack([digest, squares.sqrt().view(torch.int64)])
