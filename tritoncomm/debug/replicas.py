"""Comparison of replicas: tensors that have to be bit-identical on several ranks.

It runs on demand, and in check mode after every step of an optimizer.
"""

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tritoncomm import variables
from tritoncomm.core import backend, eager
from tritoncomm.core.validation import check_data, world_of
from tritoncomm.debug.descriptor import as_json
from tritoncomm.debug.texts import by_text, named_ranks
from tritoncomm.errors import ArgumentError, GroupError, MismatchError
from tritoncomm.groups import GroupLike, resolve

__all__ = ["check_replicas", "compare_by_layout", "watch_replicas"]

_CHUNK = 1 << 20
_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # the odd multipliers of SplitMix64 as signed integers
_CHUNK_FACTOR = _MULTIPLIERS[1]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PACKED = (getattr(torch, "float4_e2m1fn_x2", None),)  # an element is two numbers, which torch does not convert
_MAX_NAMED, _MAX_TEXT = 10, 200

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


class _ReplicaComparison(NamedTuple):
    """Parameters that have to be equal across a group.

    Attributes:
        label: kind of the ranks, with a space behind it, for errors; empty if the caller named the group.
        ranks: global ranks of the group.
        names: of the parameters.
    """

    label: str
    ranks: list[int]
    group: ProcessGroup
    names: list[str]


class _Watched(NamedTuple):
    """Parameters to compare after every step; neither they nor their group are kept alive."""

    group: "weakref.ref[ProcessGroup]"
    parameters: "list[tuple[str, weakref.ref[Tensor]]]"

    def alive(self) -> tuple[ProcessGroup, dict[str, Tensor]] | None:
        """Return the group and the tensors that still exist; None if the group or all tensors are gone."""
        group, tensors = self.group(), {name: x for name, ref in self.parameters if (x := ref()) is not None}
        try:
            return (group, tensors) if group is not None and tensors and world_of(group, "") else None
        except GroupError:  # destroyed, and still referenced
            return None


_watched: list[_Watched] = []


def check_replicas(parameters: Parameters, group: GroupLike | None = None) -> None:
    """Compare tensors that have to be equal on all ranks of a group, bit for bit; nothing is changed.

    All ranks of the group call, with equally many tensors in the same order. ``tensor.check_replicas`` takes modules
    with ColoTensors, and finds their groups.

    Reads every tensor once. Sends two all-gathers: 8 bytes a rank, then 24 bytes a tensor and rank.

    Args:
        parameters: a list of tensors, pairs of a name and a tensor (``module.named_parameters()``), or a dict.
        group: ranks that hold the same tensors; the tensor-parallel group by default.

    Raises:
        MismatchError: tensors, or their number, names, shapes or dtypes differ. Every rank raises it, with the
            2-norms by rank.
        ArgumentError: a parameter is not a plain strided tensor with data.
    """
    tensors, group = _by_name(parameters, "check_replicas"), resolve(group, "check_replicas")
    _compare_over(group, tensors, "check_replicas")


def watch_replicas(parameters: Parameters, group: GroupLike | None = None) -> None:
    """Compare tensors that have to be equal on all ranks of a group after every optimizer step in check mode.

    A step compares the watched tensors that its optimizer has. All ranks of the group watch the same tensors in the
    same order, and step together. Check mode may be switched on later. Tensors and group are not kept alive.

    Args:
        parameters: as for ``check_replicas``.
        group: ranks that hold the same tensors; the tensor-parallel group by default.

    Raises:
        ArgumentError: a parameter is not a plain strided tensor with data.

    Example:
        ``watch_replicas(model.named_parameters(), data_group)`` for a model that is trained data-parallel.
    """
    tensors, group = _by_name(parameters, "watch_replicas"), resolve(group, "watch_replicas")
    _watched[:] = [each for each in _watched if each.alive() is not None]
    _watched.append(_Watched(weakref.ref(group), [(name, weakref.ref(x)) for name, x in tensors.items()]))


def _by_name(parameters: Any, name: str) -> dict[str, Tensor]:
    """Check parameters, and return them by name; those without one are ``parameter 0``, ``parameter 1``, ..."""
    if isinstance(parameters, nn.Module | Tensor) or not isinstance(parameters, Iterable):
        what = "module.named_parameters()" if isinstance(parameters, nn.Module) else "a list of tensors"
        raise ArgumentError(f"{name}: expected {what}, not {type(parameters).__name__}")
    entries: list[Any] = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    pairs = [each if isinstance(each, tuple) else (f"parameter {i}", each) for i, each in enumerate(entries)]
    if any(len(pair) != 2 for pair in pairs):
        raise ArgumentError(f"{name}: expected tensors, or pairs of a name and a tensor, not longer tuples")
    tensors: dict[str, Any] = dict(pairs)
    if len(tensors) < len(entries):
        raise ArgumentError(f"{name}: two parameters have one name")
    for key, x in tensors.items():
        if type(x) not in (Tensor, nn.Parameter):
            raise ArgumentError(f"{name}: {key} must be a plain tensor, not {type(x).__name__}")
        check_data(x, f"{name}: {key}")
    return tensors


