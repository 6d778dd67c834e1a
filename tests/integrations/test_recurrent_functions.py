"""The recurrences of transformers over shards of the sequence: per head the bits of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.recurrent import Exchanged, Gathered, Role, Sliced, by_heads, conv_halo

qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
nemotron = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")

CHANNELS = Exchanged(2, 1)
ROLES: dict[str, dict[int | str, Role]] = {
    "mamba2": {"hidden_states": Exchanged(), "dt": Exchanged(), "A": Sliced(), "B": Exchanged(), "C": Exchanged(),
               "D": Sliced(), "dt_bias": Sliced()},
    "mamba": {"hidden_states": CHANNELS, "dt": CHANNELS, "A": Sliced(), "B": Gathered(2), "C": Gathered(2),
              "D": Sliced(), "z": CHANNELS, "delta_bias": Sliced()},
}  # fmt: skip


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5).to(dtype)


def arguments(name: str, n: int, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A recurrence of transformers, and arguments for ``n`` positions; of six heads or channels."""

    def x(*shape: int) -> Tensor:
        return drawn(*shape, seed=len(made), dtype=dtype)

    made: dict[str, Any] = {}
    if name in ("gated delta rule", "kimi delta attention"):
        for key in ("query", "key", "value"):
            made[key] = x(2, n, 6, 8)
        made["g"] = -x(2, n, *((6,) if name == "gated delta rule" else (6, 8))).float().abs()
        made["beta"] = x(2, n, 6).sigmoid()
        made["chunk_size"] = 4
        is_kimi = name != "gated delta rule"
        return (kimi.chunk_kimi_delta_attention if is_kimi else qwen3_next.torch_chunk_gated_delta_rule), made
    if name == "mamba2":
        for key, shape in (("hidden_states", (2, n, 6, 8)), ("dt", (2, n, 6)), ("A", (6,)), ("B", (2, n, 3, 4)),
                           ("C", (2, n, 3, 4)), ("D", (6,)), ("dt_bias", (6,))):  # fmt: skip
            made[key] = x(*shape)
        made |= {"A": -made["A"].float().abs(), "chunk_size": 4, "dt_softplus": True}
        return nemotron.mamba2_chunk_scan, made
    for key, shape in (("hidden_states", (2, 6, n)), ("dt", (2, 6, n)), ("A", (6, 4)), ("B", (2, 4, n)),
                       ("C", (2, 4, n)), ("D", (6,)), ("z", (2, 6, n)), ("delta_bias", (6,))):  # fmt: skip
        made[key] = x(*shape)
    made |= {"A": -made["A"].float().abs(), "delta_softplus": True}
    return mamba.mamba_selective_scan, made


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gated delta rule", "kimi delta attention", "mamba2", "mamba"])
def test_bits_per_head(group: ProcessGroup, name: str, dtype: torch.dtype) -> None:
    sizes = [5, 3, 4][: group.size()]
    function, whole = arguments(name, sum(sizes), dtype)
    dim = 2 if name == "mamba" else 1
    wanted = function(**whole)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    own = {
        key: x.split(sizes, dim)[group.rank()] if isinstance(x, Tensor) and x.dim() > 2 else x
        for key, x in whole.items()
    }
    result = CHANNELS if name == "mamba" else Exchanged()
    out = by_heads(function, group, ROLES.get(name), result)(**own, sizes=sizes)
    out = out[0] if isinstance(out, tuple) else out
    wanted = wanted.split(sizes, dim)[group.rank()]
    if dtype is torch.float32 and name.startswith("mamba"):
        # On a CPU an exponential at the end of a vector may differ by one place from the same inside of it.
        torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(out, wanted)


@pytest.mark.ranks(2, 3)
def test_the_convolution(group: ProcessGroup) -> None:
    sizes = [5, 3, 4][: group.size()]
    x, weight, bias = (drawn(*shape, seed=1, dtype=torch.float32) for shape in ((2, 6, sum(sizes)), (6, 4), (6,)))
    wanted = qwen3_next.causal_conv1d_fn(x, weight, bias, activation="silu")
    call = conv_halo(qwen3_next.causal_conv1d_fn, group)
    out = call(x.split(sizes, 2)[group.rank()], weight, bias, activation="silu", sizes=sizes)
    torch.testing.assert_close(out, wanted.split(sizes, 2)[group.rank()])
