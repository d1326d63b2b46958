"""The contract of stores: tests of the behaviour that every store promises."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from aiocoll.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from aiocoll.store import PrefixStore, Store

__all__ = ["CloseStore", "OpenStore", "StoreContract"]

OpenStore = Callable[[], Store]
CloseStore = Callable[[Store], Awaitable[None]]

_MIB = 1 << 20


class StoreContract:
    """Tests that every store must pass.

    A subclass defines the fixture `open_store`, which returns a function that opens another handle on the same store.
    The fixture closes all handles at its end, even if a test has already closed them. The fixtures `keeps_order` and
    `limits_entries` may be overridden.
    """

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Store:
        """Open the store, and return it."""
        return open_store()

    @pytest.fixture
    def other(self, open_store: OpenStore) -> Store:
        """Open the same store a second time, as another process would, and return it."""
        return open_store()

    @pytest.fixture
    def close_store(self) -> CloseStore:
        """Return a function that closes an opened store."""
        return lambda store: store.aclose()

    @pytest.fixture
    def keeps_order(self) -> bool:
        """Return whether `list_keys` returns keys in the order of their first `set`; False for a `KeyValueStore`."""
        return False

    @pytest.fixture
    def limits_entries(self) -> bool:
        """Return whether the store holds up to 65,536 keys and queued items; False if its server has another limit."""
        return False

    async def test_set_then_get_from_another_handle(self, store: Store, other: Store) -> None:
        await store.set("key", b"value")
        assert await other.get("key") == b"value"
        await other.set("key", b"")
        assert await store.get("key") == b""

    async def test_get_waits_for_a_later_set(self, store: Store, other: Store) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(handle.get("late")) for handle in (store, other, store)]
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            await other.set("late", b"here")
        assert [task.result() for task in waiting] == [b"here"] * 3

    @pytest.mark.parametrize("command", ["add", "append", "compare_set", "multi_set"])
    async def test_every_way_to_create_a_key_ends_a_wait(self, store: Store, other: Store, command: str) -> None:
        arguments = {
            "add": ("k", 5),
            "append": ("k", b"5"),
            "compare_set": ("k", b"", b"5"),
            "multi_set": (["k"], [b"5"]),
        }
        async with asyncio.TaskGroup() as tasks:
            value = tasks.create_task(store.get("k"))
            await asyncio.sleep(0)
            await getattr(other, command)(*arguments[command])
        assert value.result() == b"5"

    async def test_add_counts_across_handles(self, store: Store, other: Store) -> None:
        assert await store.add("n", 5) == 5
        assert await other.add("n", -7) == -2
        assert await store.get("n") == b"-2"
        async with asyncio.TaskGroup() as tasks:
            for handle in (store, other) * 50:
                tasks.create_task(handle.add("many", 1))
        assert await store.add("many", 0) == 100

    async def test_add_refuses_what_is_no_number_or_does_not_fit(self, store: Store) -> None:
        await store.set("text", b"abc")
        with pytest.raises(StoreError, match=r"key '.*text' holds b'abc', which is not a decimal number"):
            await store.add("text", 1)
        await store.add("big", (1 << 63) - 1)
        with pytest.raises(StoreError, match="does not fit 64 bits"):
            await store.add("big", 1)
        assert await store.get("big") == b"9223372036854775807"

    async def test_compare_set_as_in_c10d(self, store: Store) -> None:
        assert await store.compare_set("k", b"old", b"new") == b"old"
        assert not await store.check(["k"])
        assert await store.compare_set("k", b"", b"first") == b"first"
        assert await store.compare_set("k", b"wrong", b"second") == b"first"
        assert await store.compare_set("k", b"first", b"second") == b"second"
        assert await store.get("k") == b"second"

    async def test_one_winner_of_compare_set(self, open_store: OpenStore) -> None:
        handles = [open_store() for _ in range(8)]
        results = await asyncio.gather(*(h.compare_set("leader", b"", b"%d" % i) for i, h in enumerate(handles)))
        assert len(set(results)) == 1

    async def test_check_and_wait(self, store: Store, other: Store) -> None:
        assert await store.check([])
        await store.wait([])
        await store.set("a", b"")
        assert not await store.check(["a", "b"])
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(store.wait(["a", "b", "c"]))
            await other.set("c", b"")
            assert not waiting.done()
            await other.set("b", b"")
        assert await store.check(iter(["a", "b", "c"]))

    async def test_delete_key(self, store: Store, other: Store) -> None:
        assert await store.delete_key("k") is False
        await store.set("k", b"1")
        assert await other.delete_key("k") is True
        assert await store.delete_key("k") is False
        with pytest.raises(StoreTimeoutError):
            await store.get("k", timeout=0)

    async def test_a_key_deleted_during_a_wait_is_waited_for_again(self, store: Store, other: Store) -> None:
        async with asyncio.TaskGroup() as tasks:
            values = tasks.create_task(store.multi_get(["a", "b"]))
            await asyncio.sleep(0)
            # Use one command per change, so that stores that poll see the same values as stores that are notified.
            await other.set("a", b"old")
            await other.delete_key("a")
            await other.set("b", b"2")
            assert not values.done()
            await other.set("a", b"1")
        assert values.result() == [b"1", b"2"]

    async def test_num_keys_and_list_keys(self, store: Store, keeps_order: bool) -> None:
        assert (await store.num_keys(), await store.list_keys()) == (0, [])
        await store.multi_set(["b", "a", "ü/ü"], [b"1", b"2", b"3"])
        await store.queue_push("queue", b"not a key")
        listed = await store.list_keys()
        assert (await store.num_keys(), sorted(listed)) == (3, ["a", "b", "ü/ü"])
        assert listed == ["b", "a", "ü/ü"] or not keeps_order

    async def test_append(self, store: Store, other: Store) -> None:
        await store.append("log", b"one,")
        await other.append("log", b"two")
        assert await store.get("log") == b"one,two"

    async def test_multi_get_waits_and_keeps_the_order(self, store: Store, other: Store) -> None:
        async with asyncio.TaskGroup() as tasks:
            values = tasks.create_task(store.multi_get(["x", "y", "x"]))
            await asyncio.sleep(0)
            await other.multi_set(["y", "x"], [b"Y", b"X"])
        assert values.result() == [b"X", b"Y", b"X"]
        assert await store.multi_get([]) == []
        await store.multi_set([], [])

    async def test_queue_is_first_in_first_out(self, store: Store, other: Store) -> None:
        for item in (b"1", b"2", b"3"):
            await store.queue_push("q", item)
        assert await other.queue_len("q") == 3
        assert [await handle.queue_pop("q") for handle in (other, store, other)] == [b"1", b"2", b"3"]
        assert await store.queue_len("q") == 0

    async def test_queue_pop_waits_and_each_item_goes_to_one(self, store: Store, other: Store) -> None:
        async with asyncio.TaskGroup() as tasks:
            pops = [tasks.create_task(handle.queue_pop("q")) for handle in (store, other) * 5]
            for i in range(10):
                await other.queue_push("q", b"%d" % i)
        assert sorted(pop.result() for pop in pops) == [b"%d" % i for i in range(10)]

    async def test_queue_pop_of_an_empty_queue(self, store: Store) -> None:
        with pytest.raises(StoreTimeoutError, match=r"queue '.*q' of .* had no item within 0 s"):
            await store.queue_pop("q", block=False)
        await store.queue_push("q", b"1")
        assert await store.queue_pop("q", block=False) == b"1"

    async def test_cancelling_a_pop_at_any_turn_loses_no_item(self, store: Store, other: Store) -> None:
        for turns in range(12):
            pop = asyncio.create_task(store.queue_pop("q"))
            push = asyncio.create_task(other.queue_push("q", b"item"))
            for _ in range(turns):
                await asyncio.sleep(0)
            pop.cancel()
            (popped,) = await asyncio.gather(pop, return_exceptions=True)
            await push
            if isinstance(popped, asyncio.CancelledError):
                popped = await other.queue_pop("q", timeout=10)
            assert popped == b"item"
            assert await other.queue_len("q") == 0

    async def test_cancelling_a_pop_at_any_turn_keeps_the_order(self, store: Store, other: Store) -> None:
        for turns in range(12):
            pop = asyncio.create_task(store.queue_pop("q"))
            pushes = [asyncio.create_task(other.queue_push("q", b"%d" % number)) for number in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            pop.cancel()
            (popped,) = await asyncio.gather(pop, return_exceptions=True)
            await asyncio.gather(*pushes)
            # A cancelled pop puts its item back before the store carries out its next call.
            assert await store.check([])
            items = [] if isinstance(popped, asyncio.CancelledError) else [popped]
            items += [await other.queue_pop("q", timeout=10) for _ in range(3 - len(items))]
            assert items == [b"0", b"1", b"2"]

    async def test_a_cancelled_wait_leaves_the_store_usable(self, store: Store, other: Store) -> None:
        waiting = asyncio.create_task(store.get("never"))
        popping = asyncio.create_task(store.queue_pop("q"))
        await asyncio.sleep(0)
        await store.num_keys()
        for task in (waiting, popping):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await other.queue_push("q", b"1")
        await other.set("never", b"late")
        assert await other.queue_pop("q", timeout=10) == b"1"
        assert await store.get("never") == b"late"

    async def test_timeout_lists_what_is_missing(self, store: Store) -> None:
        await store.set("here", b"")
        with pytest.raises(StoreTimeoutError, match=r"did not get keys '(part/)?a', '(part/)?b' within 0\.01 s"):
            await store.wait(["a", "here", "b"], timeout=timedelta(milliseconds=10))
        with pytest.raises(TimeoutError, match=r"did not get key '(part/)?a' within 0 s"):
            await store.get("a", timeout=0)

    async def test_long_lists_of_missing_keys_are_cut(self, store: Store) -> None:
        with pytest.raises(StoreTimeoutError, match=r"15' and 4 more within 0 s"):
            await store.wait([str(i) for i in range(20)], timeout=0)

    async def test_timeout_of_the_store_is_the_default(self, store: Store) -> None:
        assert store.timeout == 300.0
        store.timeout = timedelta(seconds=0.01)
        assert store.timeout == 0.01
        with pytest.raises(StoreTimeoutError, match=r"within 0\.01 s"):
            await store.get("missing")
        store.set_timeout(timedelta(seconds=2))
        assert store.timeout == 2.0
        store.timeout = math.inf
        assert store.timeout == math.inf
        await store.set("k", b"1")
        assert await store.get("k") == b"1"

    @pytest.mark.parametrize("timeout", [-1, math.nan])
    async def test_unusable_timeouts_are_refused(self, store: Store, timeout: float) -> None:
        with pytest.raises(ValueError, match="timeout must not be negative"):
            await store.get("k", timeout=timeout)
        with pytest.raises(ValueError, match="timeout must not be negative"):
            store.timeout = timeout
        with pytest.raises(TypeError, match="timeout must be seconds or a timedelta, not str"):
            await store.get("k", timeout="1")  # type: ignore[arg-type]

    async def test_values_must_be_bytes_and_keys_str(self, store: Store) -> None:
        with pytest.raises(TypeError, match=r"value must be bytes, got bytearray: use bytes\(value\)"):
            await store.append("k", bytearray(b"1"))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="key must be str, got bytes"):
            await store.get(b"k")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="keys must be a list, got str"):
            await store.wait("key")
        with pytest.raises(TypeError, match="amount must be int, got float"):
            await store.add("k", 1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="multi_set got 2 keys and 1 values"):
            await store.multi_set(["a", "b"], [b""])
        assert await store.num_keys() == 0

    async def test_text_is_stored_in_utf8(self, store: Store) -> None:
        await store.set("set", "ä")
        await store.append("set", "b")
        await store.multi_set(["one", "two"], ["1", b"2"])
        assert await store.multi_get(["set", "one", "two"]) == ["äb".encode(), b"1", b"2"]
        assert await store.compare_set("set", "äb", "c") == b"c"
        await store.queue_push("queue", "item")
        assert await store.queue_pop("queue") == b"item"
        with pytest.raises(ValueError, match=r"^value='\\ud800' is not valid text"):
            await store.set("set", "\ud800")

    async def test_keys_are_text(self, store: Store) -> None:
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: store.set("a\ud800", b""),
            lambda: store.get("a\ud800"),
            lambda: store.multi_get(["b", "a\ud800"]),
            lambda: store.multi_set(["a\ud800"], [b""]),
            lambda: store.queue_push("a\ud800", b""),
            lambda: store.queue_pop("a\ud800"),
            lambda: store.check(["a\ud800"]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"^key='.*a\\ud800' is not valid text: it has a lone surrogate"):
                await call()
        with pytest.raises(ValueError, match=r"^prefix='\\ud800' is not valid text"):
            PrefixStore("\ud800", store)
        await store.set("ä€😀", b"text")
        assert await store.get("ä€😀") == b"text"

    async def test_limits(self, store: Store) -> None:
        await store.set("k" * 1000, b"")
        with pytest.raises(StoreError, match="has 2000 bytes, the limit is 1024: use a shorter name"):
            await store.set("k" * 2000, b"")
        await store.set("large", bytes(8 * _MIB))
        assert len(await store.get("large")) == 8 * _MIB
        with pytest.raises(StoreError, match="value has 8388609 bytes, the limit is 8388608"):
            await store.set("larger", bytes(8 * _MIB + 1))
        with pytest.raises(StoreError, match="would hold 8388609 bytes, the limit is 8388608"):
            await store.append("large", b"x")
        assert await store.check(["large"])
        assert not await store.check(["larger"])

    async def test_the_number_of_keys_is_limited(self, store: Store, limits_entries: bool) -> None:
        if not limits_entries:
            pytest.skip("the limit is that of its server")
        half = 1 << 15
        await store.multi_set([str(i) for i in range(half)], [b""] * half)
        await store.multi_set([str(i) for i in range(half, 2 * half - 1)], [b""] * (half - 1))
        await store.queue_push("q", b"counts too")
        with pytest.raises(StoreError, match="the store is full: 65536 keys and queued items"):
            await store.set("one more", b"")
        await store.set("0", b"overwriting is fine")
        await store.delete_key("0")
        await store.set("one more", b"")
        assert await store.num_keys() == 2 * half - 1

    async def test_a_closed_store_says_so(self, open_store: OpenStore, close_store: CloseStore) -> None:
        store = open_store()
        await store.set("k", b"1")
        waiting = asyncio.create_task(store.get("never"))
        await asyncio.sleep(0)
        await store.num_keys()
        await close_store(store)
        with pytest.raises(StoreUnavailableError, match="is closed: make a new one"):
            await waiting
        with pytest.raises(StoreUnavailableError, match="is closed: make a new one"):
            await store.get("k")
        await close_store(store)

    async def test_many_ranks_meet(self, open_store: OpenStore) -> None:
        size = 16
        handles = [open_store() for _ in range(size)]

        async def meet(rank: int) -> list[bytes]:
            await handles[rank].set(f"rank{rank}", b"%d" % rank)
            return await handles[rank].multi_get([f"rank{peer}" for peer in range(size)])

        results = await asyncio.gather(*map(meet, range(size)))
        assert results == [[b"%d" % rank for rank in range(size)]] * size
