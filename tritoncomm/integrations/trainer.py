"""Earlier import path of ``tritoncomm.integrations.transformers.trainer``."""

from tritoncomm.integrations.transformers.trainer import *  # noqa: F403
