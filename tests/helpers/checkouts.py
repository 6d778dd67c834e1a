"""The environment in which a process imports this checkout."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def checkout() -> dict[str, str]:
    """The environment in which this checkout is imported, installed or not."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
