"""Context of an endpoint: this rank's number, clock, background tasks, and transport to other ranks."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Card, Link, Transport
from aiocoll.transport.byte_stream import ByteStream

__all__ = ["Context"]


#: Whether the current code already runs in a context such as `Context.quiet`. A context cannot be entered twice.
_is_quiet: contextvars.ContextVar[bool] = contextvars.ContextVar("aiocoll_quiet", default=False)


class Context:
    """The state of one rank in one job, shared by all parts of its endpoint.

    Args:
        runtime: clock, timers and loop.
        transport: opens connections to peers; already listening.
        rank: this rank in the job.
        world_size: number of ranks in the job.

    Attributes:
        cards: the card of each rank, with its addresses; empty until the rendezvous is complete.
        quiet: context variables of all engine code, in which NumPy does not warn about the caller's numbers.
        closed: whether this rank has ended or could not join; then nothing new is started.
    """

    __slots__ = ("_tasks", "cards", "closed", "loop", "quiet", "rank", "runtime", "transport", "world_size")

    def __init__(self, runtime: Runtime, transport: Transport, rank: int, world_size: int) -> None:
        self.runtime = runtime
        self.loop = runtime.loop
        self.transport = transport
        self.rank = rank
        self.world_size = world_size
        self.cards: Mapping[int, Card] = {}
        self.quiet = contextvars.copy_context()
        self.quiet.run(np.seterr, all="ignore")
        self.quiet.run(_is_quiet.set, True)
        self.closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def run_quietly(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` in the context `quiet`. The caller may be in that context already."""
        if _is_quiet.get():
            return function(*arguments)
        return self.quiet.run(function, *arguments)

    async def connect(self, rank: int, kind: ConnKind) -> Link | None:
        """Open a link to `rank`; return None if `rank` is already opening a link to this rank."""
        return await self.transport.connect(rank, self.cards[rank], kind)

    async def connect_heartbeat(self, rank: int) -> ByteStream | None:
        """Open a heartbeat connection to `rank`; return None if `rank` is already opening one to this rank."""
        return await self.transport.connect_heartbeat(rank, self.cards[rank])

    def spawn(self, coro: Coroutine[Any, Any, None], name: str) -> None:
        """Run a coroutine as a background task."""
        task = self.runtime.create_task(coro, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop_tasks(self) -> None:
        """Cancel the background tasks, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
