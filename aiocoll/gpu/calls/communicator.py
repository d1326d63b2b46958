"""NCCL communicator of a group on this rank, from its creation to its end.

An NCCL call may block until all ranks have made it. The device's launcher thread makes the calls that may block.
Aborting or destroying a communicator may block, too, and runs in a thread of its own. It never runs while another
thread is inside a call of the communicator, because that call would use freed memory. If such a call does not return,
the communicator is abandoned.
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

#: Environment variable that determines whether NCCL connects the ranks at the first calls or with the communicator.
_CONNECT = "NCCL_RUNTIME_CONNECT"
#: Seconds between two checks for asynchronous NCCL errors while NCCL calls are in flight.
CHECK_EVERY = 0.25
#: Shortest and longest seconds before the event loop yields the GIL to a launcher thread that has launched nothing. The
#: delay doubles from the shortest to the longest.
GIVE_WAY = 0.001, 0.016
#: Maximum seconds for which closing ranks wait for each other before they abort the communicator.
PARTING = 5.0
#: Maximum seconds for which a rank waits for NCCL to abort the communicator; then it logs a warning.
ABORTING = 10.0
#: Maximum number of remembered call kinds for which NCCL has already connected the ranks.
KEPT = 256


class DeviceCommunicator:
    """The NCCL communicator of a group on this rank, with the launch and the end of its NCCL calls.

    Args:
        comm: this rank's part in the group.
        device: device of the communicator.
        nccl: the NCCL library.
        unique_id: NCCL's id of the communicator, made by rank 0.
        made: called when NCCL has created the communicator, or has failed to.
        broken: called with an asynchronous error.

    Attributes:
        comm: this rank's part in the group.
        stream: stream of the NCCL calls of all groups on the device.
        is_begun: whether NCCL has created the communicator.
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
        #: Held during each NCCL call, because the communicator must not be destroyed or aborted then.
        self._calling = threading.Lock()
        #: Arguments of NCCL calls: libraries, communicator, stream. None before NCCL has created the communicator, and
        #: after the communicator's end.
        self._tools: Tools | None = None
        self.is_begun = False
        self._failure: DeviceError | None = None
        self._over = False
        self._is_checking = False
        self._in_flight = 0
        self._connected: set[Hashable] = set()
        #: Calls that were queued for the launcher thread; the launcher may have launched some of them since.
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

        device.run(init).add_done_callback(self._on_created)

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
        """Enqueue NCCL calls: in this thread if they cannot block, otherwise in the launcher thread.

        Args:
            marks: positions of streams for which the calls, and the streams `others`, wait.
            put: makes the NCCL calls; runs in the launcher thread, or in this one.
            keep: objects that must live until the calls are done.
            done: called at the end of the calls, with their error or None; also if the communicator has ended.
            others: further streams.
            kind: kind of the calls, None if unknown. The first call of a kind blocks, because NCCL connects the ranks.
            is_current: whether this device is the thread's current device.
        """
        at_once, loop = kind in self._connected, self.comm.endpoint.loop

        def call() -> None:
            self._device.make_streams_wait(marks, *others, self.stream)
            with self._calling:
                tools = self._tools
                if tools is None or self._over:
                    raise self._failure or DeviceError("communicator", "it was aborted", fatal=False)
                put(tools)
            if not at_once and kind is not None and len(self._connected) < KEPT:
                self._connected.add(kind)

        def ended(error: DeviceError | None) -> None:
            self._in_flight -= 1
            done(error)

        self._in_flight += 1
        if self._timer is None:
            self._timer = self.comm.call_later(CHECK_EVERY, self._check_async_error)
        launched = self._device.launch(
            self.stream, call, keep, ended, at_once=at_once, is_current=is_current, loop=loop
        )
        if launched.enqueued:
            self.comm.polling.lookers[self] = None
        else:
            self._unlaunched.append(launched)
            if len(self._unlaunched) == 1:
                self.comm.call_later(GIVE_WAY[0], self._yield_to_launcher, launched, GIVE_WAY[0])
        return launched

    def look(self) -> bool:
        """Report the stream's oldest pending call if it has ended; return whether it has ended.

        A polling await calls this. Work that is due at the end of the turn runs first, because other ranks may wait for
        it before they launch the call.
        """
        runtime = self.comm.runtime
        if runtime.due:
            runtime.settle()
        found = self._device.look(self.stream, self.comm.endpoint.loop)
        if found is None or not self._in_flight:
            self.comm.polling.lookers.pop(self, None)
        return bool(found)

    def _yield_to_launcher(self, first: Launched, waited: float) -> None:
        """Yield the GIL to the launcher thread if it has queued calls but has launched none since the last check.

        Args:
            first: first call that was not launched at the last check.
            waited: seconds since that check.
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
                self.comm.runtime.yield_gil()
        self.comm.call_later(waited, self._yield_to_launcher, waiting[0], waited)

    # -- while something is in flight

    def _check_async_error(self) -> None:
        """Let the launcher thread check for asynchronous errors, unless the last check is still running."""
        self._timer = None
        if self._over or not self._in_flight:
            return
        self._timer = self.comm.call_later(CHECK_EVERY, self._check_async_error)
        if not self._is_checking and self._tools is not None:
            self._is_checking = True
            self._device.run(self._read_async_error).add_done_callback(self._on_async_error_read)

    def _read_async_error(self) -> str | None:
        with self._calling:
            return None if self._tools is None or self._over else self._tools.end.async_error()

    def _on_async_error_read(self, asked: asyncio.Future[str | None]) -> None:
        self._is_checking = False
        if self._over or asked.cancelled():
            return
        if (error := asked.exception()) is not None:
            self._broken(error)
        elif (text := asked.result()) is not None:
            self._broken(DeviceError("NCCL", text))

    def _on_created(self, begun: asyncio.Future[None]) -> None:
        self._made()
        error = None if begun.cancelled() else begun.exception()
        if error is not None and not self._over:
            self._broken(error)

    # -- the end

    def abort(self) -> None:
        """Abort the communicator in a new thread, because aborting may block; calls in flight are abandoned."""
        if not self._over:
            self._stop()
            self._aborted = self._device.run_in_thread(self._give_up)
            timer = self.comm.endpoint.runtime.call_later(ABORTING, self._warn_stuck)
            self._aborted.add_done_callback(lambda _: timer.cancel())

    async def release(self, seconds: float) -> None:
        """Wait at most `seconds` until an abort has finished, because a process that exits during an abort crashes."""
        if self._aborted is not None:
            await asyncio.wait([self._aborted], timeout=seconds)

    async def close(self) -> None:
        """Destroy the communicator together with the other ranks; abort it if some of them do not take part."""
        if self._over:
            return
        if self._in_flight or not await self._wait_for_peers():
            self.abort()
            return
        self._stop()
        with contextlib.suppress(TimeoutError, DeviceError):
            async with asyncio.timeout(PARTING):
                # Run this in a new thread, not in the launcher thread: it waits for other ranks, whose launchers may be
                # busy with another group.
                await self._device.run_in_thread(self._destroy)

    async def _wait_for_peers(self) -> bool:
        """Wait until all ranks are ready to destroy the communicator; return whether they are."""
        comm = self.comm
        completion = Completion(comm.endpoint, _ShutdownExchange.OP, None, None, None)
        completion.expect((), min(PARTING, comm.timeout), None)
        comm.enter(_ShutdownExchange(comm, completion))
        await completion.wait_end()
        return completion.exception is None

    def _stop(self) -> None:
        self._over = True
        self.comm.polling.lookers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_communicator(self) -> NcclCommunicator | None:
        """Wait until no NCCL call is running, then return the NCCL communicator; return None on a second call."""
        with self._calling, self._lock:
            tools, self._tools = self._tools, None
        return None if tools is None else tools.end

    def _destroy(self) -> None:
        if (end := self._take_communicator()) is not None:
            end.destroy()

    def _give_up(self) -> None:
        """Abort the NCCL communicator, which may block; do nothing if it was aborted or destroyed before."""
        if (end := self._take_communicator()) is not None:
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

    def _warn_stuck(self) -> None:
        logger.warning(
            "group %r, rank %d: NCCL did not abort the communicator within %g s, or an earlier NCCL call has not "
            "returned; a thread and the memory of the calls in flight stay allocated until the process ends",
            self.comm.name,
            self.comm.rank,
            ABORTING,
            extra=self.comm.log_extra,
        )


class _ShutdownExchange(Post):
    """The message exchange before a communicator is destroyed: each rank reports that it has no call in flight."""

    OP = "PARTING"
    TERMS = Signature(OP, None, (), None, None, device="cuda")
    LIMIT = 0

    __slots__ = ("_communicator",)

    def __init__(self, comm: Communicator, completion: Completion) -> None:
        super().__init__(comm, KEYED | hash62("parting"), self.TERMS, comm.others, completion)
        self._communicator = comm
        # Do not report a stall of this operation: the wait is short, and a missing rank is no error.
        self.suppress_reports()

    def enter(self) -> None:
        """Notify the other ranks that this rank has no call in flight."""
        self._send(dict.fromkeys(self.comm.others, b""))
        self._settle()

    def needs(self, peer: int) -> bool:
        """Return False, because a leaving peer must not fail this operation; end the wait for this peer's message."""
        if peer in self._missing:
            self.comm.call_soon(self.expire)
        return False

    def expire(self) -> None:
        """Fail the operation, because some rank has not sent its message in time."""
        self.fail(GroupError(f"some ranks of group {self.comm.name!r} did not close it in time", group=self.comm.name))
        # Forget the operation's id, so that a late message does not match another operation.
        self._communicator.in_flight.forget(self.id)

    def _settle(self) -> None:
        if not self.done and not self._missing and not self._unsent:
            self.succeed(None)


def connect_at_once() -> None:
    """Make NCCL connect all ranks when it creates a communicator.

    Otherwise, the first NCCL calls would wait for all ranks.

    All ranks need the same setting, so this is called before each creation. A value that the user has set stays.
    """
    os.environ.setdefault(_CONNECT, "0")
