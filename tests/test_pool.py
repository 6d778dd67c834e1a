"""The processes in which the other tests run their ranks."""

from pathlib import Path

import pytest
from pool import Pool, WorkerError
from torch.distributed import ProcessGroup


def run_once_wrong(group: ProcessGroup, path: str, text: str) -> int:
    """The last rank fails the first time."""
    if group.rank() == group.size() - 1 and not Path(path).exists():
        Path(path).touch()
        raise RuntimeError(text)
    return group.rank()


def test_only_what_gloo_does_wrong_itself_is_run_again(tmp_path: Path) -> None:
    ranks = Pool(2)
    try:
        assert ranks.run(run_once_wrong, str(tmp_path / "a"), "Gloo connectFullMesh failed with [pair.cc]") == [0, 1]
        assert ranks.started == 2
        with pytest.raises(WorkerError, match=r"rank 1:(.|\n)*Connection closed"):
            ranks.run(run_once_wrong, str(tmp_path / "b"), "Connection closed by peer")
    finally:
        ranks.stop()
