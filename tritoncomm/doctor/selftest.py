"""Two ranks in processes of their own exchange known values: ``all_to_all_sp2hp`` forward and backward, exact.

`run` starts both ranks.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tritoncomm import launchers
from tritoncomm.core.backend import is_nccl
from tritoncomm.mappings import all_to_all_sp2hp

__all__ = ["run", "run_rank"]

WORLD, ROWS, HIDDEN = 2, 3, 8
_START = "import sys; from tritoncomm.doctor import selftest; selftest.run_rank(int(sys.argv[1]), *sys.argv[2:])"


def run(backend: str, seconds: float = 60.0, without: Sequence[str] = ()) -> str:
    """Return the first failure of two ranks over ``backend``, empty if there was none; at most ``seconds``.

    Args:
        without: environment variables that the ranks do not get.
    """
    paths = [*filter(None, sys.path), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    launchers.forget(environment)  # NCCL of torch 2.15 would take the GPU of LOCAL_RANK for both
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="tritoncomm-selftest-") as folder:
        logs = [Path(folder, str(rank)) for rank in range(WORLD)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-c", _START, str(rank), f"{folder}/store", backend]
                with log.open("wb") as output:
                    ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            codes: list[int | None] = [None]
            while None in codes and not any(codes) and time.monotonic() < end:  # all run or have ended well
                time.sleep(0.02)
                codes = [process.poll() for process in ranks]
            failed = [rank for rank, code in enumerate(codes) if code]
            # If none has failed, one may have been too slow. Of a rank that printed "exact" the line is empty.
            lines = [_last_line(rank, logs[rank]) for rank in failed or range(WORLD)]
            return next(filter(None, lines), "")
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _last_line(rank: int, log: Path) -> str:
    """Return the last line of a rank that did not report success."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if lines and lines[-1] == "exact":
        return ""
    return f"rank {rank}: {lines[-1].strip() if lines else 'no output in time'}"


def _inputs(rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows, and the gradient of its columns; every element has a value of its own."""
    values = torch.arange(ROWS * HIDDEN, dtype=torch.float32, device=device)
    return 100.0 * rank + values.view(ROWS, HIDDEN), 1000.0 * rank + values.view(WORLD * ROWS, HIDDEN // WORLD)


def _exchange(rank: int, device: torch.device) -> None:
    """Compare values and gradients of one exchange with values that every rank computes locally."""
    group = dist.group.WORLD
    assert group is not None
    rows, gradient = _inputs(rank, device)
    x = rows.requires_grad_()
    out = all_to_all_sp2hp(x, group)
    (grad,) = torch.autograd.grad(out, x, gradient)
    everyone = [_inputs(other, device) for other in range(WORLD)]
    values = torch.cat([all_rows.chunk(WORLD, 1)[rank] for all_rows, _ in everyone])
    gradients = torch.cat([all_columns.chunk(WORLD)[rank] for _, all_columns in everyone], 1)
    for what, result, expected in (("values", out, values), ("gradients", grad, gradients)):
        if not torch.equal(result, expected):
            raise SystemExit(f"all_to_all_sp2hp gave wrong {what}: {result.tolist()}, not {expected.tolist()}")


def run_rank(rank: int, store: str, backend: str) -> None:
    """Run one rank, from start to end."""
    device = torch.device("cuda", rank) if is_nccl(backend) else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=30)
    dist.init_process_group(backend, store=FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timeout)
    _exchange(rank, device)
    dist.destroy_process_group()
    print("exact")
