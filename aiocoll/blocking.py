"""`BlockingGroup`: a group for programs that have no event loop. One runs in a thread, and every call waits for it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from aiocoll.errors import GroupClosedError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.rendezvous.new_group import new_group
from aiocoll.work import Work

__all__ = ["BlockingGroup", "LoopThread", "blocking_on"]

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="aiocoll-blocking", daemon=True)
        self.pid = os.getpid()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: set[Future[Future[Any]]] = set()
        self._begun: Future[asyncio.AbstractEventLoop] = Future()
        self.thread.start()
        self.loop = self._begun.result()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Call `function` in the loop; when it has been called return the future of its result.

        Raises:
            BaseException: what it raises.
            GroupClosedError: the loop has ended.
        """
        if self.pid != os.getpid():
            raise RuntimeError("this group belongs to the process that this one was forked from")
        if self.thread is threading.current_thread():
            raise RuntimeError("this would block the event loop that completes it: await the call of the ProcessGroup")
        called: Future[Future[Any]] = Future()
        self._calls.add(called)
        try:
            self.loop.call_soon_threadsafe(self._call, function, called)
        except RuntimeError:  # the loop is closed
            self._calls.discard(called)
            raise GroupClosedError("the group was closed") from None
        return called.result()

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        self.loop.call_soon_threadsafe(self._ending.set)
        self.thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        finally:
            # Without this, a call that came while the loop ended would wait for ever.
            for called in tuple(self._calls):
                if not called.done():
                    called.set_exception(GroupClosedError("the group was closed"))

    async def _main(self) -> None:
        self._ending = asyncio.Event()
        self._begun.set_result(asyncio.get_running_loop())
        await self._ending.wait()

    def _call(self, function: Callable[[], Any], called: Future[Future[Any]]) -> None:
        self._calls.discard(called)
        ended: Future[Any] = Future()
        ended.set_running_or_notify_cancel()  # cancelling it would not end what the other ranks take part in
        try:
            made = function()
        except BaseException as error:
            called.set_exception(error)
            return
        if inspect.isawaitable(made):
            task = self.loop.create_task(made.join() if isinstance(made, Work) else _result(made))
            self._tasks.add(task)  # the loop itself does not keep them
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(functools.partial(_copy, ended))
        else:
            ended.set_result(made)
        called.set_result(ended)


async def _result(made: Awaitable[T]) -> T:
    return await made


