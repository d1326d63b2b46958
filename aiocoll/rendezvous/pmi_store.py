"""A store whose address and key rank 0 publishes through the launcher, by PMI."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from concurrent.futures import Future
from typing import NamedTuple

from aiocoll.endpoints import parse_advertised
from aiocoll.errors import AiocollError, RendezvousError
from aiocoll.log import logger
from aiocoll.numerals import parse_int
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.pmi import Pmi
from aiocoll.runtime import random_bytes
from aiocoll.security.keys import KEY_SIZE
from aiocoll.store import StoreServer
from aiocoll.store.listening import local_address
from aiocoll.store.tcp import security_arguments
from aiocoll.transport.stream.route import find_route

__all__ = ["PmiStore", "PublishedStore"]

#: Launchers take values of 1,024 characters, two for each byte.
_LONGEST = 480
#: Begins what rank 0 publishes if it has no store.
_TROUBLE = "!"


class PublishedStore(NamedTuple):
    """Where the store is, and the job key; None if every rank has one of its own."""

    host: str
    port: int
    key: bytes | None


class PmiStore:
    """The store of a job that a launcher with PMI has started; rank 0 serves it from a thread, as long as it lives.

    The launcher is asked once. All groups of this process, of all its loops, meet there.

    Args:
        fd: see `Pmi`.
        rank: this rank.
        world_size: number of ranks.
        together: all ranks are on this host.
        port: port of the store; 0 means a free one.
    """

    def __init__(self, fd: str, rank: int, world_size: int, together: bool, port: int) -> None:
        self._pmi = Pmi(fd)
        self._rank = rank
        self._world_size = world_size
        self._together = together
        self._port = port
        self._lock = threading.Lock()
        self._asking: Future[None] | None = None
        self._found: PublishedStore | AiocollError | ValueError | None = None
        self._server: StoreServer | None = None
        # What rank 0 publishes, and where it finds its own store.
        self._value: str | None = None
        self._own: PublishedStore | AiocollError | ValueError | None = None

    async def find(self, key: bytes | None, options: GroupOptions, job: str, timeout: float) -> PublishedStore:
        """Return where the store is, once all ranks have asked.

        Args:
            key: the job key that this process has by other means, or None.
            options: resolved.
            job: name of the job.
            timeout: seconds that the others have to come.

        Raises:
            RendezvousError: they did not, the launcher is gone, or rank 0 could not serve the store.
            AiocollError, ValueError: on rank 0, the reason for that.
        """
        try:
            async with asyncio.timeout(None if timeout == float("inf") else timeout):
                while self._found is None:
                    await self._take_turns(key, options, job)
        except TimeoutError:
            raise RendezvousError(
                f"rank {self._rank} waited {timeout:g} s at the barrier of the launcher (PMI): all {self._world_size} "
                "processes that it has started have to make a group, with init_method='env://'"
            ) from None
        if isinstance(self._found, Exception):
            raise self._found
        return self._found if key is None else self._found._replace(key=key)

    def close(self) -> None:
        """Close connection and store."""
        self._pmi.close()
        if self._server is not None:
            self._server.close()

    async def _take_turns(self, key: bytes | None, options: GroupOptions, job: str) -> None:
        """Ask the launcher, or wait as long as another task of this process does, whatever its loop."""
        with self._lock:
            asking, mine = self._asking, Future[None]()
            if self._found is not None:
                return
            if asking is None:
                self._asking = mine
        if asking is not None:
            await asyncio.wrap_future(asking)
            return
        mine.set_running_or_notify_cancel()  # one who waits no longer does not end it for others
        warning = self._warn_after(options.warn_after)
        try:
            try:
                found: PublishedStore | AiocollError | ValueError = await self._ask(key, options, job)
            except (AiocollError, ValueError) as error:
                found = error
            self._pmi.close()
            self._found = found
        finally:
            if warning is not None:
                warning.cancel()
            self._asking = None
            mine.set_result(None)

    async def _ask(self, key: bytes | None, options: GroupOptions, job: str) -> PublishedStore:
        if self._rank == 0 and self._own is None:
            try:
                self._own = self._serve(key, options, job)
            except (AiocollError, ValueError) as error:
                self._own, self._value = error, f"{_TROUBLE}{error}".encode()[:_LONGEST].hex()
        # A library of MPI in this process has to be able to ask, too.
        text = await self._pmi.share(self._value, last="mpi4py.MPI" not in sys.modules)
        if isinstance(self._own, Exception):
            raise self._own
        return self._own or _read(text)

    def _serve(self, key: bytes | None, options: GroupOptions, job: str) -> PublishedStore:
        """Start the store; return where this process finds it."""
        host, told = find_route(0, {0: ""}, options.interface, options.bind, together=self._together)
        if options.advertise is not None and not self._together:
            told, _ = parse_advertised(options.advertise)
        made = random_bytes(KEY_SIZE) if key is None else key
        server = StoreServer(
            host,
            self._port,
            key=made,
            job=job,
            world_size=self._world_size,
            **security_arguments(options),
        )
        _, port = server.start()
        atexit.register(server.close)
        self._server = server
        self._value = f"{told} {port} {made.hex() if key is None else ''}".encode().hex()
        return PublishedStore(local_address(host), port, made)

    def _warn_after(self, seconds: float) -> asyncio.TimerHandle | None:
        if seconds == float("inf"):
            return None
        words = "rank %d waited %g s at the barrier of the launcher (PMI): not all %d processes have come; waiting on"
        given = (self._rank, seconds, self._world_size)
        return asyncio.get_running_loop().call_later(
            seconds, lambda: logger.warning(words, *given, extra={"rank": self._rank})
        )


def _read(text: str) -> PublishedStore:
    """Return what rank 0 has published."""
    try:
        published = bytes.fromhex(text).decode(errors="replace")
        if published.startswith(_TROUBLE):
            raise RendezvousError(f"rank 0 could not serve the store: {published[1:]}")
        host, port, key = published.split(" ")
        return PublishedStore(host, parse_int(port), bytes.fromhex(key) or None)
    except ValueError:
        raise RendezvousError("the launcher (PMI) did not hand over what rank 0 has published") from None
