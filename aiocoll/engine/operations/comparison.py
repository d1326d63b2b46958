"""What all ranks called, side by side: in what the calls differ, said in one text for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from aiocoll.algorithms.spec import SPECS, Part
from aiocoll.engine.operations.differences import called, differences, named
from aiocoll.engine.operations.manifest import AGREED, private

__all__ = ["Difference", "compare", "packed"]

#: What says by itself which call it is: all that is known for sure of one that cannot be carried out.
NAMING = ("op", "root", "reduce")
#: Collectives on one tensor of the same shape everywhere; in the others parts of a whole may have any shapes.
SHAPED = {kind.upper() for kind, spec in SPECS.items() if spec.input is Part.TENSOR}
#: Calls that a text shows, and ranks that it lists of each: more than anybody reads.
SHOWN = 8

Description = dict[str, Any]


class Difference(NamedTuple):
    """The calls of an operation do not belong together.

    Attributes:
        text: says so, naming the calls.
        ranks: the lowest rank of each kind of call.
    """

    text: str
    ranks: list[int]


def packed(call: Description, wrong: str | None) -> bytes:
    """Write a description without its rank: equal calls are equal bytes.

    Args:
        call: what a rank called.
        wrong: why it cannot be carried out.
    """
    told: bytes = msgpack.packb(
        {**{field: value for field, value in call.items() if field not in ("rank", "debug")}, "wrong": wrong}
    )
    return told


def compare(comm: str, calls: Sequence[bytes | memoryview]) -> Difference | None:
    """Return in what the calls of ranks 0, 1, ... differ; None if they belong together.

    Cost: where all are equal, p comparisons of some 150 bytes; p^2 / 2 of numbers where each rank has its own for
    each other.
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
            pair = one["rank"], two["rank"]  # only what one sends is not what the other expects
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
    """Return the calls to hold against each other: what is the same for all, each rank shares with the first."""
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
