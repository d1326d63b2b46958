"""Speed of the machine: python bench/roofline.py RANKS [SECONDS] prints it as JSON.

Memory is measured with as many processes as ranks, all at once, on arrays that fit in no cache. The bound of a large
allreduce follows from it: each rank must at least read its array and write the result.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

MIB = 1 << 20
#: Bytes of the copied arrays, much larger than a last-level cache.
NBYTES = 64 * MIB
#: Bytes of one send: the amount that a socket buffer takes at once.
PIECE = 256 << 10
#: Number of round trips that are timed together, since reading the clock costs as much as one of them.
TRIPS = 100
LIMIT = 120


@dataclass(frozen=True)
class Roofline:
    """The machine's speed: bytes per second of memory and sockets, and seconds of round trips.

    Attributes:
        world_size: number of processes that read and write.
        copy: `np.copyto`.
        add: `np.add`, in place.
        tcp: one sender and one receiver, over loopback.
        unix: one sender and one receiver, over a unix socket.
        flag: round trip of a shared flag that both sides poll.
        unix_trip: round trip of a byte through a unix socket, both sides blocking.
        tcp_trip: round trip of a byte over loopback, both sides blocking.
    """

    world_size: int
    copy: float
    add: float
    tcp: float
    unix: float
    flag: float
    unix_trip: float
    tcp_trip: float

    def bound(self, nbytes: int) -> float:
        """Return a lower bound for the seconds of an allreduce of `nbytes`."""
        return 2 * self.world_size * nbytes / self.copy


def roofline(world_size: int, seconds: float) -> Roofline:
    """Measure the machine's speed in a new process, which may fork because it has no threads."""
    command = [sys.executable, str(Path(__file__)), str(world_size), str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT, check=True)
    return Roofline(**json.loads(done.stdout))


def measure(world_size: int, seconds: float) -> Roofline:
    return Roofline(
        world_size,
        *(_memory(work, world_size, seconds) for work in (_copy, _add)),
        *(_throughput(pair(), seconds) for pair in (_tcp, socket.socketpair)),
        _flag(seconds),
        *(_trip(pair(), seconds) for pair in (socket.socketpair, _tcp)),
    )


def run_together(roles: Sequence[Callable[[Callable[[], None]], float]]) -> list[float]:
    """Run each role in a forked process, and return their results. A role gets a function that waits for all roles."""
    ready, gate, results = os.pipe(), os.pipe(), [os.pipe() for _ in roles]

    def meet() -> None:
        os.write(ready[1], b".")
        os.read(gate[0], 1)  # returns when the parent closes the pipe

    children = []
    for role, (_, result) in zip(roles, results, strict=True):
        child = os.fork()
        if child == 0:
            try:
                os.close(gate[1])
                os.write(result, json.dumps(role(meet)).encode())
            finally:
                os._exit(0)
        children.append(child)
    for _ in roles:
        os.read(ready[0], 1)
    for fd in (*gate, *ready, *(result for _, result in results)):
        os.close(fd)
    found = []
    for child, (result, _) in zip(children, results, strict=True):
        with open(result) as file:
            found.append(json.loads(file.read()))
        os.waitpid(child, 0)
    return found


def _memory(work: Callable[[Any, Any], int], world_size: int, seconds: float) -> float:
    """Return the bytes per second that `world_size` processes read and write together."""

    def role(meet: Callable[[], None]) -> float:
        a, b = np.ones(NBYTES // 4, np.float32), np.ones(NBYTES // 4, np.float32)
        meet()
        moved, start = 0, time.monotonic()
        while time.monotonic() < start + seconds:
            moved += work(a, b)
        return moved / (time.monotonic() - start)

    return sum(run_together([role] * world_size))


def _copy(a: Any, b: Any) -> int:
    np.copyto(a, b)
    return 2 * a.nbytes


def _add(a: Any, b: Any) -> int:
    np.add(a, b, a)
    return 3 * a.nbytes


def _tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for each in (near, far):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _throughput(pair: tuple[socket.socket, socket.socket], seconds: float) -> float:
    near, far = pair

    def send(meet: Callable[[], None]) -> float:
        meet()
        piece, end = bytes(PIECE), time.monotonic() + seconds
        while time.monotonic() < end:
            near.sendall(piece)
        near.shutdown(socket.SHUT_WR)
        return 0.0

    def receive(meet: Callable[[], None]) -> float:
        meet()
        buffer, total, start = bytearray(PIECE), 0, time.monotonic()
        while count := far.recv_into(buffer):
            total += count
        return total / (time.monotonic() - start)

    return _alone(pair, send, receive)


def _trip(pair: tuple[socket.socket, socket.socket], seconds: float) -> float:
    near, far = pair

    def send_flags(meet: Callable[[], None]) -> float:
        meet()
        taken, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.perf_counter()
            near.send(b"x")
            near.recv(1)
            taken.append(time.perf_counter() - start)
        near.shutdown(socket.SHUT_WR)
        return median(taken)

    def answer(meet: Callable[[], None]) -> float:
        meet()
        while data := far.recv(1):
            far.send(data)
        return 0.0

    return _alone(pair, send_flags, answer)


def _alone(pair: tuple[socket.socket, socket.socket], *roles: Callable[[Callable[[], None]], float]) -> float:
    """Run both ends of a connection in separate processes; return the larger result, that of the measuring end."""
    found = run_together(roles)
    for each in pair:
        each.close()
    return max(found)


def _flag(seconds: float) -> float:
    """Return the round-trip seconds of a flag: two processes write a counter each, and poll each other's counter."""
    flags = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
    outgoing, incoming, stop = 0, 8, 16

    def send_flags(meet: Callable[[], None]) -> float:
        meet()
        taken, end, count = [], time.monotonic() + seconds, 0
        while time.monotonic() < end:
            start = time.perf_counter()
            for _ in range(TRIPS):
                count += 1
                flags[outgoing] = count
                while flags[incoming] != count:
                    pass
            taken.append((time.perf_counter() - start) / TRIPS)
        flags[stop] = 1
        return median(taken)

    def answer(meet: Callable[[], None]) -> float:
        meet()
        seen = 0
        while not flags[stop]:
            if flags[outgoing] != seen:
                seen = flags[outgoing]
                flags[incoming] = seen
        return 0.0

    return max(run_together([send_flags, answer]))


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1]), float(sys.argv[2])))))
