"""Schema checks of received data, composed of small functions.

A check takes a value and a `Scope`, and raises `SchemaError` if the value is invalid. A check inspects only as many
levels as its schema has, however deep the value is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

__all__ = [
    "TEXT",
    "Check",
    "SchemaError",
    "Scope",
    "any_of",
    "any_value",
    "data",
    "describe_value",
    "fields",
    "fit_text",
    "group_rank",
    "integer",
    "job_rank",
    "list_of",
    "map_of",
    "none_or",
    "one_of",
    "per_rank",
    "rank_list",
    "rank_order",
    "refuse",
    "row",
    "seconds",
    "text",
]

#: Maximum number of characters that an error message shows of a value.
SHOWN = 80
#: Maximum number of characters of a string in a message. Longer error texts, which list calls, are truncated.
TEXT = 1 << 16
#: Maximum number of items in a list. The longest lists have one item per rank, and no job has more ranks.
LIST = 1 << 16


class Scope(NamedTuple):
    """The numbers of ranks in the job and in the message's group (None if this rank is not in that group)."""

    world: int
    group: int | None


Check = Callable[[Any, Scope], None]


class SchemaError(ValueError):
    """Raised when a value does not match its schema."""


def describe_value(value: Any) -> str:
    """Return the text form of a value for an error message, truncated if it is long."""
    text = repr(value) if isinstance(value, (int, float, str, bytes, bool, type(None))) else type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def refuse(value: Any, wanted: str) -> None:
    """Raise `SchemaError` with the rejected value and the expected kind of value.

    Raises:
        SchemaError: always.
    """
    raise SchemaError(f"{describe_value(value)} is not {wanted}")


def integer(stop: int, start: int = 0) -> Check:
    """Return a check for an integer of at least `start` and below `stop`."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not int or not start <= value < stop:
            refuse(value, f"a number from {start} to {stop - 1}")

    return check


def text(limit: int = TEXT) -> Check:
    """Return a check for a string of at most `limit` characters."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not str or len(value) > limit:
            refuse(value, f"a text of at most {limit} characters")

    return check


def data(limit: int) -> Check:
    """Return a check for a bytes object of at most `limit` bytes."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not bytes or len(value) > limit:
            refuse(value, f"at most {limit} bytes")

    return check


def one_of(*values: Any) -> Check:
    """Return a check for a value that equals one of `values`."""

    def check(value: Any, scope: Scope) -> None:
        if not any(type(value) is type(each) and value == each for each in values):
            refuse(value, f"one of {values}")

    return check


def any_of(*checks: Check) -> Check:
    """Return a check for a value that passes at least one of `checks`."""

    def check(value: Any, scope: Scope) -> None:
        for each in checks[:-1]:
            try:
                each(value, scope)
            except SchemaError:
                continue
            return
        checks[-1](value, scope)

    return check


def none_or(inner: Check) -> Check:
    """Return a check for None, or a value that passes the check `inner`."""

    def check(value: Any, scope: Scope) -> None:
        if value is not None:
            inner(value, scope)

    return check


def list_of(inner: Check, limit: int = LIST) -> Check:
    """Return a check for a list of at most `limit` values that all pass the check `inner`."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not list or len(value) > limit:
            refuse(value, f"a list of at most {limit} values")
        for each in value:
            inner(each, scope)

    return check


def map_of(inner: Check) -> Check:
    """Return a check for a dict with string keys, whose values all pass the check `inner`."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not dict or not all(type(name) is str for name in value):
            refuse(value, "a map with text keys")
        for each in value.values():
            inner(each, scope)

    return check


def any_value(value: Any, scope: Scope) -> None:
    """Accept any value, because later code checks it, or only displays it."""


def row(*checks: Check) -> Check:
    """Return a check for a list of fixed length, with one value for each of `checks`, in this order."""

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not list or len(value) != len(checks):
            refuse(value, f"a list of {len(checks)}")
        for inner, each in zip(checks, value, strict=True):
            inner(each, scope)

    return check


def fields(optional: Mapping[str, Check] | None = None, /, **required: Check) -> Check:
    """Return a check for a dict with all `required` keys, any of the `optional` keys, and no others."""
    known = {**required, **(optional or {})}

    def check(value: Any, scope: Scope) -> None:
        if type(value) is not dict:
            refuse(value, "a map")
        for name in required:
            if name not in value:
                raise SchemaError(f"{name} is missing")
        for name, each in value.items():
            inner = known.get(name)
            if inner is None:
                raise SchemaError(f"unknown field {describe_value(name)}")
            try:
                inner(each, scope)
            except SchemaError as error:
                raise SchemaError(f"{name}: {error}") from None

    return check


def fit_text(message: str) -> str:
    """Return `text` in a form that a message accepts: at most `TEXT` characters, lone surrogates replaced."""
    return message[:TEXT].encode("utf-8", "replace").decode()


#: Maximum clock reading in seconds: 30,000 years.
LONG = 1e12
_COUNT = integer(1 << 63)


def job_rank(value: Any, scope: Scope) -> None:
    """Check that a value is a rank of the job."""
    if type(value) is not int or not 0 <= value < scope.world:
        refuse(value, f"one of the {scope.world} ranks")


def group_rank(value: Any, scope: Scope) -> None:
    """Check that a value is a rank of the message's group."""
    size = scope.world if scope.group is None else scope.group
    if type(value) is not int or not 0 <= value < size:
        refuse(value, f"one of the {size} ranks of the group")


def rank_list(value: Any, scope: Scope) -> None:
    """Check that a value is a list of ranks of the job in ascending order."""
    list_of(job_rank)(value, scope)
    if any(one >= two for one, two in pairwise(value)):
        refuse(value, "an ascending list of ranks")


def rank_order(value: Any, scope: Scope) -> None:
    """Check that a value is a list of distinct ranks of the job, in the order of their ranks in a group."""
    list_of(job_rank)(value, scope)
    if len(set(value)) < len(value):
        refuse(value, "a list of distinct ranks")


def per_rank(value: Any, scope: Scope) -> None:
    """Check that a value is a list with one number for each rank of the group."""
    list_of(_COUNT)(value, scope)
    if scope.group not in (None, len(value)):
        raise SchemaError(f"expected {scope.group} numbers, one per rank of the group; got {len(value)}")


def seconds(value: Any, scope: Scope) -> None:
    """Check that a value is a clock reading in seconds."""
    if type(value) not in (int, float) or not -LONG < value < LONG:
        refuse(value, "a number of seconds")
