"""Control messages about the CUDA devices of one group: buffered until the device code is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.unmade_groups import keep_message

__all__ = ["DeviceInbox"]


class DeviceInbox:
    """Messages of the ranks of one group about their devices.

    Args:
        ranks: of the group, numbered as in the job.
        position: rank in the group by rank in the job.
        attempt: calls a handler with a rank's message; an exception ends the links of that rank.
    """

    def __init__(self, ranks: Sequence[int], position: Mapping[int, int], attempt: Callable[..., Any]) -> None:
        self._ranks = ranks
        self._position = position
        self._attempt = attempt
        self._kept: list[tuple[int, ControlMessage]] = []
        self._hear: Callable[[int, ControlMessage], None] | None = None

    def connect(self, receive: Callable[[int, ControlMessage], None]) -> None:
        """Pass messages and their senders (ranks in the group) to a handler, beginning with the buffered ones."""
        self._hear = receive
        kept, self._kept = self._kept, []
        for peer, message in kept:
            self._attempt(self._ranks[peer], receive, peer, message)

    def handle(self, rank: int, message: ControlMessage) -> None:
        """Handle a message of a rank (numbered as in the job)."""
        peer = self._position[rank]
        if self._hear is None:
            keep_message(self._kept, peer, message)
        else:
            self._hear(peer, message)
