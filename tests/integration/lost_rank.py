"""A job that loses rank 1; the other ranks print the loss that they get reported. Argument: the kind of the loss."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import aiocoll


async def main(how: str) -> None:
    if how == "absent" and os.environ.get("PMI_RANK") == "1":
        return
    async with aiocoll.new_group(timeout=3 if how == "absent" else 30) as pg:
        if pg.rank() == 1:
            for rank in (0, 2):
                await pg.recv_object(rank)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        work = pg.barrier()
        await pg.send_object("waiting", 1)
        try:
            await work
        except aiocoll.PeerLostError as error:
            print(pg.rank(), error.how, *error.ranks, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
