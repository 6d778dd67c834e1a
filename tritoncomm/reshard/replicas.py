"""Equal boxes: which ranks have the same region."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints

__all__ = ["replicas_of", "replicas_on_mesh"]

Array = NDArray[np.int64]


def replicas_of(rows: Array) -> tuple[Array, Array, Array, Array]:
    """Groups of equal rows: the first row of each, all of its rows (padded with -1), their number; each row's group."""
    text, width = rows.tobytes(), rows.shape[1] * 8
    members: dict[bytes, list[int]] = {}
    region = []
    for index in range(len(rows)):
        boxes = members.setdefault(text[index * width : (index + 1) * width], [])
        boxes.append(index)
        region.append(len(members) - 1 if len(boxes) == 1 else int(region[boxes[0]]))
    most = max(map(len, members.values()), default=0)
    firsts = np.array([boxes[0] for boxes in members.values()], np.int64)
    padded = [boxes + [-1] * (most - len(boxes)) for boxes in members.values()]
    counts = np.array([len(boxes) for boxes in members.values()], np.int64)
    return firsts, np.array(padded, np.int64).reshape(len(members), most), counts, np.array(region, np.int64)


@lru_cache(maxsize=256)
def replicas_on_mesh(mesh: Ints, axes: Ints) -> tuple[Array, Array, Array, Array]:
    """The same of ranks on a mesh whose sharding axes are given: boxes that are not empty differ where those do."""
    coordinates = np.indices(mesh, np.int64).reshape(len(mesh), math.prod(mesh))
    return replicas_of(np.ascontiguousarray(coordinates[list(axes)].T))
