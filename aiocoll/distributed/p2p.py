"""Messages between two ranks, with torch.distributed's arguments: `isend`, `irecv`, `recv`, `batch_isend_irecv`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from aiocoll.distributed.map_result import map_result
from aiocoll.distributed.ranks import global_rank_of, rank_of, sender_of
from aiocoll.distributed.world import Group, finish_outside, member_of, require_member
from aiocoll.group.messages import Recv, Send, combine_works
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.typing import Array, Sparse
from aiocoll.work import Work

__all__ = ["P2POp", "Requests", "batch_isend_irecv", "irecv", "isend", "recv", "send"]

M = TypeVar("M", bound=Array | Sparse)
A = TypeVar("A", bound=Array)
A_co = TypeVar("A_co", bound=Array, covariant=True)


def isend(
    tensor: M, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Work[M]:
    """Send `tensor` to another rank; the work is done when the tensor may be modified. See `ProcessGroup.send`.

    Args:
        tensor: an array, dense or sparse; the result.
        dst: global rank that receives it.
        group: a group; None means the default group.
        tag: a number from 0 to 2**30 - 1, the same as in the receive.
        group_dst: the rank in `group`, instead of `dst`.
    """
    pg = member_of(group, "isend")
    return finish_outside("SEND") if pg is None else pg.send(tensor, rank_of(pg, "dst", dst, group_dst), tag)


send = isend


def irecv(
    tensor: M, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Work[M]:
    """Receive a message into `tensor`, from one rank or from any; see `ProcessGroup.recv` and `recv_anysource`.

    Args:
        tensor: an array of the length and dtype of the message, or a sparse one of its shape; the result.
        src: global rank of the sender; None receives from any rank.
        group: a group; None means the default group.
        tag: the tag of the send.
        group_src: the rank in `group`, instead of `src`.
    """
    pg = member_of(group, "irecv")
    return finish_outside("RECV") if pg is None else _receive(pg, tensor, src, tag, group_src)


def recv(
    tensor: Array | Sparse, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Work[int]:
    """Receive a message by `ProcessGroup.recv`; return the sender's global rank, or -1 on a rank outside the group.

    Args:
        tensor: an array of the length and dtype of the message, or a sparse one of its shape.
        src: global rank of the sender; None receives from any rank.
        group: a group; None means the default group.
        tag: the tag of the send.
        group_src: the rank in `group`, instead of `src`.
    """
    pg = member_of(group, "recv")
    if pg is None:
        return finish_outside("RECV", -1)
    work = _receive(pg, tensor, src, tag, group_src)
    return map_result(work, lambda _: sender_of(pg, work))


def _receive(pg: ProcessGroup, tensor: M, src: int | None, tag: int, group_src: int | None) -> Work[M]:
    if src is None and group_src is None:
        return pg.recv_anysource(tensor, tag)
    return pg.recv(tensor, rank_of(pg, "src", src, group_src), tag)


class P2POp(Generic[A_co]):
    """A description of one send or receive for `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`.
        tensor: the array to send or to receive into.
        peer: global rank of the other side.
        group: a group; None means the default group.
        tag: the tag on both sides.
        group_peer: rank of the other side in `group`, instead of `peer`.
    """

    def __init__(
        self,
        op: Callable[..., Work[Any]],
        tensor: A_co,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"op={op!r} must be aiocoll.distributed.isend or irecv")
        pg = require_member(group)
        self.op = op
        self.tensor = tensor
        self.group = pg
        self.tag = tag
        self.group_peer = rank_of(pg, "peer", peer, group_peer)
        self.peer = global_rank_of(pg, self.group_peer)

    def __repr__(self) -> str:
        here, there = self.group.rank(), self.group_peer
        source, target = (here, there) if self.op is isend else (there, here)
        shape, dtype = getattr(self.tensor, "shape", None), getattr(self.tensor, "dtype", None)
        return (
            f"P2POp({self.op.__name__} pg={self.group.group_name}, group_src={source}, group_dst={target}, "
            f"{shape}, {dtype})"
        )


class Requests(list[Work[A]]):
    """A list of the works of `batch_isend_irecv`, which is awaitable: it waits for all works."""

    def __await__(self) -> Generator[Any, None, list[A]]:
        """Wait for all works, even if one has failed, and return their tensors; see `ProcessGroup.batch`."""
        return combine_works(parts_of(self[0].group).messages.one_of("BATCH", self), self).__await__()


def batch_isend_irecv(p2p_op_list: list[P2POp[A]]) -> Requests[A]:
    """Check several sends and receives of one group, then start them together; see `ProcessGroup.batch`.

    Args:
        p2p_op_list: at least one operation; all of the same group.

    Returns:
        A list of their works, in the given order. Await each of them, or the list.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(each, P2POp) for each in p2p_op_list):
        raise ValueError("p2p_op_list must be a list of P2POp")
    if not p2p_op_list:
        raise ValueError("p2p_op_list is empty; give at least one P2POp")
    pg = p2p_op_list[0].group
    if any(each.group is not pg for each in p2p_op_list):
        raise ValueError("p2p_op_list: all operations of a batch must belong to the same group")
    operations = [
        Send(each.tensor, each.group_peer, each.tag)
        if each.op is isend
        else Recv(each.tensor, each.group_peer, each.tag)
        for each in p2p_op_list
    ]
    return Requests(parts_of(pg).messages.start_all(operations, None))
