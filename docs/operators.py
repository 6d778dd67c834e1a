"""Writes the table of operator rules into docs/tensor.md (``make docs``)."""

from pathlib import Path

from tritoncomm.tensor.rules.table import markdown

BEGIN, END = "<!-- operators -->\n", "<!-- end -->"


def filled(text: str) -> str:
    """The page with the table generated from the rules."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{markdown()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    page = Path(__file__).with_name("tensor.md")
    page.write_text(filled(page.read_text()))
