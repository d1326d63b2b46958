"""Two ranks called what does not belong together: which terms differ, and the error that names both sides."""

from __future__ import annotations

from typing import Any

from aiocoll.errors import CollectiveMismatchError

__all__ = ["call", "differences", "forgotten", "mismatch"]

#: What every rank must have called alike; the rest of a description only helps to recognise the call.
AGREED = ("op", "dtype", "counts", "root", "reduce")
#: The halves of a point-to-point message: these differ in name by nature.
HALVES = {"SEND", "RECV"}

Description = dict[str, Any]


def differences(one: Description, two: Description) -> list[str]:
    """Return the terms in which two ranks' calls of one operation differ; [] if they belong together."""
    fields = [field for field in AGREED if one.get(field) != two.get(field)]
    if {one["op"], two["op"]} == HALVES:
        fields.remove("op")
    if not fields and (_contradict(one, two) or _contradict(two, one)):
        fields.append("counts")
    return fields


def mismatch(group: str, one: Description, two: Description) -> CollectiveMismatchError:
    """Name both sides of a disagreement, the lower rank first."""
    one, two = sorted((one, two), key=lambda description: description["rank"])
    fields = differences(one, two)
    if (not fields or "counts" in fields) and one.get("shape") != two.get("shape"):
        fields.append("shape")
    return CollectiveMismatchError(
        f"Collectives differ in the following: {', '.join(fields) or 'the messages they exchange'}. "
        f"Group {group!r}: rank {one['rank']} called {call(one)}; rank {two['rank']} called {call(two)}",
        op=one["op"],
        seq=one["key"] or one["seq"],
        group=group,
        ranks=[one["rank"], two["rank"]],
    )


def forgotten(rank: int, op: int) -> Description:
    """Stand in for what `rank` called so long ago that it has no record of it."""
    return {"rank": rank, "op": "AN OPERATION IT NO LONGER REMEMBERS", "seq": op, "key": None}


def call(description: Description) -> str:
    """Write a description as the call it was."""
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
            ("tag", "tag"),
            ("key", "key"),
            ("seq", "SequenceNumber"),
        )
        if description.get(field) is not None
    ]
    return f"{description['op']}({', '.join(details)})"


def _contradict(sender: Description, receiver: Description) -> bool:
    """Whether one rank sends another a number of elements that this one does not expect."""
    sends, receives = sender.get("sends") or [], receiver.get("receives") or []
    return sends != [] != receives and sends[receiver["rank"]] != receives[sender["rank"]]
