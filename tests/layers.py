"""The layers of the package, as the table in docs/architecture.md has them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

__all__ = ["HOUSES", "LAYERS", "houses", "layers", "module"]

_PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def _rows(page: str) -> list[tuple[int, list[list[str]]]]:
    """Return number and modules of each layer, lowest first; those of base, core and edge are lists of their own."""
    rows = re.findall(r"^\| (\d+) \| (.*?) ?\| (.*?) ?\| (.*?) ?\|", page, re.MULTILINE)
    return [
        (int(number), [[module(name.strip("`")) for name in cell.split()] for cell in cells])
        for number, *cells in reversed(rows)
    ]


def layers(page: str) -> list[set[str]]:
    """Return the layers of the table in `page`, lowest first, and refuse a table that names something twice."""
    numbers, named = zip(*((number, [*itertools.chain(*cells)]) for number, cells in _rows(page)), strict=True)
    assert [*numbers] == list(range(len(numbers))), "layers are numbered from below"
    assert len(set().union(*named)) == sum(map(len, named)), "a module has one layer"
    return [set(names) for names in named]


def houses(page: str) -> dict[str, set[str]]:
    """Return the modules of base, core and edge by the table in `page`."""
    parts = zip(*(cells for _, cells in _rows(page)), strict=True)
    return {name: set(itertools.chain(*part)) for name, part in zip(("base", "core", "edge"), parts, strict=True)}


def module(path: str) -> str:
    """Return what stands for a file or folder at the top of the package in `LAYERS`."""
    return "aiocoll" if path == "__init__.py" else path.removesuffix(".py").removesuffix("/")


#: Lowest first: a module may import layers before its own in this list, and its own folder. A folder stands for all
#: that is in it, `aiocoll` for the public names.
LAYERS = layers(_PAGE.read_text())
#: Base, core and edge of the package, by their names.
HOUSES = houses(_PAGE.read_text())
