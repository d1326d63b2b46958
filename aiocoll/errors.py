"""Exceptions that aiocoll raises.

    AiocollError(RuntimeError)
      GroupError                      a collective or its group failed; has op, seq, group, ranks
        CollectiveMismatchError       ranks disagree about the operation
        CollectiveTimeoutError        also TimeoutError; some ranks did not arrive in time
        PeerLostError                 also ConnectionError; a rank died, stopped or left
        GroupRevokedError             a later call; __cause__ is the first failure
        GroupClosedError              the group was closed by this rank
        PeerProtocolError             also ProtocolError; a rank could not handle what another one sent
      StoreError                      a store refused or could not carry out an operation
        StoreTimeoutError             also TimeoutError; keys did not appear in time
        StoreUnavailableError         also ConnectionError; the store cannot be reached
      RendezvousError                 the group could not be formed
      AuthenticationError             also ConnectionError; a peer did not prove that it has the job key
      ProtocolError                   bytes that do not follow the wire protocol
      SerializationError              also ValueError; an object that cannot be sent, with its path
      BackendUnavailableError         also ImportError; names the package to install

Wrong arguments raise the built-in ``TypeError`` or ``ValueError`` at the call, before anything is sent.
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
    """Base class of all errors of aiocoll."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Defined for tools that pickle tracebacks: by default they cannot make objects with several bases.
        return type(self), self.args, self.__dict__


class GroupError(AiocollError):
    """Failure of a collective or of its group.

    Attributes:
        op: name of the operation in capitals, or None if no single operation is the cause.
        seq: sequence number (int) or key (str) of the operation, or None.
        group: name of the group.
        ranks: the ranks that the error concerns, in ascending order.
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
    """A mismatch: ranks called different operations at the same place."""


class CollectiveTimeoutError(GroupError, TimeoutError):
    """A timeout: some ranks did not arrive, or did not finish, in time."""


class PeerLostError(GroupError, ConnectionError):
    """Loss of a rank.

    Attributes:
        how: the kind of loss.
            ``"killed"``: a process on its host has found that its process has ended, or it was reported dead.
            ``"left"``: it closed its groups.
            ``"stopped"``: its process, on this host, has been stopped for seconds by SIGSTOP or a debugger.
            ``"unreachable"``: its connection broke, or no heartbeat has arrived for seconds. It may be alive.
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
    """A call on a group that had failed before; ``__cause__`` is the first failure."""


class GroupClosedError(GroupError):
    """A call on a group that this rank has closed."""


class StoreError(AiocollError):
    """An operation that a store refused or could not carry out."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A timeout of a store: keys did not appear in time; the message lists them."""


class StoreUnavailableError(StoreError, ConnectionError):
    """A store that cannot be reached."""


class RendezvousError(AiocollError):
    """A failed rendezvous: the ranks could not meet."""


class AuthenticationError(AiocollError, ConnectionError):
    """A peer that did not prove that it belongs to this job."""


class ProtocolError(AiocollError):
    """Bytes from a peer that do not follow the protocol."""


class PeerProtocolError(GroupError, ProtocolError):
    """A message between ranks that the receiver could not handle: it breaks the protocol, or handling it raised."""


class SerializationError(AiocollError, ValueError):
    """An object that cannot be sent or received; the message names its type and its path."""


class BackendUnavailableError(AiocollError, ImportError):
    """A missing optional dependency; the message names the package to install."""
