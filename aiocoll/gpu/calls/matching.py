"""Rank 0's grouping of messages between devices: which start together in one NCCL group, and when.

A message is matched once both ends have made their calls. Before that, NCCL would block either end. The receiver
reports each match to rank 0. Rank 0 numbers the message on both ends, in one order with all other NCCL calls, so no two
ranks wait for each other. The messages of a `batch` form one group of NCCL calls. The group starts once the whole batch
is matched, and all batches at the other ends of its messages:

    rank 0  batch: send to 1, receive from 2
    rank 1  batch: send to 2, receive from 0        three messages, one number on each rank
    rank 2  batch: send to 0, receive from 1

A program that ends without batches must not hang with batches. So after `MAX_WAIT`, matched messages start without the
rest.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["BatchMatching", "Match", "MessageBatch"]

#: Maximum seconds for which matched messages wait until the rest of their batch is matched.
MAX_WAIT = 0.02


class Match(NamedTuple):
    """A matched message between devices: its receiver has posted a receive for it.

    Attributes:
        src: rank that sends it.
        dst: rank that receives it.
        number: id of the message at its sender.
    """

    src: int
    dst: int
    number: int


class MessageBatch(NamedTuple):
    """A `batch` call of one rank: the sends and receives that this rank starts together.

    Attributes:
        rank: rank of that end.
        number: number of the batch on that rank.
        size: number of messages in the batch that may go from device to device.
    """

    rank: int
    number: int
    size: int


class BatchMatching:
    """Rank 0's table of messages that are matched, but wait for the rest of their batches.

    Args:
        begin: starts messages together, in the given order.
        call_later: calls a function after a number of seconds.
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
        """Record a matched message with its batch on each side. A message alone in its batch counts as unbatched."""
        unit = self._joined([batch for batch in batches if batch.size > 1])
        unit.matches.append(match)
        if unit.timer is None and unit.left:
            unit.timer = self._call_later(MAX_WAIT, lambda: self._stop_waiting(unit))
        self._settle(unit)

    def record_uncarried(self, batch: MessageBatch) -> None:
        """Record that one message of `batch` is staged, so that the batch does not wait for it."""
        if batch.size > 1:
            self._settle(self._joined([batch]))

    def clear(self) -> None:
        """Forget all waiting messages, because the group has ended."""
        for unit in self._units.values():
            unit.stop()
        self._units.clear()

    def _joined(self, batches: Sequence[MessageBatch]) -> _Unit:
        """Merge the units of `batches` into one unit, count one message of each batch as known, return the unit."""
        unit = _Unit()
        for batch in batches:
            other = self._units.get(batch[:2])
            if other is None:
                self._units[batch[:2]] = unit
                unit.batches.append(batch[:2])
                unit.left += batch.size
            elif other is not unit:
                # Move the batches of the smaller unit, so that each batch is moved only when the size of its unit
                # doubles.
                unit, other = (other, unit) if len(other.batches) > len(unit.batches) else (unit, other)
                unit.take(other)
                self._units.update(dict.fromkeys(other.batches, unit))
        unit.left -= len(batches)
        return unit

    def _settle(self, unit: _Unit) -> None:
        """Start the messages of `unit` if all messages of its batches are matched or staged."""
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
    """Several batches that must start together, because messages connect them.

    Attributes:
        batches: rank and number of each batch.
        matches: matched messages that wait.
        left: number of messages of the batches that are not known yet.
        timer: ends the wait.
    """

    __slots__ = ("batches", "left", "matches", "timer")

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.matches: list[Match] = []
        self.left = 0
        self.timer: TimerHandle | None = None

    def take(self, other: _Unit) -> None:
        """Move all batches and messages of the unit `other` into this unit."""
        self.batches += other.batches
        self.matches += other.matches
        self.left += other.left
        other.stop()

    def stop(self) -> None:
        """Cancel the timer that limits how long matched messages wait."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
