"""Which members of a flush travel together, and how they lie in the memory that is sent in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.fusion.deferred_work import DeferredWork
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature

__all__ = ["CHUNK", "Bucket", "Layout"]

#: Bytes copied in one go: a callback looks at the clock after each.
CHUNK = 128 * 1024

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a list of members is carried out; made once for lists alike.

    Attributes:
        signature: of the flush.
        fingerprint: of the whole list.
        buckets: in the order of their first members.
    """

    signature: Signature
    fingerprint: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Members that are one operation.

    Several without a plan are on a device: all take part in one operation, which no memory is packed for.

    Each buffer of the operation holds those of all members, one after the other, behind a stamp if there is one.

    Attributes:
        members: their positions in the list.
        plan: of the operation; None if its members have none.
        counts: by buffer, how many elements each member has; None where this rank has no such buffer.
        reads: the buffers that are inputs.
        writes: the buffers that are outputs.
        stamps: by buffer, what it begins with: a hash of its members' counts, where only the two ends of a message
            know these.
        sources: by output, which rank's stamp it must begin with.
        cuts: positions in `members` between which there is about a `CHUNK`.
        alike: all members are of the same plan.
        scales: members multiply a rank's own data before anything else, each by a factor of its own.
    """

    members: tuple[int, ...]
    plan: Plan | None
    counts: tuple[tuple[int, ...] | None, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    stamps: Mapping[int, Array] | None = None
    sources: Mapping[int, int] | None = None
    cuts: tuple[int, ...] = ()
    alike: bool = False
    scales: bool = False

    def first(self, buffer: int) -> int:
        """Return how many elements of a buffer the stamp takes."""
        return self.stamps[buffer].size if self.stamps else 0

    def size(self, buffer: int) -> int | None:
        """Return how many elements a buffer has."""
        counts = self.counts[buffer]
        return None if counts is None else self.first(buffer) + sum(counts)

    def wrong(self, arrays: Sequence[Array | None]) -> int | None:
        """Return a rank whose members have other counts than those of this rank."""
        for buffer, peer in (self.sources or {}).items():
            array, stamp = arrays[buffer], self.stamps[buffer]  # type: ignore[index]  # there are both, or neither
            assert array is not None
            if array[: stamp.size].tobytes() != stamp.tobytes():
                return peer
        return None

    def pack(
        self, members: Sequence[DeferredWork], arrays: Sequence[Array | None], buffers: Sequence[int]
    ) -> Iterator[None]:
        """Fill `buffers`, in pieces."""
        for buffer in buffers:
            target, start = arrays[buffer], self.first(buffer)
            assert target is not None
            if self.stamps:
                target[:start] = self.stamps[buffer]
            for first, last, sizes in self._chunks(buffer):
                stop = start + sum(sizes)
                sources = [member.arrays[buffer] for member in members[first:last]]
                if self.scales:
                    yield from _scaled(members[first:last], sources, target[start:stop])
                elif last - first == 1:
                    yield from _copied(sources[0], target[start:stop])
                else:
                    np.concatenate(sources, out=target[start:stop])
                start = stop
                yield

    def unpack(self, members: Sequence[DeferredWork], arrays: Sequence[Array | None]) -> Iterator[None]:
        """Bring the outputs to their members and end these, in pieces."""
        starts = {buffer: self.first(buffer) for buffer in self.writes}
        for first, last in zip(self.cuts, self.cuts[1:], strict=False):
            group = members[first:last]
            for buffer in self.writes:
                source, counts, start = arrays[buffer], self.counts[buffer], starts[buffer]
                assert source is not None
                assert counts is not None
                sizes = counts[first:last]
                starts[buffer] = stop = start + sum(sizes)
                if last - first == 1:
                    yield from _copied(source[start:stop], group[0].arrays[buffer])
                elif self.alike:
                    for member, row in zip(group, source[start:stop].reshape(last - first, -1), strict=True):
                        member.arrays[buffer][...] = row
                else:
                    ends = accumulate(sizes, initial=start)
                    for member, at, size in zip(group, ends, sizes, strict=False):
                        member.arrays[buffer][...] = source[at : at + size]
            for member in group:
                member._finish(member._value)
            yield

    def _chunks(self, buffer: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        counts = self.counts[buffer]
        assert counts is not None
        for first, last in zip(self.cuts, self.cuts[1:], strict=False):
            yield first, last, counts[first:last]


def _copied(source: Array, target: Array) -> Iterator[None]:
    step = CHUNK // target.itemsize
    for start in range(0, source.size, step):
        target[start : start + step] = source[start : start + step]
        yield


def _scaled(members: Sequence[DeferredWork], sources: Sequence[Array], target: Array) -> Iterator[None]:
    """Multiply each member by its own factor on the way."""
    step, place = CHUNK // target.itemsize, 0
    for member, source in zip(members, sources, strict=True):
        assert member.plan is not None
        assert member.plan.kernel is not None
        assert member.plan.kernel.prescale is not None
        for start in range(0, source.size, step):
            part = source[start : start + step]
            with np.errstate(all="ignore"):
                member.plan.kernel.prescale(part, target[place : place + part.size])
            place += part.size
            yield
