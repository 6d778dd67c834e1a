"""`torch.set_default_device("meta")`, under which large models are built, reaches nothing inside of the library."""

import torch
from mapping_cases import FUNCTIONS, MAPPINGS, Call, all_held, as_asked, expected, expected_gradient, run, same
from pool import Pool
from torch import nn
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import collective, groups
from tritoncomm.debug import replicas
from tritoncomm.reshard import Layout, reshard
from tritoncomm.tensor import DeviceMesh, ShardSpec, measure_mesh, shard_parameters
from tritoncomm.tensor import ProcessGroup as Groups

COLLECTIVES = [Call(name, dims=(0, 0)) for name in FUNCTIONS if name.startswith("collective.")]


def test_mappings_and_collectives(group: ProcessGroup) -> None:
    rank, ranks = group.rank(), range(group.size())
    for call in [*MAPPINGS.values(), *COLLECTIVES]:
        parts = all_held(group, call.shape, 1)
        wanted = [expected(call, parts, each) for each in ranks]
        x = parts[rank].clone().requires_grad_(FUNCTIONS[call.function].backward is not None)
        grads = all_held(group, tuple(wanted[rank].shape), 7)
        with torch.device("meta"):
            out = run(as_asked(call, rank, ranks), x, group)
            out = out[0] if isinstance(out, tuple) else out
            if x.requires_grad:
                out.backward(grads[rank])
        if not wanted[rank].is_meta:  # of no meaning on this rank
            same(out.detach(), wanted[rank], call)
        if x.requires_grad:
            assert x.grad is not None
            same(x.grad, expected_gradient(call, grads, rank).reshape(x.shape), call)


def run_the_rest(group: ProcessGroup) -> None:
    torch.manual_seed(0)
    model, whole = nn.Linear(4, 4), torch.arange(16.0).view(4, 4)
    rows, columns = (Layout.on_mesh((4, 4), [0, 1], [dim]) for dim in (0, 1))
    x = whole.chunk(2)[group.rank()].clone()
    with torch.device("meta"):
        tritoncomm.initialize(tensor=2)
        assert groups.rank_lists(2, tensor=2)
        moved = reshard(x, rows, columns, group=group)
        mesh = DeviceMesh(torch.tensor([0.0, 1.0], device="cpu"), (1, 2), init_process_group=True)
        measured = measure_mesh(mesh)
        replicas.check_replicas(model.parameters(), group)
        shard_parameters(model, {"weight": ShardSpec([0], [2])}, Groups(tp_degree=2))
        summed = collective.split_reduce_scatter([whole, whole], [0, 1], group)
        tritoncomm.destroy()
    same(moved, whole.chunk(2, 1)[group.rank()], "reshard")
    assert all(each.device.type == "cpu" for each in summed)
    assert not any(p.is_meta for p in model.parameters())
    assert mesh.mesh_shape == (1, 2)
    assert max(measured.mesh_alpha) > 0


def test_groups_meshes_layouts_and_models() -> None:
    ranks = Pool(2)  # initialize() wants all ranks of a job
    try:
        ranks.run(run_the_rest)
    finally:
        ranks.stop()
