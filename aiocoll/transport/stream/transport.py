"""Stream transport: links between processes over unix sockets on one host, and over TCP between hosts.

This module accepts connections, `dial` opens them, and `crossing` chooses the link if there are several. One rule holds
for all three: a peer that has not proven the job key has no effect on ranks that have. An unproven connection occupies
one of a few places (`unproven`) for a few seconds, or until a newer connection needs the place. No rank waits for it,
and its data changes no reply to a peer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from aiocoll.elements.nan_fingerprint import nan_fingerprint
from aiocoll.errors import AiocollError, AuthenticationError
from aiocoll.log import RepeatLimiter, logger
from aiocoll.native import core
from aiocoll.process import this_process
from aiocoll.runtime import Runtime
from aiocoll.security import handshake
from aiocoll.security.handshake import ConnKind, Identity, Peer, ServerHandshake, Status
from aiocoll.security.loop_timeout import LoopTimeout
from aiocoll.security.names import WrongCertificateError
from aiocoll.security.unproven_connections import UnprovenConnections
from aiocoll.sockets import enable_keepalive, is_between_hosts, is_ready
from aiocoll.transport.base import Card, Link
from aiocoll.transport.byte_stream import ByteStream, receive_message, send_message
from aiocoll.transport.shm.transport import Sharing
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream.crossing import Crossing
from aiocoll.transport.stream.dial import DialAddress, DialAddresses, Dialler
from aiocoll.transport.stream.link_table import CarrierUse, Key, LinkTable
from aiocoll.transport.stream.probe import answer
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.users import peer_trouble

__all__ = ["StreamTransport"]

#: Seconds until a unix socket is dialled again if its backlog was full or no descriptor was available.
_TRY_AGAIN = 0.01

#: The byte that confirms a further connection of a link, sent by the end that accepts it.
_TAKEN = b"\x01"

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # does not exist on Windows


_DEFAULTS: Final = StreamOptions()


class StreamTransport:
    """The transport of one rank over sockets and shared memory; see `aiocoll.transport.base.Transport`.

    Args:
        runtime: clock, timers and randomness.
        rank: rank of this process in the job.
        world_size: number of ranks in the job.
        job: name of the job, or the 16 bytes of its id.
        key: the job key; may be None only if all connections stay on this host.
        options: timeouts and the kinds of connections.
    """

    name = "stream"
    accepted: Callable[[Link], None]
    heartbeat_accepted: Callable[[int, ByteStream], None]
    look: Callable[[], bool] = staticmethod(lambda: False)
    keep_polling: Callable[[bool], bool] = staticmethod(lambda moved: False)
    #: Callback that returns the number of connections for a data link to a host, given the host's name in its card.
    connections: Callable[[str], int] = staticmethod(lambda host: 1)

    def __init__(
        self,
        runtime: Runtime,
        rank: int,
        world_size: int,
        job: bytes | str,
        key: bytes | None,
        options: StreamOptions = _DEFAULTS,
    ) -> None:
        self.rank = rank
        self._log_extra = {"rank": rank}
        self._runtime = runtime
        job = handshake.job_id(job) if isinstance(job, str) else job
        self._identity = Identity(job, options.epoch, rank, world_size, ConnKind.CONTROL)
        self._key = key
        self._open_stream = options.open_stream
        self._transport = transport = options.transport
        self._addresses = DialAddresses(rank, address.host_identity(options.host_id), key, transport)
        self._process = this_process()
        self._handshake_timeout = options.handshake_timeout
        self._repeats = RepeatLimiter()
        self._unix: str | None = None
        self._tcp: tuple[str, int] | None = None
        self._listeners = address.Listeners(runtime, self._greet)
        # Tasks that answer handshakes of peers, each with its timeout; and tasks cancelled to make room for newer ones.
        self._serving: dict[asyncio.Task[bool], LoopTimeout] = {}
        self._evicted: set[asyncio.Task[bool]] = set()
        # The tasks of `_serving` whose peer has not proven the job key yet; and other background tasks.
        self._unproven: UnprovenConnections[asyncio.Task[bool]] = UnprovenConnections(world_size, self._evict)
        self._background: set[asyncio.Task[None]] = set()
        wanted = transport in ("auto", "shm") and not options.carries_all
        self._carrier = options.carrier
        self._links = LinkTable(
            runtime,
            Sharing(runtime, rank, world_size, self, wanted=wanted, single_copy=options.single_copy),
            CarrierUse(options.carrier, carries_all=options.carries_all),
        )
        self.registered_memory = self._links.sharing.registered_memory
        self._crossing = Crossing(rank, world_size, self._links)
        self._dialler = Dialler(
            runtime,
            self._identity,
            key,
            options,
            self._links,
            self._crossing,
        )

    @property
    def trouble(self) -> str:
        """The reason why a dial has not reached its peer, even after the dial was cancelled; "" without such a dial."""
        return self._dialler.trouble

    def set_all_met(self) -> None:
        """Treat silent hosts as unreachable from now on. Before all ranks have met, they may still be starting."""
        self._dialler.impatient = True

    def agree_on_carrier(self, used: bool) -> None:
        """Set whether all ranks use the carrier from the options. Data links are made only after this call."""
        self._links.carrier_use.agree(used)

    @property
    def card(self) -> Card:
        """The card of this rank, with its current addresses."""
        tcp = list(self._tcp) if self._tcp else None
        return {
            "host": self._addresses.host,
            "unix": self._unix,
            "tcp": tcp,
            "process": list(self._process),
            "piece": self._links.sharing.chunk_nbytes,
            "reads": self._links.sharing.reads,
            "nans": nan_fingerprint(),
            "native": core is not None,
        }

    async def listen(self) -> Card:
        """Listen on a unix socket, unless `transport="tcp"`. Method `listen_tcp` starts to listen on TCP."""
        if self._addresses.may_use_unix:
            listener, self._unix = address.open_unix(self._runtime.random_bytes)
            self._listeners.add(listener)
        return self.card

    async def try_unix(self, name: str) -> str | None:
        """Return the reason why another rank's unix socket cannot be reached; None if it can.

        Raises:
            AuthenticationError: the socket belongs to another user.
        """
        while True:
            try:
                with await address.reach(self._runtime.loop, socket.AF_UNIX, address.unix_address(name)) as sock:
                    foreign = peer_trouble(sock)
            except OSError as error:
                if address.is_missing(error) or not address.is_transient(error):
                    return f"unix socket {name} cannot be reached ({error.strerror})"
                await self._runtime.sleep(_TRY_AGAIN)
                continue
            if foreign is not None:
                raise AuthenticationError(f"unix socket {name} {foreign}")
            return None

    def treat_as_remote(self, host: str, trouble: str) -> None:
        """From now on, identify as being on `host`, because unix sockets do not reach the ranks of this host."""
        self._addresses.host = host
        self._addresses.unix_trouble = trouble

    async def listen_tcp(
        self,
        host: str,
        advertise: str | None = None,
        advertise_port: int | None = None,
        ports: tuple[int, int] | None = None,
    ) -> Card:
        """Start to listen on a TCP port of the numeric address `host`; return this rank's new card.

        Args:
            host: address to listen on.
            advertise: the address to publish to peers if it is not `host`; required if `host` is a wildcard.
            advertise_port: the port to publish to peers if it is not the local port.
            ports: the first and the last port to try; None for any free port.

        Raises:
            AuthenticationError: other machines can reach `host`, and there is no job key.
            RendezvousError: `host` is not an address of this host, or no port in `ports` is free.
            ValueError: `advertise` is missing, or `transport="unix"`.
        """
        if self._transport in ("unix", "shm"):
            raise ValueError(f"transport={self._transport!r} opens no TCP listener; use transport='auto' or 'tcp'")
        if advertise is None and address.is_wildcard(host):
            raise ValueError(f"listening on {host} needs advertise=, an address of this host that peers can reach")
        for each in {host, advertise or host}:
            self._addresses.check_key(each)
        listener = address.open_tcp(host, ports)
        self._tcp = (advertise or host, advertise_port or listener.getsockname()[1])
        self._listeners.add(listener)
        return self.card

    async def connect(self, peer: int, card: Card, kind: ConnKind) -> Link | None:
        """Open a link of `kind` to rank `peer`, which has published `card`.

        Returns:
            The link; None if the link that `peer` opened is used instead (it was passed to `accepted`).

        Raises:
            AuthenticationError: the other end does not belong to this job, or is another rank.
            RendezvousError: no allowed transport can reach the peer.
            PeerLostError: the peer cannot be reached. The message names address, reason and elapsed time.
            GroupClosedError: the transport was closed.
        """
        target = self._addresses.find(peer, card)
        key = (peer, kind)
        if self._links.has(key):
            return None
        single = kind is not ConnKind.DATA or target.family == _AF_UNIX or self._links.carrier_use.used
        connections = 1 if single else self.connections(card["host"])
        striped = connections > 1
        link: Link | None = await self._dialler.connect(
            key, target._replace(striped=striped), partial(self._links.adopt, dialled=True, striped=striped)
        )
        if link is not None and striped:
            self._start("connections", self._add_connections, peer, target, connections - 1)
        return link

    async def connect_heartbeat(self, peer: int, card: Card) -> ByteStream | None:
        """Open a heartbeat connection. Results and errors are the same as for `connect`."""
        target = self._addresses.find(peer, card)
        return await self._dialler.connect((peer, ConnKind.HEARTBEAT), target, self._links.adopt_stream)

    async def connect_probe(self, peer: int, card: Card) -> ByteStream:
        """Open a connection for `transport.stream.probe.measure`. Errors are the same as for `connect`."""
        target = self._addresses.find(peer, card)
        stream = await self._dialler.connect((peer, ConnKind.PROBE), target, self._links.adopt_stream)
        assert stream is not None  # None would mean that there is such a link, but a probe never becomes a link
        return stream

    def carrier(self, peer: int) -> tuple[str, str | None]:
        """Return the medium of the data link to `peer` ("none" if not open), and the reason why it is not "shm"."""
        trouble = self._dialler.detours.get(peer) or self._addresses.unix_trouble or self._links.sharing.trouble
        return self._links.carrier(peer), trouble

    def catch_up(self) -> None:
        """Read the frames that peers have written to shared memory, before handling a notice that came by a socket."""
        self._links.sharing.catch_up()
        if self._carrier is not None:
            self._carrier.catch_up()

    async def aclose(self) -> None:
        """Stop listening, cancel handshakes and dials, and let peers unmap this rank's memory. Open links stay open."""
        self.close()
        for task in (*self._serving, *self._background):
            task.cancel()
        unfinished: set[asyncio.Future[Any]] = {
            *self._serving,
            *self._evicted,
            *self._background,
            *self._dialler.close(),
        }
        if unfinished:
            await asyncio.wait(unfinished)

    def close(self) -> None:
        """Stop listening, and let peers unmap this rank's memory. The event loop may be closed already."""
        self._listeners.close()
        self.registered_memory.close()
        if self._carrier is not None:
            self._carrier.close()
        if self._unix is not None:
            address.remove_unix(self._unix)
        self._unix = self._tcp = None

    def _greet(self, sock: socket.socket) -> None:
        if sock.family == _AF_UNIX and (foreign := peer_trouble(sock)) is not None:
            logger.debug("rank %d refused a connection that %s", self.rank, foreign, extra=self._log_extra)
            sock.close()
            return
        task = self._runtime.create_task(self._serve(sock), f"aiocoll-accept-{self.rank}")
        arrived = partial(is_ready, sock.fileno())
        self._serving[task] = LoopTimeout(self._runtime, self._handshake_timeout, task.cancel, arrived)
        self._unproven.admit(task)
        task.add_done_callback(partial(self._served, sock))

    def _evict(self, task: asyncio.Task[bool]) -> None:
        self._serving.pop(task).cancel()
        self._evicted.add(task)
        task.cancel()

    def _served(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        if timeout := self._serving.pop(task, None):
            timeout.cancel()
        self._evicted.discard(task)
        self._unproven.release(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, WrongCertificateError):
            self._warn(error)
        elif error is not None:
            level = logging.DEBUG if isinstance(error, OSError) else logging.ERROR
            logger.log(level, "rank %d refused a connection", self.rank, exc_info=error, extra=self._log_extra)
        if task.cancelled() or error is not None or not task.result():
            sock.close()

    def _warn(self, why: WrongCertificateError) -> None:
        """Log a rejected certificate: it may explain why a peer with a wrong clock or wrong files never connects.

        All such warnings count as repetitions of one, since any process can present any certificate.
        """
        if (repeated := self._repeats.admit("certificate", self._runtime.time())) is not None:
            logger.warning("rank %d refused a connection: %s%s", self.rank, why, repeated, extra=self._log_extra)

    async def _serve(self, sock: socket.socket) -> bool:
        """Answer the handshake on an accepted socket; return whether the socket is in use now."""
        stream = await self._open_stream(self._runtime.loop, sock, dialled=False)
        hand_over = None
        try:
            hand_over = await self._answer(stream)
        finally:
            if hand_over is None:
                stream.close()
        if hand_over is None:
            return False
        hand_over()
        return True

    async def _answer(self, stream: ByteStream) -> Callable[[], None] | None:
        """Answer a handshake; return a function that reports the new link, or None if there is a link already."""
        exchange = ServerHandshake(self._identity, self._key, self._runtime.random_bytes, stream.bound)
        send_message(stream, exchange.challenge(await receive_message(stream, handshake.HELLO_SIZE)))
        if exchange.refusal is not None:
            raise exchange.refusal
        proof = await receive_message(stream, handshake.PROOF_SIZE)
        key: Key | None = None
        wrong: WrongCertificateError | None = None

        def decide(peer: Peer) -> Status:
            nonlocal key, wrong
            try:
                stream.check_rank(peer.rank)
            except WrongCertificateError as error:
                wrong = error
                return Status.WRONG_CERTIFICATE
            key = (peer.rank, peer.kind)
            self._links.catch_up(key, peer.ended)
            return self._crossing.decide(key)

        verdict = exchange.verdict(proof, decide, lambda peer: self._links.ended((peer.rank, peer.kind)))
        if exchange.refusal is not None:
            send_message(stream, verdict)
            raise wrong or exchange.refusal
        assert key is not None  # `decide` has set the key, because the connection is not rejected
        task = asyncio.current_task()
        assert task is not None
        self._proven(task, stream.sock)
        with self._crossing.promise(key):
            send_message(stream, verdict)
            peer = exchange.accept(await receive_message(stream, handshake.CONFIRM_SIZE))
            hand_over = await self._adopt(stream, peer)
        if hand_over is not None:
            self._dialler.interrupt(key)
        return hand_over

    def _proven(self, task: asyncio.Task[bool], sock: socket.socket) -> None:
        """Remove the timeout for a peer that has proven the job key, because the peer may now use the link at any time.

        The peer closes the connection when it gives up, and its kernel does so when its process ends. If the host is
        down, or a router has dropped the connection, keepalive probes detect it. Otherwise the retransmission of the
        last message fails after minutes.
        """
        self._serving[task].cancel()
        self._unproven.release(task)
        if is_between_hosts(sock):
            enable_keepalive(sock)

    async def _adopt(self, stream: ByteStream, peer: Peer) -> Callable[[], None] | None:
        if peer.kind is ConnKind.HEARTBEAT:
            await self._links.adopt_stream(stream, peer)
            return partial(self.heartbeat_accepted, peer.rank, stream)
        if peer.kind is ConnKind.PROBE:
            await self._links.adopt_stream(stream, peer)
            return partial(self._start, "measured", self._answer_probe, stream)
        if peer.kind is ConnKind.STRIPE:
            await self._links.adopt_stream(stream, peer)
            return partial(self._add_connection, peer.rank, stream)
        link = await self._links.adopt(stream, peer, dialled=False, striped=peer.striped)
        return None if link is None else partial(self.accepted, link)

    def _start(self, name: str, what: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        task = self._runtime.create_task(what(*args), f"aiocoll-{name}-{self.rank}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _add_connections(self, peer: int, target: DialAddress, count: int) -> None:
        """Open further connections for a data link. After a failure, the link continues with its open connections."""
        for _ in range(count):
            try:
                stream = await self._dialler.connect((peer, ConnKind.STRIPE), target, self._links.adopt_stream)
            except (AiocollError, OSError):
                return
            assert stream is not None  # None would mean that there is such a link, but a stripe never becomes a link
            added = False
            try:
                await receive_message(stream, len(_TAKEN))
                added = self._links.add(peer, stream)
            except OSError:
                return
            finally:
                if not added:
                    stream.close()

    def _add_connection(self, peer: int, stream: ByteStream) -> None:
        """Add the connection `stream` to the data link of `peer`, and confirm it, so that `peer` adds it, too."""
        if self._links.add(peer, stream):
            send_message(stream, _TAKEN)
        else:
            stream.close()

    async def _answer_probe(self, stream: ByteStream) -> None:
        try:
            await answer(stream, self._runtime.time)
        except OSError:
            pass  # the other end has finished its measurement
        finally:
            stream.close()
