"""Calls in which ranks disagree: by name what rank 0 and what the other ranks do, and what an error has to name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm import collective as c
from tritoncomm import mappings as m
from tritoncomm.debug import check
from tritoncomm.debug.store import job_store
from tritoncomm.ulysses import UlyssesAttention

__all__ = ["COLLECTIVES", "HOPS", "MAPPINGS", "Case", "layouts", "synchronise"]

T = torch.ones
Case = tuple[Callable[[Any, int], Any], str]


def _half(*shape: int) -> torch.Tensor:
    return T(*shape, dtype=torch.float16)


# The function gets the group and the rank, of two.
COLLECTIVES: dict[str, Case] = {
    "function": (lambda g, r: (c.all_gather if r else c.reduce_scatter)(T(2, 4), 0, g), "differ in function"),
    "function-same-collective": (
        lambda g, r: m.all_gather_dim(T(2), 0, g) if r else c.all_gather(T(2), 0, g), "differ in function"
    ),
    "function-all_reduce": (lambda g, r: c.all_reduce(T(2), g) if r else c.broadcast(T(2), 0, g), "function"),
    "order": (lambda g, r: [f(g) for f in (_gather, _reduce)[:: 1 if r else -1]], "differ in function"),
    "count-more": (lambda g, r: [_gather(g) for _ in range(2 + r)] + [_reduce(g)], "differ in function"),
    "all_gather-shape": (lambda g, r: c.all_gather(T(2, 3 + r), 0, g), "differ in shape"),
    "all_gather-rank": (lambda g, r: c.all_gather(T(*[2] * (1 + r)), 0, g), "differ in shape"),
    "all_gather-dtype": (lambda g, r: c.all_gather(_half(2) if r else T(2), 0, g), "differ in dtype"),
    "all_gather-same-bytes": (lambda g, r: c.all_gather(_half(4, 2) if r else T(2, 2), 0, g), "differ in dtype, shape"),
    "all_gather-dim": (lambda g, r: c.all_gather(T(2, 2), r, g), "differ in dim"),
    "all_gather-sizes": (lambda g, r: c.all_gather(T(2 + r, 2), 0, g, sizes=[2, 3] if r else [2, 2]), "sizes"),
    "all_gather-uneven": (lambda g, r: c.all_gather(T(2 + r, 2 + r), 0, g, sizes=[2, 3]), "differ in shape"),
    "all_gather-refused": (lambda g, r: c.all_gather(T(3, 2), 0, g, sizes=[1, 2] if r else None), "differ in sizes"),
    "all_gather-async": (lambda g, r: c.all_gather(T(2, 2 + r), 0, g, True)[1].wait(), "differ in shape"),
    "reduce_scatter-shape": (lambda g, r: c.reduce_scatter(T(4 + 2 * r), 0, g), "differ in shape"),
    "reduce_scatter-op": (
        lambda g, r: c.reduce_scatter(T(4), 0, g, ReduceOp.MAX if r else ReduceOp.SUM), "differ in op"
    ),
    "reduce_scatter-dim": (lambda g, r: c.reduce_scatter(T(4, 4), r, g), "differ in dim"),
    "reduce_scatter-sizes": (lambda g, r: c.reduce_scatter(T(4), 0, g, sizes=[3 - r, 1 + r]), "differ in sizes"),
    "reduce_scatter-dtype": (lambda g, r: c.reduce_scatter(T(4).double() if r else T(4), 0, g), "differ in dtype"),
    "reduce_scatter-refused": (lambda g, r: c.reduce_scatter(T(4 + r), 0, g), "differ in shape"),
    "all_reduce-shape": (lambda g, r: c.all_reduce(T(2 + r), g), "differ in shape"),
    "all_reduce-dtype": (lambda g, r: c.all_reduce(T(2).int() if r else T(2), g), "differ in dtype"),
    "all_reduce-op": (lambda g, r: c.all_reduce(T(2), g, ReduceOp.PRODUCT if r else ReduceOp.MIN), "differ in op"),
    "broadcast-root": (lambda g, r: c.broadcast(T(2), r, g), "differ in root"),
    "broadcast-shape": (lambda g, r: c.broadcast(T(2, 1 + r), 0, g), "differ in shape"),
    "reduce-root": (lambda g, r: c.reduce(T(2), r, g), "differ in root"),
    "reduce-op": (lambda g, r: c.reduce(T(2), 0, g, ReduceOp.MAX if r else ReduceOp.MIN), "differ in op"),
    "all_to_all-shape": (lambda g, r: c.all_to_all(T(4, 1 + r), g), "differ in shape"),
    "all_to_all-sizes": (lambda g, r: c.all_to_all(T(4), g, [1, 3], [1, 3]), "differ in sizes"),
    "all_to_all-even-and-sizes": (lambda g, r: c.all_to_all(T(4), g, *([[2, 2]] * 2 if r else [])), "sizes"),
    "split_reduce_scatter-dims": (lambda g, r: c.split_reduce_scatter([T(4, 4)] * 2, [0, r], g), "differ in dims"),
    "split_reduce_scatter-count": (lambda g, r: c.split_reduce_scatter([T(4)] * (2 + r), 0, g), "differ in shape"),
    "split_reduce_scatter-wire": (
        lambda g, r: c.split_reduce_scatter(T(4), 0, g, dtype=torch.float64 if r else None), "in dtype of the wire"
    ),
    "split_reduce_scatter-scale": (lambda g, r: c.split_reduce_scatter(T(4), 0, g, scale=1.0 + r), "differ in scale"),
}  # fmt: skip


def _gather(group: Any) -> Any:
    return c.all_gather(T(2), 0, group)


def _reduce(group: Any) -> Any:
    return c.all_reduce(T(2), group)


def _backward(group: Any, rank: int) -> None:
    """Two mappings whose backwards the ranks run in different order."""
    x = T(4, 4, requires_grad=True)
    gathered, copied = m.all_gather_dim(x, 0, group), m.copy_to_tensor_model_parallel_region(x, group)
    for each in (gathered, copied)[:: 1 if rank else -1]:
        each.sum().backward()


MAPPINGS: dict[str, Case] = {
    "copy-reduce": (
        lambda g, r: (
            m.reduce_from_tensor_model_parallel_region if r else m.gather_from_tensor_model_parallel_region
        )(T(2, 2), g),
        "differ in function",
    ),
    "reduce_from-shape": (lambda g, r: m.reduce_from_tensor_model_parallel_region(T(2 + r), g), "differ in shape"),
    "gather_tp-shape": (lambda g, r: m.gather_from_tensor_model_parallel_region(T(2, 2 + r), g), "differ in shape"),
    "gather_sp-dtype": (
        lambda g, r: m.gather_from_sequence_parallel_region(_half(2) if r else T(2), group=g), "differ in dtype"
    ),
    "gather_sp-sizes": (
        lambda g, r: m.gather_from_sequence_parallel_region(T(2), group=g, output_split_sizes=[2 + r, 3 - r]),
        "differ in sizes",
    ),
    "reduce_scatter_sp-shape": (
        lambda g, r: m.reduce_scatter_to_sequence_parallel_region(T(4, 1 + r), g), "differ in shape"
    ),
    "scatter_tp-shape": (lambda g, r: m.scatter_to_tensor_model_parallel_region(T(2 + r, 4), g), "differ in shape"),
    "scatter_sp-dtype": (
        lambda g, r: m.scatter_to_sequence_parallel_region(T(4).double() if r else T(4), g), "differ in dtype"
    ),
    "ag_last-shape": (
        lambda g, r: m.all_gather_last_dim_from_tensor_parallel_region(T(2, 2 + r), g), "differ in shape"
    ),
    "rs_last-dtype": (
        lambda g, r: m.reduce_scatter_last_dim_to_tensor_parallel_region(T(2, 4).double() if r else T(2, 4), g),
        "differ in dtype",
    ),
    "all_to_all-sizes": (lambda g, r: m.all_to_all(g, T(4), [1, 3], [1, 3]), "differ in sizes"),
    "sp2hp-shape": (lambda g, r: m.all_to_all_sp2hp(T(2 + 2 * r, 4), g), "differ in shape"),
    "hp2sp-shape": (lambda g, r: m.all_to_all_hp2sp(T(4, 2 + r), g), "differ in shape"),
    "sp2hp-hp2sp": (lambda g, r: (m.all_to_all_sp2hp if r else m.all_to_all_hp2sp)(T(4, 4), g), "differ in function"),
    "all_gather_dim-dim": (lambda g, r: m.all_gather_dim(T(2, 2), r - 1, g), "differ in dim"),
    "reduce_scatter_dim-sizes": (lambda g, r: m.reduce_scatter_dim(T(4), 0, g, sizes=[3 - r, 1 + r]), "sizes"),
    "split_dim-dim": (lambda g, r: m.split_dim(T(2, 2), r, g), "differ in dim"),
    "all_to_all_dims-dims": (lambda g, r: m.all_to_all_dims(T(2, 2, 2), r, 2, g), "differ in scatter_dim"),
    "all_to_all_dims-sizes": (
        lambda g, r: m.all_to_all_dims(T(3, 2), 0, 1, g, scatter_sizes=[1 + r, 2 - r]), "differ in scatter_sizes"
    ),
    "_reduce-dtype": (lambda g, r: m._reduce(T(2).int() if r else T(2), g), "differ in dtype"),
    "backward-order": (_backward, "differ in function"),
    "attention-heads": (lambda g, r: UlyssesAttention(g)(*T(3, 1, 2, 2 + 2 * r, 4)), "differ in shape"),
    "attention-positions": (
        lambda g, r: UlyssesAttention(g)(*T(3, 1, 2 + r, 2, 4), sequence_sizes=[2, 2 + r]), "differ in layout"
    ),
}  # fmt: skip


def _communicator(group: Any) -> Any:
    from tritoncomm.p2p import P2PCommunicator  # takes as long as everything else to import

    return P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))


def _uncast(group: ProcessGroup) -> Any:
    """A communicator that does not know what its receiver has."""
    stages = _communicator(group)
    stages.config = SimpleNamespace(pipeline_dtype=None)
    return stages


# Rank 0 is the first stage, rank 1 the last.
HOPS: dict[str, Case] = {
    "shape": (
        lambda g, r: _communicator(g).recv_forward([2, 3], False) if r
        else _communicator(g).send_forward(T(2, 2), False),
        "[2, 3] float32",
    ),
    "dtype": (
        lambda g, r: _communicator(g).recv_forward([2], False) if r else _uncast(g).send_forward(_half(2), False),
        "[2] float16",
    ),
    "count": (
        lambda g, r: _communicator(g).recv_forward([[2], [2]], False) if r
        else _communicator(g).send_forward([T(2)], False),
        "[2] float32",
    ),
    "direction": (
        lambda g, r: _communicator(g).recv_backward([2], False) if r else _communicator(g).send_forward(T(2), False),
        "recv_next",
    ),
    "both-send": (
        lambda g, r: _communicator(g).send_backward(T(2), False) if r else _communicator(g).send_forward(T(2), False),
        "wait for each other",
    ),
    "both-receive": (
        lambda g, r: _communicator(g).recv_forward([2], False) if r else _communicator(g).recv_backward([2], False),
        "wait for each other",
    ),
    "hop-and-collective": (
        lambda g, r: _communicator(g).recv_forward([2], False) if r else c.all_reduce(T(2), g), "wait for each other"
    ),
}  # fmt: skip


def layouts(process_group: Any) -> dict[str, Case]:
    """Redistributions of a ColoTensor over ``process_group``."""
    from tritoncomm.tensor.redistribute import Transition, redistribute

    def move(old: Any, new: Any, *shape: int) -> Any:
        return lambda g, r: redistribute(T(*shape), Transition((4, 4), old[r], new[r]), g)

    rows, columns = ((0, 2),), ((1, 2),)
    return {
        "all_gather-dim": (move((rows, columns), ((), ()), 2, 4), "differ in"),
        "all_to_all-or-all_gather": (move((rows, rows), (columns, ()), 2, 4), "differ in new_dims"),
        "all_to_all-dims": (move((rows, columns), (columns, rows), 2, 4), "differ in"),
        "split-dim": (move(((), ()), (rows, columns), 4, 4), "differ in new_dims"),
    }


def synchronise(group: ProcessGroup) -> None:
    """The ranks go on with equal counts of calls on the group, whatever they missed in check mode; all of them call.

    A channel that was closed is open again. A program makes its group again for that, a test need not.
    """
    dist.barrier(group)
    store, ranks = job_store(), dist.get_process_group_ranks(group)
    for channel in (f"{group.group_name}/{a}-{b}@0" for a in ranks for b in ranks):
        store.counts[channel] = (store.counts.get(channel, 0) // 1000 + 1) * 1000
        store.delete(f"{channel}/verdict")
    member = check._members.setdefault(group, check._Member(group, group.group_name))
    member.count, member.window = (member.count // 1000 + 1) * 1000, []
    dist.barrier(group)
