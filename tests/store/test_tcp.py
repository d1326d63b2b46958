"""`TCPStore` and `StoreServer` beyond the store contract: connections, handshakes, frames."""

import asyncio
import contextlib
import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import pytest

from aiocoll.errors import AuthenticationError, StoreError, StoreTimeoutError, StoreUnavailableError
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    CONFIRM_SIZE,
    PROOF_SIZE,
    VERDICT_SIZE,
    ClientHandshake,
    ConnKind,
    Identity,
    job_id,
)
from aiocoll.security.loop_timeout import _TURNS
from aiocoll.security.tls import make_own_contexts
from aiocoll.security.unproven_connections import MIN_PLACES
from aiocoll.store import PrefixStore, StoreServer, TCPStore
from aiocoll.store.client import ClientLink
from aiocoll.store.core import StoreCore
from aiocoll.store.frames import pack
from aiocoll.store.session import Session

from ..internals import observe_calls, observe_methods, replace_parts
from ..name_server import NameServer
from ..ports import free_port
from ..ranks import wait_until

try:
    import uvloop
except ImportError:
    uvloop = None

KEY = bytes(range(32))
LOCAL = "127.0.0.1"


@pytest.fixture
def server():
    server = StoreServer(LOCAL, 0, key=KEY)
    server.start()
    yield server
    server.close()


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def client(server: StoreServer, key: bytes | None = KEY, **options) -> TCPStore:
    return TCPStore(server.host, server.port, key=key, **options)


