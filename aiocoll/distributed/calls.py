"""Collectives on arrays, with torch.distributed's arguments: each is one call of a `ProcessGroup`.

Each call starts at once and returns a `Work`. The method of `ProcessGroup` that a function names documents its effect,
cost and errors. On a rank outside the group a function warns, and returns a finished work with result None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from aiocoll.distributed.map_result import map_result
from aiocoll.distributed.ranks import rank_of
from aiocoll.distributed.world import Group, finish_outside, member_of
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.fusion.deferred_completion import DeferredCompletion
from aiocoll.group.dispatch.dispatcher import Timeout
from aiocoll.group.messages import combine_works
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.typing import Array, Number, Sparse
from aiocoll.work import Work, completion_of

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]

SUM = ReduceOp.SUM

A = TypeVar("A", bound=Array)
#: Type of one array argument in a function whose arrays may have two different types.
B = TypeVar("B", bound=Array)
#: Type of the argument and the result of a reduction.
N = TypeVar("N", bound=Array | Number)
#: Type of the argument and the result of `all_reduce`, which accepts sparse arrays, too.
S = TypeVar("S", bound=Array | Number | Sparse)


def all_reduce(tensor: S, op: ReduceOp = SUM, group: Group = None) -> Work[S]:
    """Reduce `tensor` over all ranks, in place; see `ProcessGroup.allreduce`.

    Args:
        tensor: an array of the same count on every rank, or a number; the result.
        op: the reduction operation.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_reduce")
    return finish_outside("ALLREDUCE") if pg is None else pg.allreduce(tensor, op)


@overload
def all_reduce_coalesced(tensors: list[A], op: ReduceOp = SUM, group: Group = None) -> Work[list[A]]: ...
@overload
def all_reduce_coalesced(tensors: A, op: ReduceOp = SUM, group: Group = None) -> Work[list[A]]: ...
def all_reduce_coalesced(tensors: Any, op: ReduceOp = SUM, group: Group = None) -> Work[list[Any]]:
    """Reduce a list of tensors in place, in one operation; see `ProcessGroup.allreduce_coalesced`.

    Args:
        tensors: arrays with the same counts on every rank, or one such array; the result is the list.
        op: the reduction operation, the same for all of them.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_reduce_coalesced")
    if pg is None:
        return finish_outside("ALLREDUCE_COALESCED")
    return pg.allreduce_coalesced(tensors if isinstance(tensors, list) else [tensors], op)


def reduce(
    tensor: N, dst: int | None = None, op: ReduceOp = SUM, group: Group = None, group_dst: int | None = None
) -> Work[N]:
    """Reduce `tensor` over all ranks into the tensor of rank `dst` alone; see `ProcessGroup.reduce`.

    Args:
        tensor: an array of the same count on every rank.
        dst: global rank that receives the result.
        op: the reduction operation.
        group: a group; None means the default group.
        group_dst: the rank in `group`, instead of `dst`.
    """
    pg = member_of(group, "reduce")
    return finish_outside("REDUCE") if pg is None else pg.reduce(tensor, rank_of(pg, "dst", dst, group_dst), op)


def broadcast(tensor: N, src: int | None = None, group: Group = None, group_src: int | None = None) -> Work[N]:
    """Copy the tensor of rank `src` to all ranks; see `ProcessGroup.broadcast`.

    Args:
        tensor: an array of the same count on every rank.
        src: global rank of the source.
        group: a group; None means the default group.
        group_src: the rank in `group`, instead of `src`.
    """
    pg = member_of(group, "broadcast")
    return finish_outside("BROADCAST") if pg is None else pg.broadcast(tensor, rank_of(pg, "src", src, group_src))


def barrier(group: Group = None, device_ids: Sequence[int] | None = None) -> Work[None]:
    """Wait for all ranks, and for the collectives that this rank has started before; see `ProcessGroup.barrier`.

    As with torch's Gloo backend, the tensor of an earlier `all_reduce` is reduced after ``await barrier()``.
    Collectives of other groups, keyed calls, sends and receives do not count.

    Args:
        group: a group; None means the default group.
        device_ids: ignored, since no device takes part.

    Raises:
        GroupError: one of these collectives has failed; see `ProcessGroup`.
    """
    if isinstance(device_ids, bool):
        raise TypeError(
            "device_ids must be a list of devices or None, not bool; async_op does not exist, await the call instead"
        )
    pg = member_of(group, "barrier")
    if pg is None:
        return finish_outside("BARRIER")
    pending = pg.pending()
    work = pg.barrier()
    earlier = [each for each in pending if _precedes(each, work)]
    if not earlier:
        return work
    fence = parts_of(pg).messages.one_of("BARRIER", [work])
    return map_result(combine_works(fence, [*earlier, work]), lambda _: None)


def _precedes(work: Work[Any], barrier: Work[Any]) -> bool:
    """Return whether `barrier` must wait for `work`: a collective without a key, started before or with it."""
    completion = completion_of(work)
    if isinstance(completion, DeferredCompletion) and work.seq is None:
        is_in_block = completion.progress is completion_of(barrier).progress
        return completion.is_unkeyed_collective and (completion.block.flushed or is_in_block)
    return work.seq is not None and work.key is None


def monitored_barrier(group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> Work[None]:
    """Wait for all ranks. A timeout error names the missing ranks; see `ProcessGroup.monitored_barrier`.

    Args:
        group: a group; None means the default group.
        timeout: seconds; None means the timeout of the group.
        wait_all_ranks: rank 0 names every missing rank, not only the first one.
    """
    pg = member_of(group, "monitored_barrier")
    return finish_outside("MONITORED_BARRIER") if pg is None else pg.monitored_barrier(timeout, wait_all_ranks)


def all_gather(tensor_list: list[A], tensor: Array, group: Group = None) -> Work[list[A]]:
    """Gather every rank's tensor, of any size, into a list on every rank; see `ProcessGroup.allgather`.

    Args:
        tensor_list: an array per rank, with as many elements as that rank's tensor; the result.
        tensor: this rank's array.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_gather")
    return (
        finish_outside("ALLGATHER") if pg is None else pg.allgather(_check_list(tensor_list, "tensor_list", pg), tensor)
    )


