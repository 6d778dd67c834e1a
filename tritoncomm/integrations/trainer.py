"""Earlier import path of ``tritoncomm.integrations.transformers.trainer``."""

from tritoncomm.integrations.transformers.trainer import *  # noqa: F403
from tritoncomm.integrations.transformers.trainer import __all__ as __all__
