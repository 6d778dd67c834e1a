"""P2PCommunicator: every method in every mode, values exact; what it returns, counts and refuses."""

import itertools
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import bits
from communicators import MODES, communicator, run_methods, same
from cuda_groups import cuda_mesh
from disagreements import synchronise
from pool import Pool
from stage_cases import SHAPES, made, strided
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm import ParallelMode, groups, p2p, record
from tritoncomm.core import ops
from tritoncomm.errors import ArgumentError, GroupError, MismatchError, ShapeError, UnsupportedError
from tritoncomm.p2p import P2PCommunicator, header, is_single_shape, message
from tritoncomm.p2p.hop import exchange, real_device
from tritoncomm.p2p.message import Specs
from tritoncomm.p2p.neighbours import Neighbours

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "bool", "complex64", "float8_e4m3fn")


@pytest.mark.ranks(2, *(pytest.param(world, marks=pytest.mark.slow) for world in (4, (1, 3))))
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_method(group: ProcessGroup, mode: str, checked: bool) -> None:
    with p2p.check(checked):
        run_methods(group, mode, DTYPES if group.size() == 2 and not checked else DTYPES[:2])


@pytest.mark.ranks(4)
def test_memory_is_allocated_in_the_callers_thread(group: ProcessGroup) -> None:
    """Both neighbours send headers; memory is allocated in the caller's thread."""
    stage, stages = group.rank(), group.size()
    allocations, allocate = [], message.allocate

    def recorded(*args: Any) -> Any:
        allocations.append((threading.get_ident(), torch.is_inference_mode_enabled()))
        return allocate(*args)

    c = communicator(group, variable_seq_lengths=True)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(message, "allocate", recorded)
        x, dx = c.send_forward_backward_recv_forward_backward(
            torch.full((2, 1 + stage), 1.0), torch.full((1 + stage, 2), 2.0), True, True, [1]
        )
        assert allocations == [(threading.get_ident(), True)] * 2
        assert (x.shape, dx.shape) == ((2, 1 + (stage - 1) % stages), (1 + (stage + 1) % stages, 2))
        assert (x.is_inference(), dx.is_inference()) == (True, True)


