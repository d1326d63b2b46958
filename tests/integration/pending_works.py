"""A job of two ranks: rank 1 ends while it has pending works. Arguments: the kind of end, init method, rank."""

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
#: The timeout of a collective that the other rank never calls. The close of the group waits for this timeout.
TIMEOUT = 0.1
# Hide warnings, since a busy machine may cause a correct warning about a slow rank.
logging.getLogger("aiocoll").setLevel(logging.ERROR)


def interrupt(times: int = 1) -> None:
    """Send SIGINT `times` times to this process, as an impatient user does with Ctrl-C."""
    loop = asyncio.get_running_loop()
    for delay in range(times):
        loop.call_later(delay * 0.001, os.kill, os.getpid(), signal.SIGINT)


async def wait_in_collective(pg: aiocoll.ProcessGroup) -> None:
    """Wait in a collective while the other rank ends; print the error."""
    try:
        await pg.recv_object(1)
        await pg.allreduce(np.ones(1_000_000))
    except aiocoll.GroupError as error:
        # If rank 1's end is reported between the two calls, the second call raises `GroupRevokedError` with this cause.
        first = error.__cause__ if isinstance(error, aiocoll.GroupRevokedError) else error
        assert isinstance(first, aiocoll.GroupError)
        print(type(first).__name__, getattr(first, "how", None), list(first.ranks))


async def leave_works_pending(pg: aiocoll.ProcessGroup) -> list[Any]:
    """Start works that stay pending, then do what `HOW` names; return the works, and tasks that await some of them."""
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
            # Start this barrier last, so that starting other calls does not use up its timeout.
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
        kept = await (leave_works_pending if RANK else wait_in_collective)(pg)
    del kept


asyncio.run(main())
