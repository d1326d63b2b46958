"""Newcomers of a growing group, on a store and a virtual clock: numbered requests, dead and late newcomers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiocoll import HashStore, RendezvousError
from aiocoll.errors import StoreTimeoutError
from aiocoll.meeting.cards import meeting_store
from aiocoll.meeting.growth import ANSWER, Assignment, Invitation, await_assignment, await_newcomer, invite
from aiocoll.store import PrefixStore, Store
from aiocoll.testing.virtual import VirtualLoop


def run_on_virtual_clock(test: Callable[[HashStore], Awaitable[Any]]) -> Any:
    """Run `test` with a new store on a new event loop with a virtual clock; return the result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def run() -> Any:
            return await test(HashStore())

        return runner.run(run())


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def assignment_of(rank: int, world_size: int, epoch: int = 1) -> Assignment:
    return Assignment(f"aiocoll/grown/{epoch}", rank, world_size, "large")


def first_generation(assignment: Assignment, store: Store) -> Store:
    return meeting_store(PrefixStore(assignment.prefix, store), 1)


async def take_ticket_and_die(store: HashStore) -> None:
    """Register as a newcomer, and then do nothing, like a newcomer that has died."""
    ticket = await store.add("aiocoll/grow/tickets", 1)
    await store.set(f"aiocoll/grow/came/{ticket}", b"")


class DelayedStore(HashStore):
    """A store handle whose first wait returns `seconds` later than the value arrives."""

    def __init__(self, store: HashStore, seconds: float) -> None:
        super().__init__()
        self._shared = store
        self._seconds = seconds

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._shared._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        value = await self._shared._wait(command, arguments, timeout)
        seconds, self._seconds = self._seconds, 0.0
        await asyncio.sleep(seconds)
        return value


