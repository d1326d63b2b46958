"""`grow` in a group that fails or closes meanwhile: errors on its ranks and on newcomers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from aiocoll import (
    FileStore,
    GroupClosedError,
    GroupError,
    HashStore,
    PeerLostError,
    ProcessGroup,
    RendezvousError,
    StoreUnavailableError,
    TCPStore,
    new_group,
)
from aiocoll.meeting.growth import Assignment, Invitation, await_assignment, invite
from aiocoll.store import Store, StoreServer

from ..internals import comm_of, pending_waits
from ..ranks import LINKS, options, wait_until


async def results_on_ranks(where: dict[str, Any], world_size: int, then: Any, *others: Awaitable[Any]) -> list[Any]:
    """Run `then` on each rank, and the coroutines `others` concurrently; return the results of ranks and coroutines."""

    async def rank(number: int) -> Any:
        async with new_group(rank=number, world_size=world_size, **where) as pg:
            return await then(pg)

    async with asyncio.timeout(30):
        return await asyncio.gather(*map(rank, range(world_size)), *others)


def waits_for_newcomers(store: HashStore) -> bool:
    """Return whether rank 0 waits at the store for another newcomer."""
    return any(waiter.keys[0].startswith("aiocoll/grow/came/") for waiter in pending_waits(store).values())


async def failed_growth(pg: ProcessGroup, n: int) -> tuple[type[GroupError], str]:
    """Call `grow` without a timeout, which must fail; return the type and text of the error."""
    with pytest.raises(GroupError) as raised:
        await pg.grow(n, timeout=float("inf"))
    return type(raised.value), str(raised.value)


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
async def test_grow_fails_if_the_group_fails_before_newcomers_arrive(world_size: int, transport: str) -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> Any:
        growing = asyncio.ensure_future(failed_growth(pg, 1))
        if pg.rank() == pg.size() - 1:
            await wait_until(lambda: waits_for_newcomers(store))
            pg.abort("on purpose")
        failure = await growing
        async with await pg.shrink() as again:
            assert await again.allreduce(1) == world_size
        return failure

    expected = f"group 'world:0' was aborted by rank {world_size - 1}: on purpose"
    results = await results_on_ranks({"store": store, "options": options(transport)}, world_size, rank)
    assert results == [(GroupError, expected)] * world_size


@pytest.mark.parametrize("victim", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
async def test_grow_fails_on_the_death_of_a_rank_while_waiting_for_newcomers(victim: int) -> None:
    """Check also that the surviving ranks can then grow with the newcomer that already waits."""
    store = HashStore()
    where = {"store": store, "options": options("unix")}

    async def rank(pg: ProcessGroup) -> Any:
        growing = asyncio.ensure_future(failed_growth(pg, 2))
        await wait_until(lambda: waits_for_newcomers(store))
        if pg.rank() == (victim + 1) % 3:
            comm_of(pg).endpoint.roster.record_loss(victim, "its process is gone")
        failure = await growing
        if pg.rank() == victim:
            return None
        async with await pg.shrink() as small, await small.grow(1) as grown:
            assert await grown.allgather_object(grown.rank()) == [0, 1, 2]
        return failure

    async def newcomer() -> Any:
        async with new_group(join=True, **where) as pg:  # type: ignore[arg-type]
            return await pg.allgather_object(pg.rank())

    results = await results_on_ranks(where, 3, rank, newcomer())
    expected = PeerLostError, f"rank {victim} of group 'world:0' is gone: its process is gone"
    assert results == [*(None if number == victim else expected for number in range(3)), [0, 1, 2]]


class PausingStore(HashStore):
    """A store that blocks a newcomer after the newcomer has claimed its rank."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.seated = asyncio.Event()
        self.go_on = asyncio.Event()
        self._of_all = store

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        if command == "compare_set" and arguments[0].endswith("aiocoll/world_size"):
            self.seated.set()
            await self.go_on.wait()
        return await self._of_all._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await self._of_all._wait(command, arguments, timeout)


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_grow_fails_if_the_group_fails_while_meeting_newcomers(world_size: int, transport: str) -> None:
    store = HashStore()
    where = {"store": store, "options": options(transport)}
    late = PausingStore(store)

    async def rank(pg: ProcessGroup) -> Any:
        growing = asyncio.ensure_future(failed_growth(pg, 1))
        await late.seated.wait()
        if pg.rank() == pg.size() - 1:
            pg.abort("on purpose")
        failure = await growing
        late.go_on.set()
        return failure

    async def newcomer() -> None:
        why = "the group that was to meet them has failed: .* was aborted by rank .*: on purpose"
        with pytest.raises(RendezvousError, match=why):
            await new_group(join=True, timeout=float("inf"), **{**where, "store": late})  # type: ignore[arg-type]

    results = await results_on_ranks(where, world_size, rank, newcomer())
    expected = f"group 'world:0' was aborted by rank {world_size - 1}: on purpose"
    assert results == [*[(GroupError, expected)] * world_size, None]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("turns", range(12))
