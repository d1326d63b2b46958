"""Conversion of errors: torch programs get `DistBackendError`, whose cause is the error of aiocoll."""

from __future__ import annotations

import torch.distributed as dist

from aiocoll.errors import AiocollError, CollectiveTimeoutError, GroupClosedError, PeerLostError

__all__ = ["to_torch"]


def to_torch(error: BaseException, call: str, rank: int) -> BaseException:
    """Return the error that a torch program gets: its text has the rank, torch's words for the kind, and our text.

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
