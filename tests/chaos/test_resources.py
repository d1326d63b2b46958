"""Lack of file descriptors and full disks: errors of the library, and normal work afterwards."""

from __future__ import annotations

import asyncio
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiocoll import AiocollError, GroupOptions, StoreError, new_group
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import ConnKind
from aiocoll.store import FileStore, TCPStore
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.transport.stream.transport import StreamTransport

from ..descriptors import descriptor_limit

KEY = b"k" * 32
#: Seconds after which ranks give up a rendezvous that cannot succeed.
SHORT = 0.3


async def meet(transport: str, timeout: float) -> list[Any]:
    """Let two ranks meet at a new store, reduce an array and leave; return the outcome of each rank."""
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, key=KEY)
    stores: list[TCPStore] = [master]

    async def rank(number: int) -> str:
        options = GroupOptions(transport=transport, job_key=KEY)
        async with new_group(store=stores[number], rank=number, world_size=2, timeout=timeout, options=options) as pg:
            assert await pg.allreduce(1, timeout=timeout) == 2
        return "right"

    try:
        await master.open()
        stores.append(TCPStore("127.0.0.1", master.port, timeout=timeout, key=KEY))
        return await asyncio.gather(rank(0), rank(1), return_exceptions=True)
    except AiocollError as error:
        return [error]
    finally:
        for store in reversed(stores):
            await store.aclose()


async def run_with_few_descriptors(transports: tuple[str, ...]) -> None:
    """Allow one more descriptor in each attempt, until the ranks succeed; each attempt fails at a later step."""
    for more in range(40):
        transport = transports[more % len(transports)]
        with descriptor_limit(more):
            results = await meet(transport, SHORT)
        assert all(result == "right" or isinstance(result, AiocollError) for result in results), (more, results)
        if results == ["right", "right"]:
            break
    assert more > 8, f"the ranks succeeded with {more} descriptors"
    assert results == ["right", "right"]
    assert await meet(transport, 20) == ["right", "right"]


@pytest.mark.slow
async def test_lack_of_file_descriptors_at_any_step_is_reported() -> None:
    await run_with_few_descriptors(("unix", "tcp", "shm"))


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["unix", "tcp", "shm"])
async def test_lack_of_file_descriptors_at_any_step_is_reported_on_each_transport(transport: str) -> None:
    await run_with_few_descriptors((transport,))


@pytest.mark.parametrize("flavour", ["unix", "tcp"])
async def test_dial_without_free_file_descriptors_is_retried_at_longer_intervals(flavour: str) -> None:
    """Check that the peer is dialled again at longer intervals, because only this process lacks descriptors."""
    loop = asyncio.get_running_loop()
    pauses: list[float] = []

    class RecordingRuntime(Runtime):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            await super().sleep(seconds)

    ranks = [
        StreamTransport(RecordingRuntime(loop), rank, 2, "job", KEY, StreamOptions(transport=flavour))
        for rank in range(2)
    ]
    accepted: asyncio.Queue[Any] = asyncio.Queue()
    ranks[1].accepted = accepted.put_nowait
    card = await (ranks[1].listen() if flavour == "unix" else ranks[1].listen_tcp("127.0.0.1"))
    with descriptor_limit(0):
        dial = asyncio.create_task(ranks[0].connect(1, card, ConnKind.DATA))
        while len(pauses) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not dial.done()
    assert pauses[:5] == [0.001, 0.002, 0.004, 0.008, 0.016]
    for link in (await dial, await accepted.get()):
        link.close()
    for rank in ranks:
        await rank.aclose()


@contextmanager
def mounted_disk(path: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system of `nbytes` bytes."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", path], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"this user may not mount a file system: {made.stderr!r}")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


async def test_write_to_a_file_store_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    """Check that other ranks still read the older records, and that writes succeed once there is space again."""
    with mounted_disk(tmp_path, 256 * 1024) as path:
        (path / "hoard").write_bytes(bytes(64 * 1024))
        async with FileStore(path / "store") as store, FileStore(path / "store") as other:
            await store.set("before", b"1")
            number = 0

            async def fill() -> None:
                nonlocal number
                for number in range(100):
                    await store.set(f"large {number}", bytes(10_000))

            with pytest.raises(StoreError, match=rf"cannot write {path}/store: No space left on device; nothing was"):
                await fill()
            kept = await store.list_keys()
            assert kept == ["before", *(f"large {n}" for n in range(number))]
            assert number > 1
            assert await other.list_keys() == kept
            async with FileStore(path / "store") as newcomer:
                assert await newcomer.get(f"large {number - 1}") == bytes(10_000)
            (path / "hoard").unlink()
            await other.set(f"large {number}", b"fits")
            assert await store.get(f"large {number}") == b"fits"


async def test_write_to_a_file_store_beyond_the_file_size_limit_is_refused(tmp_path: Path) -> None:
    """Limit the file size: the kernel writes up to the limit, which leaves an incomplete record."""
    path = tmp_path / "store"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with FileStore(path) as store, FileStore(path) as other:
        await store.set("before", b"1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5000, limits[1]))
        try:
            with pytest.raises(StoreError, match=rf"cannot write {path}: .*; nothing was changed"):
                await store.set("large", bytes(10_000))
            assert await store.list_keys() == await other.list_keys() == ["before"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        await other.set("large", bytes(10_000))
        assert await store.get("large") == bytes(10_000)


async def test_rendezvous_on_a_full_disk_raises_a_store_error(tmp_path: Path) -> None:
    with mounted_disk(tmp_path, 64 * 1024) as path:
        (path / "hoard").write_bytes(bytes(64 * 1024))
        groups = [
            new_group(init_method=f"file://{path}/store", rank=rank, world_size=2, timeout=SHORT) for rank in range(2)
        ]
        results = await asyncio.gather(*groups, return_exceptions=True)
        assert [type(result) for result in results] == [StoreError, StoreError]
        assert all(f"cannot write {path}/store: No space left on device" in str(result) for result in results)