@contextlib.asynccontextmanager
async def raw_connection(server: StoreServer, *, authenticate: bool = False):
    """Yield the stream reader and the stream writer of a raw connection to the server."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        if authenticate:
            handshake = ClientHandshake(Identity(job_id(""), 0, -1, 0, ConnKind.STORE), KEY, os.urandom)
            writer.write(handshake.hello())
            writer.write(handshake.prove(await reader.readexactly(CHALLENGE_SIZE)))
            writer.write(handshake.confirm(await reader.readexactly(VERDICT_SIZE)))
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class ImpostorProtocol(asyncio.Protocol):
    """A server protocol that sends `reply` to each client, and then closes the connection or sends no more."""

    def __init__(self, reply: bytes, hang_up: bool, transports: list) -> None:
        self._reply = reply
        self._hang_up = hang_up
        self._transports = transports

    def connection_made(self, transport) -> None:
        self._transports.append(transport)
        transport.write(self._reply)
        if self._hang_up:
            transport.close()


@contextlib.asynccontextmanager
async def impostor(reply: bytes, *, hang_up: bool = True):
    """Yield the port of a listener that sends `reply` to each client and is not a store."""
    transports = []
    listener = await asyncio.get_running_loop().create_server(
        lambda: ImpostorProtocol(reply, hang_up, transports), LOCAL, 0
    )
    async with listener:
        yield listener.sockets[0].getsockname()[1]
        for transport in transports:
            transport.abort()


async def test_port_0_is_replaced_by_the_actual_port():
    async with TCPStore(LOCAL, 0, is_master=True) as master, TCPStore(LOCAL, master.port) as store:
        assert master.port > 0
        await store.set("k", b"1")
        assert await master.get("k") == b"1"
    with pytest.raises(ValueError, match="port=0 means a free port, which only the master can choose"):
        TCPStore(LOCAL, 0)
    with pytest.raises(ValueError, match="port must be between 0 and 65535, got 70000"):
        TCPStore(LOCAL, 70000)


async def test_awaiting_a_store_opens_the_store(server):
    store = await client(server)
    assert await store.num_keys() == 0
    await store.aclose()


async def test_first_calls_of_many_tasks_share_one_connection(server):
    async with contextlib.AsyncExitStack() as stack:
        store = client(server)
        stack.push_async_callback(store.aclose)
        assert sorted(await asyncio.gather(*(store.add("n", 1) for _ in range(20)))) == list(range(1, 21))
        assert len(server._sessions) == 1


async def test_master_serves_the_store_in_a_separate_thread_while_its_loop_is_blocked():
    async with TCPStore(LOCAL, 0, is_master=True) as master:
        await master.set("k", b"1")
        seen = []

        async def read_in_thread() -> None:
            async with TCPStore(LOCAL, master.port) as store:
                seen.append(await store.get("k"))

        thread = threading.Thread(target=asyncio.run, args=(read_in_thread(),))
        thread.start()
        thread.join()  # join blocks this loop
        assert seen == [b"1"]


async def test_store_serves_64_clients():
    size = 64
    async with contextlib.AsyncExitStack() as stack:
        master = TCPStore(LOCAL, 0, size, is_master=True)
        stack.push_async_callback(master.aclose)
        opening = asyncio.create_task(master.open())
        await asyncio.sleep(0)
        stores = [TCPStore(LOCAL, master.port, size) for _ in range(size - 1)]
        for store in stores:
            stack.push_async_callback(store.aclose)

        async def meet(rank: int, store: TCPStore) -> list[bytes]:
            await store.set(str(rank), b"%d" % rank)
            return await store.multi_get(map(str, range(size)))

        results = await asyncio.gather(*(meet(rank, store) for rank, store in enumerate([master, *stores])))
        assert results == [[b"%d" % rank for rank in range(size)]] * size
        assert await opening is master


async def test_opening_a_tcp_store_waits_for_all_workers(server):
    first, second = client(server, world_size=2), client(server, world_size=2)
    opening = asyncio.create_task(first.open())
    async with client(server, wait_for_workers=False) as bystander:
        await bystander.set("k", b"")
        assert not opening.done()
    await second.open()
    await opening
    await first.aclose()
    await second.aclose()


async def test_error_counts_the_missing_workers(server):
    store = client(server, world_size=3, timeout=0.05)
    with pytest.raises(
        StoreTimeoutError, match=r"1 of 3 clients connected to store 127.*within 0\.0\d+ s: start the oth"
    ):
        await store.open()
    await store.aclose()


async def test_worker_that_connects_again_is_counted_once(server):
    store = client(server, world_size=2, timeout=0.05)
    for _ in range(3):
        with pytest.raises(StoreTimeoutError, match="1 of 2 clients connected"):
            await store.get("k", timeout=0.05)
    other = client(server, world_size=2)
    assert await asyncio.gather(other.set("k", b"v"), store.get("k", timeout=10)) == [None, b"v"]
    await other.aclose()
    await store.aclose()


async def test_closed_store_server_fails_all_pending_calls(server):
    async with client(server) as store:
        waits = [asyncio.create_task(wait) for wait in (store.get("k"), store.queue_pop("q"), store.wait(["a", "b"]))]
        await asyncio.sleep(0)
        await store.num_keys()
        await server.aclose()
        for wait in waits:
            with pytest.raises(StoreUnavailableError, match=r"closed the connection: its process .* has ended"):
                await wait
        with pytest.raises(StoreUnavailableError, match=f"store {LOCAL}:{server.port} closed the connection"):
            await store.set("k", b"")


async def test_cancelled_and_timed_out_waits_are_dropped_by_the_server(server):
    async with client(server) as store:
        waits = [asyncio.create_task(wait) for wait in (store.get("k"), store.queue_pop("q"))]
        await asyncio.sleep(0)
        await store.num_keys()
        assert server.core._watchers
        assert server.core._poppers
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        with pytest.raises(StoreTimeoutError):
            await store.get("k", timeout=0.001)
        assert await store.num_keys() == 0
        assert not server.core._watchers
        assert not server.core._poppers


async def test_server_drops_the_waits_of_a_lost_client(server):
    async with client(server) as store, client(server) as vanishing:
        popping = asyncio.create_task(vanishing.queue_pop("q"))
        await asyncio.sleep(0)
        await vanishing.num_keys()
        await vanishing.aclose()
        with pytest.raises(StoreUnavailableError):
            await popping
        while len(server._sessions) > 1:
            await store.num_keys()
        await store.queue_push("q", b"1")
        assert await store.queue_pop("q", timeout=0) == b"1"


async def test_queue_item_for_a_lost_client_goes_to_the_next_client(server):
    async with client(server) as store, client(server) as cut_off:
        popping = asyncio.create_task(cut_off.queue_pop("q"))
        await asyncio.sleep(0)
        await cut_off.num_keys()
        (session,) = [session for session in server._sessions if session._waits]
        done = threading.Event()

        def abort_and_push() -> None:
            """Close the connection and push items in one loop iteration, before the server notices the close."""
            session.abort()
            server.core.apply("queue_push", ("q", b"1"))
            server.core.apply("queue_push", ("q", b"2"))
            done.set()

        server._loop.call_soon_threadsafe(abort_and_push)
        assert await asyncio.to_thread(done.wait, 20)
        with pytest.raises(StoreUnavailableError):
            await popping
        assert [await store.queue_pop("q", timeout=0) for _ in range(2)] == [b"1", b"2"]


async def test_pending_wait_does_not_delay_other_store_requests(server):
    async with client(server) as store:
        waiting = asyncio.create_task(store.get("k"))
        await asyncio.sleep(0)
        await store.num_keys()
        assert await store.add("n", 1) == 1
        await store.set("k", b"1")
        assert await waiting == b"1"


async def test_waits_over_the_limit_of_one_client_are_refused(server):
    async with client(server) as store:
        results = await asyncio.gather(*(store.get("k", timeout=0.5) for _ in range(1025)), return_exceptions=True)
        errors = [str(error) for error in results if not isinstance(error, StoreTimeoutError)]
        assert errors == ["one client has 1024 waits in progress: await some of them first"]


async def test_replies_and_commands_over_the_frame_limit_are_refused(server):
    async with client(server) as store:
        large = bytes(8 << 20)
        with pytest.raises(StoreError, match=r"\d+ bytes in one command or reply, the limit is 16777216"):
            await store.multi_set(["a", "b"], [large, large])
        await store.set("a", large)
        await store.set("b", large)
        with pytest.raises(StoreError, match="use fewer keys at once"):
            await store.multi_get(["a", "b"])
        assert await store.num_keys() == 2


async def test_total_size_of_store_values_is_limited(server):
    async with client(server) as store:
        for i in range(32):
            await store.set(str(i), bytes(8 << 20))
        with pytest.raises(StoreError, match="the store is full: 268435456 bytes of values"):
            await store.queue_push("q", b"x")
        await store.delete_key("0")
        await store.queue_push("q", b"x")


async def test_wrong_job_key_is_refused_by_client_and_server(server):
    with pytest.raises(AuthenticationError, match=f"cannot use the store at {LOCAL}:{server.port}: .*job's key"):
        await client(server, key=b"x" * 32).open()
    with pytest.raises(StoreUnavailableError, match="did not prove that it holds this job's key"):
        await client(server, key=None).num_keys()
    async with client(server) as store:
        assert await store.num_keys() == 0


async def test_store_server_refuses_a_client_of_another_job(server):
    with pytest.raises(AuthenticationError, match=f"job {job_id('').hex()}, this process to job {job_id('b').hex()}"):
        await client(server, job="b").open()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
async def test_tcp_store_on_a_non_loopback_address_needs_a_job_key(host):
    for store in (TCPStore(host, 29500), TCPStore(host, 29500, is_master=True)):
        with pytest.raises(AuthenticationError, match=r"there is no job key.*aiocoll run.*AIOCOLL_JOB_KEY"):
            await store.open()
    with pytest.raises(AuthenticationError, match="there is no job key"):
        StoreServer(host, 29500).start()
    with pytest.raises(AuthenticationError, match="job_key has 5 bytes"):
        StoreServer(LOCAL, 0, key=b"short").start()


async def test_tcp_store_on_the_loopback_without_a_job_key_warns_once(caplog):
    async with TCPStore(LOCAL, 0, is_master=True) as master, TCPStore(LOCAL, master.port) as store:
        await store.num_keys()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [f"store on {LOCAL}"]
    assert "has no job key" in caplog.text


async def test_error_names_a_port_without_a_server():
    port = free_port()
    with pytest.raises(
        StoreUnavailableError, match=rf"no store at {LOCAL}:{port}: nothing listens.*\(tried for 0\.\d s\)"
    ):
        await TCPStore(LOCAL, port, timeout=0.02).get("k")
    with pytest.raises(StoreUnavailableError, match=r"no store at unix:@aiocoll-missing: nothing listens"):
        await TCPStore("unix:@aiocoll-missing", 0, timeout=0).get("k")


@pytest.mark.parametrize("name", ["master", "localhost", "localhost.localdomain", "127.0.1.1"])
async def test_error_explains_a_host_name_that_resolves_to_the_loopback(monkeypatch, name):
    """Check that the error explains only names that resolve to loopback by accident, as in Debian's /etc/hosts."""
    port = free_port()

    NameServer("127.0.1.1").install(monkeypatch)
    with pytest.raises(StoreUnavailableError) as caught:
        await TCPStore(name, port, timeout=0.02).get("k")
    explanation = (
        "at this address; 'master' resolves to 127.0.1.1 here, this machine itself (see /etc/hosts) (tried for"
    )
    assert (explanation in str(caught.value)) == (name == "master")


