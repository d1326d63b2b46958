"""Two ranks called what does not belong together: which terms differ, and how all ranks come to hear the same of it.

A rank that sees a frame which does not fit sends its own description to the frame's sender. That one knows both sides
then, and tells the lowest rank, which revokes the group: several pairs may notice at the same time, and only one of
them is the cause. If that rank is silent, the one who knows revokes after a while by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from aiocoll.engine.fusion.manifest import AGREED, contradict, differing, private, runs
from aiocoll.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["MismatchReports", "called", "differences", "mismatch", "named", "opposed"]

#: The halves of a point-to-point message: these differ in name by nature.
HALVES = {"SEND", "RECV"}
#: Seconds the lowest rank has to revoke a group of whose disagreement it was told: its loop may be blocked, and the
#: contract gives one second in all.
INSIST_AFTER = 0.5
#: Members of a flush that a message names: of those that differ, and of a whole list.
NAMED = 3

Description = dict[str, Any]


class MismatchReports:
    """The part of one membership that finds out whose call is another one."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._open: set[int] = set()

    def disagree(self, peer: int, op: int, mine: Description) -> None:
        """A frame of `peer` does not fit what this rank called: let the peer name both sides."""
        if op not in self._open:
            self._open.add(op)
            self._tell(peer, {"t": "disagree", "op": op, "theirs": mine})

    def differ(self, one: Description, two: Description) -> None:
        """Two calls do not belong together: let the lowest rank say so to all."""
        group = self._group
        judge = next(rank for rank in range(len(group.ranks)) if rank not in group.left)
        if group.rank == judge:
            group.disagreement(one, two)
        else:
            self._tell(judge, {"t": "differ", "one": one, "two": two})
            group.call_later(INSIST_AFTER, self._insist, one, two)

    def disagreed(self, peer: int, note: dict[str, Any]) -> None:
        """A frame of this rank did not fit what `peer` called."""
        group, op = self._group, note["op"]
        record = group.record(op)
        self.differ(_forgotten(group.rank, op) if record is None else record.describe(group.rank), note["theirs"])

    def differed(self, peer: int, note: dict[str, Any]) -> None:
        """Another rank knows of two calls that do not belong together."""
        self._group.disagreement(note["one"], note["two"])

    def _insist(self, one: Description, two: Description) -> None:
        group = self._group
        if group.cause is None and group.endpoint.groups.get(group.id) is group:
            group.disagreement(one, two)
            # Revocations may go through the one that is silent; these do not where there is a link.
            for rank in set(range(len(group.ranks))) - {group.rank}:
                self._tell(rank, {"t": "differ", "one": one, "two": two})

    def _tell(self, rank: int, note: dict[str, Any]) -> None:
        """Send a note on the link to `rank`, if there is one: it depends on nobody else."""
        group = self._group
        note = {**note, "g": group.id}
        if group.channels[rank].link is not None:
            group.channels[rank].say(note)
        else:
            group.endpoint.control.tell(group.ranks[rank], note)


def differences(one: Description, two: Description) -> list[str]:
    """Return the terms in which two ranks' calls of one operation differ; [] if they belong together."""
    marks = {one.get("debug"), two.get("debug")}
    if len(marks) > 1 and "detail" in marks:
        return ["debug"]
    if len(marks) == 1 and None not in marks:
        return []  # they compare by themselves
    fields = [field for field in AGREED if one.get(field) != two.get(field)]
    if {one["op"], two["op"]} == HALVES:
        fields.remove("op")
    if not fields and contradict(one, two):
        fields.append("counts")
    if one.get("members") and two.get("members") and next(differing(one, two), None) is not None:
        fields.append("members")
    return fields


def opposed(theirs: Description, calls: Iterable[Description]) -> Description | None:
    """Return one of `calls`, which agree with each other, that does not belong together with `theirs`."""
    alone = private(theirs)
    for each in calls:
        if each["rank"] != theirs["rank"]:
            if differences(each, theirs):
                return each
            if not alone:
                break  # what is the same for all it shares with the others too: a thousand ranks report
    return None


def mismatch(group: str, one: Description, two: Description) -> CollectiveMismatchError:
    """Name both sides of a disagreement, the lower rank first."""
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


def _forgotten(rank: int, op: int) -> Description:
    """Stand in for what `rank` called so long ago that it has no record of it."""
    return {"rank": rank, "op": "AN OPERATION IT NO LONGER REMEMBERS", "seq": op, "key": None}
