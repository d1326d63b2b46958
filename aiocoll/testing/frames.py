"""Which frames of a failed test a report shows: those of the user, and none of this package.

pytest's ``--full-trace`` keeps all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType

__all__ = ["begins_nowhere", "has_ours", "keep_all_frames", "keeps_all_frames", "raised", "readable", "trimmed"]

#: The folder of this package.
_OURS = str(Path(__file__).parents[1]) + os.sep
#: What calls the test, or what this package calls to end a task.
_ON_THE_WAY = (str(Path(asyncio.__file__).parent) + os.sep, "uvloop")
#: What calls this package for the user: ``asyncio.run``, ``async with``.
_BEFORE = (*_ON_THE_WAY, contextlib.__file__)

_all_frames: ContextVar[bool] = ContextVar("all frames", default=False)


def keep_all_frames() -> None:
    """Leave out no frames any more, in this context."""
    _all_frames.set(True)


def keeps_all_frames() -> bool:
    """Whether no frames are left out."""
    return _all_frames.get()


def trimmed(error: BaseException) -> BaseException:
    """Return `error` with a traceback of the test's frames."""
    return error if keeps_all_frames() else error.with_traceback(_without_ours(error.__traceback__, in_ours=True))


def readable(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Take out of `error`, and of its causes, what only says the same again; return the frames of `trace` to show."""
    seen = [error]
    effect, cause = error, _cause(error)
    _inside(error)
    while cause is not None and all(cause is not each for each in seen):
        seen.append(cause)
        cause.__traceback__ = _without_ours(cause.__traceback__, in_ours=True)
        _inside(cause)
        if cause.__traceback__ is None and (type(cause), str(cause)) == (type(error), str(error)):
            effect.__cause__, effect.__suppress_context__ = cause.__cause__, True
        else:
            effect = cause
        cause = _cause(cause)
    return _without_ours(trace, in_ours=False)


def _inside(error: BaseException) -> None:
    """Do the same with the exceptions of a group."""
    for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        each.__traceback__ = readable(each, each.__traceback__)


def raised(error: BaseException) -> str:
    """Return the traceback of `error` as text, from the test on."""
    trace = error.__traceback__
    if not keeps_all_frames():
        trace = readable(error, trimmed(error).__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace))


def begins_nowhere(error: BaseException) -> bool:
    """Whether `error` was raised by this package for a test, and has no frame of the test: see `trimmed`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parent))


def has_ours(trace: TracebackType | None) -> bool:
    """Whether `trace` has frames of this package."""
    return any(each.tb_frame.f_code.co_filename.startswith(_OURS) for each in _each(trace))


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _without_ours(trace: TracebackType | None, *, in_ours: bool) -> TracebackType | None:
    """Return `trace` without the frames of this package, and without those that lead from there to the user's.

    Args:
        trace: what was raised.
        in_ours: whether it begins in this package.
    """
    kept: list[TracebackType] = []
    for each in _each(trace):
        name = each.tb_frame.f_code.co_filename
        if name.startswith(_OURS):
            in_ours = True
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith(_BEFORE):
                kept.pop()
        elif not (in_ours and name.startswith(_ON_THE_WAY)):
            in_ours = False
            kept.append(each)
    rest: TracebackType | None = None
    for each in reversed(kept):
        rest = TracebackType(rest, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rest


def _each(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
