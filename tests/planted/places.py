"""Places in the package, named so that code which moves keeps them: by function and by what is written there.

A place is a statement, or the condition of a compound one, in the function with a certain qualified name; what is
written there is compared as `ast.unparse` writes it. Neither the file nor the line is part of the name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Package", "Place", "Spot", "header", "sequences", "spots", "text"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Statements that hold no others.
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
    """Where something is planted: `old` are the statements there, or one condition, in the function `where`."""

    where: str
    old: tuple[str, ...]


class Spot(NamedTuple):
    """What a place is in a file: the nodes that stand there, one after another."""

    path: Path
    nodes: tuple[ast.AST, ...]

    def replaced(self, source: bytes, new: tuple[str, ...]) -> bytes:
        """Return `source` with `new` there; all else stays as it is, byte by byte."""
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
    """Return a statement or an expression as it is compared."""
    return ast.unparse(node)


def header(node: ast.AST) -> ast.expr | None:
    """Return the expression that decides what a compound statement does; None of others."""
    match node:
        case ast.If() | ast.While():
            return node.test
        case ast.For() | ast.AsyncFor():
            return node.iter
    return None


def sequences(function: Function) -> Iterator[list[ast.stmt]]:
    """Return the blocks of a function, without those of functions inside it."""
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
    """Return all places of one statement or one condition."""
    for block in sequences(function):
        for node in block:
            if isinstance(node, SIMPLE):
                yield Spot(path, (node,))
            elif (condition := header(node)) is not None:
                yield Spot(path, (condition,))


class Package:
    """All functions of a package.

    Args:
        root: its folder.
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
        """Return where a place is: once, if all is well."""
        found = []
        for path, function in self.functions.get(place.where, ()):
            if len(place.old) == 1:
                found += [spot for spot in spots(path, function) if text(spot.nodes[0]) == place.old[0]]
                continue
            for block in sequences(function):
                for first in range(len(block) - len(place.old) + 1):
                    nodes = tuple(block[first : first + len(place.old)])
                    if tuple(map(text, nodes)) == place.old:
                        found.append(Spot(path, nodes))
        return found
