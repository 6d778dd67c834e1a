"""CUDA on the CPU, for tests that ask for GPUs: devices become the CPU, streams run at once, NCCL becomes Gloo.

A test file stays as it is. Torch itself, and packages that decide by the hardware, see that there is no GPU.
"""

import contextlib
import datetime
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["install"]

TIMEOUT = datetime.timedelta(seconds=30)  # of groups, so that a rank that failed does not hold the others for long
SEE_NO_GPU = {"torch", "triton", "tritoncomm", "tritoncomm_kernels", "transformers", "accelerate", "deepspeed"}
FACTORIES = (
    "zeros", "ones", "empty", "tensor", "arange", "full", "randn", "rand", "randint", "eye", "linspace", "as_tensor",
    "zeros_like", "ones_like", "empty_like", "full_like", "randn_like", "rand_like", "randperm", "empty_strided",
)  # fmt: skip
METHODS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")
WITHOUT_RESULT = (
    "set_device", "synchronize", "empty_cache", "init", "_lazy_init", "reset_peak_memory_stats", "manual_seed_all",
    "reset_max_memory_allocated", "ipc_collect",
)  # fmt: skip


class _Stream:
    """A stream, or an event, of a device that runs everything at once."""

    cuda_stream, device = 0, torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, *args: Any) -> "_Stream":
        return _Stream()

    def wait(self, *args: Any) -> None:
        pass

    wait_event = wait_stream = synchronize = record = wait


def install(gpus: int) -> None:
    """Let this process believe in ``gpus`` GPUs."""
    import torch._dynamo  # its table of torch's functions has to be made before they are replaced
    import torch.distributed.optim
    import torch.nn.functional

    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    _devices(gpus)
    _tensors()
    _groups()


def _place(device: Any) -> Any:
    """The CPU for a GPU, whatever names it."""
    if isinstance(device, bool):
        return device
    is_gpu = isinstance(device, int) or str(device).startswith("cuda")
    return torch.device("cpu") if is_gpu else device


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its argument ``device`` on the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _place(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _moved(to: Callable[..., Any]) -> Callable[..., Any]:
    """``to`` of tensors or modules, whose first argument may be a device too."""
    return lambda self, *args, **kwargs: _on_cpu(to)(self, *map(_unless_number, args), **kwargs)


def _unless_number(value: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else _place(value)


def _devices(gpus: int) -> None:
    """Replace what ``torch.cuda`` says of devices, streams, memory and random numbers."""
    cuda: Any = torch.cuda

    def sees_none() -> bool:
        return sys._getframe(2).f_globals.get("__name__", "").split(".")[0] in SEE_NO_GPU

    cuda.is_available = lambda: not sees_none()
    cuda.device_count = lambda: 0 if sees_none() else gpus
    cuda.current_device = lambda: 0
    for name in WITHOUT_RESULT:
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.memory.empty_cache = cuda.empty_cache
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.mem_get_info = lambda *args, **kwargs: (1 << 34, 1 << 35)
    cuda.Stream = cuda.Event = cuda.ExternalStream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.get_device_name = lambda *args: "cpu"
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(
        major=9, minor=0, name="cpu", multi_processor_count=1, total_memory=1 << 35
    )
    cuda.default_generators = (torch.default_generator,) * gpus
    nothing = {name: lambda *args, **kwargs: None for name in ("range_push", "range_pop", "mark")}
    cuda.nvtx = types.SimpleNamespace(**nothing, range=lambda *args, **kwargs: contextlib.nullcontext())
    for name in ("FloatTensor", "LongTensor", "IntTensor", "HalfTensor", "DoubleTensor", "BoolTensor", "ByteTensor"):
        setattr(cuda, name, getattr(torch, name))


def _tensors() -> None:
    """Make and move tensors on the CPU."""
    space: Any = torch
    for name in FACTORIES:
        setattr(space, name, _on_cpu(getattr(space, name)))
    tensor: Any = Tensor
    for name in METHODS:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.to = _moved(tensor.to)
    tensor.cuda = tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args: None
    module: Any = torch.nn.Module
    module.to = _moved(module.to)
    module.cuda = lambda self, *args, **kwargs: self
    base = torch.Generator

    class Generator(base):
        def __new__(cls, device: Any = "cpu") -> Any:
            return base.__new__(cls, device=_place(device))

    space.Generator = Generator
    space.set_default_device = lambda device: None
    load = space.load

    def load_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if not callable(kwargs.get("map_location")):
            kwargs["map_location"] = _place(kwargs.get("map_location"))
        return load(*args, **kwargs)

    space.load = load_on_cpu


def _groups() -> None:
    """Make process groups of Gloo, with a short timeout."""
    first, group, barrier, mesh = dist.init_process_group, dist.new_group, dist.barrier, dist.init_device_mesh

    def backend_of(name: Any) -> Any:
        return "gloo" if name is None or "nccl" in str(name) else name

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
        if "[localhost]" in str(kwargs.get("init_method")):  # which newer Pythons take for an address
            kwargs["init_method"] = kwargs["init_method"].replace("[localhost]", "localhost")
        return first(backend_of(backend), *args, **{**kwargs, "timeout": TIMEOUT})

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device_id", "pg_options")}
        return group(ranks, TIMEOUT, backend_of(backend), None, **kwargs)

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    for space in (dist, dist.distributed_c10d):
        space.init_process_group, space.new_group = init_process_group, new_group
        space.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    for space in (dist, dist.device_mesh):
        space.init_device_mesh = init_device_mesh
    exchange = dist.all_to_all_single

    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        sizes = (None if each is None else list(map(int, each)) for each in (output_split_sizes, input_split_sizes))
        return exchange(output, input, *sizes, *args, **kwargs)  # torch refuses numpy's, which Megatron passes

    dist.all_to_all_single = all_to_all_single
