"""As rank 0: when messages from device to device begin, and which of them as one.

A message is matched when both of its ends have been called; NCCL would block either of them before. Each is told here,
and by number begins on both its ends in one order with all else that NCCL does, so that no two ranks wait for each
other. What the calls of a `batch` send and receive is one group of NCCL calls: it waits until all of the batch is
matched, and for all batches at the other ends of its messages, too:

    rank 0  batch: send to 1, receive from 2
    rank 1  batch: send to 2, receive from 0        three messages, one number on each rank
    rank 2  batch: send to 0, receive from 1

No order of calls that ends without batches may hang with them: after `PATIENCE`, what is matched begins without the
rest.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["BatchMatching", "Match", "MessageBatch"]

#: Seconds that messages of a batch which are matched wait for the others.
PATIENCE = 0.02


class Match(NamedTuple):
    """A message that is matched.

    Attributes:
        src: rank that sends it.
        dst: rank that receives it.
        number: its id at its sender.
    """

    src: int
    dst: int
    number: int


class MessageBatch(NamedTuple):
    """What one end of a message was called with.

    Attributes:
        rank: where.
        number: of the batch there.
        size: how many messages of it may go from device to device.
    """

    rank: int
    number: int
    size: int


class BatchMatching:
    """All of a group that have not begun.

    Args:
        begin: called with messages that begin as one, in their order.
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
        """Both ends of a message have been called, as parts of these batches; one of size 1 is none."""
        unit = self._joined([batch for batch in batches if batch.size > 1])
        unit.matches.append(match)
        if unit.timer is None and unit.left:
            unit.timer = self._call_later(PATIENCE, lambda: self._stop_waiting(unit))
        self._settle(unit)

    def without(self, batch: MessageBatch) -> None:
        """A message of a batch goes another way."""
        if batch.size > 1:
            self._settle(self._joined([batch]))

    def clear(self) -> None:
        """None of them will begin."""
        for unit in self._units.values():
            unit.stop()
        self._units.clear()

    def _joined(self, batches: Sequence[MessageBatch]) -> _Unit:
        """Return what all of these batches are one unit of from now on, one message of each being known."""
        unit = _Unit()
        for batch in batches:
            other = self._units.get(batch[:2])
            if other is None:
                self._units[batch[:2]] = unit
                unit.batches.append(batch[:2])
                unit.left += batch.size
            elif other is not unit:
                # Into the larger one: each batch is moved as often as its unit has doubled.
                unit, other = (other, unit) if len(other.batches) > len(unit.batches) else (unit, other)
                unit.take(other)
                self._units.update(dict.fromkeys(other.batches, unit))
        unit.left -= len(batches)
        return unit

    def _settle(self, unit: _Unit) -> None:
        """Begin what is complete."""
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
    """Batches that messages connect.

    Attributes:
        batches: rank and number of each.
        matches: messages that are matched and wait.
        left: how many of the batches' ends are not known.
        timer: ends the wait.
    """

    __slots__ = ("batches", "left", "matches", "timer")

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.matches: list[Match] = []
        self.left = 0
        self.timer: TimerHandle | None = None

    def take(self, other: _Unit) -> None:
        """Become one with another."""
        self.batches += other.batches
        self.matches += other.matches
        self.left += other.left
        other.stop()

    def stop(self) -> None:
        """Wait no more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
