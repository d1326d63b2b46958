"""Frames, the messages on a link: a header of 40 bytes, then the payload.

     0  u8   kind         FrameKind
     1  u8   flags        bit 0 EAGER: counts against the link's window of eager bytes
     2  u16  step         number of the message between this pair within the operation
     4  u32  unused       0; aligns what follows
     8  u64  group        group id, 62 bits: `aiocoll.engine.job.ids.group_id`
    16  u64  op           operation id: 0|seq, 1|hash of key and count, 2|tag and message number (top two bits first)
    24  u32  fingerprint  hash of what every rank must agree on; point-to-point: the dtype code
    28  u32  offset       start of this payload within the message, in bytes, modulo 2**32
    32  u32  length       size of this payload in bytes
    36  u32  total        size of the whole message in bytes, modulo 2**32

All fields are little-endian. A message longer than `SEGMENT` travels as several frames in order. Frames of other
messages may travel between them. A frame with `length` 0 is complete after its header.
"""

from __future__ import annotations

import struct
from enum import IntEnum

__all__ = ["EAGER", "HEADER", "HEADER_SIZE", "SEGMENT", "FrameKind", "Header", "describe"]

HEADER = struct.Struct("<BBH4xQQIIII")
HEADER_SIZE = HEADER.size

#: Largest payload of a frame. It must stay in the cache until it is reduced (half of a 1 MiB L2 cache holds the payload
#: and the array to which it is added), and it is moved in a third of `BUDGET`, the time limit of a callback. With
#: smaller payloads TCP is slower: on loopback, calls of 256 KiB are 20 to 25 % faster than calls of 128 KiB.
SEGMENT = 256 * 1024

EAGER = 1

#: The fields of a frame header: kind, flags, step, group, op, fingerprint, offset, length, total.
Header = tuple[int, int, int, int, int, int, int, int, int]


class FrameKind(IntEnum):
    """The purpose of a frame."""

    DATA = 1
    """A segment of a message that belongs to an operation."""
    READY = 2
    """No payload: the message is ready, and the sender waits for a GRANT. With a `step`, a point-to-point message could
    also go from device to device: it is one of `step` such messages in batch number `offset` of its sender."""
    GRANT = 3
    """No payload: the receiver has entered the operation. The sender may send all data of the operation."""
    WINDOW = 4
    """No payload: the receiver has consumed `offset` bytes of eager data."""
    CONTROL = 5
    """A msgpack map for the engine: reports, mismatches, revocation, goodbye."""


def describe(header: Header) -> str:
    """Describe a frame header for error messages."""
    kind, _, step, group, op, _, offset, length, total = header
    return (
        f"{FrameKind(kind).name} frame of operation {op:#x} of group {group:#x}, step {step}, "
        f"{length} bytes from {offset} of {total}"
    )
