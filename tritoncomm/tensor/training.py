"""Steps of a training loop with sharded parameters: sharding by name, clipping, optimizer state, checks of replicas."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tritoncomm.core import eager
from tritoncomm.core.call import compare_arguments
from tritoncomm.debug.replicas import compare_by_layout
from tritoncomm.errors import ArgumentError
from tritoncomm.tensor.colo_parameter import ColoParameter
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec
from tritoncomm.tensor.layout import is_colo, plain
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.rules.gradients import shards_by_group
from tritoncomm.tensor.tensor_spec import ColoTensorSpec

__all__ = ["check_replicas", "clip_grad_norm_", "shard_parameters", "sharded_optimizer_state"]


def shard_parameters(
    module: nn.Module,
    layouts: Mapping[str, _DistSpec],
    pg: ProcessGroup | None = None,
    *,
    gather_output: bool = False,
    output_shard: int | None = None,
) -> None:
    """Make every parameter of a module a ColoParameter: sharded if a pattern matches its name, otherwise a replica.

    Every rank has to hold the same unsharded parameters; nothing is sent. Tied parameters stay tied.

    Args:
        module: changed in place.
        layouts: by ``fnmatch`` pattern: ``{"*.up.weight": ShardSpec([0], [tp])}``. The first match applies. A tied
            parameter has several names, each of which may match.
        pg: the process group; ``ProcessGroup()`` by default.
        gather_output: whether column-parallel operators gather their output.
        output_shard: dim along which row-parallel operators shard theirs (sequence parallelism); None gives a replica.

    Raises:
        ArgumentError: a pattern matches no parameter, or has no dist spec; names of a tied parameter match different
            specs; or a parameter is a ColoParameter already. Nothing has been changed then.
        GroupError: torch.distributed is not initialized; nothing has been changed then.

    Example:
        ``shard_parameters(mlp, {"up.*": ShardSpec([0], [2]), "down.weight": ShardSpec([-1], [2])}, pg)`` is
        Megatron's MLP: column-parallel, row-parallel, one all-reduce.
    """
    pg = ProcessGroup() if pg is None else pg
    pg.ranks_in_group()  # raises without torch.distributed, before anything is changed
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    unused = [pattern for pattern in layouts if not any(fnmatchcase(name, pattern) for name in names)]
    if unused:
        raise ArgumentError(f"shard_parameters: {', '.join(unused)} matches none of {', '.join(names)}")
    specs = _specs_of(module, layouts)
    parameters: dict[int, ColoParameter] = {}
    for owner in module.modules():
        for key, parameter in list(owner._parameters.items()):
            if parameter is None:
                continue
            spec = specs[id(parameter)]
            if id(parameter) not in parameters:
                compute = None
                if spec is not None:
                    compute = ComputeSpec(ComputePattern.TP1D)
                    compute.set_output_replicate(gather_output)
                    compute.set_output_shard(output_shard)
                # A replica first, which ``set_dist_spec`` shards in place; every rank has the full tensor.
                replica_spec = ColoTensorSpec(pg, ReplicaSpec(), compute)
                parameters[id(parameter)] = ColoParameter(parameter.detach(), parameter.requires_grad, replica_spec)
                if spec is not None:
                    parameters[id(parameter)].set_dist_spec(spec)
            owner._parameters[key] = parameters[id(parameter)]


def _specs_of(module: nn.Module, layouts: Mapping[str, _DistSpec]) -> dict[int, _DistSpec | None]:
    """Return the layout of every parameter, by its id; None for a replica. See ``shard_parameters``."""
    for pattern, spec in layouts.items():
        if not isinstance(spec, _DistSpec):
            raise ArgumentError(f"shard_parameters: {pattern} needs a dist spec, not {type(spec).__name__}")
    specs: dict[int, _DistSpec | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if is_colo(parameter):
            raise ArgumentError(f"shard_parameters: {name} is a ColoParameter already; change it by set_dist_spec()")
        spec = next((layouts[pattern] for pattern in layouts if fnmatchcase(name, pattern)), None)
        earlier = specs.get(id(parameter))
        if spec is not None and earlier is not None and spec != earlier:
            raise ArgumentError(f"shard_parameters: {name} is tied to a parameter with {earlier}, and would get {spec}")
        specs[id(parameter)] = earlier if spec is None else spec
    return specs


def sharded_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` in which the state tensors of sharded parameters are ColoTensors.

    Optimizers that copy a gradient into their state (SGD's momentum) keep a plain tensor there, which a distributed
    checkpoint would treat as replicated. Memory is shared with the optimizer.
    """
    state_dict = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [n for group in state_dict["param_groups"] for n in group["params"]]
    for index, p in zip(indices, parameters, strict=True):
        if not is_colo(p):
            continue
        state = state_dict["state"].get(index, {})
        state_dict["state"][index] = {key: _wrap_as_shard(p, value) for key, value in state.items()}
    return state_dict


