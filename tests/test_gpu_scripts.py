"""What `make gpu-bench` runs, on the CPU, so that its first run on a GPU is not its first run."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench import gpu_bench
from bench.device import Device
from bench.formulations import PEERS
from bench.gpu_bench import Case


def one_of_each() -> Iterator[Case]:
    """The first case of every operation, of every cast, and with and without a compiled peer."""
    seen = set()
    for case in gpu_bench.cases():
        kind = (case.op, case.out_dtype, case.is_compiled)
        if kind not in seen:
            seen.add(kind)
            yield gpu_bench.shrunk(case)


def peers_of(case: Case) -> set[str]:
    if case.op in PEERS:
        return {*PEERS[case.op], *(["compiled"] if case.is_compiled else [])}
    named = {"reduce": {"sum"}, "statistics": {"logsumexp + gather"}, "gradient": {"exp + scatter"}}
    return named[case.op] | ({"compiled"} if case.op in gpu_bench.ENTROPY else set())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", list(one_of_each()), ids=lambda case: case.label.replace(" ", "-"))
def test_every_peer_of_a_row_agrees(case: Case) -> None:
    prepared = gpu_bench.prepare(case, Device(dry=True))
    assert not prepared.wrong
    assert set(prepared.calls) == {"ours", *peers_of(case)}


def run_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], only: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--dry", "--only", only])
    return gpu_bench.main(), capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_peer_that_differs_or_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "copy-in 64 MiB run 65536"
    status, said = run_bench(monkeypatch, capsys, only)
    assert (status, "of split + cat" in said, "0 failed" in said) == (0, True, True)
    assert "3 rows" in said  # two of the host, and this one

    def refuses(*_: Any) -> None:
        raise RuntimeError("not for this size")

    for wrong, code, told in (
        (lambda params, world, dtype: torch.stack(params).to(dtype), 1, "split + cat: other bits"),
        (refuses, 0, "split + cat left out: RuntimeError: ['not for this size']"),
    ):
        monkeypatch.setitem(PEERS["copy-in"], "split + cat", wrong)
        status, said = run_bench(monkeypatch, capsys, only)
        (line,) = (line for line in said.splitlines() if line.startswith("copy-in 0") and "roof" in line)
        assert "of split + cat" not in line
        assert "of FSDP2's op" in line
        assert (status, told in said) == (code, True)


@pytest.mark.filterwarnings("ignore")
def test_a_kernel_that_differs_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_bench.kernels, "unpack", lambda wire, rows: rows.zero_().nbytes)
    status, said = run_bench(monkeypatch, capsys, "copy-out 64 MiB run 65536")
    assert status == 1
    assert "agree(result, want)" in said
    assert "2 rows" in said
