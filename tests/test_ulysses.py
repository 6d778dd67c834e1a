"""UlyssesAttention on sequence shards is attention on one process: any heads, any sequences, one message each way."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm.ulysses import UlyssesAttention

def run(group: ProcessGroup, hq, hk, layout, batch) -> None:
    w, r = group.size(), group.rank()
    g = torch.Generator().manual_seed(1)
    s = 4
    q, k, v = (torch.randn(batch, w*s, h, 8, generator=g) for h in (hq, hk, hk))
    go = torch.randn(q.shape, generator=g)
    full = [x.clone().requires_grad_() for x in (q, k, v)]
    t = lambda x: x.transpose(1, 2)
    ref = t(F.scaled_dot_product_attention(*map(t, full), is_causal=True, enable_gqa=hq!=hk))
    ref.backward(go)
    sl = slice(r*s, r*s+s)
    mk = (lambda x: x[:, sl].transpose(0, 1).contiguous()) if layout == "sbhd" else (lambda x: x[:, sl])
    loc = [mk(x).detach().clone().requires_grad_() for x in (q, k, v)]
    m = UlyssesAttention(group, layout=layout)
    out = m(*loc, is_causal=True)
    assert torch.equal(out, mk(ref)), (out - mk(ref)).abs().max()
    out.backward(mk(go))
    for a, b in zip(loc, full):
        assert (a.grad - mk(b.grad)).abs().max() < 1e-6 * max(1, b.grad.abs().max()), (a.grad - mk(b.grad)).abs().max()

@pytest.mark.parametrize("world", [1, 2, 4])
def test_a(pool: Pool, world) -> None:
    for hq, hk in [(8,8),(8,4),(8,2),(8,1),(6,6),(6,3),(5,5),(14,7),(12,3),(6,2)]:
        for layout in ("bshd", "sbhd"):
            for b in (1, 2):
                pool.run(run, hq, hk, layout, b, world=world)
