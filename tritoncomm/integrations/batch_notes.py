"""Earlier import path of ``tritoncomm.integrations.transformers.batch_notes``."""

from tritoncomm.integrations.transformers.batch_notes import *  # noqa: F403
from tritoncomm.integrations.transformers.batch_notes import __all__ as __all__
