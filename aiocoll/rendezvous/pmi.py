"""PMI-1: lines on an inherited socket, by which processes that a launcher of MPI has started exchange some bytes."""

from __future__ import annotations

import asyncio
import os
import socket
import stat

from aiocoll.errors import RendezvousError
from aiocoll.numerals import parse_int

__all__ = ["Pmi"]

#: The name of the value that rank 0 publishes.
_NAME = "aiocoll"
#: Bytes of an answer, several times those of the longest.
_LONGEST = 16384


class Pmi:
    """The connection of this process to its launcher.

    The launcher counts who enters its barrier, so nothing is asked twice: `share` may be cancelled and called again, by
    another loop, too, and goes on where it was.

    Args:
        fd: the number of the socket, as ``PMI_FD`` has it.

    Raises:
        ValueError: there is no such socket.
    """

    def __init__(self, fd: str) -> None:
        try:
            number = parse_int(fd)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                raise OSError("not a socket")
        except (ValueError, OverflowError, OSError) as error:
            raise ValueError(
                f"PMI_FD={fd!r}: not a socket that this process inherited ({error}); only the process that the "
                "launcher has started can ask it, not one that is started by that"
            ) from None
        self._socket = socket.socket(fileno=os.dup(number))
        self._received = b""
        self._sent = ""
        self._answers: dict[str, dict[str, str]] = {}

    async def share(self, value: str | None, *, last: bool) -> str:
        """Return what rank 0 gives to all, once all have called this.

        Args:
            value: of rank 0, without blanks; None on the others.
            last: nothing in this process will ask the launcher again. Then it no longer ends all processes when this
                one ends by an error.

        Raises:
            RendezvousError: the launcher is gone, or answers something else.
        """
        await self._ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        name = await self._ask("get_my_kvsname", "my_kvsname", "kvsname")
        if value is not None:
            await self._ask(f"put kvsname={name} key={_NAME} value={value}", "put_result")
        await self._ask("barrier_in", "barrier_out")
        found = await self._ask(f"get kvsname={name} key={_NAME}", "get_result", "value")
        if last:
            await self._ask("finalize", "finalize_ack")
        return found

    def close(self) -> None:
        """Give up the connection; the socket that was inherited stays as it was."""
        if self._socket.fileno() >= 0:
            os.set_blocking(self._socket.fileno(), True)  # both are one to the kernel, and some loops change it
            self._socket.close()

    async def _ask(self, command: str, answer: str, field: str = "cmd") -> str:
        """Return a field of the answer to a command."""
        if command not in self._answers:
            try:
                if self._sent != command:
                    self._socket.send(f"cmd={command}\n".encode(), socket.MSG_DONTWAIT)
                    self._sent = command
                line = await self._line()
            except OSError as error:
                raise RendezvousError(f"the launcher cannot be asked any more (PMI): {error.strerror}") from error
            self._answers[command] = dict(word.partition("=")[::2] for word in line.split(" "))
        fields = self._answers[command]
        if fields.get("cmd") != answer or fields.get("rc", "0") != "0" or not fields.get(field):
            # The rest of the line may hold the job key.
            said = " ".join(f"{name}={fields[name][:40]}" for name in ("cmd", "rc") if name in fields) or "no command"
            raise RendezvousError(
                f"the launcher does not answer {command.split()[0]!r} as PMI-1 does, but with {said!r}: set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank, which count before it"
            )
        return fields[field]

    async def _line(self) -> str:
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST:
                raise RendezvousError("the launcher does not speak PMI-1 on PMI_FD: a line has no end")
            await self._readable()
            try:
                received = self._socket.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not received:
                raise RendezvousError("the launcher has closed its connection (PMI) before all ranks had met")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    async def _readable(self) -> None:
        """Wait for a byte; none is lost when this is cancelled."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)
