"""Notes that are nearly right: none raises anything but `ProtocolError`, and whatever it does, every work ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import strategies as st

from aiocoll.engine.control import messages as gate
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import HEADER, FrameKind

from ..internals import comm_of
from .budget import fuzz
from .mutation import at, mutated, paths
from .notes import ALL, PAIR, valid
from .world import play

WAYS = st.sampled_from([gate.CONTROL, gate.DATA, gate.RELAYED])
RANKS = {ALL: (0, 1, 2), PAIR: (0, 1)}


def facts(rank: int, ranks: Mapping[int, Sequence[int]] = RANKS) -> gate.JobFacts:
    """Return what a rank of three knows that is in these groups."""
    return gate.JobFacts(rank, 3, lambda identity, peer: ranks[identity] if peer in ranks.get(identity, ()) else None)


def packed(note: Any) -> bytes | None:
    """Return a note as bytes; None if msgpack has no way to write it."""
    try:
        body: bytes = msgpack.packb(note)
    except (ValueError, OverflowError, TypeError):
        return None
    return body if len(body) <= 256 * 1024 else None


@fuzz(mutated(valid), WAYS, examples=400)
def test_mutated_note_is_valid_or_refused(note: Any, way: str) -> None:
    body = packed(note)
    if body is None:
        return
    try:
        read = gate.read(body, 2, way, facts(0))
    except ProtocolError:
        return
    assert way in gate.SHAPES[read["t"]].paths
    for path in paths(read):
        part = at(read, path)
        assert not isinstance(part, float) or math.isfinite(part)
        assert not isinstance(part, str) or len(part) <= 1 << 16


@fuzz(st.binary(max_size=200), WAYS, examples=200)
def test_mutated_note_bytes_are_valid_or_refused(body: bytes, way: str) -> None:
    try:
        gate.read(body, 2, way, facts(0))
    except ProtocolError:
        return


@pytest.mark.slow
@fuzz(st.lists(st.tuples(mutated(valid), st.booleans(), st.integers(0, 1)), min_size=1, max_size=3), examples=150)
def test_works_end_whatever_notes_are_sent(said: list[tuple[Any, bool, int]]) -> None:
    """And if all of it is nonsense, groups of the others go on."""
    nonsense: list[bool] = []

    def attack(pg: Any, pair: int) -> None:
        member = comm_of(pg)
        for note, behind_data, to in said:
            body = packed(_renamed(note, {ALL: member.id, PAIR: pair}))
            if body is None:
                continue
            link = member.channels[to].link if behind_data else member.endpoint.control._links.get(to)
            if link is None:
                continue
            nonsense.append(not _fits(body, behind_data, to, {member.id: (0, 1, 2), pair: (0, 1)}))
            header = HEADER.pack(FrameKind.CONTROL, 0, 0, 0, 0, 0, 0, len(body), len(body))
            link.write(header, memoryview(body))

    refused, well = play(attack)
    assert (refused and well) or not nonsense or not all(nonsense)


def _fits(body: bytes, behind_data: bool, to: int, ranks: dict[int, tuple[int, ...]]) -> bool:
    try:
        gate.read(body, 2, gate.DATA if behind_data else gate.CONTROL, facts(to, ranks))
    except ProtocolError:
        return False
    return True


def _renamed(note: Any, names: dict[int, int]) -> Any:
    """Put the ids of this job's groups where the others stand for them."""
    if isinstance(note, dict):
        return {name: _renamed(each, names) for name, each in note.items()}
    if isinstance(note, list):
        return [_renamed(each, names) for each in note]
    return names.get(note, note) if type(note) is int else note
