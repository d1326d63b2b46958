"""Hypothesis strategies for nearly valid data: valid nested values in which a few elements are changed."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

#: Integers at and next to the powers of two that limit number types, such as 2**31 - 1 and 2**31.
EDGES = sorted(
    {
        sign * (1 << bits) + around
        for bits in (0, 7, 8, 16, 31, 32, 53, 62, 63)
        for around in (-1, 0, 1)
        for sign in (1, -1)
    }
    | {0, (1 << 64) - 1}
)

numbers = st.sampled_from([edge for edge in EDGES if -(1 << 63) <= edge < 1 << 64])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["x" * 70_000, "\x00"]),
    st.binary(max_size=6),
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)

Path = tuple[Any, ...]


def paths(value: Any, above: Path = ()) -> list[Path]:
    """Return the path of each element in nested dicts and lists: a tuple of keys and indices."""
    found = [above]
    if isinstance(value, dict):
        for name, each in value.items():
            found += paths(each, (*above, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            found += paths(each, (*above, index))
    return found


def at(value: Any, path: Path) -> Any:
    """Return the element of a nested value at a path of keys and indices."""
    for step in path:
        value = value[step]
    return value


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[Any]) -> Any:
    """Draw a valid nested value, and change up to three of its elements."""
    value = copy.deepcopy(draw(valid))
    for _ in range(draw(st.integers(0, 3))):
        value = _changed(draw, value)
    return value


def _changed(draw: st.DrawFn, value: Any) -> Any:
    path = draw(st.sampled_from(paths(value)))
    part = at(value, path)
    how = draw(st.sampled_from(["replace", "drop", "add", "repeat", "nest", "near"]))
    if isinstance(part, dict) and how == "add":
        part[draw(st.sampled_from(["t", "g", "op", "extra", "linked", "asked"]))] = draw(junk)
    elif isinstance(part, dict) and part and how == "drop":
        del part[draw(st.sampled_from(sorted(part, key=str)))]
    elif isinstance(part, list) and how in ("drop", "repeat", "add"):
        if how == "add" or not part:
            part.append(draw(junk))
        elif how == "drop":
            part.pop(draw(st.integers(0, len(part) - 1)))
        else:
            part += part * draw(st.sampled_from([1, 3, 200]))
    elif type(part) is int and how == "near":
        return _with_part(value, path, part + draw(st.sampled_from([-1, 1, 2])))
    elif how == "nest":
        return _with_part(value, path, [part] if draw(st.booleans()) else {"t": "relayed", "from": 1, "note": part})
    else:
        return _with_part(value, path, draw(junk))
    return value


def _with_part(value: Any, path: Path, part: Any) -> Any:
    if not path:
        return part
    at(value, path[:-1])[path[-1]] = part
    return value
