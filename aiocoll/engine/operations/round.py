"""A program of one round, sorted by what an executor of slots does when."""

from __future__ import annotations

from typing import NamedTuple

from aiocoll.algorithms.program import Action, Program, Region, Verb

__all__ = ["Contribution", "Round", "Take"]


class Contribution(NamedTuple):
    """A region that this rank posts once.

    Attributes:
        region: the elements.
        readers: the ranks that read it.
    """

    region: Region
    readers: tuple[int, ...]


class Take(NamedTuple):
    """A contribution that this rank reads.

    Attributes:
        peer: the rank that posts it.
        nbytes: its length.
        region: the elements that it is copied to, unless it is folded.
    """

    peer: int
    nbytes: int
    region: Region


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
    def of(cls, program: Program, itemsize: int, *, private: bool = False) -> Round:
        """Sort the actions of a program whose elements have `itemsize` bytes.

        Raises:
            ValueError: the program has more than one round.
        """
        copies: list[tuple[Region, Region]] = []
        first: list[Action] = []
        last: list[Action] = []
        takes: list[Take] = []
        fold: Action | None = None
        for action in program.actions:
            waits = bool(action.after or action.follow)
            if action.verb is Verb.SEND:
                (last if waits else first).append(action)
            elif action.verb is Verb.RECV and not action.step and not last:
                takes.append(Take(action.peer, action.region.count * itemsize, action.region))
            elif action.verb is Verb.FOLD and fold is None:
                fold = action
            elif action.verb is Verb.COPY and not waits:
                copies.append((action.region, action.sources[0]))
            else:
                raise ValueError(f"algorithm={program.algorithm!r} has more than one round: {action}")
        takes.sort(key=lambda take: take.peer)  # a mismatch names the lowest rank that differs
        index = {take.region: number for number, take in enumerate(takes)}
        sources = () if fold is None else tuple(index.get(source, source) for source in fold.sources)
        region = None if fold is None else fold.region
        return cls(tuple(copies), _posted(first), tuple(takes), region, sources, _posted(last), private)


def _posted(sends: list[Action]) -> tuple[Contribution, ...]:
    readers: dict[Region, list[int]] = {}
    for action in sends:
        readers.setdefault(action.region, []).append(action.peer)
    return tuple(Contribution(region, tuple(peers)) for region, peers in readers.items())