def all_gather_into_tensor(output_tensor: A, input_tensor: Array, group: Group = None) -> Work[A]:
    """Gather tensors of equal size into one tensor, in rank order; see `ProcessGroup.allgather_into_tensor`.

    Args:
        output_tensor: an array of as many elements as all inputs together; the result.
        input_tensor: this rank's array, of the same count on every rank.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_gather_into_tensor")
    return finish_outside("ALLGATHER") if pg is None else pg.allgather_into_tensor(output_tensor, input_tensor)


def all_gather_coalesced(
    output_tensor_lists: list[list[A]], input_tensor_list: list[B], group: Group = None
) -> Work[list[list[A]]]:
    """Gather several tensors of each rank on every rank, each by its own `ProcessGroup.allgather`.

    Args:
        output_tensor_lists: one list per rank, with room for the tensors of that rank; the result.
        input_tensor_list: this rank's tensors, as many on every rank.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_gather_coalesced")
    if pg is None:
        return finish_outside("ALLGATHER_COALESCED")
    lists = _check_list(output_tensor_lists, "output_tensor_lists", pg)
    if not isinstance(input_tensor_list, list):
        raise TypeError(f"input_tensor_list must be a list, not {type(input_tensor_list).__name__}")
    count = len(input_tensor_list)
    for rank, each in enumerate(lists):
        if not isinstance(each, list) or len(each) != count:
            given = len(each) if isinstance(each, list) else type(each).__name__
            raise ValueError(
                f"output_tensor_lists[{rank}] must be a list of {count} tensors, as many as the inputs, not {given}"
            )
    outputs = [[each[index] for each in lists] for index in range(count)]
    works = parts_of(pg).collectives.allgather_all(outputs, input_tensor_list, "input_tensor_list")
    combined = parts_of(pg).messages.one_of("ALLGATHER_COALESCED", works)
    return map_result(combine_works(combined, works), lambda _: output_tensor_lists)


