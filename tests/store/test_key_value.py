"""Tests of `KeyValueStore`: with any request latency, no change is lost or repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiocoll import ProcessGroup, new_group
from aiocoll.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from aiocoll.store import KeyValueStore, PrefixStore
from aiocoll.testing import run_ranks

from ..ranks import wait_until
from .minimal_store import MinimalStore

MIB = 1 << 20


class DistantStore(MinimalStore):
    """A store handle whose requests and replies each arrive some loop iterations late."""

    def __init__(self, entries: dict[str, bytes], turns: int = 1) -> None:
        super().__init__(entries)
        self._turns = turns

    async def read(self, name: str) -> bytes | None:
        await self._travel()
        value = await super().read(name)
        await self._travel()
        return value

    async def compare_and_swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        await self._travel()
        done = await super().compare_and_swap(name, old, new)
        await self._travel()
        return done

    async def _travel(self) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)


def distant_stores(clients: int) -> list[DistantStore]:
    """Return store handles on the same entries, with different latencies."""
    entries: dict[str, bytes] = {}
    return [DistantStore(entries, turns % 3) for turns in range(clients)]


async def test_concurrent_changes_of_one_key_all_take_effect() -> None:
    stores = distant_stores(8)
    sums = await asyncio.gather(*(store.add("n", 1) for store in stores))
    assert sorted(sums) == list(range(1, 9))
    await asyncio.gather(*(store.append("log", b"x") for store in stores))
    assert await stores[0].get("log") == b"x" * 8


async def test_concurrent_deletes_remove_a_key_once() -> None:
    stores = distant_stores(8)
    await stores[0].set("k", b"")
    deleted = await asyncio.gather(*(store.delete_key("k") for store in stores))
    assert sorted(deleted) == [False] * 7 + [True]


async def test_queue_items_are_popped_once_and_in_push_order() -> None:
    stores = distant_stores(9)
    popped: list[list[bytes]] = []

    async def push(number: int) -> None:
        for count in range(10):
            await stores[number].queue_push("q", b"%d %d" % (number, count))

    async def pop(number: int) -> None:
        popped.append([await stores[number].queue_pop("q") for _ in range(10)])

    await asyncio.gather(*map(push, (0, 1, 2, 3)), *map(pop, (4, 5, 6, 7)))
    assert sorted(item for each in popped for item in each) == [b"%d %d" % (i, j) for i in range(4) for j in range(10)]
    for each in popped:
        for number in range(4):
            of_number = [item for item in each if item.startswith(b"%d " % number)]
            assert of_number == sorted(of_number)
    assert await stores[8].queue_len("q") == 0
    assert await stores[8].num_keys() == 0


@pytest.mark.parametrize("turns", range(24))
@pytest.mark.parametrize("again", [None, 0, 1, 2, 4])
async def test_queue_pop_cancelled_at_any_loop_iteration_loses_no_items(turns: int, again: int | None) -> None:
    """Cancel the pop at each loop iteration; with `again`, cancel a second time before the first cancellation ends."""
    near, far, _ = distant_stores(3)
    for item in (b"0", b"1"):
        await near.queue_push("q", item)
    pop = asyncio.create_task(far.queue_pop("q"))
    for _ in range(turns):
        await asyncio.sleep(0)
    pop.cancel()
    if again is not None:
        for _ in range(again):
            await asyncio.sleep(0)
        pop.cancel()
    (popped,) = await asyncio.gather(pop, return_exceptions=True)
    await wait_until(lambda: len(asyncio.all_tasks()) == 1)
    items = [] if isinstance(popped, asyncio.CancelledError) else [popped]
    items += [await near.queue_pop("q", timeout=10) for _ in range(2 - len(items))]
    assert items == [b"0", b"1"]
    assert await near.queue_len("q") == 0


async def test_queue_pop_cancelled_while_the_store_closes_loses_no_item() -> None:
    near, far, _ = distant_stores(3)
    await near.queue_push("q", b"item")
    pop = asyncio.create_task(far.queue_pop("q"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    pop.cancel()
    await far.aclose()
    with pytest.raises(asyncio.CancelledError):
        await pop
    assert await near.queue_pop("q") == b"item"


async def test_multi_get_returns_values_of_one_instant() -> None:
    near, far, other = distant_stores(3)
    await near.multi_set(["a", "b"], [b"0", b"0"])
    ended = asyncio.Event()

    async def change() -> None:
        for count in range(1, 40):
            await near.set("a", b"%d" % count)
            await asyncio.sleep(0)
            await near.set("b", b"%d" % count)
            await asyncio.sleep(0)
        ended.set()

    async def check_instant(store: KeyValueStore) -> None:
        while not ended.is_set():
            a, b = map(int, await store.multi_get(["a", "b"], timeout=10))
            assert a - b in (0, 1)

    await asyncio.gather(change(), check_instant(far), check_instant(other))


async def test_multi_get_of_constantly_changing_values_times_out() -> None:
    class ChangingStore(MinimalStore):
        count = 0

        async def read(self, name: str) -> bytes | None:
            self.count += 1
            return b"%d" % self.count

    with pytest.raises(StoreTimeoutError, match="values of 2 keys kept changing for 0 s: read fewer keys at once"):
        await ChangingStore({}).multi_get(["a", "b"], timeout=0)


async def test_wait_for_many_keys_reads_one_key_at_a_time() -> None:
    reads: list[str] = []

    class RecordingStore(MinimalStore):
        async def read(self, name: str) -> bytes | None:
            reads.append(name)
            return await super().read(name)

    entries: dict[str, bytes] = {}
    keys = [str(number) for number in range(100)]
    waiting = asyncio.create_task(RecordingStore(entries).wait(keys))
    await wait_until(lambda: len(reads) >= 103)
    assert reads[:103] == [*keys, "99", "99", "99"]
    await MinimalStore(entries).multi_set(keys, [b""] * 100)
    await waiting


async def test_key_and_queue_with_the_same_name_are_independent() -> None:
    store = MinimalStore({})
    await store.set("k", b"key")
    await store.queue_push("k", b"item")
    assert await store.list_keys() == ["k"]
    assert await store.delete_key("k")
    assert await store.queue_pop("k") == b"item"
    for call in (store.set("aiocoll:queue:k", b""), store.check(["aiocoll:queue:k"]), store.get("aiocoll:queue:k")):
        with pytest.raises(ValueError, match="begins with 'aiocoll:queue:', the prefix of queues: choose another name"):
            await call


async def test_queue_is_limited_to_the_maximum_size_of_a_value() -> None:
    store = MinimalStore({})
    await store.queue_push("q", bytes(7 * MIB))
    with pytest.raises(StoreError, match=r"queue 'q' would hold 8388.* bytes, the limit is 8388608: pop items first"):
        await store.queue_push("q", bytes(MIB))
    assert await store.queue_pop("q") == bytes(7 * MIB)


async def test_prefix_store_calls_overridden_methods_of_its_store() -> None:
    calls: list[Any] = []

    class InstantStore(MinimalStore):
        async def multi_get(self, keys: Any, timeout: Any = None) -> list[bytes]:
            calls.append((list(keys), timeout))
            return [b"at once"] * len(calls[-1][0])

    assert await PrefixStore("part", InstantStore({})).multi_get(["a", "b"], timeout=7) == [b"at once", b"at once"]
    assert calls == [(["part/a", "part/b"], 7)]


@pytest.mark.parametrize("world_size", [2, 4])
async def test_ranks_on_a_minimal_store_meet_split_and_wait(world_size: int) -> None:
    all_ranks = range(world_size)

    async def rank(pg: ProcessGroup) -> tuple[int, int]:
        total = await pg.allreduce(pg.rank())
        half = await pg.split_group([list(all_ranks[::2]), list(all_ranks[1::2])])
        within = await half.allreduce(pg.rank())
        await pg.barrier()
        await half.shutdown()
        return total, within

    results = await run_ranks(world_size, rank, store=MinimalStore({}))
    assert results == [(sum(all_ranks), sum(all_ranks[rank % 2 :: 2])) for rank in all_ranks]


@pytest.mark.parametrize("world_size", [2, 4])
async def test_group_can_grow_on_a_store_with_high_latency(world_size: int) -> None:
    """Give each rank and the newcomer a separate store handle with a latency."""
    entries: dict[str, bytes] = {}

    async def rank(number: int) -> list[int]:
        async with new_group(store=DistantStore(entries), rank=number, world_size=world_size) as pg:
            await pg.barrier()
            async with await pg.grow(1) as larger:
                return await larger.allgather_object(larger.rank())

    async def newcomer() -> list[int]:
        async with new_group(store=DistantStore(entries), join=True) as pg:
            return await pg.allgather_object(pg.rank())

    async with asyncio.timeout(30):
        results = await asyncio.gather(*map(rank, range(world_size)), newcomer())
    assert results == [list(range(world_size + 1))] * (world_size + 1)


async def test_error_names_the_closed_store() -> None:
    store = MinimalStore({})
    await store.aclose()
    with pytest.raises(StoreUnavailableError, match="this MinimalStore is closed"):
        async with new_group(store=store, rank=0, world_size=1):
            pass
