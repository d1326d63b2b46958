"""The calls of one rank without keys, in the order of its program: launched first, and compared behind that.

Each call has a position, 1, 2, ..., and a hash of all calls up to it. The rank reports both to rank 0, several
positions at once if it calls fast; rank 0 confirms the highest position at which the hashes of all ranks are equal, see
`aiocoll.gpu.calls.pacing`:

    rank 1     launches 5; launches 6; launches 7;  "7, with this hash" ->      <- "all ranks have called 7"

So the first pass of a loop waits and the others do not: a call is launched ahead if it has followed the same kind of
call before, and all ranks have confirmed that. Any other call waits until its own position is confirmed. All calls are
launched in the order of their positions, at any time no further than rank 0 allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiocoll.gpu.calls.agreed import Agreed

__all__ = ["Entry", "ProgramOrder"]

#: Calls that are reported together, at most; fewer are when the loop gets its turn.
TOGETHER = 16
#: Pairs of calls, one after the other, that are remembered: far more than a loop of a program has.
KEPT = 4096


class Entry:
    """A call that not all ranks are known to have called.

    Attributes:
        call: the call.
        position: from 1.
        pair: hashes of the terms of the call before it, and of its own.
        seq: number of the call among all calls of the group.
        is_numbered: rank 0 decides when it starts; here it only has a position.
        hash: of all calls up to it; set before it is reported.
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
    """The calls of this rank.

    Args:
        report: called with the last position, its hash, and the number of its call among all of the group.
        before_turn_ends: calls at the end of this turn of the loop, or earlier.
        moved: called when calls have started.
        alone: there is no other rank, with whose calls they would be compared.

    Attributes:
        called: last position.
        started: last position at which, as at all before it, the call has started.
        confirmed: last position at which all ranks have called the same.
        through: last position that may start; None: any.
        is_staged: what starts now goes through the host.
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
        #: Those without a hash: a launch does not wait for that.
        self._unhashed: deque[Entry] = deque()
        self._known: set[tuple[bytes, bytes]] = set()
        self._last = b""
        self._hash = 0
        self._seq = 0
        self._reports_soon = False

    @property
    def is_caught_up(self) -> bool:
        """Whether all calls have started that may start, so that what comes behind them may."""
        return self.through is None or self.started >= self.through

    def add(self, call: Agreed, terms: bytes, seq: int, *, is_numbered: bool) -> None:
        """Take the next call of the program, and start it if it may.

        Args:
            call: the call.
            terms: a hash of what all ranks have to call alike.
            seq: its number among all calls of the group, on arrays of the host, too.
            is_numbered: rank 0 decides when it starts; here it only has a position.
        """
        self.called += 1
        entry = Entry(call, self.called, (self._last, terms), seq, is_numbered)
        self._last, self._seq = terms, seq
        self._entries.append(entry)
        if not self._alone:
            self._unhashed.append(entry)
        self._waiting.append(entry)
        self._go_on()
        # Somebody waits for it, or nothing else is on its way: else together with what follows.
        is_first = self._reported <= self.confirmed and not self._alone
        if self._waiting or is_first or self.called - self._reported >= TOGETHER:
            self._report_now()
        elif not self._reports_soon:
            self._reports_soon = True
            self._before_turn_ends(self._report_late)

    def confirm(self, position: int) -> None:
        """All ranks have called the same up to a position."""
        while self._entries and self._entries[0].position <= position:
            entry = self._entries.popleft()
            self.confirmed = entry.position
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known.add(entry.pair)
            entry.call.confirmed()
        if self._waiting:
            self._go_on()

    def hashes(self, start: int, stop: int) -> Sequence[int]:
        """Return the hashes of positions that are not confirmed, `stop` included."""
        self._hash_all()
        return [entry.hash for entry in self._entries if start <= entry.position <= stop]

    def at(self, position: int) -> Agreed:
        """Return the call at a position that is not confirmed."""
        return self._entries[position - self._entries[0].position].call

    def clear(self) -> None:
        """The group has ended."""
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
