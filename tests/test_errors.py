"""Bad arguments raise the right error on every rank before anything is sent; the group works afterwards."""

import warnings
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from single_rank import force_single_rank_collectives
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritoncomm import ArgumentError, CommError, GroupError, ShapeError, UnsupportedError, groups, p2p
from tritoncomm import collective as c
from tritoncomm import mappings as m
from tritoncomm.debug import check_replicas
from tritoncomm.ulysses import UlyssesAttention

T = torch.ones
# id: (call, error, what the message has to say)
SHAPES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "scatter_tp": (
        lambda g: m.scatter_to_tensor_model_parallel_region(T(2, 5), g),
        ("scatter_to_tensor_model_parallel_region", "dim", "5"),
    ),
    "scatter_sp": (
        lambda g: m.scatter_to_sequence_parallel_region(T(5, 2), g),
        ("scatter_to_sequence_parallel_region", "dim 0", "5"),
    ),
    "reduce_scatter_sp": (
        lambda g: m.reduce_scatter_to_sequence_parallel_region(T(5, 2), g),
        ("reduce_scatter_to_sequence_parallel_region", "dim 0", "5"),
    ),
    "reduce_scatter_sp-sizes": (
        lambda g: m.reduce_scatter_to_sequence_parallel_region(T(5, 2), g, [2] * g.size()),
        ("reduce_scatter_to_sequence_parallel_region", "dim 0", "5"),
    ),
    "gather_sp-sizes": (
        lambda g: m.gather_from_sequence_parallel_region(T(5, 2), group=g, output_split_sizes=[4] * g.size()),
        ("gather_from_sequence_parallel_region", "dim 0", "5"),
    ),
    "gather_sp-length": (
        lambda g: m.gather_from_sequence_parallel_region(T(5, 2), group=g, output_split_sizes=[5]),
        ("gather_from_sequence_parallel_region", "dim 0", "5"),
    ),
    "rs_last": (
        lambda g: m.reduce_scatter_last_dim_to_tensor_parallel_region(T(2, 5), g),
        ("reduce_scatter_last_dim_to_tensor_parallel_region", "dim", "5"),
    ),
    "all_to_all": (lambda g: m.all_to_all(g, T(5, 2)), ("all_to_all", "dim 0", "5")),
    "all_to_all-sizes": (
        lambda g: m.all_to_all(g, T(5, 2), [1] * g.size(), [1] * g.size()),
        ("all_to_all", "dim 0", "5"),
    ),
    "sp2hp": (lambda g: m.all_to_all_sp2hp(T(4, 5), g), ("all_to_all_sp2hp", "dim", "5")),
    "hp2sp": (lambda g: m.all_to_all_hp2sp(T(5, 4), g), ("all_to_all_hp2sp", "5")),
    "hp2sp-3d": (lambda g: m.all_to_all_hp2sp(T(5, 3, 4), g), ("all_to_all_hp2sp", "15")),
    "reduce_scatter_dim": (lambda g: m.reduce_scatter_dim(T(2, 5), 1, g), ("reduce_scatter_dim", "dim 1", "5")),
    "split_dim": (lambda g: m.split_dim(T(2, 5), 1, g), ("split_dim", "dim 1", "5")),
    "all_to_all_dims": (lambda g: m.all_to_all_dims(T(2, 5), 1, 0, g), ("all_to_all_dims", "dim 1", "5")),
    "all_to_all_dims-sizes": (
        lambda g: m.all_to_all_dims(T(2, 5), 1, 0, g, scatter_sizes=[1] * g.size()),
        ("all_to_all_dims", "dim 1", "5"),
    ),
    "collective.reduce_scatter": (lambda g: c.reduce_scatter(T(2, 5), 1, g), ("reduce_scatter", "dim 1", "5")),
    "collective.reduce_scatter-negative": (lambda g: c.reduce_scatter(T(5, 2), -2, g), ("reduce_scatter", "5")),
    "collective.all_gather-sizes": (
        lambda g: c.all_gather(T(5, 2), 0, g, sizes=[1] * g.size()),
        ("all_gather", "dim 0", "5"),
    ),
    "collective.all_to_all": (lambda g: c.all_to_all(T(5, 2), g), ("all_to_all", "dim 0", "5")),
    "_split_along_first_dim": (lambda g: m._split_along_first_dim(T(5), g), ("_split_along_first_dim", "dim 0", "5")),
    "_reduce_scatter_along_last_dim": (
        lambda g: m._reduce_scatter_along_last_dim(T(2, 5), g),
        ("_reduce_scatter_along_last_dim", "5"),
    ),
}
NO_DIM: dict[str, Any] = {
    "scatter_tp": lambda g: m.scatter_to_tensor_model_parallel_region(T(()), g),
    "gather_tp": lambda g: m.gather_from_tensor_model_parallel_region(T(()), g),
    "scatter_sp": lambda g: m.scatter_to_sequence_parallel_region(T(()), g),
    "gather_sp": lambda g: m.gather_from_sequence_parallel_region(T(()), group=g),
    "reduce_scatter_sp": lambda g: m.reduce_scatter_to_sequence_parallel_region(T(()), g),
    "ag_last": lambda g: m.all_gather_last_dim_from_tensor_parallel_region(T(()), g),
    "rs_last": lambda g: m.reduce_scatter_last_dim_to_tensor_parallel_region(T(()), g),
    "all_to_all": lambda g: m.all_to_all(g, T(())),
    "sp2hp": lambda g: m.all_to_all_sp2hp(T(()), g),
    "hp2sp": lambda g: m.all_to_all_hp2sp(T(()), g),
    "all_gather_dim": lambda g: m.all_gather_dim(T(()), 0, g),
    "all_gather_dim-7": lambda g: m.all_gather_dim(T(2, 2), 7, g),
    "split_dim-minus-3": lambda g: m.split_dim(T(2, 2), -3, g),
    "all_to_all_dims-2": lambda g: m.all_to_all_dims(T(4, 4), 0, 2, g),
    "collective.all_gather": lambda g: c.all_gather(T(2, 2), 2, g),
    "collective.reduce_scatter": lambda g: c.reduce_scatter(T(2, 2), -3, g),
    "collective.split_reduce_scatter": lambda g: c.split_reduce_scatter([T(2)], [1], g),
}
# The first argument is the input, the second the group.
CALLS: dict[str, Any] = {
    "copy": m.copy_to_tensor_model_parallel_region,
    "reduce_from": m.reduce_from_tensor_model_parallel_region,
    "scatter_tp": m.scatter_to_tensor_model_parallel_region,
    "gather_tp": m.gather_from_tensor_model_parallel_region,
    "scatter_sp": m.scatter_to_sequence_parallel_region,
    "gather_sp": lambda x, g: m.gather_from_sequence_parallel_region(x, group=g),
    "reduce_scatter_sp": m.reduce_scatter_to_sequence_parallel_region,
    "ag_last": m.all_gather_last_dim_from_tensor_parallel_region,
    "rs_last": m.reduce_scatter_last_dim_to_tensor_parallel_region,
    "all_to_all": lambda x, g: m.all_to_all(g, x),
    "sp2hp": m.all_to_all_sp2hp,
    "hp2sp": m.all_to_all_hp2sp,
    "all_gather_dim": lambda x, g: m.all_gather_dim(x, 0, g),
    "reduce_scatter_dim": lambda x, g: m.reduce_scatter_dim(x, 0, g),
    "split_dim": lambda x, g: m.split_dim(x, 0, g),
    "all_to_all_dims": lambda x, g: m.all_to_all_dims(x, 0, 1, g),
    "_reduce": m._reduce,
    "_gather_along_first_dim": m._gather_along_first_dim,
    "_split_along_last_dim": m._split_along_last_dim,
    "collective.all_gather": lambda x, g: c.all_gather(x, 0, g),
    "collective.reduce_scatter": lambda x, g: c.reduce_scatter(x, 0, g),
    "collective.all_reduce": c.all_reduce,
    "collective.broadcast": lambda x, g: c.broadcast(x, 0, g),
    "collective.reduce": lambda x, g: c.reduce(x, 0, g),
    "collective.all_to_all": c.all_to_all,
}


