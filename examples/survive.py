"""Ranks that lose one of them and continue: aiocoll run -n 3 examples/survive.py

Rank 1 kills its own process. The other ranks get an error that names rank 1, and form a group without rank 1.
"""

import asyncio
import os
import signal

import numpy as np

import aiocoll


async def main() -> None:
    """Lose a rank, then sum an array over the remaining ranks."""
    async with aiocoll.new_group() as pg:
        if pg.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            await pg.allreduce(np.ones(3))
        except aiocoll.GroupError as error:  # PeerLostError, or GroupRevokedError at a later call
            print(error)
            async with await pg.shrink() as rest:
                print(f"{rest.size()} ranks go on:", await rest.allreduce(np.ones(3)))


asyncio.run(main())