def _copy(ended: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        ended.set_exception(GroupClosedError("the group was closed"))
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


def _blocking(method: Callable[Concatenate[ProcessGroup, P], Any]) -> Callable[Concatenate[BlockingGroup, P], Any]:
    @functools.wraps(method)
    def call(self: BlockingGroup, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        made = self.submit(method, *args, **kwargs).result()
        return blocking_on(self._loop, made) if isinstance(made, ProcessGroup) else made

    return call


class BlockingGroup:
    """A `ProcessGroup` whose calls wait: for synchronous actors, pools of processes, task queues and notebooks.

        with aiocoll.BlockingGroup() as group:
            total = group.allreduce(x)
            later = group.submit(aiocoll.ProcessGroup.allreduce, y)  # goes on; later.result() waits

    It meets the other ranks when it is made. Every call can be made from any thread; calls of several threads are
    ordered as they come. An interrupt (Ctrl-C) ends the wait and not the collective, as cancelling an await does. Ranks
    that have an event loop, and a `ProcessGroup`, may be in the same job.

    Args:
        *args: those of `new_group`.
        **kwargs: likewise.

    Raises:
        RendezvousError: the ranks do not meet; and what else `new_group` raises.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        made = new_group(*args, **kwargs)
        self._loop = LoopThread()
        self._owner = True
        try:
            self._group: ProcessGroup = self._loop.call(made.__aenter__).result()
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._loop.pid == os.getpid():  # a forked child leaves the block of its parent, which has the group
            self._end(functools.partial(self._group.__aexit__, *exc))

    def submit(
        self, call: Callable[Concatenate[ProcessGroup, P], Awaitable[T] | T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Start a call and return without waiting for its end.

        Args:
            call: a method of `ProcessGroup`, or a function of yours, ``async`` or not, that takes the `ProcessGroup`
                first and runs in the thread of the event loop.
            *args: its other arguments. A method checks them before this returns.
            **kwargs: likewise.

        Returns:
            A future of the result. It cannot be cancelled, since the other ranks take part.

        Raises:
            TypeError, ValueError: an argument is wrong.
            GroupError: the group has failed, or is closed.
        """
        return self._loop.call(lambda: call(self._group, *args, **kwargs))

    def shutdown(self) -> None:
        """See `ProcessGroup.shutdown`; the thread ends with the group that made it."""
        self._end(self._group.shutdown)

    def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        if self._loop.loop.is_closed():
            return
        try:
            self._loop.call(end).result()
        finally:
            if self._owner:
                self._loop.close()

    rank = _blocking(ProcessGroup.rank)
    size = _blocking(ProcessGroup.size)
    backend_for = _blocking(ProcessGroup.backend_for)
    allreduce = _blocking(ProcessGroup.allreduce)
    reduce = _blocking(ProcessGroup.reduce)
    broadcast = _blocking(ProcessGroup.broadcast)
    scan = _blocking(ProcessGroup.scan)
    exscan = _blocking(ProcessGroup.exscan)
    barrier = _blocking(ProcessGroup.barrier)
    monitored_barrier = _blocking(ProcessGroup.monitored_barrier)
    allgather = _blocking(ProcessGroup.allgather)
    allgather_into_tensor = _blocking(ProcessGroup.allgather_into_tensor)
    gather = _blocking(ProcessGroup.gather)
    scatter = _blocking(ProcessGroup.scatter)
    reduce_scatter = _blocking(ProcessGroup.reduce_scatter)
    reduce_scatter_tensor = _blocking(ProcessGroup.reduce_scatter_tensor)
    alltoall = _blocking(ProcessGroup.alltoall)
    alltoall_base = _blocking(ProcessGroup.alltoall_base)
    allreduce_coalesced = _blocking(ProcessGroup.allreduce_coalesced)
    allgather_into_tensor_coalesced = _blocking(ProcessGroup.allgather_into_tensor_coalesced)
    reduce_scatter_tensor_coalesced = _blocking(ProcessGroup.reduce_scatter_tensor_coalesced)
    send = _blocking(ProcessGroup.send)
    recv = _blocking(ProcessGroup.recv)
    recv_anysource = _blocking(ProcessGroup.recv_anysource)
    batch = _blocking(ProcessGroup.batch)
    send_object = _blocking(ProcessGroup.send_object)
    recv_object = _blocking(ProcessGroup.recv_object)
    probe = _blocking(ProcessGroup.probe)
    iprobe = _blocking(ProcessGroup.iprobe)
    broadcast_object = _blocking(ProcessGroup.broadcast_object)
    allgather_object = _blocking(ProcessGroup.allgather_object)
    gather_object = _blocking(ProcessGroup.gather_object)
    scatter_object = _blocking(ProcessGroup.scatter_object)
    alltoall_object = _blocking(ProcessGroup.alltoall_object)
    empty = _blocking(ProcessGroup.empty)
    split = _blocking(ProcessGroup.split)
    split_group = _blocking(ProcessGroup.split_group)
    shrink = _blocking(ProcessGroup.shrink)
    grow = _blocking(ProcessGroup.grow)
    merge_remote_group = _blocking(ProcessGroup.merge_remote_group)
    add_hook = _blocking(ProcessGroup.add_hook)
    pending = _blocking(ProcessGroup.pending)
    stats = _blocking(ProcessGroup.stats)
    drain = _blocking(ProcessGroup.drain)
    wait_revoked = _blocking(ProcessGroup.wait_revoked)
    abort = _blocking(ProcessGroup.abort)
    report_death = _blocking(ProcessGroup.report_death)


def blocking_on(loop: LoopThread, group: ProcessGroup) -> BlockingGroup:
    """Return a group that runs on a loop already; closing it does not end the loop's thread."""
    made = object.__new__(BlockingGroup)
    made._loop, made._group, made._owner = loop, group, False
    return made
