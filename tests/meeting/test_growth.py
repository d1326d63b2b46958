"""Newcomers and a group that grows, in a store, on a clock that jumps: who has a ticket, who has died, who is late."""

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


def on_a_clock_that_jumps(test: Callable[[HashStore], Awaitable[Any]]) -> Any:
    """Run a test on a loop of its own; return what it returns."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def run() -> Any:
            return await test(HashStore())

        return runner.run(run())


def now() -> float:
    return asyncio.get_running_loop().time()


def seat(rank: int, world_size: int, epoch: int = 1) -> Assignment:
    return Assignment(f"aiocoll/grown/{epoch}", rank, world_size, "large")


def first_meeting(assignment: Assignment, store: Store) -> Store:
    return meeting_store(PrefixStore(assignment.prefix, store), 1)


async def die(store: HashStore) -> None:
    """Take a ticket, and answer nothing any more."""
    ticket = await store.add("aiocoll/grow/tickets", 1)
    await store.set(f"aiocoll/grow/came/{ticket}", b"")


class Deaf(HashStore):
    """A store whose holder hears nothing of what comes in it within `seconds`."""

    def __init__(self, store: HashStore, seconds: float) -> None:
        super().__init__()
        self._of_all = store
        self._seconds = seconds

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._of_all._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        value = await self._of_all._wait(command, arguments, timeout)
        seconds, self._seconds = self._seconds, 0.0
        await asyncio.sleep(seconds)
        return value


@pytest.mark.parametrize("order", ["dead first", "dead last"])
@pytest.mark.parametrize("dead", [1, 2, 5])
@pytest.mark.parametrize("living", [1, 2, 5])
def test_dead_newcomers_get_no_rank(living: int, dead: int, order: str) -> None:
    async def test(store: HashStore) -> None:
        waiting: list[asyncio.Future[Assignment]] = []
        for alive in sorted([True] * living + [False] * dead, reverse=order == "dead last"):
            if alive:
                waiting.append(asyncio.ensure_future(await_assignment(store, 100)))
                await asyncio.sleep(0.1)
            else:
                await die(store)
        began = now()
        assert await invite(store, Invitation(living, living, 3, "large"), 100) == seat(0, 3 + living)
        assert await asyncio.gather(*waiting) == [seat(3 + number, 3 + living) for number in range(living)]
        calls = 0 if order == "dead last" else -(-dead // living)
        assert now() - began <= calls * ANSWER + 0.1

    on_a_clock_that_jumps(test)


def test_late_newcomer_takes_another_ticket() -> None:
    async def test(store: HashStore) -> None:
        late = asyncio.ensure_future(await_assignment(Deaf(store, 2 * ANSWER), 100))
        assert await invite(store, Invitation(1, 1, 1, "large"), 100) == seat(0, 2)
        assert await late == seat(1, 2)
        assert await store.add("aiocoll/grow/tickets", 0) == 2
        assert now() == pytest.approx(ANSWER)

    on_a_clock_that_jumps(test)


@pytest.mark.parametrize(("came", "least"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_grow_at_least_takes_the_present_newcomers(came: int, least: int) -> None:
    """It goes on when the time is over, or when all have come."""

    async def test(store: HashStore) -> None:
        waiting = [asyncio.ensure_future(await_assignment(store, 100)) for _ in range(came)]
        assert await invite(store, Invitation(3, least, 2, "large"), 10) == seat(0, 2 + came)
        # Ranks go by the order in which they have called, which the seed decides.
        assert sorted(each.rank for each in await asyncio.gather(*waiting)) == list(range(2, 2 + came))
        assert now() == pytest.approx(0 if came == 3 else 10)

    on_a_clock_that_jumps(test)


@pytest.mark.parametrize("dead", [0, 2])
def test_too_few_newcomers_continue_to_wait(dead: int) -> None:
    async def test(store: HashStore) -> None:
        for _ in range(dead):
            await die(store)
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        with pytest.raises(RendezvousError, match="1 of 2 newcomers came within 10 s"):
            await invite(store, Invitation(3, 2, 1, "large"), 10)
        assert await invite(store, Invitation(1, 1, 1, "large"), 10) == seat(0, 2)
        assert await waiting == seat(1, 2)

    on_a_clock_that_jumps(test)


def test_timed_out_newcomer_is_not_called() -> None:
    async def test(store: HashStore) -> None:
        with pytest.raises(RendezvousError, match="no group has grown within 5 s"):
            await await_assignment(store, 5)
        waiting = asyncio.ensure_future(await_assignment(store, 5))
        await invite(store, Invitation(1, 1, 1, "large"), 1)
        assert (await waiting, now()) == (seat(1, 2), pytest.approx(5))

    on_a_clock_that_jumps(test)


class Mortal(HashStore):
    """A store whose holder dies at its call number `last`, before that is heard or after."""

    def __init__(self, store: HashStore, last: int, heard: bool) -> None:
        super().__init__()
        self.dead = asyncio.Event()
        self._of_all = store
        self._left = last
        self._heard = heard

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._unless_dead(lambda: self._of_all._call(command, arguments))

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await self._unless_dead(lambda: self._of_all._wait(command, arguments, timeout))

    async def _unless_dead(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self._left -= 1
        if self._left >= 0 or (self._heard and self._left == -1):
            result = await call()
        if self._left < 0:
            self.dead.set()
            await asyncio.Event().wait()
        return result


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("newcomers", [1, 3])
def test_newcomers_are_found_after_rank_0_died_at_any_step(newcomers: int, heard: bool) -> None:
    """Who follows it finds them all, and none waits where nobody comes."""

    async def test(store: HashStore, last: int) -> bool:
        async def newcomer() -> Assignment:
            while True:
                assignment = await await_assignment(store, 1000)
                world = first_meeting(assignment, store)
                if await world.get("ended", timeout=1000) == b"met":
                    return assignment

        mortal = Mortal(store, last, heard)
        waiting = [asyncio.ensure_future(newcomer()) for _ in range(newcomers)]
        first = asyncio.ensure_future(invite(mortal, Invitation(newcomers, newcomers, 2, "group~1"), 30))
        dead = asyncio.ensure_future(mortal.dead.wait())
        await asyncio.wait([first, dead], return_when=asyncio.FIRST_COMPLETED)
        head = await invite(store, Invitation(newcomers, newcomers, 1, "group~2"), 30)
        assert head[1:] == (0, 1 + newcomers, "group~2")
        await first_meeting(head, store).set("ended", b"met")
        found = await asyncio.gather(*waiting)
        assert sorted(each.rank for each in found) == list(range(1, 1 + newcomers))
        assert {each.prefix for each in found} == {head.prefix}
        dead.cancel()
        return mortal.dead.is_set()

    calls = 0
    while on_a_clock_that_jumps(lambda store: test(store, calls)):  # noqa: B023 - it is called at once
        calls += 1
    assert calls > 8


def test_two_groups_grow_at_once() -> None:
    async def test(store: HashStore) -> None:
        waiting = [asyncio.ensure_future(await_assignment(store, 100)) for _ in range(5)]
        invitations = Invitation(2, 2, 1, "one~1"), Invitation(3, 3, 1, "two~1")
        heads = await asyncio.gather(*(invite(store, each, 50) for each in invitations))
        assert sorted(each.world_size for each in heads) == [3, 4]
        found = await asyncio.gather(*waiting)
        ranks = {head.prefix: sorted(each.rank for each in found if each.prefix == head.prefix) for head in heads}
        assert ranks == {head.prefix: list(range(1, head.world_size)) for head in heads}

    on_a_clock_that_jumps(test)


def test_waiting_rank_learns_which_newcomers_live() -> None:
    async def test(store: HashStore) -> None:
        await die(store)
        looking = asyncio.ensure_future(await_newcomer(store))
        await asyncio.sleep(50)
        assert not looking.done()
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        await looking
        assert now() == pytest.approx(50)
        assert await invite(store, Invitation(1, 1, 1, "large"), 0) == seat(0, 2)
        assert await waiting == seat(1, 2)

    on_a_clock_that_jumps(test)


class TooLate(HashStore):
    """A store in which a wait is over in the moment in which its key comes."""

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        value = await super()._wait(command, arguments, timeout)
        if command == "get" and "assignment" in arguments[0]:
            raise StoreTimeoutError("it came too late")
        return value


def test_assignment_at_the_deadline_is_taken() -> None:
    """Rank 0 has stored it, and so it counts on the newcomer."""

    async def test(_: HashStore) -> None:
        store = TooLate()
        waiting = asyncio.ensure_future(await_assignment(store, 5))
        assert await invite(store, Invitation(1, 1, 1, "large"), 1) == seat(0, 2)
        assert await waiting == seat(1, 2)

    on_a_clock_that_jumps(test)


def test_cancelled_newcomer_is_not_called() -> None:
    async def test(store: HashStore) -> None:
        cancelled = asyncio.ensure_future(await_assignment(store, 100))
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        began = now()
        assert await invite(store, Invitation(1, 1, 1, "large"), 50) == seat(0, 2)
        assert (await waiting, now()) == (seat(1, 2), began)

    on_a_clock_that_jumps(test)


class Lingering(HashStore):
    """A store whose server has not heard yet that a wait was cancelled."""

    def __init__(self, store: HashStore) -> None:
        super().__init__()
        self.left: list[asyncio.Task[Any]] = []
        self._of_all = store

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._of_all._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        self.left.append(asyncio.ensure_future(self._of_all._wait(command, arguments, timeout)))
        return await asyncio.shield(self.left[-1])


def test_cancelled_wait_consumes_no_newcomer() -> None:
    """Who looks for newcomers after it hears of the next one at once."""

    async def test(store: HashStore) -> None:
        lingering = Lingering(store)
        for wait in (lambda: await_newcomer(lingering), lambda: invite(lingering, Invitation(1, 1, 1, "large"), 9)):
            cancelled = asyncio.ensure_future(wait())
            await asyncio.sleep(0.1)
            cancelled.cancel()
        looking = asyncio.ensure_future(await_newcomer(store))
        await asyncio.sleep(0.1)
        began = now()
        waiting = asyncio.ensure_future(await_assignment(store, 100))
        await looking
        assert now() == began
        waiting.cancel()
        await asyncio.wait([waiting, *lingering.left])

    on_a_clock_that_jumps(test)
