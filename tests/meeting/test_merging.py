"""`merge_remote_group`: groups of separate jobs merged into one group, over every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    GroupError,
    HashStore,
    ProcessGroup,
    RendezvousError,
    Store,
    StoreUnavailableError,
    new_group,
)

from ..internals import pending_waits
from ..ranks import LINKS, options, run_ranks, wait_until

Rank = Callable[[ProcessGroup], Awaitable[Any]]


async def checked_ranks(pg: ProcessGroup) -> tuple[int, ...]:
    """Check a sum over the merged group; return the global ranks of the group."""
    tensor = np.full(50_000, 2.0 ** pg.rank())
    await pg.allreduce(tensor)
    assert (tensor == 2.0 ** pg.size() - 1).all()
    return pg.global_ranks


async def run_on_worlds(
    *sizes: int, fn: Rank, transport: str = "memory", names: tuple[str, ...] = ()
) -> list[list[Any]]:
    """Run `fn` on every rank of several jobs, each of which meets in a separate store."""

    async def rank(store: Store, name: str | None, number: int, size: int) -> Any:
        given = options(transport)
        async with new_group(store=store, rank=number, world_size=size, name=name, options=given) as pg:
            return await fn(pg)

    async with asyncio.timeout(30):
        return [
            await each
            for each in [
                asyncio.gather(*(rank(store, name, number, size) for number in range(size)))
                for size, name, store in zip(
                    sizes, names or [None] * len(sizes), [HashStore() for _ in sizes], strict=True
                )
            ]
        ]


@pytest.mark.parametrize("transport", LINKS)
async def test_merged_groups_are_ordered_by_their_names(transport: str) -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> Any:
        async with await pg.merge_remote_group(store, 7, timeout=20, group_name="all") as merged:
            assert await checked_ranks(merged) == tuple(range(7))
            assert (merged.size(), merged.timeout, merged.group_name) == (7, 20.0, "all")
            halves = await merged.split_group([range(3), range(3, 7)])
            assert halves is not None
            assert len(await checked_ranks(halves)) == halves.size()
            await checked_ranks(pg)
            return merged.rank()

    results = await run_on_worlds(4, 2, 1, fn=rank, transport=transport, names=("c", "a", "b"))
    assert results == [[3, 4, 5, 6], [0, 1], [2]]


@pytest.mark.parametrize("transport", LINKS)
async def test_merged_subgroups_of_one_group_are_ordered_by_their_lowest_rank(transport: str) -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> Any:
        part = await pg.split_group([[1, 3], [0], [2]])
        assert part is not None
        if pg.rank() == 0:
            await wait_until(lambda: len(pending_waits(store)) == 2)  # rank 0 starts last
        async with await part.merge_remote_group(store, 4) as merged:
            await checked_ranks(merged)
            assert (merged.group_name, merged.timeout) == ("merged", pg.timeout)
            return merged.rank()

    assert await run_ranks(4, rank, transport=transport) == [0, 1, 3, 2]


async def test_merged_groups_with_equal_names_are_ordered_by_arrival() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> Any:
        async with await pg.merge_remote_group(store, 3) as merged:
            assert await checked_ranks(merged) == (0, 1, 2)
            return merged.rank()

    assert sorted(await run_on_worlds(1, 1, 1, fn=rank)) == [[0], [1], [2]]


async def test_one_store_supports_consecutive_and_concurrent_merges() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        for _ in range(3):
            async with await pg.merge_remote_group(store, 5) as merged:
                assert await checked_ranks(merged) == tuple(range(5))
        first = pg.merge_remote_group(store, 5, group_name="one")
        second = pg.merge_remote_group(store, 5, group_name="two")
        for name, group in zip(("one", "two"), [await first, await second], strict=True):
            assert group.group_name == name
            assert await checked_ranks(group) == tuple(range(5))
            await group.shutdown()
        async with await pg.merge_remote_group(store, pg.size(), group_name=pg.group_name) as alone:
            assert await checked_ranks(alone) == pg.global_ranks

    await run_on_worlds(2, 3, fn=rank, names=("a", "b"))


async def test_merge_with_too_few_ranks_times_out() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(RendezvousError, match=r"2 of 3 ranks came within 0.1 s, from 'world:0' of 2; call"):
            await pg.merge_remote_group(store, 3, timeout=0.1)
        async with await pg.merge_remote_group(store, 2) as merged:  # the failed merge has left no keys in the store
            assert await checked_ranks(merged) == (0, 1)
        assert await checked_ranks(pg) == (0, 1)

    await run_on_worlds(2, fn=rank)


async def test_merge_with_too_many_ranks_is_refused() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        words = r"the groups to be merged have 4 ranks, not size=3: '[ab]' of 2, '[ab]' of 2"
        with pytest.raises(RendezvousError, match=words):
            await pg.merge_remote_group(store, 3)
        assert await checked_ranks(pg) == (0, 1)

    await run_on_worlds(2, 2, fn=rank, names=("a", "b"))


async def test_merge_with_different_total_sizes_is_refused() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(RendezvousError, match=r"request different sizes, (3, 4|4, 3) \("):
            await pg.merge_remote_group(store, 3 if pg.group_name == "a" else 4)
        async with await pg.merge_remote_group(store, 4) as merged:
            assert await checked_ranks(merged) == (0, 1, 2, 3)

    await run_on_worlds(2, 2, fn=rank, names=("a", "b"))


async def test_merge_refuses_wrong_arguments() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        wrong: list[tuple[Any, Any, Any, type[Exception], str]] = [
            (None, 2, None, TypeError, "store must be a Store, not NoneType"),
            (store, 2.0, None, TypeError, "size must be an int, not float"),
            (store, True, None, TypeError, "size must be an int, not bool"),
            (store, 1, None, ValueError, "size=1 must be at least 2: the new group includes all ranks"),
            (store, 2, 3, TypeError, "group_name must be a str or None, not int"),
        ]
        for place, size, name, kind, words in wrong:
            with pytest.raises(kind, match=words):
                await pg.merge_remote_group(place, size, group_name=name)
        with pytest.raises(ValueError, match=r"called merge_remote_group\(\) with \[size, name\]=\[\[2, 'm"):
            await pg.merge_remote_group(store, 2 + pg.rank())
        assert await checked_ranks(pg) == (0, 1)

    await run_on_worlds(2, fn=rank)


async def test_merge_fails_if_the_store_is_lost() -> None:
    store = HashStore()
    await store.aclose()

    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(StoreUnavailableError, match="closed"):
            await pg.merge_remote_group(store, 3)
        assert await checked_ranks(pg) == (0, 1)

    await run_on_worlds(2, fn=rank)


async def test_merge_fails_on_all_ranks_if_one_rank_is_cancelled() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            merging = asyncio.ensure_future(pg.merge_remote_group(store, 3))
            await wait_until(lambda: pending_waits(store))
            merging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await merging
        else:
            with pytest.raises(RendezvousError, match="'world:0' was not merged: rank 0 was cancelled"):
                await pg.merge_remote_group(store, 3)
        assert await checked_ranks(pg) == (0, 1)

    await run_on_worlds(2, fn=rank)


async def test_merge_fails_if_one_of_the_groups_fails() -> None:
    store = HashStore()

    async def rank(pg: ProcessGroup) -> None:
        merging = asyncio.ensure_future(pg.merge_remote_group(store, 4, timeout=5))
        if pg.rank() == 0:
            await wait_until(lambda: pending_waits(store))
            pg.abort("enough")
            # Cancel the merge on rank 0, which waits in the store: the merge must fail on the other ranks at once.
            merging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await merging
        else:
            with pytest.raises(GroupError, match="enough"):
                await merging

    await run_on_worlds(2, fn=rank)