def two_pipelines() -> ProcessGroup | None:
    """Ranks 0, 2 and ranks 1, 3 of a job of eight; this rank's one."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3))}
    return next((made[ranks] for ranks in made if dist.get_rank() in ranks), None)


@pytest.mark.ranks(8)
def test_two_pipelines_at_the_same_time(group: ProcessGroup) -> None:
    mine = two_pipelines()
    for mode in MODES if mine is not None else ():
        assert mine is not None
        run_methods(mine, mode, DTYPES[dist.get_rank() % 2 :][:1])


def test_staging_by_kernel_has_the_same_bits(group: ProcessGroup) -> None:
    with ops.path("triton"), record.recording() as counted:
        run_methods(group, "batched", ("float32", "bfloat16"))
    assert any(path == "triton" for _, path in counted)


def run_single_rank(group: ProcessGroup) -> None:
    c = communicator(group)
    assert (c.is_pp_first_stage, c.is_pp_last_stage, c.total_stages, c.current_stage) == (True, True, 1, 0)
    assert c.recv_forward((3,), True) is None
    c.send_forward(torch.ones(3), True)
    same(c.send_forward_recv_forward(torch.ones(3), True, (3,)), torch.ones(3), "ring of one")


def run_attributes(group: ProcessGroup) -> None:
    ranks, stage, stages = dist.get_process_group_ranks(group), group.rank(), group.size()
    c = communicator(group, virtual_pipeline_model_parallel_size=2)
    assert (c.prev_rank, c.next_rank) == (ranks[stage - 1], ranks[(stage + 1) % stages])
    assert (c.pp_group, c.virtual_pipeline_model_parallel_size) == (group, 2)
    assert (c.is_pp_first_stage, c.is_pp_last_stage) == (stage == 0, stage == stages - 1)
    assert (c.total_stages, c.current_stage) == (stages, stage)
    shape = (2, stage + 1, 1, 3)
    shapes = c._communicate_shapes(torch.ones(shape), torch.ones(shape[:2]), True, True)
    before, after = (stage - 1) % stages, (stage + 1) % stages
    assert shapes == ([2, before + 1, 1, 3], [2, after + 1])
    assert c._communicate_shapes(None, None, False, False) == ([0, 0, 0], [0, 0, 0])
    nothing = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False, "recv_next": False}
    assert c._communicate(**nothing, tensor_shape=None) == (None, None, [])  # type: ignore[arg-type]
    single = communicator(group, batch_p2p_comm=False)
    assert single._communicate(**nothing, tensor_shape=None) == (None, None, {})  # type: ignore[arg-type]
    ring = nothing | {"tensor_send_next": torch.full((2,), float(stage)), "recv_prev": True}
    x, none, handles = c._communicate(**ring, tensor_shape=[2])  # type: ignore[arg-type]
    assert (none, handles) == (None, None)
    assert x is not None
    assert x.tolist() == [before] * 2
    x, _, handles = single._communicate(**ring, tensor_shape=[2], wait_on_reqs=False)  # type: ignore[arg-type]
    assert list(handles) == (["send_next", "recv_prev"] if stage % 2 == 0 else ["recv_prev", "send_next"])
    for handle in handles.values():
        handle.wait()
        assert handle.is_completed()
    assert x is not None
    assert x.tolist() == [before] * 2


def test_attributes_and_return_forms(pool: Pool) -> None:
    pool.run(run_single_rank, world=1)
    for world in (2, 4, (1, 3)):
        pool.run(run_attributes, world=world)


def test_refusals_leave_the_group_usable(group: ProcessGroup) -> None:
    c, x = communicator(group), torch.ones(2)
    no_dtype = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=None))
    with pytest.raises(RuntimeError, match="pipeline_dtype must be provided if recv_prev is True"):
        no_dtype.recv_forward((2,), False)
    with pytest.raises(RuntimeError, match="dtype must be provided if recv_next is True"):
        no_dtype.recv_backward((2,), False)
    for varying in (False, True):
        without_shape = communicator(group, variable_seq_lengths=varying)
        with pytest.raises(RuntimeError, match="tensor_shape must be specified if recv_prev is True"):
            without_shape.send_forward_recv_forward(x, True, None)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="batch_p2p_comm=False"):
        c.send_forward_recv_forward(x, True, [2], overlap_p2p_comm=True)
    with pytest.raises(UnsupportedError, match="use_ring_exchange_p2p"):
        communicator(group, use_ring_exchange_p2p=True).send_forward(x, False)
    with pytest.raises(ShapeError, match="2 tensors to send, but 1 shapes"):
        c.send_forward_recv_backward([x, x], [(2,)], False)
    with pytest.raises(TypeError):
        c.send_forward_recv_forward("x", True, [2])  # type: ignore[arg-type]
    with pytest.raises(GroupError, match="pp_group"):
        P2PCommunicator(None, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="config must have attributes; of a dict"):
        P2PCommunicator(group, {"pipeline_dtype": torch.float32})
    with pytest.raises(GroupError, match="rank 77"):
        Neighbours.of(group, prev=77)
    same(c.send_forward_recv_forward(x, True, [2]), x, "the group still works")


WAYS: list[dict[str, Any]] = [{}, {"batch_p2p_comm": False}, {"variable_seq_lengths": True}]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("mode", WAYS, ids=["batched", "individual", "varying"])
@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
def test_floating_point_arrives_in_the_dtype_of_the_pipeline(
    group: ProcessGroup, mode: dict[str, Any], checked: bool
) -> None:
    """Cast by the sender, narrower and wider, contiguous or not, one tensor and several, by every method."""
    x = torch.arange(12.0).view(3, 4) / 8
    for sent, received in itertools.permutations((torch.bfloat16, torch.float16, torch.float32, torch.float64), 2):
        c = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=received, **mode))
        for y in (x.to(sent), x.t().contiguous().t().to(sent), x.to(sent)[:, ::2]):
            shape, wanted = tuple(y.shape), y.to(received)
            what = sent, received, y.stride()
            with p2p.check(checked), tritoncomm.recording() as record:
                got = [
                    c.send_forward_recv_forward(y, True, shape),
                    c.send_backward_recv_backward(y, True, shape),
                    *c.send_forward_backward_recv_forward_backward(y, y, True, True, shape),
                    *c._communicate(
                        tensor_send_next=y, tensor_send_prev=y, recv_prev=True, recv_next=True, tensor_shape=shape
                    )[:2],
                    *c.send_forward_recv_forward([y, wanted, y], True, [shape] * 3),
                ]
                if mode.get("batch_p2p_comm") is False:
                    tensor, handles = c.send_forward_recv_forward(y, True, shape, overlap_p2p_comm=True)
                    for handle in handles.values():
                        handle.wait()
                    got.append(tensor)
            assert all(each.dtype is received and each.requires_grad for each in got), what
            assert all(torch.equal(each, wanted) for each in got), what
            assert sum(count.bytes_copied for count in record.values()) > 0, what
        for wrong in (x.int(), x > 1, torch.complex(x, x)):
            for each in (wrong, [x.to(received), wrong]):
                with pytest.raises(ArgumentError, match=f"for a receiver of {received}".replace("torch.", "")):
                    c.send_forward(each, False)


class Timers:
    """Megatron's timers, as far as the communicator knows them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return SimpleNamespace(
            start=lambda: self.seen.append((name, "start", log_level)),
            stop=lambda: self.seen.append((name, "stop", log_level)),
        )


