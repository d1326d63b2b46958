"""Fuzz tests of control messages: an invalid message raises only `ProtocolError`, and every work ends."""

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
from .world import run_attack

WAYS = st.sampled_from([gate.CONTROL, gate.DATA, gate.RELAYED])
RANKS = {ALL: (0, 1, 2), PAIR: (0, 1)}


def facts(rank: int, ranks: Mapping[int, Sequence[int]] = RANKS) -> gate.JobFacts:
    """Return the `JobFacts` with which `rank` validates control messages; `ranks` has the members by group id."""
    return gate.JobFacts(rank, 3, lambda identity, peer: ranks[identity] if peer in ranks.get(identity, ()) else None)


def packed(note: Any) -> bytes | None:
    """Return an encoded control message, or None if msgpack cannot encode it."""
    try:
        body: bytes = msgpack.packb(note)
    except (ValueError, OverflowError, TypeError):
        return None
    return body if len(body) <= 256 * 1024 else None


@fuzz(mutated(valid), WAYS, examples=400)
def test_mutated_control_message_is_valid_or_refused(note: Any, way: str) -> None:
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
def test_random_bytes_are_read_as_a_control_message_or_refused(body: bytes, way: str) -> None:
    try:
        gate.read(body, 2, way, facts(0))
    except ProtocolError:
        return


@pytest.mark.slow
@fuzz(st.lists(st.tuples(mutated(valid), st.booleans(), st.integers(0, 1)), min_size=1, max_size=3), examples=150)
def test_works_end_for_any_control_messages_that_a_peer_sends(sent: list[tuple[Any, bool, int]]) -> None:
    """Check also that a group without the sender continues if all messages of the sender are invalid."""
    nonsense: list[bool] = []

    def attack(pg: Any, pair: int) -> None:
        member = comm_of(pg)
        for note, behind_data, to in sent:
            body = packed(_with_ids(note, {ALL: member.id, PAIR: pair}))
            if body is None:
                continue
            link = member.channels[to].link if behind_data else member.endpoint.control._links.get(to)
            if link is None:
                continue
            nonsense.append(not _fits(body, behind_data, to, {member.id: (0, 1, 2), pair: (0, 1)}))
            header = HEADER.pack(FrameKind.CONTROL, 0, 0, 0, 0, 0, 0, len(body), len(body))
            link.write(header, memoryview(body))

    refused, well = run_attack(attack)
    assert (refused and well) or not nonsense or not all(nonsense)


def _fits(body: bytes, behind_data: bool, to: int, ranks: dict[int, tuple[int, ...]]) -> bool:
    try:
        gate.read(body, 2, gate.DATA if behind_data else gate.CONTROL, facts(to, ranks))
    except ProtocolError:
        return False
    return True


def _with_ids(note: Any, names: dict[int, int]) -> Any:
    """Return a message in which the ids of this job's groups replace the placeholder ids."""
    if isinstance(note, dict):
        return {name: _with_ids(each, names) for name, each in note.items()}
    if isinstance(note, list):
        return [_with_ids(each, names) for each in note]
    return names.get(note, note) if type(note) is int else note
