"""Claiming a rank in a store, so that no other process is the same rank.

The ranks of a job may meet many times on one store, each time under the keys of another generation. A process claims
its rank in the first generation that is not over. A claim names the process, so that another process can take the place
of one that has ended. The successor begins the next generation, and all ranks follow: no rank uses a card of the
ended process, since the successor first stores `MOVED` in place of a card that is still missing. If no card is
missing, some ranks may have begun with those that there are: then the ranks fail, all of them.

Two things prove that a claimer has ended: a store that sees disconnects has replaced its claim, or its process, of this
host, is gone. A claimer that lives is never displaced. A rank that comes after the end of another one begins the next
generation, too, so that all wait for the successor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgpack

from aiocoll.errors import RendezvousError
from aiocoll.meeting.cards import CALLED_OFF, ENDED, MOVED, call_off, meeting_store, raise_if_called_off
from aiocoll.process import GONE, ProcessId, state, this_process
from aiocoll.runtime import Runtime
from aiocoll.store import Store
from aiocoll.store.commands import LEFT, LEFT_SUFFIX
from aiocoll.transport.stream.addresses import host_identity

__all__ = ["Claims", "RankTakenError", "assign", "call_off_all"]

#: Seconds between two looks at the claim of a rank that is to connect.
_LOOK = 1.0

#: Random bytes at the beginning of a claim; its process follows.
_NONCE = 16

#: Claims that tasks of this process have made and not given up.
_active: set[bytes] = set()


class RankTakenError(RendezvousError):
    """Another process has claimed the rank."""


class Claims:
    """The claims of one rank on a store.

    Args:
        store: where the ranks meet.
        rank: the rank to claim.
        world_size: number of ranks.

    Attributes:
        generation: the generation of the claim.
        met: the last generation whose ranks have met.
    """

    def __init__(self, store: Store, rank: int, world_size: int, runtime: Runtime) -> None:
        self.generation = self.met = 0
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._runtime = runtime
        self._host, self._here = host_identity(), this_process()
        self._process = msgpack.packb([self._host, *self._here])
        self._mark = runtime.random_bytes(_NONCE) + self._process

    @property
    def store(self) -> Store:
        """The part of the store for this generation."""
        return meeting_store(self._store, self.generation)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keep the claims in the block; after it, another task of this process may take the place."""
        _active.add(self._mark)
        try:
            yield
        finally:
            _active.discard(self._mark)

    async def claim(self) -> None:
        """Claim the rank in the first generation that is not over.

        Raises:
            RankTakenError: another process, which may live, is that rank.
            RendezvousError: others were started with another world size, or may have begun with an ended process.
        """
        await self._agree_on_size()
        self.met = await self._store.add(_met(self._rank), 0)
        self.generation = max(self.generation, self.met) + 1
        while not await self._claim():
            self.generation += 1

    async def leave_ended(self) -> None:
        """Have the ranks meet again if the process of one has ended, before this rank publishes its card.

        Raises:
            MeetingMovedError: they meet in the next generation.
            RendezvousError: a rank has published that they cannot meet.
        """
        claims = [key for key in await self.store.list_keys() if key.startswith("claim/")]
        if self._store._sees_disconnects:
            has_ended = any(key.endswith(LEFT_SUFFIX) for key in claims)
        else:
            has_ended = any(map(self._has_ended, await self.store.multi_get(claims)))
        if has_ended:
            raise_if_called_off(await self._move())

    async def confirm(self) -> None:
        """Publish that this rank has met the others: the generation is over for its successors."""
        await self._store.set(_met(self._rank), str(self.generation).encode())

    async def await_loss(self) -> RendezvousError:
        """Wait until the process of the next rank has ended before it has met all ranks; return the error to raise."""
        next_rank = (self._rank + 1) % self._world_size
        while True:
            await self._runtime.sleep(_LOOK)
            claim = await self.store.compare_set(f"claim/{next_rank}", b"?", b"?")  # reads it without waiting
            if self._has_ended(claim) and await self._store.add(_met(next_rank), 0) < self.generation:
                reason = f"rank {next_rank} was lost while the ranks met: its process has ended; start all ranks again"
                await call_off(self._store, self._world_size, reason, self.generation)
                return RendezvousError(reason)

    async def _claim(self) -> bool:
        """Return whether the rank is claimed in this generation; False if the generation is over."""
        store, expected = self.store, b""
        while (found := await store._hold(f"claim/{self._rank}", expected, self._mark)) != self._mark:
            if await store.check([ENDED]):
                return False
            if not self._has_ended(found):
                raise RankTakenError(
                    f"rank {self._rank} is taken: another process joined as rank {self._rank}; give each process its "
                    "own rank"
                )
            expected = found
        if not expected:
            return True
        await self._move()
        return False

    async def _move(self) -> bytes:
        """Have the ranks of this generation meet again in the next one, unless all have published their cards.

        Returns:
            `MOVED`, or the published reason why they cannot meet.
        """
        store, rank, size = self.store, self._rank, self._world_size
        for each in (rank, *range(rank), *range(rank + 1, size)):
            found = await store.compare_set(f"card/{each}", b"", MOVED)
            if found == MOVED:
                return await store.compare_set(ENDED, b"", MOVED)
            if found.startswith(CALLED_OFF):
                return found
        reason = (
            f"rank {rank} was lost while the ranks met: its process ended after all ranks had published their "
            "addresses, so the process in its place comes too late; start all ranks again"
        )
        await call_off(self._store, size, reason, self.generation)
        raise RendezvousError(reason)

    def _has_ended(self, claim: bytes) -> bool:
        """Return whether it is proven that the process of a claim has ended, or its task has given up."""
        if claim == LEFT:
            return True
        process = claim[_NONCE:]
        if process == self._process:
            return claim not in _active
        # The server is a better witness: a number may mean another process on a host that was cloned.
        return not self._store._sees_disconnects and self._is_gone(process)

    def _is_gone(self, process: bytes) -> bool:
        """Return whether a process, of this host and PID namespace, is gone."""
        try:
            host, *found = msgpack.unpackb(process)
            claimer = ProcessId(*found)
        except (ValueError, TypeError):
            return False
        if host != self._host or claimer.namespace != self._here.namespace or claimer.namespace == 0:
            return False
        return state(claimer) == GONE

    async def _agree_on_size(self) -> None:
        size = str(self._world_size).encode()
        agreed = await self._store.compare_set("aiocoll/world_size", b"", size)
        if agreed != size:
            reason = (
                f"rank {self._rank} was started with world_size={self._world_size}, others with "
                f"world_size={agreed.decode(errors='replace')}: give all ranks the same"
            )
            if agreed.isdigit():
                await call_off_all(self._store, int(agreed), reason)
            raise RendezvousError(reason)


async def assign(store: Store, world_size: int) -> int:
    """Return a rank for a process that was given none.

    They go round, so that as many processes can meet again on this store.
    """
    return (await store.add("aiocoll/assigned", 1) - 1) % world_size


async def call_off_all(store: Store, world_size: int, reason: str) -> None:
    """Publish the reason to the ranks that are meeting on `store`, in whichever generation they are."""
    met = max([await store.add(_met(rank), 0) for rank in range(world_size)])
    generation = met + 1
    while await meeting_store(store, generation).check([ENDED]):
        generation += 1
    # After a meeting the ranks need no reason, unless they have begun to meet again.
    claims = [key for key in await meeting_store(store, generation).list_keys() if key.startswith("claim/")]
    if claims or met == 0:
        await call_off(store, world_size, reason, generation)


def _met(rank: int) -> str:
    """Return the key of the last generation in which a rank has met the others."""
    return f"aiocoll/rank/{rank}"
