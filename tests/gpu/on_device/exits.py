"""A test process that must exit by itself: ``python -m tests.gpu.on_device.exits HOW KIND``.

aborting    the process ends while a thread aborts its communicator
lonely      its communicator waits for a rank that does not exist
unclosed    the process does not shut its group down
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from aiocoll import CollectiveTimeoutError, new_group
from aiocoll.gpu.calls import device_state as side_module
from aiocoll.gpu.provider import provide, runtime
from aiocoll.store import HashStore

from .delegate import Delegate
from .worlds import SIMULATED, World, world

#: The timeout of a call that hangs, in seconds: on a real device, and on a simulated one.
LIMIT = (5.0, 0.3)
#: Seconds that an abort takes: longer than everything else until the process exits.
SLOW = 1.0


class Slow(Delegate):
    """A wrapper of NCCL whose aborts are slow."""

    def init(self, world_size: int, unique_id: bytes, rank: int) -> Any:
        made = self._other.init(world_size, unique_id, rank)
        abort = made.abort

        def slow() -> None:
            time.sleep(SLOW)
            abort()
            print("aborted", flush=True)

        made.abort = slow
        return made


async def aborting(made: World) -> None:
    cuda, nccl = runtime()
    with provide(cuda, Slow(nccl)):  # type: ignore[arg-type]
        pg = await new_group(store=HashStore(), rank=0, world_size=1)
        await pg.allreduce(made.tensor(np.ones(3)))
        pg.abort("enough")


class Lonely(Delegate):
    """A wrapper of NCCL whose communicators expect one rank more than exists, so that they are never complete."""

    def init(self, world_size: int, unique_id: bytes, rank: int) -> Any:
        return self._other.init(world_size + 1, unique_id, rank)


async def lonely(made: World) -> None:
    cuda, nccl = runtime()
    with provide(cuda, Lonely(nccl)):  # type: ignore[arg-type]
        async with new_group(store=HashStore(), rank=0, world_size=1, timeout=LIMIT[made.kind in SIMULATED]) as pg:
            try:
                await pg.allreduce(made.tensor(np.ones(3)))
            except CollectiveTimeoutError as error:
                print(error, flush=True)


async def unclosed(made: World) -> None:
    pg = await new_group(store=HashStore(), rank=0, world_size=1)
    print(made.host(await pg.allreduce(made.tensor(np.ones(3)))).tolist(), flush=True)


def main(how: str, kind: str) -> None:
    if kind in SIMULATED:
        side_module.RELEASE = 0.1  # the simulated communicator hangs forever, so a short wait is enough
    with ExitStack() as stack:
        made = stack.enter_context(world(kind, stuck=how == "lonely"))
        asyncio.run({"aborting": aborting, "lonely": lonely, "unclosed": unclosed}[how](made))
        if how == "aborting":
            # Closing would wait for the aborting thread. An extra reference keeps the interpreter from closing at exit.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(stack.pop_all()))


if __name__ == "__main__":
    main(*sys.argv[1:])