async def test_error_names_an_unresolvable_host():
    with pytest.raises(StoreUnavailableError, match=r"no store at a\.\.b:1: the host name 'a\.\.b' cannot be resolved"):
        await TCPStore("a..b", 1, timeout=0).open()
    with pytest.raises(StoreUnavailableError, match=r"cannot listen on 'a\.\.b', which cannot be resolved"):
        await TCPStore("a..b", 1, is_master=True).open()


async def test_tcp_store_address_can_be_a_host_name():
    async with TCPStore("localhost", 0, is_master=True) as master, TCPStore("localhost", master.port) as store:
        await store.set("k", b"1")
        assert await master.get("k") == b"1"


async def test_store_client_connects_to_a_server_that_starts_late():
    port = free_port()
    store = TCPStore(LOCAL, port, key=KEY)
    opening = asyncio.create_task(store.open())
    await asyncio.sleep(0)
    server = StoreServer(LOCAL, port, key=KEY)
    server.start()
    await opening
    await store.aclose()
    await server.aclose()


@pytest.mark.parametrize("hang_up", [True, False])
@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 400 Bad Request\r\n".ljust(500)])
async def test_server_with_another_protocol_is_refused_by_the_store_client(reply, hang_up):
    async with impostor(reply, hang_up=hang_up) as port:
        with pytest.raises(AuthenticationError, match=f"cannot use the store at {LOCAL}:{port}: .*b'(SSH|HTTP)"):
            await TCPStore(LOCAL, port, timeout=0.01).open()


