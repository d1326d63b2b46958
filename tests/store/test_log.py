"""Damaged logs of `FileStore`: damage raises an error with the reason, and an incomplete last record is ignored."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import zlib
from typing import Any

import msgpack
import pytest

from aiocoll.errors import StoreError
from aiocoll.store import FileStore
from aiocoll.store.core import StoreCore
from aiocoll.store.records import MAGIC, MAX_RECORD, PREFIX_SIZE, seal

from ..internals import wrap_methods

HEADER_SIZE = 32
KEYS = ["a", "b", "c"]


@pytest.fixture
async def path(tmp_path):
    """Return the path of a closed file store with keys a, b and c."""
    path = tmp_path / "store"
    async with FileStore(path) as store:
        for key in KEYS:
            await store.set(key, key.encode() * 10)
    return path


def record_ends(whole: bytes) -> list[int]:
    """Return the end position of the log's header, and the end position of each record."""
    found = [HEADER_SIZE]
    while found[-1] < len(whole):
        found.append(found[-1] + PREFIX_SIZE + int.from_bytes(whole[found[-1] : found[-1] + 4], "little"))
    assert found[-1] == len(whole)
    return found


def log_bytes(header: bytes, *payloads: bytes) -> bytes:
    """Return the bytes of a log with this header and these record payloads, with correct checksums."""
    whole, chain = header, zlib.crc32(header)
    for payload in payloads:
        record, chain = seal(payload, chain)
        whole += record
    return whole


async def stored_keys(path) -> list[str]:
    async with FileStore(path) as store:
        return await store.list_keys()


async def assert_refused(path, content: bytes, message: str) -> None:
    """Assert that a store with this file content refuses every call and leaves the file unchanged."""
    path.write_bytes(content)
    async with FileStore(path) as store:
        for call in (store.list_keys, store.list_keys, lambda: store.set("new", b"1"), lambda: store.get("a", 0)):
            with pytest.raises(StoreError, match=message) as caught:
                await call()
            assert str(path) in str(caught.value)
            assert type(caught.value) is StoreError
    leaving = FileStore(path, world_size=1)
    with pytest.raises(StoreError, match=message):
        await leaving.aclose()
    assert path.read_bytes() == content


def damage_pattern(at: int, why: str = "") -> str:
    return rf"store is damaged at byte {at} \(.*{re.escape(why)}.*\), and the later history is lost: end the job"


async def test_store_log_with_any_flipped_byte_is_refused(path) -> None:
    whole = path.read_bytes()
    records = record_ends(whole)
    for position in range(len(whole)):
        if position < len(MAGIC):
            message = r"store is not a store( of this version of aiocoll)? \(it begins with"
        elif position < HEADER_SIZE:
            message = "store belongs to job"
        else:
            message = damage_pattern(max(end for end in records if end <= position))
        for flip in (0x01, 0xFF):
            await assert_refused(
                path, whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :], message
            )


async def test_store_log_with_any_flipped_length_bit_is_refused(path) -> None:
    """Flip each bit of each record length; some lengths then exceed the file, as in an incomplete record."""
    whole = path.read_bytes()
    for start in record_ends(whole)[:-1]:
        for bit in range(32):
            length = int.from_bytes(whole[start : start + 4], "little") ^ 1 << bit
            await assert_refused(
                path, whole[:start] + length.to_bytes(4, "little") + whole[start + 4 :], damage_pattern(start)
            )


@pytest.mark.slow
async def test_damaged_store_log_with_a_truncated_end_is_refused(path) -> None:
    """Damage an earlier record of a log that also ends with an incomplete record."""
    whole = path.read_bytes()
    first, second, *_ = record_ends(whole)
    for position in range(first, second):
        bad = whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :]
        for cut in range(second, len(whole)):
            path.write_bytes(bad[:cut])
            with pytest.raises(StoreError, match=damage_pattern(first)):
                await stored_keys(path)


@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
async def test_store_log_with_filler_bytes_in_place_of_records_is_refused(path, filler: bytes) -> None:
    """Use filler bytes that a host crash can leave in place of records which other processes may have read."""
    whole = path.read_bytes()
    for start in record_ends(whole):
        await assert_refused(path, whole[:start] + filler * 4096, damage_pattern(start))
        await assert_refused(path, whole[:start] + filler * PREFIX_SIZE, damage_pattern(start))
    last = record_ends(whole)[-2]
    for start in range(last + PREFIX_SIZE, len(whole)):
        await assert_refused(path, whole[:start] + filler * (len(whole) - start), damage_pattern(last))


