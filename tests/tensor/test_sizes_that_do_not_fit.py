"""Operators on ColoTensors whose global sizes do not fit: shards of some ranks may, and every rank has to raise."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec

Given = tuple[tuple[int, ...], int | None]  # shape, and the dim that is sharded

OPERATORS: dict[str, Any] = {
    "linear": F.linear,
    "matmul": torch.matmul,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "mv": torch.mv,
    "addmm": torch.addmm,
    "batch_norm": lambda x, *rest: F.batch_norm(x, *rest),
    "layer_norm": lambda x, *rest: F.layer_norm(x, (8,), *rest),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y.long()),
    "attention": F.scaled_dot_product_attention,
    "cat": lambda *x: torch.cat(x, 0),
    "stack": lambda *x: torch.stack(x),
    "add": torch.add,
    "where": lambda x, y, z: torch.where(x > 1, y, z),
    "equal": torch.equal,
    "allclose": torch.allclose,
    "foreach_add": torch._foreach_add,
}
CASES: list[tuple[str, tuple[Given, ...]]] = [
    ("linear", (((2, 7), 1), ((3, 8), 1))),
    ("linear", (((2, 2), 1), ((3, 1), 1))),
    ("linear", (((2, 2), 1), ((3, 3), None))),
    ("linear", (((2, 8), None), ((12, 8), 0), ((3,), None))),
    ("linear", (((2, 8), None), ((12, 8), 0), ((12,), 0))),
    ("linear", (((2, 8), None), ((12, 8), 0), ((1,), None))),
    ("linear", (((2, 8), 1), ((12, 8), 1), ((1,), None))),
    ("linear", (((2, 8), 1), ((12, 8), 1), ((5,), None))),
    ("matmul", (((2, 0, 2), 2), ((2, 0, 2), 2))),
    ("matmul", (((2, 2, 2), 2), ((3, 2, 2), 2))),
    ("matmul", (((7,), 0), ((8,), 0))),
    ("mm", (((4, 7), 1), ((8, 3), 0))),
    ("mm", (((4, 2), 1), ((1, 3), 0))),
    ("mm", (((4, 8), 0), ((7, 3), None))),
    ("bmm", (((4, 2, 3), 0), ((5, 3, 2), 0))),
    ("mv", (((4, 7), 1), ((8,), 0))),
    ("addmm", (((3,), None), ((2, 8), None), ((8, 12), 1))),
    ("addmm", (((12,), None), ((2, 8), None), ((8, 12), 1))),
    ("addmm", (((2, 1), None), ((2, 8), 1), ((8, 12), 0))),
    ("addmm", (((1, 2, 12), None), ((2, 8), 1), ((8, 12), 0))),
    ("batch_norm", (((4, 8), 0), ((5,), None), ((5,), None))),
    ("batch_norm", (((4, 8), 1), ((2,), None), ((2,), None))),
    ("layer_norm", (((4, 7), 0),)),
    ("layer_norm", (((4, 8), 0), ((7,), None))),
    ("layer_norm", (((4, 32), 1), ((8,), None))),
    ("cross_entropy", (((7, 4), 0), ((8,), 0))),
    ("cross_entropy", (((8, 4), 0), ((2,), None))),
    ("attention", (((2, 4, 6, 8), 1), ((2, 4, 6, 4), 1), ((2, 4, 6, 8), 1))),
    ("attention", (((2, 4, 6, 8), 1), ((2, 4, 5, 8), 1), ((2, 4, 5, 8), 1), ((6, 6), None))),
    ("cat", (((4, 7), 1), ((4, 8), 1))),
    ("cat", (((4, 8), 1), ((4, 2), None))),
    ("stack", (((4, 7), 1), ((4, 8), 1))),
    ("add", (((7, 3), 0), ((8, 3), 0))),
    ("add", (((8, 3), 0), ((3, 3), None))),
    ("where", (((8, 3), 0), ((7, 3), 0), ((1,), None))),
    ("equal", (((8, 3), 0), ((7, 3), 0))),
    ("equal", (((4, 8), 0), ((3, 8), 0))),
    ("allclose", (((8, 3), 0), ((7, 3), 0))),
    ("foreach_add", ()),
]


def _values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_operators(group: TorchGroup) -> list[str]:
    """By case, how the operator ends on this rank: as torch's on the global tensors, or what is wrong."""
    ranks = list(range(4))
    pg, ends = ProcessGroup(ranks=ranks, tp_degree=4), []
    warnings.simplefilter("ignore")  # an operator without a rule that gathers
    for name, given in CASES:
        full = [_values(shape, seed) for seed, (shape, _) in enumerate(given)]
        tensors = []
        for x, (_, dim) in zip(full, given, strict=True):
            made = ColoTensor(x, ColoTensorSpec(pg, ReplicaSpec()))
            tensors.append(x if dim is None else made.redistribute(ShardSpec([dim], [4])))
        lists = name == "foreach_add"
        if lists:
            full = [[_values((8, 3), 0)], [_values((7, 3), 1)]]
            spec, shards = ColoTensorSpec(pg, ReplicaSpec()), ShardSpec([0], [4])
            tensors = [[ColoTensor(x, spec).redistribute(shards) for x in each] for each in full]
        wanted: Any
        try:
            wanted = OPERATORS[name](*full)
        except (RuntimeError, ValueError, IndexError) as error:
            wanted = error
        try:
            result = OPERATORS[name](*tensors)
        except (RuntimeError, ValueError, IndexError) as error:
            result = error
        dist.barrier(group)  # all ranks are here
        if isinstance(wanted, Exception) or isinstance(result, Exception):
            same = isinstance(wanted, Exception) and isinstance(result, Exception)
            ends.append("" if same else f"{name}{given}: {result!r}, not {wanted!r}")
        else:
            plain = result.to_replicate().detach() if isinstance(result, ColoTensor) else result
            same = plain == wanted if isinstance(wanted, bool) else torch.allclose(torch.Tensor(plain), wanted)
            ends.append("" if same else f"{name}{given}: {plain}, not {wanted}")
    return ends


def test_every_rank_raises_where_torch_does(pool: Pool) -> None:
    for ends in pool.run(run_operators, world=4):
        assert not any(ends), "\n".join(each for each in ends if each)
