"""Relay of large arrays through chunk queues: the regions to send to the right and to receive from the left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import Region

if TYPE_CHECKING:
    from aiocoll.engine.operations.base import Operation

__all__ = ["BETWEEN_TWO", "LONGEST", "ROUND", "Relay", "messages_between_two", "take_chunk"]

#: Collectives that need one step between two ranks: each rank copies or reduces the data of the other rank.
BETWEEN_TWO = frozenset(
    {"broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "alltoall", "scan", "exscan"}
)
#: Collectives for which more than two ranks also use a relay: each rank passes on the data that it receives.
ROUND = frozenset({"broadcast", "allgather"})
#: Maximum number of bytes of a message in `ROUND` for which a relay is faster than reading in place.
LONGEST = 2 * 1024 * 1024

_BYTES: Final = np.dtype(np.uint8)


def messages_between_two(kind: str, sizes: tuple[Any, ...], rank: int, root: int) -> tuple[int, ...]:
    """Return the numbers of elements in the messages of a collective in `BETWEEN_TWO`. Both ranks know them."""
    other = 1 - rank
    if kind == "alltoall":
        return sizes[0][other], sizes[1][other]
    counts: tuple[int, ...] = sizes[0] if isinstance(sizes[0], tuple) else sizes
    return (counts[1 - root],) if kind in ("gather", "scatter") else counts


def take_chunk(
    operation: Operation,
    peer: int,
    nbytes: int,
    size_of: Callable[[int], int],
    use: Callable[[NDArray[np.uint8]], None],
) -> bool:
    """Receive the next chunk that `peer` has written for an operation; return whether there was a chunk.

    Args:
        operation: the operation of this rank.
        peer: sender of the chunk.
        nbytes: number of bytes in the longest chunk.
        size_of: called with the number of bytes in the message; returns the number of bytes in its next chunk, or -1 if
            the operation does not expect a message of this length.
        use: reads the bytes of the chunk in place. The sender may overwrite them after the call.
    """
    comm = operation.comm
    channel = comm.channels[peer]
    link = channel.shared
    if link is None or link.chunks.nbytes < nbytes:
        return False
    chunks = link.chunks
    while (found := chunks.look(operation.id, comm.id)) < 0:
        if not chunks.reclaim():
            return False
    size = size_of(chunks.length()) if found == operation.fingerprint else -1
    if size < 0:
        comm.mismatches.disagree(peer, operation.id, operation.describe())
        return False
    incoming = chunks.read(_BYTES, size)
    if incoming is None:
        return False
    use(incoming)
    if operation.done:  # it failed in `use`, and its group has already released the chunks
        return True
    if chunks.is_void():
        return False
    if chunks.free() and link is channel.link:
        link.announce()
    return True


class Relay(NamedTuple):
    """The schedule of one rank in a ring in which all ranks send chunks to the right.

    In each step a rank sends the data that it received `behind` steps before.

    Attributes:
        chunk: number of elements in a chunk.
        puts: the region to send to the right neighbour, by step.
        takes: the region for the data from the left neighbour, by step.
        sources: the region with which that data is reduced, by step. In later steps the data is copied.
        copy: target and source of a local copy, or None.
        behind: 1; in the middle of a chain 0, because each chunk is passed on when it arrives.
    """

    chunk: int
    puts: tuple[Region, ...]
    takes: tuple[Region, ...]
    sources: tuple[Region, ...]
    copy: tuple[Region, Region] | None
    behind: int = 1

    @classmethod
    def of(cls, kind: str, sizes: tuple[Any, ...], rank: int, size: int, root: int, chunk: int) -> Relay:
        """Return the relay of an allreduce or of a collective in `ROUND` or `BETWEEN_TWO`.

        The arguments have the same meaning as those of `aiocoll.algorithms.select.build`.
        """
        if kind == "allreduce":
            return cls._ring(sizes[0], rank, size, chunk)
        if kind == "allgather":
            return cls._gather(sizes[0], rank, size, chunk)
        if kind == "broadcast":
            return cls._chain(sizes[0], (rank - root) % size, size, chunk)
        counts, other = sizes[0] if isinstance(sizes[0], tuple) else sizes, 1 - rank
        put: Region | None
        take: Region | None
        source = copy = None
        if kind == "reduce_scatter":
            put, take = Region(other, 0, counts[other]), Region(size, 0, counts[rank])
            source = Region(rank, 0, counts[rank])
        elif kind == "alltoall":
            put, take = Region(other, 0, sizes[0][other]), Region(size + other, 0, sizes[1][other])
            copy = Region(size + rank, 0, counts[rank]), Region(rank, 0, counts[rank])
        elif kind == "gather":
            own = Region(size, 0, counts[rank])
            put, take = (None, Region(other, 0, counts[other])) if rank == root else (own, None)
            copy = (Region(rank, 0, counts[rank]), own) if rank == root else None
        elif kind == "scatter":
            own = Region(size, 0, counts[rank])
            put, take = (Region(other, 0, counts[other]), None) if rank == root else (None, own)
            copy = (own, Region(rank, 0, counts[rank])) if rank == root else None
        else:
            whole, sender = Region(0, 0, counts[0]), 1 - root if kind == "reduce" else 0
            put, take = (whole, None) if rank == sender else (None, whole)
            source = take if kind in ("reduce", "scan") else None
        return cls(chunk, _steps(put), _steps(take), _steps(source), copy if copy and copy[0].count else None)

    @classmethod
    def _ring(cls, count: int, rank: int, size: int, chunk: int) -> Relay:
        """Return the relay of a ring allreduce: each part of the array circulates to be reduced, then to be copied."""
        parts = [Region(0, count * part // size, count * (part + 1) // size) for part in range(size)]
        puts = tuple(parts[(rank - step - 1) % size] for step in range(2 * (size - 1)))
        takes = tuple(parts[(rank - step - 2) % size] for step in range(2 * (size - 1)))
        return cls(chunk, puts, takes, takes[: size - 1], None)

    @classmethod
    def _gather(cls, counts: tuple[int, ...], rank: int, size: int, chunk: int) -> Relay:
        """Return the relay of an allgather: each block circulates. More than two ranks need equally long blocks."""
        blocks = [Region(each, 0, count) for each, count in enumerate(counts)]
        own = Region(size, 0, counts[rank])
        taken = [blocks[(rank - step) % size] for step in range(1, size)]
        copy = (blocks[rank], own) if own.count else None
        return cls(chunk, _steps(own, *taken[:-1]), _steps(*taken), (), copy)

    @classmethod
    def _chain(cls, count: int, distance: int, size: int, chunk: int) -> Relay:
        """Return the relay of a broadcast for the rank that is `distance` ranks to the right of the root."""
        whole = _steps(Region(0, 0, count))
        puts, takes = whole if distance < size - 1 else (), whole if distance else ()
        return cls(chunk, puts, takes, (), None, 0 if puts and takes else 1)

    def chunks(self, regions: tuple[Region, ...]) -> int:
        """Return the number of chunks per step for the regions `puts` or `takes`: as many as the longest region needs.

        In a ring, `puts` and `takes` each contain all parts, so all ranks compute the same number.
        """
        return -(-max((region.count for region in regions), default=0) // self.chunk)


def _steps(*regions: Region | None) -> tuple[Region, ...]:
    return tuple(region for region in regions if region is not None and region.count)
