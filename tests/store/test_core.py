"""The contents of a store: queues whose items are put back, and who waits for them."""

from __future__ import annotations

from typing import Any

from aiocoll.store.core import StoreCore


def popped(core: StoreCore, count: int) -> list[bytes | None]:
    return [core.apply("queue_take", ("q",)) for _ in range(count)]


def filled(*items: bytes) -> StoreCore:
    core = StoreCore()
    for item in items:
        core.apply("queue_push", ("q", item))
    return core


def test_what_is_put_back_comes_first_again() -> None:
    core = filled(b"1", b"2", b"3")
    first, second = popped(core, 2)
    core.apply("queue_return", ("q", second))
    core.apply("queue_return", ("q", first))
    assert core.apply("queue_len", ("q",)) == 3
    assert popped(core, 4) == [b"1", b"2", b"3", None]


def test_what_is_put_back_goes_to_who_has_waited_longest() -> None:
    core = filled()
    got: list[tuple[str, Any]] = []
    for name in ("first", "second"):
        core.start("queue_pop", ("q",), lambda item, name=name: got.append((name, item)))
    core.apply("queue_return", ("q", b"1"))
    assert got == [("first", b"1")]
    assert core.apply("queue_len", ("q",)) == 0
    core.apply("queue_push", ("q", b"2"))
    assert got == [("first", b"1"), ("second", b"2")]
