"""Builder of `Program` objects: numbers the messages, omits empty messages, and returns the indices of added actions.

Every method returns the indices of the actions that it has added, as a tuple. The tuple is empty for an empty region,
so results can be concatenated and passed as `after` or `follow` without a special case for empty chunks. Both ends of a
message know its length, so both omit an empty one.
"""

from __future__ import annotations

from typing import TypeAlias

from aiocoll.algorithms.program import Action, ActionKind, Program, Region

__all__ = ["Builder", "Deps", "chunks", "single_rank_reduction"]

Deps: TypeAlias = tuple[int, ...]
"""Indices of the actions in a program on which another action depends."""

_EMPTY = Region(0, 0, 0)


def chunks(count: int, parts: int, buffer: int = 0) -> list[Region]:
    """Divide `count` elements of a buffer into `parts` consecutive regions whose lengths differ by at most 1."""
    bounds = [part * count // parts for part in range(parts + 1)]
    return [Region(buffer, bounds[part], bounds[part + 1]) for part in range(parts)]


class Builder:
    """The program of one rank while it is being built.

    Args:
        buffers: number of the user's buffers. Scratch buffers get the following numbers.
    """

    __slots__ = ("_actions", "_buffers", "_received", "_scratch", "_sent")

    def __init__(self, buffers: int) -> None:
        self._buffers = buffers
        self._actions: list[Action] = []
        self._scratch: list[int] = []
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def scratch(self, count: int) -> int:
        """Add a scratch buffer of `count` elements to the program; return its number."""
        self._scratch.append(count)
        return self._buffers + len(self._scratch) - 1

    def send(self, peer: int, region: Region, after: Deps = (), follow: Deps = ()) -> Deps:
        """Add an action that sends `region` to `peer`."""
        if region.count == 0:
            return ()
        step = _next(self._sent, peer)
        return self._add(Action(ActionKind.SEND, region, peer, step, (), True, False, after, follow))

    def recv(self, peer: int, region: Region, after: Deps = ()) -> Deps:
        """Add an action that receives data from `peer` into `region`."""
        if region.count == 0:
            return ()
        step = _next(self._received, peer)
        return self._add(Action(ActionKind.RECV, region, peer, step, (), True, False, after))

    def combine(
        self,
        peer: int,
        region: Region,
        source: Region,
        *,
        incoming_first: bool = True,
        final: bool = False,
        after: Deps = (),
    ) -> Deps:
        """Add an action that reduces data arriving from `peer` with `source` and writes the result to `region`."""
        if region.count == 0:
            return ()
        step = _next(self._received, peer)
        return self._add(Action(ActionKind.COMBINE, region, peer, step, (source,), incoming_first, final, after))

    def fold(self, region: Region, sources: tuple[Region, ...], after: Deps = (), follow: Deps = ()) -> Deps:
        """Add an action that reduces `sources`, in the given order, and writes the result to `region`."""
        if region.count == 0:
            return ()
        return self._add(Action(ActionKind.FOLD, region, -1, 0, sources, True, True, after, follow))

    def copy(self, region: Region, source: Region, after: Deps = (), follow: Deps = ()) -> Deps:
        """Add an action that copies `source` to `region`."""
        if region.count == 0:
            return ()
        return self._add(Action(ActionKind.COPY, region, -1, 0, (source,), True, False, after, follow))

    def signal(self, peer: int, after: Deps = ()) -> Deps:
        """Add an action that sends an empty message to `peer`."""
        step = _next(self._sent, peer)
        return self._add(Action(ActionKind.SEND, _EMPTY, peer, step, (), True, False, after))

    def await_signal(self, peer: int) -> Deps:
        """Add an action that waits for an empty message from `peer`."""
        return self._add(Action(ActionKind.RECV, _EMPTY, peer, _next(self._received, peer)))

    def program(self, algorithm: str) -> Program:
        """Return the finished program."""
        return Program(tuple(self._actions), tuple(self._scratch), algorithm)

    def _add(self, action: Action) -> Deps:
        self._actions.append(action)
        return (len(self._actions) - 1,)


def single_rank_reduction(region: Region, source: Region, buffers: int = 1) -> Program:
    """Return the program of a reduction in a group of one rank: only the op's final step is applied to the input."""
    build = Builder(buffers)
    build.fold(region, (source,))
    return build.program("local")


def _next(steps: dict[int, int], peer: int) -> int:
    step = steps.get(peer, 0)
    steps[peer] = step + 1
    return step
