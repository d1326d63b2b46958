"""`RedisStore`: a store on a Redis server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from aiocoll.redis.client import RedisChanges, RedisClient
from aiocoll.redis.connection import MAX_WAIT, RedisAddress
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.base import Store, timeout_error
from aiocoll.store.commands import keys_of
from aiocoll.store.key_value import QUEUE, KeyValueStore, refuse_reserved
from aiocoll.store.registry import StoreRequest

__all__ = ["REDIS_OPENER", "RedisStore"]

#: Seconds after which a waiting call reads its entry again: a server that has lost its data sends no notification.
_READ_EVERY: Final = 1.0


class RedisStore(KeyValueStore):
    """A store on a Redis server (version 6 or later, default configuration), by the package `redis`.

    It connects at the first call, and reconnects after an outage of the connection or the server. Calls wait meanwhile,
    until their timeout, and each change is carried out once. If the server has lost the entries, by a restart, an
    eviction or FLUSHALL, calls raise `StoreUnavailableError`: waiting calls within about a second, later calls at once.

    Each request is a script, which the server carries out in one step. WATCH and MULTI would take more round trips, and
    after a broken connection the client would not know their outcome. The script publishes its changes, so a wait ends
    as soon as its key exists. All waits of a store share one subscription. BLPOP would need a connection per wait, and
    keyspace notifications need a configured server.

    A job has one hash on the server, ``aiocoll:JOB``, and one channel of that name. The hash contains the addresses and
    other data of the rendezvous, and the entries that you store. It does not contain arrays, messages or the job key.
    The hash remains after the job. It expires a day after its last change, or after the last client has closed or died.
    ``redis-cli DEL aiocoll:JOB`` removes it.

    A user of the server needs the keys and channels ``aiocoll:*``, and the commands EVAL, HGET, HSET, HSETNX, HDEL,
    HKEYS, HINCRBY, DEL, PEXPIRE, PUBLISH, SUBSCRIBE and, except for database 0, SELECT.

    Args:
        url: ``redis://[[user]:password@]host[:port][/db]``, or ``rediss://`` for TLS, which verifies the server.
        job: name of the job; each job on a server, and each run of a job, needs a name of its own.
        timeout: seconds that each call waits for the server, and the default timeout of waits for keys.
        tls_ca: path of the certificates of the server's CA; None uses those that the system trusts.
        tls_certificate: path of a certificate for servers that require one.
        tls_key: path of its private key, which other users must not be able to open.

    Raises:
        BackendUnavailableError: the package `redis` is not installed.
        ValueError, TypeError: `url` has an invalid form, or a file cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        job: str = "",
        timeout: float | timedelta = 300.0,
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        super().__init__(timeout)
        if not isinstance(job, str):
            raise TypeError(f"job must be str, got {type(job).__name__}")
        address = RedisAddress(url, tls_ca, tls_certificate, tls_key)
        self._address = address
        self._client = RedisClient(address, f"aiocoll:{job}")
        self._changes = RedisChanges(address, f"aiocoll:{job}")

    @property
    def trouble(self) -> str | None:
        """Reason why the latest attempt to reach the server failed; None if it succeeded."""
        return self._client.trouble

    @property
    def reached(self) -> str:
        """Numeric address of the server; "" before the first connection."""
        return self._client.reached

    def __str__(self) -> str:
        return f"RedisStore on {self._address}"

    async def read(self, name: str) -> bytes | None:
        """Return the value of an entry; None if the entry does not exist."""
        (value,) = await self._read_values([name], self.timeout)
        return value

    async def compare_and_swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Store `new` under `name` if the value is `old`."""
        done: bytes = await self._client.call(
            "swap", _field(name), _optional(old), _optional(new), timeout=self.timeout
        )
        return done == b"done"

    async def names(self) -> list[str]:
        """Return the names of all entries."""
        fields: list[bytes] = await self._client.call("names", timeout=self.timeout)
        return [field[1:].decode() for field in fields if field.startswith(b"=")]

    async def aclose(self) -> None:
        """Disconnect. The entries remain on the server until they expire."""
        await self._client.aclose()
        await self._changes.aclose()

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        refuse_reserved(arguments)
        if command == "set":
            command, arguments = "multi_set", ([arguments[0]], [arguments[1]])
        if command == "multi_set":
            entries = [item for key, value in zip(*arguments, strict=True) for item in (_field(key), value)]
            await self._client.call("set", *entries, timeout=self.timeout)
            return None
        if command == "check":
            return None not in await self._read_values(arguments[0], self.timeout)
        if command == "add" and (total := await self._add(*arguments)):
            return int(total)
        return await super()._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        refuse_reserved(arguments)
        keys = keys_of(arguments)
        names = [QUEUE + keys[0]] if command == "queue_pop" else keys
        time = Runtime.of(running_loop()).time
        deadline = time() + timeout
        wanted = names
        with self._changes.watch() as watch:
            while True:
                remaining = max(0.0, deadline - time())
                wanted = wanted if remaining else names
                values = await self._read_values(wanted, max(remaining, MAX_WAIT))
                missing = [name for name, value in zip(wanted, values, strict=True) if value is None]
                if not missing and len(wanted) < len(names):
                    wanted = names
                    continue
                if not missing and command == "queue_pop":
                    if (item := await self._pop_item(keys[0])) is not None:
                        return item
                elif not missing:
                    return values[0] if command == "get" else values if command == "multi_get" else None
                if not remaining:
                    raise timeout_error(str(self), command, keys if command == "queue_pop" else missing, timeout)
                # Watch only one missing entry: each of a thousand ranks may wait for the cards of all other ranks.
                wanted = (missing or names)[-1:]
                await watch.change(_field(wanted[0]), min(remaining, _READ_EVERY))

    async def _read_values(self, names: list[str], timeout: float) -> list[bytes | None]:
        values: list[bytes | None] = await self._client.call("read", *map(_field, names), timeout=timeout)
        return values

    async def _add(self, key: str, amount: int) -> bytes:
        """Add `amount` to an entry in one round trip; return the sum, or b"" if the server cannot add it."""
        total: bytes = await self._client.call("add", _field(key), int(amount), timeout=self.timeout)
        return total


def _field(name: str) -> bytes:
    return b"=" + name.encode()


def _optional(value: bytes | None) -> bytes:
    return b"" if value is None else b"=" + value


class _RedisOpener:
    """The `aiocoll.store.registry.StoreOpener` of ``redis://`` and ``rediss://`` URLs."""

    served_by_rank_0 = False
    has_secrets = True

    def check(self, url: str, world_size: int) -> None:
        """Do nothing: the store checks the URL when it opens, because the check needs the package `redis`."""

    def open(self, request: StoreRequest) -> Store:
        """Return the job's store on the Redis server of the URL."""
        return RedisStore(request.url, job=request.job, timeout=request.timeout)


#: The store opener of ``redis://`` and ``rediss://`` URLs.
REDIS_OPENER = _RedisOpener()
