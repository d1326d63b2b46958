"""Errors of calls, as torch's programs expect them: `DistBackendError` with the error of aiocoll as its cause."""

from __future__ import annotations

import torch.distributed as dist

from aiocoll.errors import AiocollError, CollectiveTimeoutError, GroupClosedError, PeerLostError

__all__ = ["to_torch"]


def to_torch(error: BaseException, call: str, rank: int) -> BaseException:
    """Return the error that a program of torch gets: the rank first, then in torch's words what kind of error it is.

    Errors about arguments stay what they are.

    Args:
        error: of the operation.
        call: the name of the call.
        rank: of this process in the group.
    """
    if not isinstance(error, AiocollError):
        return error
    kind = ""
    if isinstance(error, CollectiveTimeoutError):
        kind = "Timed out waiting: "
    elif isinstance(error, PeerLostError):
        kind = "Connection closed by peer: "
    elif isinstance(error, GroupClosedError):
        kind = "Application timeout caused pair closure, or the group was destroyed: "
    made: BaseException = dist.DistBackendError(f"[Rank {rank}] {kind}{call} failed: {error}")
    made.__cause__ = error
    return made