@pytest.mark.parametrize(("hang_up", "reason"), [(False, "does not answer"), (True, "closes the connection")])
async def test_silent_server_is_refused_by_the_store_client(hang_up, reason):
    async with impostor(b"", hang_up=hang_up) as port:
        with pytest.raises(
            StoreUnavailableError, match=f"no store at {LOCAL}:{port}: something listens there but {reason}"
        ):
            await TCPStore(LOCAL, port, timeout=0.01).open()


async def test_silent_clients_do_not_block_other_store_clients(server):
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MIN_PLACES + 2):  # more than the server admits unproven
            await stack.enter_async_context(raw_connection(server))
        async with client(server) as store:
            await store.set("k", b"1")
        assert len(server._unproven) <= MIN_PLACES


async def test_silent_clients_use_no_memory_for_tls():
    server = StoreServer(LOCAL, 0, key=KEY, encryption="tls")
    server.start()
    make_own_contexts()
    before = resident_bytes()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(MIN_PLACES):
            await stack.enter_async_context(raw_connection(server))
        await wait_until(lambda: len(server._unencrypted) == MIN_PLACES)
        async with client(server, encryption="tls") as store:  # this client is accepted last, after all silent clients
            await store.set("k", b"1")
        assert resident_bytes() - before < MIN_PLACES * (64 << 10)
    await server.aclose()


async def test_store_connection_succeeds_with_concurrently_made_certificates(monkeypatch):
    """Make the server use another certificate than the client, as two threads do that make certificates at once."""
    server = StoreServer(LOCAL, 0, key=KEY, encryption="tls")
    monkeypatch.setattr(server._tls, "get", make_own_contexts.__wrapped__)
    server.start()
    async with client(server, encryption="tls") as store:
        await store.set("k", b"1")
    await server.aclose()


async def test_store_server_disconnects_a_client_without_tls_at_once():
    server = StoreServer(LOCAL, 0, key=KEY, encryption="tls")
    server.start()
    async with raw_connection(server) as (reader, writer):
        writer.write(b"G")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await server.aclose()


