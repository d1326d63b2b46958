"""`map_result`: a work whose result is a function of another work's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from aiocoll.completion import Completion
from aiocoll.group.parts import parts_of
from aiocoll.user_code import contain
from aiocoll.work import Work, completion_of

__all__ = ["map_result"]

R = TypeVar("R")


def map_result(work: Work[Any], change: Callable[[Any], R]) -> Work[R]:
    """Return a work that ends together with `work`, and has the result `change(result of work)`.

    Args:
        work: the work of the operation. The caller must not use it after this call.
        change: called with the result. If it raises, the returned work fails with its exception.
    """
    made: Work[R] = parts_of(work.group).messages.one_of(work.op, [work])
    first, last = completion_of(work), completion_of(made)
    last.seq, last.key, last.ends = first.seq, first.key, first.ends

    def end(_: Completion) -> None:
        result, error = None, first.exception
        if error is None:
            try:
                result = change(first.result)
            except BaseException as failure:
                error = contain(failure)
        last.source = first.source
        last.finish(result, error)

    def withdraw() -> None:
        if first.withdraw is not None:
            first.withdraw()

    if first.done:
        first.note_retrieval()
        end(first)
    else:
        last.withdraw = withdraw
        first.call_at_end(end)
    return made
