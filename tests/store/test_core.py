"""Tests of `StoreCore`: counters, limits, returned queue items, and pending waits."""

from __future__ import annotations

from typing import Any

import pytest

from aiocoll.errors import StoreError
from aiocoll.store.core import StoreCore

from ..internals import Limits


def popped_items(core: StoreCore, count: int) -> list[bytes | None]:
    return [core.apply("queue_take", ("q",)) for _ in range(count)]


def filled_core(*items: bytes) -> StoreCore:
    core = StoreCore()
    for item in items:
        core.apply("queue_push", ("q", item))
    return core


def test_item_returned_to_a_queue_is_popped_first() -> None:
    core = filled_core(b"1", b"2", b"3")
    first, second = popped_items(core, 2)
    core.apply("queue_return", ("q", second))
    core.apply("queue_return", ("q", first))
    assert core.apply("queue_len", ("q",)) == 3
    assert popped_items(core, 4) == [b"1", b"2", b"3", None]


def test_item_returned_to_a_queue_goes_to_the_longest_waiting_pop() -> None:
    core = filled_core()
    got: list[tuple[str, Any]] = []
    for name in ("first", "second"):
        core.start("queue_pop", ("q",), lambda item, name=name: got.append((name, item)))
    core.apply("queue_return", ("q", b"1"))
    assert got == [("first", b"1")]
    assert core.apply("queue_len", ("q",)) == 0
    core.apply("queue_push", ("q", b"2"))
    assert got == [("first", b"1"), ("second", b"2")]


@pytest.fixture
def small(limits: Limits) -> StoreCore:
    """Return a store that holds at most 4 entries (keys and queued items) and 20 bytes."""
    limits(max_store_entries=4, max_store_bytes=20)
    return StoreCore()


def is_accepted(core: StoreCore, command: str, *arguments: Any) -> bool:
    try:
        core.apply(command, arguments)
    except StoreError:
        return False
    return True


def free_space(core: StoreCore) -> tuple[int, int]:
    """Return the number of keys and bytes that the store still accepts, measured by adding temporary entries."""
    keys = next(number for number in range(9) if not is_accepted(core, "set", f"room{number}", b""))
    for number in range(keys):
        core.apply("delete_key", (f"room{number}",))
    if not keys:
        return 0, 0
    nbytes = next(number for number in range(99) if not is_accepted(core, "append", "room", b"x"))
    if nbytes:
        core.apply("delete_key", ("room",))
    return keys, nbytes


def test_store_limits_count_stored_items_but_not_removed_items(small: StoreCore) -> None:
    assert free_space(small) == (4, 20)
    small.apply("set", ("a", bytes(5)))
    assert free_space(small) == (3, 15)
    small.apply("set", ("a", bytes(3)))
    assert free_space(small) == (3, 17)
    small.apply("multi_set", (["a", "b"], [bytes(4), bytes(2)]))
    assert free_space(small) == (2, 14)
    small.apply("queue_push", ("q", bytes(6)))
    assert free_space(small) == (1, 8)
    small.apply("add", ("n", 100))
    assert free_space(small) == (0, 0)
    assert small.apply("delete_key", ("b",)) is True
    assert free_space(small) == (1, 7)
    assert small.apply("queue_take", ("q",)) == bytes(6)
    assert free_space(small) == (2, 13)
    assert small.apply("compare_set", ("c", b"", b"123")) == b"123"
    assert free_space(small) == (1, 10)


def test_store_accepts_values_up_to_the_byte_limit(small: StoreCore) -> None:
    small.apply("queue_push", ("q", bytes(20)))
    with pytest.raises(StoreError, match="20 bytes of values"):
        small.apply("queue_push", ("q", b"x"))
    with pytest.raises(StoreError, match="20 bytes of values"):
        small.apply("set", ("k", b"x"))
    small.apply("set", ("k", b""))
    assert small.apply("queue_len", ("q",)) == 1
    assert small.apply("list_keys", ("",)) == ["k"]


