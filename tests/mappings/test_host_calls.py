"""Host cost of the mappings: calls of the project's functions, with a tensor that was seen before."""

from collections.abc import Callable
from functools import partial

import torch
from host_calls import calls_of
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings
from tritoncomm.mappings import all_to_all_hp2sp, all_to_all_sp2hp

# mapping: calls of forward and of backward, at most
MOST_CALLS: dict[Callable[..., Tensor], tuple[int, int]] = {
    all_to_all_sp2hp: (22, 21),
    all_to_all_hp2sp: (25, 18),
    mappings.copy_to_tensor_model_parallel_region: (7, 12),
    mappings.reduce_from_tensor_model_parallel_region: (18, 1),
    mappings.gather_from_sequence_parallel_region: (19, 15),
    mappings.reduce_scatter_to_sequence_parallel_region: (19, 15),
}


def test_calls_of_warm_mappings(group: ProcessGroup) -> None:
    x = torch.ones(8, 16, requires_grad=True)
    for mapping, most in MOST_CALLS.items():
        y = mapping(x, group=group)
        gradient = torch.ones_like(y)
        for _ in range(3):
            mapping(x, group=group).backward(gradient)
        forward = calls_of(partial(mapping, x, group=group))
        backward = calls_of(partial(y.backward, gradient))
        assert forward[0] == mapping.__name__
        assert "backward" in backward
        assert len(forward) <= most[0], (mapping.__name__, len(forward), forward)
        assert len(backward) <= most[1], (mapping.__name__, len(backward), backward)
