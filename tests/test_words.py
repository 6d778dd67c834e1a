"""Product and documentation use the field's terms: shard, all-gather, local tensor, full tensor, split sizes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = (
    "cut", "cuts", "cutting", "piece", "pieces", "whole", "found", "told", "tells", "alike", "as it lies", "coloured",
    "dressed", "nobody", "somebody", "scatter_reduce", "exchange_rows",
)  # fmt: skip
PATTERN = re.compile(rf"(?<![\w-])({'|'.join(WORDS)})(?![\w-])", re.IGNORECASE)
# Where a word has its everyday sense, or is somebody else's text, by file.
ALLOWED = {
    "docs/differences.md": {"whole"},
    "docs/p2p.md": {"whole"},
    "docs/tuning.md": {"whole"},
    "kernels/tritoncomm_kernels/reduction.py": {"whole"},
    "tritoncomm/p2p/message.py": {"whole"},
    "tritoncomm/p2p/neighbours.py": {"whole"},
    "tritoncomm/tensor/param_op_hook.py": {"found"},
}
FILES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "tritoncomm").rglob("*.py")),
    *sorted((ROOT / "kernels").rglob("*.py")),
]


def _used(text: str) -> set[str]:
    return {match.lower() for match in PATTERN.findall(text)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_of_the_field(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), set())
    assert _used(path.read_text()) == allowed, f"write the field's term, see {path.name}: {_used(path.read_text())}"


def test_a_word_is_seen() -> None:
    assert _used("a piece of the whole, as it lies") == {"piece", "whole", "as it lies"}
    assert _used("shards are pieced together; foundation; wholesale") == set()
