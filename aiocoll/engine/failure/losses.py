"""What a group fails with when it loses a rank; ranks are numbered as in the group."""

from __future__ import annotations

from typing import Any

from aiocoll.engine.control.messages import PROTOCOL
from aiocoll.errors import GroupError, PeerLostError, PeerProtocolError
from aiocoll.work import Work

__all__ = ["left", "lost", "torn"]


def lost(group: str, peer: int, detail: str, how: str) -> GroupError:
    """A rank is dead, or as good as that: "killed", "unreachable", "stopped", or not to be understood."""
    if how == PROTOCOL:
        return PeerProtocolError(f"group {group!r} failed: {detail}", group=group, ranks=[peer])
    state = "is gone" if how == "killed" else "is lost"
    return PeerLostError(f"rank {peer} of group {group!r} {state}: {detail}", group=group, ranks=[peer], how=how)


def torn(group: str, rank: int, peer: int) -> PeerLostError:
    """The connection between two ranks broke, and both live: both say the same of it."""
    one, other = sorted((rank, peer))
    text = f"the connection between ranks {one} and {other} of group {group!r} broke, though both live"
    return PeerLostError(text, group=group, ranks=[one, other], how="unreachable")


def left(group: str, rank: int, peer: int, work: Work[Any]) -> PeerLostError:
    """A work on `rank` needs a rank that has closed its group."""
    return PeerLostError(
        f"{work.op} on rank {rank} of group {group!r} needs rank {peer}, which has left",
        how="left",
        op=work.op,
        seq=work.key or work.seq,
        group=group,
        ranks=[peer],
    )