def _wrap_as_shard(p: Any, value: Any) -> Any:
    """Return a plain state tensor of the shape of a shard as a ColoTensor; return other values (a step) as they are."""
    if not isinstance(value, Tensor) or is_colo(value) or value.dim() == 0 or value.shape != plain(p).shape:
        return value
    return p._wrap(value, p.process_group, p.dist_spec, p.global_shape)


def check_replicas(module: nn.Module, pg: ProcessGroup | None = None, *, data_parallel: bool = True) -> None:
    """Compare replicated parameters across ranks, bit for bit; nothing is changed.

    Replicas, and parameters that are not ColoTensors, are compared over their tensor-parallel ranks. They diverge if
    ranks update them differently: if gradients are clipped by a norm of each rank's own shards (of ``p.grad.data``),
    after different seeds, or after a state dict that was loaded on some ranks only. All ranks call.

    Reads every parameter once. Each group sends two all-gathers: 8 bytes a rank, then 24 bytes a parameter and rank.

    Args:
        module: with equal parameter names on every rank.
        pg: process group of parameters that are not ColoTensors; by default the first ColoTensor's.
        data_parallel: whether to compare all parameters, shards included, over the data-parallel ranks as well.

    Raises:
        MismatchError: parameters differ, or their names, shapes or dtypes. Raised after all groups have compared, on
            every rank of a group with a difference; lists the parameters with their 2-norms by rank.
        ArgumentError: no parameter is a ColoTensor, and no ``pg`` is given.
    """
    compare_by_layout(dict(module.named_parameters()), pg, data_parallel, "check_replicas")


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Run ``torch.nn.utils.clip_grad_norm_`` by the norm of the global gradients, each counted once.

    All tensor-parallel ranks call; each group all-reduces one number (all-gathers it for the orders inf and -inf). A
    NaN of any rank makes the norm NaN. Gradients are scaled in place by ``max_norm / (norm + 1e-6)`` if that is less
    than 1.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite``.
        ArgumentError: the order 0, which is no norm.
    """
    if norm_type == 0:
        raise ArgumentError("clip_grad_norm_: norm_type 0 counts elements, which cannot be scaled; take another order")
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    pairs = [(p, (plain(p.grad) if is_colo(p.grad) else p.grad).detach()) for p in tensors if p.grad is not None]
    if not pairs:
        return torch.tensor(0.0)
    device, power = pairs[0][1].device, float(norm_type)
    # Sums of powers, or extremes for the orders inf and -inf: of the replicas here, then of the shards of each group.
    power_sums = [_power_sum([grad for p, grad in pairs if not (is_colo(p) and p.partitions)], power, device)]
    for pg, indices in shards_by_group([p for p, _ in pairs]):
        partial, group = _power_sum([pairs[index][1] for index in indices], power, device), pg.tp_process_group()
        compare_arguments("clip_grad_norm_", group, max_norm=max_norm, norm_type=power, gradients=len(indices))
        if math.isinf(power):  # Gloo's MAX loses a NaN
            partial = _combined(eager.all_gather(partial.view(1), 0, group, "clip_grad_norm_"), power)
        else:
            partial = eager.all_reduce(partial, group, "clip_grad_norm_")
        power_sums.append(partial)
    total = _combined(torch.stack(power_sums), power)
    total = total if math.isinf(power) else total.pow(1 / power)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(total)}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in (grad for _, grad in pairs):
        grad.mul_(factor.to(grad.dtype))
    return total


def _power_sum(grads: list[Tensor], power: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p over all elements (the maximum for inf, the minimum for -inf), in fp32 or wider."""
    grads = [grad.abs() if grad.is_complex() else grad for grad in grads]
    wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
    norms = [torch.linalg.vector_norm(grad, power, dtype=wide) for grad in grads if grad.numel()]
    if not norms:
        return torch.full((), math.inf if power == -math.inf else 0.0, device=device, dtype=wide)
    stacked = torch.stack(norms)
    return _combined(stacked if math.isinf(power) else stacked.pow(power), power)


def _combined(parts: Tensor, power: float) -> Tensor:
    """Return the sum of parts of a norm; for the orders inf and -inf their maximum and minimum. A NaN stays."""
    if math.isinf(power):
        return parts.max() if power > 0 else parts.min()
    return parts.sum()
