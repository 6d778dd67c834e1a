"""What a rank holds: the formula against the committed file, and against a small model on CPUs."""

import importlib.util
import json

import pytest

from bench import memory
from bench.memory import LARGE, SMALL, Run, distances, needed
from docs import draw

CLOSE = 0.05


def test_the_formula_is_what_a_gpu_held() -> None:
    rows = json.loads(memory.FILE.read_text())["rows"]
    assert [Run(**row["run"]) for row in rows] == memory.RUNS
    for row in rows:
        assert max(map(abs, distances(LARGE, row).values())) < CLOSE, (row["run"], distances(LARGE, row))


@pytest.mark.timeout(150)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_formula_is_what_two_ranks_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = memory.measure(SMALL, [Run(2, 512, False), Run(2, 512, True)], "cpu")
    for row in rows:
        assert {"weights", "gradients", "optimizer", "forward"} <= row["bytes"].keys()
        assert max(map(abs, distances(SMALL, row).values())) < CLOSE, (row["run"], distances(SMALL, row))


def test_terms_of_the_formula() -> None:
    """Weights shrink with the ranks, activations with the positions of a rank; a checkpointed layer keeps its input."""
    two, four = (needed(LARGE, Run(ranks, 16_384, True)) for ranks in (2, 4))
    assert two.weights == 2 * four.weights == 4 * LARGE.parameters / 2
    assert two.logits == 2 * four.logits
    longer = needed(LARGE, Run(4, 32_768, True))
    kept = (longer.activations - four.activations) / 4096
    assert kept == LARGE.layers * 2 * LARGE.hidden + 8 * LARGE.hidden
    whole = needed(LARGE, Run(4, 16_384, False))
    assert whole.peak() == whole.weights + whole.optimizer + whole.activations + whole.logits
    assert memory.LLAMA_8B.parameters == 8_030_261_248


def test_the_page_and_the_picture_are_of_the_file() -> None:
    text = memory.PAGE.read_text()
    assert text == memory.with_table(text, json.loads(memory.FILE.read_text())), "run `python -m bench.memory --write`"
    assert (memory.PAGE.parent / "memory.svg").read_text() == draw.draw_memory(), "run `make docs`"
