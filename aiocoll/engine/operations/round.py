"""Programs with one communication round: the actions of a program, sorted into the phases of `SlotProgram`."""

from __future__ import annotations

from typing import NamedTuple

from aiocoll.algorithms.program import Action, ActionKind, Program, Region
from aiocoll.algorithms.select import Lanes
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS

__all__ = ["Contribution", "Round", "Take", "slots_of"]


class Contribution(NamedTuple):
    """Data that this rank posts once, for one or more readers.

    Attributes:
        buffer: number of the array.
        nbytes: length of the data. If it is 0, the array may be missing.
        readers: the ranks that read the data.
        is_common: True for the common lane, False for the lane of the only reader.
        first_slot, slots: the first of the slots that the data may take, and their number.
    """

    buffer: int
    nbytes: int
    readers: tuple[int, ...]
    is_common: bool
    first_slot: int
    slots: int


class Take(NamedTuple):
    """A contribution of another rank that this rank reads.

    Attributes:
        peer: the rank that posts the contribution.
        nbytes, elements: length of the contribution.
        is_common, first_slot, slots: the same as in `Contribution`.
    """

    peer: int
    nbytes: int
    elements: int
    is_common: bool
    first_slot: int
    slots: int


class Round(NamedTuple):
    """A program in which each rank posts data, reads at most one contribution per peer, and may post the result.

    The program uses whole arrays, numbered like its buffers.

    Attributes:
        copies: target and source of each local copy.
        first: contributions posted at the start.
        takes: contributions that this rank reads, by ascending rank.
        fold: the array that receives the reduction; None if the program reduces nothing.
        own: index in rank order and array number of this rank's own contribution to the reduction.
        moves: index in `takes` and target array of each contribution that is copied.
        last: contributions posted at the end.
        private: True if only the two ends of a contribution know its length. The fingerprint does not cover it then.
    """

    copies: tuple[tuple[int, int], ...]
    first: tuple[Contribution, ...]
    takes: tuple[Take, ...]
    fold: int | None
    own: tuple[tuple[int, int], ...]
    moves: tuple[tuple[int, int], ...]
    last: tuple[Contribution, ...]
    private: bool

    @classmethod
    def of(cls, program: Program, itemsize: int, lanes: Lanes, small: int, *, private: bool = False) -> Round:
        """Sort the actions of a program into the phases of a round.

        Args:
            program: a program of one round.
            itemsize: bytes per element.
            lanes: the lanes of its posts.
            small: bytes of the longest contribution that fits into a small slot.
            private: see `Round`.

        Raises:
            ValueError: the program has more than one round, or uses a part of an array.
        """
        copies: list[tuple[int, int]] = []
        first: list[Action] = []
        last: list[Action] = []
        received: list[Action] = []
        fold: Action | None = None
        for action in program.actions:
            waits = bool(action.after or action.follow)
            if action.verb is ActionKind.SEND:
                (last if waits else first).append(action)
            elif action.verb is ActionKind.RECV and not action.step and not last:
                received.append(action)
            elif action.verb is ActionKind.FOLD and fold is None:
                fold = action
            elif action.verb is ActionKind.COPY and not waits:
                if action.region.count:
                    copies.append((_buffer_of(action.region), _buffer_of(action.sources[0])))
            else:
                raise ValueError(f"algorithm={program.algorithm!r} has more than one round: {action}")
        # If this rank posts no result, it may read another rank's result, which is in the lane for results.
        is_common = lanes.first if last else lanes.last
        received.sort(key=lambda action: action.peer)  # sort, so that an error names the lowest rank with a mismatch
        takes = []
        for action in received:
            nbytes = action.region.count * itemsize
            takes.append(Take(action.peer, nbytes, action.region.count, is_common, *slots_of(nbytes, small)))
        regions = [action.region for action in received]
        own: tuple[tuple[int, int], ...] = ()
        moves: tuple[tuple[int, int], ...] = ()
        target: int | None = None
        if fold is None:
            moves = tuple((number, _buffer_of(region)) for number, region in enumerate(regions) if region.count)
        elif fold.region.count:
            target = _buffer_of(fold.region)
            own = tuple(
                (number, _buffer_of(source)) for number, source in enumerate(fold.sources) if source not in regions
            )
            if [source for source in fold.sources if source in regions] != regions:
                raise ValueError(f"algorithm={program.algorithm!r} does not reduce in rank order: {fold}")
        first_posts, last_posts = (
            _posted(first, itemsize, lanes.first, small),
            _posted(last, itemsize, lanes.last, small),
        )
        return cls(tuple(copies), first_posts, tuple(takes), target, own, moves, last_posts, private)


def slots_of(nbytes: int, small: int) -> tuple[int, int]:
    """Return the range of slots for a contribution of `nbytes` bytes: the first slot, and the number of slots."""
    return (0, SMALL_SLOTS) if nbytes <= small else (SMALL_SLOTS, MIDDLE_SLOTS)


def _posted(sends: list[Action], itemsize: int, is_common: bool, small: int) -> tuple[Contribution, ...]:
    readers: dict[Region, list[int]] = {}
    for action in sends:
        readers.setdefault(action.region, []).append(action.peer)
    return tuple(
        Contribution(_buffer_of(region), nbytes, tuple(peers), is_common, *slots_of(nbytes, small))
        for region, peers in readers.items()
        for nbytes in [region.count * itemsize]
    )


def _buffer_of(region: Region) -> int:
    """Return the number of the array that a region covers; raise an error if the region is only a part of it."""
    if region.start:
        raise ValueError(f"a round uses whole arrays, not {region}")
    return region.buffer
