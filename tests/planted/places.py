"""Places in the package's code that can be found again after the code has moved.

A place is a statement, or the condition of a compound statement. It is identified by the qualified name of its function
and by its text from `ast.unparse`. The file and the line are not part of the identity.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Package", "Place", "Spot", "header", "sequences", "spots", "text"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: The AST node types of simple statements, which contain no other statements.
SIMPLE = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Expr,
    ast.Return,
    ast.Raise,
    ast.Delete,
    ast.Break,
    ast.Continue,
)


class Place(NamedTuple):
    """A place in the code for a fault: consecutive statements, or one condition.

    Attributes:
        where: the qualified name of the function.
        old: the texts of consecutive statements, or of one condition.
    """

    where: str
    old: tuple[str, ...]


class Spot(NamedTuple):
    """The AST nodes of a place in the code, and the file that contains them."""

    path: Path
    nodes: tuple[ast.AST, ...]

    def replaced(self, source: bytes, new: tuple[str, ...]) -> bytes:
        """Return `source` with the nodes replaced by `new`; all other bytes stay the same."""
        lines = source.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        first, last = self.nodes[0], self.nodes[-1]
        start = starts[first.lineno - 1] + first.col_offset  # type: ignore[attr-defined]
        stop = starts[last.end_lineno - 1] + last.end_col_offset  # type: ignore[attr-defined]
        indent = "\n" + " " * first.col_offset  # type: ignore[attr-defined]
        return source[:start] + indent.join(new).encode() + source[stop:]


def text(node: ast.AST) -> str:
    """Return the normalized source text of a statement or an expression, for comparisons."""
    return ast.unparse(node)


def header(node: ast.AST) -> ast.expr | None:
    """Return the condition or the iterable of a compound statement; None for other statements."""
    match node:
        case ast.If() | ast.While():
            return node.test
        case ast.For() | ast.AsyncFor():
            return node.iter
    return None


def sequences(function: Function) -> Iterator[list[ast.stmt]]:
    """Yield the blocks (lists of statements) of a function, without those of nested functions."""
    waiting: list[ast.AST] = [function]
    while waiting:
        node = waiting.pop()
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block
                waiting += [each for each in block if not isinstance(each, Function | ast.ClassDef)]
        waiting += getattr(node, "handlers", [])
        waiting += getattr(node, "cases", [])


def spots(path: Path, function: Function) -> Iterator[Spot]:
    """Yield a `Spot` for each simple statement and each condition in a function."""
    for block in sequences(function):
        for node in block:
            if isinstance(node, SIMPLE):
                yield Spot(path, (node,))
            elif (condition := header(node)) is not None:
                yield Spot(path, (condition,))


class Package:
    """The functions of a package, by qualified name.

    Args:
        root: the folder of the package.
    """

    def __init__(self, root: Path) -> None:
        self.functions: dict[str, list[tuple[Path, Function]]] = defaultdict(list)
        for path in sorted(root.rglob("*.py")):
            self._collect(path, ast.parse(path.read_bytes()), "")

    def _collect(self, path: Path, parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | Function):
                name = f"{prefix}{node.name}"
                if isinstance(node, Function):
                    self.functions[name].append((path, node))
                self._collect(path, node, f"{name}.")
            else:
                self._collect(path, node, prefix)

    def find(self, place: Place) -> list[Spot]:
        """Return the spots that match a place: exactly one if the place is unique and still exists."""
        found = []
        old = tuple(text(ast.parse(each)) for each in place.old)  # Python versions quote nested strings differently
        for path, function in self.functions.get(place.where, ()):
            if len(old) == 1:
                found += [spot for spot in spots(path, function) if text(spot.nodes[0]) == old[0]]
                continue
            for block in sequences(function):
                for first in range(len(block) - len(old) + 1):
                    nodes = tuple(block[first : first + len(old)])
                    if tuple(map(text, nodes)) == old:
                        found.append(Spot(path, nodes))
        return found
