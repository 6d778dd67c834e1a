"""Earlier import path of ``tritoncomm.integrations.transformers.recurrent_layers``; old hooks do nothing."""

from tritoncomm.integrations import changes as _changes
from tritoncomm.integrations.transformers.recurrent_layers import *  # noqa: F403
from tritoncomm.integrations.transformers.recurrent_layers import __all__ as __all__

_enter, _leave, leave_model = _changes.outdated, _changes.outdated_end, _changes.outdated_end
