"""Earlier import path of ``tritoncomm.integrations.transformers.rotary_tables``."""

from tritoncomm.integrations.changes import outdated, outdated_end
from tritoncomm.integrations.transformers.rotary_tables import *  # noqa: F403

_append, _cut = outdated, outdated_end  # in models that were saved
