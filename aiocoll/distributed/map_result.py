"""A started operation whose result is mapped by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from aiocoll.group.parts import parts_of
from aiocoll.user_code import contain
from aiocoll.work import AT_ONCE, Work

__all__ = ["changed"]

R = TypeVar("R")


def changed(work: Work[Any], change: Callable[[Any], R]) -> Work[R]:
    """Return a work of the same operation whose result is `change(result)`.

    Args:
        work: the operation; the caller must not use it otherwise.
        change: called with the result; if it raises, the returned work fails with that.
    """
    made: Work[R] = parts_of(work.group).messages.one_of(work.op, [work])
    made.seq, made.key = work.seq, work.key
    if (ends := getattr(work, "_ends", None)) is not None:
        made._ends = ends

    def end(_: Work[Any]) -> None:
        result, error = None, work._exception
        if error is None:
            try:
                result = change(work._result)
            except BaseException as failure:
                error = contain(failure)
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