@pytest.mark.parametrize("encryption", ["none", "tls"])
async def test_store_server_disconnects_a_silent_client_at_the_deadline(limits, encryption):
    limits(store_handshake_timeout=0.01)
    server = StoreServer(LOCAL, 0, key=KEY, encryption=encryption)
    server.start()
    async with raw_connection(server) as (reader, _):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await server.aclose()


async def test_authenticated_store_client_has_no_handshake_deadline(limits):
    """Let a client send its last handshake message after the server has disconnected a later, silent client."""
    limits(store_handshake_timeout=0.05)
    server = StoreServer(LOCAL, 0, key=KEY)
    server.start()
    async with raw_connection(server) as (reader, writer):
        handshake = ClientHandshake(Identity(job_id(""), 0, -1, 0, ConnKind.STORE), KEY, os.urandom)
        writer.write(handshake.hello())
        writer.write(handshake.prove(await reader.readexactly(CHALLENGE_SIZE)))
        confirmation = handshake.confirm(await reader.readexactly(VERDICT_SIZE))
        async with raw_connection(server) as (silent, _):
            with contextlib.suppress(ConnectionError):
                assert await silent.read() == b""
        request = pack([1, "num_keys", [""]])
        writer.write(confirmation + request)
        assert await reader.readexactly(len(pack([1, 0, 0]))) == pack([1, 0, 0])
    await server.aclose()


async def test_handshake_deadline_does_not_end_a_session_with_unread_data():
    """Let all deadline timers of the session fire in one callback, while the client's HELLO is unread in the socket."""
    server = StoreServer(LOCAL, 0, key=KEY)
    server.start()

    def fire_timers() -> None:
        (session,) = server._sessions
        for _ in range(_TURNS):
            session._deadline._timer.cancel()
            session._deadline._turn()

    async with raw_connection(server) as (reader, writer):
        handshake = ClientHandshake(Identity(job_id(""), 0, -1, 0, ConnKind.STORE), KEY, os.urandom)
        await wait_until(lambda: server._sessions)
        blocked, resume = threading.Event(), threading.Event()
        server._loop.call_soon_threadsafe(lambda: (blocked.set(), resume.wait(), fire_timers()))
        await asyncio.to_thread(blocked.wait)
        writer.write(handshake.hello())
        await writer.drain()
        resume.set()
        assert len(await reader.readexactly(CHALLENGE_SIZE)) == CHALLENGE_SIZE
    await server.aclose()


@pytest.mark.usefixtures("started_uvloop")
@pytest.mark.parametrize("name", ["asyncio", "uvloop"])
@pytest.mark.parametrize("waits", [False, True])
def test_timeout_does_not_discard_an_unread_reply(server, name, waits):
    """Block the client's event loop until the reply has arrived and the timeout has passed."""
    if name == "uvloop" and uvloop is None:
        pytest.skip("uvloop is not installed")

    async def program() -> None:
        async with client(server) as store:
            await store.set("a", b"1")
            link = store._link
            call = link.wait("get", ("a",), 0.05) if waits else link.call("check", (["a"],), 0.05)
            answer = asyncio.create_task(call)
            asyncio.get_running_loop().call_soon(time.sleep, 0.2)
            assert await answer == (b"1" if waits else True)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop if name == "asyncio" else uvloop.new_event_loop) as runner:
        runner.run(program())


async def test_store_server_disconnects_a_silent_tls_client(limits):
    limits(store_handshake_timeout=0.5)
    server = StoreServer(LOCAL, 0, key=KEY, encryption="tls")
    server.start()
    began = time.monotonic()
    tls = make_own_contexts()
    reader, writer = await asyncio.open_connection(LOCAL, server.port, ssl=tls.client, server_hostname="")
    assert await reader.read() == b""
    assert time.monotonic() - began >= 0.5
    writer.close()
    await server.aclose()


@pytest.mark.parametrize("begun", [False, True])
async def test_store_server_can_be_closed_during_the_tls_handshake_of_a_client(begun):
    server = StoreServer(LOCAL, 0, key=KEY, encryption="tls")
    server.start()
    async with raw_connection(server) as (reader, writer):
        if begun:
            writer.write(b"\x16\x03\x01\x02\x00\x01")
        await wait_until(lambda: server._unencrypted)
        await server.aclose()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(200), b"\xff" * 10_000, b"aioc" + bytes(500)]
)
async def test_garbage_from_a_client_closes_the_store_connection(server, garbage):
    async with client(server) as store:
        waiting = asyncio.create_task(store.get("k"))
        await asyncio.sleep(0)
        async with raw_connection(server) as (reader, writer):
            writer.write(garbage)
            with contextlib.suppress(ConnectionError):
                assert not (await reader.read()).startswith(b"HTTP")
        await store.set("k", b"1")
        assert await waiting == b"1"


