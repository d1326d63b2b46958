"""`RedisClient` and `RedisChanges`: requests of one process to a Redis server, and notifications of changes.

Each request runs a script, so that the server carries it out in one step.

A job has one hash on the server. So a restart, an eviction or an expiry loses all its entries together. Its fields are

    job         a random number that identifies the hash; if it is absent or different, the entries were lost
    CLIENT      for each client, the number and the result of its last change
    =NAME       the value of the entry NAME

A client numbers its changes, and sends the number of the last change whose result it has received. If a change arrives
again, because its reply was lost with a connection, the script returns the recorded result. A server that was restarted
from an older copy of its data may have lost changes after their replies. The script detects this by the numbers and
removes the hash, because clients would otherwise wait for lost entries.

Each change postpones the expiry of the hash, and publishes the names of the changed entries to waiting clients.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aiocoll.errors import StoreError, StoreUnavailableError
from aiocoll.redis.connection import MAX_WAIT, RedisAddress, RedisConnection, pauses
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store.base import wait_until_done

__all__ = ["RedisChanges", "RedisClient", "Watch"]

#: Seconds after which the server removes the hash of a job without clients. Failed jobs can be examined until then.
_LIFETIME: Final = 86400.0
#: Seconds without a request after which a client renews the hash. Outages of many hours then do not remove the hash.
_RENEW_EVERY: Final = 3600.0
#: Commands that change entries of the store.
_CHANGES: Final = frozenset({"swap", "set", "add"})
#: The script's reply if the server has lost the job's entries.
_LOST: Final = b"lost"

#: The Lua script that carries out all requests. KEYS[1] is the job's hash. Arguments: the hash's random number, the
#: client, the number of the change, the last change whose result the client has received, milliseconds until the hash
#: expires, and the request with its arguments.
_SCRIPT: Final = """
local hash = KEYS[1]
local job, client, number, known, lifetime, request = unpack(ARGV, 1, 6)

if request == 'open' then
    redis.call('HSETNX', hash, 'job', job)
    redis.call('HSETNX', hash, client, '0 ')
    redis.call('PEXPIRE', hash, lifetime)
    return redis.call('HGET', hash, 'job')
end

if redis.call('HGET', hash, 'job') ~= job then
    return 'lost'
end
local last, result = string.match(redis.call('HGET', hash, client) or '', '^(%d+) (.*)$')
if not last or tonumber(last) < tonumber(known) then
    redis.call('DEL', hash)
    return 'lost'
end

if request == 'read' then
    local values = {}
    for i = 7, #ARGV do
        values[i - 6] = redis.call('HGET', hash, ARGV[i])
    end
    return {values}
elseif request == 'names' then
    return {redis.call('HKEYS', hash)}
elseif request == 'renew' then
    redis.call('PEXPIRE', hash, lifetime)
    return {''}
elseif tonumber(last) >= tonumber(number) then
    return {result}
end

local changed = {}
result = ''
if request == 'swap' then
    local name, old, new = ARGV[7], ARGV[8], ARGV[9]
    local value = redis.call('HGET', hash, name)
    if (value and '=' .. value or '') == old then
        if new == '' then
            redis.call('HDEL', hash, name)
        else
            redis.call('HSET', hash, name, string.sub(new, 2))
        end
        changed = {name}
        result = 'done'
    end
