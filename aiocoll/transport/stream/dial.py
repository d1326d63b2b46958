"""Dialling peers: where a rank may dial, one attempt, and the dialler, which retries until there is a link."""

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
from aiocoll.security.patience import Patience
from aiocoll.sockets import UNREACHABLE_AFTER, is_ready
from aiocoll.transport.base import Card
from aiocoll.transport.byte_stream import ByteStream, receive_message, send_message
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream.crossing import Crossing
from aiocoll.transport.stream.link_table import Key, LinkTable
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.users import peer_trouble

__all__ = ["Dial", "DialAddress", "DialAddresses", "Dialler"]

#: Seconds to wait before dialling again: first one round trip, then doubling up to where waiting costs little.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
#: Seconds that are too few for an attempt; timers may be early by less.
_NO_TIME = 1e-6
#: Seconds for which others may answer in a peer's place before that is an error. It may be nothing but a byte that was
#: lost, or an address that means another host there, while the peer itself can reach us.
_DOUBT = 1.0

T = TypeVar("T")
#: Takes a stream whose handshake is complete; None if there is another connection by now.
_Adopt = Callable[[ByteStream, Peer], Awaitable[T | None]]

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # not on Windows

_SILENT = "it does not answer"

_AF_UNIX = getattr(socket, "AF_UNIX", None)  # not on Windows


class DialAddress(NamedTuple):
    """Where to dial, and how.

    Attributes:
        family, address: of the socket.
        label: what to call it in messages.
        instead: where to dial if that leads nowhere.
        striped: the link will have further connections.
    """

    family: int
    address: Any
    label: str
    instead: DialAddress | None = None
    striped: bool = False

    def unreachable(self, peer: int, reason: str) -> PeerLostError:
        """Return the error that rank `peer` could not be reached here."""
        text = f"rank {peer} cannot be reached at {self.label}: {reason}"
        return PeerLostError(text, how="unreachable", ranks=[peer])


class DialAddresses:
    """Where one rank may dial.

    Args:
        rank: this rank.
        host: identity of its host.
        key: the job key, if there is one.
        transport: as for `aiocoll.transport.stream.transport.StreamTransport`.
    """

    def __init__(self, rank: int, host: str, key: bytes | None, transport: str) -> None:
        self.host = host
        #: Why ranks whose cards name the same host are not reached by unix sockets; None where they are.
        self.apart: str | None = None
        self.may_use_unix = transport != "tcp" and _AF_UNIX is not None
        self._rank = rank
        self._key = key
        self._transport = transport
        self._warned_keyless = False

    def find(self, peer: int, card: Card) -> DialAddress:
        """Return where to dial rank `peer`, whose card this is.

        Raises:
            AuthenticationError: other machines can reach that address, and there is no job key.
            RendezvousError: no transport that is allowed leads there.
        """
        if card["host"] == self.host and self.may_use_unix and card["unix"]:
            name = card["unix"]
            # A unix socket between ranks of one host is quicker than TCP, and may still lead nowhere: the peer may run
            # as another user, or on a copy of this virtual machine. Only the key tells who is at the end of the other.
            instead = self._tcp(card) if self._transport == "auto" and card["tcp"] and self._key else None
            return DialAddress(socket.AF_UNIX, address.unix_address(name), f"unix socket {name}", instead)
        if self._transport in ("unix", "shm"):
            where = "another host" if card["host"] != self.host else "this host, but has no unix socket"
            raise RendezvousError(
                f"transport={self._transport!r} on rank {self._rank}, but rank {peer} is on {where}; use 'auto'"
            )
        if not card["tcp"]:
            raise RendezvousError(f"rank {peer} listens on no address that rank {self._rank} could use: {card}")
        return self._tcp(card)

    def _tcp(self, card: Card) -> DialAddress:
        host, port = card["tcp"]
        self.check_key(host)
        hint = ", which other hosts cannot reach" if card["host"] != self.host and keys.is_loopback(host) else ""
        return DialAddress(address.family_of(host), (host, port), f"{host} port {port}{hint}")

    def check_key(self, host: str) -> None:
        """Refuse to use TCP on `host` without a job key, or warn once where that is a smaller risk."""
        keys.require_key(host, self._key)
        if self._key is None and not self._warned_keyless:
            self._warned_keyless = True
            risk = "every user of this host could join; start the job with `aiocoll run`, or pass job_key="
            rank = self._rank
            logger.warning("rank %d uses TCP on %s without a job key: %s", rank, host, risk, extra={"rank": rank})


