"""This rank's end of a group's NCCL communicator, from its creation to its end.

NCCL's calls may block until all ranks have made them, so the launcher of the device makes those that may. The end of a
communicator may block, too, and is made in a thread of its own; but never while another thread is in a call of this
communicator, which would go on with freed memory. A call that does not return keeps it: it is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from aiocoll.completion import Completion
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.job.ids import hash62
from aiocoll.engine.operations.object_exchange import Post
from aiocoll.engine.operations.signature import KEYED, Signature
from aiocoll.errors import GroupError
from aiocoll.gpu.api import DeviceError, Nccl, NcclCommunicator
from aiocoll.gpu.calls.native import Tools
from aiocoll.gpu.device import Device
from aiocoll.gpu.launcher import Launched
from aiocoll.log import logger

__all__ = ["DeviceCommunicator", "connect_at_once"]

#: NCCL's setting for when ranks are connected.
_CONNECT = "NCCL_RUNTIME_CONNECT"
#: Seconds between two checks for asynchronous errors, while anything is in flight.
ASK_EVERY = 0.25
#: Seconds until the loop gives way to a launcher that launches nothing; then twice as many, and so on, to the latter.
GIVE_WAY = 0.001, 0.016
#: Seconds that closing ranks wait for each other, at most: then the communicator is aborted.
PARTING = 5.0
#: Seconds after which an abort that does not return is abandoned.
ABORTING = 10.0
#: Kinds of calls of which it is remembered that NCCL has connected the ranks for them.
KEPT = 256


class DeviceCommunicator:
    """One rank's end of a communicator.

    Args:
        comm: this rank's part in the group.
        device: where.
        nccl: the library.
        unique_id: NCCL's id of the communicator, made by rank 0.
        made: called when NCCL has made it, or has failed to.
        broken: called with an asynchronous error.

    Attributes:
        comm: this rank's part in the group.
        stream: the stream of its calls, and of those of all groups on the device.
        is_begun: NCCL has made it.
    """

    def __init__(
        self,
        comm: Communicator,
        device: Device,
        nccl: Nccl,
        unique_id: bytes,
        made: Callable[[], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.stream = device.common_stream()
        self.comm = comm
        self._device = device
        self._made = made
        self._broken = broken
        self._lock = threading.Lock()
        #: Held by who is in a call of the communicator.
        self._calling = threading.Lock()
        #: What its calls need, NCCL's end of it among that, while there is one.
        self._tools: Tools | None = None
        self.is_begun = False
        self._failure: DeviceError | None = None
        self._over = False
        self._asking = False
        self._in_flight = 0
        self._connected: set[Hashable] = set()
        #: Calls that were not launched at once, perhaps some that have been since.
        self._unlaunched: deque[Launched] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._aborted: asyncio.Future[None] | None = None
        size, rank, polls = len(comm.ranks), comm.rank, comm.polling.polls

        def init() -> None:
            connect_at_once()
            try:
                device.prepare(polls)
                end = nccl.init(size, unique_id, rank)
            except DeviceError as error:
                self._failure = error.with_traceback(None)
                raise
            with self._lock:
                self._tools, self.is_begun = Tools(device.cuda, nccl, end, rank, self.stream, []), True
            if self._over:
                self._give_up()

        device.run(init).add_done_callback(self._begun)

    def launch(
        self,
        marks: Sequence[int],
        put: Callable[[Tools], None],
        keep: object,
        done: Callable[[DeviceError | None], None],
        others: Sequence[int] = (),
        kind: Hashable = None,
        is_current: bool = False,
    ) -> Launched:
        """Enqueue calls on its stream: here, if they have been before and the launcher has nothing to do.

        Args:
            marks: positions of streams that the calls, and `others`, wait for.
            put: makes the calls; in the launcher.
            keep: objects that must live until the calls are done.
            done: called at their end, with the error if there is one; also if the communicator is gone.
            others: streams.
            kind: of the calls; NCCL connects the ranks in the first one of a kind, which blocks. None: not known.
            is_current: the thread's current device is this one.
        """
        at_once, loop = kind in self._connected, self.comm.endpoint.loop

        def call() -> None:
            self._device.after(marks, *others, self.stream)
            with self._calling:
                tools = self._tools
                if tools is None or self._over:
                    raise self._failure or DeviceError("communicator", "it has been given up", fatal=False)
                put(tools)
            if not at_once and kind is not None and len(self._connected) < KEPT:
                self._connected.add(kind)

        def ended(error: DeviceError | None) -> None:
            self._in_flight -= 1
            done(error)

        self._in_flight += 1
        if self._timer is None:
            self._timer = self.comm.call_later(ASK_EVERY, self._ask)
        launched = self._device.launch(
            self.stream, call, keep, ended, at_once=at_once, is_current=is_current, loop=loop
        )
        if launched.enqueued:
            self.comm.polling.lookers[self] = None
        else:
            self._unlaunched.append(launched)
            if len(self._unlaunched) == 1:
                self.comm.call_later(GIVE_WAY[0], self._give_way, launched, GIVE_WAY[0])
        return launched

    def look(self) -> bool:
        """Report a call of this turn of the loop that has ended: an await that polls calls this.

        What is due at the end of the turn is done first: other ranks may wait for it, and with them the calls.
        """
        runtime = self.comm.runtime
        if runtime.due:
            runtime.settle()
        found = self._device.look(self.stream, self.comm.endpoint.loop)
        if found is None or not self._in_flight:
            self.comm.polling.lookers.pop(self, None)
        return bool(found)

    def _give_way(self, first: Launched, waited: float) -> None:
        """Let the launcher have the interpreter, if it has a call and has launched none for a while.

        Args:
            first: of those that were not launched the last time.
            waited: seconds since then.
        """
        waiting = self._unlaunched
        while waiting and (waiting[0].enqueued or self._over):
            waiting.popleft()
        if not waiting:
            return
        soonest, latest = GIVE_WAY
        if waiting[0] is not first:
            waited = soonest
        else:
            waited = min(2 * waited, latest)
            if self._device.is_launching:
                self.comm.runtime.give_way()
        self.comm.call_later(waited, self._give_way, waiting[0], waited)

    # -- while something is in flight

    def _ask(self) -> None:
        """Let the launcher check for asynchronous errors, unless it is still busy with the last check."""
        self._timer = None
        if self._over or not self._in_flight:
            return
        self._timer = self.comm.call_later(ASK_EVERY, self._ask)
        if not self._asking and self._tools is not None:
            self._asking = True
            self._device.run(self._ask_nccl).add_done_callback(self._answered)

    def _ask_nccl(self) -> str | None:
        with self._calling:
            return None if self._tools is None or self._over else self._tools.end.async_error()

    def _answered(self, asked: asyncio.Future[str | None]) -> None:
        self._asking = False
        if self._over or asked.cancelled():
            return
        if (error := asked.exception()) is not None:
            self._broken(error)
        elif (text := asked.result()) is not None:
            self._broken(DeviceError("NCCL", text))

    def _begun(self, begun: asyncio.Future[None]) -> None:
        self._made()
        error = None if begun.cancelled() else begun.exception()
        if error is not None and not self._over:
            self._broken(error)

    # -- the end

    def abort(self) -> None:
        """Abandon everything in flight, without waiting for it."""
        if not self._over:
            self._stop()
            self._aborted = self._device.run_in_thread(self._give_up)
            timer = self.comm.endpoint.runtime.call_later(ABORTING, self._tell_stuck)
            self._aborted.add_done_callback(lambda _: timer.cancel())

    async def release(self, seconds: float) -> None:
        """Wait until an abort is over, for so long at most: who ends the process meanwhile would crash it."""
        if self._aborted is not None:
            await asyncio.wait([self._aborted], timeout=seconds)

    async def close(self) -> None:
        """End it together with the other ranks; if they do not, abort it."""
        if self._over:
            return
        if self._in_flight or not await self._parted():
            self.abort()
            return
        self._stop()
        with contextlib.suppress(TimeoutError, DeviceError):
            async with asyncio.timeout(PARTING):
                # Not in the launcher: it waits for other ranks, whose launchers may be ending another group.
                await self._device.run_in_thread(self._destroy)

    async def _parted(self) -> bool:
        """Wait until all ranks are about to end it; return whether they are."""
        comm = self.comm
        completion = Completion(comm.endpoint, _Parting.OP, None, None, None)
        completion.expect((), min(PARTING, comm.timeout), None)
        comm.enter(_Parting(comm, completion))
        await completion.wait_end()
        return completion.exception is None

    def _stop(self) -> None:
        self._over = True
        self.comm.polling.lookers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _taken(self) -> NcclCommunicator | None:
        """Return NCCL's end, once, when no thread is in a call of it; there will be no other call."""
        with self._calling, self._lock:
            tools, self._tools = self._tools, None
        return None if tools is None else tools.end

    def _destroy(self) -> None:
        if (end := self._taken()) is not None:
            end.destroy()

    def _give_up(self) -> None:
        """Abort, once; may block."""
        if (end := self._taken()) is not None:
            try:
                end.abort()
            except DeviceError as error:
                logger.warning(
                    "group %r, rank %d: the NCCL communicator was not aborted: %s",
                    self.comm.name,
                    self.comm.rank,
                    str(error),
                    extra=self.comm.log_extra,
                )

    def _tell_stuck(self) -> None:
        logger.warning(
            "group %r, rank %d: NCCL has not aborted the communicator within %g s, or not come back from a call of it; "
            "a thread and the memory of what was in flight are left behind",
            self.comm.name,
            self.comm.rank,
            ABORTING,
            extra=self.comm.log_extra,
        )


