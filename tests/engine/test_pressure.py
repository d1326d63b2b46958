"""Many calls in flight, giants in every order, receivers that are slow: everything completes, within the windows."""

from __future__ import annotations

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.channel import LINK_WINDOW
from aiocoll.engine.plan import EAGER_WINDOW

from ..ranks import TRANSPORTS, run_ranks, until


async def fill_the_window(pg: ProcessGroup) -> None:
    """Rank 0 sends rank 1 as much as may travel unasked, with tag 9, and nobody receives it."""
    if pg.rank() == 0:
        for _ in range(LINK_WINDOW // EAGER_WINDOW):
            pg.send(np.zeros(EAGER_WINDOW, "uint8"), 1, tag=9)
        await until(lambda: pg._member.channels[1]._unasked == LINK_WINDOW)


@pytest.mark.parametrize("nbytes", [1, EAGER_WINDOW, EAGER_WINDOW + 1, 3_000_000])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_message_behind_a_full_window_is_announced(nbytes: int, transport: str) -> None:
    """Else its receive would wait for ever, or a later message of the same tag would take its place."""

    async def rank(pg: ProcessGroup) -> None:
        await fill_the_window(pg)
        if pg.rank() == 0:
            work = pg.send(np.full(nbytes, 1, "uint8"), 1)
            pg.send_object("behind it", 1)
            await work
        else:
            assert (await pg.recv(np.zeros(nbytes, "uint8"), 0) == 1).all()
            assert await pg.recv_object(0) == "behind it"
            for _ in range(LINK_WINDOW // EAGER_WINDOW):
                await pg.recv(np.ones(EAGER_WINDOW, "uint8"), 0, tag=9)

    await run_ranks(2, rank, transport=transport, timeout=5)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_object_behind_a_full_window_is_announced(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await fill_the_window(pg)
        got = await pg.broadcast_object(bytes(EAGER_WINDOW + 1) if pg.rank() == 0 else None, 0)
        assert len(got) == EAGER_WINDOW + 1
        for _ in range(LINK_WINDOW // EAGER_WINDOW if pg.rank() else 0):
            await pg.recv(np.ones(EAGER_WINDOW, "uint8"), 0, tag=9)

    await run_ranks(2, rank, transport=transport, timeout=5)