async def test_store_log_end_shorter_than_a_record_is_cut_off(path) -> None:
    whole = path.read_bytes()
    for nbytes in range(1, PREFIX_SIZE):
        for filler in (b"\0", b"\xff"):
            path.write_bytes(whole + filler * nbytes)
            assert await stored_keys(path) == KEYS
            async with FileStore(path) as store:
                await store.delete_key("a")
            assert await stored_keys(path) == ["b", "c"]


async def test_rearranged_store_log_records_are_refused(path) -> None:
    whole = path.read_bytes()
    first, second, third, end = record_ends(whole)
    header, a, b, c = whole[:first], whole[first:second], whole[second:third], whole[third:end]
    await assert_refused(path, header + b + c, damage_pattern(first))
    await assert_refused(path, header + a + c, damage_pattern(second))
    await assert_refused(path, header + b + a + c, damage_pattern(first))
    await assert_refused(path, header + a + b + b + c, damage_pattern(third))
    await assert_refused(path, header + a + b + c + c, damage_pattern(end))
    other = log_bytes(header, b"\x93\xa3set\xa1z\xc4\x00", b"\x93\xa3set\xa1y\xc4\x00")
    await assert_refused(path, header + a + other[record_ends(other)[1] :], damage_pattern(second))


#: Record payloads that msgpack or the store refuses, each with a part of the error message.
INVALID_RECORDS: list[tuple[bytes, str]] = [
    *(
        (bytes([first]) + rest, "record")
        for first in (0xC1, 0x94, 0xDD, 0xDF, 0xC9, 0xD9)
        for rest in (b"", b"\xff" * 9)
    ),
    (b"\x91" * 3000, "cannot be decoded"),
    (b"\x81\x90\x01", "cannot be decoded"),
    (msgpack.packb(["set", "a", b""]) + b"\0", "cannot be decoded"),
    *(
        (msgpack.packb(message), message_part)
        for message, message_part in [
            (None, "not a list of a command and its arguments"),
            ("set", "not a list of a command and its arguments"),
            ([], "not a list of a command and its arguments"),
            ([["set"], "a", b""], "not a list of a command and its arguments"),
            ([b"set", "a", b""], "not a list of a command and its arguments"),
            ([1], "not a list of a command and its arguments"),
            (["format", "a"], "record format: not a command of this version of aiocoll"),
            (["get", "a"], "record get: not a command of this version"),
            (["queue_pop", "a"], "record queue_pop: not a command"),
            (["cancel"], "record cancel: not a command"),
            (["set"], "record set: unknown store command 'set' with 0 arguments"),
            (["set", "a", "text"], "record set: value must be bytes, got str"),
            (["set", None, b""], "record set: key must be str, got NoneType"),
            (["set", "a" * 1025, b""], "record set: key 'aaa"),
            (["add", "a", 1.5], "record add: amount must be int, got float"),
            (["add", "a", 1 << 63], "record add: amount 9223372036854775808 does not fit 64 bits"),
            (["add", "text", 1], "record add: add: key 'text' holds b'text', which is not a decimal number"),
            (["multi_set", ["a"], []], "record multi_set: multi_set got 1 keys and 0 values"),
            (["multi_set", "a", b""], "record multi_set: keys must be a list, got str"),
            (["multi_set", [["a"]], [b""]], "record multi_set: key must be str, got list"),
            (["leave", 1], "record leave: not a command"),
        ]
    ),
]


@pytest.mark.parametrize(
    ("payload", "message_part"), INVALID_RECORDS, ids=[f"{number}" for number in range(len(INVALID_RECORDS))]
)
async def test_invalid_store_log_record_contents_are_refused(path, payload: bytes, message_part: str) -> None:
    whole = log_bytes(path.read_bytes()[:HEADER_SIZE], msgpack.packb(["set", "text", b"text"]), payload)
    await assert_refused(path, whole, damage_pattern(record_ends(whole)[1], message_part))


async def test_store_log_record_over_the_size_limit_is_refused(path) -> None:
    header = path.read_bytes()[:HEADER_SIZE]
    prefix = (MAX_RECORD + 1).to_bytes(4, "little")
    sized = zlib.crc32(prefix, zlib.crc32(header)).to_bytes(4, "little")
    await assert_refused(path, header + prefix + sized + bytes(100), rf"a record has {MAX_RECORD + 1} bytes, the limit")


