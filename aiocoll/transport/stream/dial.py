"""Dialling of peers: the addresses to dial, the state of one dial, and the retries until a link is open."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from aiocoll.errors import AuthenticationError, GroupClosedError, PeerLostError, RendezvousError
from aiocoll.log import logger
from aiocoll.runtime import Runtime
from aiocoll.security import keys
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    VERDICT_SIZE,
    ClientHandshake,
    ConnKind,
    HandshakeRefusedError,
    Identity,
    Peer,
    Status,
    UnprovenError,
)
from aiocoll.security.loop_timeout import LoopTimeout
from aiocoll.sockets import UNREACHABLE_AFTER, is_ready
from aiocoll.transport.base import Card
from aiocoll.transport.byte_stream import ByteStream, receive_message, send_message
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream.crossing import Crossing
from aiocoll.transport.stream.link_table import Key, LinkTable
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.users import peer_trouble

__all__ = ["Dial", "DialAddress", "DialAddresses", "Dialler"]

#: Shortest and longest pause in seconds before dialling again. The shortest pause is about one round trip. The pause
#: doubles each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
#: If fewer seconds are left, make no further attempt to connect. Timers may fire early by less than this time.
_NO_TIME = 1e-6
#: Seconds for which a dial is retried if the answering process does not prove the job key. A byte may have been lost.
#: Or the address belongs to another host in this network, and the peer can still reach this rank.
_DOUBT = 1.0

T = TypeVar("T")
#: A function that makes a link from a stream after the handshake. It returns None if another connection has become the
#: link.
_Adopt = Callable[[ByteStream, Peer], Awaitable[T | None]]

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # does not exist on Windows

_SILENT = "it does not answer"


class DialAddress(NamedTuple):
    """An address at which to dial a peer.

    Attributes:
        family, address: family and address of the socket.
        label: name of the address in messages.
        instead: the address to dial if this one cannot be reached, or None.
        striped: the link will have further connections.
    """

    family: int
    address: Any
    label: str
    instead: DialAddress | None = None
    striped: bool = False

    def unreachable(self, peer: int, reason: str) -> PeerLostError:
        """Return the error to raise if rank `peer` could not be reached at this address."""
        text = f"rank {peer} cannot be reached at {self.label}: {reason}"
        return PeerLostError(text, how="unreachable", ranks=[peer])


class DialAddresses:
    """The choice of the address at which to dial each peer.

    Args:
        rank: this rank.
        host: identity of its host.
        key: the job key, or None.
        transport: as for `aiocoll.transport.stream.stream_options.StreamOptions`.
    """

    def __init__(self, rank: int, host: str, key: bytes | None, transport: str) -> None:
        self.host = host
        #: The reason why this rank does not dial unix sockets of ranks whose cards name the same host; None if it does.
        self.unix_trouble: str | None = None
        self.may_use_unix = transport != "tcp" and _AF_UNIX is not None
        self._rank = rank
        self._key = key
        self._transport = transport
        self._warned_keyless = False

    def find(self, peer: int, card: Card) -> DialAddress:
        """Return the address at which to dial rank `peer` with this card.

        Raises:
            AuthenticationError: other machines can reach that address, and there is no job key.
            RendezvousError: no allowed transport can reach the peer.
        """
        if card["host"] == self.host and self.may_use_unix and card["unix"]:
            name = card["unix"]
            # A unix socket is faster than TCP, but may be unreachable: the peer may run as another user, or on a copy
            # of this virtual machine. Then TCP is dialled instead, but only with a job key, since nothing else
            # authenticates the peer there.
            instead = self._tcp(card) if self._transport == "auto" and card["tcp"] and self._key else None
            return DialAddress(socket.AF_UNIX, address.unix_address(name), f"unix socket {name}", instead)
        if self._transport in ("unix", "shm"):
            where = "another host" if card["host"] != self.host else "this host, but has no unix socket"
            raise RendezvousError(
                f"transport={self._transport!r} on rank {self._rank}, but rank {peer} is on {where}; use 'auto'"
            )
        if not card["tcp"]:
            raise RendezvousError(
                f"rank {peer} does not listen on any address that rank {self._rank} could use; it published {card}"
            )
        return self._tcp(card)

    def _tcp(self, card: Card) -> DialAddress:
        host, port = card["tcp"]
        self.check_key(host)
        hint = ", which other hosts cannot reach" if card["host"] != self.host and keys.is_loopback(host) else ""
        return DialAddress(address.family_of(host), (host, port), f"{host} port {port}{hint}")

    def check_key(self, host: str) -> None:
        """Check that TCP connections to `host` have a job key. On the loopback, a missing key only logs a warning."""
        keys.require_key(host, self._key)
        if self._key is None and not self._warned_keyless:
            self._warned_keyless = True
            risk = "every user of this host could join; start the job with `aiocoll run`, or pass job_key="
            rank = self._rank
            logger.warning("rank %d uses TCP on %s without a job key: %s", rank, host, risk, extra={"rank": rank})


class Dial:
    """The state of a running `connect` to one peer.

    Args:
        runtime: clock and timers.
        peer: the dialled rank.
        target: the dialled address.

    Attributes:
        done: set when the dial has ended.
        target: the address that is dialled now.
        limit: the timeout of the current step; `interrupt` brings it forward.
        reason: why there is no link yet.
    """

    __slots__ = (
        "_arrived",
        "_began",
        "_blocked",
        "_peer",
        "_runtime",
        "_silent_since",
        "_timeout",
        "done",
        "limit",
        "reason",
        "target",
    )

    def __init__(self, runtime: Runtime, peer: int, target: DialAddress) -> None:
        self._runtime = runtime
        self._peer = peer
        self._began = self._silent_since = runtime.time()
        self._blocked = 0.0
        self._timeout: LoopTimeout | None = None
        self.done: asyncio.Future[None] = runtime.loop.create_future()
        self.target = target
        self.limit: asyncio.Timeout | None = None
        self.reason = _SILENT
        self.watch(-1)

    def watch(self, fd: int, *, connecting: bool = False) -> None:
        """Set the socket descriptor of the current attempt to connect; -1 for none."""
        self._arrived = partial(is_ready, fd, to_write=connecting)

    def allow(self, seconds: float) -> None:
        """Limit the current step of the dial to `seconds`, until `stop` is called."""
        self._timeout = LoopTimeout(
            self._runtime, seconds, lambda: self.interrupt(self._runtime.time()), lambda: self._arrived()
        )

    def stop(self) -> None:
        """Remove the limit set by `allow`. Extend the dial by the time for which this rank's event loop was blocked."""
        if self._timeout is not None:
            self._timeout.cancel()
            self._blocked += self._timeout.blocked
            self._silent_since += self._timeout.blocked
            self._timeout = None

    def interrupt(self, now: float) -> None:
        """End the current step, so that the dialler checks at once whether the link is open or the transport closed."""
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(now)

    def record_attempt(self, now: float) -> None:
        """Record that a connection attempt starts."""
        self._silent_since = min(self._silent_since, now)

    def record_answer(self) -> None:
        """Record that the peer's host has answered, even if it refused the connection."""
        self._silent_since = math.inf

    def seconds_left(self, now: float, timeout: float, *, impatient: bool) -> float:
        """Return the seconds left of a dial of `timeout` seconds: fewer if `impatient` and the host does not answer."""
        end = self._began + self._blocked + timeout
        return (min(end, self._silent_since + UNREACHABLE_AFTER) if impatient else end) - now

    def failure(self, now: float) -> PeerLostError:
        """Return the error to raise when the time for this dial is used up."""
        return self.target.unreachable(self._peer, f"{self.reason} (tried for {now - self._began:.1f} s)")


