"""Programs: the actions of one rank in one collective, as plain data.

A `Program` is a small dataflow graph. Its actions name regions of buffers in elements, and use neither I/O nor a clock.
An executor starts every action whose `after` actions are complete. Actions that `follow` others start as soon as those
have made progress. They may process as many elements as all followed actions have finished. That is how a rank forwards
a segment while the next one arrives.

Between two ranks, `step` identifies messages: the k-th message from a to b in an operation has step k on both sides. A
message may be cut into segments of any size, which arrive in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Action", "ActionKind", "Program", "Region"]


class ActionKind(IntEnum):
    """The kinds of actions in a program."""

    SEND = 0
    """Send `region` to `peer`."""
    RECV = 1
    """Receive from `peer` into `region`."""
    COMBINE = 2
    """Receive from `peer` and reduce on arrival: region = f(incoming, sources[0]), or f(sources[0], incoming)."""
    FOLD = 3
    """Local: region = f(sources[0], sources[1], ...) in that order."""
    COPY = 4
    """Local: region = sources[0]."""
    SCALE = 5
    """Local: region = sources[0] times the factor of the op (PREMUL_SUM)."""


@dataclass(frozen=True, slots=True)
class Region:
    """The elements `start` to `stop` of the buffer with the number `buffer`."""

    buffer: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """The number of elements in the region."""
        return self.stop - self.start


class Action(NamedTuple):
    """An action of a program, such as a send or a copy, with the actions on which it depends.

    Attributes:
        verb: kind of the action.
        region: the data to send, or the destination.
        peer: the other rank of SEND, RECV and COMBINE; -1 for local actions.
        step: message number between this pair of ranks in this direction, from 0.
        sources: inputs of COMBINE (one), FOLD (in rank order), COPY and SCALE (one), each as long as `region`.
        incoming_first: for COMBINE, True if the incoming operand is the left one, which comes from lower ranks.
        final: True if the result in `region` is complete and the op finalizes it (AVG divides). True for every FOLD.
        after: indices of actions that must be complete before this one may start.
        follow: actions with equally long regions whose progress limits the progress of this one.
    """

    verb: ActionKind
    region: Region
    peer: int = -1
    step: int = 0
    sources: tuple[Region, ...] = ()
    incoming_first: bool = True
    final: bool = False
    after: tuple[int, ...] = ()
    follow: tuple[int, ...] = ()


class Program(NamedTuple):
    """The actions of one rank in one collective.

    Attributes:
        actions: the nodes. `after` and `follow` refer to smaller indices only.
        scratch: sizes of the scratch buffers in elements. They are numbered after the user's buffers.
        algorithm: name of the algorithm, for the flight recorder and the benchmarks.
    """

    actions: tuple[Action, ...]
    scratch: tuple[int, ...] = ()
    algorithm: str = "local"
