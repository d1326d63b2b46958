"""PMI-1 client: the exchange of a short value through an MPI launcher, in text lines on an inherited socket."""

from __future__ import annotations

import asyncio
import os
import socket
import stat

from aiocoll.errors import RendezvousError
from aiocoll.numerals import parse_int

__all__ = ["Pmi"]

#: Key in the launcher's key-value space under which rank 0 publishes the value.
_NAME = "aiocoll"
#: Maximum bytes of a reply: several times the longest valid reply.
_LONGEST = 16384


class Pmi:
    """The PMI connection of this process to its launcher.

    The launcher counts the processes that enter its barrier, so no request is sent twice. `share` may be cancelled and
    called again, also in another event loop. It then continues with the request in flight.

    Args:
        fd: the socket descriptor, as in ``PMI_FD``.

    Raises:
        ValueError: `fd` is not an open socket of this process.
    """

    def __init__(self, fd: str) -> None:
        try:
            number = parse_int(fd)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                raise OSError("not a socket")
        except (ValueError, OverflowError, OSError) as error:
            raise ValueError(
                f"PMI_FD={fd!r}: not a socket that this process inherited ({error}); make the group in the process "
                "that the launcher started, not in a child of it"
            ) from None
        self._socket = socket.socket(fileno=os.dup(number))
        self._received = b""
        self._sent = ""
        self._answers: dict[str, dict[str, str]] = {}

    async def share(self, value: str | None, *, last: bool) -> str:
        """Publish rank 0's value, and return it on every rank after all ranks have called this method.

        Args:
            value: the value on rank 0, without blanks; None on other ranks.
            last: whether this process sends no more requests to the launcher. The launcher then no longer ends all
                processes if this one ends with an error.

        Raises:
            RendezvousError: the launcher has closed the connection or sent an invalid reply.
        """
        await self._request("init pmi_version=1 pmi_subversion=1", "response_to_init")
        name = await self._request("get_my_kvsname", "my_kvsname", "kvsname")
        if value is not None:
            await self._request(f"put kvsname={name} key={_NAME} value={value}", "put_result")
        await self._request("barrier_in", "barrier_out")
        found = await self._request(f"get kvsname={name} key={_NAME}", "get_result", "value")
        if last:
            await self._request("finalize", "finalize_ack")
        return found

    def close(self) -> None:
        """Close the duplicated socket, and leave the inherited socket unchanged."""
        if self._socket.fileno() >= 0:
            # Restore the blocking mode, which both descriptors share: some event loops have changed it.
            os.set_blocking(self._socket.fileno(), True)
            self._socket.close()

    async def _request(self, command: str, answer: str, field: str = "cmd") -> str:
        """Send a command to the launcher, and return a field of the reply."""
        if command not in self._answers:
            try:
                if self._sent != command:
                    self._socket.send(f"cmd={command}\n".encode(), socket.MSG_DONTWAIT)
                    self._sent = command
                line = await self._read_line()
            except OSError as error:
                raise RendezvousError(f"the connection to the launcher (PMI) failed: {error.strerror}") from error
            self._answers[command] = dict(word.partition("=")[::2] for word in line.split(" "))
        fields = self._answers[command]
        if fields.get("cmd") != answer or fields.get("rc", "0") != "0" or not fields.get(field):
            # Show only two fields, because the rest of the line may hold the job key.
            reply = " ".join(f"{name}={fields[name][:40]}" for name in ("cmd", "rc") if name in fields) or "no command"
            raise RendezvousError(
                f"the launcher sent {reply!r} in reply to {command.split()[0]!r}, which is not PMI-1: set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank, which take precedence over PMI"
            )
        return fields[field]

    async def _read_line(self) -> str:
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST:
                raise RendezvousError(f"the launcher does not use PMI-1 on PMI_FD: a line exceeds {_LONGEST} bytes")
            await self._wait_readable()
            try:
                received = self._socket.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not received:
                raise RendezvousError("the launcher closed its connection (PMI) before all ranks had met")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    async def _wait_readable(self) -> None:
        """Wait until the socket has data, without reading it; a cancellation loses no data."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._socket)
