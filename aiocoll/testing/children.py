"""The parent's side of a rank's process.

Parent and child communicate by a socket pair: pickled messages with their length in front. The parent sends the job,
and asks for a report at the timeout; a child answers from a thread, so it can report where a blocked event loop is. The
traceback of an interpreter that is killed by a fault (or by the parent's SIGABRT, for a child that does not answer)
goes to a file that both have open. A child whose parent is gone ends itself and its children.
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
from aiocoll.testing.deaths import Death, ending, is_death, wanted

__all__ = ["GRACE", "Child"]

#: Seconds that ranks get to end once they have been told to, or have closed their channel.
GRACE = 2.0
#: Seconds a child has to answer, and then to write its traceback.
ANSWER = 2.0
#: Seconds between two checks whether a process that has closed its channel has ended.
LOOK = 0.002
#: What a child runs. It must find this package where its parent has it, so `sys.path` is set before.
START = "from aiocoll.testing.child import main; main"


class Child:
    """One rank's process and the parent's end of its channel.

    Args:
        rank: its rank.
        world_size: number of ranks.
        environment: of the process.
        death: the death that it is expected to die, if any.
    """

    def __init__(self, rank: int, world_size: int, environment: dict[str, str], death: Death | None = None) -> None:
        self.rank = rank
        self._death = death
        #: When its function failed, on the monotonic clock that all processes of a machine share; 0 if it died.
        self.failed = 0.0
        #: Whether its group can be used again: the last call succeeded and left nothing pending.
        self.clean = False
        #: The unretrieved failures of its last call, if that returned.
        self.unretrieved: list[str] = []
        self._name = f"rank {rank} of {world_size}"
        self._answer: asyncio.Future[str] | None = None
        self._reader: asyncio.StreamReader | None = None
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

    async def carry_out(self, job: ChildJob) -> Any:
        """Let the child carry out `job` and end; return its result, or the expected death, or raise its exception."""
        await self.give(job)
        outcome = await self._next()
        if outcome is not None:
            await self._next()  # no more messages
        code = await self._reap()
        if self._death is not None:
            return self._expected(self._death, outcome, code)
        if outcome is None or (code and outcome[0] == "returned"):
            raise self._died(code)
        return self._unwrapped(outcome)

    def _expected(self, death: Death, outcome: tuple[Any, ...] | None, code: int) -> Death:
        """Return the death of a process that was expected to die; raise what has come instead."""
        # What raises SystemExit has an outcome, too.
        if is_death(code, death) and (outcome is None or code):
            return death
        if outcome is None or outcome[0] == "returned":
            error: BaseException = self._died(code, returned=outcome is not None)
        else:
            error = self._raised(*outcome[1:])
        error.add_note(f"{self._name} was expected to {wanted(death)}")
        raise error

    async def give(self, job: ChildJob) -> None:
        """Send the child its job."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._ours)
        self.tell(job)

    async def call(self, call: RemoteCall) -> Any:
        """Let a standing child make `call`; return its result or raise its exception."""
        self.unretrieved = []
        self.tell(call)
        outcome = await self._next()
        if outcome is None:
            raise self._died(await self._reap())
        return self._unwrapped(outcome)

    async def report(self) -> str:
        """Return where the rank is; one that does not answer is aborted."""
        self._answer = asyncio.get_running_loop().create_future()
        self.tell("report")
        await asyncio.wait([self._answer], timeout=ANSWER)
        if self._answer.done():
            return self._answer.result()
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGABRT)
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER):
                await self.ended()
        return self._last_words() or "  it does not answer, and cannot even abort: it may be stopped\n"

    def kill(self) -> None:
        """Kill the process and its children, if they still exist."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def aclose(self) -> None:
        """Release the parent's descriptors, after the end of the process."""
        self._trace.close()
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        self._ours.close()

    def tell(self, message: Any) -> None:
        """Send something to the child."""
        assert self._writer is not None
        data = pickle.dumps(message)
        self._writer.write(HEADER.pack(len(data)) + data)

    async def _next(self) -> tuple[Any, ...] | None:
        """Return the outcome of the function, or None if the child has closed its channel; deliver reports."""
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

    def _unwrapped(self, outcome: tuple[Any, ...]) -> Any:
        if outcome[0] == "returned":
            _, result, self.clean, self.unretrieved = outcome
            return result
        raise self._raised(*outcome[1:])

    def _raised(self, when: float, *what: Any) -> BaseException:
        self.failed = when
        self.clean = False
        return _rebuilt(self._name, *what)

    def _died(self, code: int, *, returned: bool = False) -> ChildProcessError:
        self.failed = 0.0
        return ChildProcessError(f"{self._name} {ending(code, returned=returned)}\n{self._last_words()}".rstrip())

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit code, or minus its signal."""
        while (code := self.process.poll()) is None:  # noqa: ASYNC110 - there is nothing else to wait for
            await asyncio.sleep(LOOK)
        return code

    async def _reap(self) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                return await self.ended()
        self.kill()  # it has closed its channel, and still runs
        return await self.ended()

    def _last_words(self) -> str:
        self._trace.seek(0)
        return self._trace.read().decode(errors="replace")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == MAIN else module, name)


def _loads(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


def _rebuilt(name: str, data: bytes | None, text: str, trace: str) -> BaseException:
    """Return the exception of a rank; its text as a `RuntimeError` if it cannot be unpickled."""
    error: BaseException = RuntimeError(f"{name} raised {text}")
    if data is not None:
        with suppress(Exception):
            error = _loads(data)
    error.add_note(f"its traceback on {name}:\n{trace}".rstrip())
    return error
