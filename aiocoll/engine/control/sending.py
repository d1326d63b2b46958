"""Control messages as the frames that carry them."""

from __future__ import annotations

import msgpack

from aiocoll.engine.control.messages import Note
from aiocoll.transport.base import Link
from aiocoll.transport.frame import HEADER, FrameKind

__all__ = ["frame_of", "send_note"]


def send_note(link: Link, note: Note) -> None:
    """Send a control message on any link."""
    link.write(*frame_of(note))


def frame_of(note: Note) -> tuple[bytes, memoryview]:
    """Return header and payload of a control message."""
    body: bytes = msgpack.packb(note)
    return HEADER.pack(FrameKind.CONTROL, 0, 0, 0, 0, 0, 0, len(body), len(body)), memoryview(body)
