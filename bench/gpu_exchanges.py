"""Every exchange of `tritoncomm bench` between two ranks of one GPU, eager and captured as CUDA graphs.

Run as ``make gpu PARTS=exchanges``. Two ranks of one GPU are two hosts to NCCL and meet over the loopback interface, so
no time is that of an exchange: what a run shows is that values are equal, and which calls can be captured. Rows go to
``--json``. ``--dry`` runs over Gloo on CPUs with tiny sizes, where a captured call is the call itself. Exits 1 when
values differ or a call of ours cannot be captured, 2 without a CUDA device.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
from torch import multiprocessing as mp

from tritoncomm.bench.ranks import rows
from tritoncomm.bench.run import content
from tritoncomm.bench.settings import Settings
from tritoncomm.cli.bench import cells

RANKS = 2


def _work(rank: int, settings: Settings, port: int, target: str) -> None:
    """Measure as a rank; the first one prints the rows, and writes them."""
    count = max(torch.cuda.device_count(), 1)
    # As torchrun's ranks, which need no GPU of their own.
    os.environ.update(
        TORCHELASTIC_RUN_ID="none", RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank % count),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    if settings.on_gpu() and count < RANKS:
        sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
        from pool import SHARING

        os.environ.update(SHARING, NCCL_HOSTID=f"tritoncomm-{rank}")
    measured = []
    for row in rows(settings):
        measured.append(row)
        if rank == 0:
            print(cells(row), flush=True)
            Path(target).write_text(json.dumps(content(settings, measured), indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Every exchange between two ranks of one GPU, eager and captured.")
    parser.add_argument("--dry", action="store_true", help="on CPUs, with tiny sizes")
    parser.add_argument("--only", nargs="*", default=(), help="words of an exchange's name")
    parser.add_argument("--json", dest="target", type=Path)
    args = parser.parse_args()
    if not (args.dry or torch.cuda.is_available()):
        print("there is no CUDA device")
        return 2
    settings = Settings(
        ranks=None, device="cpu" if args.dry else "cuda", sizes=(0.25 if args.dry else 1.0,), only=tuple(args.only),
        budget=15 if args.dry else 22, dry=args.dry,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        target = args.target or Path(folder, "rows.json")
        mp.spawn(_work, (settings, port, str(target)), nprocs=RANKS)
        found = json.loads(target.read_text())
    ours = [text for text in found["refused"] if "captured: ours:" in text]
    for line in (*ours, *found["failed"], *(f"left out: {label}" for label in found["left_out"])):
        print(line)
    return 1 if ours or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
