"""Connection attempts on a virtual clock: failure reasons, and timeouts in a blocked event loop."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from aiocoll.errors import PeerLostError
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.sockets import UNREACHABLE_AFTER
from aiocoll.testing import VirtualLoop
from aiocoll.transport.base import Card
from aiocoll.transport.stream import addresses
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.transport.stream.transport import StreamTransport

CARD: Card = {"host": "elsewhere", "unix": None, "tcp": ["127.0.0.1", 1], "process": [0, 0], "piece": 0, "reads": False}
WHERE = "rank 1 cannot be reached at 127.0.0.1 port 1, which other hosts cannot reach: "


@pytest.fixture
def virtual_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        yield runner


async def failure_reason(connect_timeout: float = 5.0, *, set_all_met: bool = False) -> str:
    """Let rank 0 dial rank 1; return the reported failure reason."""
    runtime = Runtime.of(asyncio.get_running_loop())
    options = StreamOptions(transport="tcp", connect_timeout=connect_timeout)
    transport = StreamTransport(runtime, 0, 2, "job", b"k" * 32, options)
    if set_all_met:
        transport.set_all_met()
    with pytest.raises(PeerLostError) as caught:
        await transport.connect(1, CARD, ConnKind.CONTROL)
    return str(caught.value).removeprefix(WHERE)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def replace_reach(monkeypatch: pytest.MonkeyPatch, reach: Callable[[VirtualLoop], Awaitable[socket.socket]]) -> None:
    async def connect(loop: VirtualLoop, *_: Any, **__: Any) -> socket.socket:
        return await reach(loop)

    monkeypatch.setattr(addresses, "reach", connect)


@pytest.mark.parametrize(
    ("silent_from", "connect_timeout", "reason"),
    [
        (4.9, 5.0, "Connection refused (tried for 5.0 s)"),
        (0.6, 5.0, "Connection refused (tried for 5.0 s)"),
        (0.4, 5.0, "it does not answer (tried for 5.0 s)"),
        (2.0, 20.0, "it does not answer (tried for 20.0 s)"),
        (0.0, 3.0, "it does not answer (tried for 3.0 s)"),
        (99.0, 3.0, "Connection refused (tried for 3.0 s)"),
    ],
)
def test_shortened_dial_attempt_does_not_replace_the_reported_failure_reason(
    virtual_runner: asyncio.Runner,
    monkeypatch: pytest.MonkeyPatch,
    silent_from: float,
    connect_timeout: float,
    reason: str,
) -> None:
    """Let the host first refuse, and then not reply; only an attempt with the full timeout proves that it is silent."""

    async def reach(loop: VirtualLoop) -> socket.socket:
        if loop.time() >= silent_from:
            await asyncio.Event().wait()
        raise os_error(errno.ECONNREFUSED)

    replace_reach(monkeypatch, reach)
    assert virtual_runner.run(failure_reason(connect_timeout)) == reason


def test_blocked_loop_does_not_use_up_connect_timeout(
    virtual_runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block the loop for longer than the timeout; afterwards, the rest of the timeout must still be available."""
    attempts: list[float] = []

    async def reach(loop: VirtualLoop) -> socket.socket:
        attempts.append(loop.time())
        if len(attempts) == 1:
            loop.call_later(1.0, loop.jump, 8.0)
            await asyncio.sleep(1.1)
        raise os_error(errno.ECONNREFUSED)

    replace_reach(monkeypatch, reach)
    assert re.fullmatch(r"Connection refused \(tried for 1[23]\.\d s\)", virtual_runner.run(failure_reason()))
    assert sum(when > 9.0 for when in attempts) > 50


def test_dial_in_a_constantly_blocked_loop_times_out(
    virtual_runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def block() -> None:
            loop.jump(2.0)
            loop.call_later(0.001, block)

        block()
        await failure_reason()
        return loop.time()

    async def reach(loop: VirtualLoop) -> socket.socket:
        raise os_error(errno.ECONNREFUSED)

    replace_reach(monkeypatch, reach)
    assert 5.0 < virtual_runner.run(program()) < 1000.0


def test_blocked_loop_does_not_make_a_peer_host_count_as_silent(
    virtual_runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a network error, block the loop for longer than a host may be silent; the rank must dial again."""
    attempts: list[float] = []

    async def reach(loop: VirtualLoop) -> socket.socket:
        attempts.append(loop.time())
        if len(attempts) == 1:
            loop.call_later(0.0005, loop.jump, 2 * UNREACHABLE_AFTER)
        if len(attempts) == 5:
            raise OSError(errno.EACCES, "no other attempt mends this")
        raise os_error(errno.ENETUNREACH)

    replace_reach(monkeypatch, reach)
    assert "no other attempt mends this" in virtual_runner.run(failure_reason(100.0, set_all_met=True))
