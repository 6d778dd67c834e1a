"""Functions by which transformers' recurrent layers mix positions, and the roles of their tensors."""

from collections.abc import Mapping
from typing import NamedTuple

from tritoncomm.recurrent import Exchanged, Gathered, Role, Sliced

__all__ = ["CONVOLUTION", "FUSED", "NAMES", "RECURRENCES", "STEPS", "Recurrence"]


class Recurrence(NamedTuple):
    """Roles of the tensors of a recurrence, and of its result."""

    roles: Mapping[int | str, Role]
    result: Exchanged


def _recurrence(result: Exchanged, roles: Mapping[Role, str]) -> Recurrence:
    """Return the roles by name, from the names of every role."""
    return Recurrence({name: role for role, names in roles.items() for name in names.split()}, result)


CONVOLUTION = "causal_conv1d_fn"
_HEADS, _VALUES, _CHANNELS = Exchanged(), Exchanged(columns=3), Exchanged(2, 1)
RECURRENCES = {
    "torch_chunk_gated_delta_rule": _recurrence(_VALUES, {_HEADS: "query key g beta", _VALUES: "value"}),
    "chunk_kimi_delta_attention": _recurrence(_VALUES, {_HEADS: "query key g beta", _VALUES: "value"}),
    "mamba2_chunk_scan": _recurrence(_VALUES, {_HEADS: "dt B C", _VALUES: "hidden_states", Sliced(): "A D dt_bias"}),
    "mamba_selective_scan": _recurrence(
        _CHANNELS, {_CHANNELS: "hidden_states dt z", Gathered(2): "B C", Sliced(): "A D delta_bias"}
    ),
}
# Functions that do both in one, where a package has them; without it they return None, and the layer calls the others.
FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
NAMES = (CONVOLUTION, *RECURRENCES)
# Functions of one step with a cache, which is refused over shards.
STEPS = (
    "causal_conv1d_update", "mamba2_selective_state_update", "mamba_selective_state_update",
    "recurrent_kimi_delta_attention", "torch_recurrent_gated_delta_rule",
)  # fmt: skip
