"""Recognising tensors of the same kind, and memory without the dispatcher: what counts, what is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from traffic import Traffic

from tritoncomm.core.memory import allocator, part_of, recognizer

LIKE = torch.ones(4, 6)
OTHERS: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: torch.ones(6, 4),
    "strides": lambda: torch.ones(6, 4).t(),
    "dtype": lambda: torch.ones(4, 6, dtype=torch.int32),
    "device": lambda: torch.ones(4, 6, device="meta"),
    "requires grad": lambda: torch.ones(4, 6, requires_grad=True),
    "class": lambda: torch.nn.Parameter(torch.ones(4, 6), requires_grad=False),
    "negative bit": lambda: torch._neg_view(torch.ones(4, 6)),
    "layout": lambda: torch.ones(4, 6).to_sparse(),
}


def known(*tensors: Tensor) -> Callable[..., bool]:
    made = recognizer(tensors)
    assert made is not None
    return made


def test_tensors_of_the_same_kind_are_recognised() -> None:
    same = known(LIKE, LIKE.double())
    assert same(torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.float64))
    assert same(torch.zeros(8, 6)[4:], torch.zeros(5, 6, dtype=torch.float64)[:4])
    assert not same(torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6))
    assert not known(LIKE)(3)
    z = torch.ones(4, 6, dtype=torch.complex64)
    assert not known(z)(z.conj())
    assert known(torch.nn.Parameter(LIKE))(torch.nn.Parameter(LIKE + 1))


@pytest.mark.parametrize("what", OTHERS)
def test_others_are_not(what: str) -> None:
    same = known(LIKE, LIKE + 1)
    assert same(LIKE + 2, LIKE)
    assert not same(LIKE, OTHERS[what]())


def test_modes_count() -> None:
    same, seen = known(LIKE), []
    vmap(lambda x: (seen.append((same(x), recognizer([x]))), x)[1])(torch.ones(2, 4, 6))
    assert seen == [(False, None)]
    with Traffic():
        assert not same(LIKE)
        assert recognizer([LIKE]) is None
    with torch.inference_mode():
        assert not same(LIKE)
        inside = known(torch.ones(4, 6))
    assert not inside(LIKE)


def test_what_is_not_recognised() -> None:
    subclass = LIKE.as_subclass(type("Sub", (Tensor,), {}))
    assert recognizer([]) is recognizer([subclass]) is recognizer([LIKE, LIKE]) is recognizer([LIKE.to("meta")]) is None


def test_memory_of_its_own() -> None:
    new = allocator(LIKE)
    assert new is not None
    assert part_of is not None
    assert allocator(LIKE.to("meta")) is None
    for shape, dtype in (((4, 6), torch.bfloat16), ((), torch.float64), ((0, 3), torch.bool), ((5,), torch.complex64)):
        x, like = new(shape, torch.empty(shape).stride(), dtype), torch.empty(shape, dtype=dtype)
        assert (x.shape, x.stride(), x.dtype, x.device) == (like.shape, like.stride(), dtype, like.device)
        assert (x.__class__, x._base, x.requires_grad, x.is_leaf) == (Tensor, None, False, True)
        assert x.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    with torch.inference_mode():
        assert new((2,), (1,), torch.float32).is_inference()
    x = torch.arange(10.0)
    part = part_of(x, (3,), (1,), 4)
    assert torch.equal(part, x[4:7])
    assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