def test_timers_also_stop_on_errors(group: ProcessGroup) -> None:
    timers, x, other = Timers(), torch.ones(2), 1 - group.rank()
    c = communicator(group, timers=timers)
    names = []

    def timed(name: str) -> None:
        names.extend([(name, "start", 2), (name, "stop", None)])
        assert timers.seen == names, name

    if other:
        c.send_forward(x, False)
        timed("forward-send")
        c.recv_backward((2,), False)
        timed("backward-recv")
        c.send_forward_recv_backward(x, (2,), False)
        timed("forward-send-backward-recv")
    else:
        c.recv_forward((2,), False)
        timed("forward-recv")
        c.send_backward(x, False)
        timed("backward-send")
        c.send_backward_recv_forward(x, (2,), False)
        timed("backward-send-forward-recv")
    c.send_forward_recv_forward(x, True, [2])
    timed("forward-send-forward-recv")
    c.send_backward_recv_backward(x, True, [2])
    timed("backward-send-backward-recv")
    c.send_forward_backward_recv_forward_backward(x, x, True, True, [2])
    timed("forward-backward-send-forward-backward-recv")
    c.recv_forward((2,), True)
    assert timers.seen == names, "an edge stage has nothing to time"
    with pytest.raises(RuntimeError):
        c.send_forward_recv_forward(x, True, None)  # type: ignore[arg-type]
    timed("forward-send-forward-recv")


@pytest.mark.ranks(2, 4, (1, 3))
def test_raw_transfers_and_their_order(group: ProcessGroup) -> None:
    ranks, stage, stages = dist.get_process_group_ranks(group), group.rank(), group.size()
    before, after = (stage - 1) % stages, (stage + 1) % stages
    for call in (p2p._batched_p2p_ops, p2p._p2p_ops):
        got = torch.empty(3), torch.empty(3)
        handles = call(
            tensor_send_prev=torch.full((3,), -1.0 - stage),
            tensor_recv_prev=got[0],
            tensor_send_next=strided(torch.full((3,), float(stage))),
            tensor_recv_next=got[1],
            group=group,
            prev_pipeline_rank=ranks[before],
            next_pipeline_rank=ranks[after],
        )
        works = list(handles.values()) if isinstance(handles, dict) else handles
        assert len(works) == 4
        for work in works:
            work.wait()
        assert got[0].tolist() == [before] * 3
        assert got[1].tolist() == [-1.0 - after] * 3
        none = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"))
        assert not call(**none, group=group, prev_pipeline_rank=ranks[before], next_pipeline_rank=ranks[after])  # type: ignore[arg-type]
    order = [direction.key for direction in Neighbours.of(group).batch]
    if stages == 2:
        assert order == ["send_next", "recv_prev", "send_prev", "recv_next"], "activations first"
    else:
        assert order == ["send_prev", "recv_prev", "send_next", "recv_next"]


