"""Megatron-core on CPU ranks: the stand-ins for CUDA, groups, and tiny GPT models."""

import contextlib
import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "LENGTH",
    "VOCABULARY",
    "core",
    "gpt_chunks",
    "groups",
    "join",
    "on_cpu",
    "transformer_config",
]

VOCABULARY, LENGTH = 64, 16


def core(name: str) -> Any:
    """A module of ``megatron.core``; what it misses on this machine, it says while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{name}")


class _Stream:
    """A CUDA stream or event of a machine without CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    wait_event = synchronize = record = wait = wait_stream

    def record_event(self, *args: Any) -> "_Stream":
        return self


def _layer_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.LayerNorm:
    """In place of ``WrappedTorchNorm``, which refuses sequence parallelism."""
    norm = nn.LayerNorm(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore
    return norm


def _made_on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return on_cpu


def _with_lists(exchange: Any) -> Any:
    """torch 2.13 refuses the numpy split sizes that Megatron 0.16.1 passes."""

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        def as_list(sizes: Any) -> Any:
            return sizes.tolist() if type(sizes).__name__ == "ndarray" else sizes

        return exchange(*map(as_list, args), **{name: as_list(value) for name, value in kwargs.items()})

    return all_to_all_single


def _as_numpy(tensor: Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes of a dispatcher are numpy arrays on a GPU; without one Megatron leaves them tensors."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextlib.contextmanager
def on_cpu(factories: bool = True) -> Iterator[None]:
    """Megatron-core takes the CPU for its GPU; everything is as before afterwards.

    ``factories`` also redirects ``torch.zeros(device="cuda")`` and its kind, which takes time at every call.
    """
    random, norm = core("tensor_parallel.random"), core("transformer.torch_norm")
    moe, dispatcher = core("transformer.moe.moe_utils"), core("transformer.moe.token_dispatcher")
    stream = _Stream()
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (
            torch.cuda,
            {
                "current_device": lambda: torch.device("cpu"),
                "current_stream": lambda *_: stream,
                "Stream": _Stream,
                "Event": _Stream,
                "stream": lambda _: contextlib.nullcontext(),
                "synchronize": lambda *_: None,
                "get_rng_state": lambda *_: torch.get_rng_state(),
                "set_rng_state": lambda state, *_: torch.set_rng_state(state),
                "manual_seed": torch.manual_seed,
            },
        ),
        (Tensor, {"cuda": lambda self, *_, **__: self, "record_stream": lambda self, *_: None}),
        (
            random,
            {
                "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
                "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
            },
        ),
        (norm.WrappedTorchNorm, {"__new__": staticmethod(_layer_norm)}),
        (moe, {"maybe_move_tensor_to_cpu": _as_numpy}),
        (dispatcher, {"maybe_move_tensor_to_cpu": _as_numpy}),
        (dist, {"all_to_all_single": _with_lists(dist.all_to_all_single)}),
    ]
    made = ("zeros", "ones", "empty", "tensor", "arange", "full", "randn", "rand") if factories else ()
    replaced.append((torch, {name: _made_on_cpu(getattr(torch, name)) for name in made}))
    with contextlib.ExitStack() as stack:
        # 0.16.1 looks the name up without TransformerEngine too.
        stack.enter_context(mock.patch.object(moe, "te_general_gemm", None, create=True))
        for owner, members in replaced:
            for name, value in members.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def join(rank: int, world: int, store: str) -> Iterator[None]:
    """This process as a rank of a Gloo job that meets at the file ``store``."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it
    warnings.simplefilter("ignore")  # Megatron's deprecated calls of torch
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def groups(**sizes: int) -> Iterator[Any]:
    """Megatron's parallel state, over ranks that exist."""
    state, random = core("parallel_state"), core("tensor_parallel.random")
    state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # one generator is both the CPU's and the GPU's here
    random.model_parallel_cuda_manual_seed(1)
    try:
        yield state
    finally:
        state.destroy_model_parallel()


def transformer_config(sizes: dict[str, int], **settings: Any) -> Any:
    """Four layers of hidden size 32, without fusions, unless ``settings`` say otherwise."""
    plain = {
        "num_layers": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    }
    return core("transformer").TransformerConfig(
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        **sizes,
        **(plain | settings),
    )


def gpt_chunks(config: Any, state: Any, chunks: int = 1) -> list[nn.Module]:
    """The chunks of a GPT that this rank has."""
    spec = core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    virtual = chunks if chunks > 1 else None
    result = []
    for chunk in range(chunks):
        at = {"ignore_virtual": False, "vp_stage": chunk} if virtual else {}
        model = core("models.gpt").GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=state.is_pipeline_first_stage(**at),
            post_process=state.is_pipeline_last_stage(**at),
            share_embeddings_and_output_weights=False,
            vp_stage=chunk if virtual else None,
        )
        model.model_type = core("enums").ModelType.encoder_or_decoder
        result.append(model)
    return result
