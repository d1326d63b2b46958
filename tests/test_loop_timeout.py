"""`LoopTimeout`, a timeout that a blocked event loop does not use up, and that arrived messages extend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

import pytest

from aiocoll.runtime import Runtime
from aiocoll.security.loop_timeout import LoopTimeout, loop_timeout
from aiocoll.testing import VirtualLoop


def run_on_virtual_clock(program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(program())


async def expiry(seconds: float, arrived: Callable[[], bool] = lambda: False) -> tuple[float, LoopTimeout]:
    """Let a loop timeout of `seconds` expire; return the time of its expiry, and the timeout."""
    loop = asyncio.get_running_loop()
    expired = loop.create_future()
    timeout = LoopTimeout(Runtime.of(loop), seconds, lambda: expired.set_result(None), arrived)
    await expired
    return loop.time(), timeout


def test_loop_timeout_expires_after_its_seconds() -> None:
    when, timeout = run_on_virtual_clock(lambda: expiry(4.5))
    assert when == pytest.approx(4.5)
    assert timeout.blocked == 0


def test_time_of_a_blocked_loop_does_not_count_for_a_loop_timeout() -> None:
    async def program() -> tuple[float, LoopTimeout]:
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, loop.jump, 100.0)
        return await expiry(3.2)

    when, timeout = run_on_virtual_clock(program)
    assert when == pytest.approx(103.2, abs=0.2)
    assert timeout.blocked == pytest.approx(100.0, abs=0.2)


@pytest.mark.parametrize(("messages", "extra"), [(0, 0.0), (1, 0.1), (3, 0.3), (100, 0.3)])
def test_arrived_message_extends_a_loop_timeout(messages: int, extra: float) -> None:
    """Check the limit of three extensions, so that a peer cannot extend the timeout byte by byte."""
    left = iter(range(messages))
    when, _ = run_on_virtual_clock(lambda: expiry(4.5, lambda: next(left, None) is not None))
    assert when == pytest.approx(4.5 + extra)


def test_cancelled_or_infinite_loop_timeout_never_expires() -> None:
    async def program() -> None:
        runtime = Runtime.of(asyncio.get_running_loop())
        calls: list[int] = []
        for seconds in (1.0, inf):
            timeout = LoopTimeout(runtime, seconds, lambda: calls.append(1))
            if seconds == 1.0:
                timeout.cancel()
        await runtime.sleep(1e6)
        assert calls == []
        timeout.cancel()

    run_on_virtual_clock(program)


@pytest.mark.parametrize("quick", [True, False])
def test_loop_timeout_context_cancels_a_body_that_takes_too_long(quick: bool) -> None:
    async def program() -> float:
        loop = asyncio.get_running_loop()
        try:
            async with loop_timeout(Runtime.of(loop), 2.0, lambda: False):
                await asyncio.sleep(1.0 if quick else 3.0)
        except TimeoutError:
            assert not quick
        return loop.time()

    assert run_on_virtual_clock(program) == pytest.approx(1.0 if quick else 2.0)
