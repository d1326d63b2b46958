"""Restarts of a job on several hosts, whose launchers exchange the states of their ranks through the store.

Each launcher writes its state several times a second, and reads the states of all others. Host 0, which serves the
store, decides on restarts and on the end of the job. It declares a host lost whose state stays the same for `LOST`
seconds. A host that cannot reach the store for as long declares host 0 lost.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import msgpack

from aiocoll.cli.hosts import Hosts
from aiocoll.cli.restarts import HostState, News, Notice, OtherHosts, Phase, RestartGrant, Verdict
from aiocoll.errors import RendezvousError, StoreError
from aiocoll.store import PrefixStore, Store, StoreServer, TCPStore

__all__ = ["HostsLink"]

#: Timeout in seconds of two waits: each launcher waits for host 0, and at the end host 0 waits for late launchers.
COMES_WITHIN = 300.0
#: Seconds until a launcher that waits for host 0 prints a notice.
SAYS_SO_AFTER = 2.0
#: Maximum seconds between two exchanges of the hosts' states.
TURN = 0.25
#: Seconds without a report after which a host counts as lost. After the end of the job, host 0 waits for the same time
#: until the other hosts have left.
LOST = 6.0
#: Prefix of the store keys of launchers. A restart removes all other keys.
_PREFIX = "aiocoll/launchers"


class _HostReport(NamedTuple):
    """The report of a host's launcher: a report counter, whether the launcher leaves, and the state of its ranks."""

    beat: int
    leaves: bool
    state: HostState

    @classmethod
    def unpacked(cls, data: bytes) -> _HostReport:
        beat, leaves, (restarts, phase, *more) = msgpack.unpackb(data)
        return cls(beat, leaves, HostState(restarts, Phase(phase), *more))


class _Decision(NamedTuple):
    """The decision of host 0 on the next step of the job.

    Attributes:
        restarts: number of the restart in which all ranks run, or have to be started.
        over: whether the job has ended.
        why: the reason; "" if there is none.
        by: the host with the rank at fault, which has printed the reason already.
        lost: lost hosts, without which the others continue.
    """

    restarts: int
    over: bool = False
    why: str = ""
    by: int | None = None
    lost: tuple[int, ...] = ()

    @classmethod
    def unpacked(cls, data: bytes) -> _Decision:
        return cls(*msgpack.unpackb(data, use_list=False))


