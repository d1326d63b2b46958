"""What all ranks called, side by side: in what the calls differ, said in one text for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from aiocoll.engine.disagreement import called, contradict

__all__ = ["Difference", "compare", "packed"]

#: What is told of a call; `wrong` says why it cannot be carried out.
FIELDS = (
    "op", "shape", "dtype", "device", "counts", "sends", "receives", "root", "reduce", "seq", "key", "wrong",
)  # fmt: skip
#: What every rank must have called alike.
AGREED = ("op", "dtype", "device", "counts", "root", "reduce", "seq", "key")
NAMING = {"op", "root", "reduce", "seq", "key"}
#: Collectives on one tensor of the same shape everywhere; in the others parts of a whole may have any shapes.
SHAPED = {"ALLREDUCE", "REDUCE", "BROADCAST", "SCAN", "EXSCAN"}
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


def packed(description: Description, wrong: str | None) -> bytes:
    """Write a description without its rank: equal calls are equal bytes."""
    told: bytes = msgpack.packb([wrong if field == "wrong" else description[field] for field in FIELDS])
    return told


def compare(group: str, calls: Sequence[bytes | memoryview]) -> Difference | None:
    """Return in what the calls of ranks 0, 1, ... differ; None if they belong together.

    Cost: where all are equal and no rank has a number of its own for each other, p comparisons of some 60 bytes.
    """
    first = _unpacked(0, calls[0])
    lonely = not first["sends"] and not first["receives"] and first["wrong"] is None
    if lonely and all(call == calls[0] for call in calls):
        return None
    found = [_unpacked(rank, call) for rank, call in enumerate(calls)]
    # Of a call that cannot be carried out not all is known.
    sound = [each for each in found if not each["wrong"]]
    fields = [field for field in AGREED if _vary(found if field in NAMING else sound, field)]
    pair = None if "op" in fields else _contradiction(sound)
    if pair is not None and "counts" not in fields:
        fields.append("counts")
    if _vary(sound, "shape") and ("counts" in fields or {each["op"] for each in sound} <= SHAPED):
        fields.append("shape")
    if len(sound) < len(found):
        fields.append("number of ranks")
    return _difference(group, found, fields, pair or ()) if fields else None


def _unpacked(rank: int, call: bytes | memoryview) -> Description:
    return {"rank": rank, **dict(zip(FIELDS, msgpack.unpackb(call), strict=True))}


def _vary(found: Sequence[Description], field: str) -> bool:
    return any(each[field] != found[0][field] for each in found)


def _contradiction(found: Sequence[Description]) -> tuple[int, int] | None:
    """Return two ranks of which one sends the other a number of elements that this one does not expect."""
    receivers = [each for each in found if each["receives"]]
    for sender in found:
        if sender["sends"]:
            for receiver in receivers:
                if receiver is not sender and contradict(sender, receiver):
                    return sender["rank"], receiver["rank"]
    return None


def _difference(group: str, found: Sequence[Description], fields: list[str], pair: tuple[int, ...]) -> Difference:
    """Name each kind of call, by what differs; two that only contradict each other are two kinds."""
    kinds: dict[str, list[Description]] = {}
    known = [field for field in fields if field in FIELDS]
    for each in found:
        kind = repr(([each[field] for field in known], each["wrong"], each["rank"] if each["rank"] in pair else None))
        kinds.setdefault(kind, []).append(each)
    words = [_kind(alike) for alike in list(kinds.values())[:SHOWN]]
    if len(kinds) > SHOWN:
        words.append(f"and others {len(kinds) - SHOWN} more kinds of it")
    text = f"Collectives differ in the following: {', '.join(fields)}. Group {group!r}: {'; '.join(words)}"
    return Difference(text, [alike[0]["rank"] for alike in kinds.values()])


def _kind(alike: Sequence[Description]) -> str:
    ranks = ", ".join(str(each["rank"]) for each in alike[:SHOWN])
    if len(alike) > SHOWN:
        ranks += f" and {len(alike) - SHOWN} more"
    wrong = f", but {alike[0]['wrong']}" if alike[0]["wrong"] else ""
    return f"rank{'s' if len(alike) > 1 else ''} {ranks} called {called(alike[0])}{wrong}"
