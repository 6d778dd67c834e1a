"""Recognising tensors of the same kind, and memory without the dispatcher: what counts, what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import vmap
from traffic import Traffic

from tritoncomm.core.memory import (
    allocator,
    contiguous_stride,
    empty,
    empty_on,
    extent_of,
    part_of,
    recognizer,
    share_elements,
)  # fmt: skip

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


def drawn_view(draw: st.DrawFn, base: Tensor) -> Tensor:
    """A view of one to three dims whose last element is inside the base."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    stride = [draw(st.integers(0, 9)) for _ in shape]
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return base.as_strided(shape, stride, draw(st.integers(0, len(base) - 1 - last)))


@given(st.data())
def test_elements_that_two_tensors_share(data: st.DataObject) -> None:
    base = torch.arange(200)
    views = [data.draw(st.composite(drawn_view)(base)) for _ in range(2)]
    x, y = sorted(views, key=Tensor.data_ptr)
    shared = bool({*x.flatten().tolist()} & {*y.flatten().tolist()})
    if y.data_ptr() < x.data_ptr() + extent_of(x):
        assert share_elements(x, y) == share_elements(y, x) == shared
    else:
        assert not shared


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


SHAPES = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@given(SHAPES)
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape, device="meta").stride()


def test_strides_of_other_integers_are_ints() -> None:
    shape = (np.int64(7919), np.int64(3), True)
    assert contiguous_stride(shape) == (3, 1, 1)  # the cache takes equal keys for the same
    assert {type(step) for step in contiguous_stride((7919, 3, 1))} == {int}


@given(SHAPES, st.sampled_from([torch.float32, torch.bool, torch.complex64, torch.float8_e5m2]))
def test_new_memory_is_as_torch_makes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    expected = LIKE.new_empty(shape, dtype=dtype)
    made = [empty(LIKE, each, contiguous_stride(each), dtype) for each in (shape, torch.Size(shape))]
    made += [empty_on(LIKE.device, each, dtype) for each in (shape, torch.Size(shape), list(shape))]
    for x in made:
        assert (x.shape, x.stride(), x.dtype, x.device) == (shape, expected.stride(), dtype, expected.device)
        assert (type(x), x.requires_grad, x.is_inference()) == (Tensor, False, False)
        assert x.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


class Tagged(Tensor):
    pass


def test_new_memory_has_the_class_and_the_device_of_the_tensor() -> None:
    assert type(empty(LIKE.as_subclass(Tagged), (2,), (1,), torch.float32)) is Tagged
    assert type(empty(torch.nn.Parameter(LIKE), (2,), (1,), torch.float32)) is Tensor
    assert empty(LIKE.to("meta"), (2,), (1,), torch.float32).is_meta
    assert empty_on("meta", (2,), torch.float32).is_meta
    with torch.inference_mode():
        assert empty(LIKE, (2,), (1,), torch.float32).is_inference()


def test_modes_see_new_memory() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(empty(LIKE, (2,), (1,), torch.float32), FakeTensor)
        assert isinstance(empty_on(LIKE.device, (2,), torch.float32), FakeTensor)


@pytest.mark.parametrize("shape", [(-1,), (2.5,), ("a",), (2**62, 4), (2**70,), (None,)])
def test_what_is_no_shape_is_an_error(shape: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        empty_on(LIKE.device, shape, torch.float32)
