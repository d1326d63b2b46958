"""Modules that are loaded by the first call that needs them."""

from __future__ import annotations

from types import TracebackType

from aiocoll.errors import AiocollError, BackendUnavailableError

__all__ = ["loading"]


class loading:
    """Around an import inside a function: if it fails, the error says so by name, and the next call tries again.

    What fails is mostly not the module: a process without a descriptor left cannot open its file.

    Args:
        what: is to be loaded, for the message.
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
                f"cannot load what {self._what} take: {error}; if too many files are open, raise ulimit -n"
            ) from error
