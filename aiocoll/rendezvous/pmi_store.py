"""Store of a job under a PMI launcher: rank 0 serves it, and publishes its address and key through the launcher."""

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

#: Maximum bytes of a published error. Launchers accept values of 1,024 characters, and each byte takes two (hex).
_LONGEST = 480
#: First character of a published value that is an error of rank 0 in place of the store's address.
_ERROR_MARK = "!"


class PublishedStore(NamedTuple):
    """The published address of the store, and the job key; the key is None if every rank has it already."""

    host: str
    port: int
    key: bytes | None


class PmiStore:
    """The store of a job that a PMI launcher has started. Rank 0 serves it from a thread until its process ends.

    A process requests the address from the launcher once. All its groups, in all its event loops, meet on this store.

    Args:
        fd: the socket descriptor of `Pmi`.
        rank: this rank.
        world_size: number of ranks.
        together: whether all ranks are on this host.
        port: port of the store; 0 means a free port.
    """

    def __init__(self, fd: str, rank: int, world_size: int, together: bool, port: int) -> None:
        self._pmi = Pmi(fd)
        self._rank = rank
        self._world_size = world_size
        self._together = together
        self._port = port
        self._lock = threading.Lock()
        self._request_in_flight: Future[None] | None = None
        self._outcome: PublishedStore | AiocollError | ValueError | None = None
        self._server: StoreServer | None = None
        # On rank 0: the published text; and the store as this process reaches it, or the error.
        self._published: str | None = None
        self._own_store: PublishedStore | AiocollError | ValueError | None = None

    async def find(self, key: bytes | None, options: GroupOptions, job: str, timeout: float) -> PublishedStore:
        """Return the address of the store. All ranks must call this method.

        Args:
            key: the job key that this process has from elsewhere, or None.
            options: resolved options.
            job: name of the job.
            timeout: seconds to wait for the other ranks.

        Raises:
            RendezvousError: the other ranks did not arrive, the launcher closed the connection, or rank 0 could not
                serve the store.
            AiocollError, ValueError: on rank 0, the reason why it could not serve the store.
        """
        try:
            async with asyncio.timeout(None if timeout == float("inf") else timeout):
                while self._outcome is None:
                    await self._request_once(key, options, job)
        except TimeoutError:
            raise RendezvousError(
                f"rank {self._rank} waited {timeout:g} s at the launcher's barrier (PMI): all {self._world_size} "
                "processes that the launcher started must make a group, with init_method='env://'"
            ) from None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome if key is None else self._outcome._replace(key=key)

    def close(self) -> None:
        """Close the PMI connection, and the store if this rank serves it."""
        self._pmi.close()
        if self._server is not None:
            self._server.close()

    async def _request_once(self, key: bytes | None, options: GroupOptions, job: str) -> None:
        """Request the store address, or wait for the request of another task of this process, in any event loop."""
        with self._lock:
            other, mine = self._request_in_flight, Future[None]()
            if self._outcome is not None:
                return
            if other is None:
                self._request_in_flight = mine
        if other is not None:
            await asyncio.wrap_future(other)
            return
        mine.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the future for other waiters
        warning = self._warn_after(options.warn_after)
        try:
            try:
                found: PublishedStore | AiocollError | ValueError = await self._exchange(key, options, job)
            except (AiocollError, ValueError) as error:
                found = error
            self._pmi.close()
            self._outcome = found
        finally:
            if warning is not None:
                warning.cancel()
            self._request_in_flight = None
            mine.set_result(None)

    async def _exchange(self, key: bytes | None, options: GroupOptions, job: str) -> PublishedStore:
        if self._rank == 0 and self._own_store is None:
            try:
                self._own_store = self._serve(key, options, job)
            except (AiocollError, ValueError) as error:
                self._own_store, self._published = error, f"{_ERROR_MARK}{error}".encode()[:_LONGEST].hex()
        # Keep the PMI session open if an MPI library in this process may still use it.
        text = await self._pmi.share(self._published, last="mpi4py.MPI" not in sys.modules)
        if isinstance(self._own_store, Exception):
            raise self._own_store
        return self._own_store or _parse_published(text)

    def _serve(self, key: bytes | None, options: GroupOptions, job: str) -> PublishedStore:
        """Start the store's server on rank 0, and return the address by which this process reaches it."""
        host, published = find_route(0, {0: ""}, options.interface, options.bind, together=self._together)
        if options.advertise is not None and not self._together:
            published, _ = parse_advertised(options.advertise)
        store_key = random_bytes(KEY_SIZE) if key is None else key
        server = StoreServer(
            host,
            self._port,
            key=store_key,
            job=job,
            world_size=self._world_size,
            **security_arguments(options),
        )
        _, port = server.start()
        atexit.register(server.close)
        self._server = server
        self._published = f"{published} {port} {store_key.hex() if key is None else ''}".encode().hex()
        return PublishedStore(local_address(host), port, store_key)

    def _warn_after(self, seconds: float) -> asyncio.TimerHandle | None:
        if seconds == float("inf"):
            return None
        text = "rank %d waited %g s at the launcher's barrier (PMI): not all %d processes have arrived; still waiting"
        values = (self._rank, seconds, self._world_size)
        return asyncio.get_running_loop().call_later(
            seconds, lambda: logger.warning(text, *values, extra={"rank": self._rank})
        )


def _parse_published(text: str) -> PublishedStore:
    """Decode the value that rank 0 has published."""
    try:
        published = bytes.fromhex(text).decode(errors="replace")
        if published.startswith(_ERROR_MARK):
            raise RendezvousError(f"rank 0 could not serve the store: {published[1:]}")
        host, port, key = published.split(" ")
        return PublishedStore(host, parse_int(port), bytes.fromhex(key) or None)
    except ValueError:
        raise RendezvousError(
            "the launcher (PMI) returned an invalid store address: set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
            "for each rank"
        ) from None
