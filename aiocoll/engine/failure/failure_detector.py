"""Detection of dead ranks: the event-loop side, which uses the watchdog thread.

The hub monitors all ranks, and all ranks monitor the hub. A process of the same host is checked while an operation
waits for it. A rank whose process is not visible from here exchanges heartbeats. Ranks of one process need neither.

A broken connection proves nothing: firewalls, proxies and cables break connections of living processes. Only a rank
on the same host can observe that a process is gone. It then notifies all ranks; see
`aiocoll.engine.consensus.quorum`.
"""

from __future__ import annotations

from typing import Any

from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.failure.watchdog import ROUND, Watchdog
from aiocoll.engine.job.context import Context
from aiocoll.errors import AiocollError, PeerLostError
from aiocoll.log import logger
from aiocoll.process import GONE, UNKNOWN, PidFd, ProcessId, open_pidfd, state
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.base import Card, Link
from aiocoll.transport.byte_stream import ByteStream

__all__ = ["FailureDetector"]

#: Minimum seconds between two requests to check the processes that operations wait for.
ASK_AGAIN = 1.0
#: Seconds after the end of a process in which its last messages, such as a goodbye, may still arrive.
LAST_WORDS = 0.05
#: Seconds to wait for the end of a process after its connections broke. The kernel closes connections near the end of a
#: process exit, and on a loaded host the rest of the exit may take a while.
GRACE = 0.3
#: Seconds between two checks of a process whose connections broke.
LOOK = 0.005
#: Seconds of pause between two attempts to connect to a living rank that does not answer. One attempt takes seconds.
CONNECT_AGAIN = 0.5


