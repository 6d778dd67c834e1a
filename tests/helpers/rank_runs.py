"""What ranks of a GPU run, over Gloo and over NCCL: every mapping, hop, resharding, and attention."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import Device
from fuzz_calls import assert_right
from mapping_cases import MAPPINGS, by_sizes, value
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm import MismatchError, mappings, p2p
from tritoncomm.core import ops
from tritoncomm.p2p import P2PCommunicator
from tritoncomm.reshard import Layout, reshard
from tritoncomm.ulysses import UlyssesAttention

__all__ = [
    "TIMEOUT", "Exchange", "run_checked", "run_compiled", "run_mappings", "run_p2p", "run_reshardings", "run_ulysses",
]  # fmt: skip

TIMEOUT = 100


def run_mappings(group: ProcessGroup, device: Device) -> None:
    for dtype in device.pick(("float32",), ("bfloat16", "float32", "float64")):
        for call in MAPPINGS.values():
            asked = replace(call, shape=(8, group.size(), 16), dtype=dtype, kind="leaf", path="triton")
            assert_right(group, asked, device=device.at)
        for call in by_sizes(group.size()).values():
            assert_right(group, replace(call, dtype=dtype, kind="leaf", path="triton"), device=device.at)


def run_p2p(group: ProcessGroup, device: Device) -> None:
    """An activation goes to the second stage and its gradient comes back; one tensor, strided ones, several.

    CUDA tensors over Gloo go through the host.
    """
    for batched, varying in ((True, True), (True, False), (False, True), (False, False)):
        config = SimpleNamespace(
            pipeline_dtype=torch.float32,
            batch_p2p_comm=batched,
            variable_seq_lengths=varying,
            pipeline_device=device.at,
        )
        stage, what = P2PCommunicator(group, config), (batched, varying)
        for turn in range(3):
            run_turn(stage, group, turn, device, (*what, turn))
        many = [value((3, n), "float32", n).to(device.at) for n in (1, 5, 16)]
        if group.rank() == 0:
            stage.send_forward(many, False)
        else:
            received = stage.recv_forward([tuple(x.shape) for x in many], False)
            for x, sent in zip(received, many, strict=True):
                assert_is(x, sent, what)


def run_turn(stage: P2PCommunicator, group: ProcessGroup, turn: int, device: Device, what: Any) -> None:
    shape = torch.Size((6, 2, 8))
    act, grad = (value(tuple(shape), "float32", turn + n).to(device.at) for n in (1, 5))
    if turn == 1:
        act, grad = act.transpose(0, 1).contiguous().transpose(0, 1), grad.flip(0)
    if group.rank() == 0:
        leaf = act.clone().requires_grad_()
        back = stage.send_forward_recv_backward(leaf * 2, shape, False)
        assert_is(back, grad, what)
        (leaf * 2).backward(back)
        assert_is(leaf.grad, grad * 2, what)
    else:
        # Over NCCL a call of variable lengths that sends and receives has to meet one that does both.
        together = what[1] and dist.get_backend(group) == "nccl"
        x = stage.send_backward_recv_forward(grad, shape, False) if together else stage.recv_forward(shape, False)
        assert_is(x, act * 2, what)
        assert x.requires_grad, what
        if not together:
            stage.send_backward(grad, False)


def run_checked(group: ProcessGroup, device: Device) -> None:
    """Check mode: what agrees passes with the same bits; a shape that differs is named on both ranks."""
    with p2p.check():
        for call in MAPPINGS.values():
            assert_right(
                group, replace(call, shape=(8, group.size(), 16), kind="leaf", path="triton"), device=device.at
            )
        x = torch.ones(4 + 2 * group.rank(), 8, device=device.at)
        with pytest.raises(MismatchError, match=r"differ in shape"):
            mappings.reduce_from_tensor_model_parallel_region(x, group)


def run_reshardings(group: ProcessGroup, device: Device) -> None:
    """Rows to columns and back to uneven rows, one tensor and several; the way back is the gradient's."""
    world, rank, shape = group.size(), group.rank(), (16, 24)
    uneven = [shape[0] - 3 * (world - 1), *[3] * (world - 1)]
    layouts = [Layout.on_mesh(shape, list(range(world)), [dim]) for dim in (0, 1)] + [Layout.split(shape, 0, uneven)]
    for count in device.pick((1, 3), (1, 40)):
        for dtype in ("float32", "bfloat16"):
            full = [value(shape, dtype, n).to(device.at) for n in range(count)]
            shards = [[x.chunk(world, dim)[rank] for x in full] for dim in (0, 1)]
            shards.append([x.split(uneven)[rank] for x in full])
            for old, new in ((0, 1), (1, 2), (2, 0)):
                given = {str(n): x.clone().requires_grad_() for n, x in enumerate(shards[old])}
                with ops.path("triton"):
                    got = reshard(given, layouts[old], layouts[new], group=group)
                    torch.autograd.backward([got[name] for name in given], [x * 2 for x in shards[new]])
                for name, x, new_x in zip(given, shards[old], shards[new], strict=True):
                    assert_is(got[name], new_x, (count, dtype, old, new, name))
                    assert_is(given[name].grad, x * 2, (count, dtype, old, new, name, "backward"))


