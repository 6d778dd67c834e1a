"""gather_segments and scatter_segments for tensors whose layouts stay the same: only their addresses are looked at."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import Tensor

from tritoncomm_kernels.device_table import Table, addresses_on
from tritoncomm_kernels.launch import stream_of
from tritoncomm_kernels.numerics import INTERPRETED
from tritoncomm_kernels.segment_copy import _plan
from tritoncomm_kernels.segment_kernel import BY_VALUE
from tritoncomm_kernels.segments import Segments, layouts_of

__all__ = ["SegmentCall"]

_ALIGNMENTS = 16  # of the tensors that launches are kept for
_address_of = Tensor.data_ptr
_Addressed = tuple[tuple[int, ...], int, list[Any], tuple[int, ...], Table | None]
"""Addresses, alignment of the wire, launches, addresses by value, and those in a table."""
_NO_ADDRESSES = tuple((0,) * n for n in range(BY_VALUE + 1))


class SegmentCall:
    """One table for tensors and a wire of certain layouts, called for the addresses that they have at the time.

    What the functions look up on every call is worked out here, once for every alignment: a call with 16 tensors or
    fewer costs the host little more than the launch. The caller vouches that dtypes, shapes, strides and the device
    are those of the first tensors.

    Args:
        name: ``gather_segments`` or ``scatter_segments``.
        segments: the table.
        tensors: of the table, any with these layouts.
        wire: as every call has it.
        accumulate: add to what is in the tensors.
        sums: add up segments of the same rows.

    Raises:
        RuntimeError: neither a GPU nor Triton's interpreter; and what the functions raise, at the first call.
    """

    def __init__(
        self,
        name: str,
        segments: Segments,
        tensors: Sequence[Tensor],
        wire: Tensor,
        accumulate: bool = False,
        sums: bool = False,
    ) -> None:
        if not wire.is_cuda and not INTERPRETED:
            raise RuntimeError(f"{name}: {wire.device} tensors need a GPU or TRITON_INTERPRET=1")
        self._arguments = (name, segments, layouts_of(wire, tensors))
        self._sums = (accumulate, sums)
        self._launches: dict[int | tuple[int, ...], list[Any]] = {}
        self._last: _Addressed = (), -1, [], (), None

    def __call__(self, tensors: Sequence[Tensor], wire: Tensor, addresses: tuple[int, ...] | None = None) -> None:
        """Launch on the current stream.

        Args:
            tensors: those of the table, in its order.
            wire: contiguous.
            addresses: of the tensors, where the caller has read them.
        """
        if addresses is None:
            addresses = tuple(map(_address_of, tensors))
        alignment = wire.data_ptr() & 15
        last = self._last  # read once: other threads may call at the same time
        if addresses != last[0] or alignment != last[1]:
            last = self._last = self._prepared(addresses, alignment, wire.get_device())
        _, _, launches, values, table = last
        listed = wire if table is None else table.on(stream_of(wire.get_device()))
        for launch, _ in launches:
            launch(wire, listed, 1.0, *values)

    def _prepared(self, addresses: tuple[int, ...], alignment: int, device: int) -> _Addressed:
        """Launches and arguments for these addresses of the tensors and this alignment of the wire."""
        key = alignment if not reduce(or_, addresses, 0) & 15 else (alignment, *[each & 15 for each in addresses])
        launches = self._launches.get(key)
        if launches is None:
            launches = self._launches_for(key)
        if len(addresses) <= BY_VALUE:
            return addresses, alignment, launches, addresses + _NO_ADDRESSES[BY_VALUE - len(addresses)], None
        return addresses, alignment, launches, _NO_ADDRESSES[BY_VALUE], addresses_on(addresses, device)

    def _launches_for(self, key: int | tuple[int, ...]) -> list[Any]:
        """The launches for addresses modulo 16: of the wire, and of the tensors if one of theirs is not 0."""
        if len(self._launches) >= _ALIGNMENTS:
            self._launches.clear()
        at, alignment = (key, None) if isinstance(key, int) else (key[0], key[1:])
        self._launches[key], _ = _plan(*self._arguments, alignment, at, False, *self._sums)
        return self._launches[key]
