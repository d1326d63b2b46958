"""Control messages about the CUDA devices of one group, buffered until the CUDA code is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.control.unmade_groups import keep_message

__all__ = ["DeviceInbox"]


class DeviceInbox:
    """A buffer of messages that the ranks of one group have sent about their CUDA devices.

    Args:
        ranks: the group's ranks, numbered as in the job.
        position: the rank in the group for each rank in the job.
        attempt: calls a handler with a rank's message; an exception closes the links to that rank.
    """

    def __init__(self, ranks: Sequence[int], position: Mapping[int, int], attempt: Callable[..., Any]) -> None:
        self._ranks = ranks
        self._position = position
        self._attempt = attempt
        self._kept: list[tuple[int, ControlMessage]] = []
        self._handler: Callable[[int, ControlMessage], None] | None = None

    def connect(self, receive: Callable[[int, ControlMessage], None]) -> None:
        """Set the message handler, and pass all buffered messages to it, with their senders (ranks in the group)."""
        self._handler = receive
        kept, self._kept = self._kept, []
        for peer, message in kept:
            self._attempt(self._ranks[peer], receive, peer, message)

    def handle(self, rank: int, message: ControlMessage) -> None:
        """Pass a message of `rank` (numbered as in the job) to the handler, or buffer it."""
        peer = self._position[rank]
        if self._handler is None:
            keep_message(self._kept, peer, message)
        else:
            self._handler(peer, message)
