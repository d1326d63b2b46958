"""The calls of a group that programs know from MPI: probes."""

from __future__ import annotations

from aiocoll.engine.matching.probe import Envelope
from aiocoll.group.dispatch.dispatcher import Timeout
from aiocoll.group.messages import Messages
from aiocoll.work import Work

__all__ = ["MpiCalls"]


class MpiCalls:
    """A part of `ProcessGroup`, which has them.

    Args:
        messages: of the group.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    # -- messages

    def probe(self, source: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Envelope]:
        """Wait for a message that could be received, and tell what it is, without receiving it.

            envelope = await pg.probe(tag=3)
            x = np.empty(envelope.count, envelope.dtype)
            await pg.recv(x, envelope.source, tag=3)

        The next receive from that source with that tag gets the message. A receive that was posted earlier, and fits,
        takes it first: a probe does not see it. Several probes see the same message, until a receive or `incoming`
        takes it; tasks that take messages of one tag from each other use `incoming`. Cancelling a probe loses nothing.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: that of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields the `Envelope`: source, tag, length and dtype of the oldest such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: no such message comes in time, or the group fails, see `ProcessGroup`.

        Cost: none of its own.
        """
        return self._messages.probe(source, tag, timeout)

    def iprobe(self, source: int | None = None, tag: int = 0) -> Envelope | None:
        """Tell what the next message is, if there is one now; otherwise as `probe`.

        It looks at what has come meanwhile, but connections are opened, and long computations of the loop go on, only
        while the program awaits something: a loop that only calls this, without an await, may wait for ever.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: that of the send.

        Returns:
            The `Envelope`; None if there is no such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: the group is closed or has failed.

        Cost: none of its own.
        """
        return self._messages.iprobe(source, tag)
