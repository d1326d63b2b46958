"""Links between processes: dialled as a socket, unix on one host, TCP between hosts, and opened by the handshake.

Two ranks have at most one link of a kind, whoever dials. When both dial at once, the lower rank's dial wins:

    rank 0   HELLO ------>         accepted: rank 1 waits for this link
             <------ HELLO  rank 1
             CROSSED ----->        told to wait for rank 0's link

Nothing is given up for a peer that has not yet proven the job key. So rank 1 goes on dialling until rank 0's link is
complete, and a forged HELLO changes nothing; `_decide` is the one place that decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from aiocoll import handshake
from aiocoll.errors import AuthenticationError, GroupClosedError
from aiocoll.handshake import HANDSHAKE_TIMEOUT, ConnKind, HandshakeRefusedError, Identity, Peer, Status
from aiocoll.log import logger
from aiocoll.process import this_process
from aiocoll.runtime import Runtime
from aiocoll.transport import address
from aiocoll.transport.base import Card, Link
from aiocoll.transport.dial import Dial
from aiocoll.transport.live import Key, Live
from aiocoll.transport.shm.sharing import Sharing
from aiocoll.transport.target import Target, Targets

__all__ = ["StreamTransport"]

#: Handshakes in progress at least possible, however small the world is: strangers must not crowd out peers.
_MIN_PENDING = 16
#: Seconds granted after a handshake's deadline. If our own loop was blocked past the deadline, the peer's message waits
#: in the socket: one turn of the loop finds it, so a blocked rank does not take a good peer for a silent one.
_GRACE = 0.05
#: Seconds to wait before dialling again: first one round trip, then doubling to where waiting costs nobody anything.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # not on Windows


class _RetryError(Exception):
    """The dial failed in a way that time may cure."""


class StreamTransport:
    """Sockets between the ranks of a job; see `aiocoll.transport.base.Transport`.

    Args:
        runtime: clock, timers and randomness.
        rank: of this process in the job.
        world_size: ranks of the job.
        job: name of the job, or the 16 bytes of its id.
        key: the job key; None only as long as nothing leaves this host.
        transport: `"tcp"`, `"unix"`, `"shm"` (one host; data through shared memory), or `"auto"`: as `"shm"` between
            ranks of one host, TCP between hosts.
        host_id: pretend to be on another host (for tests).
        epoch: of the job; ranks of another epoch are refused.
        connect_timeout: seconds after which `connect` gives up.
        handshake_timeout: seconds a peer has for the whole handshake.
    """

    name = "stream"
    accepted: Callable[[Link], None]
    look: Callable[[], bool] = staticmethod(lambda: False)
    linger: Callable[[bool], bool] = staticmethod(lambda moved: False)
    #: The ranks have met: from now on a host from which nothing comes is lost, before that it may not be up yet.
    met = False

    def __init__(
        self,
        runtime: Runtime,
        rank: int,
        world_size: int,
        job: bytes | str,
        key: bytes | None,
        *,
        transport: Literal["auto", "tcp", "unix", "shm"] = "auto",
        host_id: str | None = None,
        epoch: int = 0,
        connect_timeout: float = 300.0,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
    ) -> None:
        self.rank = rank
        self._whose = {"rank": rank}
        self._runtime = runtime
        self._world_size = world_size
        job = handshake.job_id(job) if isinstance(job, str) else job
        self._identity = Identity(job, epoch, rank, world_size, ConnKind.CONTROL)
        self._key = key
        self._transport = transport
        self._targets = Targets(rank, address.host_identity(host_id), key, transport)
        self._process = this_process()
        self._connect_timeout = connect_timeout
        self._handshake_timeout = handshake_timeout
        self._most_pending = max(_MIN_PENDING, 2 * world_size)
        self._unix: str | None = None
        self._tcp: tuple[str, int] | None = None
        self._listeners = address.Listeners(runtime, self._greet)
        # Handshakes peers have begun with us, oldest first, each with the timer that ends it; those ended early;
        self._pending: dict[asyncio.Task[bool], asyncio.TimerHandle] = {}
        self._evicted: set[asyncio.Task[bool]] = set()
        # ... and those among them that were told OK.
        self._incoming: dict[Key, set[asyncio.Task[bool]]] = {}
        self._dials: dict[Key, Dial] = {}
        wanted = transport in ("auto", "shm")
        self._live = Live(runtime, Sharing(runtime, rank, world_size, self, wanted=wanted))
        self._trouble = ""
        self._closed = False

    @property
    def trouble(self) -> str:
        """Why there is no link yet to a rank that is dialled, or was until that was cancelled; "" if none is."""
        now = self._runtime.time()
        return next((str(dial.failure(now)) for dial in self._dials.values()), self._trouble)

    @property
    def card(self) -> Card:
        """Where this rank can be reached now."""
        tcp = list(self._tcp) if self._tcp else None
        return {
            "host": self._targets.host,
            "unix": self._unix,
            "tcp": tcp,
            "process": list(self._process),
            "piece": self._live.sharing.piece_nbytes,
        }

    async def listen(self) -> Card:
        """Open the unix listener, unless `transport="tcp"`; TCP listens only after `listen_tcp`."""
        if self._targets.may_use_unix:
            listener, self._unix = address.open_unix(self._runtime.random_bytes)
            self._listeners.add(listener)
        return self.card

    async def listen_tcp(self, host: str, advertise: str | None = None) -> Card:
        """Listen on a free TCP port of the numeric address `host`, too; return the new card.

        Args:
            host: address to listen on.
            advertise: the address peers are told, if that is another one; must be given for a wildcard `host`.

        Raises:
            AuthenticationError: other machines can reach `host`, and there is no job key.
            RendezvousError: `host` is no address of this host.
            ValueError: `advertise` is missing, or `transport="unix"`.
        """
        if self._transport in ("unix", "shm"):
            raise ValueError(f"transport={self._transport!r} opens no TCP listener; use transport='auto' or 'tcp'")
        if advertise is None and address.is_wildcard(host):
            raise ValueError(f"listening on {host} needs advertise=, an address of this host that peers can reach")
        self._targets.check_key(host)
        listener = address.open_tcp(host)
        self._tcp = (advertise or host, listener.getsockname()[1])
        self._listeners.add(listener)
        return self.card

    async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
        """Open a link of `kind` to rank `peer`, whose card this is.

        Returns:
            The link; None if the link that `peer` opened is the one that stays (it was passed to `accepted`).

        Raises:
            AuthenticationError: the other end does not belong to this job, or is another rank.
            RendezvousError: no transport that is allowed leads from here to there.
            PeerLostError: the peer cannot be reached; names address, reason and time spent.
            GroupClosedError: the transport was closed.
        """
        target = self._targets.find(peer, card)
        key = (peer, kind)
        if self._live.has(key):
            return None
        if key in self._dials:
            raise RuntimeError(f"rank {self.rank} is already connecting to rank {peer} ({kind.name})")
        dial = self._dials[key] = Dial(peer, target, self._runtime.loop.create_future(), self._runtime.time())
        try:
            return await self._dial(dial, key, target)
        except asyncio.CancelledError:
            self._trouble = str(dial.failure(self._runtime.time()))
            raise
        finally:
            del self._dials[key]
            dial.done.set_result(None)

    def carrier(self, peer: int) -> tuple[str, str | None]:
        """Say what carries data to `peer` ("none" before the first), and why it is not shared memory."""
        return self._live.carrier(peer), self._live.sharing.trouble

    def catch_up(self) -> None:
        """Look into the memory shared with peers: a socket may tell of their end before."""
        self._live.sharing.catch_up()

    async def aclose(self) -> None:
        """Stop listening, end the handshakes and dials in progress; links that are open stay open."""
        self._closed = True
        self._listeners.close()
        if self._unix is not None:
            address.remove_unix(self._unix)
        self._unix = self._tcp = None
        for task in self._pending:
            task.cancel()
        for dial in self._dials.values():
            dial.interrupt(self._runtime.time())
        unfinished: set[asyncio.Future[Any]] = {*self._pending, *self._evicted, *(d.done for d in self._dials.values())}
        if unfinished:
            await asyncio.wait(unfinished)

    def _greet(self, sock: socket.socket) -> None:
        if sock.family == _AF_UNIX:
            uid = address.peer_uid(sock)
            if not address.may_connect(uid, os.geteuid()):
                logger.debug("rank %d refused a process of user %s", self.rank, uid, extra=self._whose)
                sock.close()
                return
        if len(self._pending) >= self._most_pending:
            # The oldest that has said nothing is the likeliest to be silent, and a peer cut off there dials again.
            # One that was told OK may believe that it has a link: whom it loses then is dead to it.
            told_ok = set().union(*self._incoming.values())
            oldest = next((task for task in self._pending if task not in told_ok), next(iter(self._pending)))
            self._pending.pop(oldest).cancel()
            self._evicted.add(oldest)
            oldest.cancel()
        task = self._runtime.create_task(self._serve(sock), f"aiocoll-accept-{self.rank}")
        self._pending[task] = self._runtime.call_later(self._handshake_timeout, self._expire, task)
        task.add_done_callback(partial(self._served, sock))

    def _expire(self, task: asyncio.Task[bool]) -> None:
        self._pending[task] = self._runtime.call_later(_GRACE, task.cancel)

    def _served(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        if timer := self._pending.pop(task, None):
            timer.cancel()
        self._evicted.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR
            logger.log(level, "rank %d refused a connection", self.rank, exc_info=error, extra=self._whose)
        if task.cancelled() or error is not None or not task.result():
            sock.close()

    async def _serve(self, sock: socket.socket) -> bool:
        """Answer a handshake; whether the socket now belongs to a link."""
        exchange = handshake.ServerHandshake(self._identity, self._key, self._runtime.random_bytes)
        key: Key | None = None

        def decide(peer: Peer) -> Status:
            nonlocal key
            key = (peer.rank, peer.kind)
            return self._decide(key)

        _send(sock, exchange.challenge(await self._receive(sock, handshake.HELLO_SIZE), decide))
        if exchange.refusal is not None:
            raise exchange.refusal
        assert key is not None  # asked for everything that is not refused
        task = asyncio.current_task()
        assert task is not None
        told_ok = self._incoming.setdefault(key, set())
        told_ok.add(task)
        try:
            exchange.verify(await self._receive(sock, handshake.PROOF_SIZE))
            link = await self._live.adopt(sock, key, dialled=False)
        finally:
            told_ok.discard(task)
        if link is None:
            return False
        if dial := self._dials.get(key):
            dial.interrupt(self._runtime.time())
        self.accepted(link)
        return True

    def _decide(self, key: Key) -> Status:
        """Say what to do with a HELLO, not proven yet, so nothing may be changed for it."""
        rank = key[0]
        if rank == self.rank or not 0 <= rank < self._world_size:
            return Status.REFUSED
        if self._live.has(key):
            return Status.DUPLICATE
        dial = self._dials.get(key)
        return Status.CROSSED if dial and dial.active and self.rank < rank else Status.OK

    async def _dial(self, dial: Dial, key: Key, target: Target) -> Link | None:
        """Dial until there is a link; wait instead while the peer, told OK, is proving itself."""
        time = self._runtime.time
        pause = _FIRST_PAUSE
        while (left := dial.left(now := time(), self._connect_timeout, met=self.met)) > 0 and not self._closed:
            dial.begins(now)
            try:
                async with asyncio.timeout(min(left, self._handshake_timeout)) as dial.limit:
                    if incoming := self._incoming.get(key):
                        await asyncio.wait(incoming)
                    else:
                        return await self._attempt(dial, key, target)
            except TimeoutError:
                dial.reason = "it does not answer"
            except _RetryError as error:
                dial.reason = str(error)  # itself, it would keep all that was in hand when it was raised
                with suppress(TimeoutError):
                    async with asyncio.timeout(None) as dial.limit:
                        await self._runtime.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            if self._live.has(key):
                return None
        if self._closed:
            raise GroupClosedError(f"rank {self.rank} closed its transport while connecting to rank {key[0]}")
        raise dial.failure(time())

    async def _attempt(self, dial: Dial, key: Key, target: Target) -> Link:
        dial.active = True
        try:
            sock = await address.reach(self._runtime.loop, target.family, target.address)
            dial.answered()
            try:
                return await self._introduce(sock, key, target)
            except BaseException:
                sock.close()
                raise
        except HandshakeRefusedError as error:
            if error.status in (Status.CROSSED, Status.DUPLICATE):
                raise _RetryError(str(error)) from None
            raise
        except (AuthenticationError, TimeoutError):
            raise
        except OSError as error:
            if not address.is_outage(error):
                dial.answered()
            if address.may_pass(error):
                raise _RetryError(error.strerror or str(error)) from None
            raise target.unreachable(key[0], str(error)) from error
        finally:
            dial.active = False

    async def _introduce(self, sock: socket.socket, key: Key, target: Target) -> Link:
        peer, kind = key
        if target.family == _AF_UNIX and not address.may_connect(uid := address.peer_uid(sock), os.geteuid()):
            raise AuthenticationError(f"{target.label} belongs to user {uid}, not to us: it is no rank of this job")
        exchange = handshake.ClientHandshake(self._identity._replace(kind=kind), self._key, self._runtime.random_bytes)
        _send(sock, exchange.hello())
        proof = exchange.answer(await self._receive(sock, handshake.CHALLENGE_SIZE))
        assert exchange.peer is not None
        if exchange.peer.rank != peer:
            raise AuthenticationError(f"at {target.label} is rank {exchange.peer.rank}, not rank {peer}")
        if self._live.has(key):
            raise _RetryError("the link that it opened came first")
        _send(sock, proof)
        link = await self._live.adopt(sock, key, dialled=True)
        if link is None:
            raise _RetryError("the link that it opened came first")
        return link

    async def _receive(self, sock: socket.socket, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            part = await self._runtime.loop.sock_recv(sock, nbytes - len(data))
            if not part:
                raise ConnectionResetError("it closed the connection during the handshake")
            data += part
        return data


def _send(sock: socket.socket, message: bytes) -> None:
    """Send a handshake message, which an empty socket buffer always takes whole."""
    if sock.send(message) != len(message):
        raise ConnectionResetError("it takes no bytes")