elseif request == 'set' then
    for i = 7, #ARGV, 2 do
        redis.call('HSET', hash, ARGV[i], ARGV[i + 1])
        changed[#changed + 1] = ARGV[i]
    end
elseif request == 'add' then
    if type(redis.pcall('HINCRBY', hash, ARGV[7], ARGV[8])) == 'number' then
        changed = {ARGV[7]}
        result = redis.call('HGET', hash, ARGV[7])
    end
end
redis.call('HSET', hash, client, number .. ' ' .. result)
redis.call('PEXPIRE', hash, lifetime)
for _, name in ipairs(changed) do
    redis.call('PUBLISH', hash, name)
end
return {result}
"""


@dataclass(slots=True, eq=False)
class _Request:
    """A queued request. Errors are stored as the result of `answer`: an exception might never be retrieved."""

    command: str
    arguments: tuple[str | bytes | int, ...]
    number: int
    answer: asyncio.Future[Any] = field(default_factory=lambda: running_loop().create_future())


class RedisClient:
    """A queue of requests to a Redis server, which reconnects and resends a request until it has a reply.

    A separate task sends the requests one by one, so that a cancelled caller does not break the connection of other
    callers.

    Args:
        address: the address of the server.
        name: the name of the hash that holds the entries.

    Attributes:
        trouble: the reason why the latest attempt to reach the server failed; None if it succeeded.
        reached: the numeric address of the server; "" before the first connection.
    """

    def __init__(self, address: RedisAddress, name: str) -> None:
        self.trouble: str | None = None
        self.reached = ""
        self._address = address
        self._name = name
        self._connection = RedisConnection(address)
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._unanswered: set[_Request] = set()
        self._task: asyncio.Task[None] | None = None
        self._job = b""
        self._client = ""
        self._count = 0
        self._known = 0
        self._closed = False

    async def call(self, command: str, *arguments: str | bytes | int, timeout: float) -> Any:
        """Send a request to the script `_SCRIPT` on the server, and return the reply.

        Raises:
            StoreUnavailableError: no reply arrived within `timeout` seconds, the entries were lost, or the client is
                closed.
            StoreError: the server refused the request.
        """
        self._check_open()
        self._count += command in _CHANGES
        request = _Request(command, arguments, self._count)
        if self._task is None:
            self._task = Runtime.of(running_loop()).create_task(self._serve(), f"aiocoll requests to {self._address}")
        self._unanswered.add(request)
        self._requests.put_nowait(request)
        try:
            if not await wait_until_done(request.answer, timeout):
                raise StoreUnavailableError(
                    f"{self.trouble or f'no store at {self._address}: no answer'}; tried for {timeout:.1f} s"
                )
        finally:
            self._unanswered.discard(request)
            request.answer.cancel()
        answer = request.answer.result()
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def aclose(self) -> None:
        """Disconnect. Pending and later calls raise `StoreUnavailableError`."""
        self._closed = True
        for request in self._unanswered:
            if not request.answer.done():
                request.answer.set_result(self._closed_error())
        await self._connection.aclose(self._task)

    async def _serve(self) -> None:
        runtime = Runtime.of(running_loop())
        self._client = runtime.random_bytes(16).hex()
        while True:
            request = await self._next_request()
            pause = pauses()
            while not request.answer.done():
                try:
                    answer = await self._carry_out(request, runtime)
                except Exception as error:
                    await self._connection.hang_up()
                    answer = self._address.refusal(error)
                    if answer is None:
                        self.trouble = f"no store at {self._address}: {self._address.explain(error)}"
                        await runtime.sleep(next(pause))
                        continue
                if not request.answer.done():
                    request.answer.set_result(answer)

    async def _next_request(self) -> _Request:
        try:
            async with asyncio.timeout(_RENEW_EVERY):
                return await self._requests.get()
        except TimeoutError:
            return _Request("renew", (), self._count)

    async def _carry_out(self, request: _Request, runtime: Runtime) -> Any:
        async with asyncio.timeout(MAX_WAIT):
            if not self._connection.connected:
                await self._connection.open()
                self.reached = self._connection.reached
            if not self._job:
                self._job = await self._run_script(runtime.random_bytes(16).hex().encode(), 0, "open")
            answer = await self._run_script(self._job, request.number, request.command, *request.arguments)
        self.trouble = None
        if answer == _LOST:
            return StoreUnavailableError(
                f"{self._address} has lost the entries of this job: it was restarted without them or with an older "
                f"copy, or its key {self._name!r} was removed (FLUSHALL, DEL, an eviction): start all ranks again, and "
                "configure the server to keep its data"
            )
        if request.command in _CHANGES:
            self._known = request.number
        return answer[0]

    async def _run_script(self, job: bytes, number: int, command: str, *arguments: str | bytes | int) -> Any:
        lifetime = int(_LIFETIME * 1e3)
        await self._connection.send(
            "EVAL", _SCRIPT, 1, self._name, job, self._client, number, self._known, lifetime, command, *arguments
        )
        return await self._connection.receive()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the RedisStore on {self._address} is closed: make a new one")


class RedisChanges:
    """A subscription to changes of store entries, which is active while calls wait for entries.

    Messages during an outage of the connection are lost, and a server that has lost its data sends none. So waiting
    calls also read their entries from time to time.

    Args:
        address: the address of the server.
        channel: the channel on which the names of changed entries are published.
    """

    def __init__(self, address: RedisAddress, channel: str) -> None:
        self.refusal: StoreError | None = None
        """Error of a server that refuses the subscription, or None."""
        self.listening = False
        """Whether the subscription is active, so that no change is missed."""
        self._address = address
        self._channel = channel
        self._connection = RedisConnection(address)
        self._watches: dict[bytes, set[Watch]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def watch(self) -> Watch:
        """Return a `Watch` for one waiting call, to be used as a context manager."""
        return Watch(self)

    def add(self, name: bytes, watch: Watch) -> None:
        """Register `watch` for notifications when the entry `name` changes."""
        self._watches.setdefault(name, set()).add(watch)
        if self._closed:
            watch.look.set()
        elif self._task is None or self._task.done():
            self.refusal = None
            runtime = Runtime.of(running_loop())
            self._task = runtime.create_task(self._listen(runtime), f"aiocoll changes on {self._address}")

    def remove(self, name: bytes, watch: Watch) -> None:
        """Unregister `watch` from notifications about the entry `name`."""
        self._watches[name].remove(watch)
        if not self._watches[name]:
            del self._watches[name]

    async def aclose(self) -> None:
        """Disconnect, and wake all waits."""
        self._closed = True
        await self._connection.aclose(self._task)
        self._wake_all()

    async def _listen(self, runtime: Runtime) -> None:
        pause = pauses()
        while self._watches and self.refusal is None:
            try:
                async with asyncio.timeout(MAX_WAIT):
                    await self._connection.open()
                    await self._connection.send("SUBSCRIBE", self._channel)
                    await self._connection.receive()
                self.listening = True
                self._wake_all()
                pause = pauses()
                while self._watches:
                    _, _, name = await self._connection.receive()
                    for watch in self._watches.get(name, ()):
                        watch.look.set()
            except Exception as error:
                self.refusal = self._address.refusal(error)
                if self.refusal is None:
                    await runtime.sleep(next(pause))
            finally:
                self.listening = False
                await self._connection.hang_up()
        self._wake_all()

    def _wake_all(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.look.set()


class Watch:
    """The subscription of one waiting call to changes of one entry at a time.

    Attributes:
        look: an event that is set when the entry may have changed.
    """

    def __init__(self, changes: RedisChanges) -> None:
        self.look = asyncio.Event()
        self._changes = changes
        self._name: bytes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._name is not None:
            self._changes.remove(self._name, self)

    async def change(self, name: bytes, timeout: float) -> None:
        """Wait at most `timeout` seconds for a possible change of the entry `name`.

        Raises:
            StoreError: the server refused the subscription.
        """
        if name != self._name:
            self.__exit__()
            self._name = name
            self._changes.add(name, self)
            if self._changes.listening:
                return  # the entry may have changed since the caller read it
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.look.wait()
        self.look.clear()
        if self._changes.refusal is not None:
            raise self._changes.refusal
