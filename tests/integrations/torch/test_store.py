"""Tests of `TorchStore`, the aiocoll store that keeps its entries in a torch store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from aiocoll import StoreError, StoreTimeoutError, StoreUnavailableError

torch = pytest.importorskip("torch", reason="needs torch")

import torch.distributed as dist  # noqa: E402

from aiocoll.integrations.torch.store import TorchStore, host_of, is_loopback  # noqa: E402

pytestmark = pytest.mark.torch

# The first torch server of a process opens a pipe that libuv never closes. It must not count as a leak of a test.
dist.TCPStore("127.0.0.1", 0, 1, True)


@pytest.fixture(params=["hash", "file", "tcp"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TorchStore]:
    made = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20)),
    }[request.param]()
    opened = TorchStore(dist.PrefixStore("of a group", made), 20.0)
    del made
    yield opened
    await opened.aclose()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await opened.set("key", b"")


async def test_torch_store_values_can_be_any_bytes(store: TorchStore) -> None:
    await store.set("key", b"\x00\xff")
    assert await store.get("key") == b"\x00\xff"
    assert await store.check(["key"])
    assert not await store.check(["key", "missing"])
    assert await store.add("count", 3) == 3
    assert await store.add("count", -1) == 2
    assert sorted(await store.list_keys()) == ["count", "key"]
    assert await store.num_keys() == 2
    assert await store.delete_key("key")


async def test_compare_set_of_a_torch_store_succeeds_for_one_client(store: TorchStore) -> None:
    assert await store.compare_set("key", b"", b"first") == b"first"
    assert await store.compare_set("key", b"", b"second") == b"first"
    assert await store.compare_set("key", b"first", b"second") == b"second"


async def test_wait_on_a_torch_store_ends_when_the_key_is_set_or_at_its_timeout(store: TorchStore) -> None:
    waiting = asyncio.create_task(store.multi_get(["early", "late"], 20))
    await store.set("early", b"1")
    await store.set("late", b"2")
    assert await waiting == [b"1", b"2"]
    with pytest.raises(StoreTimeoutError, match="missing"):
        await store.get("missing", 0.01)


async def test_queue_calls_on_a_torch_store_are_refused(store: TorchStore) -> None:
    with pytest.raises(StoreError, match="a torch store has no queues"):
        await store.queue_pop("queue", 0.01)


def test_server_address_of_a_torch_store_is_found_behind_prefix_stores() -> None:
    server = dist.TCPStore("localhost", 0, 1, True, timedelta(seconds=20))
    assert host_of(dist.PrefixStore("a", dist.PrefixStore("b", server))) == ("localhost", server.port)
    assert TorchStore(server, 20.0).reached in ("127.0.0.1", "::1")
    assert host_of(dist.HashStore()) == ("", 0)
    assert TorchStore(dist.HashStore(), 20.0).reached == ""
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "192.0.2.1", "node1")] == [True] * 3 + [
        False
    ] * 2
