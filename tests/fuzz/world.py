"""A job of three ranks on a virtual clock, in which rank 2 sends invalid data to ranks 0 and 1."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from aiocoll import AiocollError, GroupError, ProcessGroup
from aiocoll.engine.control.unmade_groups import GROUPS
from aiocoll.engine.links.flow_control import ASK_WINDOW, EARLY_GRANTS, LINK_WINDOW
from aiocoll.testing.virtual import run_virtual

from ..internals import channels_of, comm_of

#: The timeout of an operation, and the time at which all operations must have ended, in virtual seconds.
TIMEOUT, OVER = 5.0, 60.0

Attack = Callable[[ProcessGroup, int], None]


def run_attack(attack: Attack) -> tuple[bool, bool]:
    """Let rank 2 attack ranks 0 and 1 while operations are in flight, and check that all operations end.

    Only errors of the library may be raised. No work and no more memory than allowed may be left.

    Returns:
        Whether rank 2 was refused, and whether a group of ranks 0 and 1 works at the end.
    """
    raised: list[dict[str, Any]] = []
    refused: list[bool] = []
    ready = asyncio.Event()

    async def rank(pg: ProcessGroup) -> bool:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
        await pg.alltoall([np.zeros(1) for _ in range(3)], [np.zeros(1)] * 3)
        pair = await pg.split_group([0, 1] if pg.rank() < 2 else [2])
        if pg.rank() == 2:
            await ready.wait()
            attack(pg, _pair_identity(pg))
            await pg.wait_revoked()
            return True
        works = [pg.allreduce(np.ones(4), timeout=TIMEOUT), pg.recv(np.ones(1), 2, tag=1, timeout=TIMEOUT)]
        works += [pg.broadcast(np.ones(200_000), 2, key="k", timeout=TIMEOUT)]
        await pair.allreduce(np.ones(1))
        ready.set()
        for work in works:
            with contextlib.suppress(AiocollError):
                await work
        assert not pg.pending()
        _check_bounds(pg)
        how, _ = comm_of(pg).endpoint.roster.dead.get(2, ("", ""))
        refused.append(how == "protocol")
        try:
            good = (await pair.allreduce(np.ones(1), timeout=TIMEOUT)).tolist() == [2.0]
        except GroupError:
            good = False
        assert not pair.pending()
        if not comm_of(pg).cause:
            pg.abort("end of the test")
        return good

    results = run_virtual(3, rank, timeout=OVER)
    assert not raised, raised
    return any(refused), all(results)


def _pair_identity(pg: ProcessGroup) -> int:
    """Return the id of the group of ranks 0 and 1, to which rank 2 does not belong."""
    member = comm_of(pg)
    return member.endpoint.group_id(f"{member.id}\0split\0{(member.id, 0, None, (0, 1))}")


def _check_bounds(pg: ProcessGroup) -> None:
    endpoint = comm_of(pg).endpoint
    for channel in channels_of(pg).values():
        waiting = channel._waiting
        assert 0 <= waiting._nbytes <= LINK_WINDOW + ASK_WINDOW
        assert 0 <= waiting._grants <= EARLY_GRANTS
    assert all(number <= GROUPS for number in endpoint.registry.early._named.values())
