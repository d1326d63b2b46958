"""Tests of `FileStore` beyond the store contract: the shared file, its permissions and its removal."""

import asyncio
import fcntl
import os
import subprocess
import sys

import pytest

from aiocoll.errors import StoreError, StoreTimeoutError, StoreUnavailableError
from aiocoll.store import FileStore, TCPStore

HEADER_SIZE = 32


async def stored_keys(path) -> list[str]:
    async with FileStore(path) as store:
        return await store.list_keys()


@pytest.fixture
async def log(tmp_path):
    """Return the path of a closed file store with keys a, b and c, and the file size after each record."""
    path = tmp_path / "store"
    sizes = [HEADER_SIZE]
    async with FileStore(path) as store:
        for key in "abc":
            await store.set(key, key.encode() * 10)
            sizes.append(path.stat().st_size)
    return path, sizes


async def test_incomplete_last_record_of_a_file_store_is_cut_off(log):
    path, sizes = log
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        intact = list("abc")[: sum(cut >= size for size in sizes[1:])]
        assert await stored_keys(path) == intact
        async with FileStore(path) as writer, FileStore(path) as reader:
            await reader.list_keys()
            await writer.set("new", b"1")
            assert await reader.list_keys() == [*intact, "new"]
        assert await stored_keys(path) == [*intact, "new"]


async def test_commands_that_change_nothing_are_not_written_to_the_store_file(log):
    path, sizes = log
    async with FileStore(path) as store:
        await store.get("a")
        await store.check(["x"])
        await store.delete_key("x")
        await store.compare_set("x", b"1", b"2")
        await store.queue_len("q")
        await store.set("a", b"a" * 10)
    assert path.stat().st_size == sizes[-1]


async def test_new_store_file_is_private(tmp_path):
    async with FileStore(tmp_path / "store") as store:
        await store.set("k", b"")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600


async def test_symlink_as_store_file_is_refused(tmp_path, log):
    link = tmp_path / "link"
    link.symlink_to(log[0])
    with pytest.raises(StoreError, match="link is a symbolic link, which could point anywhere"):
        await FileStore(link).list_keys()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
async def test_store_file_that_other_users_can_access_is_refused(log, mode):
    path, _ = log
    path.chmod(mode)
    with pytest.raises(StoreError, match=f"can be opened by other users \\(mode {mode:04o}\\): run chmod 600"):
        await FileStore(path).list_keys()


async def test_store_file_of_another_user_is_refused(log, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=r"belongs to user \d+, not to this user \(\d+\): use another path"):
        await FileStore(log[0]).list_keys()


async def test_file_that_is_not_a_store_is_refused_and_kept(tmp_path):
    path = tmp_path / "notes"
    path.write_bytes(b"my notes")
    path.chmod(0o600)
    with pytest.raises(StoreError, match="notes is not a store \\(it begins with b'my notes'\\)"):
        await FileStore(path).set("k", b"")
    assert path.read_bytes() == b"my notes"
    with pytest.raises(StoreError, match=r"cannot open the store file .*: Is a directory"):
        await FileStore(tmp_path).set("k", b"")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(StoreError, match="fifo is not a regular file"):
        await FileStore(fifo).set("k", b"")


async def test_store_file_of_another_job_is_refused(tmp_path):
    async with FileStore(tmp_path / "store", job="yesterday") as store:
        await store.set("k", b"")
    with pytest.raises(StoreError, match=r"belongs to job [0-9a-f]{32}, this is job [0-9a-f]{32}: remove the file"):
        await FileStore(tmp_path / "store", job="today").get("k")


async def test_last_member_removes_the_store_file(tmp_path):
    path = tmp_path / "store"
    members = [FileStore(path, world_size=3) for _ in range(3)]
    await members[0].set("k", b"")
    for member in members:
        assert path.exists()
        await member.aclose()
        await member.aclose()
    assert not path.exists()


