"""Repeated dials of a rank that does not answer: while its process lives, its event loop may only be blocked."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, PeerLostError, ProcessGroup
from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.transport.stream.transport import StreamTransport

from ..internals import Limits, wrap_methods
from ..ranks import run_ranks


@pytest.mark.parametrize("lives", [True, False])
async def test_silent_rank_is_dialled_again_while_its_process_lives(
    lives: bool, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    limits(reconnect_interval=0.0)
    dials: list[int] = []

    async def dial_without_answer(dial: Any, transport: StreamTransport, peer: int, *args: Any) -> Any:
        if transport.rank == 1:
            dials.append(peer)
            if len(dials) < 3:
                raise PeerLostError("no answer", ranks=[peer])
        return await dial(transport, peer, *args)

    async def rank(pg: ProcessGroup) -> Any:
        if pg.rank() == 1:
            wrap_methods(monkeypatch, StreamTransport, connect=dial_without_answer)
            monkeypatch.setattr(FailureDetector, "is_known_alive", lambda *_: lives)
        call = pg.recv(np.zeros(1), 1) if pg.rank() == 0 else pg.send(np.ones(1), 0)
        if lives:
            return float((await call)[0])
        with pytest.raises(PeerLostError) as caught:
            await call
        return caught.value.how

    assert await run_ranks(2, rank, transport="unix") == ([1.0, 1.0] if lives else ["unreachable"] * 2)
    assert dials == ([0] * 3 if lives else [0])


async def test_dial_is_cancelled_at_the_shutdown_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    dialling = asyncio.Event()

    async def dial_without_answer(*args: Any) -> Any:
        dialling.set()
        await asyncio.Event().wait()

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            monkeypatch.setattr(StreamTransport, "connect", dial_without_answer)
            work = pg.send(np.ones(1), 1)
            await dialling.wait()
            pg.abort("a test")
            with pytest.raises(GroupError, match="a test"):
                await work
            await pg.shutdown()
            assert [task for task in asyncio.all_tasks() if task.get_name() == "aiocoll dial 1"] == []
        else:
            await pg.wait_revoked()

    await run_ranks(2, rank, transport="unix")
