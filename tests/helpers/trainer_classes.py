"""Trainers of transformers and TRL, and accelerate as their tests need it."""

import importlib
import importlib.util
import pkgutil
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["shard_on_cpus", "trainers"]


def trainers() -> Iterator[type]:
    """Trainers of transformers, and of TRL where it is installed."""
    warnings.simplefilter("ignore")
    import transformers

    yield from (transformers.Trainer, transformers.Seq2SeqTrainer)
    if importlib.util.find_spec("trl") is None:
        return
    trl: Any = importlib.import_module("trl")
    for module in pkgutil.walk_packages(trl.__path__, "trl."):
        if "trainer" not in module.name and "experimental" not in module.name:
            continue
        try:
            found = vars(importlib.import_module(module.name)).values()
        except (ImportError, RuntimeError):  # of an extra that is not installed
            continue
        for kind in found:
            is_trainer = isinstance(kind, type) and issubclass(kind, transformers.Trainer)
            if is_trainer and kind.__module__.startswith("trl") and not kind.__name__.startswith("_"):
                yield kind


def shard_on_cpus(state: Any) -> None:
    """Let accelerate shard on CPUs, too: it makes DDP of FSDP there, without a word."""
    init = state.AcceleratorState.__init__

    def init_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init_sharded
