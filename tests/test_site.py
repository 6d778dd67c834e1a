"""The documentation's site: navigation, API pages, pictures of the mappings, quoted messages; mkdocs builds it."""

import ast
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import tritoncomm_kernels
from mapping_cases import MAPPINGS, expected, expected_gradient
from pool import Pool
from torch import Tensor

import tritoncomm
from docs import draw, mapping_pictures, site_hooks
from docs.mapping_pictures import CASES, Matrix, Trace
from tritoncomm import mappings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = sorted((DOCS / "api").glob("*.md"))
NAVIGATION = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_navigation_has_every_page_once() -> None:
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")] + list(site_hooks.PAGES.values())
    assert sorted(NAVIGATION) == sorted(pages)


def test_the_readme_has_the_frameworks_of_the_navigation() -> None:
    """In the same words and order; its own length is that of a page that people read to the end."""
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("## With your framework\n")[2].partition("\n## ")[0]
    linked = re.findall(r"^\| \[([^\]]+)\]\(docs/([^)]+)\) \|", table, re.MULTILINE)
    group = (ROOT / "mkdocs.yml").read_text().partition("  - With your framework:\n")[2].partition("\n  - ")[0]
    assert linked == re.findall(r"^ +- ([^:]+): (\S+)$", group, re.MULTILINE)
    assert len(linked) >= 7
    assert len(readme.split()) <= 1000


def test_links_between_pages_become_those_of_the_site() -> None:
    text = "[a](../README.md) [b](../CONTRIBUTING.md#rules) [c](design.md) `](docs/x.md)`"
    assert site_hooks.relinked(text) == "[a](index.md) [b](contributing.md#rules) [c](design.md) `](docs/x.md)`"
    text = "[a](docs/design.md) ![b](docs/host_time.svg) [c](CONTRIBUTING.md)"
    assert site_hooks.relinked(text, at_top=True) == "[a](design.md) ![b](host_time.svg) [c](contributing.md)"


def test_the_search_shows_guides_first() -> None:
    assert site_hooks.boost("sums.md") > site_hooks.boost("architecture/p2p.md") > site_hooks.boost("api/p2p.md")
    known = site_hooks.GENERATED | site_hooks.BACKGROUND
    assert known <= {path.name for path in DOCS.glob("*.md")} | set(site_hooks.PAGES.values())


def test_cells_name_their_columns() -> None:
    row = '<tr>\n<td><code>a</code></td>\n<td style="text-align: right;">1</td>\n<td></td>\n</tr>'
    table = f"<table>\n<tr>\n<th>name</th>\n<th><em>us</em></th>\n<th></th>\n</tr>\n{row}\n</table>"
    told = '<tr>\n<td><code>a</code></td>\n<td data-label="us" style="text-align: right;">1</td>\n<td></td>\n</tr>'
    assert site_hooks.labelled(f"<p>{table}</p>{row}") == f"<p>{table.replace(row, told)}</p>{row}"


def test_what_comes_from_other_hosts_is_seen() -> None:
    near = '<a href="https://x.org">x</a><link rel=stylesheet href="../a.css"><img src="data:image/png;base64,//x">'
    far = ['<script src="https://x.org/a.js">', '<link href=//x.org/a.css rel="stylesheet">']
    assert site_hooks.fetched(near + "".join(far)) == far


# API pages


