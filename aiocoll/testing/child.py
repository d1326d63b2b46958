"""The code of a rank's process, which a `Team` starts."""

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

from aiocoll.group.current import process_group
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.new_group import new_group
from aiocoll.testing.frames import format_error, keep_all_frames, keeps_all_frames
from aiocoll.testing.loops import loop_factory
from aiocoll.testing.report import format_pending, task_stack, thread_stack
from aiocoll.unretrieved import Collector, collecting
from aiocoll.user_code import describe

__all__ = ["HEADER", "MAIN", "ChildJob", "RemoteCall", "main"]

#: Header of every message: its length in bytes.
HEADER = struct.Struct("<Q")
#: Module name for the parent's main program in a child, so that it does not run as `__main__`; as in multiprocessing.
MAIN = "__mp_main__"


class ChildJob(NamedTuple):
    """The task of a child process: import `module`, or load it from `file`; then unpickle `call` and run it.

    With None as `call`, the child waits for `RemoteCall`s and makes each of them.
    """

    module: str
    file: str | None
    call: bytes | None
    options: GroupOptions
    loop: str | bytes
    all_frames: bool

    @classmethod
    def of(cls, source: Any, options: GroupOptions, loop: str | bytes) -> ChildJob:
        """Return a job for a persistent child, which waits for calls of functions in the module of `source`."""
        module = str(getattr(source, "__module__", "__main__"))
        return cls(module, getattr(sys.modules.get(module), "__file__", None), None, options, loop, keeps_all_frames())


class RemoteCall(NamedTuple):
    """A function call that all persistent ranks make in the group number `group`; a higher number means a new group.

    With None as `call`, the ranks close the group.
    """

    call: bytes | None
    group: int


def main(channel_fd: int, trace_fd: int) -> None:
    """Run this process as a rank.

    Args:
        channel_fd: a connected socket; the first message on it is the `ChildJob`.
        trace_fd: a file for the interpreter's traceback if a fault kills it.
    """
    os.set_inheritable(channel_fd, False)
    os.set_inheritable(trace_fd, False)
    import resource  # not at the top: Windows lacks it, and `run_ranks` must be importable there

    # The parent aborts a process that does not answer, only to get its stack, so disable core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with open(trace_fd, "wb") as trace, _Channel(socket.socket(fileno=channel_fd)) as channel:
        faulthandler.enable(trace)
        rank = _Rank(channel)
        try:
            channel.send(("returned", *rank.run(channel.receive())))
        except BaseException as error:
            channel.send(_make_failure(error, rank.failed or time.monotonic()))
            if isinstance(error, SystemExit):
                raise
        finally:
            faulthandler.disable()


