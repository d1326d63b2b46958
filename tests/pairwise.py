"""Pairwise test cases: few cases that together contain every pair of values of two different parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Pair = frozenset[tuple[str, Hashable]]


def cover(space: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool]) -> Iterator[Case]:
    """Yield cases that together contain every valid pair of values of two dimensions.

    Args:
        space: the values of each dimension.
        valid: whether a case, which may lack dimensions, can be completed. Invalid pairs need no cover.
    """
    open_pairs: dict[Pair, None] = {}
    for (one, values), (other, others) in combinations(space.items(), 2):
        for a, b in product(values, others):
            if valid({one: a, other: b}):
                open_pairs[frozenset({(one, a), (other, b)})] = None
    while open_pairs:
        case = _extend(dict(next(iter(open_pairs))), space, valid, open_pairs)
        for pair in _pairs(case):
            open_pairs.pop(pair, None)
        yield case


def _extend(
    case: Case, space: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool], open_pairs: Mapping[Pair, None]
) -> Case:
    """Complete `case`: for each missing dimension, add the value that covers the most open pairs."""
    for name, values in space.items():
        if name in case:
            continue
        candidates = [{**case, name: value} for value in values if valid({**case, name: value})]
        case = max(candidates, key=lambda each: sum(pair in open_pairs for pair in _pairs(each)))
    return case


def _pairs(case: Case) -> Iterator[Pair]:
    return (frozenset(pair) for pair in combinations(case.items(), 2))
