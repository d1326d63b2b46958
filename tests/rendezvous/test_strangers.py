"""Tests of clients without the job key or with false claims: ranks refuse such clients and are not disturbed."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import AuthenticationError, GroupOptions, RendezvousError, new_group
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    VERDICT_SIZE,
    ClientHandshake,
    ConnKind,
    HandshakeRefusedError,
    Identity,
    job_id,
)
from aiocoll.security.unproven_connections import MIN_PLACES
from aiocoll.store import HashStore, StoreServer, TCPStore
from aiocoll.transport.base import Card, Link
from aiocoll.transport.frame import HEADER, FrameKind
from aiocoll.transport.shm import dial
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.transport.stream.transport import StreamTransport
from tests.chaos.proxy import Proxy, recorded_connection_kinds  # noqa: F401

from ..internals import comm_of

KEY = b"k" * 32
OTHER = b"another key of this length"
CONTROL, DATA = ConnKind.CONTROL, ConnKind.DATA
NOBODY = 65534
#: Seconds for which a peer without the key waits, and within which the rank must have refused it.
LONG_ENOUGH = 2.5


class Rank:
    """A listening transport that keeps its accepted links, and receives the frames of these links."""

    def __init__(self, number: int, flavour: str, world_size: int = 2) -> None:
        runtime = Runtime(asyncio.get_running_loop())
        self.transport = StreamTransport(runtime, number, world_size, "job", KEY, StreamOptions(transport=flavour))
        self.transport.accepted = self.take
        self.card: Card = {}
        self.links: list[Link] = []
        self.errors: asyncio.Queue[Exception | None] = asyncio.Queue()

    def take(self, link: Link) -> None:
        link.sink = self
        link.start()
        self.links.append(link)

    def route(self, link: Link, header: Any) -> None:
        return None

    def deliver(self, link: Link, header: Any, payload: memoryview | None) -> None:
        raise AssertionError("received a frame from a stranger")

    def lost(self, link: Link, error: Exception | None) -> None:
        self.errors.put_nowait(error)


@asynccontextmanager
async def listening_rank(flavour: str, number: int = 0) -> AsyncIterator[Rank]:
    rank = Rank(number, flavour)
    rank.card = await (rank.transport.listen() if flavour == "unix" else rank.transport.listen_tcp("127.0.0.1"))
    try:
        yield rank
    finally:
        for link in rank.links:
            link.close()
        await rank.transport.aclose()


def socket_address(card: Card) -> tuple[int, Any]:
    if card["unix"]:
        return socket.AF_UNIX, address.unix_address(card["unix"])
    return socket.AF_INET, tuple(card["tcp"])


async def connected_socket(family: int, target: Any) -> socket.socket:
    return await address.reach(asyncio.get_running_loop(), family, target)


async def read(sock: socket.socket, nbytes: int) -> bytes:
    """Return `nbytes` received bytes, or fewer if the peer closes the connection."""
    data = b""
    try:
        while len(data) < nbytes and (
            part := await asyncio.get_running_loop().sock_recv(sock, min(nbytes - len(data), 1 << 16))
        ):
            data += part
    except ConnectionResetError:
        pass
    return data


async def prove_key(sock: socket.socket, identity: Identity) -> None:
    """Carry out the client's part of a handshake with the correct key."""
    client = ClientHandshake(identity, KEY, os.urandom)
    sock.send(client.hello())
    sock.send(client.prove(await read(sock, CHALLENGE_SIZE)))
    sock.send(client.confirm(await read(sock, VERDICT_SIZE)))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- keys


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp", "shm"])
async def test_ranks_with_different_keys_do_not_meet(transport: str) -> None:
    """Run all pairs of ranks concurrently, since rank 0 waits until its timeout."""
    await asyncio.gather(
        *(assert_ranks_do_not_meet(transport, *keys) for keys in [(KEY, OTHER), (KEY, None), (None, KEY)])
    )


