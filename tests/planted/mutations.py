"""Mutants for mutation testing: small faults that a programmer could make, each at one place in the code."""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from .places import SIMPLE, Function, Package, Place, header, sequences, text

__all__ = ["Mutant", "draw", "mutants"]


class Mutant(NamedTuple):
    """A fault to plant in the package: the original code, and its replacement.

    Attributes:
        subject: the part of the package, one of `SUBJECTS`.
        kind: the kind of mutation, one of `KINDS`, or "by hand".
        where: the qualified name of the function.
        old: the statements at the place, or one condition.
        new: their replacement.
    """

    subject: str
    kind: str
    where: str
    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def place(self) -> Place:
        """The function and the original code of the fault, which identify its place in the package."""
        return Place(self.where, self.old)


#: Comparison operators that programmers confuse.
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def _comparison(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for other in COMPARISONS[type(node.ops[-1])]:
            yield ast.Compare(node.left, [*node.ops[:-1], other()], node.comparators)


def _shifted(node: ast.expr, step: int) -> ast.expr:
    return ast.BinOp(node, ast.Add() if step > 0 else ast.Sub(), ast.Constant(1))


def _bound(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, ops, [*others, last]) if isinstance(ops[-1], ORDERS):
            yield ast.Compare(left, ops, [*others, _shifted(last, 1)])
            yield ast.Compare(left, ops, [*others, _shifted(last, -1)])
        case ast.Slice(lower, upper, None):
            if upper is not None:
                yield ast.Slice(lower, _shifted(upper, -1), None)
            if lower is not None:
                yield ast.Slice(_shifted(lower, 1), upper, None)
        case ast.Call(ast.Name("range") as name, [*others, last], []):
            yield ast.Call(name, [*others, _shifted(last, -1)], [])
        case ast.Call(ast.Name("min" | "max" as name), arguments, keywords):
            yield ast.Call(ast.Name("max" if name == "min" else "min"), arguments, keywords)


def _negation(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _constant(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        if any(map(_is_text, ast.walk(node))):
            return
        other = copy.deepcopy(node)
        other.op = ARITHMETIC[type(node.op)]()
        yield other


def _arguments(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        # Swap only two arguments of the same AST node type: if a name and a number swap, the call fails at once.
        case ast.Call(func, [first, second, *others], keywords) if type(first) is type(second) is not ast.Starred:
            if text(func) not in ("isinstance", "min", "max"):
                yield ast.Call(func, [second, first, *others], keywords)


#: The functions that yield the mutations of an AST node, by kind of mutation.
INSIDE: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": _comparison,
    "bound": _bound,
    "negation": _negation,
    "constant": _constant,
    "arguments": _arguments,
}
KINDS = (*INSIDE, "dropped", "order")


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().visit(node)


def _is_for_people(node: ast.AST) -> bool:
    """Return whether an AST node only produces text for people: a docstring, a message or a log record."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Name) and each.id in ("logger", "warnings"))
        for each in ast.walk(node)
    )


def _is_call(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value.value if isinstance(value, ast.Await) else value, ast.Call)


def _mutations_of_place(node: ast.AST, is_condition: bool) -> Iterator[tuple[str, str]]:
    """Yield the kind and the code of each mutation of a statement or condition."""
    if isinstance(node, ast.Raise):
        yield "dropped", "pass"
        return
    if _is_for_people(node):
        return
    if _is_call(node):
        yield "dropped", "pass"
    if isinstance(node, ast.expr) and is_condition:
        yield "negation", text(ast.UnaryOp(ast.Not(), node))
    body = node.value if isinstance(node, ast.AnnAssign) else node
    for number, inside in enumerate(ast.walk(body) if body is not None else ()):
        for kind, operator in INSIDE.items():
            for count, _ in enumerate(operator(inside)):
                whole = copy.deepcopy(node)
                body_copy = whole.value if isinstance(whole, ast.AnnAssign) else whole
                assert body_copy is not None
                old = list(ast.walk(body_copy))[number]
                new = list(operator(old))[count]
                yield kind, text(ast.fix_missing_locations(_Replace(old, new).visit(whole)))


def _mutations_of_function(function: Function) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    for block in sequences(function):
        for node in block:
            place = node if isinstance(node, SIMPLE) else header(node)
            if place is not None:
                yield from (
                    (kind, (text(place),), (new,))
                    for kind, new in _mutations_of_place(place, isinstance(node, ast.If | ast.While))
                )
        for one, other in itertools.pairwise(block):
            if _can_be_swapped(one, other):
                both = text(one), text(other)
                yield "order", both, both[::-1]


def _targets(node: ast.stmt) -> list[ast.expr]:
    match node:
        case ast.Assign():
            return [each for target in node.targets for each in getattr(target, "elts", [target])]
        case ast.AugAssign() | ast.AnnAssign():
            return [node.target]
    return []


def _can_be_swapped(one: ast.stmt, other: ast.stmt) -> bool:
    """Return whether swapping two adjacent statements makes a fault that a programmer could overlook."""
    for each in (one, other):
        if not isinstance(each, SIMPLE) or _is_for_people(each) or isinstance(each, ast.Return | ast.Raise | ast.Break):
            return False
    before, after = text(one), text(other)
    local = {name.id for target in _targets(one) for name in ast.walk(target) if isinstance(name, ast.Name)} - {"self"}
    if any(isinstance(name, ast.Name) and name.id in local for name in ast.walk(other)):
        return False
    if _is_call(one) or _is_call(other):
        return True
    depends = [text(target) in after for target in _targets(one)] + [
        text(target) in before for target in _targets(other)
    ]
    return any(depends)


def mutants(package: Package, subject: str, files: Collection[Path]) -> list[Mutant]:
    """Return all mutants of the code in `files` whose place is unique in the package."""
    found: dict[Mutant, None] = {}
    for where, functions in package.functions.items():
        for path, function in functions:
            if path in files:
                for kind, old, new in _mutations_of_function(function):
                    if old != new and len(package.find(Place(where, old))) == 1:
                        found[Mutant(subject, kind, where, old, new)] = None
    return list(found)


def draw(candidates: list[Mutant], count: int, seed: str, taken: Collection[Mutant] = ()) -> list[Mutant]:
    """Return `count` random mutants, evenly over all kinds of mutation, at most one per place in the code.

    Args:
        candidates: the mutants to choose from.
        count: the number of mutants to return.
        seed: the seed of the random choice.
        taken: mutants whose places are not used again.
    """
    chance = random.Random(seed)
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in candidates:
        by_kind[mutant.kind].append(mutant)
    for each in by_kind.values():
        chance.shuffle(each)
    kinds = [kind for kind in KINDS if kind in by_kind]
    chance.shuffle(kinds)
    places = {mutant.place for mutant in taken}
    drawn: list[Mutant] = []
    while kinds and len(drawn) < count:
        kind = kinds.pop(0)
        while by_kind[kind]:
            mutant = by_kind[kind].pop()
            if mutant.place not in places:
                places.add(mutant.place)
                drawn.append(mutant)
                kinds.append(kind)
                break
    return drawn
