"""The start code of a rank's process: it runs the program as Python would, and reports exceptions to the launcher.

The launcher runs this file by its path: ``python start.py PARENT FD (SCRIPT | -m MODULE) [ARG ...]``. PARENT is the
process id of the launcher; on Linux the rank dies with it. FD is a pipe for reports. An uncaught exception is reported
as a line of JSON:

    time        the time at which it left the program, by `time.monotonic`, which all processes of a host share
    degree      0 if this rank failed by itself, 2 if because of another rank, 1 if that is not clear: see `_degree`
    code        the exit code of `sys.exit`, null for any other exception
    error       the exception in one line; for `sys.exit`, the exception that led to it, "" if there is none
    place       the program's line that raised or was interrupted, "" if there is none
    late        the ranks for which a collective waited until its timeout; empty for any other exception
    group       the name of the group that the exception is about, "" if there is none
    traceback   the text that Python would have shown, without causes that repeat the message and have no traceback

The launcher prints the traceback instead of the interpreter, which would mix it with the output of other ranks. This
module imports nothing of the package, because a program may not use aiocoll, and must not wait for the import. The
package finds this module in `sys.modules`, and reports an elastic group with `report_elastic`.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import time
from contextlib import suppress
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceback import TracebackException

__all__ = ["report_elastic"]

_PR_SET_PDEATHSIG = 1
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Reports omit traceback frames whose file name has one of these prefixes: frames between interpreter and program.
_ON_THE_WAY = (os.path.abspath(__file__), __file__, "<frozen runpy>", "<frozen importlib._bootstrap")
#: Errors of the library that report a failure of another rank.
_NEWS = ("GroupError", "RendezvousError", "StoreTimeoutError", "StoreUnavailableError")
#: Name under which this module, which is executed by its path, registers itself in `sys.modules` for the package.
_NAME = "aiocoll.cli.start"
#: Maximum length of an exception's text in one line. Some messages contain a whole array.
_LONGEST = 400
#: The process id of this rank, and the descriptor of the pipe to its launcher.
_rank = [-1, -1]
_is_writing_stack = False


def report_elastic() -> None:
    """Report to the launcher that this rank is in an elastic group. In a forked child, which is no rank, do nothing."""
    pid, pipe = _rank
    if os.getpid() == pid:
        with suppress(OSError):  # the launcher is gone
            os.write(pipe, b'{"elastic": true}\n')


def _main() -> None:
    parent, fd, *command = sys.argv[1:]
    _die_with(int(parent))
    pid, pipe = os.getpid(), int(fd)
    os.set_inheritable(pipe, False)
    sys.modules[_NAME] = sys.modules[__name__]
    _rank[:] = pid, pipe
    if hasattr(signal, "SIGUSR2"):
        setattr(_write_stack, "stands_in_for_aiocoll", True)  # noqa: B010 - a name that `dump.signals` looks for
        signal.signal(signal.SIGUSR2, _write_stack)
    try:
        if command[0] == "-m":
            _run_module(command[1:])
        else:
            _run_script(command)
    except BaseException as error:
        error.__traceback__ = _skip_package_frames(error.__traceback__)
        # Report only in the rank's own process, not in a forked child. Keep an excepthook that the program has set.
        if os.getpid() == pid and _report(error, pipe) and sys.excepthook is sys.__excepthook__:
            sys.excepthook = lambda *_: None
        raise


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the launcher had already ended when prctl was called
            os.kill(os.getpid(), signal.SIGKILL)


def _write_stack(number: int, frame: FrameType | None) -> None:
    """Handle SIGUSR2 while no group is open: write the stack of the main thread. A group installs its own handler."""
    global _is_writing_stack
    if _is_writing_stack:  # a further signal, while a write waits for the launcher
        return
    signals = sys.modules.get("aiocoll.dump.signals")
    if signals is None or not signals.listening():
        import traceback

        _is_writing_stack = True
        try:
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            text = f"SIGUSR2: this rank has no open group; its main thread is at\n{where}"
            os.write(2, text.encode(errors="replace"))
        finally:
            _is_writing_stack = False


def _run_script(command: list[str]) -> None:
    path = command[0]
    sys.argv = command
    main = _fresh_main()
    if _is_archive(path):
        _set_path(os.path.abspath(path))
        import runpy

        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _set_path(os.path.dirname(os.path.realpath(path)))
    full = os.path.abspath(path)
    compiled = full.endswith(".pyc")
    loader = SourcelessFileLoader("__main__", full) if compiled else SourceFileLoader("__main__", full)
    main.__dict__.update(__file__=full, __loader__=loader, __cached__=None)
    if isinstance(loader, SourceFileLoader):
        code = loader.source_to_code(loader.get_data(full), full)
    else:
        found = loader.get_code("__main__")
        assert found is not None
        code = found
    exec(code, main.__dict__)


def _run_module(command: list[str]) -> None:
    sys.argv = ["-m", *command[1:]]
    _set_path(os.getcwd())
    _fresh_main()
    import runpy

    runpy._run_module_as_main(command[0])  # type: ignore[attr-defined]


def _fresh_main() -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    return main


def _set_path(first: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = first


def _is_archive(path: str) -> bool:
    import zipimport

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _skip_package_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_ON_THE_WAY):
        trace = trace.tb_next
    return trace


# -- the report


def _report(error: BaseException, pipe: int) -> bool:
    """Send a report of `error` to the launcher, which shows it; return whether the report was sent."""
    now = time.monotonic()
    is_exit = isinstance(error, SystemExit)
    if is_exit and _exit_code(error) == 0:
        return False
    try:
        import json
        import traceback

        degree = _degree(error)
        shown = error if not is_exit else _previous_error(error) if degree else None
        report = {
            "time": now,
            "degree": degree,
            "code": _exit_code(error) if is_exit else None,
            "error": "" if shown is None else _in_one_line(shown),
            "place": "" if shown is None else _place(shown),
            "late": _late_ranks(shown),
            "group": getattr(shown, "group", None) or "",
            "traceback": "" if is_exit else _format(traceback.TracebackException.from_exception(error)),
        }
        data = memoryview(json.dumps(report).encode() + b"\n")
        while data:
            data = data[os.write(pipe, data) :]
    except Exception:
        return False
    return True


def _exit_code(error: BaseException) -> int:
    code = getattr(error, "code", None)
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def _previous_error(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _degree(error: BaseException) -> int:
    """Return whether `error` is only a consequence of another rank's failure: 0 (no), 1 (maybe) or 2 (surely).

    An exception may have followed another, by ``raise ... from`` or in an ``except`` block, as ``sys.exit(1)`` often
    does. The result describes this chain. 0: no exception in it reports another rank's failure. 2: the first one does.
    1: only a later one does. The first may have led to it, or may be unrelated.
    """
    chain = [error]
    while (before := _previous_error(chain[-1])) is not None and all(before is not each for each in chain):
        if _is_news(chain[-1]) and isinstance(before, OSError | EOFError):
            break  # an OSError of a lost connection
        chain.append(before)
    if _is_news(chain[-1]):
        return 2
    if isinstance(chain[-1], BaseExceptionGroup):
        return min(_degree(each) for each in chain[-1].exceptions)
    return int(any(_is_news(each) for each in chain))


def _is_news(error: BaseException) -> bool:
    errors = sys.modules.get("aiocoll.errors")
    return errors is not None and isinstance(error, tuple(getattr(errors, name) for name in _NEWS))


def _late_ranks(error: BaseException | None) -> list[int]:
    errors = sys.modules.get("aiocoll.errors")
    return list(error.ranks) if errors is not None and isinstance(error, errors.CollectiveTimeoutError) else []


def _in_one_line(error: BaseException) -> str:
    import traceback

    text = traceback.format_exception_only(error)[-1].strip().split("\n")[0]
    return f"{text[:_LONGEST]}…" if len(text) > _LONGEST else text


def _place(error: BaseException) -> str:
    """Return the innermost program line in the traceback of `error`; for Ctrl-C in asyncio.run, the cancelled line."""
    trace = error.__traceback__
    inner = error.__context__
    if isinstance(error, KeyboardInterrupt) and inner is not None and type(inner).__name__ == "CancelledError":
        trace = inner.__traceback__
    return next((f"{name}:{line} in {code}" for name, line, code in reversed(_places(trace))), "")


def _places(trace: TracebackType | None) -> list[tuple[str, int | None, str]]:
    """Return file, line and function of the program's frames in a traceback; of all frames if none is the program's."""
    places: list[tuple[str, int | None, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    others = (_PACKAGE, os.path.dirname(os.__file__), "<")
    return [each for each in places if not each[0].startswith(others)] or places


def _format(found: TracebackException) -> str:
    """Return a traceback as text, without causes from other ranks, which have no frames and repeat the message."""
    each: TracebackException | None = found
    while each is not None:
        cause = each.__cause__
        if cause is not None and not cause.stack and str(cause) == str(each):
            each.__cause__, each.__suppress_context__ = cause.__cause__, True
        each = each.__cause__ or each.__context__
    return "".join(found.format())


if __name__ == "__main__":
    _main()
