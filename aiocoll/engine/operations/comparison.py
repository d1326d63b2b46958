"""Compares the calls of all ranks: in which fields they differ, as one text for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from aiocoll.algorithms.spec import SPECS, Part
from aiocoll.engine.operations.differences import called, differences, named
from aiocoll.engine.operations.manifest import AGREED, private

__all__ = ["Difference", "compare", "packed"]

#: Fields that identify a call by themselves: all that is certain of one that cannot be carried out.
NAMING = ("op", "root", "reduce")
#: Collectives whose tensor has the same shape on all ranks; in others the ranks' parts may have any shapes.
SHAPED = {kind.upper() for kind, spec in SPECS.items() if spec.input is Part.TENSOR}
#: Calls that a text shows, and ranks that it lists for each: more than anybody reads.
SHOWN = 8

Description = dict[str, Any]


class Difference(NamedTuple):
    """The calls of one operation do not match.

    Attributes:
        text: the error text, naming the calls.
        ranks: the lowest rank of each kind of call.
    """

    text: str
    ranks: list[int]


def packed(call: Description, wrong: str | None) -> bytes:
    """Encode a description without its rank, so that equal calls are equal bytes.

    Args:
        call: the call of a rank.
        wrong: why it cannot be carried out.
    """
    told: bytes = msgpack.packb(
        {**{field: value for field, value in call.items() if field not in ("rank", "debug")}, "wrong": wrong}
    )
    return told


def compare(comm: str, calls: Sequence[bytes | memoryview]) -> Difference | None:
    """Return in which fields the calls of ranks 0, 1, ... differ; None if they match.

    Cost: if all are equal, p comparisons of some 150 bytes; p^2 / 2 comparisons of numbers if each rank has its own
    counts for every other rank.
    """
    first = _unpacked(0, calls[0])
    if not private(first) and first["wrong"] is None and all(call == calls[0] for call in calls):
        return None
    found = [_unpacked(rank, call) for rank, call in enumerate(calls)]
    sound = [each for each in found if not each["wrong"]]
    fields = {field: None for field in NAMING if _vary(found, field)}
    pair = None
    for one, two in _pairs(sound):
        differing = differences(one, two)
        if pair is None and differing and all(one[field] == two[field] for field in differing):
            pair = one["rank"], two["rank"]  # they differ only in what one sends and the other expects
        fields.update(dict.fromkeys(differing))
    if _vary(sound, "shape") and ("counts" in fields or {each["op"] for each in sound} <= SHAPED):
        fields["shape"] = None
    if len(sound) < len(found):
        fields["number of ranks"] = None
    return _difference(comm, found, sorted(fields, key=_order), pair or ()) if fields else None


def _unpacked(rank: int, call: bytes | memoryview) -> Description:
    return {"rank": rank, **msgpack.unpackb(call)}


def _order(field: str) -> int:
    return AGREED.index(field) if field in AGREED else len(AGREED)


def _vary(found: Sequence[Description], field: str) -> bool:
    return any(each[field] != found[0][field] for each in found)


def _pairs(found: Sequence[Description]) -> Iterator[tuple[Description, Description]]:
    """Return the pairs of calls to compare: fields common to all are compared with the first rank's only."""
    for index, one in enumerate(found):
        if index and not private(one):
            continue
        for two in found[index + 1 :]:
            yield one, two


def _difference(comm: str, found: Sequence[Description], fields: list[str], pair: tuple[int, ...]) -> Difference:
    """Name each kind of call, by what differs; two that only contradict each other are two kinds."""
    kinds: dict[str, list[Description]] = {}
    known = [field for field in fields if field in found[0]]
    for each in found:
        kind = repr(([each[field] for field in known], each["wrong"], each["rank"] if each["rank"] in pair else None))
        kinds.setdefault(kind, []).append(each)
    words = [_kind(alike) for alike in list(kinds.values())[:SHOWN]]
    if len(kinds) > SHOWN:
        words.append(f"and others {len(kinds) - SHOWN} more kinds of it")
    text = f"Collectives differ in the following: {', '.join(fields)}. Group {comm!r}: {'; '.join(words)}"
    sides = [found[rank] for rank in pair] or [alike[0] for alike in kinds.values()][:2]
    if len(sides) == 2:  # all may have made the same mistake
        text += named(*sides)
    return Difference(text, [alike[0]["rank"] for alike in kinds.values()])


def _kind(alike: Sequence[Description]) -> str:
    ranks = ", ".join(str(each["rank"]) for each in alike[:SHOWN])
    if len(alike) > SHOWN:
        ranks += f" and {len(alike) - SHOWN} more"
    wrong = f", but {alike[0]['wrong']}" if alike[0]["wrong"] else ""
    return f"rank{'s' if len(alike) > 1 else ''} {ranks} called {called(alike[0])}{wrong}"