class _Channel:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def __enter__(self) -> _Channel:
        return self

    def __exit__(self, *_: object) -> None:
        # Do not close the socket: the end of the process closes it, which notifies the parent that no messages follow.
        self._sock.detach()

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        with self._lock:
            self._sock.sendall(HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        (length,) = HEADER.unpack(self._receive_exactly(HEADER.size))
        return pickle.loads(self._receive_exactly(length))

    def _receive_exactly(self, nbytes: int) -> bytes:
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
        self._calls: asyncio.Queue[RemoteCall | None] = asyncio.Queue()
        self._calling: asyncio.Task[tuple[Any, ...]] | None = None
        self._collector = Collector()
        #: Time at which the called function failed, on the clock that all processes of a machine share.
        self.failed: float | None = None

    def run(self, job: ChildJob) -> tuple[Any, bool, list[str]]:
        """Carry out `job`; return the result, whether the group can be used again, and the unretrieved failures."""
        if isinstance(job.loop, bytes):
            _load(job)  # the module may define the class of the loop
        with (
            collecting() as self._collector,  # entered before the runner, whose tasks run in a copy of this context
            asyncio.Runner(loop_factory=loop_factory(job.loop)) as runner,
        ):
            loop = runner.get_loop()
            threading.Thread(target=self._listen, args=(loop,), name="aiocoll-testing", daemon=True).start()
            if job.all_frames:
                keep_all_frames()
            _load(job)
            self._loop = loop
            if job.call is None:
                result = runner.run(self._serve_calls(job.options))
            else:
                fn, args = pickle.loads(job.call)
                result = runner.run(self._call(fn, args, job.options))
        return result, True, self._collector.finish()

    async def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], options: GroupOptions) -> Any:
        async with new_group(options=options) as pg:
            self._pg = pg
            with process_group(pg):
                try:
                    return await fn(pg, *args)
                except BaseException:
                    self.failed = time.monotonic()  # before this rank leaves the group, which may make others fail
                    raise

    async def _serve_calls(self, options: GroupOptions) -> None:
        """Make the calls that the parent sends, until it sends "stop". Calls with equal group numbers use one group."""
        number = 0
        while (call := await self._calls.get()) is not None:
            if call.group != number:
                number, last, self._pg = call.group, self._pg, None
            else:
                last = None
            # Use a separate task, which can be cancelled, and whose exceptions do not end this loop.
            self._calling = asyncio.create_task(self._answer(call, last, options), name="test")
            await asyncio.wait([self._calling])
            await _end_tasks()
            self._channel.send(self._calling.result())
        if self._pg is not None:
            await self._pg.shutdown()

    async def _answer(self, call: RemoteCall, last: ProcessGroup | None, options: GroupOptions) -> tuple[Any, ...]:
        try:
            if call.call is None:
                assert self._pg is not None
                await self._pg.shutdown()
                return "returned", None, False, self._collector.finish()
            if self._pg is None:
                if last is not None:
                    last.abort("the test of this group has ended")
                    await last.shutdown()
                self._collector.finish()  # drop the unretrieved failures of the failed test
                self._pg = await new_group(options=options, name=f"test group {call.group}")
            fn, args = pickle.loads(call.call)
            with process_group(self._pg):
                result = await fn(self._pg, *args)
        except BaseException as error:
            failed = time.monotonic()
            if self._pg is not None:
                self._pg.abort(describe(error))
            return _make_failure(error, failed)
        clean = parts_of(self._pg).comm.cause is None and not self._pg.pending()
        return "returned", result, clean, self._collector.finish()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the parent's messages in a thread; when the parent has ended, kill this process and its children."""
        with suppress(EOFError, OSError):
            while True:
                message = self._channel.receive()
                if message == "report":
                    self._channel.send(("report", self._report()))
                elif message == "cancel":
                    loop.call_soon_threadsafe(self._cancel)
                else:
                    loop.call_soon_threadsafe(self._calls.put_nowait, None if message == "stop" else message)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def _cancel(self) -> None:
        if self._calling is not None:
            self._calling.cancel()

    def _report(self) -> str:
        lines = [format_pending(self._pg)]
        loop = self._loop
        running = None if loop is None else asyncio.current_task(loop)
        if loop is None or running is not None:
            held = (
                "before its event loop runs" if running is None else f"in {running.get_name()}, holding the event loop"
            )
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            lines += [f"  {held}:\n", thread_stack(frame)]
        for task in [] if loop is None else asyncio.all_tasks(loop):
            if task is not running:
                lines += [f"  {task.get_name()}:\n", task_stack(task)]
        return "".join([*lines, *_threads()])


def _threads() -> Iterator[str]:
    """Yield the stack of each thread that the test has started, as text."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread not in (threading.main_thread(), threading.current_thread()) and thread.ident in frames:
            yield f"  thread {thread.name}:\n" + thread_stack(frames[thread.ident])


def _load(job: ChildJob) -> None:
    """Import the module of the called function by name, even if pytest or a shell has loaded the module from a file."""
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


async def _end_tasks() -> None:
    """Cancel the tasks that a test has left running, as `asyncio.run` does at its end."""
    here = asyncio.current_task()
    left = [task for task in asyncio.all_tasks() if task is not here and not task.get_name().startswith("aiocoll")]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left)


def _make_failure(error: BaseException, when: float) -> tuple[Any, ...]:
    return "raised", when, _pickled(error), _format_text(error), format_error(error)


def _pickled(error: BaseException) -> bytes | None:
    """Pickle `error`; return None if it cannot be unpickled, or is an exception that ends the process."""
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit | asyncio.CancelledError):
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _format_text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
