"""Integrations: tritoncomm under the names and signatures of other frameworks, each imported at its first use.

In these modules ``theirs`` is the other framework's object and ``ours`` the one that takes its place, with its
arguments. ``group`` are the ranks that hold one sequence, in ``megatron`` the tensor-parallel ranks. ``name`` is the
function for errors and counters. Shapes have ``b`` sequences of ``s`` local positions, or ``S`` of all ranks.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritoncomm.integrations import ddp, deepspeed, fsdp2, megatron, transformers, yunchang
    from tritoncomm.integrations.transformers import trainer

__all__ = ["ddp", "deepspeed", "fsdp2", "megatron", "trainer", "transformers", "yunchang"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"tritoncomm.integrations.{name}")
    raise AttributeError(f"module 'tritoncomm.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