class Dial:
    """A `connect` in progress; bring `limit` forward to interrupt what it is doing.

    Args:
        runtime: clock and timers.
        peer: the rank that is dialled.
        target: where.

    Attributes:
        done: set when this is over.
        target: where it is dialled now.
        reason: why there is no link yet.
    """

    __slots__ = (
        "_arrived",
        "_began",
        "_blocked",
        "_patience",
        "_peer",
        "_runtime",
        "_silent_since",
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
        self._patience: Patience | None = None
        self.done: asyncio.Future[None] = runtime.loop.create_future()
        self.target = target
        self.limit: asyncio.Timeout | None = None
        self.reason = _SILENT
        self.watch(-1)

    def watch(self, fd: int, *, connecting: bool = False) -> None:
        """Set the socket of this attempt; -1 for none."""
        self._arrived = partial(is_ready, fd, to_write=connecting)

    def allow(self, seconds: float) -> None:
        """Interrupt what it is doing after so many seconds, unless `stop` comes before."""
        self._patience = Patience(
            self._runtime, seconds, lambda: self.interrupt(self._runtime.time()), lambda: self._arrived()
        )

    def stop(self) -> None:
        """Remove the limit of `allow`. The seconds for which the loop of this rank was blocked do not count."""
        if self._patience is not None:
            self._patience.cancel()
            self._blocked += self._patience.blocked
            self._silent_since += self._patience.blocked
            self._patience = None

    def interrupt(self, now: float) -> None:
        """End what it is doing, so that it looks at once for what has changed."""
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(now)

    def begins(self, now: float) -> None:
        """A connection is attempted."""
        self._silent_since = min(self._silent_since, now)

    def answered(self) -> None:
        """The peer's host has answered, be it with a refusal."""
        self._silent_since = math.inf

    def left(self, now: float, timeout: float, *, impatient: bool) -> float:
        """Return for how many seconds more to dial, `timeout` in all; fewer if silence of a host is to end it."""
        end = self._began + self._blocked + timeout
        return (min(end, self._silent_since + UNREACHABLE_AFTER) if impatient else end) - now

    def failure(self, now: float) -> PeerLostError:
        """Return what to raise if there is no more time."""
        return self.target.unreachable(self._peer, f"{self.reason} (tried for {now - self._began:.1f} s)")


class _RetryError(Exception):
    """The dial failed, and may succeed later."""


class _NoRouteError(Exception):
    """This address leads nowhere, so the other one has to be used."""


class Dialler:
    """Opens the links that this rank wants.

    Args:
        runtime: clock and randomness.
        identity: who this rank is; of any kind.
        key: the job key.
        options: how to connect, and for how long.
        links: the links there are.
        crossing: what peers are promised meanwhile.

    Attributes:
        detours: by peer, why it is not reached by the unix socket it offers.
        impatient: a host from which nothing comes is unreachable.
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
        """Why a peer that is dialled is not reached yet, or was not when that was cancelled; "" if none is dialled."""
        now = self._runtime.time()
        return next((str(dial.failure(now)) for dial in self._dials.values()), self._trouble)

    async def connect(self, key: Key, target: DialAddress, adopt: _Adopt[T]) -> T | None:
        """Dial until `adopt` has made something of the connection; None if the peer has opened one.

        Args:
            key: the peer, and what the connection is for.
            target: where to dial.
            adopt: takes a stream whose handshake is complete; None if there is another connection by now.

        Raises:
            AuthenticationError: the other end does not belong to this job, or is another rank.
            PeerLostError: the peer cannot be reached; names address, reason and time spent.
            GroupClosedError: the transport was closed.
        """
        if key in self._dials:
            raise RuntimeError(f"rank {self._identity.rank} is already connecting to rank {key[0]} ({key[1].name})")
        dial = self._dials[key] = Dial(self._runtime, key[0], target)
        try:
            return await self._dial(dial, key, adopt)
        except asyncio.CancelledError:
            if key[1] is not ConnKind.PROBE:  # nobody needs one
                self._trouble = str(dial.failure(self._runtime.time()))
            raise
        finally:
            del self._dials[key]
            dial.done.set_result(None)

    def interrupt(self, key: Key) -> None:
        """There is a link, which the peer has opened."""
        if dial := self._dials.get(key):
            dial.interrupt(self._runtime.time())

    def close(self) -> set[asyncio.Future[None]]:
        """End the dials in progress; return what is done when they have ended."""
        self._closed = True
        for dial in self._dials.values():
            dial.interrupt(self._runtime.time())
        return {dial.done for dial in self._dials.values()}

    async def _dial(self, dial: Dial, key: Key, adopt: _Adopt[T]) -> T | None:
        """Dial, whatever unproven ends answer; wait for a peer that has proven itself and was promised a link."""
        time = self._runtime.time
        doubtful = 0.0
        pause = _FIRST_PAUSE
        while (left := dial.left(now := time(), self._options.connect_timeout, impatient=self.impatient)) > _NO_TIME:
            if self._closed:
                break
            dial.begins(now)
            dial.allow(min(left, self._options.handshake_timeout))
            promised = self._crossing.promised(key)
            try:
                async with asyncio.timeout(None) as dial.limit:
                    if promised is not None:
                        dial.answered()
                        dial.reason = "the connection that it opens is not complete"
                        await asyncio.wait([promised])
                    else:
                        return await self._attempt(dial, key, adopt)
            except TimeoutError:
                if promised is None and left >= self._options.handshake_timeout:  # a shorter attempt shows nothing
                    dial.reason = _SILENT
            except _NoRouteError as error:
                assert dial.target.instead is not None
                self.detours[key[0]] = str(error)
                dial.target = dial.target.instead
            except (_RetryError, UnprovenError) as error:
                dial.reason = str(error)  # itself, it would keep all that was in hand when it was raised
                if isinstance(error, UnprovenError):
                    doubtful = doubtful or time()
                    if time() >= doubtful + _DOUBT:
                        raise AuthenticationError(
                            f"{dial.target.label} should be rank {key[0]}'s, but {error}"
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
            dial.answered()
            dial.watch(sock.fileno())
            stream = await self._options.open_stream(self._runtime.loop, sock, dialled=True)
            try:
                return await self._introduce(dial, stream, key, adopt)
            except BaseException:
                # The peer may wait for the end without a limit, and a forked child may hold the socket open.
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
                dial.answered()
            if address.may_pass(error):
                raise _RetryError(error.strerror or str(error)) from None
            raise target.unreachable(key[0], str(error)) from error
        finally:
            dial.watch(-1)

    async def _reach(self, dial: Dial, kind: ConnKind) -> socket.socket:
        """Connect; to a process of this user, where that can be seen."""
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
            raise AuthenticationError(f"{trouble}: with a job key, transport='auto' takes TCP between users")
        return sock

    async def _introduce(self, dial: Dial, stream: ByteStream, key: Key, adopt: _Adopt[T]) -> T:
        peer, kind = key
        target = dial.target
        stream.check_rank(peer)
        identity = self._identity._replace(kind=kind, ended=self._links.ended(key), striped=target.striped)
        exchange = ClientHandshake(identity, self._key, self._runtime.random_bytes, stream.bound)
        await _say_hello(stream, exchange.hello())
        send_message(stream, exchange.prove(await receive_message(stream, CHALLENGE_SIZE)))
        confirmation = exchange.confirm(await receive_message(stream, VERDICT_SIZE))
        assert exchange.peer is not None
        if exchange.peer.rank != peer:
            raise AuthenticationError(f"at {target.label} is rank {exchange.peer.rank}, not rank {peer}")
        if not self._crossing.may_confirm(key):
            raise _RetryError("the connection that it opened came first")
        # The peer has proven the key: only `connect_timeout` limits what is left.
        dial.stop()
        dial.allow(dial.left(self._runtime.time(), self._options.connect_timeout, impatient=False))
        with self._crossing.confirm(key):
            send_message(stream, confirmation)
            adopted = await adopt(stream, exchange.peer)
        if adopted is None:
            raise _RetryError("the connection that it opened came first")
        return adopted


async def _say_hello(stream: ByteStream, hello: bytes) -> None:
    """Send the first message, or say why the other end takes none: it may refuse a certificate that it was shown."""
    try:
        send_message(stream, hello)
    except OSError:
        await receive_message(stream, 1)
        raise