class FailureDetector:
    """The detector of dead processes of one endpoint.

    Args:
        context: the endpoint's context.
        control: the control plane: the links to other ranks.
        roster: the record of lost ranks.
    """

    def __init__(self, context: Context, control: ControlPlane, roster: Roster) -> None:
        self._context = context
        self._control = control
        self._roster = roster
        self._watchdog: Watchdog | None = None
        #: Ranks whose processes are visible in this process's /proc.
        self._processes: dict[int, ProcessId] = {}
        #: Pidfds of processes of this host at the other ends of control links. Unlike /proc, a pidfd needs no further
        #: descriptor later, and works in any PID namespace.
        self._pidfds: dict[int, PidFd] = {}
        #: Heartbeat connections opened before the watchdog thread started.
        self._heartbeats: list[tuple[int, ByteStream]] = []
        self._dialling = False
        self._asked_at = -ASK_AGAIN
        self._stopped = False

    def start(self) -> None:
        """Start to monitor the ranks in other processes, if there are any.

        Raises:
            RendezvousError: the watchdog thread cannot be started.
        """
        context = self._context
        cards = context.cards
        me = cards[context.rank]
        if all(card["process"] == me["process"] and card["host"] == me["host"] for card in cards.values()):
            return
        host, own = _host_and_process(me)
        for rank, card in cards.items():
            there, process = _host_and_process(card)
            seen = there == host and process.namespace == own.namespace != 0
            # Check that the process is visible: a host may hide the processes of other users.
            if rank != context.rank and seen and state(process) not in (GONE, UNKNOWN):
                self._processes[rank] = process
        self._watchdog = Watchdog(
            context.rank, context.loop, context.runtime.ticks, self._state, self._on_lost, self._on_heartbeat_closed
        )
        self._watchdog.start()
        for rank, stream in self._heartbeats:
            self.attach(rank, stream)
        self._heartbeats.clear()
        for link in self._control.links:
            self.linked(link)
        self.follow_hub()

    def stop(self) -> None:
        """Stop the thread and the heartbeats."""
        self._stopped = True
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        for _, stream in self._heartbeats:
            stream.close()
        for pidfd in self._pidfds.values():
            pidfd.close()

    def linked(self, link: Link) -> None:
        """Open a pidfd of the process at the other end of a new control link."""
        peer = link.peer
        if self._watchdog is None or peer in self._pidfds:
            return
        pidfd = open_pidfd(self._processes[peer]) if peer in self._processes else link.peer_process()
        if pidfd is not None:
            self._pidfds[peer] = pidfd

    def attach(self, rank: int, stream: ByteStream) -> None:
        """Exchange heartbeats with `rank` on the connection `stream`."""
        if self._stopped:
            stream.close()
        elif self._watchdog is None:
            self._heartbeats.append((rank, stream))
        else:
            self._watchdog.add_heartbeat(rank, stream)

    def follow_hub(self) -> None:
        """Open a heartbeat connection to the hub, unless this rank can observe the hub's process itself."""
        context, hub = self._context, self._control.hub
        if self._watchdog is None or self._dialling or hub in (context.rank, *self._processes):
            return
        if context.cards[hub]["process"] != context.cards[context.rank]["process"]:
            self._dialling = True
            context.spawn(self._dial(hub), "aiocoll heartbeat")

    def check_awaited(self) -> None:
        """Check the processes of ranks that operations may wait for, or request these checks from the hub."""
        now = self._context.runtime.time()
        if self._watchdog is None or now < self._asked_at + ASK_AGAIN:
            return
        self._asked_at = now
        control = self._control
        hub = control.hub
        if hub == self._context.rank:
            watched = {link.peer for link in control.links}
        else:
            watched = {hub}
            control.send(hub, {"t": "waits"})
        self._watchdog.observe(watched & self._processes.keys())

    def is_known_alive(self, rank: int) -> bool:
        """Return whether the process of a rank is known to be alive, even if its event loop is blocked."""
        if rank in self._processes:
            return self._state(rank) != GONE
        silence = None if self._watchdog is None else self._watchdog.silence(rank)
        return silence is not None and silence <= 2 * ROUND

    def state(self, rank: int) -> str:
        """Describe the state of a rank's process, if it is visible from this host; "" if nothing is known."""
        if rank in self._processes:
            found = self._state(rank)
            if found == UNKNOWN:
                return ""
            return "its process is gone" if found == GONE else f"its process is alive ({found})"
        silence = None if self._watchdog is None else self._watchdog.silence(rank)
        if silence is None:
            return ""
        return "its process is alive" if silence <= 2 * ROUND else f"its heartbeat has been silent for {silence:.1f} s"

    def blocked(self) -> tuple[float, str] | None:
        """Return for how many seconds, and in which line, this rank's loop has been blocked; None if it is not.

        Any thread may call this.
        """
        watchdog = self._watchdog
        return None if watchdog is None else watchdog.blocked()

    def longest_blocks(self) -> list[tuple[float, float, str]]:
        """Return how many seconds ago each of the longest blocked times began, its duration in seconds, and the line.

        Any thread may call this.
        """
        watchdog = self._watchdog
        return [] if watchdog is None else watchdog.longest_blocks()

    async def connect(self, rank: int, kind: ConnKind) -> Link | None:
        """Open a link to `rank`, unless `rank` is opening one. Retry while the process of `rank` lives."""
        while True:
            try:
                return await self._context.connect(rank, kind)
            except PeerLostError:
                if rank in self._roster.gone or not self.is_known_alive(rank):
                    raise
            await self._context.runtime.sleep(CONNECT_AGAIN)

    # -- broken connections

    def on_broken_link(self, rank: int, detail: str) -> None:
        """Handle a broken connection to `rank`: its process has ended, or the rank cannot be reached."""
        if self._context.closed:
            return
        if rank in self._roster.gone:
            self.confirm_death(rank)
        elif self._is_visible(rank):
            self._check_until(rank, self._context.runtime.time() + GRACE, cut=True)
        else:
            self._roster.record_loss(rank, detail, how="unreachable")

    def confirm_death(self, rank: int) -> None:
        """Notify all ranks if the process of a lost rank is gone."""
        if rank in self._roster.suspected_ranks and self._is_visible(rank):
            self._check_until(rank, self._context.runtime.time() + GRACE, cut=False)

    def check_process(self, rank: int) -> None:
        """Notify all ranks if the process of `rank` is gone.

        A link that is still being opened cannot detect the end of the process.
        """
        if not self._stopped and self._state(rank) == GONE:
            self._on_lost(rank, "killed", 0.0)

    def _is_visible(self, rank: int) -> bool:
        return rank in self._processes or rank in self._pidfds

    def _state(self, rank: int) -> str:
        """Return the state of a rank's process, if it is visible from this host. Any thread may call this method."""
        return state(self._processes.get(rank), self._pidfds.get(rank))

    def _check_until(self, rank: int, until: float, cut: bool) -> None:
        """Check repeatedly until the time `until` whether a process is gone.

        `cut` is True if a connection to the process has broken.
        """
        if self._stopped:
            return
        runtime = self._context.runtime
        if self._state(rank) == GONE:
            self._roster.record_loss(rank, "its process is gone")
        elif runtime.time() < until:
            runtime.call_later(LOOK, self._check_until, rank, until, cut)
        elif cut:
            self._roster.on_connection_broken(rank)

    # -- callbacks of the watchdog

    def _on_lost(self, rank: int, how: str, seconds: float) -> None:
        if how == "killed":
            # Wait, because a goodbye may be in flight. A closed connection would also show the end, unless a child
            # process holds the connection open.
            self._context.runtime.call_later(LAST_WORDS, self._report_gone, rank)
        elif how == "stopped":
            self._roster.record_loss(rank, f"its process has been stopped for {seconds:.1f} s", how=how)
        else:
            self._roster.record_loss(rank, f"its heartbeat has been silent for {seconds:.1f} s", how=how)

    def _report_gone(self, rank: int) -> None:
        self._roster.record_loss(rank, "its process is gone")

    def _on_heartbeat_closed(self, rank: int) -> None:
        """Handle a closed heartbeat connection. Only a connection to the hub is opened again."""
        if rank == self._control.hub:
            self.follow_hub()

    async def _dial(self, hub: int) -> None:
        rank = self._context.rank
        try:
            stream = await self._context.connect_heartbeat(hub)
            if stream is not None:
                self.attach(hub, stream)
        except (OSError, AiocollError) as error:
            logger.debug("rank %d has no heartbeat with rank %d: %s", rank, hub, error, extra={"rank": rank})
        finally:
            self._dialling = False
        if hub != self._control.hub:
            self.follow_hub()


def _host_and_process(card: Card) -> tuple[Any, ProcessId]:
    return card["host"], ProcessId._make(card["process"])