async def test_store_file_truncated_after_a_read_is_refused(path) -> None:
    """Check that a process which has read the removed records refuses all further reads and writes."""
    whole = path.read_bytes()
    *_, third, end = record_ends(whole)
    async with FileStore(path) as old:
        assert await old.list_keys() == KEYS
        path.write_bytes(whole[:third])
        with pytest.raises(
            StoreError, match=rf"damaged at byte {end} \(the file has {third} bytes, fewer than have been read"
        ):
            await old.set("d", b"")
        assert path.read_bytes() == whole[:third]
    async with FileStore(path) as old, FileStore(path) as new:
        assert await old.list_keys() == KEYS[:2]
        path.write_bytes(whole[: record_ends(whole)[1]])
        for letter in (b"d", b"e", b"f", b"g"):
            await new.set("d", letter * 10)
        with pytest.raises(StoreError, match=damage_pattern(third)):
            await old.list_keys()


async def test_apparent_damage_of_a_store_log_is_checked_again_under_the_lock(path) -> None:
    """Let the reader find a mixture of old and new bytes, as while a writer replaces an incomplete record."""
    whole = path.read_bytes()
    async with FileStore(path) as reader:
        with path.open("rb+") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            path.write_bytes(whole[:-1] + b"?")
            assert await reader.get("b", 0) == b"b" * 10
            waiting = asyncio.create_task(reader.get("c", 20))
            await asyncio.sleep(0)
            path.write_bytes(whole)
            assert await waiting == b"c" * 10
            path.write_bytes(whole + bytes(100))
            assert await reader.get("c", 0) == b"c" * 10
            waiting = asyncio.create_task(reader.get("d", 20))
            await asyncio.sleep(0)
        with pytest.raises(StoreError, match=damage_pattern(len(whole))):
            await waiting


async def test_reader_of_a_half_replaced_store_log_end_recovers(path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reader see only some of the bytes that a writer is writing over an incomplete record."""
    whole = path.read_bytes()
    torn = whole[: record_ends(whole)[-2]] + seal(b"x" * 40, 7)[0][:-1]
    pread = os.pread
    for old in range(record_ends(whole)[-2], len(torn)):
        mixed = [whole[:old] + torn[old:]]

        def read_mixture(fd: int, nbytes: int, at: int, mixed: list[bytes] = mixed) -> bytes:
            return mixed[0][at : at + nbytes] if at >= HEADER_SIZE and mixed else pread(fd, nbytes, at)

        async with FileStore(path) as reader:
            with monkeypatch.context() as patch, path.open("rb") as writer:
                patch.setattr(os, "pread", read_mixture)
                fcntl.flock(writer, fcntl.LOCK_EX)
                assert await reader.get("b", 0) == b"b" * 10
            mixed.clear()
            assert await reader.list_keys() == KEYS


@pytest.mark.parametrize("interrupted", ["packb", "pwrite", "before pwrite"])
async def test_interrupted_call_of_a_file_store_keeps_its_history(
    path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    pwrite = os.pwrite

    def interrupt(*args: Any) -> Any:
        if interrupted == "pwrite":
            pwrite(*args)
        raise MemoryError

    async with FileStore(path) as store, FileStore(path) as other:
        with monkeypatch.context() as patch:
            patch.setattr(*((msgpack, "packb") if interrupted == "packb" else (os, "pwrite")), interrupt)
            with pytest.raises(MemoryError):
                await store.queue_push("q", b"1")
        expected = int(interrupted == "pwrite")
        assert [await each.queue_len("q") for each in (store, other)] == [expected, expected]
        await store.queue_push("q", b"2")
        assert [await each.queue_len("q") for each in (store, other)] == [expected + 1, expected + 1]


async def test_interrupted_replay_of_a_store_log_applies_records_once(path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FileStore(path) as writer:
        for _ in range(3):
            await writer.add("n", 1)

    def interrupt(apply: Any, core: StoreCore, command: str, arguments: tuple[Any, ...]) -> Any:
        apply(core, command, arguments)
        if core.changes == 5:
            raise MemoryError

    async with FileStore(path) as reader:
        with monkeypatch.context() as patch:
            wrap_methods(patch, StoreCore, apply=interrupt)
            with pytest.raises(MemoryError):
                await reader.get("n")
        assert await reader.get("n") == b"3"


async def test_error_names_an_unreadable_store_file(path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(5, "Input/output error")

    async with FileStore(path) as store:
        assert await store.list_keys() == KEYS
        for name in ("fstat", "pread"):
            async with FileStore(path) as writer:
                await writer.set("a", b"")
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fail)
                with pytest.raises(StoreError, match=r"cannot read .*store: Input/output error"):
                    await store.list_keys()
        assert await store.list_keys() == KEYS
