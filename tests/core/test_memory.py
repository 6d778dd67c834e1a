"""Memory without the dispatcher is as torch makes it; elements that tensors share."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tritoncomm.core.memory import contiguous_stride, empty, empty_on, extent_of, share_elements

LIKE = torch.ones(4, 6)


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
