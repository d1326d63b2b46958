"""Groups with native ranks, whose calls the accelerator in C carries out, and pure ranks, which use only Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from aiocoll import HashStore, ProcessGroup, new_group
from aiocoll.work import Work

from ..internals import comm_of, disable_accelerator, is_native, native_calls_of
from ..ranks import options, wait_until

__all__ = ["WORKS", "await_work", "group_of_ranks", "open_links", "pending_in_python", "start_allreduce"]

#: Kinds of works: run by the accelerator, by Python, or by Python after a handover from the accelerator.
WORKS = ("native", "completion", "taken over")


async def open_links(pgs: Sequence[ProcessGroup]) -> None:
    """Open the data links between all ranks."""
    await asyncio.gather(*(pg.allgather(None, np.zeros(1)) for pg in pgs))
    await wait_until(lambda: all(comm_of(pg).channels[peer].shared for pg in pgs for peer in comm_of(pg).others))


@asynccontextmanager
async def group_of_ranks(
    native: Sequence[bool], name: str = "mixed", *, timeout: float = 60.0, linked: bool = True
) -> AsyncIterator[list[ProcessGroup]]:
    """Yield the ranks of a group that uses shared memory.

    Args:
        native: by rank, whether the accelerator carries out its calls.
        name: of the group.
        timeout: of the group, in seconds.
        linked: whether the data links are open before the group is yielded.
    """
    store, size = HashStore(), len(native)
    arguments: dict[str, Any] = {"store": store, "world_size": size, "name": name, "options": options("shm")}
    pgs = await asyncio.gather(*(new_group(rank=rank, timeout=timeout, **arguments) for rank in range(size)))
    try:
        for pg, is_native_rank in zip(pgs, native, strict=True):
            assert (native_calls_of(pg) is not None) is (size > 1)
            if not is_native_rank:
                disable_accelerator(pg)
        if linked:
            await open_links(pgs)
        yield pgs
    finally:
        await asyncio.gather(*(pg.shutdown() for pg in pgs))
        await store.aclose()


def pending_in_python(pg: ProcessGroup) -> int:
    """Return the number of calls in flight in Python, without a handover of native calls to Python."""
    return len(comm_of(pg)._pending)


def start_allreduce(kind: str, pg: ProcessGroup, array: np.ndarray, **named: Any) -> Work[Any]:
    """Start an allreduce that waits for the peer; the returned work is of the kind `kind`, one of `WORKS`."""
    work = pg.allreduce(array, **named)
    assert not work.done()
    if kind == "taken over":
        assert native_calls_of(pg).count == 1
        native_calls_of(pg).hand_over()
    assert is_native(work) is (kind == "native")
    assert pending_in_python(pg) == (kind != "native")
    return work


async def await_work(work: Work[Any]) -> Any:
    """Await a work directly: unlike `Work.join`, a plain await does not hand a native call over to Python."""
    return await work
