"""Earlier import path of ``tritoncomm.integrations.transformers.batch``."""

from tritoncomm.integrations.transformers.batch import *  # noqa: F403
