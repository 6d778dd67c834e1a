"""FSDP2 (``torch.distributed.fsdp.fully_shard``) whose 16-bit gradients travel as they are, and are summed in fp32.

With ``reduce_dtype=torch.float32`` FSDP2 copies bf16 gradients into an fp32 buffer, and sends that. Here the buffer is
sent in bf16, half of the bytes of each reduce-scatter, and every value of the sum is the same. docs/sums.md has the
arithmetic, and where an exact fp32 reduce-scatter is the better choice.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule

from tritoncomm import collective
from tritoncomm.core import backend
from tritoncomm.core.node_exchange import Levels
from tritoncomm.core.wire_sum import WireOptions, checked_wire
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.integrations.changes import Changes
from tritoncomm.parsing import counted, dtype_name

__all__ = ["Report", "restore", "use"]


class Report(NamedTuple):
    """Report of ``use``.

    Attributes:
        modules: paths of the FSDP modules whose gradients travel in ``wire``; the model itself is ``model``.
        wire: dtype on the wire, in the place of fp32.
        round_accumulated: argument of ``use``.
        replicates: whether a mesh of two dims all-reduces gradients too (HSDP), which stays in fp32.
        wire_between: dtype of the sums of a node on the wire to other nodes; None without one.
    """

    modules: tuple[str, ...]
    wire: torch.dtype
    round_accumulated: bool
    replicates: bool
    wire_between: torch.dtype | None

    def __str__(self) -> str:
        count = counted(len(self.modules), "FSDP module")
        lines = [f"fsdp2.use: {count}; gradients travel in {dtype_name(self.wire)}, not in float32"]
        if self.wire_between is not None:
            lines.append(f"  sums of a node travel in {dtype_name(self.wire_between)} to other nodes")
        if self.replicates:
            lines.append("  the all-reduce between replicas (HSDP) stays in float32")
        if not self.round_accumulated:
            lines += [
                "  gradients accumulated with set_requires_gradient_sync(False) travel in float32:",
                "  with accumulation this saves nothing unless round_accumulated=True",
            ]
        return "\n".join(lines)


class _Options(NamedTuple):
    """Arguments of ``use``."""

    wire: torch.dtype
    wire_between: torch.dtype | None
    exchange: Levels | None
    round_accumulated: bool


class _ReduceScatter:
    """FSDP2's ``ReduceScatter`` over a 16-bit wire, put into a parameter group.

    Attributes:
        is_on: until ``undo``; somebody else's, around this one, may call it still.
        options: of the last ``use``.
        is_accumulated: a backward since the last call has added to gradients in fp32 without reducing them.
    """

    def __init__(self, group: Any, options: _Options) -> None:
        self.is_on, self.options, self.is_accumulated = True, options, False
        self._group, self._before, self._post_backward = group, group._reduce_scatter_comm, group.post_backward
        self._changes = Changes()
        with self._changes as changes:
            changes.set_attribute(group, "_reduce_scatter_comm", self)
            # TODO: delete when FSDP2 tells its ReduceScatter the dtype of the gradients in the buffer.
            changes.set_attribute(group, "post_backward", self.post_backward)

    def undo(self) -> None:
        """Give the parameter group what it had."""
        self.is_on = False
        self._changes.undo()

    def post_backward(self, *unused: Any) -> None:
        """Run FSDP2's, and note a backward that leaves gradients in fp32 instead of reducing them."""
        # Every rank comes through here in every backward, whether its parameters had gradients or not, so all ranks
        # decide alike. Values would not do: one rank's accumulated gradients may happen to be exact in 16 bits.
        self.is_accumulated = self.is_accumulated or not self._group.reduce_grads
        self._post_backward(*unused)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer as before."""
        return self._before.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Send ``wire`` and add up in fp32; reduce as before ``use`` where gradients have another dtype than ``wire``.

        Returns:
            The work with ``async_op``, else None.
        """
        wire, wire_between, exchange, round_accumulated = self.options
        was_accumulated, self.is_accumulated = self.is_accumulated, False  # until the next backward without a reduction
        # Read in every call: as in FSDP2, the policy may change after ``use``.
        gradient_dtype = self._group.mp_policy.param_dtype or self._group._orig_dtype
        would_round = gradient_dtype is not wire or (was_accumulated and not round_accumulated)
        if not self.is_on or would_round:
            return self._earlier_sum(output_tensor, input_tensor, group, op, async_op)
        op, scale = _op_and_scale(op)
        result = collective.reduce_scatter(
            input_tensor, 0, group, op, async_op, wire=wire, wire_between=wire_between, exchange=exchange, scale=scale,
            out=output_tensor,
        )  # fmt: skip
        return result[1] if async_op else None

    def _earlier_sum(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool
    ) -> Any:
        """Sum by the reduce-scatter that was there before; scale by a kernel where the backend has no PREMUL_SUM."""
        name = backend.backend_name(group, input_tensor)
        scale = _op_and_scale(op)[1]
        if scale is None or backend.is_nccl(name):
            return self._before(output_tensor, input_tensor, group, op, async_op)
        return self._before(output_tensor, input_tensor.mul_(scale), group, ReduceOp.SUM, async_op)


