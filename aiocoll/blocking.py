"""`BlockingGroup`: a group for programs without an event loop. Its loop runs in a thread, and every call blocks."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from aiocoll.group.process_group import ProcessGroup
from aiocoll.loops import LoopThread, Started
from aiocoll.rendezvous.new_group import new_group

__all__ = ["BlockingGroup", "make_blocking_group"]

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(method: Callable[Concatenate[ProcessGroup, P], Any]) -> Callable[Concatenate[BlockingGroup, P], Any]:
    @functools.wraps(method)
    def call(self: BlockingGroup, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        made = self._start(functools.partial(method, self._group, *args, **kwargs)).result()
        return make_blocking_group(self._loop, made) if isinstance(made, ProcessGroup) else made

    return call


class BlockingGroup:
    """A `ProcessGroup` whose calls block: for synchronous actors, process pools, task queues and notebooks.

        with aiocoll.BlockingGroup() as group:
            total = group.allreduce(x)
            later = group.submit(aiocoll.ProcessGroup.allreduce, y)  # goes on; later.result() waits

    It meets the other ranks when it is made. Every call can be made from any thread; calls of several threads are
    ordered as they come. An interrupt (Ctrl-C) ends the wait and not the collective, as cancelling an await does. Ranks
    that have an event loop, and a `ProcessGroup`, may be in the same job.

    Args:
        *args: the arguments of `new_group`.
        **kwargs: its keyword arguments.

    Raises:
        RendezvousError: the ranks do not meet; and what else `new_group` raises.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        made = new_group(*args, **kwargs)
        self._loop = LoopThread("aiocoll-blocking")
        self._owner, self._pid = True, os.getpid()
        try:
            self._group: ProcessGroup = self._loop.start(made.__aenter__).result()
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._pid == os.getpid():  # not in a forked child: the group belongs to its parent
            self._end(functools.partial(self._group.__aexit__, *exc))

    def submit(
        self, call: Callable[Concatenate[ProcessGroup, P], Awaitable[T] | T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Start a call and return without waiting for its end.

        Args:
            call: a method of `ProcessGroup`, or a function of yours, ``async`` or not, that takes the `ProcessGroup`
                first and runs in the thread of the event loop.
            *args: its other arguments. A method checks them before this returns.
            **kwargs: its keyword arguments.

        Returns:
            A future of the result. It cannot be cancelled, since the other ranks take part.

        Raises:
            TypeError, ValueError: an argument is wrong.
            GroupError: the group has failed, or is closed.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # no cancellation: it would not end a collective of other ranks

        def begin() -> None:
            made = call(self._group, *args, **kwargs)
            self._loop.start(lambda: made).add_done_callback(functools.partial(_copy, future))

        self._start(begin).result()
        return future

    def shutdown(self) -> None:
        """Close the group; see `ProcessGroup.shutdown`. This ends the thread of the loop if this group started it."""
        self._end(self._group.shutdown)

    def _end(self, end: Callable[[], Awaitable[None]]) -> None:
        if self._loop.is_closed():
            return
        try:
            self._start(end).result()
        finally:
            if self._owner:
                self._loop.close()

    def _start(self, call: Callable[[], Any]) -> Started[Any]:
        if self._pid != os.getpid():
            raise RuntimeError("this group belongs to the parent process; make a new group after the fork")
        return self._loop.start(call)

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


def make_blocking_group(loop: LoopThread, group: ProcessGroup) -> BlockingGroup:
    """Wrap a group that already runs on the loop of a thread; closing the wrapper does not end that thread."""
    made = object.__new__(BlockingGroup)
    made._loop, made._group, made._owner, made._pid = loop, group, False, os.getpid()
    return made


def _copy(future: Future[Any], started: Started[Any]) -> None:
    if (error := started.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(started.result())
