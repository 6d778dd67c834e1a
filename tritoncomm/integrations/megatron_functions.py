"""Earlier import path of the functions in ``tritoncomm.integrations.megatron``."""

from tritoncomm.integrations.megatron.frozen_linear import *  # noqa: F403
from tritoncomm.integrations.megatron.functions import *  # noqa: F403
from tritoncomm.integrations.megatron.trained_linear import *  # noqa: F403