async def test_unauthenticated_client_cannot_use_the_store(server):
    async with raw_connection(server) as (reader, writer):
        handshake = ClientHandshake(Identity(job_id(""), 0, -1, 0, ConnKind.STORE), KEY, os.urandom)
        writer.write(handshake.hello())
        await reader.readexactly(CHALLENGE_SIZE)
        writer.write(bytes(PROOF_SIZE + CONFIRM_SIZE) + frame(b"\x93\x01\xa3set\x92\xa1k\xc4\x01v"))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() in (bytes(VERDICT_SIZE), b"")
    async with client(server) as store:
        assert await store.num_keys() == 0


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!I", 0),
        struct.pack("!I", (16 << 20) + 1),
        struct.pack("!I", 0xFFFFFFFF),
        frame(b"\xc1"),
        frame(b"\x93\x01\xa3set"),
        frame(b"\x81\x01\x02"),
        frame(b"\x93\xa1x\xa3set\x90"),
        frame(b"\x93\x01\x02\x90"),
        frame(b"\x93\x01\xa3set\x01"),
        frame(b"\x93\x01\xa7explode\x90"),
        frame(b"\x93\x01\xa4join\x91\x00"),
        frame(b"\xdd\xff\xff\xff\xff"),
        frame(b"\x91" * 2000),
    ],
)
async def test_invalid_store_frame_closes_only_its_connection(server, sent):
    async with client(server) as store:
        async with raw_connection(server, authenticate=True) as (reader, writer):
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await store.set("k", b"1")
        assert await store.get("k") == b"1"


async def test_invalid_argument_of_a_store_request_gets_an_error_reply(server):
    async with raw_connection(server, authenticate=True) as (reader, writer):
        writer.write(frame(b"\x93\x01\xa3set\x92\xa1k\xa1v"))
        (nbytes,) = struct.unpack("!I", await reader.readexactly(4))
        assert b"value must be bytes, got str" in await reader.readexactly(nbytes)


#: One call per store command, and invalid results for this command.
CALLS = {
    "set": (lambda store: store.set("k", b""), [b"", 0]),
    "add": (lambda store: store.add("n", 1), [None, b"1", 1.0, True]),
    "compare_set": (lambda store: store.compare_set("k", b"", b""), [None, "", 1]),
    "check": (lambda store: store.check(["k"]), [None, 1]),
    "delete_key": (lambda store: store.delete_key("k"), [None, 0]),
    "num_keys": (lambda store: store.num_keys(), [None, []]),
    "append": (lambda store: store.append("k", b""), [b""]),
    "multi_set": (lambda store: store.multi_set(["k"], [b""]), [b""]),
    "list_keys": (lambda store: store.list_keys(), [None, "keys", [b"k"], ["k", None]]),
    "queue_push": (lambda store: store.queue_push("q", b""), [0]),
    "queue_len": (lambda store: store.queue_len("q"), [None, b""]),
    "get": (lambda store: store.get("k"), [None, "text", [b""]]),
    "multi_get": (lambda store: store.multi_get(["k", "l"]), [None, b"ab", [b""], [b"", "a"], [b"", b"", b""]]),
    "wait": (lambda store: store.wait(["k"]), [True]),
    "queue_pop": (lambda store: store.queue_pop("q"), [None, "text"]),
}
WAITS = {"get", "multi_get", "wait", "queue_pop"}
WRONG_OUTCOMES = [3, -1, None, "0", [0], True, 1.0]


