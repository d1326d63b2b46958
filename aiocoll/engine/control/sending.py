"""Encoding of control messages as frames."""

from __future__ import annotations

import msgpack

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.transport.base import Link
from aiocoll.transport.frame import HEADER, FrameKind

__all__ = ["frame_of", "send_message"]


def send_message(link: Link, message: ControlMessage) -> None:
    """Send a control message on a data link or a control link."""
    link.write(*frame_of(message))


def frame_of(message: ControlMessage) -> tuple[bytes, memoryview]:
    """Return the header and the payload of a control message."""
    body: bytes = msgpack.packb(message)
    return HEADER.pack(FrameKind.CONTROL, 0, 0, 0, 0, 0, 0, len(body), len(body)), memoryview(body)
