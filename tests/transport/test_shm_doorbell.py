"""Doorbells, which wake sleeping peers: a model of all orders of events, and system calls of the real doorbell."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from aiocoll.runtime import Runtime
from aiocoll.transport.shm.doorbell import Doorbell, PeerDoorbell, _load_sched_getcpu, core
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import STATUS, OutboxLayout
from aiocoll.transport.shm.outbox import Outbox
from aiocoll.transport.shm.region import open_readable

from .doorbells import Case, explore, received_count

#: One sent entry with every reader behaviour, and two entries, which fill the ring and need a second doorbell ring.
CASES = [Case(1), Case(2, lively=False)]
LAYOUT = OutboxLayout(2)


@pytest.mark.parametrize("case", CASES)
def test_doorbell_loses_no_wake_up_in_any_order_of_events(case: Case) -> None:
    states, ends = explore(case)
    assert states > 5000
    assert {received_count(end) for end in ends} == {case.total}


@pytest.mark.soak
@pytest.mark.parametrize("case", [Case(2), Case(3, lively=False)])
def test_doorbell_loses_no_wake_up_in_any_order_of_many_events(case: Case) -> None:
    _, ends = explore(case)
    assert {received_count(end) for end in ends} == {case.total}


@pytest.mark.slow
@pytest.mark.parametrize("without", ["look again", "look at status", "look at waiting", "another number", "last look"])
def test_doorbell_model_detects_a_lost_wake_up_for_each_omitted_step(without: str) -> None:
    """Omit a memory fence, the last poll before sleeping, or the new number for each sleep from the model."""
    found = (explore(case._replace(without=without))[1] for case in CASES)
    assert any(received_count(end) < case.total for case, ends in zip(CASES, found, strict=True) for end in ends)


@pytest.mark.slow
def test_doorbell_model_loses_no_wake_up_without_the_fence_of_a_waiting_writer() -> None:
    """Omit the fence of a waiting writer: the writer still polls after another fence before it sleeps."""
    for case in CASES:
        _, ends = explore(case._replace(without="look at taken"))
        assert {received_count(end) for end in ends} == {case.total}


# -- the real doorbell


class Link:
    """A stand-in for a link that counts its polls; the first `moves` polls report progress."""

    def __init__(self) -> None:
        self.polls = 0
        self.moves = 0

    def poll(self) -> bool:
        self.polls += 1
        self.moves -= 1
        return self.moves >= 0


class ImpatientPolling:
    """Polling hooks that let the rank sleep after the first poll without progress."""

    def look(self) -> bool:
        return False

    def keep_polling(self, moved: bool) -> bool:
        return moved


class Pair:
    """The doorbell of a rank that has a link, and the doorbell of a peer that rings the rank's doorbell."""

    def __init__(self) -> None:
        runtime = Runtime.of(asyncio.get_running_loop())
        self.fences = 0
        fences = Fences(None, self.fence)
        self.doorbell = Doorbell(runtime, fences, ImpatientPolling(), Outbox(LAYOUT, fences))
        self.doorbell.hold()
        self.other = Doorbell(runtime, fences, ImpatientPolling(), Outbox(LAYOUT, fences))
        self.other.hold()
        self.link = Link()
        outbox = open_readable(os.dup(self.doorbell.outbox.fd), LAYOUT.nbytes)
        self.peer = PeerDoorbell(os.dup(self.doorbell.eventfd), memoryview(outbox).cast("Q"), self.other)

    def fence(self) -> None:
        self.fences += 1

    @property
    def status(self) -> int:
        return self.peer.status[0]

    def take_rings(self) -> int:
        """Return the number of writes to the eventfd since the last call."""
        try:
            return os.eventfd_read(self.doorbell.eventfd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self.peer.close()
        self.other.drop()
        self.doorbell.drop()


@pytest.fixture
async def pair() -> Any:
    made = Pair()
    yield made
    made.close()
    await asyncio.sleep(0)


async def loop_iterations(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_doorbell_uses_a_new_number_for_each_sleep(pair: Pair) -> None:
    pair.doorbell.add(pair.link)
    numbers = []
    for _ in range(5):
        assert pair.status % 2 == 0
        await loop_iterations()
        numbers.append(pair.status)
        pair.doorbell.poll_soon()
    assert len(set(numbers)) == 5
    assert all(number % 2 for number in numbers)


@pytest.mark.parametrize("value", [0, (1 << 64) - 1])
async def test_doorbell_status_does_not_depend_on_the_memory_contents(value: int, pair: Pair) -> None:
    pair.doorbell.add(pair.link)
    await loop_iterations()
    before = pair.status
    pair.doorbell.outbox.status[STATUS] = value
    pair.doorbell.poll_soon()
    assert pair.status == before + 1
    pair.doorbell.outbox.status[STATUS] = value
    await loop_iterations()
    assert pair.status == before + 2


async def test_doorbell_rings_once_per_sleep_and_never_while_awake(pair: Pair) -> None:
    pair.peer.ring()
    assert pair.take_rings() == 1, "a doorbell without links must sleep"
    pair.doorbell.add(pair.link)
    pair.peer.ring()
    assert pair.take_rings() == 0
    await loop_iterations()
    pair.peer.ring()
    pair.peer.ring()
    assert pair.take_rings() == 1
    pair.peer.ring()
    assert pair.take_rings() == 0
    pair.doorbell.poll_soon()
    await loop_iterations()
    pair.peer.ring()
    assert pair.take_rings() == 1


async def test_doorbell_ring_that_a_peer_withdraws_still_wakes_the_owner(pair: Pair) -> None:
    """Handle a ring whose eventfd is already empty, since a peer can read the eventfd and so withdraw its ring."""
    loop = asyncio.get_running_loop()
    events: list[Any] = []
    loop.set_exception_handler(lambda _, context: events.append(context))
    pair.doorbell.add(pair.link)
    await loop_iterations()
    before = pair.link.polls
    pair.doorbell._on_ring()
    await loop_iterations()
    assert pair.link.polls > before
    assert events == []
    loop.set_exception_handler(None)


async def test_woken_rank_polls_all_links_and_sleeps_again(pair: Pair) -> None:
    pair.doorbell.add(pair.link)
    await loop_iterations()
    before, number = pair.link.polls, pair.status
    pair.link.moves = 3
    pair.peer.ring()
    async with asyncio.timeout(20):
        while pair.status in (number, number + 1):  # noqa: ASYNC110
            await asyncio.sleep(0)
    # Three polls with progress, one poll without progress, and one poll after the rank has published that it sleeps.
    assert pair.link.polls - before == 3 + 1 + 1
    assert pair.take_rings() == 0


async def test_doorbell_polls_after_publishing_its_sleep_number_and_a_fence(pair: Pair) -> None:
    events: list[Any] = []
    pair.doorbell.add(pair.link)
    await loop_iterations()
    pair.link.poll = lambda: events.append(("look", pair.status % 2)) or False
    pair.doorbell.fences = Fences(None, lambda: events.append(("fence", pair.status % 2)))
    pair.doorbell.poll_soon()
    await loop_iterations()
    assert events == [("look", 0), ("fence", 1), ("look", 1)]


async def test_rank_that_rings_a_doorbell_stays_awake_for_the_reply(pair: Pair) -> None:
    pair.other.add(Link())
    await loop_iterations()
    assert not pair.other.awake
    pair.peer.ring()
    assert pair.other.awake


async def test_shared_cpu_core_is_known_after_both_ranks_have_polled(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = iter([3, 3, 3, 5, 0])
    monkeypatch.setattr("aiocoll.transport.shm.doorbell.core", lambda: next(cores))
    assert not pair.peer.shares_core(), "the peer has not published its core"
    pair.doorbell.core()
    assert pair.peer.shares_core()
    assert not pair.peer.shares_core(), "this rank has moved to another core"
    pair.doorbell._status[8] = 0
    assert not pair.peer.shares_core(), "both cores are unknown"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_core_function_returns_the_cpu_core_of_this_thread() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for number in allowed:
            os.sched_setaffinity(0, {number})
            assert core() == number + 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cpu_core_is_unknown_without_sched_getcpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _load_sched_getcpu.cache_clear()
    monkeypatch.setattr("ctypes.PyDLL", lambda name: object())
    assert core() == 0
    _load_sched_getcpu.cache_clear()


async def test_closed_doorbell_does_not_poll(pair: Pair) -> None:
    fences = Fences(None, pair.fence)
    doorbell = Doorbell(Runtime.of(asyncio.get_running_loop()), fences, ImpatientPolling(), Outbox(LAYOUT, fences))
    doorbell.hold()
    link = Link()
    doorbell.add(link)
    doorbell.remove(link)
    doorbell.remove(link)
    doorbell.drop()
    await loop_iterations()
    assert doorbell.closed
    assert link.polls == 0


async def test_exception_during_a_poll_does_not_prevent_later_wake_ups(pair: Pair) -> None:
    """Check that the event loop reports the exception, and that the next ring still wakes the rank."""
    loop = asyncio.get_running_loop()
    events: list[Any] = []
    loop.set_exception_handler(lambda _, context: events.append(context["exception"]))
    pair.doorbell.add(pair.link)
    await loop_iterations()
    bug = ZeroDivisionError()
    look = pair.link.poll

    def fail() -> bool:
        pair.link.poll = look
        raise bug

    pair.link.poll = fail
    pair.doorbell.poll_soon()
    await loop_iterations()
    assert events == [bug]
    assert pair.status % 2
    before = pair.link.polls
    pair.doorbell.poll_soon()
    await loop_iterations()
    assert pair.link.polls > before
    loop.set_exception_handler(None)
