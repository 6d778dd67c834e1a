"""Whether a parallel training step is right: compared with the same step in one process, module by module.

``tritoncomm verify FILE.py:build --ranks 2`` runs both and prints the first wrong module. In a program of one's own:
``record`` in one process with ``to=path``, ``record`` on every rank, then ``compare(Recording.load(path), mine)``.
"""

from tritoncomm.verify.comparison import Report, compare
from tritoncomm.verify.drawing import draw, without_noise
from tritoncomm.verify.recorder import record
from tritoncomm.verify.recording import Call, Case, Recording
from tritoncomm.verify.relations import Relation

__all__ = ["Call", "Case", "Recording", "Relation", "Report", "compare", "draw", "record", "without_noise"]
