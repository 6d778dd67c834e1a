"""Random operators: replicated tensors draw identical values on all ranks, shards draw independent ones.

A call draws one number from the default CPU generator of every rank, which ``torch.manual_seed`` sets and activation
checkpointing restores, so the ranks of a tensor-parallel group need the same seed. This is checked in calls 1, 2, 4,
8, ... of a group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup
from torch.utils._pytree import tree_leaves, tree_map

from tritoncomm.core import eager
from tritoncomm.core.call import compare_arguments
from tritoncomm.errors import MismatchError, UnsupportedError
from tritoncomm.tensor.distspec import shard_of
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.rules.engine import Operand, OperatorCall, Sharding, replicated
from tritoncomm.tensor.rules.pointwise import keep
from tritoncomm.tensor.rules.table import rule

__all__ = [
    "INITIALISERS",
    "RANDOM_ELEMENTWISE",
    "RANDOM_ON_REPLICAS",
    "RECURRENT",
    "SAMPLERS",
    "agreed_seed",
    "draws_on_replicas",
    "initialise",
    "random_elementwise",
    "seeded",
    "seeded_shard",
]

_ELEMENTS = """
    dropout dropout_ alpha_dropout alpha_dropout_ native_dropout bernoulli rand_like randn_like randint_like rrelu
    rrelu_
"""
RANDOM_ELEMENTWISE = frozenset(_ELEMENTS.split())
"""Elements are drawn independently."""
_TRAINING = {
    "dropout": (2, True), "dropout_": (2, True), "native_dropout": (2, True), "alpha_dropout": (2, False),
    "alpha_dropout_": (2, False), "rrelu": (3, False), "rrelu_": (3, False),
}  # fmt: skip
"""Where ``training`` is among the arguments, and its default; otherwise these draw nothing."""
_SAMPLERS = "bernoulli_ normal_ uniform_ exponential_ geometric_ log_normal_ cauchy_ random_"
SAMPLERS = frozenset(_SAMPLERS.split())
"""In place: the global tensor is drawn, and each rank keeps its shard."""
_OTHERS = """
    multinomial gumbel_softmax poisson normal binomial _standard_gamma _sample_dirichlet feature_dropout
    feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
"""
RANDOM_ON_REPLICAS = frozenset(_OTHERS.split())
"""Others run on replicas."""
RECURRENT = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
"""Run on replicas, and draw if they drop out."""
INITIALISERS: frozenset[Any] = frozenset(
    getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")
)
"""``torch.nn.init``: depend on the global shape."""

_GOLDEN = 0x9E3779B97F4A7C15
_calls: WeakKeyDictionary[TorchGroup, int] = WeakKeyDictionary()


def agreed_seed(pg: ProcessGroup, like: Tensor) -> int:
    """Draw a random number that is equal on all tensor-parallel ranks."""
    seed = int(torch.randint(2**62, ()))
    if pg.tp_world_size() == 1:
        return seed
    group, ranks = pg.tp_process_group(), pg.tp_rank_list()
    _calls[group] = count = _calls.get(group, 0) + 1
    compare_arguments("agreed_seed", group, seed=seed)
    # Compared by a message in calls 1, 2, 4, 8 and so on; in check mode all are, above.
    if count & (count - 1) == 0:
        mine = torch.tensor([seed], device=like.device)
        seeds = eager.all_gather(mine, 0, group, "agreed_seed").tolist()
        if len(set(seeds)) > 1:
            raise MismatchError(
                f"a random operator on replicas: ranks {ranks} drew different numbers, so their replicas would "
                "differ; call torch.manual_seed with the same seed on all tensor-parallel ranks, and draw equally often"
            )
    return seed


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generator of ``device`` inside the block, and restore its state afterwards."""
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


def seeded_shard(seed: int, sharding: Sharding, device: torch.device) -> AbstractContextManager[None]:
    """Return ``seeded`` by a seed of this rank's own if a label is sharded."""
    return seeded((seed + (sharding.rank + 1) * _GOLDEN) % 2**63 if sharding.parts else seed, device)


def draws_on_replicas(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator that runs on replicas draws numbers."""
    if name in RECURRENT:  # among their arguments, dropout is the only float, and ``train`` follows it
        dropout, is_training = next(((x, y) for x, y in pairwise(args) if type(x) is float), (0.0, False))
        return dropout > 0 and is_training
    return name in RANDOM_ON_REPLICAS


def _is_training(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws numbers, by its argument ``training``; those without one always do."""
    position, default = _TRAINING.get(name, (len(args), True))
    flag = args[position] if len(args) > position else kwargs.get("training", kwargs.get("train"))
    return default if flag is None else flag


@rule(named="dropout, bernoulli, rand_like, ...", result="same sharding; replicas stay equal, shards are independent")
def random_elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise random operator on its first ColoTensor."""
    x = next(x for x in tree_leaves((args, kwargs)) if is_colo(x))
    if x.process_group.tp_world_size() == 1 or not _is_training(func.__name__, args, kwargs):
        return keep(func, args, kwargs, x)
    pg = x.process_group
    with seeded_shard(agreed_seed(pg, x), Sharding(x.partitions, {}, pg), x.device):
        return keep(func, args, kwargs, x)


@rule(named="torch.nn.init.*, normal_, uniform_, ...", result="in place: the same values for every layout")
def initialise(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw the global tensor on every rank and keep the shard: the values do not depend on the layout."""
    target = args[0] if args else kwargs["tensor"]
    if not is_colo(target):
        raise UnsupportedError(
            f"{func.__name__} writes into a plain tensor from a ColoTensor; make it a ColoTensor first"
        )
    pg, shape = target.process_group, target.global_shape
    full = torch.empty(shape, dtype=target.dtype, device=target.device) if target.partitions else target

    def operand(x: Any) -> Any:
        return full if x is target else replicated(x, pg) if is_colo(x) else x

    args, kwargs = tree_map(operand, (tuple(args), kwargs))
    # A fill in place may be part of a graph; initialisers write without one, as in torch.
    recorded = torch.is_grad_enabled() and func not in INITIALISERS
    with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(recorded):
        with seeded(agreed_seed(pg, target), target.device):
            func(*args, **kwargs)
        if target.partitions:
            target.copy_(shard_of(full, target.partitions, pg.tp_local_rank()))
    return target


@rule(F.dropout1d, F.dropout2d, F.dropout3d, named="dropout1d, 2d, 3d", accepts="Shard(batch) or Shard(channels)")
def _channels(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> OperatorCall | None:
    """Describe a dropout of whole channels: dims 0 and 1 may be sharded, the others belong to a channel."""
    count = len(shape_of(input))
    labels = tuple(range(count))
    if not training:
        return OperatorCall([Operand(input, labels)], [labels], lambda _, x: x)
    if inplace or not is_colo(input) or count < 3:
        return None
    pg: ProcessGroup = input.process_group
    seed = agreed_seed(pg, input)

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        with seeded_shard(seed, sharding, x.device):
            # Of any number of dims: with those of a channel flattened, ``dropout1d`` draws once for each channel.
            return F.dropout1d(x.flatten(2), p, training=True).view(x.shape)

    return OperatorCall([Operand(input, labels)], [labels], run, replicated=frozenset(range(2, count)))
