"""Triton kernels for the memory work around collectives, with a twin of each in plain torch.

Triton is imported when the first kernel is asked for, because its import takes longer than all other imports together.
A program that takes only torch's path never imports it.

Arguments have one meaning in all modules. ``name`` or ``op`` is the operation, for errors. ``device`` is the index of
a GPU, -1 for CPU tensors in the interpreter. ``alignment`` is the last four bits of all addresses, combined by "or".
``rows`` are ``outer`` rows of ``row`` elements, of which ``run`` go to each of ``world`` ranks; sizes and strides are
in elements, unless a docstring says bytes or units (accesses). Bytes "moved" are read plus written.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tritoncomm_kernels import installed_triton, torch_path
from tritoncomm_kernels.config import Config, config_for
from tritoncomm_kernels.geometry import MAX_IDS, MAX_PARTS, BucketSort, OwnerSort, TooLargeError
from tritoncomm_kernels.segments import PADDING, Copies, Segment, Segments, in_turns

if TYPE_CHECKING:
    from tritoncomm_kernels.copy import pack, plain_copy, unpack
    from tritoncomm_kernels.cross_entropy import gradient, statistics
    from tritoncomm_kernels.id_sort import sort_by_bucket, sort_by_owner
    from tritoncomm_kernels.reduction import reduce
    from tritoncomm_kernels.row_copy import gather_rows, scatter_rows
    from tritoncomm_kernels.row_sums import dot_rows, scale_dot_rows, scale_rows, sum_rows
    from tritoncomm_kernels.segment_copy import SegmentCall, copy_segments, gather_segments, scatter_segments

__all__ = [
    "MAX_IDS",
    "MAX_PARTS",
    "PADDING",
    "BucketSort",
    "Config",
    "Copies",
    "OwnerSort",
    "Segment",
    "SegmentCall",
    "Segments",
    "TooLargeError",
    "config_for",
    "copy_segments",
    "dot_rows",
    "gather_rows",
    "gather_segments",
    "gradient",
    "in_turns",
    "pack",
    "plain_copy",
    "reduce",
    "scale_dot_rows",
    "scale_rows",
    "scatter_rows",
    "scatter_segments",
    "sort_by_bucket",
    "sort_by_owner",
    "statistics",
    "sum_rows",
    "torch_path",
    "unpack",
]

# Names of the modules that import Triton. No name may be a module's: importing that module would rebind it.
_LAZY = {
    "SegmentCall": "segment_copy",
    "copy_segments": "segment_copy",
    "dot_rows": "row_sums",
    "gather_rows": "row_copy",
    "gather_segments": "segment_copy",
    "gradient": "cross_entropy",
    "pack": "copy",
    "plain_copy": "copy",
    "reduce": "reduction",
    "scale_dot_rows": "row_sums",
    "scale_rows": "row_sums",
    "scatter_rows": "row_copy",
    "scatter_segments": "segment_copy",
    "sort_by_bucket": "id_sort",
    "sort_by_owner": "id_sort",
    "statistics": "cross_entropy",
    "sum_rows": "row_sums",
    "unpack": "copy",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tritoncomm_kernels' has no attribute {name!r}")
    installed_triton.require()
    value = getattr(importlib.import_module(f"tritoncomm_kernels.{_LAZY[name]}"), name)
    globals()[name] = value  # an ordinary attribute from now on: a warm call does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
