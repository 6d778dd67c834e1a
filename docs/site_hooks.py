"""Hooks of mkdocs: pages from the top of the repository, labelled tables, and a site that needs no network."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "PAGES",
    "boost",
    "fetched",
    "labelled",
    "on_files",
    "on_page_content",
    "on_page_markdown",
    "on_post_page",
    "relinked",
]

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"benchmarks.md", "changelog.md", "compatibility.md"}
BACKGROUND = {"contributing.md", "design.md", "differences.md", "index.md", "scale.md"}
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def relinked(text: str, at_top: bool = False) -> str:
    """A page with its links as the site has them: there, the pages of the top folder stand beside those of docs/."""
    for source, page in PAGES.items():
        start = "" if at_top else "../"
        text = re.sub(rf"\]\({re.escape(start + source)}(?=[)#])", f"]({page}", text)
    return text.replace("](docs/", "](") if at_top else text


def fetched(html: str) -> list[str]:
    """Tags by which a browser would fetch from other hosts to show a page."""
    tags = re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*>", html)
    return [tag for tag in tags if re.search(r"""\b(?:src|href)=["']?(?:https?:)?//""", tag)]


def labelled(html: str) -> str:
    """A page whose table cells name their columns, for narrow screens that show the cells below each other.

    The first cell of a row is its title and has no label, nor has a cell below an empty heading.
    """

    def of_table(table: re.Match[str]) -> str:
        heads = [re.sub(r"<[^>]+>", "", head) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.DOTALL)]
        labels = ["", *(head.replace('"', "&quot;") for head in heads[1:])]
        return re.sub(r"<tr>.*?</tr>", lambda row: of_row(row[0], iter(labels)), table[0], flags=re.DOTALL)

    def of_row(row: str, labels: Iterator[str]) -> str:
        def of_cell(cell: re.Match[str]) -> str:
            label = next(labels, "")
            return f'{cell[0]} data-label="{label}"' if label else cell[0]

        return re.sub(r"<td\b", of_cell, row)

    return re.sub(r"<table>.*?</table>", of_table, html, flags=re.DOTALL)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the top folder."""
    from mkdocs.structure.files import File  # tests use the functions above without mkdocs

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=relinked((ROOT / source).read_text(), at_top=True)))
    return files


def boost(path: str) -> float:
    """Weight of a page in the search: guides first, then background; the API and generated pages at the end."""
    if path.startswith("api/") or path in GENERATED:
        return 0.2
    return 0.6 if path.startswith("architecture/") or path in BACKGROUND else 1.0


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Make the links of every page those of the site, and give the page its weight in the search."""
    page.meta.setdefault("search", {}).setdefault("boost", boost(page.file.src_uri))
    return relinked(markdown)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Label the cells of tables."""
    return labelled(html)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Refuse a page that other hosts have a part in."""
    from mkdocs.exceptions import PluginError  # tests use the functions above without mkdocs

    if others := fetched(output):
        raise PluginError(f"{page.file.src_uri} would be fetched in part from other hosts: {', '.join(others)}")
    return output