def still_works(group: ProcessGroup) -> None:
    assert c.all_reduce(torch.ones(2), group).tolist() == [group.size()] * 2


@pytest.mark.ranks(2, 4, (1, 3))
def test_shapes(group: ProcessGroup) -> None:
    for name, (call, words) in SHAPES.items():
        for differentiable in (False, True):
            with torch.set_grad_enabled(differentiable), pytest.raises(ShapeError) as caught:
                call(group)
            message = str(caught.value)
            assert isinstance(caught.value, ValueError)
            for word in (*words, str(group.size()), "rank", str(group.rank())):
                assert word in message, f"{name}: {word!r} is not in {message!r}"
        still_works(group)


def test_no_such_dim(group: ProcessGroup) -> None:
    for name, call in NO_DIM.items():
        with pytest.raises(ShapeError) as caught:
            call(group)
        assert "dim" in str(caught.value), name
    still_works(group)


@pytest.mark.ranks(1, 2)
def test_dims_and_roots_of_other_types(group: ProcessGroup) -> None:
    x = T(4, 4)
    calls = (
        lambda dim: m.all_gather_dim(x, dim, group),
        lambda dim: m.reduce_scatter_dim(x, dim, group),
        lambda dim: m.split_dim(x, dim, group),
        lambda dim: m.all_to_all_dims(x, 0, dim, group),
        lambda dim: c.all_gather(x, dim, group),
        lambda dim: c.reduce_scatter(x, dim, group),
        lambda dim: c.split_reduce_scatter(x, dim, group),
        lambda dim: c.split_reduce_scatter([x], [dim], group),
    )
    for call in calls:
        for dim in (None, "0", 0.0, b"x", 1j, {}):
            with pytest.raises(ArgumentError, match=r"dim must be an int|dims") as caught:
                call(dim)
            assert isinstance(caught.value, TypeError)
    assert torch.equal(c.split_reduce_scatter([x, x], [True, True], group)[1], c.reduce_scatter(x, 1, group))
    for call in (c.broadcast, c.reduce):
        for root in (77, "0", None, [0]):
            with pytest.raises(GroupError, match="is not in the group"):
                call(T(2), root, group)
    still_works(group)