def directives(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Every object that mkdocstrings is asked for, and the members that are listed under it."""
    for block in re.split(r"^::: ", path.read_text(), flags=re.MULTILINE)[1:]:
        listed = re.search(r"members:(?: \[(.+)\]|((?:\n +- \w+)+))", block)
        names = re.findall(r"\w+", (listed[1] or listed[2])) if listed else []
        yield block.split()[0], names


INTERNAL = {
    "__main__", "bench", "cli", "core", "demo", "doctor", "errors", "explain", "integrations", "parsing", "record",
    "runtime", "tune", "variables",
}  # fmt: skip


def test_every_public_module_has_its_page() -> None:
    described = {name for path in API for name, _ in directives(path)}
    folder = ROOT / "tritoncomm" / "integrations"
    earlier = {path.stem for path in folder.glob("*.py") if path.read_text().startswith('"""Earlier import path')}
    integrations = {path.stem for path in folder.glob("*.py")} - {"__init__", "changes"} - earlier
    integrations |= {path.parent.name for path in folder.glob("*/__init__.py")} | {"megatron.resharding"}
    integrations |= {f"transformers.{name}" for name in ("batch", "experts", "log_probabilities", "trainer")}
    modules = {module.name for module in pkgutil.iter_modules(tritoncomm.__path__)} - INTERNAL
    modules |= {"p2p.schedules", "mappings.helpers"}
    modules |= {f"integrations.{name}" for name in integrations}
    assert described == {f"tritoncomm.{name}" for name in modules} | {"tritoncomm", "tritoncomm_kernels"}


@pytest.mark.parametrize("path", API, ids=lambda path: path.name)
def test_every_public_name_is_on_its_page(path: Path) -> None:
    text = path.read_text()
    for name, listed in directives(path):
        module = importlib.import_module(name)
        assert [each for each in listed if not hasattr(module, each)] == []
        public = {each for each in module.__all__ if not inspect.ismodule(getattr(module, each))}
        missing = public - set(listed) if listed else set()
        helpers = set(importlib.import_module("tritoncomm.mappings.helpers").__all__)
        assert {each for each in missing if f"`{each}`" not in text} - helpers == set(), name


def _public(package: ModuleType) -> Iterator[tuple[str, Any]]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.split(".")[1] not in ("cli", "__main__"):  # typer and rich may be missing
            loaded = importlib.import_module(module.name)
            for name, value in vars(loaded).items():
                if getattr(value, "__module__", "") == module.name and (inspect.isclass(value) or callable(value)):
                    yield f"{module.name}.{name}", value
                    if inspect.isclass(value):
                        members = [(n, m) for n, m in vars(value).items() if inspect.isfunction(m)]
                        yield from ((f"{module.name}.{name}.{n}", m) for n, m in members)


def undocumented(value: Any) -> set[str]:
    """Names under ``Args:`` that a function, or a class when it is called, does not take."""
    section = re.search(r"^( *)Args:\n((?:\1 +.*\n|\n)+)", (inspect.getdoc(value) or "") + "\n", re.MULTILINE)
    if not section:
        return set()
    named = set(re.findall(rf"^{section[1]}    \*{{0,2}}(\w+):", section[2], re.MULTILINE))
    taken = inspect.signature(value).parameters
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return set()
    return named - set(taken)


def test_documented_arguments_exist() -> None:
    """mkdocstrings compares too, but it reads sources only: not ``__new__``, and no base class of torch's."""
    wrong = {}
    for name, value in [*_public(tritoncomm), *_public(tritoncomm_kernels)]:
        if names := undocumented(value):
            wrong[name] = names
    assert wrong == {}


def test_an_argument_that_does_not_exist_is_seen() -> None:
    def f(a: int) -> None:
        """One line.

        Args:
            a: right.
            b: wrong.
        """

    assert undocumented(f) == {"b"}


# Pictures


@pytest.fixture(scope="module")
def traces(pool: Pool) -> list[dict[str, Trace]]:
    """Traces of the mappings, by rank."""
    return pool.run(mapping_pictures.run, world=2)


@pytest.mark.parametrize("name", CASES)
def test_a_picture_is_what_the_mapping_does(name: str, traces: list[dict[str, Trace]]) -> None:
    path = DOCS / "pictures" / f"{name}.svg"
    drawn = mapping_pictures.draw(name, [each[name] for each in traces])
    assert path.read_text() == drawn, "run `make docs`"


def test_the_picture_of_the_wire_is_the_exchange(pool: Pool) -> None:
    svg = (DOCS / "wire.svg").read_text()
    assert svg == mapping_pictures.draw_exchange(pool.run(mapping_pictures.exchange, world=2)), "run `make docs`"
    before, wire, after = ([read(svg, f"{name}-{rank}") for rank in range(2)] for name in ("input", "wire", "output"))
    for rank in range(2):
        columns = [[row[2 * peer : 2 * peer + 2] for row in before[rank]] for peer in range(2)]
        assert wire[rank] == columns[0] + columns[1]
        assert after[rank] == [row for sent in wire for row in sent[2 * rank : 2 * rank + 2]]


def test_the_address_map_is_as_it_is_drawn() -> None:
    assert (DOCS / "address_map.svg").read_text() == draw.draw(), "run `make docs`"


def test_the_rows_of_experts_are_as_they_are_drawn() -> None:
    assert (DOCS / "experts.svg").read_text() == draw.draw_experts(), "run `make docs`"


def test_the_packages_are_as_they_are_drawn() -> None:
    """Each above all that it imports, and no line upward."""
    svg = (DOCS / "packages.svg").read_text()
    assert svg == draw.draw_packages(), "run `make docs`"
    heights = {
        name: int(y) for y, name in re.findall(r'y="(\d+)" text-anchor="middle" font-size="13" fill="white">(\w+)', svg)
    }
    for name, imports in draw.package_imports().items():
        for other in imports:
            assert heights[name.removeprefix("tritoncomm_")] < heights[other.removeprefix("tritoncomm_")], (name, other)


def test_every_picture_is_shown() -> None:
    shown = re.findall(r"\]\(pictures/(\w+)\.svg\)", (DOCS / "concepts.md").read_text())
    assert sorted(shown) == sorted(CASES) == sorted(path.stem for path in (DOCS / "pictures").iterdir())
    public = {name for name in mappings.__all__ if not name.startswith("_")} - {"overwrite_inputs"}
    assert public == {name.removesuffix("_split") for name in CASES}


def read(svg: str, name: str) -> Matrix:
    """The matrix of a picture, from where its boxes are, what they say and how they are filled."""
    (group,) = re.findall(rf'<g class="cell" id="{name}">\n(.*?)\n</g>', svg, re.DOTALL)
    box = r'<g transform="translate\((\d+) (\d+)\)"><use href="#from(\d+)"/><text x="\S+" y="\d+">(\d\d)</text></g>'
    boxes = sorted((int(y), int(x), label, tuple(map(int, ranks))) for x, y, ranks, label in re.findall(box, group))
    assert len(boxes) == group.count("<use ")
    rows: dict[int, list[Any]] = {}
    for y, _, label, ranks in boxes:
        rows.setdefault(y, []).append((label, ranks))
    return list(rows.values())


# ``_split`` in the name of a picture: the gradient is split. The others are drawn with arguments of their own.
DRAWN = [name for name in CASES if name != "all_to_all" and not name.endswith(("_dim", "_dims"))]


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_shows_the_closed_form(name: str) -> None:
    """Read from the picture alone: the boxes of the output follow from those of the input, gradients likewise."""
    svg = (DOCS / "pictures" / f"{name}.svg").read_text()
    call = MAPPINGS[name.replace("_split", ", split")]
    for form, source, result in ((expected, "input", "output"), (expected_gradient, "output_grad", "input_grad")):
        parts = [_numbers(read(svg, f"{source}-{rank}")) for rank in range(2)]
        for rank in range(2):
            assert torch.equal(_numbers(read(svg, f"{result}-{rank}")), form(call, parts, rank)), (result, rank)


def _numbers(matrix: Matrix) -> Tensor:
    """A number for each place and rank, sums for two ranks: not those that the pictures are made with."""
    return torch.tensor([[sum((int(place) + 1) * 1000**rank for rank in ranks) for place, ranks in row]
                         for row in matrix])  # fmt: skip


def test_a_sum_of_different_places_is_no_cell() -> None:
    assert mapping_pictures.cell(6 + 600) == ("11", (0, 1))
    with pytest.raises(ValueError):
        mapping_pictures.cell(6 + 700)


def test_another_mapping_gives_another_picture(traces: list[dict[str, Trace]]) -> None:
    other = mapping_pictures.draw("all_to_all_sp2hp", [each["all_to_all_hp2sp"] for each in traces])
    assert other != (DOCS / "pictures" / "all_to_all_sp2hp.svg").read_text()
    assert read(other, "input-0") == traces[0]["all_to_all_hp2sp"].input


# Messages


def strings(path: Path) -> Iterator[str]:
    """Every text of a source but docstrings, with a zero byte for each value that is put in."""
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


SOURCES = [path for folder in ("tritoncomm", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def texts() -> list[str]:
    """Every text of the sources."""
    return [text for path in SOURCES for text in strings(path)]


def quoted() -> list[str]:
    """The messages of the library on the page: the first column of every table under ``message``."""
    page = (DOCS / "troubleshooting.md").read_text().partition("\n## Messages of others")[0]
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [re.match(r"\| `([^`]+)` \|", line)[1] for table in tables for line in table.splitlines()]


def is_message(quote: str) -> bool:
    """Whether one text of the sources has the fixed parts of a quote, and a value where the quote has dots."""
    parts = [re.escape(part) for part in quote.split("...")]
    return any(re.search(r"[^\n]*?\0[^\n]*?".join(parts), text) for text in texts())


def test_messages_are_quoted() -> None:
    assert len(quoted()) > 80
    assert all(len(max(quote.split("..."), key=len)) >= 8 for quote in quoted())


@pytest.mark.parametrize("quote", quoted())
def test_a_quoted_message_exists(quote: str) -> None:
    assert is_message(quote)


def test_a_message_that_is_not_raised_is_seen() -> None:
    assert is_message("dim ... of size ... does not divide over ... ranks")
    assert not is_message("dim ... of size ... does not divide by ... ranks")
    assert not is_message("dim ... does not divide over ... ... ... ranks")
    assert not is_message("What the library raises; every error is also the built-in kind")  # a docstring


def test_every_error_is_explained() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    errors = importlib.import_module("tritoncomm.errors")
    for name in set(errors.__all__) - {"CommError"}:
        builtin = getattr(errors, name).__mro__[2].__name__
        assert f"| `{name}` | `{builtin}` |" in page, name


# The build


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not importlib.util.find_spec("mkdocstrings"), reason="the extra `site` is not installed")
def test_the_site_builds(tmp_path: Path) -> None:
    """Strict: links, anchors, navigation and docstrings; no page is fetched from other hosts."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for path in API:
        page = (tmp_path / "site" / path.relative_to(DOCS).with_suffix(".html")).read_text()
        for name, listed in directives(path):
            module = importlib.import_module(name)
            for each in listed or module.__all__:
                value = getattr(module, each)
                if inspect.isroutine(value) or (inspect.isclass(value) and value.__module__.startswith("tritoncomm")):
                    assert f'id="{name}.{each}"' in page, f"{name}.{each}"
