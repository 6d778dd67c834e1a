"""Resharding: tensors from any layout to any other, over the same, other or overlapping ranks."""

from tritoncomm.reshard.api import ReshardPlan, reshard, reshard_plan
from tritoncomm.reshard.buffers import buffer_layouts, buffer_views, megatron_layouts
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.ownership import OwnedExchange, balanced_owners, exchange_owned
from tritoncomm.reshard.sequences import sequence_layout

__all__ = [
    "Layout",
    "OwnedExchange",
    "ReshardPlan",
    "balanced_owners",
    "buffer_layouts",
    "buffer_views",
    "exchange_owned",
    "megatron_layouts",
    "reshard",
    "reshard_plan",
    "sequence_layout",
]