@pytest.mark.ranks(1, 2)
def test_inputs_and_groups(group: ProcessGroup) -> None:
    x = torch.ones(4, 4)
    for name, call in CALLS.items():
        for bad in (None, [1.0], 3):
            with pytest.raises(ArgumentError) as caught:
                call(bad, group)
            assert isinstance(caught.value, TypeError)
            assert type(bad).__name__ in str(caught.value), name
        for bad in ([0], 1, object()):
            with pytest.raises(ArgumentError) as caught:
                call(x, bad)
        with pytest.raises(GroupError, match="no process group of the name 'tensor'"):
            call(x, "tensor")
        with pytest.raises(CommError) as caught:
            call(x, None)
        assert isinstance(caught.value, ArgumentError if name.startswith("collective") else GroupError), name
        if not name.startswith("collective") and name != "all_to_all":
            assert "tritoncomm.initialize()" in str(caught.value), name
        with pytest.raises(GroupError, match="not a member"):
            call(x, dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(GroupError, match="group should not be None"):
        m.all_to_all(None, x)  # pyright: ignore[reportArgumentType]
    still_works(group)


@pytest.mark.ranks(2, 4)
def test_split_lists(group: ProcessGroup) -> None:
    x, world = torch.ones(4, 4), group.size()
    bad_tensors = (torch.ones(world, device="meta"), torch.ones(world), torch.tensor(2), torch.ones(1, world).long())
    for bad in (*bad_tensors, 4, [2.5] * world, [None] * world):
        for call in (
            lambda sizes: m.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=sizes),
            lambda sizes: m.reduce_scatter_to_sequence_parallel_region(x, group, sizes),
            lambda sizes: m.all_to_all(group, x, sizes, sizes),
            lambda sizes: c.all_gather(x, 0, group, sizes=sizes),
            lambda sizes: c.all_to_all(x, group, None, sizes),
        ):
            with pytest.raises(ArgumentError, match="split sizes"):
                call(bad)
    for bad in ([3, -1, *[1] * (world - 2)][:world], [4] * (world + 1), []):
        with pytest.raises(ShapeError):
            m.all_to_all(group, x, None, bad)
        with pytest.raises(ShapeError):
            m.all_to_all(group, x, bad, None)
    still_works(group)


def test_split_sizes_as_tensors(group: ProcessGroup) -> None:
    """A CPU tensor of integers is a list of integers."""
    x, world = torch.arange(4.0 * group.size()).view(-1, 2), group.size()
    even = torch.tensor([2] * world)
    assert torch.equal(m.all_to_all(group, x, even, even.int()), m.all_to_all(group, x))
    assert torch.equal(
        m.reduce_scatter_to_sequence_parallel_region(x, group, even),
        m.reduce_scatter_to_sequence_parallel_region(x, group, even.tolist()),
    )


