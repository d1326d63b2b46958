"""The side of a link that dials, again and again: until there is a link, or none to be had, or the time is over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from aiocoll.errors import AuthenticationError, GroupClosedError
from aiocoll.runtime import Runtime
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
from aiocoll.transport.byte_stream import ByteStream, receive_message, send_message
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream.crossing import Crossing
from aiocoll.transport.stream.dial import SILENT, Dial
from aiocoll.transport.stream.dial_address import DialAddress
from aiocoll.transport.stream.link_table import Key, LinkTable
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.users import peer_trouble

__all__ = ["Dialler"]

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
                    dial.reason = SILENT
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
