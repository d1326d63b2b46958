"""A simulated PMI-1 launcher for tests in one process, as strict as MPICH, with one socket per simulated process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Self

#: Invalid replies by command. After an invalid reply without a line end, the launcher closes the connection.
Wrong = Mapping[str, str]


class PmiLauncher:
    """A PMI-1 launcher that replies to simulated processes, all of which enter each barrier.

    Args:
        size: The number of processes.
        wrong: Invalid replies to send, by the first word of the command.

    Attributes:
        commands: The commands of each process, with their arguments.
        entered: The number of barrier entries by all processes.
    """

    def __init__(self, size: int, wrong: Wrong | None = None) -> None:
        self._pairs = [socket.socketpair() for _ in range(size)]
        self._wrong = wrong or {}
        self._published: dict[str, str] = {}
        # Values that become readable for other processes at the next barrier, as with a launcher on several hosts.
        self._put: dict[str, str] = {}
        self._barrier: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.commands: list[list[str]] = [[] for _ in range(size)]
        self.entered = 0

    def environment(self, rank: int) -> dict[str, str]:
        """Return the PMI environment variables of the process with this rank."""
        fd, size = self._pairs[rank][1].fileno(), len(self._pairs)
        return {"PMI_FD": str(fd), "PMI_RANK": str(rank), "PMI_SIZE": str(size), "MPI_LOCALNRANKS": str(size)}

    def is_blocking(self, rank: int) -> bool:
        """Return whether the PMI socket of a process is still in blocking mode."""
        return self._pairs[rank][1].getblocking()

    async def __aenter__(self) -> Self:
        for rank, (end, _) in enumerate(self._pairs):
            streams = await asyncio.open_unix_connection(sock=end)
            self._tasks.append(asyncio.create_task(self._serve(rank, *streams)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, end in self._pairs:
            end.close()

    async def _serve(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        initialised = finalised = False
        try:
            while line := (await reader.readline()).decode():
                words = dict(word.split("=", 1) for word in line.rstrip("\n").split(" "))
                command = words.pop("cmd")
                self.commands[rank].append(" ".join((command, *words.values())))
                assert initialised == (command != "init"), line
                assert not finalised, line
                initialised, finalised = True, command == "finalize"
                if command in self._wrong:
                    writer.write(self._wrong[command].encode())
                    if not self._wrong[command].endswith("\n"):
                        return
                elif command == "barrier_in":
                    self._enter(writer)
                else:
                    for part in self._reply(command, **words):  # send in pieces, since a line may arrive in pieces
                        writer.write(part.encode())
                        await asyncio.sleep(0)
        finally:
            writer.close()

    def _enter(self, writer: asyncio.StreamWriter) -> None:
        self.entered += 1
        self._barrier.append(writer)
        if len(self._barrier) == len(self._pairs):
            self._published |= self._put
            for each in self._barrier:
                each.write(b"cmd=barrier_out tag=0\n")
            self._barrier.clear()

    def _reply(self, command: str, **words: str) -> tuple[str, ...]:
        if command == "init":
            assert words == {"pmi_version": "1", "pmi_subversion": "1"}
            return "cmd=response_to_init rc=0 pmi_ver", "sion=1 pmi_subversion=2\n"
        if command == "get_my_kvsname":
            return ("cmd=my_kvsname rc=0 kvsname=kvs_1_0\n",)
        if command == "finalize":
            return ("cmd=finalize_ack rc=0\n",)
        assert words.pop("kvsname") == "kvs_1_0"
        if command == "put":
            assert len(words["key"]) < 64
            assert len(words["value"]) < 1024
            self._put[words["key"]] = words["value"]
            return ("cmd=put_result rc=0\n",)
        assert command == "get"
        value = self._published.get(words["key"])
        return ("cmd=get_result rc=1\n",) if value is None else ("cmd=get_result ", f"rc=0 value={value}", "\n")
