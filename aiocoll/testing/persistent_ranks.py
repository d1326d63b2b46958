"""Persistent ranks: processes that serve many calls of a synchronous caller."""

from __future__ import annotations

import asyncio
from typing import Any

from aiocoll.options import GroupOptions
from aiocoll.testing.team import Team

__all__ = ["PersistentRanks"]


class PersistentRanks:
    """The processes of all ranks, which serve many calls, and the event loop on which the parent makes the calls.

    Args:
        source: a function or class of the module that each rank must be able to import by its name.
        world_size: number of ranks.
        options: options of the groups.
        loop: see `aiocoll.testing.loops.loop_factory`.
        allow_unretrieved: as for `run_processes`.
    """

    def __init__(
        self,
        source: Any,
        world_size: int,
        *,
        options: GroupOptions | None,
        loop: str | bytes,
        allow_unretrieved: bool,
    ) -> None:
        self._source = source
        self._world_size = world_size
        self._options = options
        self._loop = loop
        self._allow_unretrieved = allow_unretrieved
        self._runner = asyncio.Runner()
        self._team: Team | None = None

    def start(self) -> None:
        """Start the processes, without waiting until they are ready."""
        self._runner.run(self._start())

    def call(self, call: bytes, limit: float) -> None:
        """Make a call on all ranks. If a rank was lost in the last call, first start new processes for all ranks."""
        self._runner.run(self._call(call, limit))

    def close(self) -> None:
        """End the processes and close the loop."""
        with self._runner:
            self._runner.run(self._close())

    async def _start(self) -> None:
        team = Team(
            self._world_size,
            self._source,
            options=self._options,
            loop=self._loop,
            allow_unretrieved=self._allow_unretrieved,
        )
        self._team = await team.__aenter__()
        await team.start_persistent()

    async def _call(self, call: bytes, limit: float) -> None:
        if self._team is None or not self._team.intact:
            await self._close()
            await self._start()
        assert self._team is not None
        await self._team.call(call, limit)

    async def _close(self) -> None:
        team, self._team = self._team, None
        if team is not None:
            try:
                if team.intact:
                    await team.stop()
            finally:
                await team.__aexit__()