@pytest.mark.parametrize("world_size", [0, -2])
async def test_file_store_refuses_an_invalid_world_size(tmp_path, world_size):
    for make in (
        lambda: FileStore(tmp_path / "store", world_size),
        lambda: TCPStore("localhost", 0, world_size, is_master=True),
    ):
        with pytest.raises(ValueError, match=f"world_size must be at least 1, or -1 for any number, got {world_size}"):
            make()


async def test_store_file_without_a_world_size_is_kept(log):
    assert log[0].exists()


async def test_file_store_accepts_arguments_of_c10d(tmp_path):
    async with FileStore(file_name=tmp_path / "store", world_size=-1) as store:
        await store.set("k", b"")
        assert store.path == str(tmp_path / "store")
    assert (tmp_path / "store").exists()
    async with TCPStore(host_name="localhost", port=0, world_size=-1, is_master=True, timeout=60) as tcp:
        assert await tcp.num_keys() == 0


async def test_removal_of_the_store_file_ends_pending_waits(log):
    async with FileStore(log[0]) as store:
        waiting = asyncio.create_task(store.get("never"))
        await store.list_keys()
        log[0].unlink()
        with pytest.raises(StoreUnavailableError, match="store was removed while the store was in use"):
            await waiting


async def test_error_names_a_file_lock_that_is_held_for_too_long(log):
    path, _ = log
    with path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        store = FileStore(path, timeout=0.01)
        assert await store.get("a") == b"a" * 10, "reading waited for the lock"
        with pytest.raises(StoreTimeoutError, match=r"another process held the lock of .*store for 0\.01 s"):
            await store.set("k", b"")
        fcntl.flock(holder, fcntl.LOCK_UN)
        await store.set("k", b"")
        await store.aclose()


async def test_full_disk_fails_only_the_writing_call_of_a_file_store(log, monkeypatch):
    path, _ = log
    before = path.read_bytes()
    pwrite = os.pwrite
    async with FileStore(path) as store, FileStore(path) as other:
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: len(data) // 2], at))
            with pytest.raises(StoreError, match=r"cannot write .*: No space left on device; nothing was changed"):
                await store.set("d", b"4")
        assert path.read_bytes() == before
        assert await store.list_keys() == ["a", "b", "c"]
        await other.set("e", b"5")
        assert await store.list_keys() == ["a", "b", "c", "e"]


async def test_long_history_of_a_file_store_is_replayed_once_for_concurrent_tasks(tmp_path):
    path = tmp_path / "store"
    async with FileStore(path) as writer:
        for i in range(2000):
            await writer.set(f"key{i}", b"x" * 20)
    async with FileStore(path) as reader:
        counts = await asyncio.gather(*(reader.num_keys() for _ in range(5)))
    assert counts == [2000] * 5


ADDING_PROGRAM = """
import asyncio, sys
from aiocoll.store import FileStore, TCPStore

async def main():
    async with FileStore(sys.argv[1], world_size=3) as store:
        await store.add("ready", 1)
        await store.wait(["go"])
        for i in range(300):
            await store.add("n", 1)
            await store.queue_push("q", sys.argv[2].encode())
        await store.add("done", 1)

asyncio.run(main())
"""


async def test_file_store_counts_every_addition_of_concurrent_processes(tmp_path):
    path = tmp_path / "store"
    # Remove asyncio's debug mode, which reports slow callbacks on a busy machine.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", ADDING_PROGRAM, str(path), name, stderr=subprocess.PIPE, env=environ
        )
        for name in "xy"
    ]
    async with FileStore(path, world_size=3, timeout=60) as store:
        await store.set("go", b"")
        popped = [await store.queue_pop("q") for _ in range(600)]
        errors = [(await process.communicate())[1] for process in processes]
        assert errors == [b"", b""]
        assert await store.get("n") == b"600"
        assert (popped.count(b"x"), popped.count(b"y")) == (300, 300)
    assert not path.exists()
