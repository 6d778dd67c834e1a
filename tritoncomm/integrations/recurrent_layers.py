"""Earlier import path of ``tritoncomm.integrations.transformers.recurrent_layers``."""

from tritoncomm.integrations.changes import outdated, outdated_end
from tritoncomm.integrations.transformers.recurrent_layers import *  # noqa: F403

_enter, _leave, leave_model = outdated, outdated_end, outdated_end  # in models that were saved
