"""Earlier import path of ``tritoncomm.integrations.transformers.hooks``."""

from tritoncomm.integrations.transformers.hooks import *  # noqa: F403
from tritoncomm.integrations.transformers.registration import *  # noqa: F403
