"""Flow control: limits for eager data, and their enforcement by the receiver.

An eager frame counts against the window of its link from sending until its receiver reports it as consumed. The
receiver consumes it when an operation has used it. So the bytes that wait at the receiver, plus the bytes that it has
not reported, never exceed the window of a sender that follows the protocol.
"""

from __future__ import annotations

from collections.abc import Callable

from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import EAGER, FrameKind, Header

__all__ = ["ALIGN", "ASK_WINDOW", "EARLY_GRANTS", "LEAST", "LINK_WINDOW", "WINDOW_LOT", "Waiting"]

#: Maximum number of bytes sent eagerly to one peer and not consumed by it yet.
LINK_WINDOW = 4 * 1024 * 1024
#: Minimum number of bytes for which a frame is counted: a buffered frame takes about 600 bytes even if it is empty. So
#: at most 32,768 frames are buffered, which allows several frames for each of 10,000 operations that the receiver has
#: not entered.
LEAST = 128
#: Additional window for READY frames, which announce messages, when the data window is full: the same size again.
ASK_WINDOW = LINK_WINDOW
#: Number of consumed eager bytes after which the receiver reports them: rarely, but well before the sender must wait.
WINDOW_LOT = LINK_WINDOW // 4
#: Eager segments end at multiples of this number of bytes, the largest itemsize, so that no element is divided.
ALIGN = 16
#: Maximum number of buffered GRANT frames, for operations that this rank has not entered. Each frame permits a message
#: of more than `EAGER_WINDOW` bytes, so a correct peer would be 16 GiB ahead.
EARLY_GRANTS = 1 << 16

_DATA, _GRANT = int(FrameKind.DATA), int(FrameKind.GRANT)


class Waiting:
    """The buffered frames of one peer, for operations or groups that this rank has not started.

    Args:
        peer: rank of the sender.
    """

    __slots__ = ("_checks", "_grants", "_nbytes", "_peer")

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._nbytes = 0
        self._grants = 0
        self._checks = True

    def add(self, header: Header, unreported: int) -> None:
        """Count a buffered frame. The peer counts `unreported` consumed bytes, too, until they are reported.

        Raises:
            ProtocolError: the frame exceeds the window.
        """
        kind, flags, _, _, op, _, offset, length, _ = header
        if kind == _GRANT:
            if self._grants >= EARLY_GRANTS:
                raise ProtocolError(
                    f"rank {self._peer} sent more than {EARLY_GRANTS} grants for operations that are not entered yet"
                )
            self._grants += 1
            return
        nbytes = max(length, LEAST)
        window = LINK_WINDOW if kind == _DATA else LINK_WINDOW + ASK_WINDOW
        if self._checks:
            if not flags & EAGER or (kind == _DATA and offset + length > EAGER_WINDOW):
                raise ProtocolError(
                    f"rank {self._peer} sent more bytes of operation {op:#x} than this rank had granted"
                )
            if self._nbytes + nbytes + unreported > window:
                raise ProtocolError(
                    f"rank {self._peer} sent more than the {window} bytes that may wait in this rank's buffers"
                )
        self._nbytes += nbytes

    def redeliver(self, take: Callable[..., bool], *frame: object) -> bool:
        """Pass a buffered frame to `take`, which may buffer the frame again even if the window is full now."""
        self._checks = False
        try:
            return take(*frame)
        finally:
            self._checks = True

    def remove(self, header: Header) -> int:
        """Stop counting a buffered frame; return the number of bytes for which it was counted."""
        if header[0] == _GRANT:
            self._grants -= 1
            return 0
        nbytes = max(header[7], LEAST)
        self._nbytes -= nbytes
        return nbytes
