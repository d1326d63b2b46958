"""`Child`, the parent's handle of the process of one rank.

Parent and child communicate over a socket pair, by pickled messages with a length in front. The parent sends the job,
and requests a report at the timeout. A thread of the child answers, so a report also shows the position of a blocked
event loop. If a fault kills the interpreter, its traceback goes to a file that both have open. The same holds for the
SIGABRT that the parent sends to a child that does not answer. A child whose parent has ended kills itself and its
children.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from typing import Any

from aiocoll.testing.child import HEADER, MAIN, ChildJob, RemoteCall
from aiocoll.testing.deaths import Death, describe_end, describe_expected, is_death

__all__ = ["GRACE", "Child"]

#: Seconds in which a process must end after a request to end, or after it has closed its channel.
GRACE = 2.0
#: Seconds in which a child must send its report; after an abort, seconds in which it must write its traceback.
ANSWER = 2.0
#: Seconds between two checks whether a process that has closed its channel has ended.
LOOK = 0.002
#: Python code that a child runs after it has taken over `sys.path` from the parent: both import the same package.
START = "from aiocoll.testing.child import main; main"


class Child:
    """The process of one rank, with the parent's end of the channel to it.

    Args:
        rank: rank of the child.
        world_size: number of ranks.
        environment: environment variables of the process.
        death: the death that the test expects of it, if any.
    """

    def __init__(self, rank: int, world_size: int, environment: dict[str, str], death: Death | None = None) -> None:
        self.rank = rank
        self._death = death
        #: Time of the rank's failure, on the monotonic clock that processes of a machine share; 0 if the process died.
        self.failed = 0.0
        #: Whether the rank's group can be used again: the last call succeeded and left no operation pending.
        self.clean = False
        #: The unretrieved failures of the rank's last call, if that call returned.
        self.unretrieved: list[str] = []
        self._name = f"rank {rank} of {world_size}"
        self._answer: asyncio.Future[str] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        with ExitStack() as stack:
            self._socket, remote = map(stack.enter_context, socket.socketpair())
            self._trace = stack.enter_context(tempfile.TemporaryFile())
            fds = remote.fileno(), self._trace.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path = {sys.path!r}; {START}({fds[0]}, {fds[1]})"],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                process_group=0,
            )
            stack.pop_all()
            remote.close()

    async def carry_out(self, job: ChildJob) -> Any:
        """Run `job` until the child ends; return the job's result or the child's expected death, or raise an error."""
        await self.send_job(job)
        outcome = await self._next_outcome()
        if outcome is not None:
            await self._next_outcome()  # wait for the end of the channel
        code = await self._reap()
        if self._death is not None:
            return self._check_death(self._death, outcome, code)
        if outcome is None or (code and outcome[0] == "returned"):
            raise self._make_death_error(code)
        return self._unwrap(outcome)

    def _check_death(self, death: Death, outcome: tuple[Any, ...] | None, code: int) -> Death:
        """Return the expected death if the process has died in this way; otherwise raise an error with the outcome."""
        # A death may come with an outcome: a function that raises SystemExit first reports this exception.
        if is_death(code, death) and (outcome is None or code):
            return death
        if outcome is None or outcome[0] == "returned":
            error: BaseException = self._make_death_error(code, returned=outcome is not None)
        else:
            error = self._make_error(*outcome[1:])
        error.add_note(f"{self._name} was expected to {describe_expected(death)}")
        raise error

    async def send_job(self, job: ChildJob) -> None:
        """Send the child its job."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self.send(job)

    async def call(self, call: RemoteCall) -> Any:
        """Make `call` in a persistent child; return its result or raise its exception."""
        self.unretrieved = []
        self.send(call)
        outcome = await self._next_outcome()
        if outcome is None:
            raise self._make_death_error(await self._reap())
        return self._unwrap(outcome)

    async def report(self) -> str:
        """Return the operations in flight and the stacks of the rank as text; abort a rank that does not answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self.send("report")
        await asyncio.wait([self._answer], timeout=ANSWER)
        if self._answer.done():
            return self._answer.result()
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGABRT)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER):
                await self.ended()
        return self._read_trace() or "  it does not answer, and SIGABRT does not end it: it may be stopped\n"

    def kill(self) -> None:
        """Kill the process and its children, if they still exist."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """Close the parent's descriptors after the end of the process."""
        self._trace.close()
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        self._socket.close()

    def send(self, message: Any) -> None:
        """Send a message to the child."""
        assert self._writer is not None
        data = pickle.dumps(message)
        self._writer.write(HEADER.pack(len(data)) + data)

    async def _next_outcome(self) -> tuple[Any, ...] | None:
        """Return the next outcome of a call; None if the child has closed its channel. Pass on earlier reports."""
        assert self._reader is not None
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                message: tuple[Any, ...] = _loads(await self._reader.readexactly(length))
                if message[0] != "report":
                    return message
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(message[1])
        return None

    def _unwrap(self, outcome: tuple[Any, ...]) -> Any:
        if outcome[0] == "returned":
            _, result, self.clean, self.unretrieved = outcome
            return result
        raise self._make_error(*outcome[1:])

    def _make_error(self, when: float, *what: Any) -> BaseException:
        self.failed = when
        self.clean = False
        return _rebuild_error(self._name, *what)

    def _make_death_error(self, code: int, *, returned: bool = False) -> ChildProcessError:
        self.failed = 0.0
        return ChildProcessError(f"{self._name} {describe_end(code, returned=returned)}\n{self._read_trace()}".rstrip())

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit code, or the negative number of its signal."""
        while (code := self.process.poll()) is None:  # noqa: ASYNC110 - there is nothing else to wait for
            await asyncio.sleep(LOOK)
        return code

    async def _reap(self) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                return await self.ended()
        self.kill()  # the process has closed its channel but still runs
        return await self.ended()

    def _read_trace(self) -> str:
        self._trace.seek(0)
        return self._trace.read().decode(errors="replace")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == MAIN else module, name)


def _loads(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


def _rebuild_error(name: str, data: bytes | None, text: str, trace: str) -> BaseException:
    """Unpickle the exception of a rank; if that fails, return a `RuntimeError` with its text."""
    error: BaseException = RuntimeError(f"{name} raised {text}")
    if data is not None:
        with suppress(Exception):
            error = _loads(data)
    error.add_note(f"its traceback on {name}:\n{trace}".rstrip())
    return error
