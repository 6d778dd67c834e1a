"""Attention modules of transformers as an attention function has to see them over shards."""

from typing import Any

__all__ = ["LocalModule"]


class LocalModule:
    """Attention module as ``attention`` has to see it: with this rank's heads, and under its own name."""

    def __init__(self, module: Any, groups: int, attention: str) -> None:
        self._module, self.num_key_value_groups, self._attention = module, groups, attention

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _LocalConfig(value, self._attention) if name == "config" else value


class _LocalConfig:
    """Config of a model with another attention implementation."""

    def __init__(self, config: Any, attention: str) -> None:
        self._config, self._attn_implementation = config, attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
