"""Removal of this package's frames from the tracebacks in reports of failed tests.

The option ``--full-trace`` of pytest keeps all frames.
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

__all__ = [
    "clean_up",
    "format_error",
    "has_package_frames",
    "is_without_frames",
    "keep_all_frames",
    "keeps_all_frames",
    "trim",
]

#: Path prefix of all files of the package aiocoll.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
#: File name prefixes of event loop modules. They call the test, and this package calls them to end a task.
_CALLERS = (str(Path(asyncio.__file__).parent) + os.sep, "uvloop")
#: File name prefixes of modules between the user's code and this package, as for ``asyncio.run`` and ``async with``.
_ENTRY_MODULES = (*_CALLERS, contextlib.__file__)

_all_frames: ContextVar[bool] = ContextVar("all frames", default=False)


def keep_all_frames() -> None:
    """Set a context variable that makes failure reports show all frames."""
    _all_frames.set(True)


def keeps_all_frames() -> bool:
    """Return whether failure reports show all frames, by the context variable that `keep_all_frames` sets."""
    return _all_frames.get()


def trim(error: BaseException) -> BaseException:
    """Return `error` with a traceback that has only the test's frames."""
    return (
        error
        if keeps_all_frames()
        else error.with_traceback(_remove_package_frames(error.__traceback__, in_package=True))
    )


def clean_up(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Remove package frames and repeated causes from the causes of `error`; return `trace` without package frames."""
    seen = [error]
    effect, cause = error, _cause(error)
    _clean_up_group(error)
    while cause is not None and all(cause is not each for each in seen):
        seen.append(cause)
        cause.__traceback__ = _remove_package_frames(cause.__traceback__, in_package=True)
        _clean_up_group(cause)
        if cause.__traceback__ is None and (type(cause), str(cause)) == (type(error), str(error)):
            effect.__cause__, effect.__suppress_context__ = cause.__cause__, True
        else:
            effect = cause
        cause = _cause(cause)
    return _remove_package_frames(trace, in_package=False)


def _clean_up_group(error: BaseException) -> None:
    """Apply `clean_up` to each exception in an exception group."""
    for each in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        each.__traceback__ = clean_up(each, each.__traceback__)


def format_error(error: BaseException) -> str:
    """Return the traceback of `error` as text, beginning with the test's frame."""
    trace = error.__traceback__
    if not keeps_all_frames():
        trace = clean_up(error, trim(error).__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace))


def is_without_frames(error: BaseException) -> bool:
    """Return whether aiocoll.testing itself raised `error`, so that `trim` leaves no frame of the test."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parent))


def has_package_frames(trace: TracebackType | None) -> bool:
    """Return whether `trace` has frames of this package."""
    return any(each.tb_frame.f_code.co_filename.startswith(_PACKAGE) for each in _each_traceback(trace))


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _remove_package_frames(trace: TracebackType | None, *, in_package: bool) -> TracebackType | None:
    """Return `trace` without frames of this package, and without asyncio frames right before or after those.

    Args:
        trace: the traceback of an exception.
        in_package: whether it begins in this package.
    """
    kept: list[TracebackType] = []
    for each in _each_traceback(trace):
        name = each.tb_frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            in_package = True
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith(_ENTRY_MODULES):
                kept.pop()
        elif not (in_package and name.startswith(_CALLERS)):
            in_package = False
            kept.append(each)
    rest: TracebackType | None = None
    for each in reversed(kept):
        rest = TracebackType(rest, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rest


def _each_traceback(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
