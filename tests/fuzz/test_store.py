"""Fuzz tests of the store server with nearly valid requests."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind, Identity, ServerHandshake, job_id
from aiocoll.store.commands import COMMANDS, MAX_ENTRIES, MAX_TOTAL_BYTES, WAITS
from aiocoll.store.core import StoreCore
from aiocoll.store.session import Session

from .budget import fuzz
from .mutation import mutated
from .store_wire import Wire, amounts, feed, framed, garbled, keys, values

_KINDS: dict[str, st.SearchStrategy[Any]] = {
    "k": keys,
    "p": keys,
    "v": values,
    "i": amounts,
    "c": st.sampled_from([1, 2, 3, 0, MAX_ENTRIES, 1 << 40]),
    "K": st.lists(keys, max_size=3),
    "V": st.lists(values, max_size=3),
}
_COMMANDS = {**COMMANDS, **WAITS, "join": "c", "cancel": ""}


@st.composite
def requests(draw: st.DrawFn) -> list[Any]:
    word = draw(st.sampled_from(sorted(_COMMANDS)))
    return [draw(st.integers(0, 4)), word, [draw(_KINDS[kind]) for kind in _COMMANDS[word]]]


class Owner:
    """A fake store server that opens sessions without sockets."""

    def __init__(self) -> None:
        self.core = StoreCore()
        self.runtime = Runtime(asyncio.get_running_loop())
        self._members = StoreCore()

    def session_opened(self, session: Session) -> None:
        pass

    def join_abandoned(self) -> None:
        pass

    def session_proven(self, session: Session) -> None:
        pass

    def session_closed(self, session: Session, reason: Exception | None) -> None:
        pass

    def joined(self) -> StoreCore:
        self._members.apply("set", (str(self._members.apply("num_keys", ("",)) + 1), b""))
        return self._members

    def open(self) -> tuple[Session, Wire]:
        handshake = ServerHandshake(Identity(job_id(""), 0, -1, 0, ConnKind.STORE), None, self.runtime.random_bytes)
        session, wire = Session(self, handshake), Wire()
        session.connection_made(wire)
        session._deadline.cancel()
        session._expect_frame()
        return session, wire


def check_counters(core: StoreCore) -> None:
    """Check that the byte and queue counters of a store agree with its contents."""
    sizes = [*map(len, core._values.values()), *(len(item) for queue in core._queues.values() for item in queue)]
    assert core._nbytes == sum(sizes) <= MAX_TOTAL_BYTES
    assert core._queued == sum(map(len, core._queues.values()))
    assert all(type(key) is str and type(value) is bytes for key, value in core._values.items())


@fuzz(st.lists(st.tuples(mutated(requests()), garbled), min_size=1, max_size=8), examples=150)
def test_mutated_store_requests_are_answered_or_close_their_connection(sent: list[tuple[Any, bytes]]) -> None:
    async def serve() -> None:
        owner = Owner()
        good, answers = owner.open()
        feed(good, answers, framed([1, "set", ["mine", b"1"]]) + framed([2, "get", ["wanted"]]))
        bad, wire = owner.open()
        for request, garbage in sent:
            feed(bad, wire, framed(request) + garbage)
            check_counters(owner.core)
        for number, outcome, payload in wire.messages():
            assert type(number) is int
            assert outcome in (0, 1, 2)
            assert outcome != 1 or type(payload) is str
        bad.connection_lost(None)
        feed(good, answers, framed([3, "set", ["wanted", b"2"]]))
        assert not answers.aborted
        assert answers.messages()[-2:] in ([[2, 0, b"2"], [3, 0, None]], [[3, 0, None]])
        good.connection_lost(None)
        assert not owner.core._watchers
        assert not owner.core._poppers

    asyncio.run(serve())
