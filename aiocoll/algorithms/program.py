"""What one rank does in one collective, as plain data.

A `Program` is a small dataflow graph. Its actions name regions of buffers in elements; they do no I/O and know no
clock. An executor starts every action whose `after` actions are complete. Actions that `follow` others are started as
soon as those have progressed: they may run up to the smallest number of elements that all of them have finished, which
is how a segment is forwarded while the next one is still arriving.

Between two ranks, messages are told apart by `step`: the k-th message from a to b in this operation has step k on
both sides. A message may be cut into segments of any size on its way; its segments arrive in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Action", "Program", "Region", "Verb"]


class Verb(IntEnum):
    """The things a rank can do."""

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
    """Elements `start` to `stop` of buffer number `buffer`."""

    buffer: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class Action(NamedTuple):
    """One node of the graph.

    Attributes:
        verb: what to do.
        region: the data sent, or the place written.
        peer: the other rank of SEND, RECV and COMBINE; -1 for local actions.
        step: message number between this pair in this direction, from 0.
        sources: inputs of COMBINE (one), FOLD (in rank order), COPY and SCALE (one), each as long as `region`.
        incoming_first: COMBINE: whether the incoming operand is the left one (comes from lower ranks).
        final: the result is complete in `region` and gets the op's last touch (AVG divides). A FOLD is always final.
        after: actions (by index) that must be complete before this one may start.
        follow: actions with equally long regions whose progress bounds the progress of this one.
    """

    verb: Verb
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
        actions: nodes; `after` and `follow` point to smaller indices only.
        scratch: sizes in elements of the scratch buffers; they are numbered after the user's buffers.
        algorithm: name of the algorithm, for the recorder and the benchmarks.
    """

    actions: tuple[Action, ...]
    scratch: tuple[int, ...] = ()
    algorithm: str = "local"