async def test_grow_fails_if_the_group_is_aborted_in_any_loop_iteration_after_an_assignment(
    turns: int, world_size: int
) -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        growing = asyncio.ensure_future(failed_growth(pg, 1))
        if pg.rank() == 0:
            await store.get("aiocoll/grow/assignment/1")
            for _ in range(turns):
                await asyncio.sleep(0)
            pg.abort("on purpose")
        assert await growing == (GroupError, "group 'world:0' was aborted by rank 0: on purpose")

    async def newcomer() -> None:
        why = "was to meet them has failed: .*: on purpose|assigned this process a rank failed to grow"
        with pytest.raises(RendezvousError, match=why):
            await new_group(store=store, join=True, timeout=float("inf"))

    await results_on_ranks({"store": store}, world_size, rank, newcomer())


class UnansweringStore(HashStore):
    """A store that stores the first assignment but never replies to this request."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.stored = asyncio.Event()
        self._of_all = store

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        answer = await self._of_all._call(command, arguments)
        if command == "compare_set" and arguments[0] == "aiocoll/grow/assignment/1":
            self.stored.set()
            await asyncio.Event().wait()
        return answer

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await self._of_all._wait(command, arguments, timeout)


async def test_newcomer_whose_assignment_is_already_stored_is_notified_if_grow_is_cancelled() -> None:
    store = HashStore()
    far = UnansweringStore(store)
    newcomers = [asyncio.ensure_future(await_assignment(store, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    inviting = asyncio.ensure_future(invite(far, Invitation(2, 2, 1, "large"), 30))
    await far.stored.wait()
    inviting.cancel()
    await asyncio.wait([inviting])
    assert inviting.cancelled()
    expected = await store.get(f"{(await newcomers[0]).prefix}/aiocoll/1/job")
    assert expected == b"off:the group that the newcomers joined does not grow: its rank 0 was lost or cancelled"
    # The second newcomer still waits, so that another group can invite it.
    assert await invite(store, Invitation(1, 1, 1, "larger"), 30) == Assignment("aiocoll/grown/2", 0, 2, "larger")
    assert await newcomers[1] == Assignment("aiocoll/grown/2", 1, 2, "larger")


async def test_grow_fails_if_the_group_fails_during_the_assignments() -> None:
    """Abort the group as soon as the newcomer has received its assignment."""
    store = HashStore()

    async def rank(pg: ProcessGroup) -> Any:
        seat = asyncio.ensure_future(await_assignment(store, 30))
        seat.add_done_callback(lambda _: pg.abort("on purpose"))
        failure = await failed_growth(pg, 1)
        assert (await store.get(f"{(await seat).prefix}/aiocoll/1/job")).startswith(b"off:")
        return failure

    assert await results_on_ranks({"store": store}, 1, rank) == [
        (GroupError, "group 'world:0' was aborted by rank 0: on purpose")
    ]


async def test_grow_fails_on_the_death_of_the_store_host() -> None:
    """Close the store before rank 0 receives the cause: the death of the process that hosts the store."""
    server = StoreServer(key=None)
    host, port = server.start()
    stores = [TCPStore(host, port) for _ in range(2)]
    began = asyncio.Event()

    async def rank(number: int) -> Any:
        async with new_group(store=stores[number], rank=number, world_size=2, options=options("unix")) as pg:
            growing = asyncio.ensure_future(failed_growth(pg, 1))
            if number == 0:
                await wait_until(lambda: any("growth" in task.get_name() for task in asyncio.all_tasks()))
                began.set()
            else:
                await began.wait()
                await server.aclose()
                await asyncio.sleep(0.01)
                pg.abort("its process has ended")
            return await growing

    try:
        async with asyncio.timeout(30):
            results = await asyncio.gather(rank(0), rank(1))
    finally:
        for store in stores:
            await store.aclose()
        await server.aclose()
    assert results == [(GroupError, "group 'world:0' was aborted by rank 1: its process has ended")] * 2


async def test_grow_ends_when_the_group_is_closed() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        growing = asyncio.ensure_future(failed_growth(pg, 1))
        await wait_until(lambda: any("growth" in task.get_name() for task in asyncio.all_tasks()))
        await pg.shutdown()
        return (await growing)[0]

    assert await results_on_ranks({"store": HashStore()}, 1, rank) == [GroupClosedError]


async def test_cancelled_grow_leaves_the_group_usable() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        growing = asyncio.ensure_future(pg.grow(1))
        await wait_until(lambda: any("growth" in task.get_name() for task in asyncio.all_tasks()))
        growing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await growing
        return await pg.allreduce(1)

    assert await results_on_ranks({"store": HashStore()}, 1, rank) == [1]


async def test_merge_fails_if_its_group_fails() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> Any:
        merging = asyncio.ensure_future(pg.merge_remote_group(store, 4, timeout=float("inf")))
        if pg.rank() == 1:
            await wait_until(lambda: pending_waits(store))  # rank 0 waits for the other groups
            pg.abort("on purpose")
        with pytest.raises(GroupError, match="was aborted by rank 1: on purpose"):
            await merging

    await results_on_ranks({"store": store}, 2, rank)


async def test_grow_reports_a_lost_store_if_no_rank_has_died() -> None:
    server = StoreServer(key=None)
    async with TCPStore(*server.start()) as store:

        async def rank(pg: ProcessGroup) -> None:
            await server.aclose()
            with pytest.raises(StoreUnavailableError, match="cannot grow: the store where its ranks met is gone"):
                await pg.grow(1)
            assert await pg.allreduce(1) == 1

        await results_on_ranks({"store": store}, 1, rank)


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
async def test_grow_includes_all_present_newcomers(world_size: int, transport: str) -> None:
    store = HashStore()
    where = {"store": store, "options": options(transport)}

    async def rank(pg: ProcessGroup) -> Any:
        async with await pg.grow(3, timeout=1, at_least=1) as grown:
            return await grown.allgather_object(grown.rank())

    async def newcomer() -> Any:
        async with new_group(join=True, **where) as pg:  # type: ignore[arg-type]
            return await pg.allgather_object(pg.rank())

    results = await results_on_ranks(where, world_size, rank, newcomer(), newcomer())
    assert results == [[*range(world_size + 2)]] * (world_size + 2)


@pytest.mark.parametrize("kind", ["file", "tcp"])
async def test_grow_includes_all_newcomers_present_at_an_external_store(kind: str, tmp_path: Path) -> None:
    """Use stores outside of this process's memory, whose replies take some time."""
    async with AsyncExitStack() as stack:
        if kind == "tcp":
            server = await stack.enter_async_context(TCPStore("127.0.0.1", 0, is_master=True))
        stores = [FileStore(tmp_path / "f") if kind == "file" else TCPStore("127.0.0.1", server.port) for _ in range(3)]
        for store in stores:
            await stack.enter_async_context(store)

        async def rank(number: int) -> Any:
            async with (
                new_group(store=stores[number], rank=number, world_size=2) as pg,
                await pg.grow(3, timeout=1, at_least=1) as grown,
            ):
                return await grown.allgather_object(grown.rank())

        async def newcomer() -> Any:
            async with new_group(store=stores[2], join=True) as pg:
                return await pg.allgather_object(pg.rank())

        async with asyncio.timeout(30):
            assert await asyncio.gather(rank(0), rank(1), newcomer()) == [[0, 1, 2]] * 3


