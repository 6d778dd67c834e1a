"""The direct launch against a kernel that records what it is given; no GPU takes part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tritoncomm_kernels
from triton.backends.nvidia import driver as nvidia
from tritoncomm_kernels import config, device_table, launch
from tritoncomm_kernels.launch import Launch


class RecordingKernel:
    """Stands for a ``triton.jit`` function: ``warmup`` compiles, ``kernel[grid]`` is the ordinary way."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.ordinary: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> SimpleNamespace:
        self.compiled.append((arguments, options))
        return SimpleNamespace(run=lambda *a: self.direct.append(a), function="function", packed_metadata="metadata")

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.ordinary.append((grid, arguments, options))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> RecordingKernel:
    """A device where everything for the direct way is there."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 70 + device)
    monkeypatch.setattr(launch, "_variants", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: SimpleNamespace(__enter__=None, __exit__=None))
    return RecordingKernel()


def make(kernel: Any, device: int = 0, arguments: tuple[int, ...] = (5, 6), block: int = 8) -> Launch:
    return Launch(kernel, device, 3, (torch.int64, torch.int64), arguments, {"VEC": 2, "BLOCK": block}, 4)


def test_arguments_come_in_signature_order(kernel: RecordingKernel) -> None:
    first, second = torch.zeros(4), torch.zeros(4)
    make(kernel)(first, second, 1.0)
    pointers = (first.data_ptr(), second.data_ptr())
    assert kernel.direct == [(3, 1, 1, 70, "function", "metadata", None, None, None, *pointers, 1.0, 5, 6, 2, 8)]
    (arguments, options), *others = kernel.compiled
    assert not others
    assert arguments == (torch.int64, torch.int64, 1.0, 5, 6)
    assert options == {"num_warps": 4, "enable_fp_fusion": False, "VEC": 2, "BLOCK": 8}


def test_sizes_share_a_variant_and_tiles_do_not(kernel: RecordingKernel) -> None:
    x = torch.zeros(4)
    for arguments in ((5, 6), (1, 16), (2**20, 7)):
        make(kernel, arguments=arguments)(x, x, 1.0)
    assert len(kernel.compiled) == 1
    make(kernel, block=16)(x, x, 1.0)
    make(kernel)(x, x, 3)  # the bits of an fp64 scale: another argument type
    assert len(kernel.compiled) == 3
    assert len(kernel.direct) == 5


class FakeStream:
    """Notes what it waits for."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited = number, []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


