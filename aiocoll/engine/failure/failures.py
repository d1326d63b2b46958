"""The errors with which a group fails when it loses a rank, or when code raises; ranks are numbered as in the group."""

from __future__ import annotations

from aiocoll.completion import Completion
from aiocoll.engine.control.messages import PROTOCOL
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.differences import called
from aiocoll.errors import CollectiveTimeoutError, GroupError, GroupRevokedError, PeerLostError, PeerProtocolError
from aiocoll.user_code import describe, original

__all__ = ["crashed", "left", "lost", "raised", "revoked", "timed_out", "torn"]


def lost(group: str, peer: int, detail: str, how: str) -> GroupError:
    """A rank is lost: "killed", "unreachable", "stopped", or refused for a protocol error."""
    if how == PROTOCOL:
        return PeerProtocolError(f"group {group!r} failed: {detail}", group=group, ranks=[peer])
    state = "is gone" if how == "killed" else "is lost"
    return PeerLostError(f"rank {peer} of group {group!r} {state}: {detail}", group=group, ranks=[peer], how=how)


def torn(group: str, rank: int, peer: int) -> PeerLostError:
    """The connection between two ranks broke and both are alive; both ranks raise the same text."""
    one, other = sorted((rank, peer))
    text = f"the connection between ranks {one} and {other} of group {group!r} broke, though both live"
    return PeerLostError(text, group=group, ranks=[one, other], how="unreachable")


def left(group: str, rank: int, peer: int, completion: Completion) -> PeerLostError:
    """A call on `rank` needs a rank that has closed its group."""
    return PeerLostError(
        f"{completion.op} on rank {rank} of group {group!r} needs rank {peer}, which has left",
        how="left",
        op=completion.op,
        seq=completion.key or completion.seq,
        group=group,
        ranks=[peer],
    )


def timed_out(group: str, rank: int, operation: Operation, missing: list[int], detail: str) -> CollectiveTimeoutError:
    """A collective did not complete in time; `detail` is about the ranks that are missing."""
    return CollectiveTimeoutError(
        f"{operation.title()} of group {group!r} did not complete within {operation.timeout:g} s on rank {rank}, "
        f"which called {called(operation.describe())}: {detail}",
        op=operation.completion.op,
        seq=operation.completion.key or operation.completion.seq,
        group=group,
        ranks=missing,
    )


def revoked(group: str, rank: int, cause: GroupError) -> GroupRevokedError:
    """A call on a group that has failed."""
    error = GroupRevokedError(
        f"group {group!r} on rank {rank} was revoked: {cause}",
        group=group,
        ranks=cause.ranks,
        op=cause.op,
        seq=cause.seq,
    )
    error.__cause__ = cause
    return error


def raised(group: str, rank: int, completion: Completion, error: BaseException, what: str) -> GroupError:
    """A calculation of `rank` for a call has raised `error`; `what` says which calculation."""
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


def crashed(group: str, rank: int, error: Exception) -> GroupError:
    """Code of the library has raised an unexpected error on `rank`."""
    text = f"group {group!r} failed on rank {rank}, where the library raised {type(error).__name__}: {error}"
    cause = GroupError(text, group=group, ranks=[rank])
    cause.__cause__ = error
    return cause
