"""TLS with certificates that each process makes itself: encrypted connections, and channel binding."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import socket
import ssl
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest

from aiocoll import AuthenticationError, GroupOptions, HashStore, ProcessGroup, RendezvousError, TCPStore, new_group
from aiocoll.errors import BackendUnavailableError
from aiocoll.rendezvous.same_host import encryption_at
from aiocoll.security.tls import Tls, binding, is_encrypted, make_own_contexts
from aiocoll.transport.stream.plain_stream import PlainStream
from aiocoll.transport.stream.tls_stream import TlsStream, open_tls

from .internals import comm_of

KEY = b"a key of this test and no other"


@pytest.mark.parametrize(
    ("encryption", "here", "elsewhere"), [("auto", False, True), ("tls", True, True), ("none", False, False)]
)
def test_encryption_of_a_connection_depends_on_the_option_and_the_address(
    encryption: str, here: bool, elsewhere: bool
) -> None:
    assert [is_encrypted(encryption, host) for host in ("127.0.0.1", "::1", "localhost")] == [here] * 3
    assert [is_encrypted(encryption, host) for host in ("10.0.0.1", "fd77::1", "0.0.0.0")] == [elsewhere] * 3


def another_process() -> Tls:
    return make_own_contexts.__wrapped__()


def test_each_process_creates_its_own_certificate_and_key() -> None:
    made = [another_process() for _ in range(3)]
    assert len({each.certificate for each in made}) == 3
    assert make_own_contexts() is make_own_contexts()


def test_channel_binding_is_the_hash_of_the_certificate() -> None:
    assert binding(b"x") == hashlib.sha256(b"x").digest()
    assert binding(None) == b""


async def test_socket_is_closed_if_the_peer_is_lost_before_the_tls_handshake() -> None:
    """Reset the connection before the TLS handshake, while only `wrap_socket` refers to the socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            sock, _ = listener.accept()
            sock.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with pytest.raises(ConnectionResetError):
            await open_tls(make_own_contexts(), asyncio.get_running_loop(), sock, dialled=False)
        gc.collect()  # an open socket would lead to a ResourceWarning


def test_private_key_of_a_process_is_not_written_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []

    load = ssl.SSLContext.load_cert_chain

    def record_file(context: ssl.SSLContext, certfile: str) -> None:
        loaded.append((certfile, os.stat(certfile).st_mode & 0o777))
        load(context, certfile)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", record_file, raising=False)
    another_process()
    monkeypatch.delattr(os, "memfd_create")
    another_process()
    (hidden, _), (file, mode) = loaded
    assert hidden.startswith("/proc/self/fd/")
    assert mode == 0o600
    assert not os.path.exists(file)


def test_missing_cryptography_package_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install aiocoll\[tls\]; .*encryption='none' .*every rank"):
        another_process()


@asynccontextmanager
async def connected_streams(server: Tls, client: Tls) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    loop = asyncio.get_running_loop()
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    stream_types = await asyncio.gather(
        open_tls(server, loop, ends[0], dialled=False), open_tls(client, loop, ends[1], dialled=True)
    )
    try:
        yield stream_types[0], stream_types[1]
    finally:
        for stream in stream_types:
            stream.close()


async def test_both_ends_bind_the_handshake_to_the_listeners_certificate() -> None:
    server, client = another_process(), another_process()
    async with connected_streams(server, client) as (dialled, dialling):
        assert dialled.bound == dialling.bound == binding(server.certificate)
        assert isinstance(dialled.sock, ssl.SSLSocket)
        assert dialled.sock.version() == "TLSv1.3"


@pytest.mark.parametrize(
    "received", [b"", b"aioc" + bytes(36), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b"\xff" * 99]
)
@pytest.mark.parametrize("dialled", [False, True])
async def test_tls_listener_refuses_a_client_without_tls(received: bytes, dialled: bool) -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    with far:
        far.sendall(received)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError, match="TLS: "):
            await open_tls(make_own_contexts(), asyncio.get_running_loop(), near, dialled=dialled)
        far.settimeout(5)
        with suppress(ConnectionResetError):
            while far.recv(4096):
                pass  # the refusing end sends an alert, and then closes the connection


async def test_cancelled_tls_handshake_closes_the_socket() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    with far:
        opening = asyncio.create_task(open_tls(make_own_contexts(), asyncio.get_running_loop(), near, dialled=False))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        far.settimeout(5)
        assert far.recv(1) == b""
    gc.collect()


async def test_client_with_an_old_tls_version_is_refused() -> None:
    """Use a client that supports at most TLS 1.2."""
    near, far = socket.socketpair()
    near.setblocking(False)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    opening = asyncio.create_task(open_tls(make_own_contexts(), asyncio.get_running_loop(), near, dialled=False))
    with far, pytest.raises(ssl.SSLError):
        await asyncio.to_thread(old.wrap_socket, far)
    with pytest.raises(ConnectionResetError, match="TLS: "):
        await opening


