"""Exceptions that the library raises.

    AiocollError(RuntimeError)
      GroupError                      a collective or its group failed; carries op, seq, group, ranks
        CollectiveMismatchError       ranks disagree about the operation
        CollectiveTimeoutError        also TimeoutError; some ranks did not arrive in time
        PeerLostError                 also ConnectionError; a rank died, stopped or left
        GroupRevokedError             a later call; __cause__ is the first failure
        GroupClosedError              the group was closed by this rank
        PeerProtocolError             also ProtocolError; a rank could not handle another rank's message
      StoreError
        StoreTimeoutError             also TimeoutError
        StoreUnavailableError         also ConnectionError
      RendezvousError                 the group could not be formed
      AuthenticationError             also ConnectionError; a peer did not prove that it holds the job key
      ProtocolError                   bytes that do not follow the wire protocol
      SerializationError              also ValueError; an object that cannot be sent, with its path
      BackendUnavailableError         also ImportError; names the package to install

Wrong arguments raise the built-in ``TypeError`` or ``ValueError`` at the call: nothing was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AiocollError",
    "AuthenticationError",
    "BackendUnavailableError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupClosedError",
    "GroupError",
    "GroupRevokedError",
    "PeerLostError",
    "PeerProtocolError",
    "ProtocolError",
    "RendezvousError",
    "SerializationError",
    "StoreError",
    "StoreTimeoutError",
    "StoreUnavailableError",
]


class AiocollError(RuntimeError):
    """Base class of all errors of the library."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Return the same as the inherited method. Without this definition, tools that pickle tracebacks fail for
        # classes with several bases.
        return type(self), self.args, self.__dict__


class GroupError(AiocollError):
    """A failure of a collective or of its group.

    Attributes:
        op: name of the operation in capitals, or None if no single operation is the cause.
        seq: its sequence number (int) or key (str), or None.
        group: name of the group.
        ranks: the ranks that the error refers to, ascending.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        seq: int | str | None = None,
        group: str | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.op = op
        self.seq = seq
        self.group = group
        self.ranks = tuple(sorted(ranks))


class CollectiveMismatchError(GroupError):
    """A mismatch: ranks made different calls at the same position in the group's sequence of calls."""


class CollectiveTimeoutError(GroupError, TimeoutError):
    """A timeout of a collective: some ranks did not enter it, or did not finish it, in time."""


class PeerLostError(GroupError, ConnectionError):
    """The loss of a rank.

    Attributes:
        how: ``"killed"`` (a process on its host has found that its process has ended, or it was reported dead),
            ``"left"`` (it closed its groups), ``"stopped"`` (its process, on this host, has been stopped for seconds:
            SIGSTOP, a debugger) or ``"unreachable"`` (its connection broke, or no heartbeat has arrived for seconds: it
            may be alive).
    """

    def __init__(
        self,
        message: str,
        *,
        how: str = "killed",
        op: str | None = None,
        seq: int | str | None = None,
        group: str | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(message, op=op, seq=seq, group=group, ranks=ranks)
        self.how = how


class GroupRevokedError(GroupError):
    """A call on a group that has failed before. ``__cause__`` is the first failure."""


class GroupClosedError(GroupError):
    """A call on a group that this rank has closed."""


class StoreError(AiocollError):
    """A store operation that was refused or failed."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A timeout of a store operation: keys did not appear in time. The message lists them."""


class StoreUnavailableError(StoreError, ConnectionError):
    """A store that cannot be reached."""


class RendezvousError(AiocollError):
    """A failed rendezvous: the ranks could not meet."""


class AuthenticationError(AiocollError, ConnectionError):
    """A connection whose other end did not prove that it belongs to this job."""


class ProtocolError(AiocollError):
    """Received bytes that violate the protocol."""


class PeerProtocolError(GroupError, ProtocolError):
    """A message that a rank could not handle: it violates the protocol, or handling it raised an exception."""


class SerializationError(AiocollError, ValueError):
    """An object that cannot be sent or received. The message names its type and its path."""


class BackendUnavailableError(AiocollError, ImportError):
    """A backend without its optional dependency. The message names the package to install."""
