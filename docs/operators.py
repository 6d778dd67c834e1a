"""Writes the table of operator rules into docs/tensor.md (``make docs``)."""

from pathlib import Path

from tritoncomm.tensor.rules.table import ROWS

ORDER = (
    "pointwise", "matmul", "embedding", "normalization", "reductions", "views", "indexing", "attention",
    "cross_entropy", "random_ops", "foreach", "gradients",
)  # fmt: skip
BEGIN, END = "<!-- operators -->\n", "<!-- end -->"


def markdown() -> str:
    """The rows as a Markdown table."""
    rows = sorted(ROWS, key=lambda row: ORDER.index(row.module))
    lines = ["| operator | layouts it accepts | result | collectives |", "|---|---|---|---|"]
    alike: dict[tuple[str, ...], list[str]] = {}  # operators of one rule are one line
    for row in rows:
        alike.setdefault((row.accepts, row.result, row.collectives), []).append(row.operators)
    lines += [f"| {'; '.join(operators)} | {' | '.join(rule)} |" for rule, operators in alike.items()]
    return "\n".join(lines)


def filled(text: str) -> str:
    """The page with the table generated from the rules."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{markdown()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    page = Path(__file__).with_name("tensor.md")
    page.write_text(filled(page.read_text()))