async def test_man_in_the_middle_of_a_store_connection_is_detected() -> None:
    """Simulate an attacker with its own certificate that forwards all messages between client and server."""
    between = another_process()
    pumps: set[asyncio.Task[None]] = set()
    async with TCPStore("127.0.0.1", 0, is_master=True, key=KEY, encryption="tls") as store:

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(4096):
                    writer.write(data)
            except OSError:
                pass
            finally:
                writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", store.port, ssl=between.client, server_hostname="")
            pumps.update({asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))})

        server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=between.server)
        async with server:
            port = server.sockets[0].getsockname()[1]
            client = TCPStore("127.0.0.1", port, key=KEY, encryption="tls", timeout=5)
            with pytest.raises(AuthenticationError, match="did not prove that it holds this job's key"):
                await client.open()
        if pumps:
            await asyncio.wait(pumps)


def stream_types(pg: ProcessGroup) -> set[type]:
    """Return the stream classes of all connections of a rank."""
    endpoint = comm_of(pg).endpoint
    links = [*endpoint.control._links.values(), *(channel.link for channel in comm_of(pg).channels if channel.link)]
    return {type(link._stream) for link in links}  # type: ignore[attr-defined]


def over_tcp(encryption: str, host: str) -> GroupOptions:
    """Return options for TCP, with which a rank counts as on the host `host`."""
    return GroupOptions(transport="tcp", job_key=KEY, encryption=encryption, host_id=host, bind="127.0.0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("encryption", "hosts", "expected"),
    [
        (("auto", "auto"), "ab", TlsStream),
        (("auto", "auto"), "aa", PlainStream),
        (("tls", "auto"), "aa", TlsStream),
        (("tls", "tls"), "ab", TlsStream),
        (("none", "none"), "ab", PlainStream),
        (("none", "none"), "aa", PlainStream),
    ],
)
async def test_ranks_encrypt_connections_between_hosts(encryption: tuple[str, str], hosts: str, expected: type) -> None:
    store = HashStore()

    async def rank(rank: int) -> set[type]:
        options = over_tcp(encryption[rank], hosts[rank])
        async with new_group(store=store, rank=rank, world_size=2, options=options) as pg:
            total = await pg.allreduce(np.full(1_000_000, rank + 1.0))
            assert (total == 3).all()
            assert await pg.allgather_object(rank) == [0, 1]
            return stream_types(pg)

    assert await asyncio.gather(rank(0), rank(1)) == [{expected}] * 2
    await store.aclose()


@pytest.mark.parametrize(("encryption", "expected"), [("auto", TlsStream), ("none", PlainStream)])
async def test_ranks_with_equal_host_ids_encrypt_non_loopback_connections(encryption: Any, expected: type) -> None:
    """Use equal host ids, as cloned machines have: only a loopback connection proves that the host is the same."""
    store = HashStore()
    options = GroupOptions(transport="tcp", job_key=KEY, encryption=encryption, bind="any")

    async def rank(rank: int) -> set[type]:
        async with new_group(store=store, rank=rank, world_size=2, options=options) as pg:
            assert await pg.allgather_object(rank) == [0, 1]
            return stream_types(pg)

    assert await asyncio.gather(rank(0), rank(1)) == [{expected}] * 2
    await store.aclose()


@pytest.mark.parametrize(("encryption", "expected"), [("auto", "tls"), ("none", "none"), ("tls", "tls")])
def test_connections_to_an_unknown_address_are_encrypted(encryption: Any, expected: str) -> None:
    options = GroupOptions.resolve(GroupOptions(encryption=encryption, interface="no such interface"), {})
    assert encryption_at(0, "", options) == expected


@pytest.mark.parametrize("hosts", ["aaa", "aab"])
@pytest.mark.parametrize("other", ["auto", "tls"])
async def test_different_encryption_options_of_ranks_are_reported(hosts: str, other: str) -> None:
    store = HashStore()
    encryption = (other, "none", other)

    async def rank(rank: int) -> None:
        options = over_tcp(encryption[rank], hosts[rank])
        await new_group(store=store, rank=rank, world_size=3, options=options)

    for error in await asyncio.gather(*map(rank, range(3)), return_exceptions=True):
        assert isinstance(error, RendezvousError)
        assert "rank(s) 1 have encryption='none', but rank(s) 0, 2 do not" in str(error)
    await store.aclose()


async def test_rank_without_the_cryptography_package_is_reported_to_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the rank with the package also fails, instead of waiting."""
    store = HashStore()
    make_own_contexts.cache_clear()  # as in a process that has no certificate yet
    monkeypatch.setitem(sys.modules, "cryptography", None)

    async def rank(rank: int) -> None:
        options = over_tcp("auto", "ab"[rank])
        await new_group(store=store, rank=rank, world_size=2, options=options)

    for error in await asyncio.gather(rank(0), rank(1), return_exceptions=True):
        assert isinstance(error, BackendUnavailableError | RendezvousError)
        assert "pip install aiocoll[tls]" in str(error)
    await store.aclose()
