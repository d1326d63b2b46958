"""Differences between two described calls, and the text form of calls for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from aiocoll.engine.operations.manifest import AGREED, has_count_conflict, iter_differing_members, private, runs
from aiocoll.errors import CollectiveMismatchError

__all__ = ["called", "describe_differing_members", "differences", "find_mismatch", "mismatch_error"]

#: Op names at the two ends of a point-to-point message. Different names of one pair are no mismatch.
HALVES = {"SEND", "RECV"}, {"SEND_SPARSE", "RECV_SPARSE"}
#: Maximum number of calls that an error text lists: of one coalescing block, and of the calls in which two blocks
#: differ.
NAMED = 3

Description = dict[str, Any]


def differences(one: Description, two: Description) -> list[str]:
    """Return the fields in which two ranks' calls for one operation differ; [] if the calls match."""
    marks = {one.get("debug"), two.get("debug")}
    if len(marks) > 1 and "detail" in marks:
        return ["debug"]
    if len(marks) == 1 and None not in marks:
        return []  # verified operations compare all calls before they start
    fields = [field for field in AGREED if one.get(field) != two.get(field)]
    if {one["op"], two["op"]} in HALVES:
        fields.remove("op")
    if not fields and has_count_conflict(one, two):
        fields.append("counts")
    if one.get("members") and two.get("members") and next(iter_differing_members(one, two), None) is not None:
        fields.append("members")
    return fields


def find_mismatch(theirs: Description, calls: Iterable[Description]) -> Description | None:
    """Return the call in `calls` that does not match `theirs`; None if all match. The `calls` match each other."""
    alone = private(theirs)
    for each in calls:
        if each["rank"] != theirs["rank"]:
            if differences(each, theirs):
                return each
            if not alone:
                break  # without private fields, all `calls` (perhaps thousands) are equal, so one comparison is enough
    return None


def mismatch_error(group: str, one: Description, two: Description) -> CollectiveMismatchError:
    """Return the error that names both calls, the lower rank first."""
    one, two = sorted((one, two), key=lambda description: description["rank"])
    fields = differences(one, two)
    if (not fields or "counts" in fields) and one.get("shape") != two.get("shape"):
        fields.append("shape")
    return CollectiveMismatchError(
        f"Collectives differ in the following: {', '.join(fields) or 'the messages they exchange'}. "
        f"Group {group!r}: rank {one['rank']} called {called(one)}; rank {two['rank']} called {called(two)}"
        f"{describe_differing_members(one, two)}",
        op=one["op"],
        seq=one["key"] or one["seq"],
        group=group,
        ranks=[one["rank"], two["rank"]],
    )


def called(description: Description) -> str:
    """Format the description of a call like a Python call."""
    details = [
        f"{label}={description[field]}"
        for field, label in (
            ("shape", "shape"),
            ("dtype", "dtype"),
            ("device", "device"),
            ("counts", "counts"),
            ("sends", "sends"),
            ("receives", "receives"),
            ("root", "root"),
            ("reduce", "reduce op"),
            ("src", "src"),
            ("dst", "dst"),
            ("tag", "tag"),
            ("seq", "SequenceNumber"),
            ("key", "key"),
            ("debug", "debug"),
        )
        if description.get(field) is not None and (field, description[field]) != ("debug", "device")
    ]
    if description.get("members") is not None:
        return f"{description['op']}(members={_format_members(description)}, {', '.join(details)})"
    return f"{description['op']}({', '.join(details)})"


def _format_members(description: Description) -> str:
    """Format the first recorded calls of a coalescing block as text."""
    words, shown = [], 0
    for run in runs(description)[:NAMED]:
        count = run["count"]
        words.append(f"{count} x {called(run)}" if count > 1 else called(run))
        shown += count
    more = description["members"]["size"] - shown
    return f"[{', '.join(words)}{f' and {more} more' if more else ''}]"


def describe_differing_members(one: Description, two: Description) -> str:
    """Describe in a text the first calls in which the coalescing blocks of two ranks differ."""
    if not (one.get("members") and two.get("members")):
        return ""
    words = []
    for position, *members in islice(iter_differing_members(one, two), NAMED):
        first, second = ("missing" if each is None else called(each) for each in members)
        words.append(f"member {position} is {first} on rank {one['rank']}, {second} on rank {two['rank']}")
    return f". {'; '.join(words)}" if words else ""