async def assert_ranks_do_not_meet(transport: str, first: bytes | None, second: bytes | None) -> None:
    store = HashStore()
    groups = [
        new_group(
            store=store,
            rank=rank,
            world_size=2,
            timeout=LONG_ENOUGH,
            options=GroupOptions(transport=transport, job_key=key),
        )
        for rank, key in enumerate((first, second))
    ]
    waiting, refused = await asyncio.gather(*groups, return_exceptions=True)
    assert isinstance(waiting, RendezvousError)
    assert isinstance(refused, AuthenticationError)
    assert ", but the other end did not prove that it holds this job's key" in str(refused)
    assert "AIOCOLL_JOB_KEY" in str(refused)
    await store.aclose()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_on_a_non_loopback_address_needs_a_job_key(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCOLL_JOB_KEY_FILE", raising=False)
    with pytest.raises(AuthenticationError, match=r"there is no job key: .*`aiocoll run`.*token_hex"):
        await new_group(init_method="tcp://192.0.2.1:29500", rank=rank, world_size=2, timeout=5)


async def test_listener_for_other_machines_needs_a_job_key() -> None:
    store = HashStore()
    options = GroupOptions(transport="tcp", bind="any")
    groups = [new_group(store=store, rank=rank, world_size=2, timeout=5, options=options) for rank in range(2)]
    for result in await asyncio.gather(*groups, return_exceptions=True):
        assert isinstance(result, AuthenticationError)
        assert "0.0.0.0 can be reached from other machines, and there is no job key" in str(result)
        assert "aiocoll run" in str(result)
    await store.aclose()


async def test_child_processes_do_not_inherit_the_job_key(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr("aiocoll.rendezvous.new_group._keys", {})
    monkeypatch.setenv("AIOCOLL_JOB_KEY", KEY.decode())
    look = [sys.executable, "-c", "import os; print(*(name for name in os.environ if 'JOB_KEY' in name))"]
    method = f"tcp://127.0.0.1:{port}"
    async with new_group(init_method=method, rank=0, world_size=1):
        assert "AIOCOLL_JOB_KEY" not in os.environ
        child = await asyncio.create_subprocess_exec(*look, stdout=subprocess.PIPE)
        assert await child.communicate() == (b"\n", None)
        # The process keeps the key, which it has removed from its environment, for later groups.
        with pytest.raises(AuthenticationError, match="did not prove"):
            await TCPStore("127.0.0.1", port, timeout=5, key=OTHER).open()
    async with new_group(init_method=method, rank=0, world_size=1):
        store = TCPStore("127.0.0.1", port, timeout=5, key=KEY)
        assert await store.num_keys() > 0
        await store.aclose()


# -- false claims


@pytest.mark.parametrize("kind", [CONTROL, DATA])
@pytest.mark.parametrize("flavour", ["unix", "tcp"])
@pytest.mark.usefixtures("recorded_connection_kinds")
async def test_replayed_handshake_opens_no_link(flavour: str, kind: ConnKind) -> None:
    async with listening_rank(flavour) as rank, listening_rank(flavour, 1) as peer:
        async with Proxy(*socket_address(rank.card), None) as proxy:
            card = {**rank.card, "unix": proxy.name} if flavour == "unix" else {**rank.card, "tcp": proxy.endpoint}
            link = await peer.transport.connect(0, card, kind)
            while not rank.links:  # noqa: ASYNC110
                await asyncio.sleep(0)
            recorded = bytes(proxy.said[kind, True])
            link.close()
            rank.links.pop().close()
        with await connected_socket(*socket_address(rank.card)) as sock:
            sock.send(recorded)
            assert (await read(sock, 1 << 20))[CHALLENGE_SIZE:] == bytes(VERDICT_SIZE)
        assert rank.links == []


@pytest.mark.usefixtures("recorded_connection_kinds")
async def test_replayed_store_requests_do_not_change_the_store() -> None:
    server = StoreServer(key=KEY)
    endpoint = server.start()
    async with Proxy.tcp(endpoint, None) as proxy:
        async with TCPStore(*proxy.endpoint, key=KEY) as store:
            assert await store.add("n", 1) == 1
        recorded = bytes(proxy.said[ConnKind.STORE, True])
    with await connected_socket(socket.AF_INET, endpoint) as sock:
        sock.send(recorded)
        assert (await read(sock, 1 << 20))[CHALLENGE_SIZE:] == bytes(VERDICT_SIZE)
    async with TCPStore(*endpoint, key=KEY) as store:
        assert await store.get("n") == b"1"
    await server.aclose()


@pytest.mark.parametrize("kind", [CONTROL, DATA])
@pytest.mark.parametrize("flavour", ["unix", "tcp"])
async def test_reflected_handshake_challenge_is_refused(flavour: str, kind: ConnKind) -> None:
    """Let a rank dial itself, as if an attacker reflected its challenge, so that it would prove the key to itself."""
    async with listening_rank(flavour, 1) as rank:
        with pytest.raises(HandshakeRefusedError, match="rank 1 and rank 1 of 2 cannot be peers"):
            await rank.transport.connect(0, rank.card, kind)
        assert rank.links == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(ConnKind))
async def test_echoed_handshake_is_refused(kind: ConnKind) -> None:
    """Let the peer send each received message back in place of its own message."""
    loop = asyncio.get_running_loop()
    listener = address.open_tcp("127.0.0.1")

    async def echo() -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            with sock:
                for size in (HELLO_SIZE, PROOF_SIZE):
                    sock.send(await read(sock, size))
                assert await read(sock, 1) == b""

    with listener:
        echoing = asyncio.create_task(echo())
        async with listening_rank("tcp", 1) as rank:
            if kind is ConnKind.STORE:
                calling = TCPStore(*listener.getsockname(), timeout=5, key=KEY).open()
            else:
                calling = rank.transport.connect(0, {**rank.card, "tcp": listener.getsockname()}, kind)
            with pytest.raises(AuthenticationError, match="did not prove that it holds this job's key"):
                await calling
        echoing.cancel()
        await asyncio.wait([echoing])
        assert echoing.cancelled()


# -- other users


@contextmanager
def process_of_nobody(code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `code` in a process of an unprivileged user; the variable `sock` is a unix socket."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    start = f"import os, socket, sys; os.setuid({NOBODY}); sock = socket.socket(socket.AF_UNIX); "
    command = [sys.executable, "-c", start + code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_process_of_another_user_cannot_connect_to_a_unix_socket() -> None:
    code = "sock.connect('\\0' + sys.argv[1][1:]); sock.send(bytes(72)); print(sock.recv(1))"

    async def attempt(name: str) -> None:
        with process_of_nobody(code, name) as process:
            out, _ = await asyncio.to_thread(process.communicate, timeout=30)
        # The rank closes without reading: the client gets a reset, or an end of file if its message arrives later.
        assert out.strip() in (b"b''", b"")

    async with listening_rank("unix") as rank:
        await attempt(rank.card["unix"])
        assert not rank.transport._serving
    server = StoreServer("unix:@aiocoll-test-nobody", key=KEY)
    server.start()
    await attempt("@aiocoll-test-nobody")
    await server.aclose()


async def test_socket_of_another_user_is_refused() -> None:
    name = f"@aiocoll-test-{os.urandom(8).hex()}"
    code = "sock.bind('\\0' + sys.argv[1][1:]); sock.listen(); print('ready', flush=True); sys.stdin.read()"
    with process_of_nobody(code, name) as process:
        assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
        async with listening_rank("unix", 1) as rank:
            with pytest.raises(AuthenticationError, match=f"{name} belongs to user {NOBODY}, not to this user"):
                await rank.transport.connect(0, {**rank.card, "unix": name}, DATA)
        with pytest.raises(AuthenticationError, match=f"unix socket belongs to user {NOBODY}, not to this user"):
            await TCPStore(f"unix:{name}", 0, timeout=5, key=KEY).open()


# -- lengths


async def test_announced_frame_length_allocates_no_memory_in_a_store() -> None:
    """Let clients announce the longest permitted frame, and send nothing of the frame body."""
    server = StoreServer(key=KEY)
    endpoint = server.start()
    identity = Identity(job_id(""), 0, -1, 0, ConnKind.STORE)
    socks = []
    before = resident_bytes()
    for _ in range(32):
        socks.append(await connected_socket(socket.AF_INET, endpoint))
        await prove_key(socks[-1], identity)
        socks[-1].send(struct.pack("!I", 16 << 20))
    async with TCPStore(*endpoint, key=KEY) as store:
        await store.set("large", bytes(8 << 20))  # this client sends its whole frame
        assert await store.get("large") == bytes(8 << 20)
    # The clients have announced 512 MiB in total. The correct client has sent only 8 MiB.
    assert resident_bytes() - before < 100 << 20
    for sock in socks:
        sock.close()
    await server.aclose()


@pytest.mark.parametrize("flavour", ["unix", "tcp"])
async def test_announced_frame_length_allocates_no_memory_in_a_link(flavour: str) -> None:
    async with listening_rank(flavour) as rank:
        before = resident_bytes()
        for _ in range(8):
            with await connected_socket(*socket_address(rank.card)) as sock:
                await prove_key(sock, Identity(job_id("job"), 0, 1, 2, DATA))
                if flavour == "unix":
                    dial.decline(sock)
                sock.send(HEADER.pack(FrameKind.DATA, 0, 0, 0, 1, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF))
                error = await rank.errors.get()
                assert "rank 1 sent an invalid frame of kind 1 and length 4294967295" in str(error)
        assert resident_bytes() - before < 16 << 20


# -- crowds


async def test_authenticated_peer_is_not_disconnected_for_unauthenticated_clients() -> None:
    """Check a peer that has proven its key: if its connection were closed, it would take the rank for dead."""
    async with listening_rank("unix") as rank:
        with await connected_socket(*socket_address(rank.card)) as sock:
            client = ClientHandshake(Identity(job_id("job"), 0, 1, 2, DATA), KEY, os.urandom)
            sock.send(client.hello())
            sock.send(client.prove(await read(sock, CHALLENGE_SIZE)))
            last_message = client.confirm(await read(sock, VERDICT_SIZE))
            crowd = [await connected_socket(*socket_address(rank.card)) for _ in range(2 * MIN_PLACES)]
            assert await read(crowd[0], 1) == b"", "the oldest unproven client was not dropped"
            sock.send(last_message)
            dial.decline(sock)
            while not rank.links:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert rank.links[0].peer == 1
            for each in crowd:
                each.close()


@contextmanager
def raised_descriptor_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("transport", ["unix", "tcp", "shm"])
async def test_1000_unauthenticated_clients_do_not_disturb_a_job(transport: str) -> None:
    """Let silent clients and clients that send garbage connect to the store and to each rank during the whole job."""
    server = StoreServer(key=KEY)
    endpoint = server.start()
    crowd: list[socket.socket] = []

    async def visit(family: int, target: Any, count: int) -> None:
        for number in range(count):
            sock = await connected_socket(family, target)
            crowd.append(sock)
            if number % 2:
                sock.send((b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(HELLO_SIZE), b"aioc\xff")[number % 3])

    async def rank(number: int) -> None:
        store = TCPStore(*endpoint, key=KEY)
        options = GroupOptions(transport=transport, job_key=KEY)
        async with new_group(store=store, rank=number, world_size=3, options=options) as pg:
            card = comm_of(pg).endpoint.cards[number]
            visitors = asyncio.create_task(visit(*socket_address(card), 200))
            for count in (1, 1000, 100_000) * 5:
                got = await pg.allreduce(np.full(count, float(number)))
                np.testing.assert_array_equal(got, np.full(count, 3.0))
            await visitors
            assert await pg.allreduce(1) == 3
        await store.aclose()

    with raised_descriptor_limit():
        await visit(socket.AF_INET, endpoint, 200)
        await asyncio.gather(visit(socket.AF_INET, endpoint, 200), *map(rank, range(3)))
        assert len(crowd) == 1000
        for sock in crowd:
            sock.close()
        await server.aclose()
