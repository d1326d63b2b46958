"""Simulated processes, hosts and networks on a virtual clock, with faults that tests inject."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

from aiocoll import GroupOptions
from aiocoll.engine.endpoint import Endpoint
from aiocoll.process import GONE, STOPPED, UNKNOWN, PidFd, ProcessId
from aiocoll.security.handshake import ConnKind
from aiocoll.testing.virtual import VirtualLoop
from aiocoll.transport.base import Card, Link
from aiocoll.transport.frame import Header
from aiocoll.transport.memory import Hub, MemoryLink, MemoryTransport

__all__ = ["Hosts"]

#: Shortest and longest latency of a frame in seconds.
LATENCY = (0.0005, 0.02)
#: Seconds of silence after which the watchdog reports a lost process and the kernel reports a lost connection.
SILENCE = 5.0
#: Virtual seconds after which a simulation times out.
LIMIT = 3600.0

_process: ContextVar[int] = ContextVar("process")


class Hosts:
    """The processes of a job, their hosts and the network between them.

    Args:
        hosts: the host of each process. Processes have the numbers of the ranks in the first group.
        seed: seed of all randomness on the loop.

    Attributes:
        killed, stopped: the killed processes and the stopped ones.
        endpoints: the process of each endpoint.
        programs: the running program of each process.
        frames: number of frames sent so far.
        at_frame: faults to inject, by the number of frames sent before.
    """

    def __init__(self, hosts: Sequence[int], seed: int = 0) -> None:
        self.hosts = tuple(hosts)
        self.seed = seed
        self.killed: set[int] = set()
        self.stopped: set[int] = set()
        self.endpoints: dict[Endpoint, int] = {}
        self.programs: dict[int, asyncio.Task[Any]] = {}
        self.frames = 0
        self.at_frame: dict[int, Callable[[], None]] = {}
        self._networks: dict[Hub, None] = {}
        self._cuts: dict[tuple[int, int], object] = {}

    @property
    def living(self) -> list[int]:
        """The numbers of all processes that were started and not killed."""
        return [process for process in self.programs if process not in self.killed]

    def run(self, main: Callable[[], Awaitable[Any]]) -> Any:
        """Run ``await main()`` on a fresh virtual loop."""

        async def bounded() -> Any:
            async with asyncio.timeout(LIMIT):
                return await main()

        def loop() -> VirtualLoop:
            return VirtualLoop(self.seed, LATENCY)

        # Disable asyncio's debug mode, which would make thousands of jobs take minutes.
        with self._simulated(), asyncio.Runner(debug=False, loop_factory=loop) as runner:
            return runner.run(bounded())

    def start(self, process: int, program: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
        """Run a program as `process`, in a task that `kill` cancels."""

        async def main() -> Any:
            _process.set(process)
            return await program()

        task = self.programs[process] = asyncio.create_task(main(), name=f"process {process}")
        return task

    def options(self, process: int) -> GroupOptions:
        """Return group options with the host id of a process."""
        return GroupOptions(host_id=f"host {self.hosts[process]}", spin_us=0)

    # -- faults

    def kill(self, process: int) -> None:
        """Kill a process as SIGKILL does: frames already sent still arrive, then its connections break."""
        if process in self.killed:
            return
        self.killed.add(process)
        for endpoint in self._endpoints_of(process):
            endpoint.context.closed = True
            endpoint.context.transport.accepted = _break_soon
            for link in [
                link
                for hub in self._networks
                for link in hub.links
                if link._rank == endpoint.rank and hub is endpoint.context.transport._hub
            ]:
                link.close()
        self.programs[process].cancel()
        if process in self.stopped:
            self.resume(process)

    def reset(self, one: int, other: int, kinds: Sequence[ConnKind] = tuple(ConnKind)) -> None:
        """Break the connections of `kinds` between two living processes; both processes notice it at once."""
        for hub, a, b in self._shared_networks(one, other):
            for link in [link for link in hub.links if link.ends == (min(a, b), max(a, b)) and link.kind in kinds]:
                link.break_off(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def cut(self, source: int, target: int) -> None:
        """Hold back all frames from `source` to `target`; both processes notice it after `SILENCE` seconds."""
        self._cuts[source, target] = mark = object()

        def expire() -> None:
            if self._cuts.get((source, target)) is mark:
                self.reset(source, target)
                asyncio.get_running_loop().call_later(SILENCE, expire)

        asyncio.get_running_loop().call_later(SILENCE, expire)

    def heal(self, source: int, target: int) -> None:
        """End a cut, and deliver the frames that it held back."""
        self._cuts.pop((source, target), None)
        self._deliver_held()

    def stop(self, process: int) -> None:
        """Stop a process (SIGSTOP), which then neither sends nor receives while its connections stay open."""
        self.stopped.add(process)
        asyncio.get_running_loop().call_later(SILENCE, self._report_stopped, process)

    def resume(self, process: int) -> None:
        """Continue a stopped process (SIGCONT)."""
        self.stopped.discard(process)
        self._deliver_held()

    def end_cuts_and_stops(self) -> None:
        """End all cuts, and continue all stopped processes."""
        self._cuts.clear()
        self.stopped.clear()
        self._deliver_held()

    # -- simulation

    def state(self, process: ProcessId | None, pidfd: PidFd | None = None) -> str:
        """Return whether a simulated process runs, is stopped, is gone or has an unknown state."""
        if process is None:
            return UNKNOWN
        return GONE if process.pid in self.killed else STOPPED if process.pid in self.stopped else "running"

    def _endpoints_of(self, process: int) -> list[Endpoint]:
        return [endpoint for endpoint, owner in self.endpoints.items() if owner == process]

    def _shared_networks(self, one: int, other: int) -> Iterator[tuple[Hub, int, int]]:
        """Yield each network that connects the two processes, with the rank of each process in this network."""
        for hub in self._networks:
            ranks = {transport.process: rank for rank, transport in hub.ranks.items()}  # type: ignore[attr-defined]
            if one in ranks and other in ranks:
                yield hub, ranks[one], ranks[other]

    def _blocked(self, source: int, target: int) -> bool:
        return (source, target) in self._cuts or bool({source, target} & self.stopped)

    def _deliver_held(self) -> None:
        for hub in self._networks:
            hub.deliver_unblocked()

    def _report_stopped(self, process: int) -> None:
        """Report a stopped process to the endpoints that watch this process, as their watchdogs would."""
        if process not in self.stopped:
            return
        for endpoint, other in list(self.endpoints.items()):
            transport = endpoint.context.transport
            assert isinstance(transport, MemoryTransport)
            ranks = {each.process: rank for rank, each in transport._hub.ranks.items()}  # type: ignore[attr-defined]
            watches = endpoint.control.hub in (endpoint.rank, ranks.get(process))
            if process in ranks and other not in self.stopped | self.killed and watches and not endpoint.context.closed:
                how = "stopped" if self.hosts[process] == self.hosts[other] else "unreachable"
                endpoint.failure_detector._on_lost(ranks[process], how, SILENCE)
        asyncio.get_running_loop().call_later(SILENCE, self._report_stopped, process)

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        """Replace the process identity, the watchdog and the network of aiocoll by simulated ones."""
        hosts = self

        class Network(Hub):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                hosts._networks[self] = None

            def is_blocked(self, source: int, target: int) -> bool:
                one, other = (
                    self.ranks[rank].process if rank in self.ranks else -1  # type: ignore[attr-defined]
                    for rank in (source, target)
                )
                return super().is_blocked(source, target) or hosts._blocked(one, other)

        class SimulatedTransport(MemoryTransport):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.process = _process.get()

            async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
                """Connect to a living process; a connection attempt to a dead process never finishes."""
                await super().reachable(peer)
                if self._hub.ranks[peer].process in hosts.killed:  # type: ignore[attr-defined]
                    await asyncio.get_running_loop().create_future()
                return await super().connect(peer, card, kind)

        class RecordedEndpoint(Endpoint):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                hosts.endpoints[self] = _process.get()

        def write_and_count(link: MemoryLink, header: bytes, payload: memoryview | None = None) -> bool:
            hosts.frames += 1
            if (fault := hosts.at_frame.pop(hosts.frames, None)) is not None:
                asyncio.get_running_loop().call_soon(fault)
            return write(link, header, payload)

        def process() -> ProcessId:
            return ProcessId(1, _process.get(), 0)

        write = MemoryLink.write
        with (
            mock.patch("aiocoll.rendezvous.job.Hub", Network),
            mock.patch("aiocoll.rendezvous.job.MemoryTransport", SimulatedTransport),
            mock.patch("aiocoll.rendezvous.job.Endpoint", RecordedEndpoint),
            mock.patch("aiocoll.transport.stream.transport.this_process", process),
            mock.patch("aiocoll.engine.failure.failure_detector.state", self.state),
            mock.patch("aiocoll.engine.failure.failure_detector.open_pidfd", return_value=None),
            mock.patch("aiocoll.engine.failure.failure_detector.Watchdog", _StandInWatchdog),
            mock.patch("aiocoll.engine.failure.failure_detector.FailureDetector.follow_hub"),
            mock.patch.object(MemoryLink, "write", write_and_count),
        ):
            yield


class _StandInWatchdog:
    """A stand-in for the watchdog thread; `Hosts` reports lost processes instead."""

    def __init__(self, *args: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def observe(self, ranks: Collection[int]) -> None:
        pass

    def silence(self, rank: int) -> None:
        pass


def _break_soon(link: Link) -> None:
    """Accept a link to a dead rank, and break the link in the next loop iteration."""
    assert isinstance(link, MemoryLink)
    link.sink = _DroppingSink()
    asyncio.get_running_loop().call_soon(link.break_off, ConnectionResetError(errno.ECONNRESET, "killed"))


class _DroppingSink:
    """A frame receiver for links to a dead rank: drops all frames."""

    def route(self, link: Link, header: Header) -> None:
        pass

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        pass

    def withdrawn(self, link: Link, header: Header) -> None:
        pass

    def drained(self, link: Link) -> None:
        pass

    def lost(self, link: Link, error: Exception | None) -> None:
        pass