@pytest.mark.parametrize("order", ["dead first", "dead last"])
@pytest.mark.parametrize("dead", [1, 2, 5])
@pytest.mark.parametrize("live", [1, 2, 5])
def test_dead_newcomers_are_not_assigned_a_rank(live: int, dead: int, order: str) -> None:
    async def test(store: HashStore) -> None:
        waiting: list[asyncio.Future[Assignment]] = []
        for alive in sorted([True] * live + [False] * dead, reverse=order == "dead last"):
            if alive:
                waiting.append(asyncio.ensure_future(await_assignment(store, 100)))
                await asyncio.sleep(0.1)
            else:
                await take_ticket_and_die(store)
        began = loop_time()
        assert await invite(store, Invitation(live, live, 3, "large"), 100) == assignment_of(0, 3 + live)
        assert await asyncio.gather(*waiting) == [assignment_of(3 + number, 3 + live) for number in range(live)]
        calls = 0 if order == "dead last" else -(-dead // live)
        assert loop_time() - began <= calls * ANSWER + 0.1

    run_on_virtual_clock(test)


def test_newcomer_that_answers_too_late_takes_another_ticket() -> None:
    async def test(store: HashStore) -> None:
        late = asyncio.ensure_future(await_assignment(DelayedStore(store, 2 * ANSWER), 100))
        assert await invite(store, Invitation(1, 1, 1, "large"), 100) == assignment_of(0, 2)
        assert await late == assignment_of(1, 2)
        assert await store.add("aiocoll/grow/tickets", 0) == 2
        assert loop_time() == pytest.approx(ANSWER)

    run_on_virtual_clock(test)


@pytest.mark.parametrize(("present", "at_least"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_grow_with_a_minimum_includes_all_present_newcomers(present: int, at_least: int) -> None:
    """Check that the group grows once all newcomers have arrived, or at the timeout if the minimum has arrived."""

    async def test(store: HashStore) -> None:
        waiting = [asyncio.ensure_future(await_assignment(store, 100)) for _ in range(present)]
        assert await invite(store, Invitation(3, at_least, 2, "large"), 10) == assignment_of(0, 2 + present)
        # The order of the newcomers' ranks depends on the seed of the virtual loop.
        assert sorted(each.rank for each in await asyncio.gather(*waiting)) == list(range(2, 2 + present))
        assert loop_time() == pytest.approx(0 if present == 3 else 10)

    run_on_virtual_clock(test)


@pytest.mark.parametrize("dead", [0, 2])
def test_newcomers_continue_to_wait_if_they_are_too_few(dead: int) -> None:
    async def test(store: HashStore) -> None:
        for _ in range(dead):
            await take_ticket_and_die(store)
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        with pytest.raises(RendezvousError, match="1 of 2 newcomers came within 10 s"):
            await invite(store, Invitation(3, 2, 1, "large"), 10)
        assert await invite(store, Invitation(1, 1, 1, "large"), 10) == assignment_of(0, 2)
        assert await waiting == assignment_of(1, 2)

    run_on_virtual_clock(test)


def test_newcomer_that_timed_out_is_not_assigned_to_a_group() -> None:
    async def test(store: HashStore) -> None:
        with pytest.raises(RendezvousError, match="no group has grown within 5 s"):
            await await_assignment(store, 5)
        waiting = asyncio.ensure_future(await_assignment(store, 5))
        await invite(store, Invitation(1, 1, 1, "large"), 1)
        assert (await waiting, loop_time()) == (assignment_of(1, 2), pytest.approx(5))

    run_on_virtual_clock(test)


class MortalStore(HashStore):
    """A store handle whose user dies after `last` calls: before or after the store carries out the next call."""

    def __init__(self, store: HashStore, last: int, carried_out: bool) -> None:
        super().__init__()
        self.dead = asyncio.Event()
        self._shared = store
        self._remaining = last
        self._carried_out = carried_out

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._call_unless_dead(lambda: self._shared._call(command, arguments))

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await self._call_unless_dead(lambda: self._shared._wait(command, arguments, timeout))

    async def _call_unless_dead(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self._remaining -= 1
        if self._remaining >= 0 or (self._carried_out and self._remaining == -1):
            result = await call()
        if self._remaining < 0:
            self.dead.set()
            await asyncio.Event().wait()
        return result


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("newcomers", [1, 3])
def test_newcomers_are_found_after_rank_0_died_at_any_step(newcomers: int, carried_out: bool) -> None:
    """Check that the successor of rank 0 finds all newcomers, and that no newcomer waits in an abandoned group."""

    async def test(store: HashStore, last: int) -> bool:
        async def newcomer() -> Assignment:
            while True:
                assignment = await await_assignment(store, 1000)
                world = first_generation(assignment, store)
                if await world.get("ended", timeout=1000) == b"met":
                    return assignment

        mortal = MortalStore(store, last, carried_out)
        waiting = [asyncio.ensure_future(newcomer()) for _ in range(newcomers)]
        first = asyncio.ensure_future(invite(mortal, Invitation(newcomers, newcomers, 2, "group~1"), 30))
        dead = asyncio.ensure_future(mortal.dead.wait())
        await asyncio.wait([first, dead], return_when=asyncio.FIRST_COMPLETED)
        head = await invite(store, Invitation(newcomers, newcomers, 1, "group~2"), 30)
        assert head[1:] == (0, 1 + newcomers, "group~2")
        await first_generation(head, store).set("ended", b"met")
        found = await asyncio.gather(*waiting)
        assert sorted(each.rank for each in found) == list(range(1, 1 + newcomers))
        assert {each.prefix for each in found} == {head.prefix}
        dead.cancel()
        return mortal.dead.is_set()

    calls = 0
    while run_on_virtual_clock(lambda store: test(store, calls)):  # noqa: B023 - called in the same iteration
        calls += 1
    assert calls > 8


def test_two_groups_can_grow_at_the_same_time() -> None:
    async def test(store: HashStore) -> None:
        waiting = [asyncio.ensure_future(await_assignment(store, 100)) for _ in range(5)]
        invitations = Invitation(2, 2, 1, "one~1"), Invitation(3, 3, 1, "two~1")
        heads = await asyncio.gather(*(invite(store, each, 50) for each in invitations))
        assert sorted(each.world_size for each in heads) == [3, 4]
        found = await asyncio.gather(*waiting)
        ranks = {head.prefix: sorted(each.rank for each in found if each.prefix == head.prefix) for head in heads}
        assert ranks == {head.prefix: list(range(1, head.world_size)) for head in heads}

    run_on_virtual_clock(test)


def test_rank_that_waits_for_a_newcomer_ignores_dead_newcomers() -> None:
    async def test(store: HashStore) -> None:
        await take_ticket_and_die(store)
        looking = asyncio.ensure_future(await_newcomer(store))
        await asyncio.sleep(50)
        assert not looking.done()
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        await looking
        assert loop_time() == pytest.approx(50)
        assert await invite(store, Invitation(1, 1, 1, "large"), 0) == assignment_of(0, 2)
        assert await waiting == assignment_of(1, 2)

    run_on_virtual_clock(test)


class LateStore(HashStore):
    """A store in which a wait for a newcomer's assignment times out when the assignment has just been stored."""

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        value = await super()._wait(command, arguments, timeout)
        if command == "get" and "assignment" in arguments[0]:
            raise StoreTimeoutError("timed out")
        return value


def test_newcomer_accepts_an_assignment_that_arrives_at_its_deadline() -> None:
    """Check that the newcomer accepts despite its timeout, since rank 0 has already assigned a rank to it."""

    async def test(_: HashStore) -> None:
        store = LateStore()
        waiting = asyncio.ensure_future(await_assignment(store, 5))
        assert await invite(store, Invitation(1, 1, 1, "large"), 1) == assignment_of(0, 2)
        assert await waiting == assignment_of(1, 2)

    run_on_virtual_clock(test)


def test_newcomer_that_was_cancelled_is_not_assigned_to_a_group() -> None:
    async def test(store: HashStore) -> None:
        cancelled = asyncio.ensure_future(await_assignment(store, 100))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        began = loop_time()
        assert await invite(store, Invitation(1, 1, 1, "large"), 50) == assignment_of(0, 2)
        assert (await waiting, loop_time()) == (assignment_of(1, 2), began)

    run_on_virtual_clock(test)


class LingeringStore(HashStore):
    """A store handle whose cancelled waits continue on the server, which has not been notified yet."""

    def __init__(self, store: HashStore) -> None:
        super().__init__()
        self.unfinished: list[asyncio.Task[Any]] = []
        self._shared = store

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._shared._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        self.unfinished.append(asyncio.ensure_future(self._shared._wait(command, arguments, timeout)))
        return await asyncio.shield(self.unfinished[-1])


def test_cancelled_wait_for_newcomers_does_not_drop_a_newcomer() -> None:
    """Cancel two waits for newcomers, and check that a later wait notices the next newcomer at once."""

    async def test(store: HashStore) -> None:
        lingering = LingeringStore(store)
        for wait in (lambda: await_newcomer(lingering), lambda: invite(lingering, Invitation(1, 1, 1, "large"), 9)):
            cancelled = asyncio.ensure_future(wait())
            await asyncio.sleep(0.1)
            cancelled.cancel()
        looking = asyncio.ensure_future(await_newcomer(store))
        await asyncio.sleep(0.1)
        began = loop_time()
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        await looking
        assert loop_time() == began
        waiting.cancel()
        await asyncio.wait([waiting, *lingering.unfinished])

    run_on_virtual_clock(test)