async def test_newcomers_are_notified_of_a_timed_out_meeting() -> None:
    """Let one of two newcomers block after it has been assigned a rank."""
    store = HashStore()
    late = PausingStore(store)

    async def rank(pg: ProcessGroup) -> Any:
        with pytest.raises(RendezvousError):
            await pg.grow(2, timeout=1)
        absent.cancel()
        return await pg.allreduce(1)

    async def newcomer() -> None:
        with pytest.raises(RendezvousError, match=r"group that was to meet them does not: rank \d waited 1 s for"):
            await new_group(store=store, join=True, timeout=float("inf"))

    absent = asyncio.ensure_future(new_group(store=late, join=True, timeout=float("inf"))._make())
    assert await results_on_ranks({"store": store}, 2, rank, newcomer()) == [2, 2, None]


@pytest.mark.parametrize(
    ("n", "at_least", "error", "message"),
    [
        (2, 0, ValueError, "at_least=0: must be from 1 to n=2"),
        (2, 3, ValueError, "at_least=3: must be from 1 to n=2"),
        (2, True, TypeError, "at_least must be an int, not bool"),
        (2, 1.0, TypeError, "at_least must be an int, not float"),
    ],
)
async def test_grow_refuses_an_invalid_number_of_newcomers(
    n: int, at_least: Any, error: type[Exception], message: str
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(error, match=message):
            await pg.grow(n, at_least=at_least)

    await results_on_ranks({"store": HashStore()}, 1, rank)


async def test_different_numbers_of_newcomers_are_reported_as_a_mismatch() -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"called grow\(\) with at_least=\[1, 2\]: pass the same at_least"):
            await pg.grow(2, at_least=pg.rank() + 1)

    await results_on_ranks({"store": HashStore()}, 2, rank)