class _RetryError(Exception):
    """Raised when a connection attempt fails, but a later one may succeed."""


class _NoRouteError(Exception):
    """Raised when the peer cannot be reached at this address, so that `DialAddress.instead` is dialled."""


class Dialler:
    """The component of a transport that dials peers, with retries until each requested link is open.

    Args:
        runtime: clock and randomness.
        identity: identity of this rank in handshakes. Its kind of connection is not used.
        key: the job key, or None.
        options: the timeouts, and the function that opens streams.
        links: the open links of this rank.
        crossing: the promises of this rank to peers that dial it at the same time.

    Attributes:
        detours: the reason why a peer is not reached by its unix socket, by peer.
        impatient: a host that does not answer for `UNREACHABLE_AFTER` seconds is unreachable.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: Identity,
        key: bytes | None,
        options: StreamOptions,
        links: LinkTable,
        crossing: Crossing,
    ) -> None:
        self.detours: dict[int, str] = {}
        self.impatient = False
        self._runtime = runtime
        self._identity = identity
        self._key = key
        self._options = options
        self._links = links
        self._crossing = crossing
        self._dials: dict[Key, Dial] = {}
        self._trouble = ""
        self._closed = False

    @property
    def trouble(self) -> str:
        """The reason why a dial has not reached its peer, even after the dial was cancelled; "" without such a dial."""
        now = self._runtime.time()
        return next((str(dial.failure(now)) for dial in self._dials.values()), self._trouble)

    async def connect(self, key: Key, target: DialAddress, adopt: _Adopt[T]) -> T | None:
        """Dial a peer until `adopt` accepts the connection; return None if the peer has opened the link instead.

        Args:
            key: the peer and the kind of connection.
            target: the address to dial.
            adopt: makes a link from a stream whose handshake is complete; returns None if another connection already
                is the link.

        Raises:
            AuthenticationError: the other end does not belong to this job, or is another rank.
            PeerLostError: the peer cannot be reached. The message names address, reason and elapsed time.
            GroupClosedError: the transport was closed.
        """
        if key in self._dials:
            raise RuntimeError(f"rank {self._identity.rank} is already connecting to rank {key[0]} ({key[1].name})")
        dial = self._dials[key] = Dial(self._runtime, key[0], target)
        try:
            return await self._dial(dial, key, adopt)
        except asyncio.CancelledError:
            if key[1] is not ConnKind.PROBE:  # a missing probe does no harm
                self._trouble = str(dial.failure(self._runtime.time()))
            raise
        finally:
            del self._dials[key]
            dial.done.set_result(None)

    def interrupt(self, key: Key) -> None:
        """Interrupt the dialling of a link, because the peer has opened that link."""
        if dial := self._dials.get(key):
            dial.interrupt(self._runtime.time())

    def close(self) -> set[asyncio.Future[None]]:
        """Interrupt all dials in progress; return futures that are done when the dials have ended."""
        self._closed = True
        for dial in self._dials.values():
            dial.interrupt(self._runtime.time())
        return {dial.done for dial in self._dials.values()}

    async def _dial(self, dial: Dial, key: Key, adopt: _Adopt[T]) -> T | None:
        """Dial until a link is open, even if a process without the job key answers in the meantime.

        If this rank has promised the peer a link, wait for the peer's connection instead.
        """
        time = self._runtime.time
        doubtful = 0.0
        pause = _FIRST_PAUSE
        while (
            left := dial.seconds_left(now := time(), self._options.connect_timeout, impatient=self.impatient)
        ) > _NO_TIME:
            if self._closed:
                break
            dial.record_attempt(now)
            dial.allow(min(left, self._options.handshake_timeout))
            promised = self._crossing.promised(key)
            try:
                async with asyncio.timeout(None) as dial.limit:
                    if promised is not None:
                        dial.record_answer()
                        dial.reason = "the connection that the peer is opening is not complete"
                        await asyncio.wait([promised])
                    else:
                        return await self._attempt(dial, key, adopt)
            except TimeoutError:
                if (
                    promised is None and left >= self._options.handshake_timeout
                ):  # a shorter attempt does not prove that the peer is silent
                    dial.reason = _SILENT
            except _NoRouteError as error:
                assert dial.target.instead is not None
                self.detours[key[0]] = str(error)
                dial.target = dial.target.instead
            except (_RetryError, UnprovenError) as error:
                dial.reason = str(error)  # not the exception, whose traceback would keep objects alive
                if isinstance(error, UnprovenError):
                    doubtful = doubtful or time()
                    if time() >= doubtful + _DOUBT:
                        raise AuthenticationError(
                            f"expected rank {key[0]} at {dial.target.label}, but {error}"
                        ) from error
                with suppress(TimeoutError):
                    async with asyncio.timeout(None) as dial.limit:
                        await self._runtime.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            finally:
                dial.stop()
            if self._links.has(key):
                return None
        if self._closed:
            raise GroupClosedError(f"rank {self._identity.rank} closed its transport while connecting to rank {key[0]}")
        raise dial.failure(time())

    async def _attempt(self, dial: Dial, key: Key, adopt: _Adopt[T]) -> T:
        target = dial.target
        try:
            sock = await self._reach(dial, key[1])
            dial.record_answer()
            dial.watch(sock.fileno())
            stream = await self._options.open_stream(self._runtime.loop, sock, dialled=True)
            try:
                return await self._introduce(dial, stream, key, adopt)
            except BaseException:
                # Shut down before closing: the peer may wait for the end without a timeout, and a forked child may hold
                # the socket open.
                with suppress(OSError):
                    stream.shutdown()
                stream.close()
                raise
        except HandshakeRefusedError as error:
            if error.status in (Status.CROSSED, Status.DUPLICATE):
                raise _RetryError(str(error)) from None
            raise
        except (AuthenticationError, TimeoutError):
            raise
        except OSError as error:
            if not address.is_outage(error):
                dial.record_answer()
            if address.is_transient(error):
                raise _RetryError(error.strerror or str(error)) from None
            raise target.unreachable(key[0], str(error)) from error
        finally:
            dial.watch(-1)

    async def _reach(self, dial: Dial, kind: ConnKind) -> socket.socket:
        """Return a connected socket. For a unix socket, check that the peer's process belongs to this user."""
        target = dial.target
        try:
            sock = await address.reach(
                self._runtime.loop,
                target.family,
                target.address,
                in_bursts=kind is ConnKind.PROBE,
                connecting=partial(dial.watch, connecting=True),
            )
        except OSError as error:
            if target.instead is not None and address.is_missing(error):
                raise _NoRouteError(f"{target.label}: {error.strerror}") from None
            raise
        if target.family == _AF_UNIX and (foreign := peer_trouble(sock)) is not None:
            sock.close()
            trouble = f"{target.label} {foreign}"
            if target.instead is not None:
                raise _NoRouteError(trouble)
            raise AuthenticationError(
                f"{trouble}; give all ranks a job key: transport='auto' then uses TCP between users"
            )
        return sock

    async def _introduce(self, dial: Dial, stream: ByteStream, key: Key, adopt: _Adopt[T]) -> T:
        peer, kind = key
        target = dial.target
        stream.check_rank(peer)
        identity = self._identity._replace(kind=kind, ended=self._links.ended(key), striped=target.striped)
        exchange = ClientHandshake(identity, self._key, self._runtime.random_bytes, stream.bound)
        await _send_hello(stream, exchange.hello())
        send_message(stream, exchange.prove(await receive_message(stream, CHALLENGE_SIZE)))
        confirmation = exchange.confirm(await receive_message(stream, VERDICT_SIZE))
        assert exchange.peer is not None
        if exchange.peer.rank != peer:
            raise AuthenticationError(f"rank {exchange.peer.rank} answered at {target.label} instead of rank {peer}")
        if not self._crossing.may_confirm(key):
            raise _RetryError("the connection that the peer opened is used instead")
        # The peer has proven the job key, so from here on only `connect_timeout` limits the time.
        dial.stop()
        dial.allow(dial.seconds_left(self._runtime.time(), self._options.connect_timeout, impatient=False))
        with self._crossing.confirm(key):
            send_message(stream, confirmation)
            adopted = await adopt(stream, exchange.peer)
        if adopted is None:
            raise _RetryError("the connection that the peer opened is used instead")
        return adopted


async def _send_hello(stream: ByteStream, hello: bytes) -> None:
    """Send HELLO, the first message of the handshake.

    If sending fails, read the reason from the other end: it may have rejected this rank's certificate.
    """
    try:
        send_message(stream, hello)
    except OSError:
        await receive_message(stream, 1)
        raise
