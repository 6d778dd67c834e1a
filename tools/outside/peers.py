"""Peers in this process: imported with CUDA on the CPU, and with ours in their place."""

import contextlib
import copy
import dataclasses
import importlib
import importlib.machinery
import inspect
import math
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import multiprocessing

from outside import shim

__all__ = [
    "colossalai",
    "colossalai_registered",
    "deepspeed",
    "megatron",
    "megatron_resharding",
    "nothing",
    "patched",
    "with_buffer",
    "yunchang",
]

GPUS = 8


def nothing(is_ours: bool) -> None:
    """Import no peer."""


def megatron(is_ours: bool) -> None:
    """Import Megatron-core; layers of Transformer Engine, which needs CUDA, become Megatron's own."""
    if not hasattr(typing, "override"):  # Python 3.11; Megatron's releases declare 3.12
        typing.override = lambda function: function  # pyright: ignore
    # Gloo connects two ranks when they first meet: Megatron makes dozens of groups for a test.
    os.environ.update(TORCH_GLOO_LAZY_INIT="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    shim.install(GPUS)
    core: Any = {name: importlib.import_module(f"megatron.core.{name}") for name in (
        "parallel_state", "tensor_parallel", "tensor_parallel.random", "pipeline_parallel.schedules",
        "transformer.torch_norm", "transformer.moe.moe_utils", "transformer.moe.token_dispatcher",
        "models.gpt.gpt_layer_specs", "resharding.refit",
    )}  # fmt: skip
    random, norm = core["tensor_parallel.random"], core["transformer.torch_norm"]
    random._get_cuda_rng_state = lambda *args, **kwargs: random.torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: random.torch.set_rng_state(state)
    norm.WrappedTorchNorm.__new__ = staticmethod(_norm)
    move = lambda x, as_numpy=False, record_stream=False: x.numpy() if as_numpy and hasattr(x, "numpy") else x  # noqa: E731
    for name in ("moe_utils", "token_dispatcher"):
        core[f"transformer.moe.{name}"].maybe_move_tensor_to_cpu = move
    specs = core["models.gpt.gpt_layer_specs"]
    local = specs.get_gpt_layer_local_spec
    known = inspect.signature(local).parameters
    specs.get_gpt_layer_with_transformer_engine_spec = lambda *args, **kwargs: local(
        *args, **{name: value for name, value in kwargs.items() if name in known}
    )
    _end_groups(core["parallel_state"])


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
    """The norm of torch in place of Transformer Engine's, marked as Megatron marks it."""
    norm = torch.nn.LayerNorm(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _end_groups(state: Any) -> None:
    """Let Megatron end its groups between tests; it forgets them, and thousands of threads of Gloo would stay."""
    groups = dist.distributed_c10d._world
    make, forget, made = state.initialize_model_parallel, state.destroy_model_parallel, []

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        before = {id(group) for group in groups.pg_map}
        result = make(*args, **kwargs)
        made.extend(group for group in groups.pg_map if id(group) not in before and group is not groups.default_pg)
        return result

    def destroy_model_parallel() -> None:
        forget()
        for group in made:
            if group in groups.pg_map:
                dist.destroy_process_group(group)
        made.clear()

    state.initialize_model_parallel, state.destroy_model_parallel = initialize_model_parallel, destroy_model_parallel


def patched(is_ours: bool) -> None:
    """Replace Megatron's mappings and communicators by ours on this rank."""
    if is_ours:
        from tritoncomm.integrations.megatron import patch

        report = patch()
        assert len(report.replaced) > 50, report  # so that the tests are of ours


def megatron_resharding(is_ours: bool) -> None:
    """Import Megatron-core, with our copy service in the place of Gloo's."""
    megatron(is_ours)
    if is_ours:
        from tritoncomm.integrations.megatron.resharding import PackedCopyService

        refit = importlib.import_module("megatron.core.resharding.refit")
        refit.GlooCopyService = PackedCopyService  # pyright: ignore


def with_buffer(is_ours: bool) -> None:
    """Make the buffer that Megatron's own start would have made."""
    importlib.import_module("megatron.core.parallel_state")._set_global_memory_buffer()


def deepspeed(is_ours: bool) -> None:
    """Import DeepSpeed on its CPU accelerator, with our exchange in the place of its; tests fork their ranks."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="8", DS_DISABLE_REUSE_DIST_ENV="1", DS_UNITTEST_TIMEOUT="60")
    layer: Any = importlib.import_module("deepspeed.sequence.layer")
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    transformers: Any = importlib.import_module("transformers")
    # The tests ask a hub for BERT, as a model for DeepSpeed's engine; they look at none of its numbers.
    small = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    auto.AutoModel.from_pretrained = staticmethod(lambda *args, **kwargs: transformers.BertModel(small))
    if is_ours:
        from tritoncomm.integrations.deepspeed import DistributedAttention, _SeqAllToAll

        layer._SeqAllToAll, layer.DistributedAttention = _SeqAllToAll, DistributedAttention
    start = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start("fork", force=True)


def colossalai(is_ours: bool) -> None:
    """Import ColossalAI 0.2.8, with ours in the place of its communication, tensor and mesh; its operators left out."""
    _colossalai(is_ours, registers=False)


def colossalai_registered(is_ours: bool) -> None:
    """The same, where ColossalAI registers its own operators with our ``colo_op_impl``."""
    _colossalai(is_ours, registers=True)


def _colossalai(is_ours: bool, registers: bool) -> None:
    _older_torch()
    shim.install(GPUS)
    processes: Any = multiprocessing
    processes.spawn = lambda function, args=(), nprocs=1, join=True, *_, **__: processes.start_processes(
        function, args, nprocs, join, start_method="fork"
    )
    vision = ("torchvision", "torchvision.models", "torchvision.transforms", "torchvision.datasets")
    for name in (*vision, "timm", "timm.models", "timm.models.beit", "contexttimer"):
        sys.modules.setdefault(name, mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None)))
    if is_ours:
        _our_colossalai(registers)
    testing: Any = importlib.import_module("colossalai.testing")
    # Theirs asserts that torch is version 1.
    testing.rerun_if_address_is_in_use = testing.utils.rerun_if_address_is_in_use = lambda: lambda function: function
    for name in ("nn.parallel", "tensor.shape_consistency", "tensor.d_tensor.layout_converter"):
        with contextlib.suppress(Exception):  # what a newer torch refuses fails in its tests, alone too
            importlib.import_module(f"colossalai.{name}")
    if is_ours:
        _both_contexts()


def _older_torch() -> None:
    """What ColossalAI 0.2.8 asks of a torch of its time."""
    six: Any = types.ModuleType("torch._six")
    six.inf, six.string_classes, six.int_classes = math.inf, (str, bytes), int
    six.container_abcs = importlib.import_module("collections.abc")
    sys.modules["torch._six"] = six
    # It refuses torch 2 there, and registers operators for torch 1.13 that torch has itself by now.
    compatibility: Any = types.ModuleType("colossalai.fx._compatibility")
    compatibility.compatibility = lambda is_backward_compatible=False: lambda function: function
    compatibility.is_compatible_with_meta = lambda: False
    sys.modules["colossalai.fx._compatibility"] = compatibility
    parallel: Any = torch.nn.parallel

    class OnCpu(parallel.DistributedDataParallel):
        def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
            super().__init__(module, **kwargs)

    parallel.DistributedDataParallel = parallel.distributed.DistributedDataParallel = OnCpu
    # Python 3.11 takes no default of a class with __eq__ and without __hash__.
    decorate: Any = dataclasses.dataclass

    def dataclass(cls: Any = None, **options: Any) -> Any:
        if cls is None:
            return lambda decorated: dataclass(decorated, **options)
        for default in vars(cls).values():
            if type(default).__module__.startswith("colossalai.") and type(default).__hash__ is None:
                type(default).__hash__ = object.__hash__
        return decorate(cls, **options)

    dataclasses.dataclass = dataclass


def _our_colossalai(registers: bool) -> None:
    """Put our modules into the place of ColossalAI's."""
    from tritoncomm import collective, p2p, tensor
    from tritoncomm.tensor import device_mesh, op_wrapper

    class DistSpecManager(tensor.DistSpecManager):
        """With the private names that the tests call."""

        @staticmethod
        def _shard_as(x: Any, old: Any, new: Any, group: Any) -> Any:
            return tensor.DistSpecManager.handle_trans_spec(x, old, new, group)

        @staticmethod
        def _gather(x: Any, old: Any, group: Any) -> Any:
            return tensor.DistSpecManager.handle_trans_spec(x, old, tensor.ReplicaSpec(), group)

        _all_to_all = _shard_as

    folder = Path("colossalai/tensor").resolve()
    package: Any = types.ModuleType("colossalai.tensor")
    package.__path__ = [str(folder)]
    package.__dict__.update({name: value for name, value in vars(tensor).items() if not name.startswith("__")})
    package.DistSpecManager = DistSpecManager
    sys.modules["colossalai.tensor"] = package
    for path in folder.glob("*.py"):
        with contextlib.suppress(ModuleNotFoundError):  # a module that stays ColossalAI's
            module = importlib.import_module(f"tritoncomm.tensor.{path.stem}")
            sys.modules[f"colossalai.tensor.{path.stem}"] = module
            setattr(package, path.stem, module)
    sys.modules["colossalai.communication.collective"] = collective
    sys.modules["colossalai.communication.p2p"] = p2p
    sys.modules["colossalai.device.device_mesh"] = device_mesh
    if not registers:
        op_wrapper.colo_op_impl = lambda function: lambda implementation: implementation


def _both_contexts() -> None:
    """Let ``colossalai.launch`` make our groups beside its own, and its ``destroy`` end both."""
    import tritoncomm

    package: Any = importlib.import_module("colossalai")
    context: Any = importlib.import_module("colossalai.context.parallel_context").ParallelContext
    launch, destroy = package.launch, context.destroy

    def launch_both(config: Any, *args: Any, **kwargs: Any) -> None:
        ours = copy.deepcopy(config)
        launch(config, *args, **kwargs)
        tritoncomm.initialize(config=ours if isinstance(ours, dict) and "parallel" in ours else {})

    def destroy_both(self: Any) -> None:
        tritoncomm.destroy()
        destroy(self)

    package.launch = sys.modules["colossalai.initialize"].launch = launch_both
    context.destroy = destroy_both


def yunchang(is_ours: bool) -> None:
    """Import yunchang, with torch's attention in the place of flash-attn's, which needs CUDA."""
    package: Any = types.ModuleType("flash_attn")
    interface: Any = types.ModuleType("flash_attn.flash_attn_interface")
    package.__path__, package.__version__ = [], "2.7.0"
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_func = interface.flash_attn_func = _attention
    for name in ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward"):
        setattr(interface, name, None)
    interface._flash_attn_varlen_backward = None
    package.flash_attn_interface = interface
    sys.modules.update({"flash_attn": package, "flash_attn.flash_attn_interface": interface})
    for name in ("comm.all_to_all", "ulysses.attn_layer", "hybrid.attn_layer", "hybrid.async_attn_layer"):
        importlib.import_module(f"yunchang.{name}")
    shim.install(GPUS)


def _attention(q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, **more: Any) -> Any:
    """flash-attn's attention by torch's, in float32."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q, k, v)),
        is_causal=more.get("causal", False),
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    out = out.transpose(1, 2).to(q.dtype)
    return (out, None, None) if more.get("return_attn_probs") else out
