"""Check that replicated parameters are bit-identical on all ranks: on demand, and in check mode after every step."""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from tritoncomm.debug.texts import by_text, named_ranks
from tritoncomm.errors import ArgumentError, GroupError, MismatchError
from tritoncomm.groups import GroupLike, resolve

__all__ = ["Comparison", "after_steps", "check_replicas", "compare_all", "watch_replicas"]

_CHUNK = 1 << 20
_MULTIPLIERS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47)  # the odd multipliers of SplitMix64 as signed integers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PACKED = (getattr(torch, "float4_e2m1fn_x2", None),)  # two numbers in an element, which torch does not convert
_MAX_NAMED, _MAX_TEXT = 10, 200

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


class Comparison(NamedTuple):
    """Parameters that have to be equal across a group.

    Attributes:
        what: which ranks these are, with a space behind it, for errors.
        ranks: global ranks of the group.
        group: that carries the comparison.
        names: of the parameters.
    """

    what: str
    ranks: list[int]
    group: ProcessGroup
    names: list[str]


class _Watched(NamedTuple):
    """Parameters that are compared after every step, none of which is kept alive, as their group is not."""

    group: "weakref.ref[ProcessGroup]"
    parameters: "list[tuple[str, weakref.ref[Tensor]]]"

    def alive(self) -> tuple[ProcessGroup, dict[str, Tensor]] | None:
        """The group, and the tensors that still exist; None where there is nothing to compare any more."""
        group, tensors = self.group(), {name: x for name, ref in self.parameters if (x := ref()) is not None}
        try:
            return (group, tensors) if group is not None and tensors and world_of(group, "") else None
        except GroupError:  # destroyed, and still referenced
            return None


_watched: list[_Watched] = []


def check_replicas(parameters: Parameters, group: GroupLike | None = None) -> None:
    """Compare tensors that have to be equal on all ranks of a group, bit for bit; nothing is changed.

    All ranks of the group call, with as many tensors in the same order. ``tensor.check_replicas`` is for modules with
    ColoTensors, and knows their groups.

    Reads every tensor once. Sends two all-gathers, of 24 bytes and of 16 bytes a tensor.

    Args:
        parameters: tensors, or named ones, as ``module.named_parameters()`` or a dict has them.
        group: whose ranks have the same; the tensor-parallel group by default.

    Raises:
        MismatchError: tensors, or their number, names, shapes or dtypes differ; on every rank, with their 2-norms by
            rank.
        ArgumentError: something else than plain strided tensors with data.
    """
    named, group = _named(parameters, "check_replicas"), resolve(group, "check_replicas")
    _compare_over(group, named, "check_replicas")


def watch_replicas(parameters: Parameters, group: GroupLike | None = None) -> None:
    """In check mode, compare tensors that have to be equal on all ranks of a group after every optimizer's step.

    A step compares those of them that its optimizer has. All ranks of the group watch the same, in the same order, and
    step together. It may be called with check mode on or off. Neither the tensors nor the group are kept alive.

    Args:
        parameters: as of ``check_replicas``.
        group: whose ranks have the same; the tensor-parallel group by default.

    Raises:
        ArgumentError: something else than plain strided tensors with data.

    Example:
        ``watch_replicas(model.named_parameters(), data_group)`` of a model that is trained data-parallel.
    """
    named, group = _named(parameters, "watch_replicas"), resolve(group, "watch_replicas")
    _watched[:] = [each for each in _watched if each.alive() is not None]
    _watched.append(_Watched(weakref.ref(group), [(name, weakref.ref(x)) for name, x in named.items()]))


def _named(parameters: Any, name: str) -> dict[str, Tensor]:
    if isinstance(parameters, nn.Module | Tensor) or not isinstance(parameters, Iterable):
        what = "module.named_parameters()" if isinstance(parameters, nn.Module) else "a list of tensors"
        raise ArgumentError(f"{name}: expected {what}, not {type(parameters).__name__}")
    listed: list[Any] = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    pairs = [each if isinstance(each, tuple) else (f"parameter {i}", each) for i, each in enumerate(listed)]
    if any(len(pair) != 2 for pair in pairs):
        raise ArgumentError(f"{name}: expected tensors, or pairs of a name and a tensor, not longer tuples")
    named: dict[str, Any] = dict(pairs)
    if len(named) < len(listed):
        raise ArgumentError(f"{name}: two parameters have one name")
    for key, x in named.items():
        if type(x) not in (Tensor, nn.Parameter):
            raise ArgumentError(f"{name}: {key} must be a plain tensor, not {type(x).__name__}")
        check_data(x, f"{name}: {key}")
        if x.is_quantized:
            raise ArgumentError(f"{name}: {key} is quantized; call .int_repr()")
    return named


def _compare_over(group: ProcessGroup, named: dict[str, Tensor], name: str) -> None:
    if world_of(group, name) > 1:
        ranks = dist.get_process_group_ranks(group)
        compare_all([Comparison("", ranks, group, list(named))], named, named, name)


def _check_watched(optimizer: Optimizer) -> None:
    """Compare what an optimizer has just updated, of what is watched."""
    updated = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for each in list(_watched):
        alive = each.alive()
        if alive is None:
            _watched[:] = [other for other in _watched if other is not each]
            continue
        group, tensors = alive
        if named := {name: x for name, x in tensors.items() if id(x) in updated}:
            _compare_over(group, named, f"{type(optimizer).__name__}.step")


