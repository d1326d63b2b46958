"""Plans: calls that are checked once and started many times, like persistent requests in MPI."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from aiocoll.elements.buffers import is_scalar, overlaps, view
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.prepared_call import MessageCall, PlannedCall, PreparedCall
from aiocoll.work import Work, completion_of, finished_work

__all__ = ["CallPlan", "make_plan"]

T = TypeVar("T")

#: Names of the calls for which a plan can be made.
PLANNED = {"allgather", "allgather_into_tensor", "allgather_into_tensor_coalesced", "allgather_object", "allreduce",
           "allreduce_coalesced", "alltoall", "alltoall_base", "alltoall_object", "barrier", "batch", "broadcast",
           "broadcast_object", "exscan", "gather", "gather_object", "monitored_barrier", "recv", "recv_anysource",
           "recv_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
           "scan", "scatter", "scatter_object", "send", "send_object"}  # fmt: skip


class CallPlan(Generic[T]):
    """A call of a group with its arguments, made by `ProcessGroup.plan`, that can be started any number of times.

    A plan holds its arrays. Every start is an ordinary call: it takes the next sequence number of the group, or the
    next count of its `key`. So other ranks may make the call without a plan.
    """

    __slots__ = ("_last", "_name", "_start_call")

    def __init__(self, name: str, start_call: Callable[[], Work[T]]) -> None:
        self._name = name
        self._start_call = start_call
        self._last: Work[T] | None = None

    def __repr__(self) -> str:
        return f"<CallPlan {self._name}, {'not started' if self._last is None else repr(self._last)}>"

    def start(self) -> Work[T]:
        """Start the call with the current contents of the arrays.

        Returns:
            The work of the call.

        Raises:
            RuntimeError: the previous start has not ended: await it first.
            GroupClosedError: this rank has closed the group.
            GroupError: the group has failed. Later failures fail the work, as for the call itself.
        """
        last = self._last
        if last is not None and not completion_of(last).done:
            raise RuntimeError(f"{self!r} has not ended: await it before the next start, or make two plans")
        work = self._last = self._start_call()
        return work


def make_plan(dispatcher: Dispatcher, call: Callable[..., Work[Any]], args: Any, kwargs: Any) -> CallPlan[Any]:
    """Check a call of a group; return its plan for repeated starts."""
    name = getattr(call, "__name__", "")
    if name not in PLANNED or getattr(call, "__self__", None) is not dispatcher.group:
        what = name or type(call).__name__
        raise TypeError(
            f"call must be a collective, a send or a receive of this group, such as pg.allreduce, not {what}"
        )
    dispatcher.check()
    capture = _Capture(dispatcher)
    with dispatcher.scoped(capture):
        call(*args, **kwargs)
    start = capture.make_start([*args, *kwargs.values()]) or partial(call, *args, **kwargs)
    return CallPlan(name, start)


class _Capture:
    """An interceptor that stores the prepared calls which one call makes, without starting them."""

    moves_nothing = True
    records = True
    native = None

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._calls: list[PreparedCall] = []

    def take(self, call: PreparedCall) -> Work[Any]:
        """Store a prepared call; return a work that has already ended."""
        if call.key is not None:
            self._dispatcher.check_key(call.key)
        self._calls.append(call)
        return finished_work(self._dispatcher.endpoint, call.op, self._dispatcher, call.result)

    def make_start(self, arguments: Sequence[Any]) -> Callable[[], Work[Any]] | None:
        """Return a function that starts the call without checks; None if its results could differ from the call's."""
        if len(self._calls) != 1:
            return None
        (call,) = self._calls
        # Such calls need more than a start: they copy staged arrays, or pack the arrays of a flush.
        if call.unwrap is not None or (call.signature is not None and call.signature.members is not None):
            return None
        given = list(_flat(arguments))
        if type(call) is PlannedCall:
            # A repeated start must use the caller's arrays: a copy of an argument would have old data, and an
            # allocated output would already be the result of an earlier start.
            if all(array is None or any(overlaps(array, each) for each in given) for array in call.arrays):
                return partial(_start_again, self._dispatcher, call)
        elif (
            isinstance(call, MessageCall)
            and call.arrays is None
            and call.op in ("SEND", "RECV", "RECV_ANYSOURCE")
            # If two views of an argument have the same memory, they are no copies, so each start sees new data.
            and all(map(overlaps, given, _flat(arguments)))
        ):
            return partial(_start_again, self._dispatcher, call)
        return None


def _start_again(dispatcher: Dispatcher, call: PreparedCall) -> Work[Any]:
    return dispatcher.start(call.prepare_again())


def _flat(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield flat views of all arrays among a call's arguments."""
    for each in arguments:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        elif each is not None and not is_scalar(each) and not isinstance(each, str):
            with contextlib.suppress(TypeError):  # the argument is not an array
                yield view(each, writable=False).array
