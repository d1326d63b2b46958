"""Report of a failed run: which rank failed first, and where each rank waits."""

from __future__ import annotations

import asyncio
import sys
import traceback
import unittest
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from aiocoll.errors import GroupError
from aiocoll.group.process_group import ProcessGroup

__all__ = ["first_failure", "format_pending", "format_ranks", "task_stack", "thread_stack", "unretrieved"]

_HERE = str(Path(__file__).parent)


def task_stack(task: asyncio.Task[Any]) -> str:
    """Return the stack of a waiting task as text: its coroutine and the awaited coroutines, outermost first.

    `Task.get_stack` returns only the outermost coroutine. Frames of this package are left out.
    """
    frames = ((frame, line) for frame, line in _frames(task) if not frame.f_code.co_filename.startswith(_HERE))
    return "".join(traceback.StackSummary.extract(frames).format()) or "  (not inside the function)\n"


def _frames(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int]]:
    awaited: Any = task.get_coro()
    while awaited is not None:
        # Coroutines, generators and asynchronous generators have different names for the same two attributes.
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, name, None))), None)
        if frame is not None:
            yield frame, frame.f_lineno
        awaited = next(
            (a for name in ("cr_await", "gi_yieldfrom", "ag_await") if (a := getattr(awaited, name, None))), None
        )


def thread_stack(frame: FrameType) -> str:
    """Return the stack of a thread that runs `frame` as text, without this package's frames at its start."""
    frames: list[tuple[FrameType, int]] = []
    for called, line in traceback.walk_stack(frame):
        if called.f_code.co_filename.startswith(_HERE):
            break
        frames.append((called, line))
    return "".join(traceback.StackSummary.extract(reversed(frames)).format())


def format_pending(pg: ProcessGroup | None) -> str:
    """Return a line that lists the operations in flight of `pg`."""
    if pg is None:
        return "  the group is not formed\n"
    works = ", ".join(map(repr, pg.pending()))
    return f"  pending: {works or 'no operation'}\n"


def first_failure(
    failures: Mapping[int, BaseException], world_size: int, cut_off: list[int], found: Mapping[int, list[str]]
) -> BaseException:
    """Return the first failure; its notes name its rank, the failures of other ranks, and the ranks that did not end.

    A skip is returned only if no rank failed otherwise, because a skip must not hide a failure.

    Args:
        failures: failures by rank, the first one first.
        world_size: number of ranks.
        cut_off: ranks that continued after their release and were stopped, so that their outcome is unknown.
        found: unretrieved failures, by rank that returned. They may explain a `GroupError`, but no other failure.
    """
    first, error = next(iter(failures.items()))
    if _is_skip(error):
        others = [(rank, other) for rank, other in failures.items() if not (_is_consequence(other) or _is_skip(other))]
        if not others:
            return error
        first, error = others[0]
    error.add_note(f"rank {first} of {world_size} failed first")
    for rank, other in failures.items():
        if rank != first and not _is_consequence(other):
            what = "skipped the test" if _is_skip(other) else "failed too"
            error.add_note(f"rank {rank} of {world_size} {what}: {type(other).__name__}: {other}")
    if _is_consequence(error):
        for line in _describe_unretrieved(found, world_size):
            error.add_note(line)
    if cut_off:
        error.add_note(f"{format_ranks(cut_off)} of {world_size} continued, and had to be stopped")
    return error


def unretrieved(found: Mapping[int, list[str]], world_size: int) -> AssertionError:
    """Return the error for a test in which all ranks returned, but some never retrieved the failure of a call."""
    advice = "await these calls, or pass allow_unretrieved=True"
    return AssertionError("\n".join([*_describe_unretrieved(found, world_size), advice]))


def _describe_unretrieved(found: Mapping[int, list[str]], world_size: int) -> Iterator[str]:
    for rank, texts in sorted(found.items()):
        for text in texts:
            yield f"rank {rank} of {world_size}, {text}"


def _is_consequence(error: BaseException) -> bool:
    """Return whether `error` is only a consequence of another rank's failure."""
    return isinstance(error, GroupError | asyncio.CancelledError)


def _is_skip(error: BaseException) -> bool:
    pytest = sys.modules.get("pytest")  # if pytest was not imported, the error cannot be its skip
    return isinstance(error, unittest.SkipTest) or (pytest is not None and isinstance(error, pytest.skip.Exception))


def format_ranks(ranks: list[int]) -> str:
    """Return the ranks as a phrase, such as ``rank 1`` or ``ranks 0, 2 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
