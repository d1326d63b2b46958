"""Groups without a shutdown: aiocoll closes them with a warning, at the end of the loop or on collection.

`tests/conftest.py` finds what a test leaves behind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import uvloop

import aiocoll
from aiocoll import GroupClosedError, Meeting, PeerLostError, ProcessGroup, Work
from aiocoll.group.parts import parts_of
from aiocoll.loop_end import LoopEnd
from aiocoll.store import HashStore
from aiocoll.transport.stream.plain_stream import PlainStream

from ..ranks import LINKS, options, wait_until

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: list[Loop] = [asyncio.new_event_loop, uvloop.new_event_loop]
# libuv opens a pipe once per process. Open it now, so that tests which count descriptors do not see it.
uvloop.new_event_loop().close()


@contextmanager
def unclosed() -> Iterator[list[str]]:
    """Yield a list; at the end of the block, it gets the warnings about groups that were not shut down."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        gc.collect()
    found += sorted(str(each.message) for each in caught if "was not shut down" in str(each.message))


def expected_warnings(*ranks: int) -> list[str]:
    remedy = "await its shutdown(), or use async with"
    return [f"group 'world:0' was not shut down on rank {rank}: {remedy}" for rank in ranks]


async def linked_groups(transport: str, size: int = 2) -> list[ProcessGroup]:
    """Create the groups of all ranks in this event loop, with links between them."""
    store = HashStore()
    made = await asyncio.gather(
        *(
            aiocoll.new_group(store=store, rank=rank, world_size=size, options=options(transport), timeout=20)
            for rank in range(size)
        )
    )
    await asyncio.gather(*(pg.allreduce(np.ones(40_000)) for pg in made))
    return made


def open_file_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("keeps", [False, True])
def test_asyncio_runner_closes_open_groups_at_its_end(keeps: bool, transport: str, loop: Loop) -> None:
    """Include groups that the program still references after the end."""
    kept: list[ProcessGroup] = []

    async def main() -> None:
        made = await linked_groups(transport)
        if keeps:
            kept.extend(made)

    before = open_file_count(), threading.active_count()
    with unclosed() as found, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert found == expected_warnings(0, 1)
    assert (open_file_count(), threading.active_count()) == before
    for pg in kept:
        assert "closed" in repr(pg)


async def start_pending_works(*begin: Callable[[ProcessGroup], object]) -> list[Work[Any]]:
    """Start works that never complete, call `begin` with their groups, and return the works."""
    first, second = await linked_groups("unix")
    first.timeout = second.timeout = 1000
    asyncio.get_running_loop().call_later(20, first.abort, "it has waited for its works")
    works: list[Work[Any]] = [first.recv_object(1), second.recv_object(0)]
    for call in begin:
        call(first)
        call(second)
    await asyncio.sleep(0)
    return works


def check_closed(works: list[Work[Any]]) -> None:
    for work in works:
        with pytest.raises(GroupClosedError, match="was closed by this rank"):
            work.result()


def test_asyncio_runner_closes_groups_with_pending_works_at_once() -> None:
    with unclosed() as found:
        check_closed(asyncio.run(start_pending_works()))
    assert found == expected_warnings(0, 1)


