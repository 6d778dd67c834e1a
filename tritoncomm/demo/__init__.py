"""The demo: a small transformer trained on several ranks through the mappings, compared with one process."""

from tritoncomm.demo.run import DemoError, Outcome, run
from tritoncomm.demo.settings import Settings

__all__ = ["DemoError", "Outcome", "Settings", "run"]
