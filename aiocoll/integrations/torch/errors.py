"""Conversion of aiocoll's errors to torch's `DistBackendError`, with aiocoll's error as the cause."""

from __future__ import annotations

import torch.distributed as dist

from aiocoll.errors import AiocollError, CollectiveTimeoutError, GroupClosedError, PeerLostError

__all__ = ["to_torch"]


def to_torch(error: BaseException, call: str, rank: int) -> BaseException:
    """Convert an aiocoll error to a `DistBackendError` with the rank and torch's wording in its text.

    Errors of other classes, such as `TypeError`, are returned unchanged.

    Args:
        error: the error of the operation.
        call: the name of the call.
        rank: the rank of this process in the group.
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
