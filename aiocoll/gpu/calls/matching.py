"""As rank 0: when messages from device to device start, and which of them as one group of NCCL calls.

A message is matched when both of its ends have been called; before that, NCCL would block either end. Rank 0 is told
of each match and numbers it on both ends, in one order with all other NCCL calls, so that no two ranks wait for each
other. The messages of a `batch` are one group of NCCL calls: it starts when the whole batch is matched, and so are all
batches at the other ends of its messages:

    rank 0  batch: send to 1, receive from 2
    rank 1  batch: send to 2, receive from 0        three messages, one number on each rank
    rank 2  batch: send to 0, receive from 1

A program that terminates without batches must not hang with them: after `PATIENCE`, matched messages start without the
rest.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["BatchMatching", "Match", "MessageBatch"]

#: Seconds that the matched messages of a batch wait for the others.
PATIENCE = 0.02


class Match(NamedTuple):
    """A matched message.

    Attributes:
        src: rank that sends it.
        dst: rank that receives it.
        number: its id at its sender.
    """

    src: int
    dst: int
    number: int


class MessageBatch(NamedTuple):
    """The batch of one end of a message.

    Attributes:
        rank: of that end.
        number: of the batch there.
        size: how many of its messages may go from device to device.
    """

    rank: int
    number: int
    size: int


class BatchMatching:
    """The messages of a group that have not started.

    Args:
        begin: called with messages that start together, in order.
        call_later: calls after so many seconds.
    """

    def __init__(
        self,
        begin: Callable[[list[Match]], None],
        call_later: Callable[[float, Callable[[], None]], TimerHandle],
    ) -> None:
        self._begin = begin
        self._call_later = call_later
        self._units: dict[tuple[int, int], _Unit] = {}

    def matched(self, match: Match, batches: Sequence[MessageBatch]) -> None:
        """Both ends of a message have been called, as members of these batches; a batch of size 1 is none."""
        unit = self._joined([batch for batch in batches if batch.size > 1])
        unit.matches.append(match)
        if unit.timer is None and unit.left:
            unit.timer = self._call_later(PATIENCE, lambda: self._stop_waiting(unit))
        self._settle(unit)

    def without(self, batch: MessageBatch) -> None:
        """A message of a batch is carried in another way."""
        if batch.size > 1:
            self._settle(self._joined([batch]))

    def clear(self) -> None:
        """None of them will start."""
        for unit in self._units.values():
            unit.stop()
        self._units.clear()

    def _joined(self, batches: Sequence[MessageBatch]) -> _Unit:
        """Merge all of these batches into one unit, knowing one more message of each; return it."""
        unit = _Unit()
        for batch in batches:
            other = self._units.get(batch[:2])
            if other is None:
                self._units[batch[:2]] = unit
                unit.batches.append(batch[:2])
                unit.left += batch.size
            elif other is not unit:
                # Into the larger unit: each batch moves only as often as its unit doubles.
                unit, other = (other, unit) if len(other.batches) > len(unit.batches) else (unit, other)
                unit.take(other)
                self._units.update(dict.fromkeys(other.batches, unit))
        unit.left -= len(batches)
        return unit

    def _settle(self, unit: _Unit) -> None:
        """Start complete units."""
        if not unit.left:
            unit.stop()
            for batch in unit.batches:
                del self._units[batch]
            if unit.matches:
                self._begin(unit.matches)

    def _stop_waiting(self, unit: _Unit) -> None:
        unit.timer = None
        matches, unit.matches = unit.matches, []
        self._begin(matches)


class _Unit:
    """Batches connected by messages.

    Attributes:
        batches: rank and number of each.
        matches: matched messages that wait.
        left: number of the batches' ends that are not known.
        timer: ends the wait.
    """

    __slots__ = ("batches", "left", "matches", "timer")

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.matches: list[Match] = []
        self.left = 0
        self.timer: TimerHandle | None = None

    def take(self, other: _Unit) -> None:
        """Merge with another unit."""
        self.batches += other.batches
        self.matches += other.matches
        self.left += other.left
        other.stop()

    def stop(self) -> None:
        """Stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
