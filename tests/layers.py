"""The layers of the package, as the table in docs/architecture.md has them."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["LAYERS", "layers", "module"]

_PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def layers(page: str) -> list[set[str]]:
    """Return the layers of the table in `page`, lowest first, and refuse a table that names something twice."""
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE)
    named = [[module(name.strip("`")) for name in names.split()] for _, names in reversed(rows)]
    assert [int(number) for number, _ in reversed(rows)] == list(range(len(rows))), "layers are numbered from below"
    assert len(set().union(*named)) == sum(map(len, named)), "a module has one layer"
    return [set(names) for names in named]


def module(path: str) -> str:
    """Return what stands for a file or folder at the top of the package in `LAYERS`."""
    return "aiocoll" if path == "__init__.py" else path.removesuffix(".py").removesuffix("/")


#: Lowest first: a module may import layers before its own in this list, and its own folder. A folder stands for all
#: that is in it, `aiocoll` for the public names.
LAYERS = layers(_PAGE.read_text())
