"""Messages longer than announced: the receiver refuses them, and the group fails and names the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, ProcessGroup, Work
from aiocoll.transport.frame import HEADER, SEGMENT, FrameKind

from ..internals import comm_of, plan_without_accelerator
from ..ranks import LINKS, run_ranks

#: Number of bytes beyond the announced length: two elements.
EXTRA = 16
#: Message lengths in float64 elements: one frame, one frame that is received directly into the array, several frames.
COUNTS = (5, 20_000, 2 * SEGMENT // 8 + 7)
MARK = -7.0


class StretchingLink:
    """A link that appends surplus bytes to the last frame of every message and increases the announced length."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def write(self, header: bytes, payload: memoryview | None = None) -> bool:
        fields = list(HEADER.unpack(header))
        kind, offset, length, total = fields[0], *fields[6:]
        if kind == FrameKind.DATA and length and offset + length == total:
            assert payload is not None
            fields[7] += EXTRA
            header, payload = HEADER.pack(*fields), memoryview(bytes(payload) + bytes(EXTRA))
        return self._link.write(header, payload)


def gather(pg: ProcessGroup, array: Any) -> Work[Any]:
    """Start an allgather in which surplus bytes from rank 0 would overwrite the block of rank 1."""
    half = len(array) // 2
    return pg.allgather_into_tensor(array, array[pg.rank() * half : (pg.rank() + 1) * half].copy())


#: For each call: the number of messages whose elements fit into the array, and a function that makes the call.
CALLS: dict[str, tuple[int, Callable[[ProcessGroup, Any], Work[Any]]]] = {
    "broadcast": (1, lambda pg, array: pg.broadcast(array, 0)),
    "reduce": (1, lambda pg, array: pg.reduce(array, 1)),
    "allgather": (2, gather),
    "scan": (1, lambda pg, array: pg.scan(array)),
    "message": (1, lambda pg, array: pg.recv(array, 0) if pg.rank() else pg.send(array, 1)),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("transport", LINKS)
async def test_message_longer_than_announced_fails_the_group(transport: str, name: str, count: int) -> None:
    times, call = CALLS[name]
    ready = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        plan_without_accelerator(pg)  # the accelerator sends no frames
        # Open all links; after this call, no frames are in flight.
        await pg.alltoall_object([None] * 2)
        whole = np.full(times * count + 4, MARK)
        array = whole[2:-2]
        if pg.rank() == 0:
            channel = comm_of(pg).channels[1]
            channel.link = StretchingLink(channel.link)  # type: ignore[assignment]
            await ready.wait()
            # The call ends, or fails with the group: rank 1 may have sent its part before or not.
            with suppress(GroupError):
                await call(pg, array)
        else:
            work = call(pg, array)
            ready.set()
            with pytest.raises(GroupError, match=r"rank 0 sent more than the \d+ bytes of its message"):
                await work
            # The message may have filled its part of the array, but must not have written any byte beyond this part.
            assert (array[count:] == MARK).all()
        await pg.wait_revoked()
        assert (whole[:2] == MARK).all()
        assert (whole[-2:] == MARK).all()

    await run_ranks(2, rank, transport=transport, timeout=20)