def _quietly(call: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR is in beta
        return call()


def test_kinds_of_tensors(group: ProcessGroup) -> None:
    """What is not one strided block of memory of this rank is refused with a remedy."""
    dense = torch.ones(4, 4)
    mesh = DeviceMesh("cpu", dist.get_process_group_ranks(group), _init_backend=False)  # other ranks make no group
    layouts = torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr  # of three dims, too: a batch of matrices
    blocks = {torch.sparse_bsr: (2, 2)}
    sparse = [
        (_quietly(partial(x.to_sparse, layout=layout, blocksize=blocks.get(layout))).requires_grad_(wants), "to_dense")
        for layout in layouts
        for x in (dense, torch.ones(4, 4, 4))
        for wants in (False, True)
    ]
    cases = (
        *sparse,
        (DTensor.from_local(dense, mesh, [Replicate()]), "to_local"),
        (DTensor.from_local(dense, mesh, [Shard(0)]), "to_local"),
        *((each, "dequantize") for each in _quietly(partial(_quantized, dense))),
    )
    for name, call in CALLS.items():
        for x, remedy in cases:
            if name == "copy" and remedy != "to_local" and not x.requires_grad:
                continue  # nothing is sent, and the gradient of a sparse tensor may well be dense
            with pytest.raises(ArgumentError, match=remedy):
                call(x, group)
    nested = _quietly(lambda: torch.nested.nested_tensor([dense, dense]))
    for name, call in CALLS.items():
        if name != "copy":
            with pytest.raises(ArgumentError, match="nested"):
                call(nested, group)
    with pytest.raises(UnsupportedError, match="do not carry such tensors"):
        m.reduce_from_tensor_model_parallel_region(dense.short().to("meta"), group)
    stages = p2p.P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))
    for transformed in (lambda x: c.all_reduce(x, group), lambda x: stages.send_forward(x, False)):
        with pytest.raises(UnsupportedError, match="Batching rule not implemented"):
            torch.func.vmap(transformed)(dense)
    with pytest.raises(ArgumentError, match="to_dense"):
        c.split_reduce_scatter([dense, dense.to_sparse()], 0, group)
    with pytest.raises(ArgumentError, match="to_local"):
        m.all_to_all_hp2sp(DTensor.from_local(torch.ones(1, 0, 0, 5), mesh, [Shard(1)]), group)
    for x in _quietly(partial(_quantized, dense)):
        for call in (
            lambda x: c.split_reduce_scatter([x, x], 0, group),
            lambda x: c.split_reduce_scatter(x, 0, group, wire=torch.bfloat16),
            lambda x: m.reduce_scatter_dim(x, 0, group, sizes=[1, 3]),
            lambda x: m.reduce_scatter_dim(x, 1, group, sizes=[1, 3]),
            lambda x: m.all_gather_dim(x, 0, group, sizes=[4, 4]),
            lambda x: stages.send_forward(x, False),
            lambda x: stages.send_forward([dense, x], False),
            lambda x: check_replicas([x], group),
        ):
            with pytest.raises(ArgumentError, match="dequantize"):
                call(x)
    heads = _quietly(partial(_quantized, torch.ones(1, 4, 2, 8)))[0]
    with pytest.raises(ArgumentError, match="dequantize"):
        UlyssesAttention(group)(heads, heads, heads)
    still_works(group)


def _quantized(x: Tensor) -> list[Tensor]:
    """``x`` of one dim more than one, with one scale, and with one per row."""
    rows = torch.ones(len(x)), torch.zeros(len(x), dtype=torch.int64)
    return [torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), torch.quantize_per_channel(x, *rows, 0, torch.qint8)]


@pytest.mark.ranks(1)
def test_leaves_of_sparse_layouts_over_one_rank(group: ProcessGroup) -> None:
    """Nothing is sent, so that a leaf may come back as it is; autograd cannot view one of these layouts."""
    for layout, block in ((torch.sparse_csr, None), (torch.sparse_bsr, (2, 2))):
        x = _quietly(partial(torch.ones(4, 4).to_sparse, layout=layout, blocksize=block)).requires_grad_()
        for name, call in CALLS.items():
            if name.startswith("collective."):  # which have no graph
                assert torch.equal(call(x, group).to_dense(), torch.ones(4, 4))
            else:
                with pytest.raises(ArgumentError, match="to_dense"):
                    call(x, group)


def test_zero_dims_have_no_rows(group: ProcessGroup) -> None:
    x, sizes = torch.ones(()), [1] * group.size()
    for call in (
        lambda: m.gather_from_sequence_parallel_region(x, group=group),
        lambda: m.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=sizes),
        lambda: m.reduce_scatter_to_sequence_parallel_region(x, group),
        lambda: m.reduce_scatter_to_sequence_parallel_region(x, group, sizes),
        lambda: m._reduce_scatter_along_first_dim(x, group, sizes),
        lambda: m._gather_along_first_dim(x, group, sizes),
        lambda: m.scatter_to_sequence_parallel_region(x, group),
        lambda: m.all_to_all(group, x, sizes, sizes),
    ):
        with pytest.raises(ShapeError):
            call()
    still_works(group)


