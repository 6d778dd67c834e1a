"""Point-to-point: random hops in every mode, at every world size, with several pipelines at the same time."""

import dataclasses
import itertools
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import p2p
from tritoncomm.p2p import P2PCommunicator, header, message

DTYPES = [dtype for dtype in header._DTYPES if dtype is not None]
WORLDS: Any = pytest.mark.parametrize("world", [1, 2, 4, (1, 3)], ids=["1", "2", "4", "ranks1and3"])


@dataclasses.dataclass(frozen=True)
class Mode:
    """A configuration of a communicator."""

    batched: bool = True
    varying: bool = False
    checked: bool = False
    overlap: bool = False
    mtp: bool = False

    @property
    def config(self) -> dict[str, bool]:
        key = "mtp_standalone" if self.mtp else "variable_seq_lengths"
        return {"batch_p2p_comm": self.batched, key: self.varying}


MODES = {
    "batched": Mode(),
    "individual": Mode(batched=False),
    "overlap": Mode(batched=False, overlap=True),
    "varying": Mode(varying=True),
    "varying-individual": Mode(batched=False, varying=True),
    "varying-overlap": Mode(batched=False, varying=True, overlap=True),
    "mtp": Mode(varying=True, mtp=True),
    "checked": Mode(checked=True),
    "checked-overlap": Mode(batched=False, checked=True, overlap=True),
}


def communicator(group: ProcessGroup, mode: Mode, dtype: torch.dtype = torch.float32, **more: Any) -> P2PCommunicator:
    return P2PCommunicator(group, SimpleNamespace(pipeline_dtype=dtype, **mode.config, **more))