def _op_and_scale(op: Any) -> tuple[Any, float | None]:
    """Return an op as SUM or AVG, and the factor of PREMUL_SUM, which FSDP2 takes for a divide factor of one's own."""
    if op != ReduceOp.PREMUL_SUM:
        return op, None
    return ReduceOp.SUM, float(op.__getstate__()[1])  # its state is the only place that shows the factor


def use(
    model: nn.Module,
    *,
    wire: torch.dtype = torch.bfloat16,
    wire_between: torch.dtype | None = None,
    exchange: Levels | None = None,
    round_accumulated: bool = False,
) -> Report:
    """Let every FSDP module of ``model`` reduce-scatter its gradients over a 16-bit wire.

    A gradient is ``round((g of rank 0 + g of rank 1 + ...) * scale)`` in fp32 and in rank order, as if fp32 had been
    sent. The all-reduce of HSDP stays as it is. All ranks call it with the same arguments; a second call replaces the
    arguments of the first.

    Gradients that were accumulated without synchronisation (``set_requires_gradient_sync(False)``) are sums in fp32.
    They travel in fp32, by the reduce-scatter that was there before, unless ``round_accumulated``.

    Args:
        model: after ``fully_shard``, the same modules on every rank.
        wire: dtype of the gradients, what travels.
        wire_between, exchange: see ``collective.reduce_scatter``.
        round_accumulated: round gradients that were accumulated in fp32 to ``wire``, once.

    Returns:
        The modules and the dtype that travels. As text, it tells of cases in which nothing is saved.

    Raises:
        ArgumentError: no FSDP2 module; a wire of another dtype.
        UnsupportedError: a module, by name, whose gradients are not of the dtype ``wire`` or not summed in fp32, or
            with several parameter groups; more than one node without ``exchange``.
    """
    name = "fsdp2.use"
    options = _Options(wire, wire_between, exchange, round_accumulated)
    found = list(_parameter_groups(model, name))
    if not found:
        raise ArgumentError(
            f"{name}: no FSDP2 module has parameters of its own; call fully_shard first. Under Trainer call this in "
            "on_train_begin, on GPUs: accelerate does not shard on CPUs"
        )
    for label, _, group in found:
        _check(label, group, options, name)
    with Changes() as changes:
        for _, _, group in found:
            comm = group._reduce_scatter_comm
            if isinstance(comm, _ReduceScatter) and comm.is_on:
                changes.set_attribute(comm, "options", options)
            else:
                changes.add(_ReduceScatter(group, options).undo)  # which puts itself into the group
    grouped = [module for _, module, _ in found]
    paths = tuple(path or "model" for path, module in model.named_modules() if module in grouped)
    replicates = any(group.mesh_info.replicate_mesh_dim is not None for _, _, group in found)
    between = (wire_between or torch.float32) if exchange == "node" else None
    return Report(paths, wire, round_accumulated, replicates, between)


def restore(model: nn.Module) -> None:
    """Give every FSDP module of ``model`` the reduce-scatter that it had before ``use``; without one, do nothing.

    One that somebody else has put there since stays.
    """
    changes = Changes()
    for _, _, group in _parameter_groups(model, "fsdp2.restore"):
        changes.add(partial(_restore, group))
    changes.undo()


def _restore(group: Any) -> None:
    """Take ours out of a parameter group: several, where somebody has put one between them."""
    past: list[Any] = []
    while True:
        watcher = getattr(vars(group).get("post_backward"), "__self__", None)
        comms = [x for x in (group._reduce_scatter_comm, watcher) if isinstance(x, _ReduceScatter) and x not in past]
        if not comms:
            return
        past.append(comms[0])
        comms[0].undo()


# TODO: parameter groups are private in torch 2.11 to 2.13, and nothing public says what a policy or a comm is.
def _parameter_groups(model: nn.Module, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, FSDP module, its parameter group) of every one with parameters of its own."""
    for path, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        label = f"{name}: module {path or 'model'!r} ({type(module).__name__})"
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one at most
            groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
        if len(groups) > 1:
            raise UnsupportedError(f"{label} has {len(groups)} parameter groups, for which FSDP2 takes no custom sum")
        for group in groups:
            yield label, module, group


def _check(label: str, group: Any, options: _Options, name: str) -> None:
    """Reject a parameter group whose gradients do not have the wire's dtype, or are not summed in fp32."""
    if group.mesh_info.shard_mesh_dim is None:
        raise UnsupportedError(f"{label} replicates its parameters, and has no reduce-scatter")
    policy = group.mp_policy
    trained = [each.sharded_param for each in group.fsdp_params]
    computed = {policy.param_dtype or parameter.dtype for parameter in trained if parameter.requires_grad}
    if not computed <= {options.wire} or policy.reduce_dtype is not torch.float32:
        raise UnsupportedError(
            f"{label} has gradients in {', '.join(sorted(map(str, computed)))}, summed in "
            f"{policy.reduce_dtype or 'the same dtype'}: a wire in {options.wire} needs "
            f"MixedPrecisionPolicy(param_dtype={options.wire}, reduce_dtype=torch.float32)"
        )
    wire = WireOptions(options.wire, options.wire_between, options.exchange)
    checked_wire(wire, group._reduce_scatter_process_group, name)