def test_end_of_the_event_loop_ends_a_shutdown_that_waits_for_works() -> None:
    """Close the asynchronous generators of the loop, but do not cancel its tasks."""
    loop = asyncio.new_event_loop()
    with unclosed() as found:
        works = loop.run_until_complete(start_pending_works(lambda pg: parts_of(pg).lifetime.start_shutdown()))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        check_closed(works)
    assert found == []


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("transport", LINKS)
def test_groups_collected_after_the_end_of_the_loop_are_closed(
    transport: str, loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        made = await linked_groups(transport)
        del made
        gc.collect()

    before = open_file_count(), threading.active_count()
    with unclosed() as found, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert found == expected_warnings(0, 1)
    assert (open_file_count(), threading.active_count()) == before
    assert "destroyed" not in caplog.text


def test_peer_in_another_event_loop_is_notified_that_the_rank_has_left(caplog: pytest.LogCaptureFixture) -> None:
    """Check that the unclosed group sends its goodbye before its event loop ends."""
    errors: list[PeerLostError] = []
    with Meeting(2) as meeting:

        async def run_leaving_rank() -> None:
            pg = await aiocoll.new_group(init_method=meeting.ticket(0), timeout=20)
            await pg.barrier()

        async def run_waiting_rank() -> None:
            async with aiocoll.new_group(init_method=meeting.ticket(1), timeout=20) as pg:
                await pg.barrier()
                with pytest.raises(PeerLostError, match="needs rank 0, which has left") as caught:
                    await pg.recv_object(0, timeout=1000)
                errors.append(caught.value)

        other = threading.Thread(target=asyncio.run, args=(run_waiting_rank(),))
        other.start()
        with unclosed() as found:
            asyncio.run(run_leaving_rank())
        other.join()
    assert found == expected_warnings(0)
    assert [error.how for error in errors] == ["left"]
    assert "destroyed" not in caplog.text


@pytest.mark.parametrize("transport", LINKS)
def test_groups_referenced_by_an_exception_of_the_program_are_closed(transport: str) -> None:
    async def main() -> None:
        made = await linked_groups(transport)
        raise ArithmeticError(f"for a test, with {len(made)} groups")

    with unclosed() as found, pytest.raises(ArithmeticError, match="with 2 groups"):
        asyncio.run(main())
    assert found == expected_warnings(0, 1)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_garbage_collected_groups_are_closed_while_the_loop_runs(in_thread: bool, transport: str, loop: Loop) -> None:
    async def main() -> None:
        await (await linked_groups(transport, 1))[0].shutdown()  # opens descriptors that the loop keeps
        before = open_file_count()
        for _ in range(3):
            made = await linked_groups(transport)
            assert transport == "memory" or open_file_count() > before
            del made
            if in_thread:
                await asyncio.to_thread(gc.collect)
            else:
                gc.collect()
            await wait_until(lambda: open_file_count() == before)

    with unclosed() as found, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    assert found == sorted(expected_warnings(0, 1) * 3)


@pytest.mark.parametrize("transport", LINKS)
def test_peer_of_a_garbage_collected_group_is_notified_that_the_rank_has_left(transport: str) -> None:
    async def main() -> None:
        made = await linked_groups(transport)
        kept = made.pop(0)
        del made
        work = kept.allreduce(1, timeout=1000)
        gc.collect()
        with pytest.raises(PeerLostError, match="needs rank 1, which has left") as caught:
            await work
        assert caught.value.how == "left"
        await kept.shutdown()

    with unclosed() as found:
        asyncio.run(main())
    assert found == expected_warnings(1)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("closed", [False, True])
def test_garbage_collected_groups_of_a_stopped_loop_are_closed(closed: bool, transport: str, loop: Loop) -> None:
    """Include an event loop that the program closes directly, without the last steps of `asyncio.run`."""
    new = loop()
    with unclosed() as found:
        made = new.run_until_complete(linked_groups(transport))
        if closed:
            new.close()
        del made
    assert found == expected_warnings(0, 1)
    if not closed:
        new.run_until_complete(asyncio.sleep(0))
        new.close()


@pytest.mark.parametrize("transport", LINKS)
def test_garbage_collection_of_a_group_leaves_other_groups_of_the_job_usable(transport: str) -> None:
    """Check also that the shutdown of the last group releases the resources that both groups shared."""

    async def main() -> None:
        store = HashStore()

        async def rank(number: int) -> None:
            first, second = [
                await aiocoll.new_group(
                    store=store, rank=number, world_size=2, name=name, options=options(transport), timeout=20
                )
                for name in ("first", "second")
            ]
            await first.barrier()
            del first
            gc.collect()
            async with second:
                assert await second.allreduce(1) == 2

        await asyncio.gather(rank(0), rank(1))
        await wait_until(lambda: len(asyncio.all_tasks()) == 1)

    with unclosed() as found:
        asyncio.run(main())
    assert [text[:30] for text in found] == ["group 'first' was not shut dow"] * 2


class ClosableItem:
    """A stand-in for a group, which is closed at the end of its event loop."""

    def __init__(self, *, is_ending: bool = False) -> None:
        self.is_ending = is_ending
        self.calls: list[str] = []

    def begin_abandon(self) -> asyncio.Task[None]:
        self.calls.append("closes")
        return asyncio.ensure_future(self._close())

    def warn(self) -> None:
        self.calls.append("warns")

    async def _close(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        self.calls.append("closed")


def test_loop_end_closes_registered_items_unless_they_were_removed() -> None:
    kept: list[LoopEnd] = []
    items = [ClosableItem(), ClosableItem(is_ending=True), ClosableItem(), ClosableItem()]

    async def main() -> None:
        kept.extend([LoopEnd(), LoopEnd()])
        for number, item in enumerate(items):
            kept[number // 2].add(item)
        kept[1].forget()
        kept[1].forget()

    asyncio.run(main())
    assert items[0].calls[:2] == ["closes", "closed"]
    assert items[0].calls[-1] == "warns"
    assert "warns" not in items[1].calls
    assert items[1].calls[:2] == ["closes", "closed"]
    assert items[2].calls == items[3].calls == []


async def test_stream_with_unsent_data_can_be_closed_after_its_event_loop() -> None:
    own_socket, peer_socket = socket.socketpair()
    loop = asyncio.new_event_loop()
    loop.close()
    stream = PlainStream(loop, own_socket)
    stream.start_writing(lambda: None)
    stream.close()
    assert own_socket.fileno() == -1
    peer_socket.close()


@pytest.mark.ranks(2)
async def test_group_after_shutdown_causes_no_unclosed_warning(pg: ProcessGroup) -> None:
    async with asyncio.timeout(20):
        await pg.shutdown()
    gc.collect()  # a warning would raise an error here