def compare_all(
    comparisons: Sequence[Comparison], parameters: Mapping[str, Any], local: Mapping[str, Tensor], name: str
) -> None:
    """Run comparisons, in the same order on all ranks.

    Args:
        comparisons: by group.
        parameters: by name, for their shapes and dtypes.
        local: the memory of those that are compared.
        name: the function that was called, for errors.

    Raises:
        MismatchError: parameters differ; raised after all groups have compared.
    """
    rows = _fingerprints({key: x.detach() for key, x in local.items()})
    problems = [text for each in comparisons if (text := _compare(each, parameters, rows))]
    if problems:
        raise MismatchError(f"{name}: " + "; ".join(problems))


_checks: list[Callable[[Optimizer], None]] = []
_hooks: list[Any] = []


def after_steps(check: Callable[[Optimizer], None]) -> None:
    """In check mode every step of an optimizer ends with ``check`` from now on."""
    _checks.append(check)


def _check_after_step(optimizer: Optimizer, *args: Any) -> None:
    for check in _checks:
        check(optimizer)


def _follow_check_mode() -> None:
    if variables.CHECK.value and not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_check_after_step))
    elif not variables.CHECK.value and _hooks:
        _hooks.pop().remove()


after_steps(_check_watched)
variables.CHECK.listeners.append(_follow_check_mode)
_follow_check_mode()


def _compare(each: Comparison, parameters: Mapping[str, Any], rows: dict[str, Tensor]) -> str:
    """A description of the differences over a group; empty if there are none."""
    over = f"over {each.what}ranks {each.ranks}"
    signature = [f"{name} {list(parameters[name].shape)} {_name_of(parameters[name].dtype)}" for name in each.names]
    if each.names:
        table = torch.stack([rows[name].to(rows[each.names[0]].device) for name in each.names])
    else:  # another rank may have some
        device = backend.default_device(backend.cuda_backend(each.group))
        table = torch.empty(0, 2, dtype=torch.int64, device=device)
    mine = table.new_tensor([[*_digest(repr(signature), 2), len(signature)]])
    headers = eager.all_gather(mine, 0, each.group, None, "check_replicas")
    if bool((headers != mine).any()):
        first = _first_different(signature, int(headers[:, 2].min()), table, each)
        return f"{over} parameters have different names, shapes or dtypes: {first}"
    if not each.names:
        return ""
    gathered = eager.all_gather(table.unsqueeze(0), 0, each.group, None, "check_replicas").cpu()
    differ = (gathered[..., 0] != gathered[0, :, 0]).any(0).nonzero().flatten().tolist()
    if not differ:
        return ""
    shown = [f"{each.names[at]} ({_by_rank(gathered[:, at], each.ranks)})" for at in differ[:_MAX_NAMED]]
    more = f" and {len(differ) - _MAX_NAMED} more" if len(differ) > _MAX_NAMED else ""
    return f"{len(differ)} of {len(each.names)} parameters differ {over}: {', '.join(shown)}{more}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(text: str, words: int) -> list[int]:
    """That many 64-bit integers, the same in every process."""
    digest = hashlib.sha256(text.encode()).digest()
    return [int.from_bytes(digest[8 * at : 8 * at + 8], "big", signed=True) for at in range(words)]


def _first_different(signature: list[str], common: int, like: Tensor, each: Comparison) -> str:
    """The first parameter that is not the same on all ranks, of which each has ``common`` or more.

    Two more all-gathers: of 8 bytes a parameter, and of the text of that one.
    """
    digests = like.new_tensor([_digest(text, 1) for text in signature[:common]]).view(1, common)
    rows = eager.all_gather(digests, 0, each.group, None, "check_replicas") if common else digests
    differ = (rows != rows[0]).any(0).nonzero().flatten().tolist()
    place = differ[0] if differ else common
    text = (signature[place] if place < len(signature) else "missing").encode()[:_MAX_TEXT]
    padded = torch.tensor([list(text.ljust(_MAX_TEXT))], dtype=torch.uint8).to(like.device)
    texts = eager.all_gather(padded, 0, each.group, None, "check_replicas").cpu().tolist()
    words = {rank: bytes(row).decode(errors="replace").rstrip() for rank, row in zip(each.ranks, texts, strict=True)}
    return f"number {place} is " + ", ".join(f"{word} on {named_ranks(ranks)}" for word, ranks in by_text(words))


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
    """The sum modulo 2**64 of the elements' bits, each mixed with its position; and the 2-norm (packed fp4: of bytes).

    Mixing is bijective, so a change of one element is always detected; others are missed with a probability of about
    2**-64. The integer sum is independent of order, hence of device and number of threads.
    """
    x = x.resolve_conj().resolve_neg().reshape(-1)
    x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
    digest, squares = weights.new_zeros(()), torch.zeros((), dtype=torch.float64, device=x.device)
    for part in x.split(len(weights)):
        bits = part.view(_BITS[x.element_size()]).to(torch.int64) + weights[: len(part)]
        digest = digest * _MULTIPLIERS[1] + _mixed(bits).sum()
        numbers = part.view(torch.uint8) if part.dtype in _PACKED else part
        squares += numbers.to(torch.float64).square().sum()
    return torch.stack([digest, squares.sqrt().view(torch.int64)])
