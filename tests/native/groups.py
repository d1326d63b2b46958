"""Groups some of whose ranks are carried out by the accelerator in C, and others by Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from aiocoll import HashStore, ProcessGroup, new_group
from aiocoll.work import Work

from ..internals import comm_of, is_native, make_pure, native_of
from ..ranks import options, until

__all__ = ["WORKS", "group_of_ranks", "in_python", "link", "start", "waiting"]

#: Kinds of works: carried out by the accelerator; over a completion; begun by the accelerator and taken over.
WORKS = ("native", "completion", "taken over")


async def link(pgs: Sequence[ProcessGroup]) -> None:
    """Open all data links."""
    await asyncio.gather(*(pg.allgather(None, np.zeros(1)) for pg in pgs))
    await until(lambda: all(comm_of(pg).channels[peer].shared for pg in pgs for peer in comm_of(pg).others))


@asynccontextmanager
async def group_of_ranks(
    native: Sequence[bool], name: str = "mixed", *, timeout: float = 60.0, linked: bool = True
) -> AsyncIterator[list[ProcessGroup]]:
    """Yield the ranks of a group in shared memory, as tasks; `native` names those of the accelerator."""
    store, size = HashStore(), len(native)
    arguments: dict[str, Any] = {"store": store, "world_size": size, "name": name, "options": options("shm")}
    pgs = await asyncio.gather(*(new_group(rank=rank, timeout=timeout, **arguments) for rank in range(size)))
    try:
        for pg, is_so in zip(pgs, native, strict=True):
            assert (native_of(pg) is not None) is (size > 1)
            if not is_so:
                make_pure(pg)
        if linked:
            await link(pgs)
        yield pgs
    finally:
        await asyncio.gather(*(pg.shutdown() for pg in pgs))
        await store.aclose()


def in_python(pg: ProcessGroup) -> int:
    """Return how many calls Python has in flight; nothing is handed over."""
    return len(comm_of(pg)._pending)


def start(kind: str, pg: ProcessGroup, array: np.ndarray, **named: Any) -> Work[Any]:
    """Start an allreduce that cannot end yet, whose work is of one of `WORKS`."""
    work = pg.allreduce(array, **named)
    assert not work.done()
    if kind == "taken over":
        assert native_of(pg).count == 1
        native_of(pg).hand_over()
    assert is_native(work) is (kind == "native")
    assert in_python(pg) == (kind != "native")
    return work


async def waiting(work: Work[Any]) -> Any:
    """Await a work; unlike `Work.join`, this leaves the call where it is."""
    return await work