def test_a_destroyed_group(group: ProcessGroup) -> None:
    made = groups.make_group("test", dist.get_process_group_ranks(group), "gloo")
    x = torch.ones(4, 4, requires_grad=True)
    calls = {**CALLS, "split_reduce_scatter": lambda x, group: c.split_reduce_scatter(x, 0, group)}
    calls.pop("copy")
    y = m.copy_to_tensor_model_parallel_region(x, made)
    for call in calls.values():
        call(x.detach().clone(), made)
    dist.destroy_process_group(made)
    for name, call in calls.items():
        for requires_grad in (False, True):
            with pytest.raises(GroupError) as caught:
                call(x.detach().clone().requires_grad_(requires_grad), made)
            assert "destroyed" in str(caught.value), name
    with pytest.raises(GroupError, match="destroyed"):
        y.sum().backward()
    still_works(group)


def run_without_a_registry() -> None:
    """A group that was made past torch's registry, as fault-tolerant trainers do, is not a destroyed one."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    with force_single_rank_collectives():
        assert m.reduce_from_tensor_model_parallel_region(torch.ones(3), group).tolist() == [1.0] * 3


def test_a_group_past_the_registry() -> None:
    run_without_a_registry()


def test_unsupported(group: ProcessGroup) -> None:
    small = torch.ones(4, 4).to(torch.float8_e4m3fn)
    for call in (
        lambda: m.reduce_from_tensor_model_parallel_region(small, group),
        lambda: m.reduce_scatter_to_sequence_parallel_region(small, group),
        lambda: m.reduce_scatter_last_dim_to_tensor_parallel_region(small, group),
        lambda: c.all_reduce(small, group),
        lambda: c.split_reduce_scatter(small, 0, group),
        lambda: c.all_reduce(torch.ones(2), group, c.ReduceOp.BAND),
        lambda: c.all_reduce(torch.ones(2, dtype=torch.int32), group, c.ReduceOp.AVG),
    ):
        with pytest.raises(UnsupportedError, match="gloo"):
            call()
    with pytest.raises(GroupError, match="rank 7"):
        c.broadcast(torch.ones(2), 7, group)
    with pytest.raises(GroupError, match="rank 7"):
        c.reduce(torch.ones(2), 7, group)
    with pytest.raises(ArgumentError, match="dims"):
        c.split_reduce_scatter([torch.ones(2)], [0, 1], group)
    still_works(group)


def test_backward_with_a_wrong_gradient(group: ProcessGroup) -> None:
    """A wrong gradient shape cannot happen, a wrong dtype cannot either; a failing hook leaves the group usable."""
    x = torch.ones(4, 4, requires_grad=True)
    y = m.gather_from_sequence_parallel_region(x, group=group)
    with pytest.raises(RuntimeError):
        y.backward(torch.ones(3, 3))
    still_works(group)


def test_kinds() -> None:
    assert issubclass(ShapeError, ValueError)
    assert issubclass(GroupError, ValueError)
    assert issubclass(UnsupportedError, ValueError)
    assert issubclass(ArgumentError, TypeError)
    for kind in (ShapeError, GroupError, UnsupportedError, ArgumentError):
        assert issubclass(kind, CommError)


def test_own_rows(group: ProcessGroup) -> None:
    """Every rank sees that what it sends to itself is not what it expects from itself."""
    x, rank = torch.ones(4, 2), group.rank()
    received = [0, 4] if rank == 0 else [4, 0]
    for call in (lambda: m.all_to_all(group, x, received), lambda: c.all_to_all(x, group, received)):
        with pytest.raises(ShapeError, match="sends 2 rows to itself, but expects 0"):
            call()
    still_works(group)


def test_dims_of_nested_tensors(group: ProcessGroup) -> None:
    nested = _quietly(lambda: torch.nested.nested_tensor([torch.ones(2)]))
    for call in (
        lambda: m.all_gather_dim(nested, 2, group),
        lambda: m.split_dim(nested, -9, group),
        lambda: c.all_gather(nested, 5, group),
    ):
        with pytest.raises(ArgumentError, match="nested"):
            call()
    still_works(group)
