"""`RedisStore`: a store on a Redis server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from aiocoll.redis.client import RedisChanges, RedisClient
from aiocoll.redis.connection import PATIENCE, RedisAddress
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.base import Store, timed_out
from aiocoll.store.commands import keys_of
from aiocoll.store.key_value import QUEUE, KeyValueStore, refuse_reserved
from aiocoll.store.registry import StoreRequest

__all__ = ["REDIS_OPENER", "RedisStore"]

#: Seconds after which a wait looks although nothing has changed: a server that has lost its data tells nobody.
_LOOK_EVERY: Final = 1.0


class RedisStore(KeyValueStore):
    """A store on a Redis server (6 or later, as it is configured by default), by the package `redis`.

    It connects at the first call, and again whenever the connection or the server was gone: calls wait meanwhile, until
    their timeout, and each change is carried out once. A server that has lost the entries, by a restart, an eviction or
    FLUSHALL, is a `StoreUnavailableError`: calls that wait raise it within about a second, later ones at once.

    Each request is a script, which is one step at the server. WATCH and MULTI take more round trips, and leave open
    what has happened if the connection breaks. The script publishes what it changes, so a wait ends as soon as its key
    is there: all waits of a store share one subscription. BLPOP would need a connection for each of them, and keyspace
    notifications a server that is configured for them.

    The job is one hash on the server, ``aiocoll:JOB``, and one channel of that name. What ranks have to know to meet is
    there, and what you store; no array, no message and not the job key. The hash stays after the job: it expires a day
    after its last change, or after the last client has closed or died; ``redis-cli DEL aiocoll:JOB`` removes it.

    A user of the server needs the keys and channels ``aiocoll:*``, and the commands EVAL, HGET, HSET, HSETNX, HDEL,
    HKEYS, HINCRBY, DEL, PEXPIRE, PUBLISH, SUBSCRIBE and, but for database 0, SELECT.

    Args:
        url: ``redis://[[user]:password@]host[:port][/db]``, or ``rediss://`` for TLS, which verifies the server.
        job: name of the job; jobs on one server, and runs of one job, need names of their own.
        timeout: seconds that a call waits for the server, and one that is given no timeout for keys.
        tls_ca: path of the certificates of the CA of the server; None: those that the system trusts.
        tls_certificate: path of a certificate for servers that ask for one.
        tls_key: path of its private key, which other users must not be able to open.

    Raises:
        BackendUnavailableError: the package `redis` is not installed.
        ValueError, TypeError: `url` has another form, or a file cannot be used.
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
        """Why the server could not be reached the last time; None once it has been."""
        return self._client.trouble

    @property
    def reached(self) -> str:
        """The numeric address of the server, "" before the first connection."""
        return self._client.reached

    def __str__(self) -> str:
        return f"RedisStore on {self._address}"

    async def read(self, name: str) -> bytes | None:
        """Return the value of an entry; None if there is none."""
        (value,) = await self._values([name], self.timeout)
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
        """Disconnect; the entries stay on the server until they expire."""
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
            return None not in await self._values(arguments[0], self.timeout)
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
                values = await self._values(wanted, max(remaining, PATIENCE))
                missing = [name for name, value in zip(wanted, values, strict=True) if value is None]
                if not missing and len(wanted) < len(names):
                    wanted = names
                    continue
                if not missing and command == "queue_pop":
                    if (item := await self._take(keys[0])) is not None:
                        return item
                elif not missing:
                    return values[0] if command == "get" else values if command == "multi_get" else None
                if not remaining:
                    raise timed_out(str(self), command, keys if command == "queue_pop" else missing, timeout)
                # Few bytes, since there may be a thousand ranks that wait for a thousand cards.
                wanted = (missing or names)[-1:]
                await watch.change(_field(wanted[0]), min(remaining, _LOOK_EVERY))

    async def _values(self, names: list[str], timeout: float) -> list[bytes | None]:
        values: list[bytes | None] = await self._client.call("read", *map(_field, names), timeout=timeout)
        return values

    async def _add(self, key: str, amount: int) -> bytes:
        """Return the sum, in one round trip however many clients add; empty if the server cannot add to the value."""
        total: bytes = await self._client.call("add", _field(key), int(amount), timeout=self.timeout)
        return total


def _field(name: str) -> bytes:
    return b"=" + name.encode()


def _optional(value: bytes | None) -> bytes:
    return b"" if value is None else b"=" + value


class _RedisOpener:
    """See `aiocoll.store.registry.StoreOpener`."""

    served_by_rank_0 = False
    has_secrets = True

    def check(self, url: str, world_size: int) -> None:
        """Do nothing: the store checks the URL, and needs the package `redis` for it."""

    def open(self, request: StoreRequest) -> Store:
        """Return the part of that server that belongs to the job."""
        return RedisStore(request.url, job=request.job, timeout=request.timeout)


#: Opens ``redis://`` and ``rediss://``.
REDIS_OPENER = _RedisOpener()