def test_a_send_outlives_its_handle_and_its_source(group: ProcessGroup) -> None:
    c, stage, count = communicator(group, batch_p2p_comm=False), group.rank(), 70
    if stage == 0:
        for i in range(count):
            x = torch.full((1000,), float(i))
            c._communicate(
                tensor_send_next=x, tensor_send_prev=None, recv_prev=False, recv_next=False,
                tensor_shape=[1000], wait_on_reqs=False,
            )  # fmt: skip
            x.data = torch.empty(1)
    else:
        for i in range(count):
            x = c.recv_forward((1000,), False)
            assert x.detach().eq(i).all(), i


@pytest.mark.parametrize(
    ("x", "single"),
    [
        (torch.Size([2, 3]), True), (torch.Size([]), True), ([2, 3], True), ((4,), True), ([True], True),
        ((), False), ([], False), (None, False), (3, False), (range(3), False), ([(2, 3)], False), ("ab", False),
    ],
    ids=str,
)  # fmt: skip
def test_is_single_shape(x: Any, single: bool) -> None:
    assert is_single_shape(x) is single


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_messages_hold_their_tensors(path: str) -> None:
    tensors = [strided(made(i, shape, dtype)) for i, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES))]
    with ops.path(path):
        packed = message.pack(tensors, "f")
    assert packed is not None
    wire, slots, taken, copied = packed
    arrived, received = message.allocate(message.specs_of(tensors), "cpu")
    assert wire.nbytes == arrived.nbytes
    arrived.copy_(wire)
    for x, sent, got in zip(tensors, slots, received, strict=True):
        assert torch.equal(bits(sent), bits(x))
        assert torch.equal(bits(got), bits(x))
        assert got._base is None
        assert got.numel() == 0 or got.data_ptr() % 16 == arrived.data_ptr() % 16
    assert taken == path
    assert copied == 2 * sum(x.nbytes for x in tensors)
    one = torch.ones(3, 4)
    for form in (one, [one]):
        single = message.pack(form, "f")
        assert single is not None
        assert single[2:] == ("view", 0)
        assert single[0].data_ptr() == one.data_ptr()
    assert message.pack([], "f") is None


