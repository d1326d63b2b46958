"""A started operation with another result than that of the call it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from aiocoll.work import AT_ONCE, Work

__all__ = ["changed"]

R = TypeVar("R")


def changed(work: Work[Any], change: Callable[[Any], R]) -> Work[R]:
    """Return the same operation with the result that `change` makes of `work`'s, as soon as that is there.

    Args:
        work: nobody else has it.
        change: gets the result; what it raises is the failure of the operation here.
    """
    made: Work[R] = work.group._messages.one_of(work.op, [work])
    made.seq, made.key = work.seq, work.key
    if (ends := getattr(work, "_ends", None)) is not None:
        made._ends = ends

    def end(_: Work[Any]) -> None:
        result, error = None, work._exception
        if error is None:
            try:
                result = change(work._result)
            except Exception as failure:
                error = failure
        made._source = work._source
        made._finish(result, error)

    def withdraw() -> None:
        if work._withdraw is not None:
            work._withdraw()

    if work.done():
        work._look()
        end(work)
    else:
        made._withdraw = withdraw
        work._call_back(end, AT_ONCE)
    return made
