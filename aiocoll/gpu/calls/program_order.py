"""Program order of one rank's calls without keys. The calls are launched first, and compared later.

Each call has a position (1, 2, ...) and a hash of all calls up to it. The rank reports both to rank 0. One report
covers several positions if the rank calls fast. Rank 0 confirms the highest position at which the hashes of all ranks
are equal (`aiocoll.gpu.calls.pacing`):

    rank 1     launches 5; launches 6; launches 7;  "7, with this hash" ->      <- "all ranks have called 7"

A call is launched ahead if the same pair of consecutive calls has been confirmed before. Any other call waits until its
own position is confirmed. So only the first pass of a loop waits. Calls are launched in the order of their positions,
never beyond the position that rank 0 allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiocoll.gpu.calls.agreed import Agreed

__all__ = ["Entry", "ProgramOrder"]

#: Maximum number of calls per report to rank 0. The report at the end of a loop iteration may contain fewer calls.
TOGETHER = 16
#: Maximum number of remembered pairs of consecutive calls; the main loop of a program has far fewer.
KEPT = 4096


class Entry:
    """A call that is not confirmed yet: it is unknown whether all ranks have made the same call.

    Attributes:
        call: the call.
        position: from 1.
        pair: hashes of the terms of the previous call and of this call.
        seq: sequence number of the call in the group.
        is_numbered: whether rank 0 decides when the call starts; here it only has a position.
        hash: hash of all calls up to this one; set before the report.
    """

    __slots__ = ("call", "hash", "is_numbered", "pair", "position", "seq")

    def __init__(self, call: Agreed, position: int, pair: tuple[bytes, bytes], seq: int, is_numbered: bool) -> None:
        self.call = call
        self.position = position
        self.pair = pair
        self.seq = seq
        self.is_numbered = is_numbered
        self.hash = 0


class ProgramOrder:
    """The calls of this rank in program order.

    Args:
        report: called with the last position, its hash and the sequence number of its call.
        before_turn_ends: calls a function at the end of this turn of the loop, or earlier.
        moved: called when calls have started.
        alone: whether the group has no other rank to compare calls with.

    Attributes:
        called: last position.
        started: last position up to which all calls have started.
        confirmed: last position up to which the calls of all ranks are equal.
        through: last position that may start; None allows any.
        is_staged: whether calls that start now go through the host.
    """

    def __init__(
        self,
        report: Callable[[int, int, int], None],
        before_turn_ends: Callable[[Callable[[], None]], None],
        moved: Callable[[], None],
        *,
        alone: bool,
    ) -> None:
        self._report = report
        self._before_turn_ends = before_turn_ends
        self._moved = moved
        self._alone = alone
        self.called = self.started = self.confirmed = self._reported = 0
        self.through: int | None = None
        self.is_staged = False
        self._entries: deque[Entry] = deque()
        self._waiting: deque[Entry] = deque()
        #: Entries whose hash will be computed after the launch.
        self._unhashed: deque[Entry] = deque()
        self._known: set[tuple[bytes, bytes]] = set()
        self._last = b""
        self._hash = 0
        self._seq = 0
        self._reports_soon = False

    @property
    def is_caught_up(self) -> bool:
        """Return whether all calls up to the launch limit have started, so that a later operation may start."""
        return self.through is None or self.started >= self.through

    def add(self, call: Agreed, terms: bytes, seq: int, *, is_numbered: bool) -> None:
        """Add the program's next call, and start the call if the launch limit permits it.

        Args:
            call: the call.
            terms: hash of the terms, which must be equal on all ranks.
            seq: sequence number of the call in the group; calls on host arrays count, too.
            is_numbered: whether rank 0 decides when the call starts; here it only has a position.
        """
        self.called += 1
        entry = Entry(call, self.called, (self._last, terms), seq, is_numbered)
        self._last, self._seq = terms, seq
        self._entries.append(entry)
        if not self._alone:
            self._unhashed.append(entry)
        self._waiting.append(entry)
        self._go_on()
        # Report at once if a call waits for rank 0's confirmation, or if no earlier report is unconfirmed. Otherwise,
        # collect more calls for one report.
        is_first = self._reported <= self.confirmed and not self._alone
        if self._waiting or is_first or self.called - self._reported >= TOGETHER:
            self._report_now()
        elif not self._reports_soon:
            self._reports_soon = True
            self._before_turn_ends(self._report_late)

    def confirm(self, position: int) -> None:
        """Record that the calls of all ranks are equal up to `position`; start calls that have waited for this."""
        while self._entries and self._entries[0].position <= position:
            entry = self._entries.popleft()
            self.confirmed = entry.position
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known.add(entry.pair)
            entry.call.on_confirmed()
        if self._waiting:
            self._go_on()

    def hashes(self, start: int, stop: int) -> Sequence[int]:
        """Return the hashes of unconfirmed calls from position `start` to `stop`, both included."""
        self._hash_all()
        return [entry.hash for entry in self._entries if start <= entry.position <= stop]

    def call_at(self, position: int) -> Agreed:
        """Return the unconfirmed call at `position`."""
        return self._entries[position - self._entries[0].position].call

    def clear(self) -> None:
        """Forget all calls, because the group has ended."""
        self._entries.clear()
        self._unhashed.clear()
        self._waiting.clear()

    def _go_on(self) -> None:
        before = self.started
        while self._waiting and self._may_start(self._waiting[0]):
            entry = self._waiting.popleft()
            self.started = entry.position
            if not entry.is_numbered:
                entry.call.begin(self.is_staged)
        if self.started > before:
            self._moved()

    def _may_start(self, entry: Entry) -> bool:
        if self.through is not None and entry.position > self.through:
            return False
        return entry.is_numbered or entry.position <= self.confirmed or entry.pair in self._known

    def _report_late(self) -> None:
        self._reports_soon = False
        if self._entries and self._reported < self.called:
            self._report_now()

    def _report_now(self) -> None:
        self._reported = self.called
        self._hash_all()
        self._report(self.called, self._hash, self._seq)

    def _hash_all(self) -> None:
        while self._unhashed:
            entry = self._unhashed.popleft()
            text = b"%x %x %b" % (self._hash, entry.seq, entry.pair[1])
            self._hash = entry.hash = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
