"""Earlier import path of ``tritoncomm.integrations.transformers.hooks``."""

from tritoncomm.integrations.transformers.hooks import Switch, Untraced, remove_unused, switches_of
from tritoncomm.integrations.transformers.registration import Registration, check_bidirectional, registered

__all__ = ["Registration", "Switch", "Untraced", "check_bidirectional", "registered", "remove_unused", "switches_of"]
