"""`run_processes`: every rank in a process of its own.

Parent and child talk over a socket pair: pickled messages behind their length. The parent sends the call, then asks
for a report if time is up; a child answers from a thread, so it can tell where a blocked event loop stands. What the
interpreter writes when it is killed by a fault (or by the parent's SIGABRT, for a child that does not answer) goes to a
file that only the two of them know. A child whose parent is gone ends itself and what it has started.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

from aiocoll.options import GroupOptions, seconds
from aiocoll.store import StoreServer
from aiocoll.testing.child import HEADER, MAIN, Job
from aiocoll.testing.ranks import check_call
from aiocoll.testing.report import listed, verdict

__all__ = ["run_processes"]

R = TypeVar("R")

#: Seconds that ranks get to end by themselves when another has failed; its abort releases those who wait for it.
GRACE = 2.0
#: Seconds a child has to answer, and then to write its last words.
ANSWER = 2.0
#: Between two looks whether a process that has closed its channel has ended: it is about to.
LOOK = 0.002
#: What a child runs. It must find this package where its parent has it, so `sys.path` is set before.
START = "from aiocoll.testing.child import main; main"
#: 256 bits, the width of the hash that the handshake uses.
KEY_SIZE = 32


async def run_processes(
    world_size: int,
    fn: Callable[..., Awaitable[R]],
    *args: Any,
    options: GroupOptions | None = None,
    timeout: float | timedelta | None = 120.0,
    loop: Literal["asyncio", "uvloop"] = "asyncio",
) -> list[R]:
    """Run ``await fn(pg, *args)`` on `world_size` ranks, each in a new process of this machine. Not on Windows.

    In each, `current_process_group()` is its group, and the environment is as under ``aiocoll run``. Their output is
    this process's. No process is left when this returns or raises.

    Args:
        world_size: number of ranks.
        fn: what every rank runs; like `args` and the results it must be picklable, so it cannot be a lambda or local.
        args: further arguments.
        options: of the groups.
        timeout: seconds for everything, the start of the processes included; None waits for ever.
        loop: the event loop of the ranks.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        TimeoutError: some ranks did not end; the message has the stacks of their tasks and their pending operations.
        ChildProcessError: a process ended before its time; the message has its rank and its exit code or signal.
        BaseException: what `fn` raised on the first rank that failed. Its notes have that rank, its traceback there
            and the failures of others. An exception that cannot be pickled is a `RuntimeError` with its text.
    """
    check_call(world_size, fn)
    limit = seconds(timeout, "timeout")
    if loop not in ("asyncio", "uvloop"):
        raise ValueError(f"loop={loop!r}: must be 'asyncio' or 'uvloop'")
    call = _pickled(fn, args)
    key = secrets.token_bytes(KEY_SIZE)
    job = secrets.token_hex(8)
    server = StoreServer(key=key, job=job, world_size=world_size)
    host, port = server.start()
    try:
        settings = replace(options or GroupOptions(), job_key=key)
        places = [_environment(rank, world_size, host, port, job) for rank in range(world_size)]
        return await _Run(Job.of(fn, call, settings, loop)).results(places, limit)
    finally:
        await server.aclose()


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"fn and its arguments travel to other processes as a pickle, and these cannot: {error}; fn must be "
            "importable, a function at the top of a module"
        ) from error


def _environment(rank: int, world_size: int, host: str, port: int, job: str) -> dict[str, str]:
    """Return the variables of a rank, those of `aiocoll run`; a key of this process's job is not the children's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_JOB_KEY")}
    return kept | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "AIOCOLL_JOB_ID": job,
        "AIOCOLL_STORE": "launcher",
    }


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.children: list[_Child] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.failures: dict[int, BaseException] = {}
        self.stopping = False

    async def results(self, places: list[dict[str, str]], limit: float) -> list[Any]:
        try:
            for rank, environment in enumerate(places):
                self.children.append(_Child(rank, len(places), environment))
                self.tasks.append(asyncio.create_task(self._follow(self.children[rank]), name=f"rank {rank}"))
            await asyncio.wait(
                self.tasks, timeout=None if limit == float("inf") else limit, return_when=asyncio.FIRST_EXCEPTION
            )
            if self.failures:
                await asyncio.wait(self.tasks, timeout=GRACE)
            elif not all(task.done() for task in self.tasks):
                raise TimeoutError(await self._report(limit))
        finally:
            await self._stop()
        if self.failures:
            raise verdict(dict(sorted(self.failures.items(), key=self._time)), len(places))
        return [task.result() for task in self.tasks]

    async def _follow(self, child: _Child) -> Any:
        try:
            return await child.result(self.job)
        except BaseException as error:
            if not self.stopping:
                self.failures.setdefault(child.rank, error)
            raise

    def _time(self, failure: tuple[int, BaseException]) -> float:
        """When a rank failed: news of it may overtake each other. One that died may have been missed by others."""
        return self.children[failure[0]].failed

    async def _report(self, limit: float) -> str:
        late = [child for child, task in zip(self.children, self.tasks, strict=True) if not task.done()]
        lines = [f"{listed([child.rank for child in late])} of {len(self.children)} did not end within {limit:g} s\n"]
        for child, words in zip(late, await asyncio.gather(*(child.report() for child in late)), strict=True):
            lines.append(f"rank {child.rank} (process {child.process.pid})\n{words}")
        return "".join(lines)

    async def _stop(self) -> None:
        self.stopping = True
        for child in self.children:
            child.kill()
        if self.tasks:
            await asyncio.wait(self.tasks)
        for child, task in zip(self.children, self.tasks, strict=True):
            await child.aclose()
            if not task.cancelled():
                task.exception()  # it has been seen: no word of it in the log


