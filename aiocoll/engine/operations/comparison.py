"""Comparison of the calls of all ranks, with one error text for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from aiocoll.algorithms.spec import SPECS, Part
from aiocoll.engine.operations.differences import called, describe_differing_members, differences
from aiocoll.engine.operations.manifest import AGREED, private

__all__ = ["Difference", "compare", "packed"]

#: Fields that identify a call by themselves. If a rank cannot carry out its call, only these fields are certain.
NAMING = ("op", "root", "reduce")
#: Collectives whose tensor has the same shape on all ranks. In other collectives, each rank may pass another shape.
SHAPED = {kind.upper() for kind, spec in SPECS.items() if spec.input is Part.TENSOR}
#: Maximum number of different calls in an error text, and of ranks listed for each call.
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
    """Encode a description without its rank, so that equal calls give equal bytes.

    Args:
        call: the description of one rank's call.
        wrong: the reason why the rank cannot carry out the call; None if it can.
    """
    encoded: bytes = msgpack.packb(
        {**{field: value for field, value in call.items() if field not in ("rank", "debug")}, "wrong": wrong}
    )
    return encoded


def compare(comm: str, calls: Sequence[bytes | memoryview]) -> Difference | None:
    """Compare the calls of ranks 0, 1, ..., and return the difference; None if they match.

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
            # the two calls differ only in the number of elements that one sends and the other expects
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
    """Return the pairs of calls to compare. Fields common to all ranks are compared with the first rank only."""
    for index, one in enumerate(found):
        if index and not private(one):
            continue
        for two in found[index + 1 :]:
            yield one, two


def _difference(comm: str, found: Sequence[Description], fields: list[str], pair: tuple[int, ...]) -> Difference:
    """Describe each different call. Two calls that only contradict each other count as different."""
    kinds: dict[str, list[Description]] = {}
    known = [field for field in fields if field in found[0]]
    for each in found:
        kind = repr(([each[field] for field in known], each["wrong"], each["rank"] if each["rank"] in pair else None))
        kinds.setdefault(kind, []).append(each)
    words = [_describe_calls(equal) for equal in list(kinds.values())[:SHOWN]]
    if len(kinds) > SHOWN:
        words.append(f"and ranks with {len(kinds) - SHOWN} more different calls")
    text = f"Collectives differ in the following: {', '.join(fields)}. Group {comm!r}: {'; '.join(words)}"
    sides = [found[rank] for rank in pair] or [equal[0] for equal in kinds.values()][:2]
    if len(sides) == 2:  # all ranks may have made the same mistake
        text += describe_differing_members(*sides)
    return Difference(text, [equal[0]["rank"] for equal in kinds.values()])


def _describe_calls(equal: Sequence[Description]) -> str:
    ranks = ", ".join(str(each["rank"]) for each in equal[:SHOWN])
    if len(equal) > SHOWN:
        ranks += f" and {len(equal) - SHOWN} more"
    wrong = f", but {equal[0]['wrong']}" if equal[0]["wrong"] else ""
    return f"rank{'s' if len(equal) > 1 else ''} {ranks} called {called(equal[0])}{wrong}"
