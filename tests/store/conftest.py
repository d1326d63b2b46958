"""Fixtures that open handles on one store, for every kind of store."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aiocoll.store import FileStore, HashStore, PrefixStore, RedisStore, Store, TCPStore

from ..redis_server import RedisServer
from ..redis_server import redis as redis
from .minimal_store import MinimalStore


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


KINDS = ["hash", "file", "tcp4", "redis", "minimal", "prefix-hash"]
#: Kinds of stores in which aiocoll does not limit the number of keys and the bytes, since their servers have limits.
UNLIMITED = {"redis", "rediss"}
#: Variants: stores over other sockets, and prefix stores on other stores. Only few tests use variants by default.
VARIANTS = ["tcp6", "tls", "unix", "unix-abstract", "rediss",
            *(f"prefix-{kind}" for kind in ("file", "tcp4", "redis", "minimal"))]  # fmt: skip
every_store = pytest.mark.parametrize("open_store", [*KINDS, *VARIANTS], indirect=True)


@pytest.fixture(params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in VARIANTS)])
async def open_store(request: pytest.FixtureRequest, tmp_path) -> AsyncIterator[Callable[[], Store]]:
    """Yield a function that opens another handle on one store; close all handles after the test."""
    kind = request.param.removeprefix("prefix-")
    if kind == "tcp6" and not has_ipv6():
        pytest.skip("no IPv6 loopback on this machine")
    async with contextlib.AsyncExitStack() as stack:
        if kind == "hash":
            shared = await stack.enter_async_context(HashStore())
            handle = lambda: shared  # noqa: E731
        elif kind == "file":
            handle = lambda: FileStore(tmp_path / "store")  # noqa: E731
        elif kind in ("redis", "rediss"):
            server: RedisServer = request.getfixturevalue("redis")
            url, ca = (server.url, None) if kind == "redis" else (server.tls_url, server.ca)
            handle = lambda: RedisStore(url, job=str(tmp_path), tls_ca=ca)  # noqa: E731
        elif kind == "minimal":
            entries: dict[str, bytes] = {}
            handle = lambda: MinimalStore(entries)  # noqa: E731
        else:
            host = {
                "tcp4": "127.0.0.1",
                "tls": "127.0.0.1",
                "tcp6": "::1",
                "unix": f"unix:{tmp_path}/socket",
                "unix-abstract": f"unix:@aiocoll-{tmp_path}",
            }[kind]
            how: dict[str, Any] = {"encryption": "tls"} if kind == "tls" else {}
            master = await stack.enter_async_context(TCPStore(host, 0, is_master=True, **how))
            handle = lambda: TCPStore(host, master.port, **how)  # noqa: E731

        def open_one() -> Store:
            store = handle()
            stack.push_async_callback(store.aclose)
            return PrefixStore("part", store) if request.param.startswith("prefix-") else store

        yield open_one


@pytest.fixture
def store(open_store) -> Store:
    return open_store()


@pytest.fixture
def other(open_store) -> Store:
    """Return another handle on `store`."""
    return open_store()