def noise(seed: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaN and -0 among them."""
    generator = torch.Generator().manual_seed(random.Random(str(seed)).getrandbits(60))
    size, top = math.prod(shape) * dtype.itemsize, 2 if dtype is torch.bool else 256
    return torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def _transposed(x: Tensor) -> Tensor:
    back = tuple(reversed(range(x.dim())))
    return x.permute(back).contiguous().permute(back)


def _sliced(x: Tensor) -> Tensor:
    shape = (*x.shape[:-1], x.shape[-1] + 3) if x.dim() else (4,)
    place = torch.empty(shape, dtype=x.dtype)
    place = place[..., 1 : 1 + x.shape[-1]] if x.dim() else place[2]
    return place.copy_(x)


def _stepped(x: Tensor) -> Tensor:
    return torch.empty((*x.shape, 3), dtype=x.dtype)[..., 1].copy_(x)


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if x.dim() and len(x) else x


def _lazy(x: Tensor) -> Tensor:
    """With a conjugate or a negative bit, where the dtype can have one."""
    if x.is_complex():
        return x.conj()
    if x.dtype in (torch.float32, torch.float64):
        return torch.view_as_complex(torch.stack([x, x], -1)).conj().imag
    return x


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": _transposed,
    "sliced": _sliced,
    "stepped": _stepped,
    "expanded": _expanded,
    "lazy": _lazy,
}


def bits(x: Tensor) -> Tensor:
    flat = x.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def owned(received: Any, expected: Tensor, what: object) -> None:
    """``received`` has the bits of ``expected`` and is a new leaf."""
    assert isinstance(received, Tensor), (what, received)
    assert (received.shape, received.dtype) == (expected.shape, expected.dtype), (what, received.shape, received.dtype)
    assert torch.equal(bits(received), bits(expected)), what
    assert received.is_contiguous(), what
    assert received.is_leaf, what
    assert received._base is None, what
    assert received.requires_grad == (received.is_floating_point() or received.is_complex()), what


@contextmanager
def torch_warns_about_half_complex() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        yield


def any_shape(draw: random.Random) -> tuple[int, ...]:
    return tuple(
        draw.choice((0, 1, 2, 3, 5)) if draw.random() < 0.1 else draw.randint(1, 4) for _ in range(draw.randint(0, 5))
    )


def run_random_hops(group: ProcessGroup, name: str, seed: int, count: int = 12) -> int:
    """Hops in random directions, the same draw on all ranks; returns how many tensors this rank received."""
    mode, draw = MODES[name], random.Random(f"{name} {seed}")
    stage, stages = group.rank(), group.size()
    ends = {"prev": (stage - 1) % stages, "next": (stage + 1) % stages}
    c = communicator(group, mode)
    late: list[Callable[[], None]] = []
    arrived = 0
    for hop in range(count):
        c.config.pipeline_dtype = dtype = draw.choice(DTYPES)
        common = any_shape(draw)
        moves = {
            (way, sender): (any_shape(draw) if mode.varying else common, draw.choice([*LAYOUTS]))
            for way, sender in itertools.product(("next", "prev"), range(stages))
            if draw.random() < 0.8
        }

        def tensor(way: str, sender: int, hop: int = hop, dtype: torch.dtype = dtype, moves: Any = moves) -> Tensor:
            shape, layout = moves[way, sender]
            return LAYOUTS[layout](noise((seed, hop, way, sender), shape, dtype))

        sent = {f"tensor_send_{way}": tensor(way, stage) if (way, stage) in moves else None for way in ends}
        due = {"recv_prev": ("next", ends["prev"]), "recv_next": ("prev", ends["next"])}
        asked = {key: way in moves for key, way in due.items()}
        x, dx, handles = c._communicate(
            **sent,
            **asked,
            tensor_shape=torch.Size(common),
            wait_on_reqs=not mode.overlap,  # type: ignore[arg-type]
        )

        def finish(
            found: Any = (x, dx), handles: Any = handles, sent: Any = sent, due: Any = due,
            asked: Any = asked, tensor: Any = tensor, what: Any = (name, seed, hop, dtype, moves),
        ) -> None:  # fmt: skip
            for handle in (handles or {}).values() if mode.overlap else ():
                handle.wait()
                assert handle.is_completed()
            for each in sent.values():
                if each is not None:
                    each.untyped_storage().fill_(0)
            for key, got in zip(due, found, strict=True):
                if asked[key]:
                    owned(got, tensor(*due[key]), (*what, key))
                else:
                    assert got is None, (*what, key)

        late.append(finish)
        arrived += sum(asked.values())
        while late and (not mode.overlap or len(late) > 3):
            late.pop(0)()
    for each in late:
        each()
    return arrived


def run_mode(group: ProcessGroup, name: str) -> int:
    with p2p.check(MODES[name].checked), torch_warns_about_half_complex():
        return sum(run_random_hops(group, name, seed) for seed in range(2))


@pytest.mark.parametrize("mode", MODES)
@WORLDS
def test_random_hops(pool: Pool, world: Any, mode: str) -> None:
    assert min(pool.run(run_mode, mode, world=world)) > 15


@pytest.mark.ranks(4)
def test_memory_is_allocated_in_the_callers_thread(group: ProcessGroup) -> None:
    """Both neighbours send headers; memory is allocated in the caller's thread."""
    stage, stages = group.rank(), group.size()
    allocations, allocate = [], message.allocate

    def recorded(*args: Any) -> Any:
        allocations.append((threading.get_ident(), torch.is_inference_mode_enabled()))
        return allocate(*args)

    c = communicator(group, MODES["varying"])
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(message, "allocate", recorded)
        x, dx = c.send_forward_backward_recv_forward_backward(
            torch.full((2, 1 + stage), 1.0), torch.full((1 + stage, 2), 2.0), True, True, [1]
        )
        assert allocations == [(threading.get_ident(), True)] * 2
        assert (x.shape, dx.shape) == ((2, 1 + (stage - 1) % stages), (1 + (stage + 1) % stages, 2))
        assert (x.is_inference(), dx.is_inference()) == (True, True)


def two_pipelines() -> ProcessGroup | None:
    """Ranks 0, 2 and ranks 1, 3 of a job of eight; this rank's one."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3))}
    return next((made[ranks] for ranks in made if dist.get_rank() in ranks), None)


@pytest.mark.ranks(8)
def test_two_pipelines_at_the_same_time(group: ProcessGroup) -> None:
    mine = two_pipelines()
    for name in MODES if mine is not None else ():
        assert mine is not None
        with p2p.check(MODES[name].checked), torch_warns_about_half_complex():
            run_random_hops(mine, name, 10 + dist.get_rank() % 2)