def run_ulysses(group: ProcessGroup, device: Device) -> None:
    """Attention with its heads distributed is attention of one process, up to bfloat16's rounding."""
    rank, made = group.rank(), torch.Generator().manual_seed(1)
    short, others = device.pick(4, 1), group.size() - 1
    for q_heads, kv_heads in ((8, 8), (8, 2), (6, 3)):
        for sizes in ([64 // short] * group.size(), [100 // short, *[28 // short] * others]):
            shapes = [(2, sum(sizes), n, 64 // short) for n in (q_heads, kv_heads, kv_heads, q_heads)]
            *full, gradient = (torch.randn(shape, generator=made).to(device.at, torch.bfloat16) for shape in shapes)
            full = [x.requires_grad_() for x in full]
            q, k, v = (x.transpose(1, 2) for x in full)
            wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
            wanted.backward(gradient)
            local = [x.detach().split(sizes, 1)[rank].contiguous().requires_grad_() for x in full]
            with ops.path("triton"):
                out = UlyssesAttention(group)(*local, is_causal=True, sequence_sizes=sizes)
                out.backward(gradient.split(sizes, 1)[rank].contiguous())
            pairs = [(out, wanted), *((x.grad, one.grad) for x, one in zip(local, full, strict=True))]
            for n, (found, whole) in enumerate(pairs):
                assert found is not None
                assert whole is not None
                error = (found - whole.split(sizes, 1)[rank]).abs().max() / whole.abs().max()
                assert error < 0.02, (q_heads, kv_heads, sizes, n, error.item())


def assert_is(x: Tensor | None, expected: Tensor, what: Any) -> None:
    assert x is not None, what
    assert x.device == expected.device, what
    assert torch.equal(x.detach(), expected), what


class Exchange(nn.Module):
    """Linears and a norm around all-to-alls; ``uneven`` ones go by split sizes."""

    def __init__(self, group: ProcessGroup, uneven: bool) -> None:
        super().__init__()
        self.group, self.uneven = group, uneven
        self.norm, self.first, self.last = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.norm(x))
        if self.uneven:
            back = mappings.all_to_all_dims(hidden, 1, 0, self.group, scatter_sizes=(11, 5)).relu()
            return x + self.last(mappings.all_to_all_dims(back, 0, 1, self.group, gather_sizes=(11, 5)))
        back = mappings.all_to_all_sp2hp(hidden, self.group).relu()
        return x + self.last(mappings.all_to_all_hp2sp(back, self.group))


def run_compiled(group: ProcessGroup, device: Device) -> None:
    """Forward and backward through the compiler against eager, at two lengths."""
    for uneven in (False, True):
        torch.manual_seed(group.rank())
        layer = Exchange(group, uneven).to(device.at)
        compiled = torch.compile(layer, fullgraph=True, **device.compiled[0])
        for tokens in (8, 12):
            x = torch.randn(tokens, 16, device=device.at)
            results = []
            for function in (layer, compiled):
                leaf = x.clone().requires_grad_()
                out = function(leaf)
                results.append((out.detach(), *torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])))
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
