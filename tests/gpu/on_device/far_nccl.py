"""A simulated NCCL for two ranks in separate processes, which `run.py --fake` uses.

The ranks of `FakeNccl` share a process.

As in real NCCL, the kernel of a rank runs until it is aborted if its peer has ended or makes no call.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from ...fakes.cuda import FakeCuda

UNIQUE_ID_BYTES = 128
_LENGTH = struct.Struct("<q")
_FLOAT32, _FLOAT64 = 7, 8
_TYPES = {_FLOAT32: np.float32, _FLOAT64: np.float64}
_names = count()


class FarNccl:
    """A simulated NCCL library in one of two processes, with the interface `aiocoll.gpu.api.Nccl`.

    Attributes:
        complaints: always empty; `FakeNccl` has such a list.
        crashes: always empty, too.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.complaints: list[str] = []
        self.crashes: list[str] = []
        self._listening: dict[bytes, socket.socket] = {}

    def version(self) -> int:
        return 22809

    def unique_id(self) -> bytes:
        name = f"\0aiocoll-far-{os.getpid()}-{next(_names)}".encode()
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(name)
        listening.listen()
        found = name.ljust(UNIQUE_ID_BYTES, b"\0")
        self._listening[found] = listening
        return found

    def init(self, world_size: int, unique_id: bytes, rank: int) -> FarCommunicator:
        assert world_size == 2, f"{world_size} ranks; this fake supports 2"
        if rank == 0:
            with self._listening.pop(unique_id) as listening:
                end, _ = listening.accept()
        else:
            end = socket.socket(socket.AF_UNIX)
            end.connect(b"\0" + unique_id.strip(b"\0"))
        return FarCommunicator(self.cuda, end, rank)

    def group_start(self) -> None:
        raise NotImplementedError("this fake supports allreduce only")

    def group_end(self) -> None:
        raise NotImplementedError("this fake supports allreduce only")


class FarCommunicator:
    """A communicator of one rank, which exchanges data with its peer over a socket."""

    def __init__(self, cuda: FakeCuda, end: socket.socket, rank: int) -> None:
        self._cuda, self._end, self._rank = cuda, end, rank
        self._device = cuda.current()
        self._aborted = threading.Event()

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        assert op == 0, f"op {op}; this fake supports sums only"
        kind = np.dtype(_TYPES[dtype])
        nbytes = count * kind.itemsize

        def kernel() -> None:
            sent = self._cuda.memory.at(source, nbytes, self._device).view(kind)
            received = self._exchange(sent.tobytes())
            if received is None or len(received) != nbytes:  # the peer has ended, or runs another kernel
                self._cuda.blocked.wait(self._aborted)
            else:
                self._cuda.memory.at(target, nbytes, self._device).view(kind)[:] = sent + np.frombuffer(received, kind)

        self._cuda.kernel(stream, kernel, self._device)

    def async_error(self) -> str | None:
        return None

    def abort(self) -> None:
        self._aborted.set()
        self.destroy()

    def destroy(self) -> None:
        with _ignored_socket_errors():
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name}: this fake supports allreduce only")

    def _exchange(self, sent: bytes) -> bytes | None:
        """Exchange data with the peer; return the received data, or None if the peer has ended.

        Rank 0 sends first, because two simultaneous sends could block each other.
        """
        with _ignored_socket_errors():
            if self._rank == 0:
                self._send(sent)
            received = self._receive()
            if self._rank:
                self._send(sent)
            return received
        return None

    def _send(self, data: bytes) -> None:
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def _receive(self) -> bytes:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._end.recv(length - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)


@contextmanager
def _ignored_socket_errors() -> Iterator[None]:
    """Ignore errors from a closed socket or an ended peer."""
    try:
        yield
    except OSError:
        return
