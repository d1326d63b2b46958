"""What one rank does where large arrays go through chunk queues: what goes to the right, and comes from the left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.program import Region

if TYPE_CHECKING:
    from aiocoll.engine.operations.base import Operation

__all__ = ["BETWEEN_TWO", "LONGEST", "ROUND", "Relay", "messages_between_two", "take_chunk"]

#: Collectives of two ranks that take one step: what one rank sends, the other one copies or reduces.
BETWEEN_TWO = frozenset(
    {"broadcast", "reduce", "allgather", "reduce_scatter", "gather", "scatter", "alltoall", "scan", "exscan"}
)
#: Those that also more ranks carry out so: what a rank takes it passes on.
ROUND = frozenset({"broadcast", "allgather"})
#: Bytes of the longest message of these that pays to be passed on, where the receivers could read it in place.
LONGEST = 2 * 1024 * 1024

_BYTES: Final = np.dtype(np.uint8)


def messages_between_two(kind: str, sizes: tuple[Any, ...], rank: int, root: int) -> tuple[int, ...]:
    """Return the elements of each message of a collective `BETWEEN_TWO` ranks, as both know them."""
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
    """Take the next chunk that `peer` has put for an operation; return whether there was one.

    Args:
        operation: this rank's.
        peer: its sender.
        nbytes: of the longest chunk.
        size_of: returns the bytes of the next chunk of a message of so many bytes; -1 if the operation expects no such
            message.
        use: reads the bytes of the chunk where they lie; they may be overwritten afterwards.
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
    if operation.done:  # it has failed, and its group has released the chunks
        return True
    if chunks.is_void():
        return False
    if chunks.free() and link is channel.link:
        link.announce()
    return True


class Relay(NamedTuple):
    """One rank's part in a ring in which all ranks send chunks to the right.

    A rank passes on what it has taken `behind` steps before.

    Attributes:
        chunk: elements of a chunk.
        puts: by step, what goes to the right neighbour.
        takes: by step, where it belongs what comes from the left one.
        sources: by step, what that is reduced with; in later steps it is copied.
        copy: target and source of a local copy.
        behind: 1; or 0, in the middle of a chain, where each chunk is passed on as it comes.
    """

    chunk: int
    puts: tuple[Region, ...]
    takes: tuple[Region, ...]
    sources: tuple[Region, ...]
    copy: tuple[Region, Region] | None
    behind: int = 1

    @classmethod
    def of(cls, kind: str, sizes: tuple[Any, ...], rank: int, size: int, root: int, chunk: int) -> Relay:
        """Return the relay of an allreduce, or of one of `ROUND` or `BETWEEN_TWO`; arguments as for `build`."""
        if kind == "allreduce":
            return cls._around(sizes[0], rank, size, chunk)
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
    def _around(cls, count: int, rank: int, size: int, chunk: int) -> Relay:
        """Return the relay of `aiocoll.algorithms.flat.ring`: each part goes round to be reduced, and once more."""
        parts = [Region(0, count * part // size, count * (part + 1) // size) for part in range(size)]
        puts = tuple(parts[(rank - step - 1) % size] for step in range(2 * (size - 1)))
        takes = tuple(parts[(rank - step - 2) % size] for step in range(2 * (size - 1)))
        return cls(chunk, puts, takes, takes[: size - 1], None)

    @classmethod
    def _gather(cls, counts: tuple[int, ...], rank: int, size: int, chunk: int) -> Relay:
        """Return the relay of an allgather: each block goes round; between more than two ranks all have one length."""
        blocks = [Region(each, 0, count) for each, count in enumerate(counts)]
        own = Region(size, 0, counts[rank])
        taken = [blocks[(rank - step) % size] for step in range(1, size)]
        copy = (blocks[rank], own) if own.count else None
        return cls(chunk, _steps(own, *taken[:-1]), _steps(*taken), (), copy)

    @classmethod
    def _chain(cls, count: int, distance: int, size: int, chunk: int) -> Relay:
        """Return the relay of a broadcast, at a rank that is so far to the right of the root."""
        whole = _steps(Region(0, 0, count))
        puts, takes = whole if distance < size - 1 else (), whole if distance else ()
        return cls(chunk, puts, takes, (), None, 0 if puts and takes else 1)

    def chunks(self, regions: tuple[Region, ...]) -> int:
        """Return how many chunks each step has, in which `puts` or `takes` are moved: as many as the longest one needs.

        In a ring all parts are among them, so all ranks find the same.
        """
        return -(-max((region.count for region in regions), default=0) // self.chunk)


def _steps(*regions: Region | None) -> tuple[Region, ...]:
    return tuple(region for region in regions if region is not None and region.count)
