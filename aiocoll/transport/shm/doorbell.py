"""The doorbell: how a rank that sleeps in its event loop is woken. A rank polls first, then parks.

Every rank has an outbox that its peers can read and an eventfd that they can write to. A word there is even while
the rank will look at all its rings before it sleeps, and odd, another number each time, while it has to be woken:

    rank 0 parks                          rank 1 sends
    status = odd                          entry, stamp
    fence                                 fence
    look at all rings once more           status odd, and eventfd not written for it yet? write to the eventfd

At least one of them sees what the other has done. A rank that is awake need not be woken: a sender that sends again in
the same turn of the loop, or to a rank that polls, pays one load.

Another word says which core the rank ran on when it last waited for long: two ranks that the kernel has put
on one core must not poll for each other, but take turns.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Sequence

from aiocoll.runtime import Runtime
from aiocoll.transport.base import Link, Transport
from aiocoll.transport.shm.core import core
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import CORE, STATUS
from aiocoll.transport.shm.outbox import Outbox

__all__ = ["Doorbell", "PeerDoorbell", "ring_all"]


class Doorbell:
    """This rank's own doorbell, which tells peers whether this rank has to be woken.

    Args:
        runtime: of the loop that is woken.
        fences: of this machine.
        watcher: the transport whose loop it is.
        outbox: of this rank; it is closed with the doorbell.

    Raises:
        OSError: no descriptor left; the outbox is closed, too.
    """

    def __init__(self, runtime: Runtime, fences: Fences, watcher: Transport, outbox: Outbox) -> None:
        self.fences = fences
        self._watcher = watcher
        self.awake = False
        self.closed = False
        self._runtime = runtime
        self.outbox = outbox
        try:
            self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            outbox.close()
            raise
        self._status = outbox.status
        # The status, of which peers have a copy: what stands in the memory decides nothing here.
        self._number = 1
        self._status[STATUS] = 1
        self._links: list[Link] = []
        self._context: contextvars.Context | None = None
        self._holders = 0

    def hold(self) -> None:
        """Keep the descriptors open until as many `drop`s."""
        self._holders += 1

    def drop(self) -> None:
        """Close the descriptors after the last."""
        self._holders -= 1
        if self._holders:
            return
        self.closed = True
        if self._context is not None:
            self._runtime.loop.remove_reader(self.eventfd)
        os.close(self.eventfd)
        self.outbox.close()

    def add(self, link: Link) -> None:
        """Poll `link` when the doorbell is rung; called in the context in which that shall happen."""
        if self._context is None:
            self._context = contextvars.copy_context()
            self._runtime.loop.add_reader(self.eventfd, self._rung)
        self._links.append(link)
        # What has been sent before is found without a call.
        self.attend()

    def remove(self, link: Link) -> None:
        """Poll `link` no more."""
        if link in self._links:
            self._links.remove(link)

    def attend(self) -> None:
        """Look at all links before this loop sleeps again: nobody has to wake it until then."""
        if not self.awake:
            self.awake = True
            self._status[STATUS] = self._number = self._number + 1
            self._runtime.loop.call_soon(self._turned, context=self._context)

    def core(self) -> int:
        """Return the core that this rank runs on, as `core.core`, and let its peers know it."""
        number = core()
        if self._status[CORE] != number:
            self._status[CORE] = number
        return number

    def poll(self) -> bool:
        """Look at all links; whether anything moved."""
        moved = False
        for link in list(self._links):
            moved = link.poll() or moved
        return self._watcher.look() or moved

    def _rung(self) -> None:
        try:  # noqa: SIM105 - see `ring`
            os.eventfd_read(self.eventfd)
        except BlockingIOError:
            pass  # a peer, who can read it too, has done so
        self.attend()

    def _turned(self) -> None:
        again = False
        try:
            again = self._watcher.linger(self.poll()) and not self.closed
        finally:
            # Whatever was raised, this rank looks again or can be woken.
            if again:
                self._runtime.loop.call_soon(self._turned, context=self._context)
            else:
                self._sleep()

    def _sleep(self) -> None:
        self.awake = False
        if not self.closed:
            self._status[STATUS] = self._number = self._number + 1
            self.fences.full()
            if self.poll():
                # What has come just now may not be all that there is to do.
                self.attend()


class PeerDoorbell:
    """The doorbell of a peer, to be rung by the rank whose own is `doorbell`. Owns `eventfd`.

    Args:
        eventfd: of the peer.
        status: words of its doorbell.
        own: of this rank.

    Attributes:
        rung: the status for which it was rung last.
    """

    def __init__(self, eventfd: int, status: memoryview, own: Doorbell) -> None:
        self.eventfd = eventfd
        self.own = own
        self.status = status
        self._full = own.fences.full
        self.rung = 0

    def ring(self) -> None:
        """Wake the peer if it sleeps: it then sees what was stored before this call.

        This rank looks at its links in the next turn, too: the peer need not wake it to answer.
        """
        if not self.own.awake:
            self.own.attend()
        self._full()
        status = self.status[STATUS]
        if status & 1 and status != self.rung:
            self.wake(status)

    def wake(self, status: int) -> None:
        """Wake the peer, which sleeps with this status."""
        self.rung = status
        try:  # noqa: SIM105 - `suppress` costs two calls, on the way of every small collective
            os.eventfd_write(self.eventfd, 1)
        except BlockingIOError:
            pass  # it is full: the peer will hear of that

    def is_beside(self) -> bool:
        """Whether the peer was on the core of this rank when it last waited for long."""
        number = self.own.core()
        return number != 0 and self.status[CORE] == number

    def close(self) -> None:
        """Close the descriptor and let go of the words."""
        os.close(self.eventfd)
        self.status.release()


def ring_all(doorbells: Sequence[PeerDoorbell]) -> None:
    """Ring the doorbells of several peers, as `PeerDoorbell.ring` does, with one fence for all."""
    own = doorbells[0].own
    if not own.awake:
        own.attend()
    own.fences.full()
    for doorbell in doorbells:
        status = doorbell.status[STATUS]
        if status & 1 and status != doorbell.rung:
            doorbell.wake(status)
