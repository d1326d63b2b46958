"""`TorchStore`: an aiocoll store that wraps a torch store, for the rendezvous of torch's ranks."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

import torch.distributed as dist

from aiocoll.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store import Store
from aiocoll.store.commands import keys_of
from aiocoll.store.polling import Poll

__all__ = ["TorchStore", "host_of", "is_loopback"]


class TorchStore(Store):
    """An aiocoll store that wraps a torch store.

    Waiting calls poll, because a blocking `get` of torch's `TCPStore` would occupy the only connection of the process.

    Args:
        store: the torch store.
        timeout: default timeout of a call in seconds.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        super().__init__(timeout)
        self._store = store

    @property
    def reached(self) -> str:
        """The numeric IP address of the store's server; "" for a store without a server."""
        return _numeric(*host_of(self._store))

    async def aclose(self) -> None:
        """Release the reference to the torch store, which stays open."""
        self._store = None

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        if self._store is None:
            raise StoreUnavailableError("the store was closed")
        try:
            return await asyncio.to_thread(self._do, self._store, command, arguments)
        except dist.DistNetworkError as error:
            raise StoreUnavailableError(f"torch's store cannot be reached: {error}") from error
        except RuntimeError as error:
            raise StoreError(f"torch's store refused {command}: {error}") from error

    @staticmethod
    def _do(store: Any, command: str, arguments: tuple[Any, ...]) -> Any:
        if command == "check":
            return not arguments[0] or store.check(arguments[0])
        if command in ("list_keys", "num_keys"):
            keys = [key for key in store.list_keys() if key.startswith(arguments[0])]
            return keys if command == "list_keys" else len(keys)
        if command == "hold":  # a torch store does not change held keys when a client disconnects
            command = "compare_set"
        return getattr(store, command)(*arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        if command == "queue_pop":
            raise StoreError("a torch store has no queues; use an aiocoll store instead")
        keys = keys_of(arguments)
        poll = Poll(Runtime.of(running_loop()), timeout)
        while not await self._call("check", (keys,)):
            if not await poll.pause():
                raise StoreTimeoutError(f"torch's store did not get the keys {keys} within {timeout:g} s")
        if command == "wait":
            return None
        values = [await self._call("get", (key,)) for key in keys]
        return values[0] if command == "get" else values


def host_of(store: Any) -> tuple[str, int]:
    """Return the host and port of a torch store's server; the host is empty for a store without a server."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else ("", 0)


def is_loopback(host: str) -> bool:
    """Return whether a host is the name or an address of the loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _numeric(host: str, port: int) -> str:
    if not host:
        return ""
    try:
        found: str = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
    except OSError:
        return ""
    return found
