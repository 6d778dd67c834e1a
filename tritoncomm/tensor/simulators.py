"""Simulators of ColossalAI's contract: the effect of each collective on the mesh axes of a dim, as new lists."""

from collections.abc import Iterable, Mapping, Sequence

from tritoncomm.errors import ShapeError

__all__ = [
    "Pair",
    "all_gather_simulator",
    "all_to_all_simulator",
    "convert_dim_partition_dict",
    "merge_same_dim_mesh_list",
    "mix_gather_simulator",
    "shard_simulator",
]

Pair = tuple[int, list[int]]


def convert_dim_partition_dict(dim_size: int, dim_partition_dict: dict[int, list[int]]) -> dict[int, list[int]]:
    """Count every dim from the front: key ``-1`` becomes ``dim_size - 1``; values and order are kept.

    Args:
        dim_size: number of dims of the tensor.
        dim_partition_dict: mesh axes by dim; not changed, and its lists are copied.

    Raises:
        ShapeError: two keys are the same dim; ``merge_same_dim_mesh_list`` concatenates their axes.

    Example:
        3 dims, ``{-1: [0], 0: [1]}`` give ``{2: [0], 0: [1]}``.
    """
    result: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        index = dim + dim_size if dim < 0 else dim
        if index in result:
            raise ShapeError(f"convert_dim_partition_dict: dim {index} appears twice in {dim_partition_dict}")
        result[index] = list(axes)
    return result


def merge_same_dim_mesh_list(dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Count every dim from the front and concatenate the axes of equal dims, in the given order.

    Args:
        dim_size: number of dims of the tensor.
        dim_partition_dict: mesh axes by dim; not changed.

    Example:
        2 dims, ``{1: [0], -1: [1]}`` give ``{1: [0, 1]}``.
    """
    result: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        result.setdefault(dim + dim_size if dim < 0 else dim, []).extend(axes)
    return result


def all_gather_simulator(target_pair: Pair) -> list[int]:
    """Return the axes left after an all-gather over the last one: ``S01`` becomes ``S0``, and ``R`` stays."""
    _, axes = target_pair
    return list(axes[:-1])


def all_to_all_simulator(f_target_pair: Pair, b_target_pair: Pair) -> tuple[list[int], list[int]]:
    """Return the axes of two dims after an all-to-all: ``(S0, R)`` gives ``(R, S0)``, ``(S0, S1)`` ``(S01, R)``."""
    # A pair is a dim and its mesh axes.
    (_, front), (_, behind) = f_target_pair, b_target_pair
    return ([*front, *behind], []) if behind else ([], [*front])


def shard_simulator(target_pair: Pair, legal_sharding_dims: Iterable[int]) -> list[list[int]]:
    """Return every list of axes of a dim after one more split, axes ascending.

    Example: ``(0, [0])`` with the unused axes ``[1, 2]`` gives ``[[0, 1], [0, 2]]``.
    """
    _, axes = target_pair
    return [[*axes, axis] for axis in legal_sharding_dims if not axes or axis > axes[-1]]


def mix_gather_simulator(f_target_pair: Pair, b_target_pair: Pair) -> tuple[list[int], list[int]]:
    """Return ``(gather_dim, logical_process_axes)`` of one gather of two dims that use both axes of a mesh.

    Example: ``S0S1`` is ``(0, [0]), (1, [1])`` and gives ``([1, 0], [1, 0])``; ``S01R`` gives ``([0], [1, 1])``.
    """
    (front, front_axes), (behind, behind_axes) = f_target_pair, b_target_pair
    if len({*front_axes, *behind_axes}) != 2 or len(front_axes) + len(behind_axes) != 2:
        raise ShapeError(f"mix_gather_simulator: {f_target_pair} and {b_target_pair} do not use two axes")
    if front_axes and behind_axes:
        return [behind, front], [behind_axes[0], front_axes[0]]  # the second dim comes first
    # ``[1, 1]`` if axis 1 counts fastest through the shards (``S01``), ``[0, 0]`` if axis 0 does (``S10``).
    dim, (slow, fast) = (front, front_axes) if front_axes else (behind, behind_axes)
    return [dim], [int(slow < fast)] * 2
