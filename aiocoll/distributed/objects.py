"""Object collectives of torch.distributed, which fill lists in place, without pickle.

`aiocoll.codec` documents the supported types.

The arguments `device` and `use_batch` are accepted but not used: objects always go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from aiocoll.distributed.map_result import map_result
from aiocoll.distributed.ranks import rank_of, sender_of
from aiocoll.distributed.world import Group, finish_outside, member_of
from aiocoll.work import Work

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]

T = TypeVar("T")


@overload
def broadcast_object_list(
    object_list: list[None],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
) -> Work[list[Any]]: ...
@overload
def broadcast_object_list(
    object_list: list[T],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
) -> Work[list[T]]: ...
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
) -> Work[list[Any]]:
    """Copy the objects in the list of rank `src` into the lists of all ranks; see `ProcessGroup.broadcast_object`.

    Args:
        object_list: a list of the same length on every rank; the result.
        src: global rank of the source; 0 if `group_src` is not given either.
        group: a group; None means the default group.
        device: not used.
        group_src: the rank in `group`, instead of `src`.
    """
    pg = member_of(group, "broadcast_object_list")
    if pg is None:
        return finish_outside("BROADCAST_OBJECT")
    _check_list(object_list, "object_list")
    root = rank_of(pg, "src", src, group_src, 0)
    return map_result(pg.broadcast_object(object_list, root), _make_filler(object_list, f"rank {root}"))


def all_gather_object(object_list: list[Any], obj: T, group: Group = None) -> Work[list[T]]:
    """Gather every rank's object into a list on every rank, one entry per rank; see `ProcessGroup.allgather_object`.

    Args:
        object_list: a list with one entry per rank, which is filled; the result.
        obj: this rank's object.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_gather_object")
    if pg is None:
        return finish_outside("ALLGATHER_OBJECT")
    _check_list(object_list, "object_list", pg.size())
    return map_result(pg.allgather_object(obj), _make_filler(object_list, "the group"))


def gather_object(
    obj: T,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> Work[list[T] | None]:
    """Gather every rank's object into a list at rank `dst`; see `ProcessGroup.gather_object`.

    Args:
        obj: this rank's object.
        object_gather_list: at `dst` a list with an entry per rank, which is the result; elsewhere None or [].
        dst: global rank that receives them; 0 if `group_dst` is not given either.
        group: a group; None means the default group.
        group_dst: the rank in `group`, instead of `dst`.
    """
    pg = member_of(group, "gather_object")
    if pg is None:
        return finish_outside("GATHER_OBJECT")
    root = rank_of(pg, "dst", dst, group_dst, 0)
    if pg.rank() == root:
        _check_list(object_gather_list, "object_gather_list", pg.size())
        assert object_gather_list is not None
        return map_result(pg.gather_object(obj, root), _make_filler(object_gather_list, "the group"))
    if object_gather_list:
        raise ValueError("object_gather_list must be None or [] on this rank; only rank dst gives a list")
    return pg.gather_object(obj, root)


@overload
def scatter_object_list(
    scatter_object_output_list: list[None],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> Work[list[Any]]: ...
@overload
def scatter_object_list(
    scatter_object_output_list: list[T],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> Work[list[T]]: ...
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> Work[list[Any]]:
    """Send object r of rank `src` to rank r, into the output list's first entry; see `ProcessGroup.scatter_object`.

    Args:
        scatter_object_output_list: a list of at least one entry; the result.
        scatter_object_input_list: at `src` an object per rank; not used elsewhere.
        src: global rank of the source; 0 if `group_src` is not given either.
        group: a group; None means the default group.
        group_src: the rank in `group`, instead of `src`.
    """
    pg = member_of(group, "scatter_object_list")
    if pg is None:
        return finish_outside("SCATTER_OBJECT")
    _check_list(scatter_object_output_list, "scatter_object_output_list")
    if not scatter_object_output_list:
        raise ValueError("scatter_object_output_list is empty; pass a list with one entry, which receives the object")
    root = rank_of(pg, "src", src, group_src, 0)
    if pg.rank() == root:
        _check_list(scatter_object_input_list, "scatter_object_input_list", pg.size())

    def put(obj: Any) -> list[Any]:
        scatter_object_output_list[0] = obj
        return scatter_object_output_list

    return map_result(pg.scatter_object(scatter_object_input_list, root), put)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> Work[None]:
    """Send a list of objects to another rank, in one message with tag 0; see `ProcessGroup.send_object`.

    Args:
        object_list: a list of the same length as the list of the receiver.
        dst: global rank of the receiver.
        group: a group; None means the default group.
        device: not used.
        group_dst: the rank in `group`, instead of `dst`.
        use_batch: not used.
    """
    pg = member_of(group, "send_object_list")
    if pg is None:
        return finish_outside("SEND_OBJECT")
    _check_list(object_list, "object_list")
    return pg.send_object(object_list, rank_of(pg, "dst", dst, group_dst))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> Work[int]:
    """Receive a list of objects into a list of the same length; see `ProcessGroup.recv_object`.

    Args:
        object_list: the list to fill.
        src: global rank of the sender; None receives from any rank.
        group: a group; None means the default group.
        device: not used.
        group_src: the rank in `group`, instead of `src`.
        use_batch: not used.

    Returns:
        The work. Its result is the global rank of the sender, or -1 outside the group.
    """
    pg = member_of(group, "recv_object_list")
    if pg is None:
        return finish_outside("RECV_OBJECT", -1)
    _check_list(object_list, "object_list")
    anybody = src is None and group_src is None
    work = pg.recv_object(None if anybody else rank_of(pg, "src", src, group_src))

    def put(objects: Any) -> int:
        sender = sender_of(pg, work)
        _make_filler(object_list, f"rank {sender}")(objects)
        return sender

    return map_result(work, put)


def _check_list(given: Any, name: str, length: int | None = None) -> None:
    if not isinstance(given, list):
        raise TypeError(f"{name} must be a list, not {type(given).__name__}")
    if length is not None and len(given) != length:
        raise ValueError(f"{name} needs exactly one entry per rank: {length}, not {len(given)}")


def _make_filler(into: list[Any], whose: str) -> Callable[[Any], list[Any]]:
    """Return a function that stores received objects in the list `into`, except in a dry run."""

    def fill(objects: Any) -> list[Any]:
        if objects is not None and objects is not into:
            if not isinstance(objects, list) or len(objects) != len(into):
                what = f"a list of {len(objects)}" if isinstance(objects, list) else type(objects).__name__
                raise ValueError(
                    f"{whose} gave {what}, but the list on this rank has {len(into)} entries; use equal lengths"
                )
            into[:] = objects
        return into

    return fill
