"""Memory layout of a flush (the recorded calls of a block): buckets that fuse calls, and the buffers of each bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiocoll.engine.fusion.deferred_completion import DeferredCompletion
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature

__all__ = ["CHUNK", "Bucket", "Layout"]

#: Number of bytes copied at a time. After each chunk, the callback checks the time.
CHUNK = 128 * 1024

Array = NDArray[Any]


class Layout(NamedTuple):
    """The buckets for a list of recorded calls (members). Equal lists share one layout.

    Attributes:
        signature: signature of the flush.
        fingerprint: hash of the whole list.
        buckets: in the order of their first members.
        singles: by member, the plan of a member that is carried out separately, or None; () if there are no such
            members.
    """

    signature: Signature
    fingerprint: int
    buckets: tuple[Bucket, ...]
    singles: tuple[Plan | None, ...]


class Bucket(NamedTuple):
    """Recorded calls (members) that one operation carries out together, or equal calls that run one by one (`single`).

    Members on a CUDA device have no plan. All of them take part in one operation, for which no memory is packed.

    Each buffer of the operation holds the buffers of all members, concatenated, after a stamp if there is one.

    Attributes:
        members: positions of the members in the list.
        plan: plan of the operation; None for members on a device.
        counts: by buffer, the number of elements of each member; None where this rank has no such buffer.
        reads: the input buffers.
        writes: the output buffers.
        stamps: by buffer, its first elements: a hash of its members' counts, where only the two ends of a message know
            these. None without stamps.
        sources: by output, the rank whose stamp the output must begin with.
        cuts: positions in `members` that divide it into parts of about a `CHUNK`.
        same_plan: True if all members have the same plan.
        scales: True if each member first multiplies this rank's data by its own factor.
        single: True if its members are equal, and each is carried out separately.
    """

    members: tuple[int, ...]
    plan: Plan | None
    counts: tuple[tuple[int, ...] | None, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    stamps: Mapping[int, Array] | None = None
    sources: Mapping[int, int] | None = None
    cuts: tuple[int, ...] = ()
    same_plan: bool = False
    scales: bool = False
    single: bool = False

    def first(self, buffer: int) -> int:
        """Return the index of the first data element in a buffer, after the stamp that identifies the members."""
        return self.stamps[buffer].size if self.stamps else 0

    def size(self, buffer: int) -> int | None:
        """Return the number of elements of a buffer, with its stamp; None if this rank does not have the buffer."""
        counts = self.counts[buffer]
        return None if counts is None else self.first(buffer) + sum(counts)

    def find_conflict(self, arrays: Sequence[Array | None]) -> int | None:
        """Return a rank whose counts of elements differ from this rank's; None if no such rank is found."""
        for buffer, peer in (self.sources or {}).items():
            array, stamp = arrays[buffer], self.stamps[buffer]  # type: ignore[index]  # both or neither exist
            assert array is not None
            if array[: stamp.size].tobytes() != stamp.tobytes():
                return peer
        return None

    def pack(
        self, members: Sequence[DeferredCompletion], arrays: Sequence[Array | None], buffers: Sequence[int]
    ) -> Iterator[None]:
        """Copy the members' data into `buffers`, in chunks."""
        for buffer in buffers:
            target, start = arrays[buffer], self.first(buffer)
            assert target is not None
            if self.stamps:
                target[:start] = self.stamps[buffer]
            for first, last, sizes in self._chunks(buffer):
                stop = start + sum(sizes)
                sources = [member.arrays[buffer] for member in members[first:last]]
                if self.scales:
                    yield from _scale_in_chunks(members[first:last], sources, target[start:stop])
                elif last - first == 1:
                    yield from _copy_in_chunks(sources[0], target[start:stop])
                else:
                    np.concatenate(sources, out=target[start:stop])
                start = stop
                yield

    def unpack(self, members: Sequence[DeferredCompletion], arrays: Sequence[Array | None]) -> Iterator[None]:
        """Copy the results to the members' arrays and finish the members, in chunks."""
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
                    yield from _copy_in_chunks(source[start:stop], group[0].arrays[buffer])
                elif self.same_plan:
                    for member, row in zip(group, source[start:stop].reshape(last - first, -1), strict=True):
                        member.arrays[buffer][...] = row
                else:
                    ends = accumulate(sizes, initial=start)
                    for member, at, size in zip(group, ends, sizes, strict=False):
                        member.arrays[buffer][...] = source[at : at + size]
            for member in group:
                member.finish(member.value)
            yield

    def _chunks(self, buffer: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        counts = self.counts[buffer]
        assert counts is not None
        for first, last in zip(self.cuts, self.cuts[1:], strict=False):
            yield first, last, counts[first:last]


def _copy_in_chunks(source: Array, target: Array) -> Iterator[None]:
    step = CHUNK // target.itemsize
    for start in range(0, source.size, step):
        target[start : start + step] = source[start : start + step]
        yield


def _scale_in_chunks(members: Sequence[DeferredCompletion], sources: Sequence[Array], target: Array) -> Iterator[None]:
    """Copy each member's data, multiplied by the member's own factor, in chunks."""
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
