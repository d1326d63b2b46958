"""The collectives on arrays: the group, the root's rank in it, and one call of the group.

Each starts at once and returns a `Work`; what it does, costs and raises is documented at the method of `ProcessGroup`
that it names. On a rank that is not in the group it warns, and the work is done with result None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from aiocoll.distributed.map_result import changed
from aiocoll.distributed.ranks import rank_of
from aiocoll.distributed.world import Group, absent, member_of
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.fusion.deferred_completion import DeferredCompletion
from aiocoll.group.dispatch.dispatcher import Timeout
from aiocoll.group.messages import all_of
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
#: Another array than the one that is the result.
B = TypeVar("B", bound=Array)
#: What a reduction of one thing takes and gives back.
N = TypeVar("N", bound=Array | Number)
#: The same of `all_reduce`, which takes sparse arrays, too.
S = TypeVar("S", bound=Array | Number | Sparse)


def all_reduce(tensor: S, op: ReduceOp = SUM, group: Group = None) -> Work[S]:
    """Reduce `tensor` over all ranks, in place: `ProcessGroup.allreduce`.

    Args:
        tensor: an array of the same count on every rank, or a number; the result.
        op: how to reduce.
        group: None is the default group.
    """
    pg = member_of(group, "all_reduce")
    return absent("ALLREDUCE") if pg is None else pg.allreduce(tensor, op)


@overload
def all_reduce_coalesced(tensors: list[A], op: ReduceOp = SUM, group: Group = None) -> Work[list[A]]: ...
@overload
def all_reduce_coalesced(tensors: A, op: ReduceOp = SUM, group: Group = None) -> Work[list[A]]: ...
def all_reduce_coalesced(tensors: Any, op: ReduceOp = SUM, group: Group = None) -> Work[list[Any]]:
    """Reduce a list of tensors, in place, in one operation: `ProcessGroup.allreduce_coalesced`.

    Args:
        tensors: arrays, of the same counts on every rank, or one of them; the result is the list.
        op: how to reduce, the same for all.
        group: None is the default group.
    """
    pg = member_of(group, "all_reduce_coalesced")
    if pg is None:
        return absent("ALLREDUCE_COALESCED")
    return pg.allreduce_coalesced(tensors if isinstance(tensors, list) else [tensors], op)


def reduce(
    tensor: N, dst: int | None = None, op: ReduceOp = SUM, group: Group = None, group_dst: int | None = None
) -> Work[N]:
    """Reduce `tensor` over all ranks into that of one rank; the others are not changed: `ProcessGroup.reduce`.

    Args:
        tensor: an array of the same count on every rank.
        dst: global rank that gets the result.
        op: how to reduce.
        group: None is the default group.
        group_dst: its rank in `group`, instead of `dst`.
    """
    pg = member_of(group, "reduce")
    return absent("REDUCE") if pg is None else pg.reduce(tensor, rank_of(pg, "dst", dst, group_dst), op)


def broadcast(tensor: N, src: int | None = None, group: Group = None, group_src: int | None = None) -> Work[N]:
    """Copy the tensor of one rank to all: `ProcessGroup.broadcast`.

    Args:
        tensor: an array of the same count on every rank.
        src: global rank whose tensor it is.
        group: None is the default group.
        group_src: its rank in `group`, instead of `src`.
    """
    pg = member_of(group, "broadcast")
    return absent("BROADCAST") if pg is None else pg.broadcast(tensor, rank_of(pg, "src", src, group_src))


def barrier(group: Group = None, device_ids: Sequence[int] | None = None) -> Work[None]:
    """Wait for all ranks, as `ProcessGroup.barrier`, and for the collectives that this rank started earlier.

    As with torch's Gloo backend, the tensor of an earlier `all_reduce` is reduced after ``await barrier()``.
    Collectives of other groups, keyed calls, sends and receives do not count.

    Args:
        group: None is the default group.
        device_ids: ignored, since no device takes part.

    Raises:
        GroupError: one of these collectives has failed; see `ProcessGroup`.
    """
    if isinstance(device_ids, bool):
        raise TypeError(
            "device_ids must be a list of devices or None, not bool; async_op does not exist: await the call"
        )
    pg = member_of(group, "barrier")
    if pg is None:
        return absent("BARRIER")
    pending = pg.pending()
    work = pg.barrier()
    earlier = [each for each in pending if _precedes(each, work)]
    if not earlier:
        return work
    fence = parts_of(pg).messages.one_of("BARRIER", [work])
    return changed(all_of(fence, [*earlier, work]), lambda _: None)


def _precedes(work: Work[Any], barrier: Work[Any]) -> bool:
    """Return whether `work` is an unkeyed collective that has started, or starts together with `barrier`."""
    completion = completion_of(work)
    if isinstance(completion, DeferredCompletion) and work.seq is None:
        is_in_block = completion.progress is completion_of(barrier).progress
        return completion.is_unkeyed_collective and (completion.block.flushed or is_in_block)
    return work.seq is not None and work.key is None


def monitored_barrier(group: Group = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> Work[None]:
    """Wait until all ranks have called it; the error names those that have not: `ProcessGroup.monitored_barrier`.

    Args:
        group: None is the default group.
        timeout: seconds; None is the group's.
        wait_all_ranks: on rank 0: name every rank that is missing, not only the first of them.
    """
    pg = member_of(group, "monitored_barrier")
    return absent("MONITORED_BARRIER") if pg is None else pg.monitored_barrier(timeout, wait_all_ranks)


def all_gather(tensor_list: list[A], tensor: Array, group: Group = None) -> Work[list[A]]:
    """Gather every rank's tensor, of any count, into a list on every rank: `ProcessGroup.allgather`.

    Args:
        tensor_list: an array per rank, with as many elements as that rank's tensor; the result.
        tensor: this rank's array.
        group: None is the default group.
    """
    pg = member_of(group, "all_gather")
    return absent("ALLGATHER") if pg is None else pg.allgather(_listed(tensor_list, "tensor_list", pg), tensor)


def all_gather_into_tensor(output_tensor: A, input_tensor: Array, group: Group = None) -> Work[A]:
    """Gather tensors of one count into one tensor, in rank order: `ProcessGroup.allgather_into_tensor`.

    Args:
        output_tensor: an array of as many elements as all inputs together; the result.
        input_tensor: this rank's array, of the same count on every rank.
        group: None is the default group.
    """
    pg = member_of(group, "all_gather_into_tensor")
    return absent("ALLGATHER") if pg is None else pg.allgather_into_tensor(output_tensor, input_tensor)


def all_gather_coalesced(
    output_tensor_lists: list[list[A]], input_tensor_list: list[B], group: Group = None
) -> Work[list[list[A]]]:
    """Gather several tensors of every rank; one `ProcessGroup.allgather` for each, once all of them are checked.

    Args:
        output_tensor_lists: for every rank a list with room for its tensors; the result.
        input_tensor_list: this rank's tensors, as many on every rank.
        group: None is the default group.
    """
    pg = member_of(group, "all_gather_coalesced")
    if pg is None:
        return absent("ALLGATHER_COALESCED")
    lists = _listed(output_tensor_lists, "output_tensor_lists", pg)
    if not isinstance(input_tensor_list, list):
        raise TypeError(f"input_tensor_list must be a list, not {type(input_tensor_list).__name__}")
    count = len(input_tensor_list)
    for rank, each in enumerate(lists):
        if not isinstance(each, list) or len(each) != count:
            given = len(each) if isinstance(each, list) else type(each).__name__
            raise ValueError(
                f"output_tensor_lists[{rank}] must be a list of {count} tensors, as many as the inputs: {given}"
            )
    outputs = [[each[index] for each in lists] for index in range(count)]
    works = parts_of(pg).collectives.allgather_all(outputs, input_tensor_list, "input_tensor_list")
    whole = parts_of(pg).messages.one_of("ALLGATHER_COALESCED", works)
    return changed(all_of(whole, works), lambda _: output_tensor_lists)


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
    """Gather every rank's tensor, of any count, at one rank: `ProcessGroup.gather`.

    Args:
        tensor: this rank's array.
        gather_list: at `dst` an array per rank, which is the result; elsewhere None or [], and the result is None.
        dst: global rank that gets them; 0 if `group_dst` is not given either.
        group: None is the default group.
        group_dst: its rank in `group`, instead of `dst`.
    """
    pg = member_of(group, "gather")
    if pg is None:
        return absent("GATHER")
    root = rank_of(pg, "dst", dst, group_dst, 0)
    return pg.gather(_at_root(gather_list, "gather_list", "dst", pg, root), tensor, root)


def scatter(
    tensor: A,
    scatter_list: list[B] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> Work[A]:
    """Send the r-th tensor of one rank's list to rank r: `ProcessGroup.scatter`.

    Args:
        tensor: receives; the result.
        scatter_list: at `src` an array per rank; elsewhere None or [].
        src: global rank whose list it is; 0 if `group_src` is not given either.
        group: None is the default group.
        group_src: its rank in `group`, instead of `src`.
    """
    pg = member_of(group, "scatter")
    if pg is None:
        return absent("SCATTER")
    root = rank_of(pg, "src", src, group_src, 0)
    return pg.scatter(tensor, _at_root(scatter_list, "scatter_list", "src", pg, root), root)


def reduce_scatter(output: A, input_list: list[B], op: ReduceOp = SUM, group: Group = None) -> Work[A]:
    """Reduce the r-th tensors of all lists into rank r's output: `ProcessGroup.reduce_scatter`.

    Args:
        output: receives this rank's part; the result.
        input_list: an array per rank, that for rank r of the count of its output.
        op: how to reduce.
        group: None is the default group.
    """
    pg = member_of(group, "reduce_scatter")
    if pg is None:
        return absent("REDUCE_SCATTER")
    return pg.reduce_scatter(output, _listed(input_list, "input_list", pg), op)


def reduce_scatter_tensor(output: A, input: Array, op: ReduceOp = SUM, group: Group = None) -> Work[A]:
    """Reduce all inputs, leave the r-th part in rank r's output: `ProcessGroup.reduce_scatter_tensor`.

    Args:
        output: receives this rank's part, of the same count on every rank; the result.
        input: an array of as many elements as all outputs together.
        op: how to reduce.
        group: None is the default group.
    """
    pg = member_of(group, "reduce_scatter_tensor")
    return absent("REDUCE_SCATTER") if pg is None else pg.reduce_scatter_tensor(output, input, op)


def all_to_all(output_tensor_list: list[A], input_tensor_list: list[B], group: Group = None) -> Work[list[A]]:
    """Send the r-th input to rank r, and receive rank r's into the r-th output: `ProcessGroup.alltoall`.

    Args:
        output_tensor_list: an array per rank, with as many elements as that rank sends here; the result.
        input_tensor_list: an array per rank, of any counts.
        group: None is the default group.
    """
    pg = member_of(group, "all_to_all")
    if pg is None:
        return absent("ALLTOALL")
    outputs = _listed(output_tensor_list, "output_tensor_list", pg)
    return pg.alltoall(outputs, _listed(input_tensor_list, "input_tensor_list", pg))


def all_to_all_single(
    output: A,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Work[A]:
    """Send part r of `input` to rank r, and concatenate the received parts in `output`: `ProcessGroup.alltoall_base`.

    Args:
        output: receives the parts in rank order; the result.
        input: split along its first dimension.
        output_split_sizes: rows from each rank; None or [] for equal parts.
        input_split_sizes: rows to each rank; None or [] for equal parts.
        group: None is the default group.
    """
    pg = member_of(group, "all_to_all_single")
    if pg is None:
        return absent("ALLTOALL")
    sizes = [None if each is not None and len(each) == 0 else each for each in (output_split_sizes, input_split_sizes)]
    return pg.alltoall_base(output, input, *sizes)


def _listed(tensors: Any, name: str, pg: ProcessGroup) -> list[Any]:
    """Return a list, checked to have one entry per rank."""
    if not isinstance(tensors, list):
        raise TypeError(f"{name} must be a list, not {type(tensors).__name__}")
    if len(tensors) != pg.size():
        raise ValueError(f"{name} needs exactly one entry per rank: {pg.size()}, not {len(tensors)}")
    return tensors


def _at_root(tensors: Any, name: str, root_name: str, pg: ProcessGroup, root: int) -> list[Any] | None:
    """Return the list of the root; raise if it is missing there, or given on another rank."""
    here = pg.rank() == root
    if here:
        if tensors is None:
            raise ValueError(f"{name} is missing: the rank that is {root_name} gives one tensor per rank")
        return _listed(tensors, name, pg)
    if tensors is not None and not (isinstance(tensors, list) and not tensors):
        raise ValueError(f"{name} must be None or [] on this rank: only the rank that is {root_name} gives it")
    return None
