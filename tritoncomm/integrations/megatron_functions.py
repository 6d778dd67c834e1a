"""Earlier import path of ``tritoncomm.integrations.megatron.functions``."""

from tritoncomm.integrations.megatron.functions import *  # noqa: F403
from tritoncomm.integrations.megatron.functions import __all__ as __all__
