"""Fuzz tests of the store client with nearly valid replies."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st

from aiocoll.errors import StoreError
from aiocoll.store.client import ClientLink
from aiocoll.store.commands import WAITS

from .budget import fuzz
from .mutation import junk, mutated
from .store_wire import Wire, amounts, feed, framed, garbled, keys, values


@st.composite
def answers(draw: st.DrawFn) -> list[Any]:
    payload = st.one_of(st.none(), st.booleans(), amounts, values, st.lists(keys, max_size=2), junk)
    return [draw(st.integers(1, 5)), draw(st.sampled_from([0, 0, 0, 1, 2])), draw(payload)]


REQUESTS: list[tuple[str, tuple[Any, ...]]] = [
    ("get", ("a",)),
    ("multi_get", (["a", "b"],)),
    ("queue_pop", ("q",)),
    ("add", ("n", 1)),
    ("list_keys", ("",)),
]


@fuzz(st.lists(st.tuples(mutated(answers()), garbled), min_size=1, max_size=6), examples=150)
def test_mutated_store_replies_give_valid_results_or_store_errors(sent: list[tuple[Any, bytes]]) -> None:
    async def send_requests() -> None:
        link, wire = ClientLink(None, "here"), Wire()  # type: ignore[arg-type]
        link.connection_made = lambda transport: None  # type: ignore[method-assign]
        link.transport = wire  # type: ignore[assignment]
        link._expect_frame()
        link.ready.set_result(None)
        tasks = [
            asyncio.create_task((link.wait if word in WAITS else link.call)(word, arguments, 1e6))
            for word, arguments in REQUESTS
        ]
        await asyncio.sleep(0)
        for answer, garbage in sent:
            feed(link, wire, framed(answer) + garbage)
        wire.abort()
        link.connection_lost(None)
        for (word, _), result in zip(REQUESTS, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, StoreError), result
            else:
                assert is_valid(word, result), (word, result)

    asyncio.run(send_requests())


def is_valid(word: str, result: Any) -> bool:
    if word in ("get", "queue_pop"):
        return type(result) is bytes
    if word == "add":
        return type(result) is int
    kind, count = (bytes, 2) if word == "multi_get" else (str, len(result))
    return type(result) is list and len(result) == count and all(type(each) is kind for each in result)
