"""Claiming a rank in a store, so that no other process is the same rank."""

from __future__ import annotations

from aiocoll.errors import RendezvousError
from aiocoll.meeting.cards import CALLED_OFF
from aiocoll.store import PrefixStore, Store

__all__ = ["assign", "call_off_all", "claim"]


async def assign(store: Store, world_size: int) -> int:
    """Return a rank for a process that was given none.

    They go round, so that as many processes can meet again on this store.
    """
    return (await store.add("aiocoll/assigned", 1) - 1) % world_size


async def claim(store: Store, rank: int, world_size: int) -> int:
    """Claim a rank; return how many times the ranks have met on this store, this time included.

    Raises:
        RendezvousError: others were started with another world size, or another process is that rank.
    """
    size = str(world_size).encode()
    agreed = await store.compare_set("aiocoll/world_size", b"", size)
    if agreed != size:
        reason = (
            f"rank {rank} was started with world_size={world_size}, others with "
            f"world_size={agreed.decode(errors='replace')}: give all ranks the same"
        )
        if agreed.isdigit():
            await call_off_all(store, int(agreed), reason)
        raise RendezvousError(reason)
    times = await store.add(f"aiocoll/rank/{rank}", 1)
    if times > 1 and not await store.check([f"aiocoll/{times - 1}/member/{rank}"]):
        raise RendezvousError(
            f"rank {rank} is taken: another process joined as rank {rank}; give each process its own rank"
        )
    return times


async def call_off_all(store: Store, world_size: int, reason: str) -> None:
    """Publish the reason under the key that the others wait for first."""
    times = max([await store.add(f"aiocoll/rank/{rank}", 0) for rank in range(world_size)])
    meeting_store = PrefixStore(f"aiocoll/{times}", store)
    for key in ("job", *(f"card/{rank}" for rank in range(world_size))):
        await meeting_store.compare_set(key, b"", CALLED_OFF + reason.encode())
