"""Table of all collectives: one entry per collective defines its inputs, outputs, ranks and other properties.

A row defines each rank's input and output, and the ranks that have them. From that follow the buffers, in the order in
which programs, plans and calls number them (p ranks):

    tensor to tensor    0: one tensor, in place, of the same count on all ranks
    block to blocks     0 to p-1: a block for each rank; p: the rank's own block
    blocks to block     the same, from the blocks to the own one
    blocks to blocks    0 to p-1: a block to each rank; p to 2p-1: a block from each rank
    nothing             no buffers

Calls without a program have rows, too, such as those on sparse arrays and objects, whose sizes ranks exchange first.
Readers of the table treat all rows in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = ["PROGRAMS", "SPECS", "Counts", "Method", "Native", "Part", "Participants", "Spec", "spec_of"]

#: Numbers of elements, one for each buffer or each rank.
Counts: TypeAlias = tuple[int, ...]

#: Name of the device library's call, such as an NCCL call, for a collective; "send_recv" if the library only has sends
#: and receives for it.
Native: TypeAlias = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send_recv"]


class Part(Enum):
    """The kinds of data that a rank passes to a collective, or receives from it."""

    TENSOR = "the whole tensor"
    BLOCK = "one block"
    BLOCKS = "a block for each rank"


class Participants(Enum):
    """A set of ranks: those with an input of a collective, or those with an output."""

    ALL = "all"
    ROOT = "the root"
    NOT_ROOT = "all but the root"
    NOT_FIRST = "all but rank 0"

    def include(self, rank: int, root: int | None) -> bool:
        """Return whether `rank` belongs to this set of ranks."""
        if self is Participants.NOT_FIRST:
            return rank != 0
        return self is Participants.ALL or (rank == root) is (self is Participants.ROOT)


class Method(Enum):
    """The ways to carry out a collective."""

    PROGRAM = "the program of one of its algorithms"
    STEPS = "operations in sequence, each chosen by the results of the steps before"
    PARCELS = "parcels of bytes, whose sizes only their senders know"
    MESSAGES = "messages between two ranks"


class Spec(NamedTuple):
    """The properties of one collective.

    Attributes:
        kind: its name. In capitals, it is the op name of its operations.
        input, output: input and output of a rank; None without data.
        senders, receivers: the ranks with an input, and those with an output.
        reduces: True if the collective has a reduce op.
        private: True if only the two ends of a message know its count. Otherwise, all ranks know all counts.
        native: the native call of a device library; None if there is none.
        method: the way to carry out the collective.
        sized: True if the number of bytes follows from the signature and the shape of the main array.
        recordable: True if a coalescing block can record the collective.
    """

    kind: str
    input: Part | None = None
    output: Part | None = None
    senders: Participants = Participants.ALL
    receivers: Participants = Participants.ALL
    reduces: bool = False
    private: bool = False
    native: Native | None = None
    method: Method = Method.PROGRAM
    sized: bool = True
    recordable: bool = True

    @property
    def rooted(self) -> bool:
        """Return whether the collective has a root."""
        return Participants.ROOT in (self.senders, self.receivers)

    @property
    def in_blocks(self) -> bool:
        """Return whether input or output consists of one buffer per rank."""
        return Part.BLOCKS in (self.input, self.output)

    def inputs(self, rank: int, size: int, root: int | None) -> tuple[int, ...]:
        """Return the numbers of the buffers that `rank` of `size` ranks reads."""
        return _numbers(self.input, size) if self.senders.include(rank, root) else ()

    def outputs(self, rank: int, size: int, root: int | None) -> tuple[int, ...]:
        """Return the numbers of the buffers that `rank` of `size` ranks writes. An in-place buffer is also an input."""
        if not self.receivers.include(rank, root):
            return ()
        numbers = _numbers(self.output, size)
        return tuple(number + size for number in numbers) if self._both else numbers

    def peer(self, buffer: int, size: int, root: int | None) -> int:
        """Return the peer that sends or receives the block in `buffer`, and so knows its number of elements."""
        return root or 0 if buffer == size and not self._both else buffer % size

    def lengths(self, sizes: Sequence[Counts], rank: int, root: int | None) -> tuple[Counts, Counts]:
        """Return the numbers of elements sent to and received from each rank; () and () if all counts are public.

        Args:
            sizes: the sizes that `build` accepts. A rank other than the root only knows its own count.
            rank: the rank.
            root: the root.
        """
        if not self.private:
            return (), ()
        if self._both:
            return sizes[0], sizes[1]
        counts = sizes[0]
        if rank != root:
            counts = tuple(counts[rank] if each == root else 0 for each in range(len(counts)))
        return (counts, ()) if (rank == root) == (self.input is Part.BLOCKS) else ((), counts)

    def counts(
        self, agreed: Counts, sends: Counts, receives: Counts, rank: int, root: int | None
    ) -> tuple[int | None, ...]:
        """Return the number of elements of each buffer; None for a buffer that `rank` does not have.

        Args:
            agreed: the counts that all ranks know.
            sends: counts of sends to each rank that only the ends of a message know, as returned by `lengths`.
            receives: counts of receives from each rank.
            rank: the rank.
            root: the root.
        """
        if not self.private:
            return (*agreed, agreed[rank]) if self.in_blocks else agreed
        if self._both:
            return (*sends, *receives)
        known = sends or receives
        return (*known, known[rank]) if rank == root else (*(None,) * len(known), known[root or 0])

    def sizes(self, counts: Sequence[int | None], rank: int) -> tuple[Any, ...]:
        """Return the `sizes` argument of `build` for these numbers of elements per buffer. The inverse of `counts`."""
        if not self.in_blocks:
            return tuple(counts)
        if self._both:
            half = len(counts) // 2
            return tuple(counts[:half]), tuple(counts[half:])
        *blocks, own = counts
        return (tuple(own if each == rank else count or 0 for each, count in enumerate(blocks)),)

    @property
    def _both(self) -> bool:
        """Return whether both input and output consist of one buffer per rank."""
        return self.input is self.output is Part.BLOCKS


def spec_of(kind: str) -> Spec:
    """Return the table entry of a collective.

    Raises:
        ValueError: `kind` is unknown.
    """
    spec = SPECS.get(kind)
    if spec is None:
        raise ValueError(f"kind={kind!r} is not a collective; use one of {', '.join(spec.kind for spec in PROGRAMS)}")
    return spec


def _numbers(part: Part | None, size: int) -> tuple[int, ...]:
    first, stop = {None: (0, 0), Part.TENSOR: (0, 1), Part.BLOCK: (size, size + 1), Part.BLOCKS: (0, size)}[part]
    return tuple(range(first, stop))


#: The collectives that ranks carry out with a `Program` of sends, receives and reductions.
PROGRAMS: tuple[Spec, ...] = (
    Spec("allreduce", Part.TENSOR, Part.TENSOR, reduces=True, native="all_reduce"),
    Spec("reduce", Part.TENSOR, Part.TENSOR, receivers=Participants.ROOT, reduces=True, native="reduce"),
    Spec("reduce_scatter", Part.BLOCKS, Part.BLOCK, reduces=True, native="reduce_scatter"),
    Spec("allgather", Part.BLOCK, Part.BLOCKS, native="all_gather"),
    Spec(
        "broadcast",
        Part.TENSOR,
        Part.TENSOR,
        senders=Participants.ROOT,
        receivers=Participants.NOT_ROOT,
        native="broadcast",
    ),
    Spec("gather", Part.BLOCK, Part.BLOCKS, receivers=Participants.ROOT, private=True, native="send_recv"),
    Spec("scatter", Part.BLOCKS, Part.BLOCK, senders=Participants.ROOT, private=True, native="send_recv"),
    Spec("alltoall", Part.BLOCKS, Part.BLOCKS, private=True, native="send_recv"),
    Spec("barrier"),
    Spec("monitored_barrier"),
    Spec("scan", Part.TENSOR, Part.TENSOR, reduces=True),
    Spec("exscan", Part.TENSOR, Part.TENSOR, receivers=Participants.NOT_FIRST, reduces=True),
)

_ALL, _ROOT, _NOT_ROOT = Participants.ALL, Participants.ROOT, Participants.NOT_ROOT

_OTHERS: tuple[Spec, ...] = (
    # Collectives on sparse arrays.
    Spec("allreduce_sparse", Part.TENSOR, Part.TENSOR, reduces=True, method=Method.STEPS, sized=False),
    Spec("reduce_sparse", Part.TENSOR, Part.TENSOR, _ALL, _ROOT, reduces=True, method=Method.STEPS, sized=False),
    Spec("broadcast_sparse", Part.TENSOR, Part.TENSOR, _ROOT, _NOT_ROOT, method=Method.STEPS, sized=False),
    Spec("allgather_sparse", Part.BLOCK, Part.BLOCKS, method=Method.STEPS, sized=False),
    Spec("gather_sparse", Part.BLOCK, Part.BLOCKS, _ALL, _ROOT, method=Method.STEPS, sized=False),
    Spec("send_sparse", method=Method.MESSAGES, sized=False),
    Spec("recv_sparse", method=Method.MESSAGES, sized=False),
    # Collectives that allocate their outputs, whose sizes follow from the counts of all ranks.
    Spec("allgather_allocated", Part.BLOCK, Part.BLOCKS, method=Method.STEPS),
    # Collectives on objects.
    Spec("broadcast_object", Part.TENSOR, Part.TENSOR, _ROOT, _NOT_ROOT, method=Method.PARCELS, sized=False),
    Spec("allgather_object", Part.BLOCK, Part.BLOCKS, method=Method.PARCELS, sized=False),
    Spec("gather_object", Part.BLOCK, Part.BLOCKS, _ALL, _ROOT, method=Method.PARCELS, sized=False),
    Spec("scatter_object", Part.BLOCKS, Part.BLOCK, _ROOT, _ALL, method=Method.PARCELS, sized=False),
    Spec("alltoall_object", Part.BLOCKS, Part.BLOCKS, method=Method.PARCELS, sized=False),
    # Exchanges of array faces, one axis after the other: the messages of an axis start when the previous axis is
    # complete.
    Spec("halo", Part.TENSOR, Part.TENSOR, method=Method.MESSAGES, recordable=False),
)

SPECS: Mapping[str, Spec] = MappingProxyType({spec.kind: spec for spec in (*PROGRAMS, *_OTHERS)})