def _compare_over(group: ProcessGroup, tensors: dict[str, Tensor], name: str) -> None:
    """Compare tensors, bit for bit, between the ranks of one group, all of which call."""
    if world_of(group, name) > 1:
        _compare([_ReplicaComparison("", dist.get_process_group_ranks(group), group, list(tensors))], tensors, name)


def compare_by_layout(parameters: Mapping[str, Any], pg: Any, data_parallel: bool, name: str) -> None:
    """Compare parameters over the groups of ranks that hold the same bits, as their layouts say.

    Args:
        pg: process group of the tensors without a layout; by default the group of the first tensor with one.
        data_parallel: whether to compare over the data-parallel ranks as well.
    """
    # ColoTensor is not imported: a class with layouts has ``process_group``, ``partitions`` and ``reshard_local()``,
    # and its process groups have ``replica_groups``. Other tensors are replicas over the tensor-parallel ranks.
    pg = next((p.process_group for p in parameters.values() if _has_layout(p)), None) if pg is None else pg
    if pg is None:
        raise ArgumentError(f"{name}: no parameter is a ColoTensor; pass the process group as pg")
    by_group: dict[tuple[str, tuple[int, ...]], _ReplicaComparison] = {}
    for key, p in parameters.items():
        has_layout = _has_layout(p)
        owner, is_sharded = p.process_group if has_layout else pg, has_layout and bool(p.partitions)
        for label, ranks, group in owner.replica_groups(is_sharded, data_parallel):
            comparison = _ReplicaComparison(label, ranks, group, names=[])
            by_group.setdefault((label, tuple(ranks)), comparison).names.append(key)
    _compare(list(by_group.values()), parameters, name)


def _has_layout(x: Any) -> bool:
    """Whether ``x`` is a tensor of a class with layouts, as ColoTensor is."""
    return hasattr(type(x), "reshard_local")


def _compare(comparisons: Sequence[_ReplicaComparison], parameters: Mapping[str, Any], name: str) -> None:
    """Compare parameters over several groups, one after the other; all ranks have the groups in the same order."""
    compared = {key: parameters[key] for each in comparisons for key in each.names}
    tensors = {key: (x.reshard_local() if _has_layout(x) else x).detach() for key, x in compared.items()}
    weights = {
        device: _mixed(torch.arange(_CHUNK, dtype=torch.int64, device=device))
        for device in {x.device for x in tensors.values()}
    }
    fingerprints = {key: _fingerprint(x, weights[x.device]) for key, x in tensors.items()}
    # All groups compare before one raises: other ranks wait in the next one.
    problems = [text for each in comparisons if (text := _difference(each, parameters, fingerprints))]
    if problems:
        raise MismatchError(f"{name}: " + "; ".join(problems))


_hooks: list[Any] = []


def _after_step(optimizer: Optimizer, *args: Any) -> None:
    """Compare the watched parameters, and the ColoTensors, of an optimizer that has just made a step; its hook."""
    name = f"{type(optimizer).__name__}.step"
    updated = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for watched in list(_watched):
        alive = watched.alive()
        if alive is None:
            _watched[:] = [other for other in _watched if other is not watched]
            continue
        group, tensors = alive
        if stepped := {key: x for key, x in tensors.items() if id(x) in updated}:
            _compare_over(group, stepped, name)
    parameters: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
        parameters |= dict(zip(names, group["params"], strict=True))
    if any(map(_has_layout, parameters.values())):
        compare_by_layout(parameters, pg=None, data_parallel=True, name=name)


def _follow_check_mode() -> None:
    """Register or remove the hook ``_after_step`` of optimizers, as check mode is on or off."""
    if variables.CHECK.value and not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    elif not variables.CHECK.value and _hooks:
        _hooks.pop().remove()


variables.CHECK.listeners.append(_follow_check_mode)
_follow_check_mode()


