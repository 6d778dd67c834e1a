"""Random operators: replicas draw the same on every rank, pieces draw apart.

A call draws one number from the default CPU generator of every rank, which activation checkpointing restores and
``torch.manual_seed`` sets; ranks of a tensor-parallel group have to be seeded alike. That they agree is looked at
in the calls 1, 2, 4, 8, ... of a group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tritoncomm.core import eager
from tritoncomm.errors import MismatchError
from tritoncomm.tensor.distspec import cuts
from tritoncomm.tensor.layout import is_colo, plain, shape_of
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.rules.call import Call, Cut, Operand
from tritoncomm.tensor.rules.pointwise import keep
from tritoncomm.tensor.rules.table import ROWS, Row, rule

__all__ = [
    "INITIALISERS",
    "NOISY",
    "NOISY_ELEMENTS",
    "SAMPLERS",
    "agreed_seed",
    "initialise",
    "noisy_elements",
    "seeded",
]

_ELEMENTS = """
    dropout dropout_ alpha_dropout alpha_dropout_ native_dropout bernoulli rand_like randn_like randint_like rrelu
    rrelu_
"""
NOISY_ELEMENTS = frozenset(_ELEMENTS.split())
"""Every element on its own."""
_SAMPLERS = "bernoulli_ normal_ uniform_ exponential_ geometric_ log_normal_ cauchy_ random_"
SAMPLERS = frozenset(_SAMPLERS.split())
"""In place: a whole is drawn, of which each rank keeps its piece."""
_OTHERS = "multinomial gumbel_softmax poisson normal feature_dropout feature_alpha_dropout fractional_max_pool2d"
NOISY = frozenset(_OTHERS.split())
"""Others, which run on replicas."""
INITIALISERS: frozenset[Any] = frozenset(
    getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")
)
"""``torch.nn.init``: depend on the shape of the whole."""

ROWS += [
    Row(
        "dropout, bernoulli, rand_like, ...",
        "every cut",
        "the cut; replicas stay equal, pieces differ",
        "none",
        "noise",
    ),
    Row(
        "torch.nn.init.*, normal_, uniform_, ...",
        "every cut",
        "in place: the same values whatever the cut",
        "none",
        "noise",
    ),
]

_GOLDEN = 0x9E3779B97F4A7C15
_calls: dict[tuple[int, ...], int] = {}


def agreed_seed(pg: ProcessGroup, like: Tensor) -> int:
    """A number that all tensor-parallel ranks draw alike.

    Raises:
        MismatchError: they did not; seed them alike with ``torch.manual_seed``.
    """
    seed = int(torch.randint(2**62, ()))
    ranks = tuple(pg.tp_rank_list() or ())
    _calls[ranks] = count = _calls.get(ranks, 0) + 1
    if pg.tp_world_size() > 1 and count & (count - 1) == 0:
        mine = torch.tensor([seed], device=like.device)
        found = eager.all_gather(mine, 0, pg.tp_process_group(), None, "agreed_seed").tolist()
        if len(set(found)) > 1:
            raise MismatchError(
                f"a random operator on replicas: ranks {list(ranks)} drew different numbers, so their replicas would "
                "differ; call torch.manual_seed with the same seed on all tensor-parallel ranks, and draw alike"
            )
    return seed


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The default generator of ``device`` starts at ``seed`` in the block, and goes on as before after it."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def apart(seed: int, rank: int) -> int:
    """The seed of one rank's piece."""
    return (seed + (rank + 1) * _GOLDEN) % 2**63


def noisy_elements(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A random operator that works element by element on its first argument."""
    x = next(x for x in tree_leaves((args, kwargs)) if is_colo(x))
    if x.process_group.tp_world_size() == 1:
        return keep(func, args, kwargs, x)
    pg = x.process_group
    seed = agreed_seed(pg, x)
    with seeded(apart(seed, pg.tp_local_rank()) if x._parts else seed, x.device):
        return keep(func, args, kwargs, x)


def initialise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A whole is drawn, alike on all ranks, of which each keeps its piece: the same values whatever the layout."""
    target = next(x for x in tree_leaves((args, kwargs)) if is_colo(x))
    pg, shape = target.process_group, target._global_shape
    whole = torch.empty(shape, dtype=target.dtype, device=target.device) if target._parts else plain(target).detach()

    def exchange(x: Any) -> Any:
        return whole if x is target else x

    with seeded(agreed_seed(pg, target), target.device):
        func(*tree_map(exchange, tuple(args)), **tree_map(exchange, kwargs))
    if target._parts:
        for dim, start, size in cuts(shape, dict(target._parts), pg.tp_local_rank()):
            whole = whole.narrow(dim, start, size)
        with torch.no_grad():
            plain(target).copy_(whole)
    return target


@rule(
    F.dropout1d, F.dropout2d, F.dropout3d, named="dropout1d, 2d, 3d", accepts="batch and channels", result="the cut",
    collectives="none",
)  # fmt: skip
def _channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Call | None:
    count = len(shape_of(input))
    if inplace or not training or not is_colo(input) or count < 3:
        return None
    pg: ProcessGroup = input.process_group  # type: ignore[attr-defined]
    seed = agreed_seed(pg, input)

    def run(cut: Cut, x: Tensor) -> Tensor:
        with seeded(apart(seed, cut.rank) if cut.parts else seed, x.device):
            return F.dropout1d(x.flatten(2), p, True).view(x.shape)

    labels = tuple(range(count))
    return Call([Operand(input, labels)], [labels], run, frozenset(range(2, count)))
