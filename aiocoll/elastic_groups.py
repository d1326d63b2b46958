"""`elastic`: an iterator over groups. After the loss of a rank, it yields a group of the living ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, MutableMapping
from itertools import count
from math import inf
from typing import Any

import numpy as np

from aiocoll.elements.allocate import empty_like, overwrite
from aiocoll.elements.buffers import view
from aiocoll.engine.control.causes import failure_by
from aiocoll.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    RendezvousError,
    StoreError,
    StoreUnavailableError,
)
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.launcher import report_elastic
from aiocoll.log import logger
from aiocoll.numerals import to_int
from aiocoll.options import seconds
from aiocoll.rendezvous.new_group import new_group
from aiocoll.runtime import Runtime, running_loop

__all__ = ["elastic"]

#: Seconds for which one round waits for newcomers. Also the timeout of the rendezvous with them.
ROUND = 10.0
#: Attributes that mark a value of the state as an array, which is received in place.
_ARRAY = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")


async def elastic(
    *,
    state: MutableMapping[str, Any] | None = None,
    size: int | None = None,
    wait: float = 60.0,
    max_mends: int | None = None,
    mend_timeout: float = 300.0,
    **given: Any,
) -> AsyncGenerator[ProcessGroup, None]:
    """Yield a group, and another one after each loss of a rank, until the loop body ends with an intact group.

        state = {"step": 0, "weights": weights}
        async for pg in aiocoll.elastic(state=state):
            with contextlib.suppress(aiocoll.GroupError):  # then there is another group
                while state["step"] < STEPS:
                    await step(pg, state)  # changes it at the end, so that it is whole whenever this raises

    When the group has failed, the living ranks call `ProcessGroup.shrink`, wait for newcomers as replacements of the
    lost ranks, and share the state. If another rank is lost meanwhile, they start again. If they continued without some
    ranks and newcomers come later, the group is aborted to admit them. All ranks and all newcomers run the same
    program. A newcomer has a ticket for that purpose, or ``join=True``; with ``join=None``, each process finds out
    whether it is one. Newcomers need a store that outlives the lost rank: `aiocoll.Meeting`, the launcher, a file or
    Redis. If a process ends before the first group has met, start a new process in the same way, as the same rank.

    Args:
        state: the initial state of every group. In each group, all ranks receive the values of its rank 0, arrays in
            place, others as objects. Newcomers need arrays of the same names, shapes and dtypes. All ranks must pass a
            state, or none.
        size: desired number of ranks; by default that of the first group. Newcomers adopt the others' value.
        wait: seconds to wait for newcomers before continuing without them.
        max_mends: number of groups that may fail before the failure is raised; None for no limit.
        mend_timeout: seconds that making a new group may take.
        **given: arguments of `new_group`.

    Yields:
        The groups. Each is closed when the next one is ready, the last one at the end of the loop.

    Raises:
        PeerLostError: this rank cannot continue: see `ProcessGroup.shrink`.
        CollectiveMismatchError: the ranks have called different collectives, and would do so again.
        GroupError: more groups have failed than `max_mends`.
        CollectiveTimeoutError: no group was made within `mend_timeout`. The message describes the unfinished step.
        Exceptions of `new_group`, if the ranks do not meet at first.
    """
    if state is not None and not isinstance(state, MutableMapping):
        raise TypeError(f"state must be a dict or None, not {type(state).__name__}")
    wait, mend_timeout = seconds(wait, "wait"), seconds(mend_timeout, "mend_timeout")
    size = None if size is None else to_int(size, "size", "an int or None")
    max_mends = None if max_mends is None else to_int(max_mends, "max_mends", "an int or None")
    if max_mends is not None and max_mends < 0:
        raise ValueError(f"max_mends={max_mends}: must not be negative")
    made = new_group(**given)
    mending = _ElasticRank(await _join_first_group(made), state, size, wait, begun=not made.newcomer)
    try:
        failure = await mending.begin()
        while True:
            try:
                async with asyncio.timeout(None if mend_timeout == inf else mend_timeout) as limit:
                    while failure is not None:
                        if mending.mends == max_mends or isinstance(failure, CollectiveMismatchError):
                            raise failure
                        failure = await mending.mend()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise mending.abort_group(f"no new group within mend_timeout={mend_timeout:g} s") from None
            yield mending.pg
            if (failure := mending.failure) is None:
                return
    finally:
        mending.end()
        await mending.pg.shutdown()


async def _join_first_group(made: new_group) -> ProcessGroup:
    """Join the first group. A newcomer retries if this group fails during the join."""
    clock = Runtime.of(running_loop()).time
    end = clock() + made.timeout
    while True:
        try:
            return await made
        except RendezvousError:
            if not made.newcomer or clock() >= end:
                raise


class _ElasticRank:
    """The elastic state of one rank, kept from one group to the next, and the steps that replace a failed group.

    Attributes:
        pg: the current group.
        mends: number of earlier groups.
        step: current activity of this rank, for the error of a timeout.
    """

    def __init__(
        self, pg: ProcessGroup, state: MutableMapping[str, Any] | None, size: int | None, wait: float, *, begun: bool
    ) -> None:
        self.pg = pg
        self.mends = 0
        self.step = "starting"
        self._has_started = begun
        self._state = state
        self._size = pg.size() if size is None else size
        self._wait = wait
        self._newcomer_task: asyncio.Task[None] | None = None

    @property
    def failure(self) -> GroupError | None:
        """The error that ended the group; None if the group is intact."""
        cause = parts_of(self.pg).comm.cause
        return None if cause is None else failure_by(cause)

    async def begin(self) -> GroupError | None:
        """Compare the progress and share the state in the first group; return its failure, or None."""
        return await self._catch_failure(self._start())

    async def mend(self) -> GroupError | None:
        """Replace the failed group by one of the living ranks and newcomers; return its failure, or None."""
        self.end()
        self.mends += 1
        self.step = "waiting for all living ranks to call shrink()"
        await self._change_to(await self.pg.shrink())
        return await self._catch_failure(self._grow())

    def abort_group(self, reason: str) -> CollectiveTimeoutError:
        """Abort the group, so that the other ranks also stop waiting; return the error to raise."""
        pg = self.pg
        text = f"group {pg.group_name!r}, rank {pg.rank()} of {pg.size()}: {reason}, {self.step}"
        pg.abort(text)
        return CollectiveTimeoutError(text, group=pg.group_name)

    async def _catch_failure(self, doing: Awaitable[None]) -> GroupError | None:
        try:
            await doing
        except GroupError as error:
            if self.failure is None:
                raise
            return error
        return None

    def end(self) -> None:
        """Cancel the task that waits for newcomers."""
        if self._newcomer_task is not None:
            self._newcomer_task.cancel()
            self._newcomer_task = None

    async def _await_newcomers(self, pg: ProcessGroup) -> None:
        with contextlib.suppress(StoreError):
            await parts_of(pg).reconfigurer.await_newcomer()
            pg.abort("newcomers are waiting to join")

    async def _start(self) -> None:
        await self._share_state(await self._agree_on_progress())

    async def _grow(self) -> None:
        """Admit newcomers in rounds, so that a newcomer that dies delays only one round; then share the state."""
        root = await self._agree_on_progress()
        for number in count(1):
            missing = self._size - self.pg.size()
            if missing <= 0:
                break
            come, last = min(self._wait, ROUND), number * ROUND >= self._wait
            self.step = f"waiting for {missing} newcomer(s)"
            try:
                grown = await parts_of(self.pg).reconfigurer.take_in(missing, 1 if last else missing, come, ROUND)
                await self._change_to(grown)
                root = await self._agree_on_progress()  # newcomers make the same call
            except RendezvousError:  # raised if no newcomers have arrived
                if self.failure is not None:
                    raise self.failure from None
            except StoreUnavailableError as error:
                name, rank = self.pg.group_name, self.pg.rank()
                logger.warning(
                    "group %r, rank %d: continues with %d of %d ranks: %s",
                    name,
                    rank,
                    self.pg.size(),
                    self._size,
                    str(error),
                    extra={"group": name, "rank": rank},
                )
                break
            if last:
                break
        await self._share_state(root)

    async def _agree_on_progress(self) -> int:
        """Return the first rank that was in an earlier group, and adopt its group size and number of mends."""
        pg = self.pg
        self.step = "comparing progress with the other ranks"
        received = await pg.allgather_object((self._has_started, self._size, self.mends))
        for rank, (begun, size, mends) in enumerate(received):
            if begun:
                self._size, self.mends = size, mends
                return rank
        raise GroupError(
            f"group {pg.group_name!r}, rank {pg.rank()}: all ranks with the state are lost; restart the job",
            group=pg.group_name,
        )

    async def _share_state(self, root: int) -> None:
        """Send or receive the state of rank `root`, and start to wait for newcomers if ranks are missing."""
        state, pg = self._state, self.pg
        self.step = f"receiving the state of rank {root}"
        arrays = None if state is None else sorted(name for name, value in state.items() if _is_array(value))
        names = await pg.broadcast_object(arrays, root)
        if names != arrays:
            raise ValueError(
                f"state differs: rank {root} has arrays {names}, rank {pg.rank()} has {arrays}; "
                "pass the same arrays on every rank"
            )
        if state is not None and arrays is not None:
            state.update(await self._receive(state, arrays, root))
        self._has_started = True
        report_elastic()
        if pg.rank() == 0 and pg.size() < self._size:
            self._newcomer_task = running_loop().create_task(self._await_newcomers(pg), name="aiocoll newcomers")

    async def _receive(self, state: MutableMapping[str, Any], names: list[str], root: int) -> dict[str, Any]:
        """Take part in the broadcast of the state of rank `root`, whose arrays are `names`, and return this state.

        If this rank's state may still be needed, it stays intact until all data has arrived.
        """
        pg = self.pg
        received = await pg.broadcast_object({name: value for name, value in state.items() if name not in names}, root)
        kept = self._has_started and pg.rank() != root
        into = {name: empty_like(view(state[name], name=name)) if kept else state[name] for name in names}
        works = {name: pg.broadcast(array, root) for name, array in into.items()}
        arrays = {name: await work for name, work in works.items()}
        return received | ({name: overwrite(state[name], array) for name, array in arrays.items()} if kept else arrays)

    async def _change_to(self, pg: ProcessGroup) -> None:
        old, self.pg = self.pg, pg
        await old.shutdown()


def _is_array(value: Any) -> bool:
    return any(hasattr(value, name) for name in _ARRAY) and not isinstance(value, np.generic)
