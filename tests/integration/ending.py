"""A rank that ends with works pending, in the way its first argument names; the other one hears of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any

import numpy as np

import aiocoll

HOW, METHOD, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
#: Seconds that a collective may take which the other rank never calls: leaving the group waits for it.
TIMEOUT = 0.1
# On a busy machine it is right to warn that a rank is slow. What these tests look for would be an error.
logging.getLogger("aiocoll").setLevel(logging.ERROR)


def interrupt(times: int = 1) -> None:
    """Be interrupted from the next turn of the loop on, as by the Ctrl-C of an impatient user."""
    loop = asyncio.get_running_loop()
    for delay in range(times):
        loop.call_later(delay * 0.001, os.kill, os.getpid(), signal.SIGINT)


async def stay(pg: aiocoll.ProcessGroup) -> None:
    """Be in a collective when the other rank ends."""
    try:
        await pg.recv_object(1)
        await pg.allreduce(np.ones(1_000_000))
    except aiocoll.GroupError as error:
        # Between the two calls it hears of it at the second one, with the cause.
        first = error.__cause__ if isinstance(error, aiocoll.GroupRevokedError) else error
        assert isinstance(first, aiocoll.GroupError)
        print(type(first).__name__, getattr(first, "how", None), list(first.ranks))


async def end(pg: aiocoll.ProcessGroup) -> list[Any]:
    """Leave works behind: awaited by others, by nobody, and those that only an iterator waits for."""
    works = [
        pg.barrier(key="awaited"),
        pg.barrier(key="not awaited"),
        pg.recv(np.ones(3), 0),
        pg.send(np.ones(1_000_000), 0, tag=9),
        pg.recv_object(tag=8),
    ]

    async def serve() -> None:
        async for _ in pg.incoming(3):
            pass

    waiting = [asyncio.gather(work.join(), return_exceptions=True) for work in works[::2]]
    waiting += [asyncio.gather(each, return_exceptions=True) for each in (serve(), pg.wait_revoked())]
    await asyncio.sleep(0)
    await pg.send_object("go", 0)
    match HOW:
        case "leave":
            # Begun when nothing else is to be done in time.
            works.append(pg.barrier(key="awaited as well", timeout=TIMEOUT))
            waiting.append(asyncio.gather(works[-1].join(), return_exceptions=True))
        case "interrupt":
            interrupt()
            await pg.barrier(key="for ever")
        case "interrupt twice":
            interrupt(2)
            await pg.barrier(key="for ever")
        case "interrupt shutdown":
            interrupt()
        case "raise":
            raise SystemExit(3)
    return [works, waiting]


async def main() -> None:
    if HOW == "interrupt rendezvous":
        interrupt()
    kept: Any = None
    async with aiocoll.new_group(init_method=METHOD, rank=RANK, world_size=2) as pg:
        kept = await (end if RANK else stay)(pg)
    del kept


asyncio.run(main())
