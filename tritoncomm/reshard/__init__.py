"""Resharding: tensors from any layout to any other, over the same, other or overlapping ranks.

In the modules of this package ``source`` and ``target`` are layouts before and after, ``items`` the tensors of a call
and ``name`` the calling function, for errors. ``ranks`` are global ranks; the ``position`` of a rank is its index in
the group, its ``place`` the index in a layout's ranks. ``start`` and ``size`` are first index and extent of boxes,
``[boxes, dims]`` in layouts and ``[dims, blocks]`` in requests, blocks and plans, where none is empty. ``low`` and
``high`` are the first element of a range and the first one behind it. Strides and offsets are elements, but bytes on
the wire; ``itemsize`` is bytes of an element.
"""

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
