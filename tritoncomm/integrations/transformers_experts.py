"""Earlier import path of ``tritoncomm.integrations.transformers.experts``."""

from tritoncomm.integrations.transformers import experts

NAME, register, unregister = experts.NAME, experts.register_experts, experts.unregister_experts
