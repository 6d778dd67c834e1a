"""Exchange: one mapping, sum, hop or dispatch, as a call of ours and of each peer that returns all that it computes.

``plain`` is Megatron-LM's formulation in plain torch (`by_hand`), and the calls that people write themselves for sums
over a wire, hops and Ulysses. ``DTensor`` is a redistribution, where torch has one. ``bare`` is the collectives alone,
on contiguous buffers of the same bytes: the floor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tritoncomm import collective, mappings
from tritoncomm.bench import by_hand
from tritoncomm.experts import combine, dispatch
from tritoncomm.p2p import P2PCommunicator
from tritoncomm.ulysses import UlyssesAttention

__all__ = ["EXCHANGES", "MIB", "Calls", "Place", "TimedExchange"]

MIB = 2**20
Results = Sequence[Tensor]
Calls = dict[str, Callable[[], Results]]  # by provider
Local = Callable[[Tensor, ProcessGroup], Tensor]


@dataclass(frozen=True)
class Place:
    """Where the exchanges of a run happen.

    Attributes:
        mesh: one axis of all ranks.
        hidden: columns of every input, a multiple of the number of ranks.
        capture: returns the replay of a call as a CUDA graph; None where calls are not captured.
    """

    group: ProcessGroup
    mesh: DeviceMesh
    device: torch.device
    on_gpu: bool
    dtype: torch.dtype
    hidden: int
    capture: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None

    def values(self, nbytes: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """``[rows, hidden]`` of small integers that differ by rank; their sums over the ranks are exact."""
        dtype = dtype or self.dtype
        world = self.group.size()
        rows = max(nbytes // (self.hidden * dtype.itemsize) // world, 1) * world
        generator = torch.Generator().manual_seed(1000 * seed + self.group.rank())
        most = max(1, min(8, 64 // world))
        drawn = torch.randint(-most, most + 1, (rows, self.hidden), generator=generator, dtype=torch.int8)
        return drawn.to(self.device, dtype)


@dataclass(frozen=True)
class TimedExchange:
    """One exchange.

    Attributes:
        name: in tables.
        calls: the call of each provider for an input of so many bytes on each rank.
        waits: whether the host waits for what arrives, so that no CUDA graph can capture a call.
    """

    name: str
    calls: Callable[[Place, int], Calls]
    waits: bool = False


@dataclass(frozen=True)
class MappingPeers:
    """A mapping of ours and the same step of the peers.

    Attributes:
        function: its name in `tritoncomm.mappings` and `by_hand`.
        placements: of DTensor's input and output, and of the gradient of each that DTensor assumes otherwise.
        bare: the collectives of forward and backward.
        is_temporary: whether Megatron overwrites the input, which an operator makes for every provider.
        is_fresh: whether Megatron overwrites the gradient, which an operator makes for every provider.
    """

    function: str
    placements: tuple[Placement, Placement, Placement | None]
    bare: tuple[Local | None, Local | None]
    is_temporary: bool = False
    is_fresh: bool = False

    def calls(self, place: Place, nbytes: int) -> Calls:
        """Forward and backward of one tensor; the results are the output and the gradient of the input."""
        leaf = place.values(nbytes).requires_grad_()
        group, overwrite = place.group, self.is_temporary or self.is_fresh
        ours, plain = getattr(mappings, self.function), getattr(by_hand, self.function)

        def ours_of(x: Tensor) -> Tensor:
            with mappings.overwrite_inputs(overwrite):
                return ours(group, x) if self.function == "all_to_all" else ours(x, group=group)

        def plain_of(x: Tensor) -> Tensor:
            return plain(group, x) if self.function == "all_to_all" else plain(x, group=group)

        def dtensor_of(x: Tensor) -> Tensor:
            source, target, gradient = self.placements
            shards = DTensor.from_local(x, place.mesh, [source], run_check=False)
            gradients = None if gradient is None else [gradient]
            return shards.redistribute(placements=[target]).to_local(grad_placements=gradients)

        with torch.no_grad():
            shape = ours_of(leaf.detach().clone()).shape
        gradient = place.values(nbytes, seed=1).flatten()
        gradient = gradient.repeat(-(-shape.numel() // gradient.numel()))[: shape.numel()].view(shape)

        def step(mapping: Callable[[Tensor], Tensor]) -> Callable[[], Results]:
            def both() -> Results:
                out = mapping(leaf * 2 if self.is_temporary else leaf)
                out = out * 2 if self.is_fresh else out
                return (out.detach(), *torch.autograd.grad(out, leaf, gradient))

            return both

        def bare() -> Results:
            for call, x in zip(self.bare, buffers, strict=True):
                if call is not None:
                    call(x, group)
            return ()

        buffers = (torch.zeros_like(leaf), torch.zeros_like(gradient))
        calls = {"ours": step(ours_of), "plain": step(plain_of)}
        if self.function != "all_to_all":  # no redistribution moves equal rows of a shard to every rank
            calls["DTensor"] = step(dtensor_of)
        return {**calls, "bare": bare}


def _alone(call: Callable[[], Any]) -> Callable[[], Results]:
    """Return a call without results, which nothing is compared with."""

    def bare() -> Results:
        call()
        return ()

    return bare


def ulysses(place: Place, nbytes: int) -> Calls:
    """Exchange q, k and v of ``nbytes`` together for heads, and the output back; forward and backward."""
    heads = place.group.size()
    inputs = [place.values(nbytes // 3, seed=i).requires_grad_() for i in range(3)]
    gradient = place.values(nbytes // 3, seed=3)
    attention = UlyssesAttention(place.group, attention=lambda q, k, v: q + k + v)

    def ours() -> Tensor:
        return attention(*(x.view(1, -1, heads, place.hidden // heads) for x in inputs)).view(gradient.shape)

    def plain() -> Tensor:
        q, k, v = (by_hand.all_to_all_sp2hp(x, place.group) for x in inputs)
        return by_hand.all_to_all_hp2sp(q + k + v, place.group)

    def step(forward: Callable[[], Tensor]) -> Callable[[], Results]:
        def both() -> Results:
            out = forward()
            return (out.detach(), *torch.autograd.grad(out, inputs, gradient))

        return both

    def bare() -> Results:
        for x in (*buffers, *buffers):
            by_hand.exchange(x, place.group)
        return ()

    buffers = [torch.zeros(3 * len(gradient), place.hidden, dtype=place.dtype, device=place.device), gradient]
    return {"ours": step(ours), "plain": step(plain), "bare": bare}


def dispatch_and_combine(place: Place, nbytes: int) -> Calls:
    """Send rows to the ranks of 8 experts and back, around experts that double them; forward and backward.

    Tokens have experts on as many ranks as there can be. A peer sends a row for each expert, the bare exchange one for
    each of these ranks.
    """
    group, world, slots = place.group, place.group.size(), 8
    of_experts = replace(place, hidden=7168)  # as DeepSeek-V3 has
    x, gradient = of_experts.values(nbytes).requires_grad_(), of_experts.values(nbytes, seed=1)
    number = slots * world
    first = torch.arange(len(x), device=place.device)[:, None]
    ids = (first + torch.arange(0, number, world, device=place.device)) % number
    weights = torch.full(ids.shape, 0.5, device=place.device).requires_grad_()

    def rows_of_tokens() -> Tensor:
        dispatched = dispatch(x, ids, weights, number, group)
        rows, _ = dispatched.by_expert()
        return combine(dispatched.summed(rows * 2), dispatched)

    def rows_of_pairs() -> Tensor:
        return by_hand.experts(x, ids, weights, number, lambda rows: rows * 2, group)

    def step(forward: Callable[[], Tensor]) -> Callable[[], Results]:
        def run() -> Results:
            out = forward()
            return (out.detach(), *torch.autograd.grad(out, (x, weights), gradient))

        return run

    def bare() -> Results:
        for _ in range(4):  # there and back, forward and backward
            by_hand.exchange(buffer, group)
        return ()

    buffer = x.new_zeros(len(x) * min(world, slots), x.shape[1])
    return {"ours": step(rows_of_tokens), "plain": step(rows_of_pairs), "bare": bare}


def reduce_scatter_over_wire(place: Place, nbytes: int) -> Calls:
    """Reduce-scatter fp32 gradients; ours sends them in 16 bits and sums in fp32, the bare collective sums bf16."""
    x, group = place.values(nbytes, torch.float32), place.group
    half = x.to(torch.bfloat16)
    return {
        "ours": lambda: (collective.reduce_scatter(x, 0, group, wire=torch.bfloat16),),
        "plain": lambda: (by_hand.reduce_scatter(x, group),),
        "bare": _alone(lambda: by_hand.reduce_scatter(half, group)),
    }


def all_reduce_over_wire(place: Place, nbytes: int) -> Calls:
    """All-reduce fp32 gradients; ours sends them in 16 bits and sums in fp32, the bare collective sums bf16."""
    x, group = place.values(nbytes, torch.float32), place.group
    half = torch.zeros_like(x, dtype=torch.bfloat16)
    return {
        "ours": lambda: (collective.all_reduce(x.clone(), group, wire=torch.bfloat16),),
        "plain": lambda: (by_hand.all_reduce(x.clone(), group),),
        "bare": _alone(lambda: by_hand.all_reduce(half, group)),
    }


def hop(place: Place, nbytes: int, *, both_ways: bool, is_strided: bool = False) -> Calls:
    """Send an activation to the next rank and receive one from the rank before; both ways a gradient back as well."""
    group, rank, last = place.group, place.group.rank(), place.group.size() - 1
    config = SimpleNamespace(pipeline_dtype=place.dtype, pipeline_device=place.device)
    communicator = P2PCommunicator(group, config)
    x = place.values(nbytes)
    x = torch.stack((x, x), -1)[..., 0] if is_strided else x
    shape = x.shape
    sends_on, receives_on = rank < last, rank > 0

    def ours() -> Results:
        if both_ways:
            received = communicator.send_forward_backward_recv_forward_backward(
                x if sends_on else None, x if receives_on else None, receives_on, sends_on, shape
            )
        else:
            received = (communicator.send_forward_recv_forward(x if sends_on else None, receives_on, shape),)
        return [one for one in received if one is not None]

    def transfers(sent: Tensor) -> Results:
        neighbours = [(rank - 1, receives_on, both_ways, True), (rank + 1, sends_on, True, both_ways)]
        operations, received = [], []
        for peer, is_there, sends, receives in neighbours:
            if is_there and sends:
                operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=peer))
            if is_there and receives:
                received.append(torch.empty(shape, dtype=place.dtype, device=place.device))
                operations.append(dist.P2POp(dist.irecv, received[-1], group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    dense = x.contiguous()
    return {
        "ours": ours,
        "plain": lambda: transfers(x.contiguous()),
        "bare": _alone(lambda: transfers(dense)),
    }


_gather, _reduce_scatter, _exchange = by_hand.gather, by_hand.reduce_scatter, by_hand.exchange
_mappings: Mapping[str, MappingPeers] = {
    "sp2hp": MappingPeers("all_to_all_sp2hp", (Shard(0), Shard(1), None), (_exchange, _exchange)),
    "hp2sp": MappingPeers("all_to_all_hp2sp", (Shard(1), Shard(0), None), (_exchange, _exchange)),
    "all_gather_last_dim": MappingPeers(
        "all_gather_last_dim_from_tensor_parallel_region",
        (Shard(1), Replicate(), Partial()), (_gather, _reduce_scatter),
    ),
    "reduce_scatter_last_dim": MappingPeers(
        "reduce_scatter_last_dim_to_tensor_parallel_region",
        (Partial(), Shard(1), None), (_reduce_scatter, _gather),
    ),
    "gather_from_sequence": MappingPeers(
        "gather_from_sequence_parallel_region", (Shard(0), Replicate(), Partial()), (_gather, _reduce_scatter)
    ),
    "reduce_scatter_to_sequence": MappingPeers(
        "reduce_scatter_to_sequence_parallel_region", (Partial(), Shard(0), None), (_reduce_scatter, _gather)
    ),
    "copy_to": MappingPeers(
        "copy_to_tensor_model_parallel_region",
        (Replicate(), Replicate(), Partial()), (None, by_hand.all_reduce), is_fresh=True,
    ),
    "reduce_from": MappingPeers(
        "reduce_from_tensor_model_parallel_region",
        (Partial(), Replicate(), None), (by_hand.all_reduce, None), is_temporary=True,
    ),
    "gather_from": MappingPeers(
        "gather_from_tensor_model_parallel_region", (Shard(1), Replicate(), None), (_gather, None)
    ),
    "scatter_to": MappingPeers(
        "scatter_to_tensor_model_parallel_region", (Replicate(), Shard(1), None), (None, _gather)
    ),
    "scatter_to_sequence": MappingPeers(
        "scatter_to_sequence_parallel_region", (Replicate(), Shard(0), None), (None, _gather)
    ),
    "all_to_all": MappingPeers("all_to_all", (Shard(0), Shard(0), None), (_exchange, _exchange)),
}  # fmt: skip

# The most telling ones come first: a run that is out of time leaves out the last ones.
EXCHANGES = (
    *(TimedExchange(name, mapping.calls) for name, mapping in list(_mappings.items())[:4]),
    TimedExchange("Ulysses q, k, v, output", ulysses),
    TimedExchange("reduce_scatter fp32, bf16 wire", reduce_scatter_over_wire),
    TimedExchange("all_reduce fp32, bf16 wire", all_reduce_over_wire),
    TimedExchange("dispatch and combine", dispatch_and_combine, waits=True),
    TimedExchange("hop forward", lambda place, nbytes: hop(place, nbytes, both_ways=False)),
    TimedExchange("hop both ways", lambda place, nbytes: hop(place, nbytes, both_ways=True)),
    TimedExchange("hop forward, strided", lambda place, nbytes: hop(place, nbytes, both_ways=False, is_strided=True)),
    *(TimedExchange(name, mapping.calls) for name, mapping in list(_mappings.items())[4:]),
)
