"""Checks of plain data: what a value may be, put together from small parts.

A check is called with a value and a `Scope`, and raises `Misfit` if the value is not what it should be. Checks look no
deeper than they were put together, whatever the value is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

__all__ = [
    "TEXT",
    "Check",
    "Misfit",
    "Scope",
    "anything",
    "data",
    "either",
    "fields",
    "fitting",
    "group_rank",
    "integer",
    "job_rank",
    "listed",
    "mapped",
    "maybe",
    "one_of",
    "per_rank",
    "rank_list",
    "refuse",
    "row",
    "seconds",
    "shown",
    "text",
]

#: Characters of a value that a message shows.
SHOWN = 80
#: Characters of a text: error messages that list what was called are cut at that.
TEXT = 1 << 16
#: Things in a list: counts are one per rank, and jobs of more ranks than this are out of reach.
LIST = 1 << 16


class Scope(NamedTuple):
    """How many ranks there are: in the job, and in the group of the message; None if this rank is not in that."""

    world: int
    group: int | None


Check = Callable[[Any, Scope], None]


class Misfit(ValueError):
    """A value is not what it should be."""


def shown(value: Any) -> str:
    """Write a value, or how it begins."""
    text = repr(value) if isinstance(value, (int, float, str, bytes, bool, type(None))) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def refuse(value: Any, wanted: str) -> None:
    """Say what `value` should be.

    Raises:
        Misfit: always.
    """
    raise Misfit(f"{shown(value)} is not {wanted}")


def integer(stop: int, start: int = 0) -> Check:
    """A number from `start` to below `stop`."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not int or not start <= value < stop:
            refuse(value, f"a number from {start} to {stop - 1}")

    return check


def text(limit: int = TEXT) -> Check:
    """A text of at most so many characters."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not str or len(value) > limit:
            refuse(value, f"a text of at most {limit} characters")

    return check


def data(limit: int) -> Check:
    """At most so many bytes."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not bytes or len(value) > limit:
            refuse(value, f"at most {limit} bytes")

    return check


def one_of(*values: Any) -> Check:
    """One of these."""

    def check(value: Any, scope: Scope) -> None:
        if not any(type(value) is type(each) and value == each for each in values):
            refuse(value, f"one of {values}")

    return check


def either(*checks: Check) -> Check:
    """What fits one of these."""

    def check(value: Any, scope: Scope) -> None:
        for each in checks[:-1]:
            try:
                each(value, scope)
            except Misfit:
                continue
            return
        checks[-1](value, scope)

    return check


def maybe(inner: Check) -> Check:
    """None, or what fits."""

    def check(value: Any, scope: Scope) -> None:
        if value is not None:
            inner(value, scope)

    return check


def listed(inner: Check, limit: int = LIST) -> Check:
    """A list of things that fit."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not list or len(value) > limit:
            refuse(value, f"a list of at most {limit}")
        for each in value:
            inner(each, scope)

    return check


def mapped(inner: Check) -> Check:
    """A map from texts to things that fit."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not dict or not all(type(name) is str for name in value):
            refuse(value, "a map from texts")
        for each in value.values():
            inner(each, scope)

    return check


def anything(value: Any, scope: Scope) -> None:
    """Whatever there is: it is checked elsewhere, or only shown."""


def row(*checks: Check) -> Check:
    """A list with one thing for each of these."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not list or len(value) != len(checks):
            refuse(value, f"a list of {len(checks)}")
        for inner, each in zip(checks, value, strict=True):
            inner(each, scope)

    return check


def fields(optional: Mapping[str, Check] | None = None, /, **required: Check) -> Check:
    """A map with all these fields, perhaps some of the optional ones, and no other."""
    known = {**required, **(optional or {})}

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not dict:
            refuse(value, "a map")
        for name in required:
            if name not in value:
                raise Misfit(f"{name} is missing")
        for name, each in value.items():
            inner = known.get(name)
            if inner is None:
                raise Misfit(f"there is no field {shown(name)}")
            try:
                inner(each, scope)
            except Misfit as error:
                raise Misfit(f"{name}: {error}") from None

    return check


def fitting(words: str) -> str:
    """Return a text as a message can carry it: cut to `TEXT` characters, each of which is one."""
    return words[:TEXT].encode("utf-8", "replace").decode()


#: Seconds that no clock shows: 30,000 years.
LONG = 1e12
_COUNT = integer(1 << 63)


def job_rank(value: Any, scope: Scope) -> None:
    """A rank of the job."""
    if type(value) is not int or not 0 <= value < scope.world:
        refuse(value, f"one of the {scope.world} ranks")


def group_rank(value: Any, scope: Scope) -> None:
    """A rank of the group that is spoken of."""
    size = scope.world if scope.group is None else scope.group
    if type(value) is not int or not 0 <= value < size:
        refuse(value, f"one of the {size} ranks of the group")


def rank_list(value: Any, scope: Scope) -> None:
    """Ranks of the job, ascending."""
    listed(job_rank)(value, scope)
    if any(one >= two for one, two in pairwise(value)):
        refuse(value, "a list of ranks that ascend")


def per_rank(value: Any, scope: Scope) -> None:
    """A number for each rank of the group."""
    listed(_COUNT)(value, scope)
    if scope.group not in (None, len(value)):
        raise Misfit(f"{len(value)} numbers are not one for each of the {scope.group} ranks of the group")


def seconds(value: Any, scope: Scope) -> None:
    """Seconds, of any clock."""
    if type(value) not in (int, float) or not -LONG < value < LONG:
        refuse(value, "a number of seconds")
