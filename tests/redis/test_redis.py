"""The Redis store: outages, lost data, passwords, certificates, and data left on the server."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import AuthenticationError, BackendUnavailableError, GroupOptions, RedisStore, new_group
from aiocoll.errors import StoreError, StoreTimeoutError, StoreUnavailableError

from ..certificates import Authority
from ..internals import Limits
from ..ranks import wait_until
from ..redis_server import RedisServer, need_redis, redis_server, request

#: The timeout in seconds of waits that a notification of the Redis server must end; the tests turn polling off.
SOON = 10.0
LOST = "has lost the entries of this job"

OpenStore = Callable[..., RedisStore]


@pytest.fixture
async def open_store() -> AsyncIterator[OpenStore]:
    """Yield a function that opens a `RedisStore`; close all opened stores after the test."""
    need_redis()
    async with AsyncExitStack() as stack:

        def store(url: str, **how: Any) -> RedisStore:
            made = RedisStore(url, **how)
            stack.push_async_callback(made.aclose)
            return made

        yield store


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Yield a Redis server that no other test uses."""
    with redis_server(tmp_path) as server:
        yield server


# -- waits


async def test_redis_wait_is_notified_when_its_key_is_set(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    limits(redis_read_interval=math.inf)
    store, other = open_store(own_server.url), open_store(own_server.url)
    waits = [asyncio.create_task(each.get(f"k{number}")) for number in range(3) for each in (store, other)]
    pop = asyncio.create_task(store.queue_pop("q"))
    await wait_until(lambda: own_server.listeners() == 2)
    async with asyncio.timeout(SOON):
        await store.set("k0", b"0")
        await store.multi_set(["k1", "k2"], [b"1", b"2"])
        await other.queue_push("q", b"item")
        assert await asyncio.gather(*waits) == [b"0", b"0", b"1", b"1", b"2", b"2"]
        assert await pop == b"item"


async def test_redis_wait_finds_a_key_that_is_set_while_the_wait_starts(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    limits(redis_read_interval=math.inf)
    store, other = open_store(own_server.url), open_store(own_server.url)
    subscribing = asyncio.create_task(store.get("last"))
    await wait_until(lambda: own_server.listeners() == 1)
    async with asyncio.timeout(SOON):
        for number in range(200):
            assert (await asyncio.gather(store.get(f"k{number}"), other.set(f"k{number}", b"v")))[0] == b"v"
        await other.set("last", b"v")
        await subscribing


async def test_aclose_of_a_redis_store_ends_waits_at_once(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    limits(redis_read_interval=math.inf)
    store = open_store(own_server.url)
    waits = [asyncio.create_task(store.get("never")), asyncio.create_task(store.queue_pop("never"))]
    await wait_until(lambda: own_server.listeners() == 1)
    for _ in range(5):  # let the waits receive the notice of their subscription and read again
        await store.check([])
    async with asyncio.timeout(SOON):
        await store.aclose()
        for wait in waits:
            with pytest.raises(StoreUnavailableError, match="is closed: make a new one"):
                await wait


async def test_aclose_during_a_redis_read_leaves_no_subscription(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    """Close the store between a wait's first read, which finds no key, and its subscription."""
    store = open_store(own_server.url)
    call = store._client.call

    async def call_and_close(*words: Any, **how: Any) -> Any:
        found = await call(*words, **how)
        await store.aclose()
        return found

    store._client.call = call_and_close  # type: ignore[method-assign]
    async with asyncio.timeout(SOON):
        with pytest.raises(StoreUnavailableError, match="is closed: make a new one"):
            await store.get("never")
    assert not [task.get_name() for task in asyncio.all_tasks() if "changes" in task.get_name()]


async def test_redis_queue_pop_continues_to_wait_after_a_notification_without_an_item(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    """Check also that the waiting `queue_pop` does not poll the server."""
    limits(redis_read_interval=math.inf)
    store, other = open_store(own_server.url), open_store(own_server.url)
    pops = [asyncio.create_task(store.queue_pop("q")) for _ in range(2)]
    await wait_until(lambda: own_server.listeners() == 1)
    async with asyncio.timeout(SOON):
        await other.queue_push("q", b"1")
        _, (waiting,) = await asyncio.wait(pops, return_when=asyncio.FIRST_COMPLETED)
        before = own_server.requests()
        for _ in range(100):
            await store.check([])
        assert own_server.requests() - before < 150
        await other.queue_push("q", b"2")
        assert await waiting == b"2"


async def test_absent_redis_key_is_not_swapped_as_an_empty_value(redis: RedisServer, open_store: OpenStore) -> None:
    store = open_store(redis.url, job="swapping")
    for old, new, done in (
        (b"", b"1", False),
        (None, b"", True),
        (None, b"1", False),
        (b"", b"1", True),
        (b"2", None, False),
        (b"1", None, True),
        (None, None, True),
    ):
        assert await store.compare_and_swap("k", old, new) is done
    assert await store.names() == []


async def test_waits_of_a_redis_store_share_one_connection(own_server: RedisServer, open_store: OpenStore) -> None:
    store = open_store(own_server.url)
    waits = [asyncio.create_task(store.get(str(number))) for number in range(100)]
    await store.set("here", b"")
    await wait_until(lambda: own_server.clients() == 2)
    await store.multi_set([str(number) for number in range(100)], [b"1"] * 100)
    await asyncio.gather(*waits)
    assert own_server.clients() == 2
    # The notification of this change makes the store end its subscription, since no call waits.
    await store.set("here", b"")
    await wait_until(lambda: own_server.clients() == 1)
    assert await store.get("0") == b"1"
    async with asyncio.timeout(SOON):
        again = asyncio.create_task(store.get("again"))
        await wait_until(lambda: own_server.clients() == 2)
        await store.set("again", b"2")
        assert await again == b"2"


async def test_concurrent_add_calls_of_redis_clients_lose_no_addition(
    redis: RedisServer, open_store: OpenStore
) -> None:
    stores = [open_store(redis.url, job="adding") for _ in range(20)]
    sums = await asyncio.gather(*(store.add("n", 1) for store in stores * 10))
    assert sorted(sums) == list(range(1, 201))


async def test_jobs_on_one_redis_server_are_independent(redis: RedisServer, open_store: OpenStore) -> None:
    one, two = open_store(redis.url, job="one"), open_store(redis.url, job="two")
    await one.set("k", b"1")
    await one.queue_push("q", b"1")
    assert (await two.num_keys(), await two.check(["k"]), await two.queue_len("q")) == (0, False, 0)
    with pytest.raises(StoreTimeoutError, match=rf"RedisStore on {re.escape(redis.url)} did not get key 'k' within"):
        await two.get("k", timeout=0.01)


async def test_reached_attribute_is_the_address_of_the_redis_server(redis: RedisServer, open_store: OpenStore) -> None:
    store = open_store(redis.url.replace("127.0.0.1", "localhost"))
    assert (store.reached, store.trouble) == ("", None)
    await store.set("k", b"")
    assert (store.reached, store.trouble) == ("127.0.0.1", None)


@pytest.mark.parametrize("assigned", [False, True])
async def test_ranks_on_a_redis_server_meet_shrink_and_grow(own_server: RedisServer, assigned: bool) -> None:
    """Let each rank, and the newcomer that `grow` admits, open a separate `RedisStore`."""
    options = GroupOptions(transport="unix")

    async def rank(number: int) -> Any:
        place = {"world_size": 3} | ({} if assigned else {"rank": number})
        async with RedisStore(own_server.url) as store, new_group(store=store, options=options, **place) as pg:
            assert await pg.allreduce(pg.rank()) == 3
            if pg.rank() == 1:
                return await pg.wait_revoked()
            async with await pg.shrink(exclude=[1]) as small, await small.grow(1) as grown:
                return await grown.allgather_object(grown.rank())

    async def newcomer() -> Any:
        async with RedisStore(own_server.url) as store, new_group(store=store, join=True, options=options) as pg:
            return await pg.allgather_object(pg.rank())

    async with asyncio.timeout(60):
        results = await asyncio.gather(*map(rank, range(3)), newcomer())
    assert [result for result in results if result == [0, 1, 2]] == [[0, 1, 2]] * 3


# -- outages


async def test_redis_calls_and_waits_survive_a_server_restart(own_server: RedisServer, open_store: OpenStore) -> None:
    store, other = open_store(own_server.url), open_store(own_server.url)
    await store.set("before", b"1")
    waiting = asyncio.create_task(store.get("after"))
    await wait_until(lambda: own_server.clients() == 2)
    own_server.execute("SAVE")
    own_server.kill()
    calling = asyncio.create_task(other.set("after", b"2"))
    await wait_until(lambda: other.trouble)
    why = "nothing listens there (connection refused); check that the server runs and the url is correct"
    assert other.trouble == f"no store at {own_server.url}: {why}"
    other.timeout = 0.096
    with pytest.raises(StoreUnavailableError, match=r"connection refused.*; tried for 0\.1 s"):
        await other.check(["before"])
    other.timeout = SOON
    own_server.start()
    async with asyncio.timeout(SOON):
        assert await waiting == b"2"
        await calling
        assert await other.get("before") == b"1"
    assert other.trouble is None


async def test_wait_times_out_without_a_redis_server(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    limits(redis_max_wait=0.1)
    store = open_store(own_server.url)
    await store.set("k", b"")
    own_server.kill()
    async with asyncio.timeout(SOON):
        for wait in (store.get, lambda key, timeout: store.wait([key], timeout), store.queue_pop):
            for timeout in (0.0, 0.2):
                with pytest.raises(StoreUnavailableError, match=r"nothing listens there .* tried for 0\.[12] s"):
                    await wait("k", timeout=timeout)


async def test_broken_redis_connections_are_replaced(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    limits(redis_read_interval=math.inf)
    store, other = open_store(own_server.url), open_store(own_server.url)
    for number in range(5):
        waiting = asyncio.create_task(store.get(f"k{number}"))
        await wait_until(lambda: own_server.clients() >= 2)
        own_server.execute("CLIENT", "KILL", "TYPE", "normal")
        own_server.execute("CLIENT", "KILL", "TYPE", "pubsub")
        async with asyncio.timeout(SOON):
            await other.set(f"k{number}", b"v")
            assert await waiting == b"v"


@asynccontextmanager
async def lossy_proxy(server: RedisServer, every: int, requests: list[bytes]) -> AsyncIterator[str]:
    """Yield the URL of a Redis proxy that closes the connection instead of one in `every` replies to changes.

    The proxy appends all requests to `requests`.
    """
    count = 0
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", server.port)
        writers.update((writer, downstream))
        is_lost = False

        async def forward_requests() -> None:
            nonlocal count, is_lost
            while request_bytes := await reader.read(1 << 20):
                requests.append(request_bytes)
                count += request_bytes.count(b"EVAL")
                is_lost = b"EVAL" in request_bytes and count % every == 0
                downstream.write(request_bytes)
            downstream.close()

        async def forward_replies() -> None:
            while (reply_bytes := await upstream.read(1 << 20)) and not is_lost:
                writer.write(reply_bytes)
            writer.close()

        with suppress(ConnectionError):
            await asyncio.gather(forward_requests(), forward_replies())

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
        for writer in writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("every", [2, 3, 5])
async def test_redis_change_whose_reply_is_lost_is_made_once(
    own_server: RedisServer, open_store: OpenStore, every: int
) -> None:
    requests: list[bytes] = []
    async with lossy_proxy(own_server, every, requests) as url:
        store = open_store(url)
        assert [await store.add("n", 1) for _ in range(20)] == list(range(1, 21))
        for number in range(10):
            await store.queue_push("q", b"%d" % number)
        for _ in range(10):
            await store.append("log", b"x")
        assert [await store.queue_pop("q") for _ in range(10)] == [b"%d" % number for number in range(10)]
        assert await store.multi_get(["n", "log"]) == [b"20", b"x" * 10]
        assert [await store.delete_key("n") for _ in range(2)] == [True, False]
        await store.aclose()
    # Send the changes again, since a request of a broken connection may reach the server after later requests.
    for request_bytes in requests:
        if b"EVAL" in request_bytes:
            own_server.send(request_bytes)
    store = open_store(own_server.url)
    assert await store.list_keys() == ["log"]
    assert await store.get("log") == b"x" * 10


async def test_requests_to_a_stalled_redis_server_are_carried_out_once(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    """Check that a change that the client sends several times is made once."""
    limits(redis_max_wait=0.05)
    store = open_store(own_server.url)
    await store.set("k", b"v")
    own_server.freeze()
    adding = asyncio.create_task(store.add("n", 1))
    await asyncio.sleep(0)
    store.timeout = 0.3
    with pytest.raises(StoreUnavailableError, match=r"no store at .*: no answer; check the url.*tried for 0\.3 s"):
        await store.set("k", b"gave up before it was sent")
    own_server.thaw()
    async with asyncio.timeout(SOON):
        assert await adding == 1
        store.timeout = SOON
        assert await store.add("n", 1) == 2
        assert await store.get("k") == b"v"


# -- lost data


@pytest.mark.parametrize("how", ["FLUSHALL", "restart", pytest.param("DEL aiocoll:", marks=pytest.mark.slow)])
async def test_data_loss_of_the_redis_server_raises_an_error_in_every_client(
    own_server: RedisServer, open_store: OpenStore, how: str
) -> None:
    store, other, third = (open_store(own_server.url) for _ in range(3))
    await other.set("k", b"v")
    await third.check(["k"])
    waits = [asyncio.create_task(wait) for wait in (store.get("never"), store.queue_pop("never"), other.wait(["no"]))]
    await wait_until(lambda: own_server.listeners() == 2)
    if how == "restart":
        own_server.kill()
        own_server.start()
    else:
        own_server.execute(*how.split())
    async with asyncio.timeout(SOON):
        for wait in waits:
            with pytest.raises(StoreUnavailableError, match=rf"{LOST}.*FLUSHALL.*start all ranks again"):
                await wait
        for call in (third.set("k", b"v"), third.check(["k"]), third.add("n", 1), third.list_keys(), store.get("k")):
            with pytest.raises(StoreUnavailableError, match=LOST):
                await call
    # A new client creates a new Redis hash for the job. Clients of the lost hash refuse the entries of the new hash.
    fresh = open_store(own_server.url)
    await fresh.set("k", b"new")
    assert await fresh.get("k") == b"new"
    with pytest.raises(StoreUnavailableError, match=LOST):
        await store.get("k")
    assert await fresh.list_keys() == ["k"]


async def test_older_snapshot_of_the_redis_data_counts_as_data_loss(
    own_server: RedisServer, open_store: OpenStore
) -> None:
    store, other = open_store(own_server.url), open_store(own_server.url)
    await store.set("k", b"old")
    await other.set("l", b"old")
    own_server.execute("SAVE")
    await store.set("k", b"new")
    own_server.kill()
    own_server.start()
    assert await other.get("k") == b"old"  # its own change is saved, and it has not detected the loss yet
    for each in (store, other):
        with pytest.raises(StoreUnavailableError, match=LOST):
            await each.get("k")


# -- data that jobs leave on the Redis server


async def test_redis_entries_expire_if_no_client_renews_them(
    own_server: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    limits(redis_renew_interval=0.02)
    day = 86_400_000
    store = open_store(own_server.url, job="j")
    await store.set("k", b"v")
    assert own_server.execute("DBSIZE") == "1"
    assert day - 60_000 < int(own_server.execute("PTTL", "aiocoll:j")) <= day
    own_server.execute("PEXPIRE", "aiocoll:j", "30000")
    async with asyncio.timeout(SOON):
        while int(own_server.execute("PTTL", "aiocoll:j")) <= 30_000:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await store.aclose()
    limits(redis_renew_interval=3600.0)
    other = open_store(own_server.url, job="j")
    for call in (lambda: other.get("k"), lambda: other.set("k", b"w")):
        own_server.execute("PEXPIRE", "aiocoll:j", "30000")
        await call()
        assert day - 60_000 < int(own_server.execute("PTTL", "aiocoll:j")) <= day


async def test_redis_server_receives_neither_job_keys_nor_arrays(own_server: RedisServer) -> None:
    secret, payload = b"the key of this job, 32 bytes ..", 1234.5678
    reader, writer = await asyncio.open_connection("127.0.0.1", own_server.port, limit=1 << 24)
    writer.write(request("MONITOR"))
    assert await reader.readline() == b"+OK\r\n"

    async def rank(number: int) -> None:
        options = GroupOptions(job_key=secret, transport="tcp")
        async with (
            RedisStore(own_server.url) as store,
            new_group(store=store, rank=number, world_size=3, options=options) as pg,
        ):
            assert (await pg.allreduce(np.full(1000, payload)) == 3 * payload).all()
            assert await pg.allgather_object("an object") == ["an object"] * 3

    await asyncio.gather(*map(rank, range(3)))
    own_server.execute("ECHO", "that was all")
    monitored = await reader.readuntil(b"that was all")
    writer.close()
    await writer.wait_closed()
    assert b"card/2" in monitored
    # The MONITOR command shows bytes outside of ASCII as escapes.
    array = "".join(f"\\x{byte:02x}" for byte in np.float64(payload).tobytes())
    for text in (secret, secret.hex().encode(), base64.b64encode(secret), b"an object", array.encode()):
        assert text not in monitored


# -- passwords and permissions


def shown_texts(error: BaseException) -> str:
    """Return the `str` and `repr` of an error and of its causes, as one text."""
    shown, cause = [], error
    while cause is not None:
        shown += [str(cause), repr(cause)]
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return "\n".join(shown)


async def test_redis_password_is_used_and_never_shown(
    tmp_path: Path, open_store: OpenStore, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    limits(redis_max_wait=0.1)
    with redis_server(tmp_path, None, "--requirepass", "hunter/2@x") as server:
        url = f"redis://:hunter%2F2%40x@127.0.0.1:{server.port}/3"
        store = open_store(url, timeout=5.0)
        await store.set("k", b"v")
        assert await store.get("k") == b"v"
        shown = [repr(store), str(store), repr(vars(store))]
        wrong, none = open_store(url.replace("2F2", "2F3"), timeout=5.0), open_store(server.url, timeout=5.0)
        for each, what in (
            (wrong, r"refused user or password: .*; correct them in the url"),
            (none, "NOAUTH|required"),
        ):
            with pytest.raises(StoreUnavailableError, match=what) as raised:
                await each.set("k", b"")
            assert isinstance(raised.value, AuthenticationError)
            shown.append(shown_texts(raised.value))
        with pytest.raises(StoreTimeoutError) as missing:
            await store.get("missing", timeout=0.01)
        server.kill()
        with pytest.raises(StoreUnavailableError) as gone:
            await store.get("k", timeout=0.2)
        shown += [shown_texts(missing.value), shown_texts(gone.value), str(store.trouble)]
        server.start()
    shown.append(repr(new_group(init_method=url, rank=0, world_size=1)._parameters))
    for init_method in (url, url.replace("redis", "reddis")):
        with pytest.raises(ValueError, match=r"init_method='redd?is://\.\.\.@127\.0\.0\.1") as refused:
            new_group(init_method=init_method, rank=0)
        shown.append(shown_texts(refused.value))
    assert f"redis://127.0.0.1:{server.port}/3" in "".join(shown)
    assert "hunter" not in "".join(shown) + caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host:port",
        "redis://:hunter2@host:70000",
        "redis://:hunter2@host/first",
        "redis://:hunter2@host/-1",
        "redis://:hunter2@host/0?timeout=3",
        "redis://:hunter2@[::1/0",
        "redis://:hunter2@/0",
        "redis://hunter2/pass@host",
        "http://:hunter2@host",
        "",
    ],
)
def test_invalid_redis_urls_are_refused(url: str) -> None:
    need_redis()
    with pytest.raises(ValueError, match=r"url must be redis://\[\[user\]:password@\]host\[:port\]\[/db\]") as raised:
        RedisStore(url)
    assert "hunter" not in shown_texts(raised.value)


def test_invalid_redis_store_arguments_are_refused(tmp_path: Path) -> None:
    need_redis()
    with pytest.raises(TypeError, match="url must be str, got bytes"):
        RedisStore(b"redis://host")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="job must be str, got int"):
        RedisStore("redis://host", job=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tls_ca, tls_certificate and tls_key need a url that begins with rediss"):
        RedisStore("redis://host", tls_ca="ca.pem")
    with pytest.raises(ValueError, match="tls_certificate and tls_key belong together"):
        RedisStore("rediss://host", tls_certificate="own.pem")
    with pytest.raises(ValueError, match=r"tls_ca='.*/none.pem': cannot be used"):
        RedisStore("rediss://host", tls_ca=str(tmp_path / "none.pem"))
    files = Authority(tmp_path).make("DNS:localhost")
    with pytest.raises(ValueError, match=r"tls_certificate='.*', tls_key='.*': cannot be used"):
        RedisStore("rediss://host", tls_certificate=files.ca, tls_key=files.key)
    Path(files.key).chmod(0o644)
    with pytest.raises(ValueError, match=r"tls_key='.*': other users may access it; chmod 600 it"):
        RedisStore("rediss://host", tls_certificate=files.certificate, tls_key=files.key)


async def test_documented_redis_permissions_suffice(own_server: RedisServer, open_store: OpenStore) -> None:
    listed = re.search(r"the commands (EVAL[^.]*)\.", RedisStore.__doc__ or "")
    assert listed is not None
    commands = re.findall("[A-Z]{3,}", listed[1])
    rights = ["reset", "on", ">hunter2", "~aiocoll:*", *(f"+{command}" for command in commands)]
    own_server.execute("ACL", "SETUSER", "ranks", *rights, "&aiocoll:*")
    url = own_server.url.replace("//", "//ranks:hunter2@").removesuffix("0") + "1"
    store, other = open_store(url), open_store(url)
    waiting = asyncio.create_task(store.get("late"))
    await other.set("k", b"1")
    await other.append("k", b"2")
    assert await other.add("k", 1) == 13
    assert await other.list_keys() == ["k"]
    assert await other.delete_key("k")
    await other.queue_push("q", b"item")
    assert await store.queue_pop("q") == b"item"
    await other.set("late", b"here")
    assert await waiting == b"here"
    own_server.execute("ACL", "SETUSER", "ranks", "resetchannels")
    strange = open_store(url)
    with pytest.raises(
        StoreUnavailableError, match=r"denies a permission that the store needs .*channels aiocoll:\*"
    ) as raised:
        await strange.get("never")
    assert isinstance(raised.value, AuthenticationError)


async def test_request_refused_by_the_redis_server_is_explained(own_server: RedisServer, open_store: OpenStore) -> None:
    store = open_store(own_server.url, job="j")
    await store.set("k", b"v")
    own_server.execute("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreError, match=rf"{own_server.url} could not carry out a request: .*maxmemory"):
        await store.set("k", b"w")
    assert await store.get("k") == b"v"
    own_server.execute("CONFIG", "SET", "maxmemory", "0")
    await store.set("k", b"w")
    own_server.execute("SET", "aiocoll:other", "another value")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await open_store(own_server.url, job="other").set("k", b"w")


async def test_server_that_is_not_redis_is_refused(open_store: OpenStore) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        where = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for scheme, why in (("redis", ""), ("rediss", "the program that listens there does not use TLS as expected")):
            with pytest.raises(
                StoreUnavailableError, match=rf"no store at {scheme}://{where}/0: {why}.*tried for 0\.2 s"
            ):
                await open_store(f"{scheme}://{where}", timeout=0.2).set("k", b"v")


# -- certificates


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Yield a Redis server with TLS that requires client certificates of its own CA."""
    files = Authority(tmp_path).make("DNS:localhost", file="server")
    with redis_server(tmp_path, files, "--tls-auth-clients", "yes") as server:
        yield server


async def test_redis_client_without_a_certificate_of_the_server_ca_is_refused(
    tls_server: RedisServer, open_store: OpenStore, tmp_path: Path
) -> None:
    files = Authority(tmp_path, "clients").make("DNS:client", file="client")
    stranger = open_store(tls_server.tls_url, tls_ca=tls_server.ca, timeout=0.3)
    with pytest.raises(
        StoreUnavailableError,
        match=r"no store at rediss://localhost:\d+/0: .*if it requires certificates, pass tls_cert",
    ):
        await stranger.set("k", b"v")
    wrong = open_store(
        tls_server.tls_url, tls_ca=tls_server.ca, tls_certificate=files.certificate, tls_key=files.key, timeout=0.3
    )
    with pytest.raises(
        StoreUnavailableError,
        match=r"no store at rediss://localhost:\d+/0: .*if it requires certificates, pass tls_cert",
    ):
        await wrong.set("k", b"v")


async def test_client_certificate_required_by_redis_is_presented(tmp_path: Path, open_store: OpenStore) -> None:
    authority = Authority(tmp_path)
    files = authority.make("DNS:localhost", file="server")
    client = authority.make("DNS:client", file="client")
    with redis_server(tmp_path, files, "--tls-auth-clients", "yes") as server:
        store = open_store(server.tls_url, tls_ca=client.ca, tls_certificate=client.certificate, tls_key=client.key)
        await store.set("k", b"v")
        assert await store.get("k") == b"v"


async def test_redis_server_certificate_of_another_ca_is_refused_at_once(
    redis: RedisServer, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority(tmp_path, "other")
    refused = r"the certificate of rediss://.* was refused \(.*\): pass the certificates of its CA as tls_ca="
    by_number = redis.tls_url.replace("localhost", "127.0.0.1")
    for url, ca in ((redis.tls_url, None), (redis.tls_url, str(other.file)), (by_number, redis.ca)):
        with pytest.raises(StoreUnavailableError, match=refused) as raised:
            await open_store(url, tls_ca=ca, timeout=SOON).set("k", b"v")
        assert isinstance(raised.value, AuthenticationError)
    # A store with tls_ca= trusts only that CA. A store without tls_ca= trusts the CAs of the system.
    monkeypatch.setenv("SSL_CERT_FILE", redis.ca)
    with pytest.raises(StoreUnavailableError, match=refused):
        await open_store(redis.tls_url, tls_ca=str(other.file), timeout=SOON).set("k", b"v")
    await open_store(redis.tls_url).set("k", b"v")


async def test_connection_to_a_silent_redis_server_closes_at_once(
    redis: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    """Check that the client closes a connection without waiting for the server's TLS shutdown."""
    stores = [open_store(redis.url), open_store(redis.tls_url, tls_ca=redis.ca)]
    for store in stores:
        await store.set("k", b"v")
    limits(redis_max_wait=0.05)  # set only after connecting, which may take longer
    for store in stores:
        used = store._client._connection._transport.get_extra_info("socket")
        redis.freeze()
        store.timeout = 0.2
        try:
            with pytest.raises(StoreUnavailableError, match="no answer"):
                await store.set("k", b"v")
            async with asyncio.timeout(SOON):
                await wait_until(lambda used=used: used.fileno() == -1)
        finally:
            redis.thaw()


async def test_error_explains_a_redis_connection_that_mixes_plain_text_and_tls(
    redis: RedisServer, open_store: OpenStore, limits: Limits
) -> None:
    limits(redis_max_wait=0.1)
    plain = redis.tls_url.replace("rediss://localhost", "redis://127.0.0.1")
    with pytest.raises(StoreUnavailableError, match=r"tried for 0\.2 s"):
        await open_store(plain, timeout=0.2).set("k", b"v")
    encrypted = redis.url.replace("redis://127.0.0.1", "rediss://localhost")
    with pytest.raises(StoreUnavailableError, match=r"no answer; check the url, .*tried for 0\.2 s"):
        await open_store(encrypted, tls_ca=redis.ca, timeout=0.2).set("k", b"v")


# -- without the package


def test_error_names_the_missing_redis_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(
        BackendUnavailableError, match=r"RedisStore needs the package redis: pip install aiocoll\[redis\]"
    ):
        RedisStore("redis://127.0.0.1:6379/0")
