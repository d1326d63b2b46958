"""A program of one round, sorted by what an executor of slots does when."""

from __future__ import annotations

from typing import NamedTuple

from aiocoll.algorithms.program import Action, Program, Region, Verb
from aiocoll.algorithms.select import Lanes
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS

__all__ = ["Contribution", "Round", "Take", "slots_of"]


class Contribution(NamedTuple):
    """A region that this rank posts once.

    Attributes:
        region: the elements.
        readers: the ranks that read it.
        is_common: it goes through the common lane; if not, through the lane of its one reader.
        first_slot, slots: the first of the slots that it may take, and how many there are.
    """

    region: Region
    readers: tuple[int, ...]
    is_common: bool
    first_slot: int
    slots: int


class Take(NamedTuple):
    """A contribution that this rank reads.

    Attributes:
        peer: the rank that posts it.
        nbytes: its length.
        region: the elements that it is copied to, unless it is folded.
        is_common, first_slot, slots: as of a `Contribution`.
    """

    peer: int
    nbytes: int
    region: Region
    is_common: bool
    first_slot: int
    slots: int


class Round(NamedTuple):
    """A program in which each rank posts, reads at most one contribution of each peer, and perhaps posts the result.

    Attributes:
        copies: target and source of each local copy.
        first: contributions posted at the start.
        takes: contributions that this rank reads, by ascending rank.
        fold: the region that is reduced into; None if contributions are copied.
        sources: what is folded, in order: an index into `takes`, or a region of this rank.
        last: contributions posted at the end.
        private: only the two ends of a contribution know its length, so that the fingerprint does not have it.
    """

    copies: tuple[tuple[Region, Region], ...]
    first: tuple[Contribution, ...]
    takes: tuple[Take, ...]
    fold: Region | None
    sources: tuple[int | Region, ...]
    last: tuple[Contribution, ...]
    private: bool

    @classmethod
    def of(cls, program: Program, itemsize: int, lanes: Lanes, small: int, *, private: bool = False) -> Round:
        """Sort the actions of a program.

        Args:
            program: of one round.
            itemsize: bytes of its elements.
            lanes: the lanes of its posts.
            small: bytes of the longest contribution that fits into a small slot.
            private: see `Round`.

        Raises:
            ValueError: the program has more than one round.
        """
        copies: list[tuple[Region, Region]] = []
        first: list[Action] = []
        last: list[Action] = []
        received: list[Action] = []
        fold: Action | None = None
        for action in program.actions:
            waits = bool(action.after or action.follow)
            if action.verb is Verb.SEND:
                (last if waits else first).append(action)
            elif action.verb is Verb.RECV and not action.step and not last:
                received.append(action)
            elif action.verb is Verb.FOLD and fold is None:
                fold = action
            elif action.verb is Verb.COPY and not waits:
                copies.append((action.region, action.sources[0]))
            else:
                raise ValueError(f"algorithm={program.algorithm!r} has more than one round: {action}")
        # A rank that posts no result may read that of another one.
        is_common = lanes.first if last else lanes.last
        takes = []
        for action in sorted(received, key=lambda action: action.peer):  # a mismatch names the lowest rank that differs
            nbytes = action.region.count * itemsize
            takes.append(Take(action.peer, nbytes, action.region, is_common, *slots_of(nbytes, small)))
        index = {take.region: number for number, take in enumerate(takes)}
        sources = () if fold is None else tuple(index.get(source, source) for source in fold.sources)
        region = None if fold is None else fold.region
        first_posts, last_posts = (
            _posted(first, itemsize, lanes.first, small),
            _posted(last, itemsize, lanes.last, small),
        )
        return cls(tuple(copies), first_posts, tuple(takes), region, sources, last_posts, private)


def slots_of(nbytes: int, small: int) -> tuple[int, int]:
    """Return the first of the slots that a contribution of `nbytes` may take, and how many there are."""
    return (0, SMALL_SLOTS) if nbytes <= small else (SMALL_SLOTS, MIDDLE_SLOTS)


def _posted(sends: list[Action], itemsize: int, is_common: bool, small: int) -> tuple[Contribution, ...]:
    readers: dict[Region, list[int]] = {}
    for action in sends:
        readers.setdefault(action.region, []).append(action.peer)
    return tuple(
        Contribution(region, tuple(peers), is_common, *slots_of(region.count * itemsize, small))
        for region, peers in readers.items()
    )
