"""Experts on other ranks: each token crosses once per rank, and every sum has a fixed order.

``dispatch`` sends a token's row once to each rank that has one of its experts, ``combine`` sends one row back and adds
the ranks' parts up. Both are plain all-to-alls; nothing is added atomically, so equal calls give equal bits.
"""

from tritoncomm.experts.layer import Dispatched, ExpertRows, Route, RowsHandle, combine, dispatch, route

__all__ = ["Dispatched", "ExpertRows", "Route", "RowsHandle", "combine", "dispatch", "route"]
