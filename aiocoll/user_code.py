"""Handling of exceptions from user code: reduce functions, hooks, pickled objects, log handlers, custom stores.

User code may raise any exception. The engine handles an `Exception` by failing the operation on every rank, with the
name of the function. Other exceptions control a task, a generator or the process, so they must not propagate through
the engine, and an await must not raise them. For example, a task that awaits a `CancelledError` counts as cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn
from weakref import WeakSet

__all__ = ["UserCodeError", "contain", "describe", "original"]


class UserCodeError(RuntimeError):
    """A wrapper for user exceptions that the engine must not raise: `StopIteration`, or no `Exception` subclass.

    Args:
        error: the exception.

    Attributes:
        error: the argument.
        handed_on: True if the event loop raises `error`, too.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"user code raised {describe(error)}")
        self.error = error
        self.handed_on = False
        self.__cause__ = error


def contain(error: BaseException) -> Exception:
    """Return an exception that the engine can handle in place of `error`, which user code has raised.

    `KeyboardInterrupt` and `SystemExit` are also meant for the program. The running loop raises them in its next
    iteration, as if one of its callbacks had raised them. Without a running loop, the main thread raises them here.
    Another thread returns an error to pass to this function in the loop.
    """
    if isinstance(error, UserCodeError):
        contained = error
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    else:
        contained = UserCodeError(error)
    if isinstance(contained.error, (KeyboardInterrupt, SystemExit)) and not contained.handed_on:
        loop = asyncio._get_running_loop()
        if loop is not None:
            contained.handed_on = True
            # Raise only the first such exception in a loop: a second one would interrupt the program's reaction to the
            # first, such as closing its groups.
            if loop not in _ending:
                _ending.add(loop)
                loop.call_soon(_raise, loop, contained.error)
        elif threading.current_thread() is threading.main_thread():
            raise contained.error
    return contained


def original(error: BaseException) -> BaseException:
    """Return the exception that user code has raised: `error` itself, or the one that a `UserCodeError` wraps."""
    return error.error if isinstance(error, UserCodeError) else error


def describe(error: BaseException) -> str:
    """Return a text with the type and the message of an exception that user code has raised."""
    error = original(error)
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as failed:
        contain(failed)
        text = "<str() of it failed>"
    return f"{name}: {text}" if text else name


#: Loops that are about to raise an exception that ends the program.
_ending: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def _raise(loop: asyncio.AbstractEventLoop, error: BaseException) -> NoReturn:
    _ending.discard(loop)
    raise error