@pytest.fixture
def streams(kernel: RecordingKernel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device with streams and captures, whose memory is the host's; ``current`` and ``capturing`` may be set."""
    state = SimpleNamespace(current=FakeStream(1), capturing=False, kept=[], copies=[], events=[], slabs=[])
    ordinary = torch.Tensor.copy_

    def event() -> Any:
        made = SimpleNamespace(record=lambda stream: state.events.append((made, stream.cuda_stream)))
        return made

    def copied(into: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options == {"non_blocking": True}
        state.copies.append(x.view(torch.int32).tolist())
        return ordinary(into, x)

    def allocated(nbytes: int, device: int, stream: Any) -> tuple[torch.Tensor, torch.Tensor]:
        state.slabs.append((nbytes, device, stream.cuda_stream))
        return torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(device_table, "_slabs", {})
    monkeypatch.setattr(device_table, "_sources", [])
    monkeypatch.setattr(device_table, "_allocated", allocated)
    monkeypatch.setattr(launch, "_current_stream", lambda device: state.current.cuda_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: state.kept.append(stream.cuda_stream))
    device_table.table_on.cache_clear()
    yield state
    device_table.table_on.cache_clear()


def with_table(kernel: Any, table: tuple[int, ...], device: int = 0) -> Launch:
    return Launch(kernel, device, 3, (torch.int8, torch.int8), (5,), {"VEC": 2}, 4, table)


def test_a_table_is_copied_once_and_other_streams_wait_for_it(kernel: RecordingKernel, streams: Any) -> None:
    x, first, second = torch.zeros(4), streams.current, FakeStream(2)
    calls = [with_table(kernel, (0, 3, 8)) for _ in range(2)]
    for stream, call in ((first, calls[0]), (second, calls[0]), (second, calls[1]), (first, calls[1])):
        streams.current = stream
        call(x, x, 1.0)
    assert streams.copies == [[0, 3, 8]]
    assert streams.slabs == [(1 << 20, 0, 1)]
    assert [number for _, number in streams.events] == [1, 1], "of the slab, and of the copy"
    made, copied = (event for event, _ in streams.events)
    assert (first.waited, second.waited, streams.kept) == ([], [copied, made], [2])
    table = calls[0].table_for(1)
    assert {a[11] for a in kernel.direct} == {table.data_ptr()}
    assert kernel.compiled[0][0] == (torch.int8, torch.int8, torch.int32, 1.0, 5)
    assert calls[0].resident is calls[1].resident
    third = streams.current = FakeStream(3)
    with_table(kernel, (0, 4, 8))(x, x, 1.0)
    assert streams.copies == [[0, 3, 8], [0, 4, 8]]
    assert (third.waited, streams.kept, len(streams.slabs)) == ([made], [2, 3], 1), "a slab of another stream"


def test_a_capture_copies_a_table_itself_or_takes_the_one_that_is_there(kernel: RecordingKernel, streams: Any) -> None:
    x, call, other = torch.zeros(4), with_table(kernel, (0, 3, 8)), with_table(kernel, (0, 4, 8))
    call(x, x, 1.0)
    addresses = [call.table_for(1).data_ptr()]
    streams.current, streams.capturing = FakeStream(9), True
    for each in (call, other, other):
        each(x, x, 1.0)
        addresses.append(kernel.direct[-1][11])
    assert (streams.current.waited, streams.kept) == ([], []), "a capture must not wait for what is outside of it"
    assert streams.copies == [[0, 3, 8], [0, 4, 8], [0, 4, 8]], "every use has a copy in the graph"
    assert addresses[0] == addresses[1]
    assert len(set(addresses)) == 3
    streams.capturing = False
    call(x, x, 1.0)
    assert streams.kept == [9]
    other(x, x, 1.0)
    assert kernel.direct[-1][11] not in addresses, "what a graph copied has not happened outside of it"
    assert len(streams.copies) == 4


def test_a_profiler_gets_the_ordinary_launch(kernel: RecordingKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.is_direct(0)
    hook = SimpleNamespace(calls=[print])
    runtime = SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=runtime))
    assert not launch.is_direct(0)


def test_the_ordinary_launch_where_the_direct_one_is_not_known(
    kernel: RecordingKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not launch.is_direct(1), "another current device"
    assert not launch.is_direct(-1), "CPU tensors"
    monkeypatch.setattr(launch, "CompiledKernel", OtherTriton)
    launch._known_calls.cache_clear()
    try:
        assert not launch.is_direct(0)
        assert launch.launch_kind() == "ordinary"
    finally:
        launch._known_calls.cache_clear()


class OtherTriton:
    """Calls a compiled kernel in a way of its own, whatever its version."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.run(grid, *arguments)

    def run(self, *arguments: Any) -> None:
        raise AssertionError


class CudaLauncher:
    """A launcher of the usual name that hands other arguments to C."""

    global_scratch_size, profile_scratch_size = 0, 0
    launch_cooperative_grid, launch_pdl, arg_annotations, kernel_signature = False, False, (), ()
    launch = staticmethod(print)

    def __call__(self, *arguments: Any) -> None:
        raise AssertionError


def test_only_a_launcher_whose_code_is_known_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one of the same name is called as Triton itself calls it."""
    known = type("CudaLauncher", (CudaLauncher,), {"__call__": nvidia.CudaLauncher.__call__})()
    other = CudaLauncher()
    for run, called in ((known, known.launch), (other, other)):
        variant = launch._entry(SimpleNamespace(run=run, function="function", packed_metadata="metadata"))
        assert variant is not None
        assert variant.run is called
        assert variant.fixed[:3] == (("function", False, False) if run is known else ("function", "metadata", None))
    monkeypatch.setattr(launch.inspect, "getsource", lambda function: (_ for _ in ()).throw(OSError))
    launch._source_hash.cache_clear()
    variant = launch._entry(SimpleNamespace(run=known, function="function", packed_metadata="metadata"))
    launch._source_hash.cache_clear()
    assert variant is not None
    assert variant.run is known, "a build without sources"


def test_the_direct_launch_knows_this_triton() -> None:
    """A newer one changes how kernels are called: look at both sources before its hash is added."""
    assert launch.launch_kind() == "C"


def test_tiles_follow_the_warps_of_the_device(kernel: RecordingKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 threads have twice the bytes of 32 for as many loads each; the build of torch says nothing about them."""
    config.lanes_of.cache_clear()
    config.device_key.cache_clear()
    tiles = []
    for device, warp_size in enumerate((32, 64)):
        gpu = SimpleNamespace(name="GPU X", multi_processor_count=8, warp_size=warp_size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, gpu=gpu: gpu)
        tiles.append(launch.tile_on(device, "pack", 16, 4096, 8192))
    config.lanes_of.cache_clear()
    config.device_key.cache_clear()
    assert [tile.block_rows * tile.block_cols for tile in tiles] == [8192, 16384]


def test_hip_launches_fewer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grid times its threads; elsewhere a grid alone is limited."""
    kernel = SimpleNamespace(__name__="_copy_kernel")

    def made(grid: int) -> Launch:
        return Launch(kernel, -1, grid, (torch.int8, torch.int8), (5,), {}, 4)

    assert made(2**24).grid == 2**24
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(launch, "lanes_of", lambda device: 64)
    assert made(2**24 - 1).grid == 2**24 - 1
    with pytest.raises(launch.TooLargeError, match="_copy_kernel: 4294967296 threads are more than a launch of HIP"):
        made(2**24)


def test_values_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="32-bit"):
        launch.fits("pack", (2**31,))
    launch.fits("pack", (2**30,))


def test_alignment_chooses_the_unit() -> None:
    """One element further the same rows are moved in 2-byte units, by another plan."""
    from tritoncomm_kernels.copy import _plan

    shapes = ((4, 64), (64, 1), (2, 4, 32), (128, 32, 1))
    for alignment, vec, kind in ((0, 2, torch.int64), (8, 1, torch.int64), (4, 1, torch.int32), (2, 1, torch.int16)):
        plan, moved, wide = _plan(
            "pack", -1, torch.bfloat16, torch.bfloat16, alignment, *shapes, None, False, False, None
        )
        assert plan is not None
        assert (plan.constants["VEC"], plan.types) == (vec, (kind, kind))
        assert (moved, wide) == (2 * 4 * 64 * 2, None)


def test_without_interpreter_cpu_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        tritoncomm_kernels.pack(torch.zeros(2, 4), torch.zeros(2, 2, 2))
