"""Doorbell of a rank: an eventfd by which its peers wake its sleeping event loop.

Every rank has an outbox that its peers can read, and an eventfd that its peers can write to. A status word in the
outbox is even while the rank will poll all its links before it sleeps. It is odd, with a new number each time, while
the rank sleeps and has to be woken:

    rank 0 goes to sleep                  rank 1 sends
    status = odd                          entry, stamp
    fence                                 fence
    polls all links once more             status odd, and eventfd not written for it yet? write to the eventfd

At least one of the two sees the store of the other. An awake rank needs no wake-up. So a sender that sends twice in one
turn of the loop, or sends to a polling rank, only pays for one load.

Another word holds the core on which the rank ran when it last waited for long. Two ranks that the kernel has put
on one core must take turns instead of polling for each other.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
from collections.abc import Callable, Sequence

from aiocoll.runtime import Runtime
from aiocoll.transport.base import Link, Transport
from aiocoll.transport.shm.fence import Fences
from aiocoll.transport.shm.layout import CORE, STATUS
from aiocoll.transport.shm.outbox import Outbox

__all__ = ["Doorbell", "PeerDoorbell", "core", "ring_all"]


class Doorbell:
    """The doorbell of this rank. Its status words show peers whether they must wake this rank.

    Args:
        runtime: the runtime of the loop that is woken.
        fences: the memory fences of this machine.
        watcher: the transport that runs on this loop.
        outbox: the outbox of this rank. The doorbell closes it.

    Raises:
        OSError: no descriptor is left. The outbox is closed.
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
        # This rank's own copy of its status. The status is never read back from shared memory, although peers can only
        # read it there.
        self._number = 1
        self._status[STATUS] = 1
        self._links: list[Link] = []
        self._context: contextvars.Context | None = None
        self._holders = 0

    def hold(self) -> None:
        """Add a reference, which keeps the descriptors open until `drop`."""
        self._holders += 1

    def drop(self) -> None:
        """Release a reference. The last release closes the descriptors."""
        self._holders -= 1
        if self._holders:
            return
        self.closed = True
        if self._context is not None:
            self._runtime.loop.remove_reader(self.eventfd)
        os.close(self.eventfd)
        self.outbox.close()

    def add(self, link: Link) -> None:
        """Poll `link` whenever a peer rings the doorbell. The context is that of the first call of `add`."""
        if self._context is None:
            self._context = contextvars.copy_context()
            self._runtime.loop.add_reader(self.eventfd, self._on_ring)
        self._links.append(link)
        # Poll once now, because the peer did not ring the doorbell for frames that it wrote earlier.
        self.poll_soon()

    def remove(self, link: Link) -> None:
        """Stop polling `link` when the doorbell rings."""
        if link in self._links:
            self._links.remove(link)

    def poll_soon(self) -> None:
        """Poll all links in the next loop iteration. Until then, peers need not wake this rank."""
        if not self.awake:
            self.awake = True
            self._status[STATUS] = self._number = self._number + 1
            self._runtime.loop.call_soon(self._on_turn, context=self._context)

    def core(self) -> int:
        """Return the CPU core on which this rank runs, numbered from 1, and publish it to the peers."""
        number = core()
        if self._status[CORE] != number:
            self._status[CORE] = number
        return number

    def poll(self) -> bool:
        """Poll all links; return whether any sent or received data."""
        moved = False
        for link in list(self._links):
            moved = link.poll() or moved
        return self._watcher.look() or moved

    def _on_ring(self) -> None:
        try:  # noqa: SIM105 - see `ring`
            os.eventfd_read(self.eventfd)
        except BlockingIOError:
            pass  # a peer has read the eventfd, which resets it
        self.poll_soon()

    def _on_turn(self) -> None:
        again = False
        try:
            again = self._watcher.keep_polling(self.poll()) and not self.closed
        finally:
            # Even after an exception, this rank must either poll again or announce to its peers that it sleeps.
            if again:
                self._runtime.loop.call_soon(self._on_turn, context=self._context)
            else:
                self._sleep()

    def _sleep(self) -> None:
        self.awake = False
        if not self.closed:
            self._status[STATUS] = self._number = self._number + 1
            self.fences.full()
            if self.poll():
                # Poll again: one poll is limited in time, so frames may be left.
                self.poll_soon()


class PeerDoorbell:
    """A peer's doorbell, which this rank rings to wake the peer. This object owns `eventfd`.

    Args:
        eventfd: the peer's eventfd.
        status: the status words of the peer's doorbell.
        own: this rank's doorbell.

    Attributes:
        rung_status: the status for which this rank last rang the doorbell.
    """

    def __init__(self, eventfd: int, status: memoryview, own: Doorbell) -> None:
        self.eventfd = eventfd
        self.own = own
        self.status = status
        self._full = own.fences.full
        self.rung_status = 0

    def ring(self) -> None:
        """Wake the peer if it sleeps. The peer then sees all data that this rank stored before this call.

        This rank also polls its links in the next turn of its loop, so the peer need not wake it to answer.
        """
        if not self.own.awake:
            self.own.poll_soon()
        self._full()
        status = self.status[STATUS]
        if status & 1 and status != self.rung_status:
            self.wake(status)

    def wake(self, status: int) -> None:
        """Wake the peer by a write to its eventfd. `status` is the status word of the sleeping peer."""
        self.rung_status = status
        try:  # noqa: SIM105 - `suppress` costs two calls per small collective
            os.eventfd_write(self.eventfd, 1)
        except BlockingIOError:
            pass  # the eventfd's counter is at its maximum, so the peer wakes up in any case

    def shares_core(self) -> bool:
        """Return whether the peer ran on this rank's core during the peer's last long wait."""
        number = self.own.core()
        return number != 0 and self.status[CORE] == number

    def close(self) -> None:
        """Close the eventfd and release the view of the status words."""
        os.close(self.eventfd)
        self.status.release()


def ring_all(doorbells: Sequence[PeerDoorbell]) -> None:
    """Ring the doorbells of several peers, as `PeerDoorbell.ring` does, with only one memory fence."""
    own = doorbells[0].own
    if not own.awake:
        own.poll_soon()
    own.fences.full()
    for doorbell in doorbells:
        status = doorbell.status[STATUS]
        if status & 1 and status != doorbell.rung_status:
            doorbell.wake(status)


def core() -> int:
    """Return the number of the CPU core that runs this thread, counted from 1; 0 if the system does not report it."""
    return _load_sched_getcpu()() + 1


@functools.cache
def _load_sched_getcpu() -> Callable[[], int]:
    try:
        # `sched_getcpu` makes no system call, so `PyDLL` keeps the GIL: releasing it would take longer than the call.
        sched_getcpu = ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return lambda: -1
    return sched_getcpu
