"""Descriptions of calls as plain data: in which fields two differ, and their form in error messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from aiocoll.engine.operations.manifest import AGREED, contradict, differing, private, runs
from aiocoll.errors import CollectiveMismatchError

__all__ = ["called", "differences", "mismatch", "named", "opposed"]

#: The two ends of a point-to-point message: their names differ by nature.
HALVES = {"SEND", "RECV"}, {"SEND_SPARSE", "RECV_SPARSE"}
#: Members of a flush that a message names: of those that differ, and of a whole list.
NAMED = 3

Description = dict[str, Any]


def differences(one: Description, two: Description) -> list[str]:
    """Return the fields in which two ranks' calls of one operation differ; [] if they match."""
    marks = {one.get("debug"), two.get("debug")}
    if len(marks) > 1 and "detail" in marks:
        return ["debug"]
    if len(marks) == 1 and None not in marks:
        return []  # they compare by themselves
    fields = [field for field in AGREED if one.get(field) != two.get(field)]
    if {one["op"], two["op"]} in HALVES:
        fields.remove("op")
    if not fields and contradict(one, two):
        fields.append("counts")
    if one.get("members") and two.get("members") and next(differing(one, two), None) is not None:
        fields.append("members")
    return fields


def opposed(theirs: Description, calls: Iterable[Description]) -> Description | None:
    """Return one of `calls`, which match each other, that does not match `theirs`."""
    alone = private(theirs)
    for each in calls:
        if each["rank"] != theirs["rank"]:
            if differences(each, theirs):
                return each
            if not alone:
                break  # a field common to all it also shares with the rest: a thousand ranks report
    return None


def mismatch(group: str, one: Description, two: Description) -> CollectiveMismatchError:
    """Return the error that names both calls, the lower rank first."""
    one, two = sorted((one, two), key=lambda description: description["rank"])
    fields = differences(one, two)
    if (not fields or "counts" in fields) and one.get("shape") != two.get("shape"):
        fields.append("shape")
    return CollectiveMismatchError(
        f"Collectives differ in the following: {', '.join(fields) or 'the messages they exchange'}. "
        f"Group {group!r}: rank {one['rank']} called {called(one)}; rank {two['rank']} called {called(two)}"
        f"{named(one, two)}",
        op=one["op"],
        seq=one["key"] or one["seq"],
        group=group,
        ranks=[one["rank"], two["rank"]],
    )


def called(description: Description) -> str:
    """Write a description in the form of a call."""
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
        return f"{description['op']}(members={_listed(description)}, {', '.join(details)})"
    return f"{description['op']}({', '.join(details)})"


def _listed(description: Description) -> str:
    """Write the beginning of a flush's list of members."""
    words, named = [], 0
    for run in runs(description)[:NAMED]:
        count = run["count"]
        words.append(f"{count} x {called(run)}" if count > 1 else called(run))
        named += count
    more = description["members"]["size"] - named
    return f"[{', '.join(words)}{f' and {more} more' if more else ''}]"


def named(one: Description, two: Description) -> str:
    """Name the first members in which two flushes differ."""
    if not (one.get("members") and two.get("members")):
        return ""
    words = []
    for position, *members in islice(differing(one, two), NAMED):
        first, second = ("nothing" if each is None else called(each) for each in members)
        words.append(f"member {position} is {first} on rank {one['rank']}, {second} on rank {two['rank']}")
    return f". {'; '.join(words)}" if words else ""
