"""Earlier import path of ``tritoncomm.integrations.transformers.model_parts``."""

from tritoncomm.integrations.transformers.model_parts import *  # noqa: F403
from tritoncomm.integrations.transformers.model_parts import __all__ as __all__
