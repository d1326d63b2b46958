"""What one rank does where large arrays go through chunk queues: what goes to the right, and comes from the left."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiocoll.algorithms.program import Region

__all__ = ["BETWEEN_TWO", "Relay", "messages_between_two"]

#: Collectives of two ranks that take one step: what one rank sends, the other one copies or reduces. A gather is not
#: among them, since its root may not know how much comes.
BETWEEN_TWO = frozenset({"broadcast", "reduce", "allgather", "reduce_scatter", "scatter", "alltoall", "scan", "exscan"})


def messages_between_two(kind: str, sizes: tuple[Any, ...], rank: int, root: int) -> tuple[int, ...]:
    """Return the elements of each message of a collective `BETWEEN_TWO` ranks, as both know them."""
    other = 1 - rank
    if kind == "alltoall":
        return sizes[0][other], sizes[1][other]
    counts: tuple[int, ...] = sizes[0] if isinstance(sizes[0], tuple) else sizes
    return (counts[1 - root],) if kind == "scatter" else counts


class Relay(NamedTuple):
    """One rank's part in a ring in which all ranks send chunks to the right.

    In each step after the first, a rank passes on what it has taken in the step before.

    Attributes:
        chunk: elements of a chunk.
        puts: by step, what goes to the right neighbour.
        takes: by step, where it belongs what comes from the left one.
        sources: by step, what that is reduced with; in later steps it is copied.
        copy: target and source of a local copy.
    """

    chunk: int
    puts: tuple[Region, ...]
    takes: tuple[Region, ...]
    sources: tuple[Region, ...]
    copy: tuple[Region, Region] | None

    @classmethod
    def of(cls, kind: str, sizes: tuple[Any, ...], rank: int, size: int, root: int, chunk: int) -> Relay:
        """Return the relay of an allreduce, or of a collective `BETWEEN_TWO` ranks; arguments as for `build`."""
        if kind == "allreduce":
            return cls._around(sizes[0], rank, size, chunk)
        counts, other = sizes[0] if isinstance(sizes[0], tuple) else sizes, 1 - rank
        put: Region | None
        take: Region | None
        source = copy = None
        if kind == "allgather":
            put, take = Region(size, 0, counts[rank]), Region(other, 0, counts[other])
            copy = Region(rank, 0, counts[rank]), Region(size, 0, counts[rank])
        elif kind == "reduce_scatter":
            put, take = Region(other, 0, counts[other]), Region(size, 0, counts[rank])
            source = Region(rank, 0, counts[rank])
        elif kind == "alltoall":
            put, take = Region(other, 0, sizes[0][other]), Region(size + other, 0, sizes[1][other])
            copy = Region(size + rank, 0, counts[rank]), Region(rank, 0, counts[rank])
        elif kind == "scatter":
            own = Region(size, 0, counts[rank])
            put, take = (Region(other, 0, counts[other]), None) if rank == root else (None, own)
            copy = (own, Region(rank, 0, counts[rank])) if rank == root else None
        else:
            whole, sender = Region(0, 0, counts[0]), {"broadcast": root, "reduce": 1 - root}.get(kind, 0)
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

    def chunks(self, regions: tuple[Region, ...]) -> int:
        """Return how many chunks each step has, in which `puts` or `takes` are moved: as many as the longest one needs.

        In a ring all parts are among them, so all ranks find the same.
        """
        return -(-max((region.count for region in regions), default=0) // self.chunk)


def _steps(region: Region | None) -> tuple[Region, ...]:
    return (region,) if region is not None and region.count else ()
