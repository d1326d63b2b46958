"""Comparison of the calls that all ranks made for one operation, with the same error text on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from aiocoll.algorithms.spec import SPECS, Part
from aiocoll.engine.operations.differences import called, describe_differing_members, differences
from aiocoll.engine.operations.manifest import AGREED, private

__all__ = ["Difference", "compare", "packed"]

#: Fields that are certain even if a rank cannot carry out its call: they identify the call.
NAMING = ("op", "root", "reduce")
#: Collectives whose tensor must have the same shape on all ranks. In other collectives, each rank may pass another
#: shape.
SHAPED = {kind.upper() for kind, spec in SPECS.items() if spec.input is Part.TENSOR}
#: Maximum number of distinct calls in an error text, and of ranks listed for each call.
SHOWN = 8

Description = dict[str, Any]


class Difference(NamedTuple):
    """A mismatch between the calls of one operation.

    Attributes:
        text: the error text, which names the calls.
        ranks: for each different call, the lowest rank that made it.
    """

    text: str
    ranks: list[int]


def packed(call: Description, wrong: str | None) -> bytes:
    """Encode a call's description without its rank, so that equal calls give equal bytes.

    Args:
        call: the description of one rank's call.
        wrong: the reason why the rank cannot carry out the call; None if it can.
    """
    encoded: bytes = msgpack.packb(
        {**{field: value for field, value in call.items() if field not in ("rank", "debug")}, "wrong": wrong}
    )
    return encoded


def compare(comm: str, calls: Sequence[bytes | memoryview]) -> Difference | None:
    """Compare the calls of ranks 0, 1, ...; return their difference, or None if they match.

    Cost: p comparisons of some 150 bytes if all calls are equal. If each rank has its own counts for every other rank,
    p^2 / 2 comparisons of numbers.
    """
    first = _decode_call(0, calls[0])
    if not private(first) and first["wrong"] is None and all(call == calls[0] for call in calls):
        return None
    found = [_decode_call(rank, call) for rank, call in enumerate(calls)]
    sound = [each for each in found if not each["wrong"]]
    fields = {field: None for field in NAMING if _differs(found, field)}
    pair = None
    for one, two in _pairs(sound):
        differing = differences(one, two)
        if pair is None and differing and all(one[field] == two[field] for field in differing):
            # the calls differ only in a number of elements: the one sent by one rank, the other expected by its peer
            pair = one["rank"], two["rank"]
        fields.update(dict.fromkeys(differing))
    if _differs(sound, "shape") and ("counts" in fields or {each["op"] for each in sound} <= SHAPED):
        fields["shape"] = None
    if len(sound) < len(found):
        fields["number of ranks"] = None
    return _difference(comm, found, sorted(fields, key=_field_position), pair or ()) if fields else None


def _decode_call(rank: int, call: bytes | memoryview) -> Description:
    return {"rank": rank, **msgpack.unpackb(call)}


def _field_position(field: str) -> int:
    return AGREED.index(field) if field in AGREED else len(AGREED)


def _differs(found: Sequence[Description], field: str) -> bool:
    return any(each[field] != found[0][field] for each in found)


def _pairs(found: Sequence[Description]) -> Iterator[tuple[Description, Description]]:
    """Yield the pairs of calls to compare: each call with the first; calls with private fields with all others."""
    for index, one in enumerate(found):
        if index and not private(one):
            continue
        for two in found[index + 1 :]:
            yield one, two


def _difference(comm: str, found: Sequence[Description], fields: list[str], pair: tuple[int, ...]) -> Difference:
    """Return an error text with each distinct call. The two calls of a mismatched `pair` count as distinct calls."""
    kinds: dict[str, list[Description]] = {}
    known = [field for field in fields if field in found[0]]
    for each in found:
        kind = repr(([each[field] for field in known], each["wrong"], each["rank"] if each["rank"] in pair else None))
        kinds.setdefault(kind, []).append(each)
    words = [_describe_calls(equal) for equal in list(kinds.values())[:SHOWN]]
    if len(kinds) > SHOWN:
        words.append(f"and {len(kinds) - SHOWN} more distinct calls of other ranks")
    text = f"Collectives differ in the following: {', '.join(fields)}. Group {comm!r}: {'; '.join(words)}"
    sides = [found[rank] for rank in pair] or [equal[0] for equal in kinds.values()][:2]
    if len(sides) == 2:  # all ranks may have made the same invalid call: then there is only one side
        text += describe_differing_members(*sides)
    return Difference(text, [equal[0]["rank"] for equal in kinds.values()])


def _describe_calls(equal: Sequence[Description]) -> str:
    ranks = ", ".join(str(each["rank"]) for each in equal[:SHOWN])
    if len(equal) > SHOWN:
        ranks += f" and {len(equal) - SHOWN} more"
    wrong = f", but {equal[0]['wrong']}" if equal[0]["wrong"] else ""
    return f"rank{'s' if len(equal) > 1 else ''} {ranks} called {called(equal[0])}{wrong}"
