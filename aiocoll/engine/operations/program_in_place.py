"""The executor of programs between processes that read each other's memory: messages are read where they lie, once.

A message is posted (`places`) when all of it is there; of two messages to the same rank the second waits until the
first is read. What is copied is read straight into the caller's array, what is reduced into scratch memory that stays
in the cache. Small messages, and those to a rank that cannot read the memory of this one, go in frames. Then the
receiver accepts all of them with the first frame, not before, since mostly there is none.

Cost: as the program says; each byte crosses once, by a call of the kernel for each piece.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from aiocoll.algorithms.program import Verb
from aiocoll.engine.operations import places
from aiocoll.engine.operations.group import Group
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.engine.operations.program_with_slots import ProgramWithSlots
from aiocoll.runtime import BUDGET
from aiocoll.transport.base import SharedMemoryLink
from aiocoll.transport.frame import SEGMENT
from aiocoll.transport.shared_memory import IN_PLACE, MOST_BY_REFERENCE, SMALL_SLOTS
from aiocoll.work import Work

__all__ = ["ProgramInPlace"]

_SEND: Final = Verb.SEND
_RECV: Final = Verb.RECV
_COMBINE: Final = Verb.COMBINE


class _Posted(NamedTuple):
    """A message that its receiver has not read yet.

    Attributes:
        action: index of the one that sends it.
        link: to the receiver.
        pieces: what the receiver had read when it was last looked at; see `SlotWriter.pieces`.
    """

    action: int
    link: SharedMemoryLink
    pieces: int


class ProgramInPlace(ProgramWithSlots):
    """One rank's part in one collective; arguments as for `ProgramExecutor`."""

    __slots__ = ("_limit", "_most", "_posted", "_slot", "_unposted", "_unread")

    def __init__(
        self, comm: Group, identity: int, plan: Plan, arrays: list[NDArray[Any] | None], work: Work[Any]
    ) -> None:
        ProgramWithSlots.__init__(self, comm, identity, plan, arrays, work)
        self._slot = identity % SMALL_SLOTS
        # Bytes from which a message is large.
        kind = plan.signature.op.lower()
        self._limit = max(
            comm.tuning.single_copy.limit(kind, len(comm.ranks), reduces=self.reduces), comm.slots.largest + 1
        )
        # Of what is large: actions whose message has not been read; those whose message is there, but not posted; and
        # what is posted, by receiver.
        self._unread = [
            index
            for index, verb in enumerate(plan.verbs)
            if verb in (_RECV, _COMBINE) and plan.totals[index] >= self._limit
        ]
        self._unposted: list[int] = []
        self._posted: dict[int, _Posted] = {}
        # Bytes of a piece: where they are reduced, whole elements that stay in the cache.
        self._most = SEGMENT // plan.itemsize * plan.itemsize if self.reduces else MOST_BY_REFERENCE

    def enter(self) -> None:
        """Start every action that waits for nothing, and read what has been posted."""
        self.comm.polling.lookers[self] = None
        for index in self._plan.start:
            self._start(index)
        if not self._remaining and not self.done:
            self._complete()
        if not self.done:
            self.look()

    def look(self) -> bool:
        """Go on; return whether anything moved, or is being moved."""
        return self._go_on() or any(posted.link.is_being_read() for posted in self._posted.values())

    def _go_on(self) -> bool:
        """Post, read, and see what has been read, for at most `BUDGET` seconds; return whether anything moved."""
        ticks = self.comm.runtime.ticks
        deadline = ticks() + BUDGET
        moved, going = False, True
        while going and not self.done:
            going = bool(self._unposted) and self._post()
            if self._unread and self._read(deadline):
                going = True
            if self._posted and self._collect():
                going = True
            if self._missing:
                ProgramWithSlots.look(self)
            moved = moved or going
            if going and not self.done and ticks() > deadline:
                self.put_off()
                break
        return moved

    def _complete(self) -> None:
        self.comm.polling.lookers.pop(self, None)
        ProgramWithSlots._complete(self)

    def _resume(self) -> None:
        ProgramWithSlots._resume(self)
        if not self.done:
            self.look()

    # -- sending

    def _start_send(self, index: int) -> None:
        plan = self._plan
        total = plan.totals[index]
        if total < self._limit:
            ProgramWithSlots._start_send(self, index)
        elif all(self._moved[each] == total for each in plan.follow[index]):
            self._unposted.append(index)
            self._post()

    def _follow(self, index: int) -> None:
        if self._plan.verbs[index] is _SEND and self._plan.totals[index] >= self._limit:
            self._start_send(index)
        else:
            ProgramWithSlots._follow(self, index)

    def _post(self) -> bool:
        """Post what can be, and send in frames what never can; return whether there was any."""
        found = False
        for index in tuple(self._unposted):
            peer = self._plan.program[index].peer
            if peer not in self._posted:
                found = True
                self._unposted.remove(index)
                if not self._post_to(peer, index):
                    ProgramWithSlots._start_send(self, index)
        return found

    def _post_to(self, peer: int, index: int) -> bool:
        plan = self._plan
        action = plan.program[index]
        start = action.region.start * plan.itemsize
        message = self._view(action.region.buffer)[start : start + plan.totals[index]]
        link = places.post(self.comm.channels[peer], self._slot, self, message, action.step)
        if link is not None:
            self._posted[peer] = _Posted(index, link, link.slot_writer.pieces())
        return link is not None

    def _collect(self) -> bool:
        """Be done with what has been read; return whether anything was, if only a piece: so this rank polls on."""
        found = False
        for peer, posted in tuple(self._posted.items()):
            index, link, before = posted
            if link is not self.comm.channels[peer].shared:
                continue
            if link.slot_writer.is_read(self._slot):
                found = True
                del self._posted[peer]
                self._advance_by(peer, index, self._plan.totals[index])
            elif (pieces := link.slot_writer.pieces()) != before:
                found = True
                self._posted[peer] = posted._replace(pieces=pieces)
        return found

    # -- receiving

    def _read(self, deadline: float) -> bool:
        """Read what is there, piece by piece; return whether there was any."""
        found = False
        for index in tuple(self._unread):
            if not self._waits[index] and not self.done and self._read_message(index, deadline):
                found = True
            if self._waits[index] < 0:  # complete, perhaps in frames
                self._unread.remove(index)
        return found

    def _read_message(self, index: int, deadline: float) -> bool:
        plan = self._plan
        action, total = plan.program[index], plan.totals[index]
        peer = action.peer
        if (place := self._place(peer, action.step, total)) is None:
            return False
        whole = self._view(action.region.buffer) if plan.verbs[index] is _RECV else None
        start, moved = action.region.start * plan.itemsize, self._moved[index]
        while True:
            nbytes = min(total - moved, self._most)
            into = None if whole is None else whole[start + moved : start + moved + nbytes]
            if (piece := places.read(self, peer, self._slot, place, moved, nbytes, into)) is None:
                return False
            if whole is None:
                self._put(index, piece, nbytes)
            moved += nbytes
            self._advance_by(peer, index, nbytes)
            if moved == total or self.done or self.comm.runtime.ticks() > deadline:
                return True

    def _place(self, peer: int, step: int, total: int) -> places.Place | None:
        """Return where a message lies, if it has been posted."""
        link, slot = self.comm.channels[peer].shared, self._slot
        if link is None or not link.slot_reader.is_unread(slot):
            return None
        found = link.slot_reader.look(slot, self.id, self.comm.id)
        if found < 0:
            return None
        if found == self.fingerprint and link.slot_reader.length(slot) == IN_PLACE:
            place = places.find(link, slot)
            if place is None or place.step != step:
                return None
            if place.nbytes == total:
                return place
        self.comm.mismatches.disagree(peer, self.id, self.describe())
        return None

    def deliver(self, peer: int, step: int, total: int, payload: memoryview | None, length: int) -> bool:
        """Take a segment that comes in a frame, and accept all the others."""
        if peer in self._plan.grants:
            self.promise(peer)
        return ProgramWithSlots.deliver(self, peer, step, total, payload, length)

    def _advance_by(self, peer: int, index: int, nbytes: int) -> None:
        """`peer` has sent or read so many bytes more of a message."""
        context = self.comm.context
        context.heard = self.comm.ranks[peer]
        self._progress(index, nbytes)
        context.heard = -1
        if self._local and not self._put_off and not self.done:
            self.advance()

    # -- the end

    def needs(self, peer: int) -> bool:
        """Whether something to or from `peer` is missing, when all that can be read has been."""
        while not self.done and self._go_on():
            pass
        return not self.done and ProgramExecutor.needs(self, peer)

    def awaited(self) -> list[int]:
        """Return the ranks from which something has not arrived, or that have not read what was posted for them."""
        return sorted({*ProgramExecutor.awaited(self), *self._posted})

    def fail(self, error: BaseException) -> None:
        """End with `error`."""
        if not self.done:
            self.comm.polling.lookers.pop(self, None)
            for peer, (_, link, _) in self._posted.items():
                if link is self.comm.channels[peer].shared and not link.slot_writer.is_read(self._slot):
                    link.slot_writer.void(self._slot)
        ProgramWithSlots.fail(self, error)
