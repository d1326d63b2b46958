"""Tests of cancellation notices, which end a rendezvous while its store closes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest

from aiocoll import RendezvousError, TCPStore, new_group
from aiocoll.errors import StoreUnavailableError
from aiocoll.meeting.cards import call_off
from aiocoll.rendezvous.exchange import run_until_notice
from aiocoll.runtime import Runtime


async def lose_store() -> None:
    raise StoreUnavailableError("the store is gone")


async def await_notice(turns: float) -> Exception | None:
    if turns == math.inf:
        await asyncio.get_running_loop().create_future()
    for _ in range(int(turns)):
        await asyncio.sleep(0)
    return RendezvousError("on purpose")


def run_with_notice(action: Coroutine[Any, Any, None], turns: float) -> Coroutine[Any, Any, None]:
    return run_until_notice(Runtime.of(asyncio.get_running_loop()), action, await_notice(turns), "a test")


@pytest.mark.parametrize("turns", [0, 1, 2, 10])
async def test_cancellation_notice_takes_precedence_over_the_loss_of_the_store(turns: int) -> None:
    with pytest.raises(RendezvousError, match="on purpose"):
        await run_with_notice(lose_store(), turns)


async def test_loss_of_the_store_without_a_cancellation_notice_is_raised() -> None:
    with pytest.raises(StoreUnavailableError, match="the store is gone"):
        await run_with_notice(lose_store(), math.inf)


async def test_rendezvous_results_and_errors_do_not_wait_for_a_cancellation_notice() -> None:
    async def fail() -> None:
        raise ValueError("wrong")

    async def finish() -> None:
        return None

    async with asyncio.timeout(0.2):
        with pytest.raises(ValueError, match="wrong"):
            await run_with_notice(fail(), math.inf)
        await run_with_notice(finish(), math.inf)


async def test_rank_receives_the_cancellation_reason_before_the_store_closes() -> None:
    for _ in range(30):
        async with TCPStore("127.0.0.1", 0, is_master=True) as master, TCPStore("127.0.0.1", master.port) as store:
            joining = asyncio.ensure_future(new_group(store=store, rank=1, world_size=2, timeout=20))
            await master.wait(["aiocoll/1/claim/1"])
            await call_off(master, 2, "on purpose")
            await master.aclose()
            with pytest.raises(RendezvousError, match=r"^on purpose$"):
                await joining
