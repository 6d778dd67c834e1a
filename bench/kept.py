"""Table of a page that a script makes: kept as a file, put onto the page, and compared by a test."""

import json
from collections.abc import Sequence
from pathlib import Path

from bench.guard import RESULTS
from bench.timing import versions, write_json

__all__ = ["PAGES", "keep", "on_page", "table_of"]

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    "reshard_models": "reshard.md",
    "reshard_scale": "scale.md",
    "sums_bytes": "sums.md",
    "sums_errors": "sums.md",
    "sums_training": "sums.md",
}  # by table


def _file(name: str) -> Path:
    return RESULTS / "cpu" / "scale" / f"{name}.json"  # not one of the files with ratios, which docs/benchmarks.md has


def table_of(name: str) -> list[str]:
    """Lines of a table that was kept."""
    return json.loads(_file(name).read_text())["table"]


def on_page(name: str) -> list[str]:
    """Lines of the table on its page that begins with the same line."""
    head = table_of(name)[0]
    lines = (DOCS / PAGES[name]).read_text().partition(f"\n{head}\n")[2].splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [head, *lines[:end]]


def keep(name: str, table: Sequence[str]) -> None:
    """Write the file of a table, and the table in the place of the one that its page has."""
    write_json(_file(name), {"versions": versions(), "table": list(table)})
    page = DOCS / PAGES[name]
    before = "\n".join(on_page(name))
    page.write_text(page.read_text().replace(before, "\n".join(table)))
    print("written:", _file(name), "and", page)
