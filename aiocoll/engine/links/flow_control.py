"""What a rank may send before it is asked to, and how its peer sees to it that it sends no more.

A frame that travels unasked counts against the window of its link from when it is sent until its receiver reports it as
consumed; it has been by the time that an operation has taken it. So what waits at a receiver, and what it has not
reported, never exceed the window of a sender that keeps to the protocol.
"""

from __future__ import annotations

from collections.abc import Callable

from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.errors import ProtocolError
from aiocoll.transport.frame import EAGER, FrameKind, Header

__all__ = ["ALIGN", "ASK_WINDOW", "EARLY_GRANTS", "LEAST", "LINK_WINDOW", "WINDOW_LOT", "Waiting"]

#: Bytes per peer that may travel unasked and wait there unread.
LINK_WINDOW = 4 * 1024 * 1024
#: Bytes that a frame counts as, at least: one that waits takes some 600, be it empty. So 32,768 may, several for each
#: of 10,000 operations that the receiver has not entered (contract).
LEAST = 128
#: What READY frames may take on top, when the window is full: they are as many again.
ASK_WINDOW = LINK_WINDOW
#: The receiver reports consumed eager bytes in lots of this size: rarely, and well before the sender runs dry.
WINDOW_LOT = LINK_WINDOW // 4
#: Eager pieces are cut at multiples of the largest itemsize, so that elements stay whole.
ALIGN = 16
#: GRANT frames that may wait for operations not entered yet. Each is for a message of more than `EAGER_WINDOW` bytes,
#: so an honest peer would have 16 GiB of them called ahead.
EARLY_GRANTS = 1 << 16

_DATA, _GRANT = int(FrameKind.DATA), int(FrameKind.GRANT)


class Waiting:
    """The frames of one peer that wait here for operations or groups that this rank has not come to.

    Args:
        peer: whose.
    """

    __slots__ = ("_checks", "_grants", "_nbytes", "_peer")

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._nbytes = 0
        self._grants = 0
        self._checks = True

    def add(self, header: Header, unreported: int) -> None:
        """Count a frame that has to wait; `unreported` bytes were consumed, which its sender has not been told.

        Raises:
            ProtocolError: no peer that keeps to the windows sends it.
        """
        kind, flags, _, _, op, _, offset, length, _ = header
        if kind == _GRANT:
            if self._grants >= EARLY_GRANTS:
                raise ProtocolError(f"rank {self._peer} has granted more than {EARLY_GRANTS} operations ahead")
            self._grants += 1
            return
        nbytes = max(length, LEAST)
        window = LINK_WINDOW if kind == _DATA else LINK_WINDOW + ASK_WINDOW
        if self._checks:
            if not flags & EAGER or (kind == _DATA and offset + length > EAGER_WINDOW):
                raise ProtocolError(f"rank {self._peer} sent more of operation {op:#x} than it was asked for")
            if self._nbytes + nbytes + unreported > window:
                raise ProtocolError(f"rank {self._peer} sent more than the {window} bytes that may wait for this rank")
        self._nbytes += nbytes

    def again(self, take: Callable[..., bool], *frame: object) -> bool:
        """Call `take` with a frame that has waited: to wait again, it may exceed its window with what came after."""
        self._checks = False
        try:
            return take(*frame)
        finally:
            self._checks = True

    def remove(self, header: Header) -> int:
        """A frame that has waited does so no more; return what it counts as."""
        if header[0] == _GRANT:
            self._grants -= 1
            return 0
        nbytes = max(header[7], LEAST)
        self._nbytes -= nbytes
        return nbytes
