"""Output for terminals: colours, error lines, and a progress line.

Colours follow https://no-color.org. A non-empty `NO_COLOR` turns them off. Otherwise a non-empty `FORCE_COLOR` turns
them on without a terminal, as in the log of a CI job.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Literal, Self, TextIO

__all__ = ["Progress", "Style", "has_colours", "print_error", "styled", "write_stderr"]

Style = Literal["heading", "good", "bad", "hint"]

_CODES: dict[Style, str] = {"heading": "1", "good": "32", "bad": "1;31", "hint": "33"}
#: Escape sequence that moves to the start of the line and erases it.
_CLEAR = "\r\x1b[K"
#: Seconds between two updates of the progress line.
_AGAIN = 1.0


def has_colours(stream: TextIO) -> bool:
    """Return whether text written to `stream` should have colours."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _is_terminal(stream)


def styled(text: str, style: Style, stream: TextIO) -> str:
    """Return `text` in the colour of `style` if `stream` has colours, else unchanged."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if has_colours(stream) else text


def print_error(command: str, error: object) -> None:
    """Print an error of a subcommand, or of `aiocoll` itself if `command` is empty."""
    write_stderr([f"{styled(f'aiocoll {command}'.strip() + ':', 'bad', sys.stderr)} {error}"])


def write_stderr(lines: Iterable[str]) -> None:
    """Write lines to standard error in one write, so that lines of several threads do not mix."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


def _is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Progress:
    """A progress line on standard error, for a ``with`` block; only on terminals.

    Call `clear` before printing anything else.
    """

    def __init__(self) -> None:
        self._shown = _is_terminal(sys.stderr)
        self._there = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Replace the progress line by `text`, which should have less than 80 characters."""
        if self._shown:
            print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)
            self._there = True

    def clear(self) -> None:
        """Erase the progress line."""
        if self._there:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            self._there = False

    @asynccontextmanager
    async def watching(self, look: Callable[[int], Awaitable[str]]) -> AsyncIterator[None]:
        """Within the block, show `look(seconds)` once a second, with the seconds since the block began."""
        watcher = asyncio.create_task(self._watch(look), name="aiocoll progress") if self._shown else None
        try:
            yield
        finally:
            if watcher is not None:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
                self.clear()

    async def _watch(self, look: Callable[[int], Awaitable[str]]) -> None:
        seconds = 0
        while True:
            self.show(await look(seconds))
            await asyncio.sleep(_AGAIN)
            seconds += 1
