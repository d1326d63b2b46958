"""An NCCL without devices whose two ranks are processes, for `run.py --fake`; those of `FakeNccl` share a process.

As in the real one, a kernel of a rank whose peer is gone, or does not come, goes on until it is aborted.
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
    """NCCL of one of two processes, as `aiocoll.gpu.api.Nccl` wants it; who names a communicator is rank 0.

    Attributes:
        complaints: of `FakeNccl`, which sees all ranks; this one sees nothing wrong.
        crashes: likewise.
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
        assert world_size == 2, "it plays two ranks"
        if rank == 0:
            with self._listening.pop(unique_id) as listening:
                end, _ = listening.accept()
        else:
            end = socket.socket(socket.AF_UNIX)
            end.connect(b"\0" + unique_id.strip(b"\0"))
        return FarCommunicator(self.cuda, end, rank)

    def group_start(self) -> None:
        raise NotImplementedError("it plays allreduces")

    def group_end(self) -> None:
        raise NotImplementedError("it plays allreduces")


class FarCommunicator:
    """One rank's end."""

    def __init__(self, cuda: FakeCuda, end: socket.socket, rank: int) -> None:
        self._cuda, self._end, self._rank = cuda, end, rank
        self._device = cuda.current()
        self._aborted = threading.Event()

    def all_reduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
        assert op == 0, "it plays sums"
        kind = np.dtype(_TYPES[dtype])
        nbytes = count * kind.itemsize

        def kernel() -> None:
            mine = self._cuda.memory.at(source, nbytes, self._device).view(kind)
            theirs = self._exchanged(mine.tobytes())
            if theirs is None or len(theirs) != nbytes:  # the peer is gone, or its kernel is not this one
                self._cuda.blocked.wait(self._aborted)
            else:
                self._cuda.memory.at(target, nbytes, self._device).view(kind)[:] = mine + np.frombuffer(theirs, kind)

        self._cuda.kernel(stream, kernel, self._device)

    def async_error(self) -> str | None:
        return None

    def abort(self) -> None:
        self._aborted.set()
        self.destroy()

    def destroy(self) -> None:
        with _closed():
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{name}: it plays allreduces")

    def _exchanged(self, mine: bytes) -> bytes | None:
        """Return what the other rank has sent, None if it is gone; rank 0 sends first, so both never send at once."""
        with _closed():
            if self._rank == 0:
                self._send(mine)
            theirs = self._received()
            if self._rank:
                self._send(mine)
            return theirs
        return None

    def _send(self, data: bytes) -> None:
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def _received(self) -> bytes:
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
def _closed() -> Iterator[None]:
    """Take no notice of a peer that is gone, or of an end that is closed."""
    try:
        yield
    except OSError:
        return
