"""Earlier import path of ``tritoncomm.integrations.transformers.batch``."""

from tritoncomm.integrations.transformers.batch import *  # noqa: F403
from tritoncomm.integrations.transformers.batch import __all__ as __all__
