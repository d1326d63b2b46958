"""Device turns: groups on one device take turns, in order and one at a time."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from aiocoll.gpu.turns import Turns


async def test_device_turn_starts_when_the_previous_turn_has_ended() -> None:
    turns, begun = Turns(), [asyncio.Event() for _ in range(3)]
    taken = [turns.take(each.set) for each in begun]
    for index, turn in enumerate(taken):
        await begun[index].wait()
        assert not any(each.is_set() for each in begun[index + 1 :])
        turn.end()
        turn.end()


async def test_device_turn_that_ends_before_its_start_never_starts() -> None:
    turns, order = Turns(), []
    first, second, third = (turns.take(partial(order.append, number)) for number in range(3))
    second.end()
    await asyncio.sleep(0)
    first.end()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [0, 2]
    third.end()
    last = turns.take(partial(order.append, 3))
    last.end()
    await asyncio.sleep(0)
    assert order == [0, 2]


@pytest.mark.parametrize("waits", [False, True])
def test_device_turn_of_a_closed_event_loop_is_skipped(waits: bool) -> None:
    turns = Turns()

    async def leave_one() -> None:
        turns.take(lambda: None)

    def run_in_thread() -> None:
        asyncio.run(leave_one())

    async def main() -> None:
        first = turns.take(lambda: None)
        other = threading.Thread(target=run_in_thread)
        other.start()
        other.join()
        begun = asyncio.Event()
        if not waits:
            first.end()
        turns.take(begun.set)
        if waits:
            first.end()
        await asyncio.wait_for(begun.wait(), 10)

    asyncio.run(main())


@pytest.mark.parametrize("others", [0, 1])
def test_started_device_turn_ends_when_its_event_loop_is_closed(others: int) -> None:
    turns, begun = Turns(), []

    async def leave_some() -> None:
        for number in range(1 + others):
            turns.take(partial(begun.append, number))
        await asyncio.sleep(0)

    async def main() -> None:
        turn = turns.take(partial(begun.append, "next"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        turn.end()

    asyncio.run(leave_some())
    asyncio.run(main())
    assert begun == [0, "next"]
    assert not turns._row