@overload
def gather(
    tensor: Array,
    gather_list: None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> Work[None]: ...
@overload
def gather(
    tensor: Array,
    gather_list: list[A] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> Work[list[A] | None]: ...
def gather(
    tensor: Any,
    gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> Work[Any]:
    """Gather every rank's tensor, of any size, at rank `dst`; see `ProcessGroup.gather`.

    Args:
        tensor: this rank's array.
        gather_list: at `dst` an array per rank, which is the result; elsewhere None or [], and the result is None.
        dst: global rank that receives them; 0 if `group_dst` is not given either.
        group: a group; None means the default group.
        group_dst: the rank in `group`, instead of `dst`.
    """
    pg = member_of(group, "gather")
    if pg is None:
        return finish_outside("GATHER")
    root = rank_of(pg, "dst", dst, group_dst, 0)
    return pg.gather(_check_root_list(gather_list, "gather_list", "dst", pg, root), tensor, root)


def scatter(
    tensor: A,
    scatter_list: list[B] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> Work[A]:
    """Send the r-th tensor in the list of rank `src` to rank r; see `ProcessGroup.scatter`.

    Args:
        tensor: the array that receives this rank's part; the result.
        scatter_list: at `src` an array per rank; elsewhere None or [].
        src: global rank of the source; 0 if `group_src` is not given either.
        group: a group; None means the default group.
        group_src: the rank in `group`, instead of `src`.
    """
    pg = member_of(group, "scatter")
    if pg is None:
        return finish_outside("SCATTER")
    root = rank_of(pg, "src", src, group_src, 0)
    return pg.scatter(tensor, _check_root_list(scatter_list, "scatter_list", "src", pg, root), root)


def reduce_scatter(output: A, input_list: list[B], op: ReduceOp = SUM, group: Group = None) -> Work[A]:
    """Reduce the r-th tensors of all lists into rank r's output; see `ProcessGroup.reduce_scatter`.

    Args:
        output: the array that receives this rank's part; the result.
        input_list: an array per rank, where array r has the count of rank r's output.
        op: the reduction operation.
        group: a group; None means the default group.
    """
    pg = member_of(group, "reduce_scatter")
    if pg is None:
        return finish_outside("REDUCE_SCATTER")
    return pg.reduce_scatter(output, _check_list(input_list, "input_list", pg), op)


def reduce_scatter_tensor(output: A, input: Array, op: ReduceOp = SUM, group: Group = None) -> Work[A]:
    """Reduce the inputs of all ranks, and store block r on rank r; see `ProcessGroup.reduce_scatter_tensor`.

    Args:
        output: the array that receives this rank's part, of the same count on every rank; the result.
        input: an array of as many elements as all outputs together.
        op: the reduction operation.
        group: a group; None means the default group.
    """
    pg = member_of(group, "reduce_scatter_tensor")
    return finish_outside("REDUCE_SCATTER") if pg is None else pg.reduce_scatter_tensor(output, input, op)


def all_to_all(output_tensor_list: list[A], input_tensor_list: list[B], group: Group = None) -> Work[list[A]]:
    """Send the r-th input to rank r, and receive from rank r into the r-th output; see `ProcessGroup.alltoall`.

    Args:
        output_tensor_list: an array per rank, with as many elements as that rank sends to this one; the result.
        input_tensor_list: an array per rank, of any counts.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_to_all")
    if pg is None:
        return finish_outside("ALLTOALL")
    outputs = _check_list(output_tensor_list, "output_tensor_list", pg)
    return pg.alltoall(outputs, _check_list(input_tensor_list, "input_tensor_list", pg))


def all_to_all_single(
    output: A,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Work[A]:
    """Send block r of `input` to rank r, and receive block r of `output` from it; see `ProcessGroup.alltoall_base`.

    Args:
        output: the array that receives the parts in rank order; the result.
        input: an array, split along its first dimension.
        output_split_sizes: rows from each rank; None or [] for equal parts.
        input_split_sizes: rows to each rank; None or [] for equal parts.
        group: a group; None means the default group.
    """
    pg = member_of(group, "all_to_all_single")
    if pg is None:
        return finish_outside("ALLTOALL")
    sizes = [None if each is not None and len(each) == 0 else each for each in (output_split_sizes, input_split_sizes)]
    return pg.alltoall_base(output, input, *sizes)


def _check_list(tensors: Any, name: str, pg: ProcessGroup) -> list[Any]:
    """Check that `tensors` is a list with one entry per rank, and return it."""
    if not isinstance(tensors, list):
        raise TypeError(f"{name} must be a list, not {type(tensors).__name__}")
    if len(tensors) != pg.size():
        raise ValueError(f"{name} needs exactly one entry per rank: {pg.size()}, not {len(tensors)}")
    return tensors


def _check_root_list(tensors: Any, name: str, root_name: str, pg: ProcessGroup, root: int) -> list[Any] | None:
    """Check that the root, and no other rank, has given a list of one tensor per rank; return the list."""
    is_root = pg.rank() == root
    if is_root:
        if tensors is None:
            raise ValueError(f"{name} is missing; rank {root_name} must give a list with one tensor per rank")
        return _check_list(tensors, name, pg)
    if tensors is not None and not (isinstance(tensors, list) and not tensors):
        raise ValueError(f"{name} must be None or [] on this rank; only rank {root_name} gives a list")
    return None
