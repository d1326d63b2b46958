"""Fuzz tests of `FileStore` logs: a reader of a damaged log finds only written records, or raises `StoreError`."""

from __future__ import annotations

import asyncio
import os
import tempfile
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from aiocoll import FileStore
from aiocoll.errors import StoreError

from .budget import fuzz

#: The size of a record header in bytes. The header begins with the length of the record's payload.
PREFIX = 12
State = dict[str, bytes]


async def contents(path: Path) -> State:
    """Open the log at `path` in a new store, and return its keys and values."""
    async with FileStore(str(path)) as store:
        keys = await store.list_keys()
        return dict(zip(keys, await store.multi_get(keys), strict=True))


@cache
def written() -> tuple[bytes, list[int], list[State]]:
    """Return a valid log, the offsets after its header and after each record, and the contents at each offset."""

    async def write() -> tuple[bytes, list[int], list[State]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log"
            async with FileStore(str(path)) as store:
                await store.num_keys()
                ends, states = [], []
                for number in range(8):
                    ends.append(path.stat().st_size)
                    states.append(await contents(path))
                    await store.set(f"key {number % 5}", os.urandom(3) + bytes(number * 20))
                ends.append(path.stat().st_size)
                states.append(await contents(path))
            return path.read_bytes(), ends, states

    return asyncio.run(write())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw a damaged store log: bytes changed, records removed, repeated or moved, or the end cut off."""
    log, ends, _ = written()
    data = bytearray(log)
    for _ in range(draw(st.integers(1, 2))):
        how = draw(st.sampled_from(["flip", "set", "zero", "cut", "drop", "repeat", "swap"]))
        at = draw(st.integers(0, max(0, len(data) - 1)))
        first, second = sorted(draw(st.tuples(*[st.integers(0, len(ends) - 2)] * 2)))
        if how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "zero":
            data[at:] = bytes(len(data) - at)
        elif how == "cut":
            del data[at:]
        elif how == "drop":
            del data[ends[first] : ends[first + 1]]
        elif how == "repeat":
            data[ends[second] : ends[second]] = data[ends[first] : ends[first + 1]]
        else:
            one, two = data[ends[first] : ends[first + 1]], data[ends[second] : ends[second + 1]]
            data[ends[second] : ends[second + 1]] = one
            data[ends[first] : ends[first + 1]] = two
    return bytes(data)


def is_torn(rest: bytes) -> bool:
    """Return whether the first record in `rest` is incomplete."""
    return len(rest) < PREFIX + int.from_bytes(rest[:4], "little")


@fuzz(damaged(), examples=100)
def test_damaged_store_log_is_read_up_to_the_damage_or_refused(data: bytes) -> None:
    log, ends, states = written()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        path.chmod(0o600)
        try:
            found = asyncio.run(contents(path))
        except StoreError:
            assert data != log, "an undamaged log was refused"
            return
    # The number of records before the first changed or incomplete record.
    sound = sum(data[:end] == log[:end] for end in ends) - 1
    assert found == (states[sound] if sound >= 0 else {})
    rest = data[ends[max(sound, 0)] :] if sound >= 0 else b""
    assert not rest or is_torn(rest)