def _difference(each: _ReplicaComparison, parameters: Mapping[str, Any], fingerprints: dict[str, Tensor]) -> str:
    """Compare parameters over one group, by two all-gathers; return their differences as text, empty without any."""
    over = f"over {each.label}ranks {each.ranks}"
    signature = [f"{name} {list(parameters[name].shape)} {as_json(parameters[name].dtype)}" for name in each.names]
    if each.names:
        device = fingerprints[each.names[0]].device
        table = torch.stack([fingerprints[name].to(device) for name in each.names])
    else:  # another rank may have parameters, and waits for the counts
        device = backend.default_device(backend.cuda_backend(each.group))
        table = torch.empty(0, 2, dtype=torch.int64, device=device)
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in signature)
    hashes = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    # A row per parameter: digest of the bits, bits of the 2-norm, hash of name, shape and dtype.
    table = torch.cat([table, table.new_tensor(hashes).view(-1, 1)], 1)
    count = table.new_tensor([len(signature)])
    counts = eager.all_gather(count, dim=0, group=each.group, name="check_replicas").tolist()
    common = min(counts)
    if common:
        rows = table[:common].unsqueeze(0)
        tables = eager.all_gather(rows, dim=0, group=each.group, name="check_replicas").cpu()
    else:
        tables = torch.empty(len(counts), 0, 3, dtype=torch.int64, device="cpu")
    # Places of the parameters whose bits differ (column 0), and whose name, shape or dtype differs (column 2).
    differ, others = ((tables[..., i] != tables[0, :, i]).any(0).nonzero().flatten().tolist() for i in (0, 2))
    if others or max(counts) > common:
        place = others[0] if others else common
        texts = _texts_of(signature[place] if place < len(signature) else "missing", table, each)
        return f"{over} parameters have different names, shapes or dtypes: number {place} is {texts}"
    if not differ:
        return ""
    shown = [f"{each.names[at]} ({_by_rank(tables[:, at], each.ranks)})" for at in differ[:_MAX_NAMED]]
    more = f" and {len(differ) - _MAX_NAMED} more" if len(differ) > _MAX_NAMED else ""
    return f"{len(differ)} of {len(each.names)} parameters differ {over}: {', '.join(shown)}{more}"


def _texts_of(text: str, like: Tensor, each: _ReplicaComparison) -> str:
    """All-gather a text of every rank, cut after 200 bytes, and return ``TEXT on ranks 0-2, TEXT on rank 3``.

    ``like`` is a tensor on the device of the comparison.
    """
    padded = torch.tensor([list(text.encode()[:_MAX_TEXT].ljust(_MAX_TEXT))], dtype=torch.uint8, device=like.device)
    rows = eager.all_gather(padded, dim=0, group=each.group, name="check_replicas").cpu().tolist()
    texts = {rank: bytes(row).decode(errors="replace").rstrip() for rank, row in zip(each.ranks, rows, strict=True)}
    return ", ".join(f"{text} on {named_ranks(ranks)}" for text, ranks in by_text(texts))


def _by_rank(column: Tensor, ranks: Sequence[int]) -> str:
    """Return ``norm 2 on ranks 0-2, norm 3 on rank 3`` of the distinct digests; ``column`` is ``[ranks, 3]``."""
    # A row is one of ``_difference``: digest, bits of the 2-norm, hash.
    norms = dict(zip(ranks, column[:, 1].clone().view(torch.float64).tolist(), strict=True))
    digests = dict(zip(ranks, map(str, column[:, 0].tolist()), strict=True))
    return ", ".join(f"norm {norms[having[0]]:.9g} on {named_ranks(having)}" for _, having in by_text(digests))


def _mixed(x: Tensor) -> Tensor:
    """Replace each number of an int64 tensor by a pseudo-random one, in place: a bijection of 64-bit integers."""
    # Multiply, xor with a shift by 32, multiply, xor with a shift by 29, multiply.
    for shift, odd in ((32, _MULTIPLIERS[0]), (29, _MULTIPLIERS[1])):
        unsigned = (1 << (64 - shift)) - 1  # clears the sign bits of torch's arithmetic shift
        x.mul_(odd).bitwise_xor_((x >> shift).bitwise_and_(unsigned))
    return x.mul_(_MULTIPLIERS[0])


def _fingerprint(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``[digest, bits of the 2-norm]``, int64; ``weights`` has a random number per position of a chunk."""
    # The digest is a sum modulo 2**64 of the elements' bits, each mixed with its position. Mixing is bijective, so a
    # change of one element is always detected; a change of several is missed with a probability of about 2**-64. An
    # integer sum does not depend on its order, hence not on the device or the number of threads. The norm of packed fp4
    # is the norm of its bytes.
    x = x.resolve_conj().resolve_neg().reshape(-1)
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    digest, squares = weights.new_zeros(()), torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.split(len(weights)):
        bits = part.view(_BITS[x.element_size()]).to(torch.int64) + weights[: len(part)]
        # The factor makes the digest depend on the order of the chunks.
        digest = digest * _CHUNK_FACTOR + _mixed(bits).sum()
        numbers = part.view(torch.uint8) if part.dtype in _PACKED else part
        squares += numbers.to(torch.float64).square().sum()
    return torch.stack([digest, squares.sqrt().view(torch.int64)])
