"""The other side of `run_processes`: what the process of one rank does."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

from aiocoll.group import ProcessGroup, process_group
from aiocoll.options import GroupOptions
from aiocoll.rendezvous import new_group
from aiocoll.testing.report import blocked, pending, raised, stack

__all__ = ["HEADER", "MAIN", "Job", "main"]

#: Before every message: its length in bytes.
HEADER = struct.Struct("<Q")
#: The name under which a child has its parent's `__main__`, so that it does not run as a program; multiprocessing's.
MAIN = "__mp_main__"


class Job(NamedTuple):
    """What a child has to do: import `module`, or load it from `file`; then unpickle `call` and run it."""

    module: str
    file: str | None
    call: bytes
    options: GroupOptions
    loop: str

    @classmethod
    def of(cls, fn: Callable[..., Any], call: bytes, options: GroupOptions, loop: str) -> Job:
        """Return the job of calling `fn`."""
        module = str(getattr(fn, "__module__", "__main__"))
        return cls(module, getattr(sys.modules.get(module), "__file__", None), call, options, loop)


def main(channel_fd: int, trace_fd: int) -> None:
    """Be a rank.

    Args:
        channel_fd: a connected socket; the first message on it is the `Job`.
        trace_fd: a file for the last words of the interpreter.
    """
    os.set_inheritable(channel_fd, False)
    os.set_inheritable(trace_fd, False)
    import resource  # not on Windows, where `run_ranks` shall still be importable

    # The parent aborts a process that does not answer; its stack is what is wanted, not a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with open(trace_fd, "wb") as trace, _Channel(socket.socket(fileno=channel_fd)) as channel:
        faulthandler.enable(trace)
        rank = _Rank(channel)
        try:
            channel.send(("returned", rank.run(channel.receive())))
        except BaseException as error:
            failed = rank.failed or time.monotonic()
            channel.send(("raised", failed, _pickled(error), _in_words(error), raised(error)))
        faulthandler.disable()


class _Channel:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        # Not closed: the end of the process tells the parent that this was all.
        self._sock.detach()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        with self._lock:
            self._sock.sendall(HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        (length,) = HEADER.unpack(self._exactly(HEADER.size))
        return pickle.loads(self._exactly(length))

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            piece = self._sock.recv(nbytes - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class _Rank:
    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pg: ProcessGroup | None = None
        #: When the function failed, on the clock that all processes of a machine share.
        self.failed: float | None = None

    def run(self, job: Job) -> Any:
        threading.Thread(target=self._listen, name="aiocoll-testing", daemon=True).start()
        _load(job)
        fn, args = pickle.loads(job.call)
        with asyncio.Runner(loop_factory=_loop_factory(job.loop)) as runner:
            self._loop = runner.get_loop()
            return runner.run(self._call(fn, args, job.options))

    async def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], options: GroupOptions) -> Any:
        async with new_group(options=options) as pg:
            self._pg = pg
            with process_group(pg):
                try:
                    return await fn(pg, *args)
                except BaseException:
                    self.failed = time.monotonic()  # leaving the group takes time, in which others fail
                    raise

    def _listen(self) -> None:
        """Answer the parent; when it is gone, so is this process with all it has started."""
        with suppress(EOFError, OSError):
            while self._channel.receive() == "report":
                self._channel.send(("report", self._report()))
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def _report(self) -> str:
        lines = [pending(self._pg)]
        loop = self._loop
        running = None if loop is None else asyncio.current_task(loop)
        if loop is None or running is not None:
            held = (
                "before its event loop runs" if running is None else f"in {running.get_name()}, holding the event loop"
            )
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            lines += [f"  {held}:\n", blocked(frame)]
        for task in [] if loop is None else asyncio.all_tasks(loop):
            if task is not running:
                lines += [f"  {task.get_name()}:\n", stack(task)]
        return "".join([*lines, *_threads()])


def _threads() -> Iterator[str]:
    """Where the threads are that the test has started."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread not in (threading.main_thread(), threading.current_thread()) and thread.ident in frames:
            yield f"  thread {thread.name}:\n" + blocked(frames[thread.ident])


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _load(job: Job) -> None:
    """Make the module of the function importable by its name, the way pytest or a shell has loaded it."""
    if job.module != "__main__":
        with suppress(ModuleNotFoundError):
            importlib.import_module(job.module)
            return
    if job.file is None:
        raise ModuleNotFoundError(f"fn is defined in {job.module}, which has no file that a rank could load")
    name = MAIN if job.module == "__main__" else job.module
    spec = importlib.util.spec_from_file_location(name, job.file)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[job.module] = module
    spec.loader.exec_module(module)


def _pickled(error: BaseException) -> bytes | None:
    """Return `error` as a pickle, if it comes back from one, and does not mean to end the process that raises it."""
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit | asyncio.CancelledError):
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _in_words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
