"""The demo: a small transformer trained on several ranks through the mappings, compared with one process."""

from tritoncomm.demo.data import check_text
from tritoncomm.demo.run import DemoError, DemoOutcome, run
from tritoncomm.demo.settings import Settings

__all__ = ["DemoError", "DemoOutcome", "Settings", "check_text", "run"]
