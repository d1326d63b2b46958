"""Manifest of a flush: the list of recorded calls of a coalescing block, which ranks send and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any
from zlib import crc32

from aiocoll.engine.operations.signature import Signature

__all__ = ["AGREED", "Manifest", "has_count_conflict", "iter_differing_members", "private", "runs"]

#: Fields that must be equal on all ranks. The other fields only help users to recognise the call.
AGREED = ("op", "dtype", "device", "counts", "root", "reduce")
#: Approximate maximum size in bytes of a list of calls in a message, so that two lists fit into one control frame.
#: Consecutive equal calls count once. Of calls beyond the limit, only a checksum is sent.
ROOM = 48 * 1024

Description = dict[str, Any]


class Manifest:
    """The recorded calls of a coalescing block, in order.

    Args:
        members: the signature of each member.
    """

    __slots__ = ("_data", "_members", "_nbytes")

    def __init__(self, members: Sequence[Signature]) -> None:
        self._members = tuple(members)
        self._data: Description | None = None
        self._nbytes: int | None = None

    def as_data(self) -> Description:
        """Return the manifest as plain data.

        The fields are the size, runs of equal members, the number of members in these runs, and a hash of the rest.
        """
        if self._data is None:
            runs, count, room = [], 0, ROOM
            for signature, equal in groupby(self._members):
                run = _encode_run(signature, sum(1 for _ in equal))
                room -= len(repr(run))
                if room < 0:
                    break
                runs.append(run)
                count += run["count"]
            # Leave private fields out of the checksum: they may differ, and only the two ends of a message can compare
            # them.
            rest = crc32(repr([(*signature[:5], signature.device) for signature in self._members[count:]]).encode())
            self._data = {"size": len(self._members), "runs": runs, "listed": count, "rest": rest}
        return self._data

    def nbytes(self) -> int:
        """Return the total size in bytes of the data of all calls, as far as this rank knows."""
        if self._nbytes is None:
            self._nbytes = sum(signature.nbytes(()) or 0 for signature in self._members)
        return self._nbytes


def runs(description: Description) -> list[Description]:
    """Return the runs of equal calls in the description of a coalescing block, each with its `count`."""
    found: list[Description] = description["members"]["runs"]
    return found


def iter_differing_members(
    one: Description, two: Description
) -> Iterator[tuple[int, Description | None, Description | None]]:
    """Yield each position at which two lists of recorded calls differ, with both calls; None for a missing call."""
    mine, yours = one["members"], two["members"]
    if mine == yours and not private(one):
        return
    unknown = {"op": "ONE OF THE FOLLOWING"}
    left, right = runs(one), runs(two)
    common = min(mine["listed"], yours["listed"])
    for position, count, first, second in _iter_stretches(left, right):
        if any(first.get(field) != second.get(field) for field in AGREED) or has_count_conflict(
            {**first, "rank": one["rank"]}, {**second, "rank": two["rank"]}
        ):
            for each in range(position, position + count):
                yield each, first, second
    if mine["size"] != yours["size"]:
        ends = (
            (_find_run(found, common) or unknown) if side["size"] > common else None
            for found, side in ((left, mine), (right, yours))
        )
        yield common, *ends
    elif mine["listed"] == yours["listed"] and mine["rest"] != yours["rest"]:
        yield common, unknown, unknown


def private(description: Description) -> bool:
    """Return whether a call's description has a field that only the sender and the receiver of a message know."""
    members = runs(description) if description.get("members") else ()
    return any(each.get("sends") or each.get("receives") for each in (description, *members))


def has_count_conflict(one: Description, two: Description) -> bool:
    """Return whether one of two ranks sends another number of elements than the other rank expects."""
    return _counts_conflict(one, two) or _counts_conflict(two, one)


def _counts_conflict(sender: Description, receiver: Description) -> bool:
    sends, receives = sender.get("sends") or [], receiver.get("receives") or []
    return sends != [] != receives and sends[receiver["rank"]] != receives[sender["rank"]]


def _encode_run(signature: Signature, count: int) -> Description:
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


def _iter_stretches(
    left: Sequence[Description], right: Sequence[Description]
) -> Iterator[tuple[int, int, Description, Description]]:
    """Yield the ranges of positions in which each list repeats one call: start, length and the two calls."""
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


def _find_run(listed: Sequence[Description], position: int) -> Description | None:
    """Return the run of equal calls that contains a position."""
    for run in listed:
        position -= run["count"]
        if position < 0:
            return run
    return None
