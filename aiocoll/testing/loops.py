"""Choice of the event loop for ranks that are processes: by name, or by the class of the test's loop."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from aiocoll.runtime import running_loop

__all__ = ["loop_factory", "loop_of_fixtures", "portable_loop"]


def loop_factory(loop: str | bytes) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a factory for the event loop that `loop` describes.

    Args:
        loop: "asyncio" or "uvloop", or the pickled class of a loop; see `portable_loop`.
    """
    if loop == "asyncio":
        return asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    assert isinstance(loop, bytes)
    try:
        kind: Any = pickle.loads(loop)
    except Exception as error:
        raise RuntimeError(
            f"the class of the test's event loop cannot be imported in the process of a rank: {error}"
        ) from error

    def make() -> asyncio.AbstractEventLoop:
        try:
            made: asyncio.AbstractEventLoop = kind()
        except TypeError as error:
            raise TypeError(
                f"the test's event loop is a {kind.__qualname__}, which the process of a rank cannot make without "
                f"arguments: {error}; give the arguments defaults, or use ranks that are tasks"
            ) from error
        return made

    return make


def portable_loop(name: str | None) -> str | bytes:
    """Return a picklable description of an event loop, for `loop_factory` in another process.

    Args:
        name: "asyncio" or "uvloop"; None means the class of the running loop, made without arguments.

    Raises:
        ValueError: there is no loop of this name.
        TypeError: other processes cannot import the class of the running loop.
    """
    if name is None:
        return _portable(running_loop())
    if name not in ("asyncio", "uvloop"):
        raise ValueError(f"loop={name!r}: must be 'asyncio' or 'uvloop'")
    return name


def loop_of_fixtures(fixtures: Mapping[str, Any]) -> str | bytes:
    """Return a picklable description of the loop that a test's fixtures choose, by `asyncio.Runner` or anyio's backend.

    Args:
        fixtures: values of the test's fixtures.
    """
    for value in fixtures.values():
        if isinstance(value, asyncio.Runner):
            return _portable(value.get_loop())
    backend = fixtures.get("anyio_backend")
    given = backend[1] if isinstance(backend, tuple) else {}
    if (factory := given.get("loop_factory")) is not None:
        with closing(factory()) as loop:
            return _portable(loop)
    return "uvloop" if given.get("use_uvloop") else "asyncio"


def _portable(loop: asyncio.AbstractEventLoop) -> str | bytes:
    kind = type(loop)
    if kind is asyncio.SelectorEventLoop:
        return "asyncio"
    if kind.__module__.partition(".")[0] == "uvloop":
        return "uvloop"
    try:
        return pickle.dumps(kind)
    except Exception as error:
        raise TypeError(
            f"the test's event loop is a {kind.__qualname__}, which ranks that are processes cannot import: {error}; "
            "define the class at the top of a module, or use ranks that are tasks"
        ) from error
