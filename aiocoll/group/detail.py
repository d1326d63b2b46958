"""Groups with ``debug="detail"``: every collective is compared on all ranks before its data moves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from aiocoll.elements.buffers import view
from aiocoll.elements.device import device_of
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.fusion.deferred_work import DeferredWork, FlushWork
from aiocoll.engine.fusion.layout import Layout
from aiocoll.engine.fusion.packer import Flush
from aiocoll.engine.operations.base import P2P, Signature
from aiocoll.engine.operations.verify import Compared, WrongCall
from aiocoll.group.calls import Call, Interceptor, interceptor_in_scope
from aiocoll.group.flushing import Recording
from aiocoll.group.launch import Launcher
from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.recovery import Origin
from aiocoll.options import GroupOptions, seconds
from aiocoll.work import Work

__all__ = ["DetailedGroup"]

P = ParamSpec("P")
R = TypeVar("R")


class _WrongListLength(ValueError):
    """A list has not one array or object per rank; users get a plain `ValueError`."""


def _telling(method: Callable[P, R], main: str | None = None) -> Callable[P, R]:
    """Let all ranks hear of a list that has not one array or object per rank.

    Args:
        method: the call of the group.
        main: its argument that error messages describe.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except _WrongListLength as miscount:
            group: Any = args[0]
            error = ValueError(str(miscount))
            if group.size() == 1 or interceptor_in_scope(group) is not None:
                raise error from None
            given = inspect.signature(method).bind(*args, **kwargs)
            given.apply_defaults()
            work: R = group._take_wrong(method.__name__, main, given.arguments, error)
            return work

    return call


class DetailedGroup(ProcessGroup):
    """A group whose ranks compare every collective before its data moves.

    If op, shape, dtype, device, counts, root or reduce op differ, the await raises `CollectiveMismatchError` on every
    rank, with all kinds of calls that were made; arrays are as they were, and the group goes on. So it does for a list
    that has not one array or object per rank, where other groups raise `ValueError` at the call of this rank alone.
    What else is wrong with the arguments of one rank raises at the call as ever.

    Every collective completes only when all ranks have called it. Messages between two ranks are as ever.

    Cost: two steps more per collective, through rank 0.
    """

    def __init__(self, member: Communicator, options: GroupOptions, desc: str, origin: Origin) -> None:
        super().__init__(member, options, desc, origin)
        if self._size > 1:
            self._interceptor = _Comparing(self)
            self._diverts = True

    allgather = _telling(ProcessGroup.allgather, "tensor")
    gather = _telling(ProcessGroup.gather, "tensor")
    scatter = _telling(ProcessGroup.scatter, "output")
    reduce_scatter = _telling(ProcessGroup.reduce_scatter, "output")
    alltoall = _telling(ProcessGroup.alltoall)
    scatter_object = _telling(ProcessGroup.scatter_object)
    alltoall_object = _telling(ProcessGroup.alltoall_object)

    def _check_one_per_rank(self, values: Any, name: str, what: str) -> None:
        try:
            super()._check_one_per_rank(values, name, what)
        except ValueError as error:
            raise _WrongListLength(str(error)) from None

    def _flush(self, recording: Recording, outer: Interceptor | None, key: str | None = None) -> FlushWork | None:
        """Compare the list of a block's calls as one call, under the one number that it takes everywhere."""
        return super()._flush(recording, None if isinstance(outer, _Comparing) else outer, key)

    def _start_flush(
        self, layout: Layout, identity: int, part: FlushWork, make: Callable[[int, Work[Any]], Flush]
    ) -> None:
        if self._interceptor is None:
            super()._start_flush(layout, identity, part, make)
        else:
            self._enter(Compared(self._member, identity, layout.terms, make, part))

    def _start_loose(self, work: DeferredWork, call: Call) -> None:
        if self._interceptor is None or call.terms is None:
            super()._start_loose(work, call)
        else:
            identity, work.seq = self._keyed_id(call.key)
            self._enter(Compared(self._member, identity, call.terms, call.make, work))

    def _take_wrong(self, kind: str, main: str | None, given: Mapping[str, Any], wrong: ValueError) -> Work[Any]:
        """Take part in a collective with a call that cannot be carried out."""
        self._check()
        array = None if main is None else view(given[main], name=main, writable=False)
        dtype = "object" if kind.endswith("_object") else None if array is None else array.dtype.name
        device = "cpu" if array is None or device_of(array.array) is None else "cuda"
        root = self._check_rank(given["root"], "root") if "root" in given else None
        reduce = given["op"].wire_name if "op" in given else None
        timeout = given["timeout"]
        return _compare(
            self,
            Signature(kind.upper(), dtype, (), root, reduce, device=device),
            () if array is None else array.shape,
            None,
            self._member.timeout if timeout is None else seconds(timeout, "timeout"),
            given["key"],
            wrong,
        )


class _Comparing:
    """The group's own taker of calls."""

    def __init__(self, group: Launcher) -> None:
        self._group = group

    def take(self, call: Call) -> Work[Any]:
        """Start a call: a message between two ranks at once, a collective when it has been compared."""
        group = self._group
        if call.terms is not None:
            return _compare(group, call.terms, call.shape, call, call.timeout, call.key)
        work: Work[Any] = Work(group._endpoint, call.op, None, None, group)
        call.expect(work)
        group._enter(call.make(P2P, work))
        return work


def _compare(
    group: Launcher,
    terms: Signature,
    shape: tuple[int, ...],
    call: Call | None,
    timeout: float,
    key: str | None,
    wrong: ValueError | None = None,
) -> Work[Any]:
    """Start the comparison of a call, None of one that cannot be carried out."""
    identity, seq = group._numbered(key)
    work: Work[Any] = Work(group._endpoint, terms.op, seq, key, group)
    if call is not None:
        call.expect(work)
    else:
        work._shape, work._timeout, work._value = shape, timeout, None
    comm = group._member
    operation = (
        WrongCall(comm, identity, terms, wrong, work)
        if wrong is not None
        else Compared(comm, identity, terms, None if call is None else call.make, work)
    )
    group._run_quietly(group._enter, operation)
    return work
