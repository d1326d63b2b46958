"""Errors of a failed group: lost ranks, timeouts, exceptions. Ranks are numbered as in the group."""

from __future__ import annotations

from aiocoll.completion import Completion
from aiocoll.engine.control.messages import PROTOCOL
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.differences import called
from aiocoll.errors import CollectiveTimeoutError, GroupError, GroupRevokedError, PeerLostError, PeerProtocolError
from aiocoll.user_code import describe, original

__all__ = [
    "broken_connection_error",
    "crashed_error",
    "left_error",
    "lost_error",
    "raised_error",
    "revoked_error",
    "timed_out_error",
]


def lost_error(group: str, peer: int, detail: str, how: str) -> GroupError:
    """Return the error for a lost rank. `how` is "killed", "unreachable", "stopped" or "protocol"."""
    if how == PROTOCOL:
        return PeerProtocolError(f"group {group!r} failed: {detail}", group=group, ranks=[peer])
    state = "is gone" if how == "killed" else "is lost"
    return PeerLostError(f"rank {peer} of group {group!r} {state}: {detail}", group=group, ranks=[peer], how=how)


def broken_connection_error(group: str, rank: int, peer: int) -> PeerLostError:
    """Return the error for a broken connection between two living ranks. On both ranks, the error has the same text."""
    one, other = sorted((rank, peer))
    text = f"the connection between ranks {one} and {other} of group {group!r} broke, although both ranks are alive"
    return PeerLostError(text, group=group, ranks=[one, other], how="unreachable")


def left_error(group: str, rank: int, peer: int, completion: Completion) -> PeerLostError:
    """Return the error for a call of this rank that needs a rank which has closed the group."""
    return PeerLostError(
        f"{completion.op} on rank {rank} of group {group!r} needs rank {peer}, which has left",
        how="left",
        op=completion.op,
        seq=completion.key or completion.seq,
        group=group,
        ranks=[peer],
    )


def timed_out_error(
    group: str, rank: int, operation: Operation, missing: list[int], detail: str
) -> CollectiveTimeoutError:
    """Return the error for a collective that did not complete in time; `detail` describes the missing ranks."""
    return CollectiveTimeoutError(
        f"{operation.title()} of group {group!r} did not complete within {operation.timeout:g} s on rank {rank}, "
        f"which called {called(operation.describe())}: {detail}",
        op=operation.completion.op,
        seq=operation.completion.key or operation.completion.seq,
        group=group,
        ranks=missing,
    )


def revoked_error(group: str, rank: int, cause: GroupError) -> GroupRevokedError:
    """Return the error for a call on a group that has failed."""
    error = GroupRevokedError(
        f"group {group!r} on rank {rank} was revoked: {cause}",
        group=group,
        ranks=cause.ranks,
        op=cause.op,
        seq=cause.seq,
    )
    error.__cause__ = cause
    return error


def raised_error(group: str, rank: int, completion: Completion, error: BaseException, what: str) -> GroupError:
    """Return the error for a computation on `rank` that raised `error`; `what` names the computation."""
    name = completion.key or completion.seq
    cause = GroupError(
        f"{completion.op} (sequence {name!r}) of group {group!r} failed on rank {rank}: {what}{describe(error)}",
        op=completion.op,
        seq=name,
        group=group,
        ranks=[rank],
    )
    cause.__cause__ = original(error)
    return cause


def crashed_error(group: str, rank: int, error: Exception) -> GroupError:
    """Return the error for an unexpected exception in library code on `rank`."""
    text = f"group {group!r} failed on rank {rank}, where the library raised {type(error).__name__}: {error}"
    cause = GroupError(text, group=group, ranks=[rank])
    cause.__cause__ = error
    return cause