def test_headers_hold_any_shape_and_dtype() -> None:
    for count, dims in itertools.product((1, 2, 9), range(7)):
        specs = tuple((tuple(range(dims)), getattr(torch, DTYPES[i % len(DTYPES)])) for i in range(count))
        words = header.encode(specs).tolist()
        assert header.length(words) == 3 + count * (2 + dims)
        assert len(words) == max(header.WORDS, header.length(words))
        assert header.decode(words) == specs


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ([((2,), torch.qint8)], r"cannot announce tensors of torch\.qint8"),
        ([((1,) * 65, torch.float32)], "a tensor of 65 dims, only up to 64"),
        ([((0, 1 << 62), torch.float32)], r"the shape \[0, 4611686018427387904\]"),
        ([((2,), torch.int8)] * (1 << 19), "cannot announce 524288 tensors"),
    ],
    ids=["dtype", "dims", "size", "count"],
)
def test_what_no_header_holds_is_refused_by_its_sender(contents: list[Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        header.encode(tuple(contents))


@pytest.mark.parametrize(
    ("at", "word", "message"),
    [
        (2, 2, "cannot announce 2 tensors"),
        (3, 999, "does not know: number 999"),
        (4, 0, "describes 1 tensors in 5"),
        (4, 2, "2 dims for tensor 0, more than it has words for"),
        (5, -1, r"the shape \[-1\] for tensor 0, which no tensor has"),
        (5, 1 << 62, "which no tensor has"),
        (6, 1, "non-zero padding"),
    ],
)
def test_a_changed_word_of_a_header_is_refused_by_name(at: int, word: int, message: str) -> None:
    words = header.encode((((2,), torch.float32),)).tolist()
    words[at] = word
    with pytest.raises(MismatchError, match=message):
        header.decode(words)


def run_strange_headers(group: ProcessGroup) -> list[str]:
    """What a receiver makes of a sender that sends something else than a header.

    Without check mode, which refuses a channel after the first of these.
    """
    c, seen = communicator(group, variable_seq_lengths=True), []
    strange = [torch.arange(32), torch.full((32,), -1), header.encode(()).clone()]
    strange[2][1] = 1 << 40
    for words in strange:
        if group.rank() == 0:
            group.send([words], 1, 0).wait()
            continue
        with pytest.raises(MismatchError) as caught:
            c.recv_forward((2,), False)
        seen.append(str(caught.value))
    large = (((1 << 20, 1 << 10), torch.float64),)
    if group.rank() == 0:
        group.send([header.encode(large)], 1, 0).wait()
        group.send([header.encode(())], 1, 0).wait()
    else:
        with pytest.raises(MismatchError) as caught:
            c.recv_forward((2,), False)
        seen.append(str(caught.value))
        with pytest.raises(MismatchError, match=r"_communicate_shapes: .* expects one tensor, but rank 0 sent nothing"):
            c._communicate_shapes(None, None, True, False)
    synchronise(group)
    return seen


def test_a_receiver_names_what_is_no_header(pool: Pool) -> None:
    seen = pool.run(run_strange_headers)[1]
    for message_, words in zip(
        seen,
        (
            "no header came first",
            "no header came first",
            "a header of 1099511627776 words arrived",
            "rank 0 sent [1048576, 1024] float64; 8589934592 bytes are not received",
        ),
        strict=True,
    ):
        assert message_.startswith("recv_forward: stage 1 of 2 (rank 1)"), message_
        assert words in message_


def exchange_headers(c: P2PCommunicator, contents: dict[str, Specs], receives: tuple[str, ...]) -> dict[str, Specs]:
    """Only the headers, without messages."""
    posted: list[Any] = []
    cpu = torch.device("cpu")
    received = dict(header.exchange_headers(c._neighbours, "headers", contents, receives, cpu, posted))
    for each in posted:
        each.wait()
    return received


@pytest.mark.ranks(2, 4)
def test_headers_over_the_device(group: ProcessGroup) -> None:
    """Headers where no group carries CPU tensors: in one batch with the device's tensors."""
    c, stage, stages = communicator(group), group.rank(), group.size()
    ends = {"recv_prev": (stage - 1) % stages, "recv_next": (stage + 1) % stages}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header, "_cpu_link", lambda neighbours, device, keys: (neighbours, ()))
        for count in (1, 9):
            sends = {
                "send_next": [torch.ones(1, i, stage) for i in range(count)],
                "send_prev": [torch.ones(stage, i) for i in range(count)],
            }
            contents = {key: message.specs_of(tensors) for key, tensors in sends.items()}
            received = exchange_headers(c, contents, tuple(ends))
            shapes = {key: [shape for shape, _ in specs] for key, specs in received.items()}
            assert shapes["recv_prev"] == [(1, i, ends["recv_prev"]) for i in range(count)]
            assert shapes["recv_next"] == [(ends["recv_next"], i) for i in range(count)]
        if stages > 2:
            return
        if stage == 0:
            group.send([torch.arange(32)], 1, 0).wait()
        else:
            with pytest.raises(MismatchError, match=r"stage 1 of 2 .* cannot read the header from rank 0: no header"):
                exchange_headers(c, {}, ("recv_prev",))


@pytest.mark.ranks(8)
def test_headers_over_the_cpu_group_of_a_pipeline(group: ProcessGroup) -> None:
    """Without groups for CPU tensors neighbours on the ring use the pipeline's CPU group, made at the first header."""
    tritoncomm.initialize(mesh=cuda_mesh((4, 2), ("pp", "tp")), timeout=30)
    cuda, entry = torch.device("cuda"), groups.groups[ParallelMode.PIPELINE]
    ring, rank, ranks = Neighbours.of(entry.group), dist.get_rank(), entry.ranks
    stage = ranks.index(rank)
    far = Neighbours.of(entry.group, None, ranks[(stage + 2) % 4], dist.group.WORLD)
    assert header._cpu_link(far, cuda, ["send_next"]) == (far, ())
    assert header._cpu_link(Neighbours.of(group), cuda, ["send_next"])[1] == ["send_next"], "a group that carries both"
    assert entry.existing == [entry.group], "one far neighbour is served by the two of them"
    posted: list[Any] = []
    contents = {
        "send_next": message.specs_of([torch.ones(1, stage)]),
        "send_prev": message.specs_of([torch.ones(stage)]),
    }
    received = dict(header.exchange_headers(ring, "headers", contents, ("recv_prev", "recv_next"), cuda, posted))
    for each in posted:
        each.wait()
    assert received["recv_prev"][0][0] == (1, (stage - 1) % 4)
    assert received["recv_next"][0][0] == ((stage + 1) % 4,)
    assert entry.existing == [entry.group, entry.cpu_group]
    link, near = header._cpu_link(far, cuda, ["send_next", "recv_prev"])
    assert (link.group(), list(near)) == (entry.cpu_group, ["recv_prev"]), (
        "each transfer for itself, as its other end does"
    )
    tritoncomm.destroy()


def test_headers_that_need_two_messages(group: ProcessGroup) -> None:
    c, stage, other = communicator(group, variable_seq_lengths=True), group.rank(), 1 - group.rank()
    for count in (1, 9, 2):
        out = [made(stage, (1, 2, 1, 3, i)) for i in range(1, count + 1)]
        back = [made(stage, (i,), sign=3) for i in range(1, count + 1)]
        outgoing = {"send_next": out, "send_prev": back}
        received, _ = c._exchange("hop", outgoing, ("recv_prev", "recv_next"), [()] * count)
        for i, (x, dx) in enumerate(zip(received["recv_prev"], received["recv_next"], strict=True), 1):
            same(x, made(other, (1, 2, 1, 3, i)), count)
            same(dx, made(other, (i,), sign=3), count)


def test_no_memory(group: ProcessGroup) -> None:
    """Nothing to send, or no memory to receive into: on all ranks, and before anything is sent."""
    rank, world = group.rank(), group.size()
    x, meta = torch.full((4,), float(rank)), torch.ones(4, device="meta")
    communicator = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))
    ring = communicator.send_forward_recv_forward
    for sent in (meta, [meta], [meta, meta]):
        with pytest.raises(ArgumentError, match="a meta tensor has no data to send"):
            ring(sent, True, [4] if sent is meta else [[4]] * len(sent))
    with warnings.catch_warnings(action="ignore"):  # of a prototype
        nested = torch.nested.as_nested_tensor([torch.ones(2, 2)])  # contiguous and strided, in torch's words
    single = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False))
    for each, sent in itertools.product(
        (ring, single.send_forward_recv_forward, single.send_backward_recv_backward),
        (nested, [nested], [x, nested], torch.eye(4).to_sparse()),
    ):
        with pytest.raises(ArgumentError, match="expected a strided tensor"):
            each(sent, True, [[4], [4]] if isinstance(sent, list) and len(sent) > 1 else [4])
        again = each(x, True, [4])  # what was posted before a refusal would take this rank's message
        assert torch.equal(again.detach(), torch.full((4,), float((rank - 1) % world)))
    for shape in ((2**40, 2**40), (2**62,), [(4,), (2**40, 2**40)]):
        with pytest.raises(ShapeError, match="no memory"):
            ring(x if isinstance(shape, tuple) else [x, x], True, shape)
    neighbours = Neighbours.of(group)
    for device, words in (("meta", "no memory to receive into"), ("gpu9", "is no device"), (3.5, "is no device")):
        with pytest.raises(ArgumentError, match=words):
            real_device(device, "f")
    for dtype in ("float32", [torch.float32], 3):
        with pytest.raises(ArgumentError, match=r"must be a torch\.dtype"):
            exchange(neighbours, "f", {"send_next": x}, {"recv_prev": (4,)}, dtype)
    assert torch.equal(ring(x, True, [4]).detach(), torch.full((4,), float((rank - 1) % world)))
