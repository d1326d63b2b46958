"""Hosts of a group: the teams of ranks that share a host, for two-level algorithms.

The ranks of a host, in rank order, are its team. A team's first rank is its leader. Bytes between hosts travel in
lanes, as many as the largest team has ranks. On each host, one rank is the gate of a lane. If all teams have the same
size, every rank is the gate of one lane. In a smaller team, some ranks are gates of several lanes.

Hosts are numbered in the order of their lowest ranks, so all ranks that know the same teams use the same numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from aiocoll.algorithms.builder import Builder, Deps
from aiocoll.algorithms.program import ActionKind, Program, Region

__all__ = ["Hosts", "embed", "host_numbers"]


def host_numbers(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Return the host number of each rank, given the names of their hosts. Rank 0 is on host 0."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


class Hosts:
    """The hosts of a group, each with its team of ranks.

    Args:
        numbers: host number of each rank, as returned by `host_numbers`.

    Attributes:
        host: host number of each rank.
        teams: ranks of each host, ascending.
        place: index of each rank in its team.
        leaders: lowest rank of each host.
        lanes: size of the largest team.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        teams: list[list[int]] = [[] for _ in set(numbers)]
        for rank, number in enumerate(numbers):
            teams[number].append(rank)
        self.host = tuple(numbers)
        self.teams = tuple(tuple(team) for team in teams)
        self.place = tuple(self.teams[number].index(rank) for rank, number in enumerate(numbers))
        self.leaders = tuple(team[0] for team in self.teams)
        self.lanes = max(len(team) for team in self.teams)

    def gates(self, lane: int) -> list[int]:
        """Return the gate of `lane` on each host: the rank that carries the lane between hosts."""
        return [team[lane * len(team) // self.lanes] for team in self.teams]

    def counterparts(self, rank: int) -> list[int]:
        """Return the ranks that carry the lane of `rank`: one rank per host, and `rank` itself on its own host."""
        place, size = self.place[rank], len(self.teams[self.host[rank]])
        return [team[place * len(team) // size] for team in self.teams]

    def rotated_team(self, rank: int) -> list[int]:
        """Return the ranks of `rank`'s host, rotated so that `rank` is first."""
        team, place = self.teams[self.host[rank]], self.place[rank]
        return [*team[place:], *team[:place]]

    def rotated_hosts(self, host: int) -> list[int]:
        """Return all host numbers, rotated so that `host` is first."""
        return [(host + step) % len(self.teams) for step in range(len(self.teams))]


def embed(
    build: Builder,
    program: Program,
    peers: Sequence[int],
    buffers: Sequence[Region],
    *,
    after: Deps = (),
    follow: Deps = (),
    final: bool = True,
) -> Deps:
    """Add the program of a smaller group, such as the ranks of one host, to the program of the whole group.

    Args:
        build: builder of the larger program.
        program: program of the smaller group.
        peers: by rank of the smaller group, its rank in the larger group.
        buffers: the region of each of the user's buffers of `program`.
        after: actions to be complete before the first ones of `program`.
        follow: actions that the first sends of `program` follow. Each is as long as these sends.
        final: if True, the op finalizes the results. If False, they stay partial, and `program` must not fold.

    Returns:
        All added actions.
    """
    places = [*buffers, *(Region(build.scratch(count), 0, count) for count in program.scratch)]
    written: list[Deps] = []

    def moved(region: Region) -> Region:
        place = places[region.buffer]
        return Region(place.buffer, place.start + region.start, place.start + region.stop)

    def new_indices(indices: Deps) -> Deps:
        return tuple(new for index in indices for new in written[index])

    for action in program.actions:
        if action.region.count == 0:  # an action of a barrier, which shows that all of `after` are complete
            is_send = action.verb is ActionKind.SEND
            peer = peers[action.peer]
            written.append(
                build.signal(peer, after + new_indices(action.after)) if is_send else build.await_signal(peer)
            )
            continue
        first = not action.after and not action.follow
        earlier = after if first else new_indices(action.after)
        region, sources = moved(action.region), tuple(moved(source) for source in action.sources)
        match action.verb:
            case ActionKind.SEND:
                leads = follow if first else new_indices(action.follow)
                written.append(build.send(peers[action.peer], region, after=earlier, follow=leads))
            case ActionKind.RECV:
                written.append(build.recv(peers[action.peer], region, after=earlier))
            case ActionKind.COMBINE:
                written.append(
                    build.combine(
                        peers[action.peer],
                        region,
                        sources[0],
                        incoming_first=action.incoming_first,
                        final=action.final and final,
                        after=earlier,
                    )
                )
            case ActionKind.FOLD:
                assert final
                written.append(build.fold(region, sources, after=earlier, follow=new_indices(action.follow)))
            case ActionKind.COPY if region == sources[0]:
                written.append(())  # no copy is needed: both buffers of the smaller group are the same region
            case _:
                written.append(build.copy(region, sources[0], after=earlier, follow=new_indices(action.follow)))
    return tuple(index for deps in written for index in deps)
