"""Peers in this process: imported with CUDA on the CPU, and with ours in their place."""

import importlib
import inspect
import os
import typing
from typing import Any

import torch.distributed as dist

from outside import shim

__all__ = ["megatron", "megatron_resharding", "nothing", "patched", "with_buffer"]

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
    norm = importlib.import_module("torch").nn.LayerNorm(hidden_size, eps=eps)
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
        from tritoncomm.integrations.megatron_resharding import PackedCopyService

        refit = importlib.import_module("megatron.core.resharding.refit")
        refit.GlooCopyService = PackedCopyService  # pyright: ignore


def with_buffer(is_ours: bool) -> None:
    """Make the buffer that Megatron's own start would have made."""
    importlib.import_module("megatron.core.parallel_state")._set_global_memory_buffer()
