"""The layers of the package, from the table in docs/architecture.md."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

__all__ = ["HOUSES", "LAYERS", "houses", "layers", "module"]

_PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def _rows(page: str) -> list[tuple[int, list[list[str]]]]:
    """Return (number, modules) of each layer, lowest first; the modules are split into base, core and edge."""
    rows = re.findall(r"^\| (\d+) \| (.*?) ?\| (.*?) ?\| (.*?) ?\|", page, re.MULTILINE)
    return [
        (int(number), [[module(name.strip("`")) for name in cell.split()] for cell in cells])
        for number, *cells in reversed(rows)
    ]


def layers(page: str) -> list[set[str]]:
    """Return the module names of each layer in the page's table, lowest layer first; no module may occur twice."""
    numbers, named = zip(*((number, [*itertools.chain(*cells)]) for number, cells in _rows(page)), strict=True)
    assert [*numbers] == list(range(len(numbers))), "layers are not numbered from the lowest one"
    assert len(set().union(*named)) == sum(map(len, named)), "a module is in two layers"
    return [set(names) for names in named]


def houses(page: str) -> dict[str, set[str]]:
    """Return the module names in each of the table's columns base, core and edge."""
    parts = zip(*(cells for _, cells in _rows(page)), strict=True)
    return {name: set(itertools.chain(*part)) for name, part in zip(("base", "core", "edge"), parts, strict=True)}


def module(path: str) -> str:
    """Return the name by which `LAYERS` lists a top-level file or folder of the package."""
    return "aiocoll" if path == "__init__.py" else path.removesuffix(".py").removesuffix("/")


#: The layers, lowest first: a module may import modules of lower layers, and of its own folder. A folder stands for all
#: its modules, `aiocoll` for the public names.
LAYERS = layers(_PAGE.read_text())
#: The module names in each of the columns base, core and edge.
HOUSES = houses(_PAGE.read_text())