@pytest.mark.parametrize("command", CALLS)
async def test_invalid_store_reply_closes_the_connection_with_a_reason(server, command, monkeypatch):
    """Check that each invalid reply raises `StoreUnavailableError` at once."""
    call, results = CALLS[command]
    answers = [(0, wrong) for wrong in results]
    answers += [(1, wrong) for wrong in (None, b"", [], 7)]
    answers += [(2, wrong) for wrong in (None, 0, "k", b"k", [b"k"], [None], [["k"]])]
    answers += [(2, ["k"])] * (command not in WAITS) + [(wrong, None) for wrong in WRONG_OUTCOMES]
    for answer in answers:
        async with client(server) as store, client(server) as other:
            await other.multi_set(["k", "l"], [b"", b""])
            await other.queue_push("q", b"")
            with monkeypatch.context() as patch:
                replace_parts(
                    patch, send_store_reply=lambda session, number, *_, reply=answer: send(session, [number, *reply])
                )
                with pytest.raises(StoreUnavailableError, match=r"store 127.0.0.1:\d+: .* reply to " + command):
                    await call(store)
            await other.num_keys()


def send(session: Session, message: list) -> None:
    session.transport.write(pack(message))


async def test_cancelled_store_wait_is_removed_after_its_reply(server):
    """Check that the client forgets the request at the reply, and not only at the end of the connection."""
    async with client(server) as store:
        for command in (store.get, store.queue_pop):
            waiting = asyncio.create_task(command("never"))
            await store.num_keys()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await store.num_keys()
            assert store._link._requests == {}


async def test_error_names_a_port_that_is_already_in_use(server):
    with pytest.raises(
        StoreUnavailableError, match=f"cannot listen on {LOCAL}:{server.port}: .*choose another port or 0"
    ):
        await TCPStore(LOCAL, server.port, is_master=True).open()
    with pytest.raises(StoreUnavailableError, match="it is not an address of this machine"):
        StoreServer("192.0.2.1", 0, key=KEY).start()


async def test_unix_socket_file_is_private_and_removed(tmp_path):
    path = tmp_path / "socket"
    host = f"unix:{path}"
    async with TCPStore(host, 0, is_master=True) as master:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(StoreUnavailableError, match=f"cannot listen on {host}: .*another program uses it"):
            StoreServer(host, 0).start()
        assert await master.num_keys() == 0
    assert not path.exists()