class _Parting(Post):
    """All ranks tell each other that they have nothing in flight, before they end the communicator."""

    OP = "PARTING"
    TERMS = Signature(OP, None, (), None, None, device="cuda")
    LIMIT = 0

    __slots__ = ("_communicator",)

    def __init__(self, comm: Communicator, completion: Completion) -> None:
        super().__init__(comm, KEYED | hash62("parting"), self.TERMS, comm.others, completion)
        self._communicator = comm
        # A rank that does not come is not waited for long, and no rank is to blame.
        self.silence()

    def enter(self) -> None:
        """Tell the others."""
        self._send(dict.fromkeys(self.comm.others, b""))
        self._settle()

    def needs(self, peer: int) -> bool:
        """A peer that has left does not fail this; but it is not waited for."""
        if peer in self._missing:
            self.comm.call_soon(self.expire)
        return False

    def expire(self) -> None:
        """A rank has not come."""
        self.fail(GroupError(f"ranks of group {self.comm.name!r} do not end it together", group=self.comm.name))
        # What arrives late must not be taken for another operation.
        self._communicator.in_flight.forget(self.id)

    def _settle(self) -> None:
        if not self.done and not self._missing and not self._unsent:
            self.succeed(None)


def connect_at_once() -> None:
    """Let NCCL connect ranks as it makes a communicator, else each one's first calls wait for all ranks.

    All ranks have to make one alike, so it is called before each. What the user has set stays.
    """
    os.environ.setdefault(_CONNECT, "0")
