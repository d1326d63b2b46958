"""Every exception the library raises on purpose.

    AiocollError(RuntimeError)
      GroupError                      a collective or its group failed; carries op, seq, group, ranks
        CollectiveMismatchError       ranks disagree about the operation
        CollectiveTimeoutError        also TimeoutError; some ranks did not arrive in time
        PeerLostError                 also ConnectionError; a rank died, stopped or left
        GroupRevokedError             a later call; __cause__ is the first failure
        GroupClosedError              the group was closed by this rank
        PeerProtocolError             also ProtocolError; a rank could not handle what another one sent
      StoreError
        StoreTimeoutError             also TimeoutError
        StoreUnavailableError         also ConnectionError
      RendezvousError                 the group could not be formed
      AuthenticationError             also ConnectionError; a peer did not prove that it holds the job key
      ProtocolError                   bytes that do not follow the wire protocol
      SerializationError              also ValueError; an object that cannot be sent, with its path
      BackendUnavailableError         also ImportError; says what to install

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
    """Base of every error of the library."""

    def __reduce__(self) -> tuple[Any, ...]:
        # As by default, but for tools that pickle tracebacks, too, and cannot make objects with several bases.
        return type(self), self.args, self.__dict__


class GroupError(AiocollError):
    """A collective or its group failed.

    Attributes:
        op: name of the operation in capitals, or None if no single operation is the cause.
        seq: its sequence number (int) or key (str), or None.
        group: name of the group.
        ranks: the ranks that the error is about, ascending.
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
    """Ranks called operations that do not match."""


class CollectiveTimeoutError(GroupError, TimeoutError):
    """Some ranks did not arrive, or did not finish, in time."""


class PeerLostError(GroupError, ConnectionError):
    """A rank is gone.

    Attributes:
        how: ``"killed"`` (a process of its host has found that its process is gone, or it was reported dead),
            ``"left"`` (it closed its groups), ``"stopped"`` (its process, on this host, has been stopped for seconds:
            SIGSTOP, a debugger) or ``"unreachable"`` (its connection broke, or no heartbeat has come for seconds: it
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
    """The group failed before this call; the first failure is ``__cause__``."""


class GroupClosedError(GroupError):
    """This rank has closed the group."""


class StoreError(AiocollError):
    """A store refused or could not carry out an operation."""


class StoreTimeoutError(StoreError, TimeoutError):
    """Keys did not appear in time; the message lists them."""


class StoreUnavailableError(StoreError, ConnectionError):
    """The store cannot be reached."""


class RendezvousError(AiocollError):
    """The ranks could not meet."""


class AuthenticationError(AiocollError, ConnectionError):
    """The other end did not prove that it belongs to this job."""


class ProtocolError(AiocollError):
    """The other end sent bytes that do not follow the protocol."""


class PeerProtocolError(GroupError, ProtocolError):
    """A rank could not handle a message of another rank: it breaks the protocol, or handling it raised an exception."""


class SerializationError(AiocollError, ValueError):
    """An object cannot be sent or received; the message names its type and its path."""


class BackendUnavailableError(AiocollError, ImportError):
    """An optional dependency is missing; the message says what to install."""
