"""What a hop counts: bytes copied and bytes sent, exactly."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from stage_cases import made, strided
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import p2p, record
from tritoncomm.core import ops
from tritoncomm.p2p import P2PCommunicator
from tritoncomm.p2p.hop import exchange
from tritoncomm.p2p.neighbours import Neighbours

Shapes = tuple[tuple[int, ...], ...]
HEADER = 32 * 8  # bytes, of up to 32 words
A, B, C, D = (4, 8), (3, 5), (7,), (2, 6)  # of 128, 60, 28 and 48 bytes of float32


def contiguous(shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    return made(3, shape, dtype)


def apart(shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    return strided(made(3, shape, dtype))


# To the next stage, to the previous one; bytes copied (read and written), bytes sent.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], int, int]] = {
    "contiguous": (lambda: contiguous(A), lambda: None, 0, 128),
    "contiguous-both": (lambda: contiguous(A), lambda: contiguous(B), 0, 188),
    "strided": (lambda: apart(A), lambda: None, 256, 128),
    "strided-both": (lambda: apart(A), lambda: apart(B), 256 + 120, 188),
    "strided-and-contiguous": (lambda: apart(A), lambda: contiguous(B), 256, 188),
    "one-element": (lambda: contiguous((1,)), lambda: contiguous(()), 0, 8),
    "fp8": (lambda: apart((4, 8), "float8_e5m2"), lambda: contiguous((3,), "float8_e5m2"), 64, 35),
    "complex": (lambda: apart((3, 2), "complex64"), lambda: contiguous((5,), "complex64"), 96, 88),
    "several": (lambda: [contiguous(A), contiguous(D), contiguous(C)], lambda: None, 2 * 204, 204),
    "several-with-gaps": (lambda: [contiguous(B), contiguous(A)], lambda: None, 2 * 188, 64 + 128),
    "several-strided": (lambda: [apart(B), contiguous(C), apart(A)], lambda: None, 2 * 216, 64 + 32 + 128),
    "several-both": (
        lambda: [apart(A), contiguous(B)], lambda: [contiguous(C), apart(D)], 2 * 188 + 2 * 76, 188 + 32 + 48
    ),
    "several-and-one": (lambda: [contiguous(A), contiguous(B)], lambda: apart(D), 2 * 188 + 96, 188 + 48),
    "one-and-several": (lambda: contiguous(A), lambda: [apart(D), apart(C)], 2 * 76, 128 + 76),
    "several-with-an-empty-one": (lambda: [contiguous((0, 3)), apart(A)], lambda: contiguous((0,)), 256, 128),
}  # fmt: skip
COPYING = [name for name, (_, _, copied, _) in CASES.items() if copied]


def shapes_of(x: Any) -> Any:
    return x if x is None else tuple(x.shape) if isinstance(x, Tensor) else [tuple(each.shape) for each in x]


def run_case(group: ProcessGroup, case: str, path: str, variable: bool, checked: bool, wait: bool) -> Any:
    """Every stage sends the same, round the ring: the lines of the record, as (calls, copied, sent)."""
    ahead, back = CASES[case][0](), CASES[case][1]()
    dtype = (ahead if isinstance(ahead, Tensor) else ahead[0]).dtype
    with ops.path(path), p2p.check(checked), record.recording() as counts:
        outgoing = {"send_next": ahead, "send_prev": back}
        expected = {"recv_prev": shapes_of(ahead), "recv_next": shapes_of(back)}
        _, handles = exchange(
            Neighbours.of(group), "hop", outgoing, expected, dtype, variable=variable, batched=False, wait=wait
        )
        for handle in (handles or {}).values():
            handle.wait()
    return {key: (each.calls, each.bytes_copied, each.bytes_sent) for key, each in counts.items()}


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_a_hop_counts_what_it_copies_and_sends(pool: Pool, case: str, path: str) -> None:
    to_next, to_prev, copied, sent = CASES[case]
    taken = path if copied else "view"
    expected = {("hop", taken): (1, copied, sent)}
    assert pool.run(run_case, case, path, False, False, True) == [expected] * 2
    assert pool.run(run_case, case, path, False, False, False) == [expected] * 2, "without waiting"
    headers = sum(x is not None for x in (to_next(), to_prev()))
    expected |= {("hop.header", "cpu"): (2 * headers, 0, headers * HEADER)}
    for variable, checked in ((True, False), (False, True)):
        assert pool.run(run_case, case, path, variable, checked, True) == [expected] * 2, (variable, checked)


@pytest.mark.parametrize("case", CASES)
def test_the_only_stage_copies_to_itself_and_sends_nothing(pool: Pool, case: str) -> None:
    to_next, to_prev, packed, _ = CASES[case]
    listed = [[x] if isinstance(x, Tensor) else x or [] for x in (to_next(), to_prev())]
    copied = packed + 2 * sum(x.nbytes for tensors in listed for x in tensors)
    for path, checked in (("torch", False), ("triton", True)):
        counts = pool.run(run_case, case, path, False, checked, True, world=1)
        assert counts == [{("hop", "torch"): (1, copied, 0)}]


def run_long_header(group: ProcessGroup) -> Any:
    """Twelve tensors of three dims: 3 + 12 * (2 + 3) words."""
    config = SimpleNamespace(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    tensors = [apart((1, 2, 2 + i)) for i in range(12)]
    with record.recording() as counts:
        P2PCommunicator(group, config).send_forward_recv_forward(tensors, True, [x.shape for x in tensors])
    return {key: (each.calls, each.bytes_copied, each.bytes_sent) for key, each in counts.items()}


def test_a_long_header_counts_all_its_words(pool: Pool) -> None:
    sizes = [8 * (2 + i) for i in range(12)]
    sent = sum(-(-size // 16) * 16 for size in sizes[:-1]) + sizes[-1]
    assert pool.run(run_long_header) == [
        {
            ("send_forward_recv_forward", "torch"): (1, 2 * sum(sizes), sent),
            ("send_forward_recv_forward.header", "cpu"): (2, 0, 8 * (3 + 12 * 5)),
        }
    ] * 2  # fmt: skip