class HostsLink:
    """The link from a launcher to the launchers of the other hosts, on which they agree on restarts of the job.

    It implements `aiocoll.cli.restarts.Restarts`.

    Args:
        hosts: the hosts of the job.
        same: the arguments that must be the same on all hosts, as text.
        allowed: the largest number of restarts.
        open_store: makes a client of the store, which must be reached within the given number of seconds.
        server: the server of the store, on host 0.
    """

    def __init__(
        self,
        hosts: Hosts,
        same: str,
        allowed: int,
        open_store: Callable[[float], TCPStore],
        server: StoreServer | None,
    ) -> None:
        self.allowed = allowed
        self._hosts = hosts
        self._same = same
        self._open_store = open_store
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="aiocoll-launchers", daemon=True)
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._state = HostState(0, Phase.RUNS)
        self._asked: list[int] = []
        self._beat = 0
        self._leaves = False
        self._decision: _Decision | None = None
        self._states: Mapping[int, HostState] = {}
        self._reached = 0.0
        # On host 0: the counter of each host's last report with its time of arrival, and the time of the last decision.
        self._beats: dict[int, tuple[int, float]] = {}
        self._decided = monotonic()

    def begin(self, notify: Callable[[News], object]) -> None:
        """Start the thread that exchanges states with the other launchers; see `Restarts.begin`."""
        self._notify = notify
        self._thread.start()

    def take(self, rank: int) -> None:
        """Request a restart, which is counted in the store for all hosts; see `Restarts.take`."""
        self._change_in_thread(lambda: self._asked.append(rank))

    def report(self, state: HostState) -> None:
        """Record the state of this host for the next exchange; see `Restarts.report`."""

        def change() -> None:
            self._state = state

        self._change_in_thread(change)

    def close(self) -> None:
        """Leave the exchange of states, and wait until the exchange thread has ended; see `Restarts.close`."""

        def leave() -> None:
            self._leaves = True
            if self._task is not None and self._decision is None:
                self._task.cancel()

        self._change_in_thread(leave)
        self._thread.join(2 * LOST)

    def _change_in_thread(self, change: Callable[[], object]) -> None:
        """Call `change` in the event loop of the exchange thread, unless the thread has ended."""

        def carry_out() -> None:
            change()
            self._changed.set()

        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(carry_out)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        if self._leaves:
            return
        self._task = asyncio.ensure_future(self._take_part())
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            self._notify(Verdict(None, str(error)))

    async def _take_part(self) -> None:
        within = COMES_WITHIN
        address, port = self._hosts.master
        waits = Notice(f"looking for host 0 at {address} port {port} for {within:g} s")
        waiting = self._loop.call_later(SAYS_SO_AFTER, self._notify, waits)
        while True:
            try:
                async with self._open_store(within) as store:
                    part = PrefixStore(_PREFIX, store)
                    waiting.cancel()
                    if self._decision is None:
                        await self._claim_number(part)
                    store.timeout = within = LOST
                    while not await self._exchange_reports(part):
                        self._reached = monotonic()
                        await self._pause()
                    return
            except StoreError as error:
                if self._decision is None:
                    raise
                if monotonic() - self._reached > LOST:
                    await self._on_host_0_lost(error)
                    return

    async def _claim_number(self, store: Store) -> None:
        """Claim the number of this host, and read the current decision.

        Raises:
            RendezvousError: another launcher has the number, or was started with different arguments.
        """
        rank, given = self._hosts.node_rank, self._same.encode()
        if (others := await store.compare_set("same", b"", given)) != given:
            raise RendezvousError(
                f"host {rank} was started with {self._same}, another host with {others.decode()}: "
                "use the same arguments on all hosts"
            )
        mine = msgpack.packb([socket.gethostname(), os.getpid(), os.urandom(8)])
        name, pid, _ = msgpack.unpackb(first := await store.compare_set(f"launcher/{rank}", b"", mine))
        if first != mine:
            raise RendezvousError(
                f"host number {rank} is taken by {name} (process {pid}): give each host its own --node-rank"
            )
        if self._server is not None:
            self._decision = _Decision(0)
        else:
            self._decision = _Decision.unpacked(await store.get("decision"))
        self._reached = monotonic()
        self._report_decision()

    async def _exchange_reports(self, store: Store) -> bool:
        """Publish this host's state, and read the states of the others; return whether the exchange has ended."""
        mine = f"host/{self._hosts.node_rank}"
        await store.set(mine, self._encode_report())
        while self._asked:
            number = await store.add("restarts", 1)
            self._notify(RestartGrant(self._asked.pop(0), number if number <= self.allowed else 0))
        keys = [key for key in await store.list_keys() if key.startswith("host/")]
        data = await store.multi_get(keys)
        reports = {
            int(key.removeprefix("host/")): _HostReport.unpacked(each) for key, each in zip(keys, data, strict=True)
        }
        if self._server is not None:
            await self._decide(store, self._server, reports)
        else:
            await self._receive_decision(store)
        decision = self._decision
        assert decision is not None
        self._states = {host: each.state for host, each in reports.items() if host not in decision.lost}
        self._notify(OtherHosts({host: state for host, state in self._states.items() if host != self._hosts.node_rank}))
        if self._server is not None:
            left = all(reports[host].leaves for host in self._states if host)
            return decision.over and (left or monotonic() - self._decided > LOST)
        if decision.over or self._leaves:
            await store.set(mine, self._encode_report())
            return True
        return False

    def _encode_report(self) -> bytes:
        self._beat += 1
        over = self._decision is not None and self._decision.over
        data: bytes = msgpack.packb([self._beat, self._leaves or over, list(self._state)])
        return data

    async def _pause(self) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(TURN):
                await self._changed.wait()

    def _report_decision(self) -> None:
        decision = self._decision
        assert decision is not None
        why = decision.why if decision.by != self._hosts.node_rank else ""
        self._notify(Verdict(None if decision.over else decision.restarts, why))

    # -- decisions: host 0 makes them, the other hosts read them

    async def _decide(self, store: Store, server: StoreServer, reports: Mapping[int, _HostReport]) -> None:
        before = self._decision
        assert before is not None
        if not before.over and (decision := await self._next_decision(store, reports, before)) != before:
            if decision.restarts != before.restarts:
                server.forget(_PREFIX)
            self._decision, self._decided = decision, monotonic()
            if (decision.restarts, decision.over) != (before.restarts, before.over):
                self._report_decision()
        assert self._decision is not None
        # Publish even an unchanged decision: a restart ends all connections to the store, which may lose a record.
        await store.set("decision", msgpack.packb(self._decision))

    async def _next_decision(self, store: Store, reports: Mapping[int, _HostReport], decision: _Decision) -> _Decision:
        """Return host 0's next decision: `decision` unchanged, or a new one if the states of the hosts require it."""
        states = {host: each.state for host, each in reports.items() if host not in decision.lost}
        for host in self._silent_hosts(reports) & states.keys():
            why = f"host {host} is lost: its launcher has not reported for {LOST:g} s"
            if not any(state.elastic for state in states.values()):
                return _Decision(decision.restarts, True, why, lost=(host,))
            self._notify(Notice(f"{why}; the others continue"))
            return decision._replace(lost=(*decision.lost, host))
        for host in states:
            if reports[host].leaves:
                return _Decision(decision.restarts, True, f"host {host} {states[host].why or 'has left'}")
        if not all(state.over and state.restarts == decision.restarts for state in states.values()):
            return decision
        if all(state.phase == Phase.ENDED for state in states.values()):
            return self._decide_after_arrival(reports, decision)
        by = next((host for host, state in sorted(states.items()) if state.why), None)
        decision = decision._replace(why=f"host {by}: {states[by].why}" if by is not None else "", by=by)
        number = await store.add("restarts", 1)
        return decision._replace(restarts=number) if number <= self.allowed else decision._replace(over=True)

    def _silent_hosts(self, reports: Mapping[int, _HostReport]) -> set[int]:
        """Return the hosts that have sent no new report for `LOST` seconds."""
        now = monotonic()
        for host, each in reports.items():
            if self._beats.get(host, (0, 0.0))[0] != each.beat:
                self._beats[host] = (each.beat, now)
        return {host for host, (_, at) in self._beats.items() if now - at > LOST}

    def _decide_after_arrival(self, reports: Mapping[int, _HostReport], decision: _Decision) -> _Decision:
        missing = ", ".join(str(host) for host in range(self._hosts.nnodes) if host not in reports)
        if not missing:
            return _Decision(decision.restarts, True)
        if monotonic() - self._decided > COMES_WITHIN:
            why = f"host {missing} did not come within {COMES_WITHIN:g} s: start it with --max-restarts, too"
            return _Decision(decision.restarts, True, why)
        return decision

    async def _receive_decision(self, store: Store) -> None:
        before = self._decision
        assert before is not None
        self._decision = decision = _Decision.unpacked(await store.get("decision"))
        for host in set(decision.lost) - set(before.lost) if not decision.over else ():
            self._notify(Notice(f"host {host} is lost; the others continue"))
        if (decision.restarts, decision.over) != (before.restarts, before.over):
            self._report_decision()

    async def _on_host_0_lost(self, error: StoreError) -> None:
        """Handle the loss of host 0: end the job, or let an elastic job continue without replacing lost ranks."""
        why = f"host 0 is lost: {error}"
        if not any(state.elastic for state in (self._state, *self._states.values())):
            self._notify(Verdict(None, why))
            return
        self._notify(Notice(f"{why}; the others continue, but lost ranks are no longer replaced"))
        while not (self._leaves or self._state.over):
            while self._asked:
                self._notify(RestartGrant(self._asked.pop(), 0))
            await self._pause()
        self._notify(Verdict(None))