class _Child:
    """One rank's process and the parent's end of its channel."""

    def __init__(self, rank: int, world_size: int, environment: dict[str, str]) -> None:
        self.rank = rank
        self.failed = 0.0
        self._name = f"rank {rank} of {world_size}"
        self._answer: asyncio.Future[str] | None = None
        self._writer: asyncio.StreamWriter | None = None
        with ExitStack() as stack:
            self._ours, theirs = map(stack.enter_context, socket.socketpair())
            self._trace = stack.enter_context(tempfile.TemporaryFile())
            fds = theirs.fileno(), self._trace.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path = {sys.path!r}; {START}({fds[0]}, {fds[1]})"],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
            )
            stack.pop_all()
            theirs.close()

    async def result(self, job: Job) -> Any:
        """Have the child carry out `job`; return its result or raise what it raised."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._ours)
        self._send(job)
        outcome: tuple[Any, ...] | None = None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                word, *content = _loads(await reader.readexactly(length))
                if word != "report":
                    outcome = word, *content
                elif self._answer is not None and not self._answer.done():
                    self._answer.set_result(content[0])
        code = await self._reap()
        if outcome is None or (code and outcome[0] == "returned"):
            raise ChildProcessError(f"{self._name} {_ending(code)}\n{self._last_words()}".rstrip())
        if outcome[0] == "raised":
            self.failed = outcome[1]
            raise _rebuilt(self._name, *outcome[2:])
        return outcome[1]

    async def report(self) -> str:
        """Return where the rank stands; one that does not answer is ended by that."""
        self._answer = asyncio.get_running_loop().create_future()
        self._send("report")
        await asyncio.wait([self._answer], timeout=ANSWER)
        if self._answer.done():
            return self._answer.result()
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGABRT)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER):
                await self._ended()
        return self._last_words() or "  it does not answer, and is not even able to abort: it may be stopped\n"

    def kill(self) -> None:
        """End the process and what it has started, if it is still there."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """Release what the parent holds, after the end of the process."""
        self._trace.close()
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        self._ours.close()

    def _send(self, message: Any) -> None:
        assert self._writer is not None
        data = pickle.dumps(message)
        self._writer.write(HEADER.pack(len(data)) + data)

    async def _reap(self) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                return await self._ended()
        self.kill()  # it has closed its channel, and lives on
        return await self._ended()

    async def _ended(self) -> int:
        while (code := self.process.poll()) is None:  # noqa: ASYNC110 - there is nothing else to wait for
            await asyncio.sleep(LOOK)
        return code

    def _last_words(self) -> str:
        self._trace.seek(0)
        return self._trace.read().decode(errors="replace")


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code} before its function had returned" if code == 0 else f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == MAIN else module, name)


def _loads(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


def _rebuilt(name: str, data: bytes | None, text: str, trace: str) -> BaseException:
    """Return what a rank raised; in words if it does not survive the journey."""
    error: BaseException = RuntimeError(f"{name} raised {text}")
    if data is not None:
        with suppress(Exception):
            error = _loads(data)
    error.add_note(f"its traceback on {name}:\n{trace}".rstrip())
    return error
