"""Earlier import path of ``tritoncomm.integrations.transformers.rotary_tables``; hooks of saved models do nothing."""

from tritoncomm.integrations import changes as _changes
from tritoncomm.integrations.transformers.rotary_tables import *  # noqa: F403
from tritoncomm.integrations.transformers.rotary_tables import __all__ as __all__

_append, _cut = _changes.outdated, _changes.outdated_end
