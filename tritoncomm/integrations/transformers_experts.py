"""Earlier import path of ``tritoncomm.integrations.transformers.experts``."""

from tritoncomm.integrations.transformers import experts

__all__ = ["NAME", "register", "unregister"]
NAME, register, unregister = experts.NAME, experts.register_experts, experts.unregister_experts
