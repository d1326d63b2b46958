r"""Encoding of the records in a `FileStore`'s log. `LogFile` reads and writes the file.

    header   16 bytes "aiocoll store 2\\n", 16 bytes job id
    record   length u32, chain u32, chain u32 (little endian), payload in msgpack; length is never 0

A *chain* is the CRC-32 of header, lengths and payloads from the beginning of the file. The first chain of a record ends
with its length, the second with its payload. So a record is valid only at one position of one history. If a length
reaches beyond the end of the file, its chain shows whether the record is incomplete or the length is wrong.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

import msgpack

from aiocoll.store.commands import MAX_ENTRIES, MAX_VALUE_BYTES

__all__ = ["MAGIC", "MAX_RECORD", "PREFIX_SIZE", "DamagedError", "check_payload", "decode", "parse_prefix", "seal"]

#: The first bytes of a log, which contain the version of its layout.
MAGIC: Final = b"aiocoll store 2\n"
#: Maximum bytes of a payload: a `multi_set` of a few values of the maximum size.
MAX_RECORD: Final = 32 << 20
_PREFIX = struct.Struct("<III")
PREFIX_SIZE: Final = _PREFIX.size


class DamagedError(Exception):
    """Raised for bytes in a log that no writer can have written, not even a writer killed while writing."""


def seal(payload: bytes, chain: int) -> tuple[bytes, int]:
    """Encode `payload` as the next record of a log whose checksum is `chain`; return record and new checksum."""
    sized = zlib.crc32(len(payload).to_bytes(4, "little"), chain)
    after = zlib.crc32(payload, sized)
    return _PREFIX.pack(len(payload), sized, after) + payload, after


def parse_prefix(data: bytes, start: int, chain: int) -> int:
    """Check the fixed-size prefix of the record at `start`, and return the length of the record's payload."""
    nbytes, sized, _ = _PREFIX.unpack_from(data, start)
    if zlib.crc32(data[start : start + 4], chain) != sized:
        raise DamagedError("the length of a record has a wrong checksum")
    if not 0 < nbytes <= MAX_RECORD:
        raise DamagedError(f"a record has {nbytes} bytes, the limit is {MAX_RECORD}")
    return int(nbytes)


def check_payload(data: bytes, start: int, payload: bytes) -> int:
    """Check the payload of the record at `start`; return the checksum of the log up to the end of this record."""
    _, sized, stored = _PREFIX.unpack_from(data, start)
    after = zlib.crc32(payload, sized)
    if after != stored:
        raise DamagedError(f"a record of {len(payload)} bytes has a wrong checksum")
    return after


def decode(payload: bytes) -> list[Any]:
    """Decode a payload: a command and its arguments."""
    try:
        message = msgpack.unpackb(
            payload, max_bin_len=MAX_VALUE_BYTES, max_array_len=MAX_ENTRIES, max_map_len=0, max_ext_len=0
        )
    except ValueError as exc:
        raise DamagedError("a record cannot be decoded") from exc
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise DamagedError("a record is not a list of a command and its arguments")
    return message
