r"""The bytes of a store's log, without the file: `LogFile` reads and writes them.

    header   16 bytes "aiocoll store 2\\n", 16 bytes job id
    record   length u32, chain u32, chain u32 (little endian), payload in msgpack; length is never 0

A *chain* is the CRC-32 of header, lengths and payloads from the beginning of the file: the first one of a record ends
with its length, the second with its payload. So a record is valid at one position of one history only, and a length
that reaches beyond the end of the file is either right, and the record incomplete, or known to be wrong.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

import msgpack

from aiocoll.store.commands import MAX_ENTRIES, MAX_VALUE_BYTES

__all__ = ["MAGIC", "MAX_RECORD", "PREFIX_SIZE", "DamagedError", "check_payload", "decode", "parse_prefix", "seal"]

#: The number is that of this layout.
MAGIC: Final = b"aiocoll store 2\n"
#: Bytes of a payload; a multi_set of a few of the largest values.
MAX_RECORD: Final = 32 << 20
_PREFIX = struct.Struct("<III")
PREFIX_SIZE: Final = _PREFIX.size


class DamagedError(Exception):
    """Bytes that no writer of this log has written, not even one that was killed while writing."""


def seal(payload: bytes, chain: int) -> tuple[bytes, int]:
    """Return `payload` as a record after a history with that `chain`, and the chain after it."""
    sized = zlib.crc32(len(payload).to_bytes(4, "little"), chain)
    after = zlib.crc32(payload, sized)
    return _PREFIX.pack(len(payload), sized, after) + payload, after


def parse_prefix(data: bytes, start: int, chain: int) -> int:
    """Return the length of the payload of the record at `start`, whose prefix is complete."""
    nbytes, sized, _ = _PREFIX.unpack_from(data, start)
    if zlib.crc32(data[start : start + 4], chain) != sized:
        raise DamagedError("a record's length does not have its checksum")
    if not 0 < nbytes <= MAX_RECORD:
        raise DamagedError(f"a record of {nbytes} bytes, the limit is {MAX_RECORD}")
    return int(nbytes)


def check_payload(data: bytes, start: int, payload: bytes) -> int:
    """Return the chain after the record at `start`, whose prefix was parsed and whose payload is complete."""
    _, sized, stored = _PREFIX.unpack_from(data, start)
    after = zlib.crc32(payload, sized)
    if after != stored:
        raise DamagedError(f"a record of {len(payload)} bytes does not have its checksum")
    return after


def decode(payload: bytes) -> list[Any]:
    """Return the message in a payload: a command and its arguments."""
    try:
        message = msgpack.unpackb(
            payload, max_bin_len=MAX_VALUE_BYTES, max_array_len=MAX_ENTRIES, max_map_len=0, max_ext_len=0
        )
    except ValueError as exc:
        raise DamagedError("a record that cannot be decoded") from exc
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise DamagedError("a record that is not a command")
    return message
