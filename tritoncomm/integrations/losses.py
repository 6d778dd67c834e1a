"""Earlier import path of ``tritoncomm.integrations.transformers.losses``."""

from tritoncomm.integrations.transformers.losses import *  # noqa: F403
from tritoncomm.integrations.transformers.losses import __all__ as __all__
