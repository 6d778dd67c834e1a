"""Random programs of tensor operators, drawn identically on every rank; run on shards and on global tensors.

``python tools/programs.py COUNT [SEED]`` runs that many on 2, 4 and 1 ranks (``make programs``).
"""

import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from operator_cases import check, layouts_of
from shards import ranks_of
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

Values = list[Any]
Step = Callable[[Values], Any]


class Draw(random.Random):
    """Choices of a program."""

    def dim(self, shape: tuple[int, ...]) -> int:
        dim = self.randrange(len(shape))
        return dim if self.random() < 0.7 else dim - len(shape)

    def spec(self, shape: tuple[int, ...], world: int) -> Any:
        return self.choice(list(layouts_of(shape, world))[1:])


def steps(draw: Draw, shapes: list[tuple[int, ...]], world: int) -> tuple[str, Step]:
    """A step that fits one of the tensors made so far: its name, and what it does to the list of values."""
    at = draw.randrange(len(shapes))
    shape = shapes[at]
    many = [i for i, other in enumerate(shapes) if other == shape]
    other = draw.choice(many)
    choices: dict[str, Step] = {
        "gelu": lambda v: F.gelu(v[at]),
        "tanh": lambda v: v[at].tanh(),
        "scale": lambda v: v[at] * 0.5 + 1,
        "add": lambda v: v[at] + v[other],
        "mul": lambda v: v[at] * v[other],
        "in place": lambda v: (v[at] * 1).mul_(2).add_(v[other]),
        "plain number": lambda v: v[at] * torch.tensor(1.5, dtype=v[at].dtype),
        "clone": lambda v: v[at].clone(),
        "scale by sum": lambda v: v[at] * v[other].sum(),
    }
    if shape:
        dim, second = draw.dim(shape), draw.dim(shape)
        keep = draw.random() < 0.5
        choices |= {
            "softmax": lambda v: F.softmax(v[at], dim),
            "log_softmax": lambda v: v[at].log_softmax(dim),
            "sum": lambda v: v[at].sum(dim, keepdim=keep),
            "mean": lambda v: v[at].mean(dim, keepdim=keep),
            "amax": lambda v: v[at].amax(dim, keepdim=keep),
            "max": lambda v: v[at].max(dim, keepdim=keep).values,
            "norm": lambda v: torch.linalg.vector_norm(v[at] + 3, dim=dim, keepdim=keep),
            "transpose": lambda v: v[at].transpose(dim, second),
            "unsqueeze": lambda v: v[at].unsqueeze(dim),
            "flatten": lambda v: v[at].flatten(min(dim % len(shape), second % len(shape))),
            "layer_norm": lambda v: F.layer_norm(v[at], shape[-1:]),
            "rms_norm": lambda v: F.rms_norm(v[at], shape[-1:], eps=1e-3),
            "broadcast": lambda v: v[at] + v[other].mean(dim, keepdim=True),
            "cat": lambda v: torch.cat([v[at], v[other]], dim),
            "stack": lambda v: torch.stack([v[at], v[other]], dim),
            "first half": lambda v: v[at].chunk(2, dim)[0],
            "select": lambda v: v[at].select(dim, -1),
            "index": lambda v: v[at][..., : max(shape[-1] // 2, 1)],
            "cumsum": lambda v: v[at].cumsum(dim),
            "swap merged": lambda v: v[at].reshape(-1, shape[-1]),
        }
    if len(shape) >= 2:
        choices |= {
            "gram": lambda v: v[at] @ v[other].transpose(-1, -2) * 0.1,
            "linear": lambda v: F.linear(v[at], v[other].reshape(-1, shape[-1])) * 0.1,
            "cross entropy": lambda v: F.cross_entropy(
                v[at].reshape(-1, shape[-1]), torch.arange(math.prod(shape[:-1])) % shape[-1]
            ),
        }
    if len(shape) == 4:
        choices["attention"] = lambda v: F.scaled_dot_product_attention(v[at], v[other], v[other])
    name = draw.choice(list(choices))
    return name, choices[name]


def program(seed: int, world: int) -> tuple[Callable[..., Any], list[Tensor], list[Any], list[str]]:
    """A program, its inputs, their layouts and the names of its steps."""
    draw = Draw(seed)
    shape = tuple(draw.choice((1, 2, 3, 4, 5, 8)) for _ in range(draw.randint(1, 4)))
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + i)) for i in range(2)
    ]
    specs = [draw.spec(shape, world) for _ in inputs]
    values: Values = [x.clone() for x in inputs]
    taken: list[tuple[str, Step]] = []
    moves: list[Any] = []
    for _ in range(draw.randint(1, 8)):
        name, step = steps(draw, [tuple(x.shape) for x in values], world)
        with torch.no_grad():
            out = step(values)
        if not out.numel() or out.numel() > 4096 or not bool(out.isfinite().all()) or float(out.abs().max()) > 1e4:
            continue
        move = draw.spec(tuple(out.shape), world) if out.dim() and draw.random() < 0.3 else None
        taken.append((name, step))
        moves.append(move)
        values.append(out)

    def run(*tensors: Any) -> Any:
        values_so_far: Values = list(tensors)
        for (_, step), move in zip(taken, moves, strict=True):
            out = step(values_so_far)
            if move is not None and hasattr(out, "redistribute"):
                out = out.redistribute(move)
            values_so_far.append(out)
        return values_so_far[2:] if len(values_so_far) > 2 else values_so_far

    return run, inputs, specs, [name for name, _ in taken]


def run_programs(group: TorchGroup, first: int, count: int) -> dict[str, int]:
    """Run programs ``first`` to ``first + count - 1``; how often every step was taken."""
    pg, counts = ranks_of(group), {}
    for seed in range(first, first + count):
        run, inputs, specs, names = program(seed, group.size())
        try:
            check(run, inputs, tuple(specs), pg, (seed, names))
        except Exception as error:
            raise AssertionError(f"program {seed} on {group.size()} ranks: {names} of {specs}: {error}") from error
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return counts


def main() -> int:
    from pool import Pool

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 10**6
    pool, started = Pool(), time.monotonic()
    try:
        for place, seed in enumerate(range(first, first + count, 100)):
            world: Any = (2, 4, 2, 4, (1, 3), 1)[place % 6]
            pool.run(run_programs, seed, min(100, first + count - seed), world=world, timeout=600)
            print(f"{seed - first + 100} of {count} programs, {time.monotonic() - started:.0f} s", flush=True)
    finally:
        pool.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
