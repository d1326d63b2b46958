"""Claims: entries in a store by which processes reserve their ranks, so that no two processes are the same rank.

The ranks of a job may meet many times on one store, each time under the keys of another generation. A process claims
its rank in the first generation that has not ended. A claim names the process, so that a successor can replace a
process that has ended. The successor starts the next generation, and all ranks follow. No rank uses a card of the ended
process, since the successor first stores `MOVED` in place of a missing card. If no card is missing, some ranks may have
started with the existing cards: then all ranks fail.

Two observations prove that a claimer has ended: a store that sees disconnects has replaced its claim, or its process on
this host is gone. A living claimer is never displaced. A rank that arrives after the end of another rank also starts
the next generation, so that all ranks wait for the successor.
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

__all__ = ["Claims", "RankTakenError", "RanksHaveMetError", "assign", "call_off_all"]

#: Seconds between two checks whether the process of a claim has ended.
_LOOK = 1.0

#: Store key that exists once the ranks have met. Used only if they may meet only once on the store.
_HAVE_MET = "aiocoll/met"

#: Number of random bytes at the beginning of a claim. The identity of the claiming process follows.
_NONCE = 16

#: Claims that tasks of this process have made and still hold.
_active: set[bytes] = set()


class RankTakenError(RendezvousError):
    """Raised when another process, which may be alive, has claimed the rank."""


class RanksHaveMetError(RendezvousError):
    """Raised instead of a second rendezvous when the ranks have met before."""


class Claims:
    """The claim of one rank in a store, and the generation (attempt of the ranks to meet) for which it is valid.

    Args:
        store: the store where the ranks meet.
        rank: the rank to claim.
        world_size: number of ranks.
        runtime: clock and randomness.
        once: whether the ranks may meet only once.

    Attributes:
        generation: the generation of the claim.
        met: the last generation whose ranks have met.
    """

    def __init__(self, store: Store, rank: int, world_size: int, runtime: Runtime, once: bool = False) -> None:
        self.generation = self.met = 0
        self._once = once
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._runtime = runtime
        self._host, self._here = host_identity(), this_process()
        self._process = msgpack.packb([self._host, *self._here])
        self._mark = runtime.random_bytes(_NONCE) + self._process

    @property
    def store(self) -> Store:
        """Return the view of the store with the keys of the current generation."""
        return meeting_store(self._store, self.generation)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keep the claim valid inside a ``with`` block. Afterwards, another task of this process may replace it."""
        _active.add(self._mark)
        try:
            yield
        finally:
            _active.discard(self._mark)

    async def claim(self) -> None:
        """Claim the rank in the first generation (rendezvous attempt) that has not ended.

        Raises:
            RankTakenError: another process, which may be alive, is that rank.
            RanksHaveMetError: the ranks may meet only once, and have met.
            RendezvousError: other ranks use a different world size, or may have started with an ended process.
        """
        await self._agree_on_size()
        self.met = await self._store.add(_met_key(self._rank), 0)
        if self._once and (self.met or await self._store.check([_HAVE_MET])):
            raise RanksHaveMetError("the ranks have met on this store before")
        self.generation = max(self.generation, self.met) + 1
        while not await self._claim():
            self.generation += 1

    async def restart_after_ended_rank(self) -> None:
        """Make the ranks meet again if a rank's process has ended. Call this before this rank publishes its card.

        Raises:
            MeetingMovedError: the ranks meet in the next generation.
            RendezvousError: a rank has published the reason why the ranks cannot meet.
        """
        claims = [key for key in await self.store.list_keys() if key.startswith("claim/")]
        if self._store._sees_disconnects:
            has_ended = any(key.endswith(LEFT_SUFFIX) for key in claims)
        else:
            has_ended = any(map(self._has_ended, await self.store.multi_get(claims)))
        if has_ended:
            raise_if_called_off(await self._start_next_generation())

    async def confirm(self) -> None:
        """Record that this rank has met the others. A process that replaces it then uses a later generation."""
        await self._store.set(_met_key(self._rank), str(self.generation).encode())
        if self._once:
            await self._store.set(_HAVE_MET, b"")

    async def await_loss(self) -> RendezvousError:
        """Wait until the next rank's process is found to have ended without a rendezvous; return the error to raise."""
        next_rank = (self._rank + 1) % self._world_size
        while True:
            await self._runtime.sleep(_LOOK)
            claim = await self.store.compare_set(f"claim/{next_rank}", b"?", b"?")  # a read that never waits
            if self._has_ended(claim) and await self._store.add(_met_key(next_rank), 0) < self.generation:
                reason = (
                    f"rank {next_rank} was lost before all ranks had met: it failed or its process has ended; see its "
                    "error message, and start all ranks again"
                )
                await call_off(self._store, self._world_size, reason, self.generation)
                return RendezvousError(reason)

    async def _claim(self) -> bool:
        """Claim the rank in the current generation; return False if that generation has ended."""
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
        await self._start_next_generation()
        return False

    async def _start_next_generation(self) -> bytes:
        """Make the ranks of this generation meet again in the next one, unless all ranks have published their cards.

        Returns:
            `MOVED`, or the published reason why the ranks cannot meet.
        """
        store, rank, size = self.store, self._rank, self._world_size
        for each in (rank, *range(rank), *range(rank + 1, size)):
            found = await store.compare_set(f"card/{each}", b"", MOVED)
            if found == MOVED:
                return await store.compare_set(ENDED, b"", MOVED)
            if found.startswith(CALLED_OFF):
                return found
        reason = (
            f"rank {rank} was lost before all ranks had met: its process ended after all ranks had published their "
            "addresses, so its replacement came too late; start all ranks again"
        )
        await call_off(self._store, size, reason, self.generation)
        raise RendezvousError(reason)

    def _has_ended(self, claim: bytes) -> bool:
        """Return whether the process that made `claim` has provably ended, or its task has given the claim up."""
        if claim == LEFT:
            return True
        process = claim[_NONCE:]
        if process == self._process:
            return claim not in _active
        # If the server sees disconnects, trust only the server. Cloned hosts have equal identities, so a process on
        # this host may have the id of a process on another host.
        return not self._store._sees_disconnects and self._is_gone(process)

    def _is_gone(self, process: bytes) -> bool:
        """Return whether the process that made a claim has ended. False on another host or in another PID namespace."""
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
                f"world_size={agreed.decode(errors='replace')}; start all ranks with the same world_size"
            )
            if agreed.isdigit():
                await call_off_all(self._store, int(agreed), reason)
            raise RendezvousError(reason)


async def assign(store: Store, world_size: int) -> int:
    """Return a rank for a process without an assigned rank.

    Ranks are assigned in turn, so that as many processes can meet again on this store.
    """
    return (await store.add("aiocoll/assigned", 1) - 1) % world_size


async def call_off_all(store: Store, world_size: int, reason: str) -> None:
    """Publish why the ranks cannot meet, in the current generation of `store`."""
    met = max([await store.add(_met_key(rank), 0) for rank in range(world_size)])
    generation = met + 1
    while await meeting_store(store, generation).check([ENDED]):
        generation += 1
    # Publish nothing if the ranks have met and no rank has started to meet again.
    claims = [key for key in await meeting_store(store, generation).list_keys() if key.startswith("claim/")]
    if claims or met == 0:
        await call_off(store, world_size, reason, generation)


def _met_key(rank: int) -> str:
    """Return the store key for the last generation in which `rank` has met the other ranks."""
    return f"aiocoll/rank/{rank}"