async def test_only_a_stale_unix_socket_file_is_replaced(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with TCPStore(f"unix:{path}", 0, is_master=True) as master:
        assert await master.num_keys() == 0
    path.write_text("precious")
    with pytest.raises(StoreUnavailableError, match="cannot listen"):
        StoreServer(f"unix:{path}").start()
    assert path.read_text() == "precious"


async def test_store_server_refuses_a_unix_peer_of_another_user(monkeypatch):
    async with TCPStore("unix:@aiocoll-uid-test", 0, is_master=True) as master:
        await master.num_keys()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(AuthenticationError, match=r"unix socket belongs to user \d+, not to this user \(\d+\)"):
            await TCPStore("unix:@aiocoll-uid-test", 0).open()


async def test_store_server_can_be_closed_repeatedly_from_any_thread():
    server = StoreServer(LOCAL, 0, key=KEY)
    server.close()
    assert server.start() == (LOCAL, server.port)
    with pytest.raises(RuntimeError, match="has already been started"):
        server.start()
    threads = [threading.Thread(target=server.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.gather(server.aclose(), server.aclose())
    for thread in threads:
        thread.join()
    server.close()
    assert not server._thread.is_alive()


async def test_cancelled_aclose_can_be_repeated():
    server = StoreServer(LOCAL, 0, key=KEY)
    server.start()
    closing = asyncio.create_task(server.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    await server.aclose()
    assert not server._thread.is_alive()


async def test_master_that_fails_to_open_leaves_no_thread():
    with pytest.raises(StoreTimeoutError, match="1 of 2 clients"):
        await TCPStore(LOCAL, 0, 2, is_master=True, timeout=0.02, key=KEY)
    assert "aiocoll-store" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture(scope="session")
def started_uvloop() -> None:
    """Start uvloop once, because its first loop opens a pipe that stays until the process ends."""
    if uvloop is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.sleep(0))


@pytest.mark.usefixtures("started_uvloop")
@pytest.mark.parametrize("name", ["asyncio", "uvloop"])
def test_cancelled_program_with_a_tcp_store_leaves_no_resources(name, tmp_path):
    """Let a timeout cancel the program; the test suite's leak check then finds leftover sockets and threads."""
    if name == "uvloop" and uvloop is None:
        pytest.skip("uvloop is not installed")
    new_loop = uvloop.new_event_loop if name == "uvloop" else asyncio.new_event_loop

    async def rank(port: int) -> None:
        async with TCPStore(LOCAL, port) as store, asyncio.TaskGroup() as tasks:
            tasks.create_task(store.get("never"))
            tasks.create_task(PrefixStore("p", store).queue_pop("never"))

    async def main() -> None:
        unix = TCPStore(f"unix:{tmp_path}/socket", 0, is_master=True)
        async with TCPStore(LOCAL, 0, is_master=True) as master, unix:
            await unix.set("k", bytes(1 << 20))
            assert len(await unix.get("k")) == 1 << 20
            async with asyncio.timeout(0.05):
                await asyncio.gather(*(rank(master.port) for _ in range(4)))

    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(TimeoutError):
        runner.run(main())


async def test_exception_in_a_store_request_closes_only_its_connection(server, monkeypatch, caplog):
    async with client(server) as store:
        waiting = asyncio.create_task(store.get("k"))
        await store.num_keys()

        def fail(core, command, arguments):
            if command == "append":
                raise MemoryError("no memory")

        observe_methods(monkeypatch, StoreCore, apply=fail)
        async with client(server) as other:
            with pytest.raises(StoreUnavailableError, match="closed the connection"):
                await other.append("k", b"1")
        await store.set("k", b"1")
        assert await waiting == b"1"
    assert not [record for record in caplog.records if record.name == "asyncio"], "the event loop handled the exception"


async def test_exception_in_a_wait_reply_closes_only_the_waiting_client(server, monkeypatch):
    async with client(server) as store, client(server) as other:
        waiting = asyncio.create_task(other.get("k"))
        await other.num_keys()

        def fail(session, number, outcome, payload):
            if payload == b"wanted":
                raise MemoryError("no memory")

        observe_calls(monkeypatch, send_store_reply=fail)
        await store.set("k", b"wanted")
        with pytest.raises(StoreUnavailableError, match="closed the connection"):
            await waiting
        assert await store.check(["k"])


async def test_second_join_request_of_a_store_client_is_refused(server):
    async with raw_connection(server, authenticate=True) as (reader, writer):
        writer.write(frame(b"\x93\x01\xa4join\x91\x03") + frame(b"\x93\x02\xa4join\x91\x03"))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""


async def test_store_opening_cancelled_after_encryption_does_not_affect_the_next_opening(monkeypatch):
    """Open another store, whose socket gets the descriptor number of the cancelled store's socket."""
    server = StoreServer(LOCAL, 0, key=KEY, encryption="tls")
    server.start()

    def new_store() -> TCPStore:
        return TCPStore(LOCAL, server.port, key=KEY, encryption="tls")

    with monkeypatch.context() as patch:
        observe_methods(patch, ClientLink, connection_made=lambda *_: opening.cancel())
        opening = asyncio.create_task(new_store().open())
        await asyncio.wait([opening])
    assert opening.cancelled()
    async with new_store() as store:
        await store.set("key", b"value")
    await server.aclose()


async def test_forget_method_of_the_store_server_ends_connections_and_waits(server: StoreServer) -> None:
    async with client(server, world_size=1) as before, client(server, wait_for_workers=False) as waiting:
        await before.multi_set(["kept/1", "other"], [b"1", b"2"])
        await before.queue_push("queue", b"item")
        wait = asyncio.ensure_future(waiting.queue_pop("later"))
        await waiting.num_keys()
        await asyncio.to_thread(server.forget, "kept/")
        with pytest.raises(StoreUnavailableError, match="closed the connection"):
            await wait
        with pytest.raises(StoreUnavailableError, match="closed the connection"):
            await before.get("kept/1")
    async with client(server, wait_for_workers=False) as after:
        assert await after.list_keys() == ["kept/1"]
        assert await after.queue_len("queue") == 0
        await after.queue_push("later", b"mine")
        assert await after.queue_pop("later") == b"mine", "an earlier client took the item"
    # The server must not count clients that connected before `forget` as workers any more.
    late = client(server, world_size=2, timeout=0.2)
    with pytest.raises(StoreTimeoutError):
        await late.open()
    await late.aclose()
