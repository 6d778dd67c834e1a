"""Earlier import path of ``tritoncomm.integrations.megatron.resharding``."""

from tritoncomm.integrations.megatron.resharding import PackedCopyService

__all__ = ["PackedCopyService"]
