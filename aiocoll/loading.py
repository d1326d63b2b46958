"""`loading`: a context manager for imports inside functions, which load a module at its first use."""

from __future__ import annotations

from types import TracebackType

from aiocoll.errors import AiocollError, BackendUnavailableError

__all__ = ["loading"]


class loading:
    """A context manager for an import inside a function; if the import fails, the error names the feature.

    The next call tries again. The usual cause is not the module itself: without a free file descriptor, a process
    cannot open the module's file.

    Args:
        what: the calls that need the module, for the message.
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
