"""The site that `make docs` builds: no build warnings, valid links, and all public names in the reference."""

from __future__ import annotations

import html
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from .browser import MISSING, SCHEMES, WIDTHS, browser, executable
from .public_names import OPERATORS, RECORD

pytest.importorskip("sphinx", reason="sphinx is not installed: pip install -e '.[docs]'")
pytest.importorskip("furo", reason="furo is not installed: pip install -e '.[docs]'")
pytest.importorskip("myst_parser", reason="myst-parser is not installed: pip install -e '.[docs]'")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
#: Files and folders from which the site is built.
SOURCES = ("docs", "examples", "bench", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")

#: JavaScript that returns the luminance of the page background, and the contrast of each text with its background. Both
#: are defined in WCAG 2.
COLOURS = """(() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number)
    const light = ([r, g, b]) => [r, g, b].map(each => each / 255)
        .map(each => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
        .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0)
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = numbers(getComputedStyle(node).backgroundColor)
            if (colour.length < 4 || colour[3] == 1) return colour
        }
        return [255, 255, 255]
    }
    const names = ["p", "li", "td", "code", "a", "h2"].map(each => "article " + each).join()
    const texts = [...document.querySelectorAll(names)]
        .filter(each => each.innerText.trim() && each.checkVisibility())
        .map(each => {
            const [one, two] = [light(numbers(getComputedStyle(each).color)), light(behind(each))].sort((a, b) => b - a)
            return [each.innerText.slice(0, 60), (one + 0.05) / (two + 0.05)]
        })
    return {paper: light(behind(document.querySelector("article"))), texts}
})()"""


def build(tree: Path) -> str:
    """Build the site of a copied source tree; return the warnings of Sphinx."""
    strict = ("--nitpicky", "--fail-on-warning", "--keep-going", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, "docs", "build"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode == 0) is (done.stderr == ""), done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the source tree in which the site is built."""
    copy = tmp_path_factory.mktemp("site")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".venvs"))
        else:
            shutil.copy(ROOT / name, copy)
    assert build(copy) == ""
    return copy


def described_names(tree: Path) -> set[tuple[str, str]]:
    """Return the last two components of each name in the site's reference, such as (class, attribute)."""
    data = zlib.decompress((tree / "build" / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    entries = [line.split(" ")[:2] for line in data.splitlines()]
    return {last_two(name) for name, kind in entries if kind.startswith("py:")}


def last_two(name: str) -> tuple[str, str]:
    *_, owner, last = f".{name}".split(".")
    return owner, last


def recorded_names() -> list[str]:
    """Return the names in `tests/public_names.txt`, except aliases and special methods."""
    lines = [line for line in RECORD.read_text().splitlines() if not re.match(r"[\w.]+ = ", line)]
    names = [re.sub(r"(?<=.)\(.*", "", line.replace("(", "", 1).replace(")", "", 1) if line[0] == "(" else line)
             for line in lines]  # fmt: skip
    return [name for name in names if name.rpartition(".")[2] not in OPERATORS]


def possible_names(name: str) -> set[tuple[str, str]]:
    """Return all (owner, name) pairs by which the reference may describe a public name."""
    owner, _, last = name.rpartition(".")
    found = resolve_or_none(owner) or resolve_or_none(f"aiocoll.plugins.{owner}")
    bases = found.__mro__ if inspect.isclass(found) else ()
    same = resolve_or_none(name) is not None and resolve_or_none(name) is resolve_or_none(f"aiocoll.{last}")
    return {last_two(name), *((base.__name__, last) for base in bases), *([("aiocoll", last)] if same else [])}


def resolve_or_none(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def test_reference_pages_contain_every_public_name(tree: Path) -> None:
    described = described_names(tree)
    names = recorded_names()
    assert len(names) > 500
    assert [name for name in names if not possible_names(name) & described] == []
    assert [name for name in ("aiocoll.nothing", "aiocoll.Work.nothing") if possible_names(name) & described] == []


def test_reference_entry_of_a_call_contains_arguments_and_cost(tree: Path) -> None:
    page = (tree / "build/reference/group.html").read_text()
    call = page[page.index('id="aiocoll.ProcessGroup.allreduce"') : page.index('id="aiocoll.ProcessGroup.reduce"')]
    sections = re.findall(r'<dt class="field-\w+">(\w+)<', call)
    assert sections == ["Parameters", "Returns", "Raises", "Cost", "Source"]
    for part in ("[a0+b0 a1+b1]", "number of elements", "seconds", "2 n (p-1)/p bytes", "doi:", ">[source]<"):
        assert part in call


def test_site_links_have_targets(tree: Path) -> None:
    """Check that links to files and anchors have targets, and that external links are well-formed https URLs.

    Pages of source code are left out: Sphinx links from there to names that the reference describes under an alias.
    """
    site = tree / "build"
    possible_names = {path: set(re.findall(r'\bid="([^"]+)"', path.read_text())) for path in site.rglob("*.html")}
    seen, wrong = 0, []
    for path in (each for each in possible_names if "_modules" not in each.parts):
        for link in re.findall(r'<a [^>]*\bhref="([^"]*)"', path.read_text()):
            target, _, anchor = html.unescape(link).partition("#")
            if re.match(r"\w+:", target):
                good = re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w./%()-]*)?", target) is not None
            else:
                there = (path.parent / unquote(target)).resolve() if target else path
                good = there.is_file() and (
                    not anchor or there not in possible_names or unquote(anchor) in possible_names[there]
                )
            seen += 1
            wrong += [] if good else [f"{path.relative_to(site)}: {link}"]
    assert seen > 5000
    assert wrong == []


def test_public_names_on_the_pages_are_links_to_the_reference(tree: Path) -> None:
    page = (tree / "build/architecture.html").read_text()
    assert re.search(r'<a [^>]*href="wire.html"[^>]*><code[^>]*><span class="pre">docs/wire.md<', page)
    assert re.search(r'href="project/CONTRIBUTING.html"', (tree / "build/index.html").read_text())


@pytest.mark.skipif(executable() is None, reason=MISSING)
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_pages_fit_the_browser_and_load_nothing_external(tree: Path, tmp_path: Path, width: int) -> None:
    """Check also that text contrast on two pages is sufficient in the light and the dark colour scheme."""
    site = tree / "build"
    pages = [path for path in site.rglob("*.html") if "_modules" not in path.parts]
    assert len(pages) > 40
    papers = {}
    with browser(tmp_path / "browser") as opened:
        with opened.page(width) as page:
            for path in pages:
                page.open(path.as_uri())
                assert page.hidden_elements("article") == [], path.name
            assert page.console_messages() == []
            assert [each for each in page.loaded_urls() if not each.startswith(("file:", "data:"))] == []
        for scheme in SCHEMES:
            with opened.page(width, scheme) as page:
                for name in ("guide.html", "reference/group.html"):
                    page.open((site / name).as_uri())
                    found = page.eval(COLOURS)
                    faint = [text for text, contrast in found["texts"] if contrast < 4.5]
                    assert len(found["texts"]) > 50
                    assert faint == [], scheme
                    papers[scheme] = found["paper"]
    assert papers["light"] > 0.9
    assert papers["dark"] < 0.1


def test_page_outside_of_the_table_of_contents_fails_the_site_build(tree: Path) -> None:
    page = tree / "docs" / "orphan.md"
    page.write_text("# A page\n\n[One that is not there](nothing.md), [no heading](guide.md#nothing)\n")
    warnings = build(tree)
    page.unlink()
    (tree / "build/orphan.html").unlink()
    assert "orphan.md: WARNING: document isn't included in any toctree" in warnings
    assert "'nothing.md'" in warnings
    assert "guide" in warnings
    assert build(tree) == ""


def test_reference_to_a_missing_name_fails_the_site_build(tree: Path) -> None:
    page = tree / "docs" / "reference" / "works.rst"
    text = page.read_text()
    page.write_text(f"{text}\n`ProcessGroup.allreduce`, `ProcessGroup.nothing`\n")
    warnings = build(tree)
    page.write_text(text)
    assert "ProcessGroup.nothing" in warnings
    assert "ProcessGroup.allreduce" not in warnings


def test_site_pages_contain_only_tested_code() -> None:
    """Check that reference pages contain no code blocks of their own, which no other test would run."""
    known = {
        "autoclass",
        "autoexception",
        "autofunction",
        "automodule",
        "currentmodule",
        "include",
        "py:data",
        "toctree",
    }
    for path in (ROOT / "docs").rglob("*.rst"):
        text = path.read_text()
        directives = re.findall(r"^\.\. ([\w:-]+)::", text, re.MULTILINE)
        assert set(directives) <= known, path
        assert len(re.findall("::", text)) == len(directives), path
