"""Modules that are loaded by the first call that needs them."""

from __future__ import annotations

from types import TracebackType

from aiocoll.errors import AiocollError, BackendUnavailableError

__all__ = ["loading"]


class loading:
    """Context of an import inside a function: if it fails, the error names what needed it; the next call tries again.

    The usual cause is not the module: a process that has no file descriptor left cannot open its file.

    Args:
        what: the kind of calls that need the module, for the message.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, (OSError, ImportError)) and not isinstance(error, AiocollError):
            raise BackendUnavailableError(
                f"cannot load the modules that {self._what} need: {error}; if too many files are open, raise ulimit -n"
            ) from error
