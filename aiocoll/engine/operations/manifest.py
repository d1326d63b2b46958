"""The manifest of a flush: the list of calls that all ranks must have recorded alike, as data to send and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any
from zlib import crc32

from aiocoll.engine.operations.signature import Signature

__all__ = ["AGREED", "Manifest", "contradict", "differing", "private", "runs"]

#: Fields that every rank must have called alike; the rest of a description only helps to recognise the call.
AGREED = ("op", "dtype", "device", "counts", "root", "reduce")
#: Approximate bytes of a list that are sent: two lists and the rest fit into one control frame. Consecutive equal
#: members take the room of one; of what exceeds the limit, ranks only find out that it differs.
ROOM = 48 * 1024

Description = dict[str, Any]


class Manifest:
    """The members of a flush, in order.

    Args:
        members: what each of them is.
    """

    __slots__ = ("_members", "_nbytes", "_told")

    def __init__(self, members: Sequence[Signature]) -> None:
        self._members = tuple(members)
        self._told: Description | None = None
        self._nbytes: int | None = None

    def as_data(self) -> Description:
        """Return it as plain data: the size, runs of equal members, the length of these, and a hash of the rest."""
        if self._told is None:
            told, count, room = [], 0, ROOM
            for signature, equal in groupby(self._members):
                run = _run(signature, sum(1 for _ in equal))
                room -= len(repr(run))
                if room < 0:
                    break
                told.append(run)
                count += run["count"]
            # Private fields need not be equal, and only the ranks concerned could compare them.
            rest = crc32(repr([(*signature[:5], signature.device) for signature in self._members[count:]]).encode())
            self._told = {"size": len(self._members), "runs": told, "told": count, "rest": rest}
        return self._told

    def nbytes(self) -> int:
        """Return the bytes of all their elements, as far as this rank knows."""
        if self._nbytes is None:
            self._nbytes = sum(signature.nbytes(()) or 0 for signature in self._members)
        return self._nbytes


def runs(description: Description) -> list[Description]:
    """Return the runs of equal members of a description, each with its `count`."""
    told: list[Description] = description["members"]["runs"]
    return told


def differing(one: Description, two: Description) -> Iterator[tuple[int, Description | None, Description | None]]:
    """Yield the positions at which two flushes differ, and the member of each at that position; None if it has none."""
    mine, yours = one["members"], two["members"]
    if mine == yours and not private(one):
        return
    unknown = {"op": "ONE OF WHAT FOLLOWS"}
    left, right = runs(one), runs(two)
    common = min(mine["told"], yours["told"])
    for position, count, first, second in _side_by_side(left, right):
        if any(first.get(field) != second.get(field) for field in AGREED) or contradict(
            {**first, "rank": one["rank"]}, {**second, "rank": two["rank"]}
        ):
            for each in range(position, position + count):
                yield each, first, second
    if mine["size"] != yours["size"]:
        ends = (
            (_at(told, common) or unknown) if side["size"] > common else None
            for told, side in ((left, mine), (right, yours))
        )
        yield common, *ends
    elif mine["told"] == yours["told"] and mine["rest"] != yours["rest"]:
        yield common, unknown, unknown


def private(description: Description) -> bool:
    """Whether some field of it is known only to the two ends of a message."""
    members = runs(description) if description.get("members") else ()
    return any(each.get("sends") or each.get("receives") for each in (description, *members))


def contradict(one: Description, two: Description) -> bool:
    """Whether one of two ranks sends the other a number of elements that the other does not expect."""
    return _contradicts(one, two) or _contradicts(two, one)


def _contradicts(sender: Description, receiver: Description) -> bool:
    sends, receives = sender.get("sends") or [], receiver.get("receives") or []
    return sends != [] != receives and sends[receiver["rank"]] != receives[sender["rank"]]


def _run(signature: Signature, count: int) -> Description:
    return {
        **({} if signature.device == "cpu" else {"device": signature.device}),
        "count": count,
        "op": signature.op,
        "dtype": signature.dtype,
        "counts": list(signature.counts) or None,
        "root": signature.root,
        "reduce": signature.reduce,
        "sends": list(signature.sends) or None,
        "receives": list(signature.receives) or None,
    }


def _side_by_side(
    left: Sequence[Description], right: Sequence[Description]
) -> Iterator[tuple[int, int, Description, Description]]:
    """Yield for members of two lists that stand beside each other the first position, how many are alike, and both."""
    lefts, rights = iter(left), iter(right)
    position = more = also = 0
    first = second = None
    while True:
        if not more and (first := next(lefts, None)) is not None:
            more = first["count"]
        if not also and (second := next(rights, None)) is not None:
            also = second["count"]
        if first is None or second is None:
            return
        count = min(more, also)
        yield position, count, first, second
        position, more, also = position + count, more - count, also - count


def _at(told: Sequence[Description], position: int) -> Description | None:
    """Return the run that contains the member at a position."""
    for run in told:
        position -= run["count"]
        if position < 0:
            return run
    return None