def test_store_command_over_a_limit_changes_nothing(small: StoreCore) -> None:
    got: list[Any] = []
    small.apply("set", ("a", bytes(15)))
    small.start("get", ("b",), got.append)
    before = small.changes
    for command, arguments in {
        "set": ("b", bytes(6)),
        "append": ("a", bytes(6)),
        "multi_set": (["b", "c"], [bytes(3), bytes(3)]),
        "queue_push": ("q", bytes(6)),
    }.items():
        with pytest.raises(StoreError, match="20 bytes of values"):
            small.apply(command, arguments)
    assert small.changes == before
    assert got == []
    assert small.apply("list_keys", ("",)) == ["a"]
    assert small.apply("queue_len", ("q",)) == 0
    assert free_space(small) == (3, 5)


def test_item_returned_to_a_queue_is_counted_and_can_exceed_the_limits(small: StoreCore) -> None:
    small.apply("queue_push", ("q", bytes(6)))
    item = small.apply("queue_take", ("q",))
    small.apply("queue_return", ("q", item))
    assert free_space(small) == (3, 14)
    item = small.apply("queue_take", ("q",))
    for number in range(4):
        small.apply("set", (str(number), bytes(5)))
    small.apply("queue_return", ("q", item))
    with pytest.raises(StoreError):
        small.apply("queue_push", ("q", b""))
    assert small.apply("queue_take", ("q",)) == bytes(6)
    small.apply("delete_key", ("0",))
    assert free_space(small) == (1, 5)


@pytest.mark.parametrize(
    ("command", "arguments", "changes"),
    [
        ("set", ("a", b"1"), 1),
        ("check", (["a"],), 0),
        ("set", ("a", b"2"), 0),
        ("multi_set", (["a"], [b"2"]), 0),
        ("multi_set", ([], []), 0),
        ("multi_set", (["a", "b"], [b"", b""]), 1),
        ("add", ("a", 1), 1),
        ("add", ("a", 0), 0),
        ("append", ("a", b"1"), 1),
        ("compare_set", ("a", b"7", b"8"), 0),
        ("compare_set", ("a", b"2", b"8"), 1),
        ("delete_key", ("b",), 0),
        ("delete_key", ("a",), 1),
        ("queue_push", ("q", b"1"), 1),
        ("queue_len", ("q",), 0),
        ("queue_take", ("q",), 1),
        ("queue_take", ("r",), 0),
        ("queue_return", ("q", b"1"), 1),
    ],
)
def test_store_change_counter_counts_only_changes(command: str, arguments: tuple[Any, ...], changes: int) -> None:
    core = filled_core(b"1", b"2")
    core.apply("set", ("a", b"2"))
    before = core.changes
    core.apply(command, arguments)
    assert core.changes - before == changes


@pytest.mark.parametrize("kept", [None, "a/"])
def test_removed_store_entries_free_their_space(limits: Limits, kept: str | None) -> None:
    limits(max_store_entries=6, max_store_bytes=32)
    core = StoreCore()
    for name in ("a/1", "b/1"):
        core.apply("set", (name, b"value"))
        core.apply("queue_push", (name, b"first"))
        core.apply("queue_push", (name, b"second"))
    core.forget(kept)
    left = int(kept is not None)
    assert core.apply("list_keys", ("",)) == ["a/1"] * left
    assert (core.apply("queue_len", ("a/1",)), core.apply("queue_len", ("b/1",))) == (2 * left, 0)
    core.apply("set", ("new", bytes(32 - 16 * left)))
    with pytest.raises(StoreError, match="full: 32 bytes"):
        core.apply("append", ("new", b"1"))
    for i in range(5 - 3 * left):
        core.apply("set", (f"new{i}", b""))
    with pytest.raises(StoreError, match="full: 6 keys"):
        core.apply("set", ("one more", b""))
