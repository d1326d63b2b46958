"""A Redis server for tests, with methods to kill, freeze, restart and query the server."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from aiocoll.credentials import TlsFiles

from .certificates import Authority
from .ports import free_ports

#: Seconds within which a Redis server must reply.
LIMIT = 20


class RedisServer:
    """A redis-server process on free loopback ports, which `start` starts.

    Args:
        folder: the directory for its data, which it writes only at a `save`.
        files: its certificate, with which it serves TLS at `tls_url`.
        options: options of its command line.
        command: changes the command, for a server on another host.
    """

    def __init__(
        self,
        folder: Path,
        files: TlsFiles | None = None,
        *options: str,
        command: Callable[..., Sequence[str]] = lambda *words: words,
    ) -> None:
        self.port = free_ports(2)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._command = command
        self._options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        if files is not None:
            self.ca = files.ca
            self.tls_url = f"rediss://localhost:{self.port + 1}/0"
            self._options += ["--tls-port", str(self.port + 1), "--tls-auth-clients", "optional"]
            self._options += ["--tls-cert-file", files.certificate, "--tls-key-file", files.key]
            self._options += ["--tls-ca-cert-file", files.ca]
        self._options += options
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        command = self._command("redis-server", *self._options)
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        lines = []
        with process.stdout:
            for line in process.stdout:
                lines.append(line)
                if "Ready to accept connections" in line:
                    return
        raise AssertionError("".join(lines))

    def kill(self) -> None:
        """Kill the server process, which then loses all data that is not saved to a file."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(LIMIT)

    def freeze(self) -> None:
        """Suspend the server process, so that its connections stay open and it sends no replies."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the suspended server process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def execute(self, *command: str) -> str:
        """Send a Redis command on a new connection; return the reply, with the items of a list joined by spaces."""
        return self.send(request(*command))

    def send(self, encoded: bytes) -> str:
        """Send an encoded Redis command on a new connection; return the reply."""
        with (
            socket.create_connection(("127.0.0.1", self.port), LIMIT) as connection,
            connection.makefile("rwb") as file,
        ):
            file.write(encoded)
            file.flush()
            return _answer(file)

    def clients(self) -> int:
        """Return the number of client connections of the server, without the connection of this query."""
        return self.execute("CLIENT", "LIST").count(" fd=") - 1

    def requests(self) -> int:
        """Return the number of Lua scripts (EVAL) that the server has run."""
        return int(self.execute("INFO", "commandstats").partition("cmdstat_eval:calls=")[2].partition(",")[0])

    def listeners(self, job: str = "") -> int:
        """Return the number of connections that subscribe to the changes of a job's store."""
        return int(self.execute("PUBSUB", "NUMSUB", f"aiocoll:{job}").split()[1])


def _answer(file: IO[bytes]) -> str:
    answer = file.readline().decode().strip()
    assert not answer.startswith("-"), answer
    if answer.startswith("*"):
        return " ".join(_answer(file) for _ in range(int(answer[1:])))
    if answer.startswith("$") and answer != "$-1":
        return file.read(int(answer[1:]) + 2).decode()[:-2]
    return answer[1:]


def request(*command: str) -> bytes:
    """Return the encoded form of a Redis command."""
    words = [b"$%d\r\n%s\r\n" % (len(word), word) for word in map(str.encode, command)]
    return b"*%d\r\n%s" % (len(words), b"".join(words))


def need_redis() -> None:
    """Skip the test if the package redis or redis-server is not installed."""
    if importlib.util.find_spec("redis") is None:
        pytest.skip("the package redis is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")


@contextmanager
def redis_server(folder: Path, files: TlsFiles | None = None, *options: str, **how: Any) -> Iterator[RedisServer]:
    """Run a Redis server during the block, or skip the test if Redis is not installed."""
    need_redis()
    server = RedisServer(folder, files, *options, **how)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield the shared Redis server, for tests that do not change its configuration."""
    folder = tmp_path_factory.mktemp("redis")
    files = Authority(folder).make("DNS:localhost")
    with redis_server(folder, files) as server:
        yield server
