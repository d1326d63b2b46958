"""Mapping of collectives to NCCL functions, and the functions that enqueue NCCL calls.

Calls that only move data move bytes. Where NCCL has no function for a call, or counts differ between ranks, several
NCCL calls form one NCCL group, so that none of them waits for another. The choice depends only on terms that are equal
on all ranks. Parts that are not contiguous on this rank go through scratch memory of the device, which is freed after
the call.

    allreduce, reduce, broadcast    the function of that name
    allgather, reduce_scatter       the function of that name; for uneven parts: p broadcasts, p reduces
    gather, scatter, alltoall       sends and receives
    messages between two ranks      a send, a receive
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from aiocoll.algorithms.spec import Spec
from aiocoll.elements.device import DeviceArray
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.gpu.api import Cuda, DeviceError, Nccl, NcclCommunicator

__all__ = [
    "GROUPED",
    "PACKED",
    "STAGED",
    "Enqueue",
    "Native",
    "Tools",
    "carry_out",
    "exchange",
    "make_enqueue",
    "way_of",
]

#: Methods to carry out a call: staging through the host; a group of NCCL calls; one NCCL call on contiguous blocks.
STAGED, GROUPED, PACKED = 0, 1, 2

_BYTES = 1
#: NCCL's number for each dtype that NCCL reduces.
_TYPES = {
    "bool": 1,
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "complex64": 7,
    "complex128": 8,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
#: Dtypes that NCCL reduces only if all devices support float8. AVG of these dtypes is staged, because NCCL multiplies
#: by 1/p before it adds, which loses precision.
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_SUM, _PRODUCT, _MAX, _MIN, _AVG = range(5)
_NUMBERS = {"SUM": _SUM, "PRODUCT": _PRODUCT, "MAX": _MAX, "MIN": _MIN}
#: NCCL op for each reduction of bool arrays, whose values are 0 or 1.
_LOGICAL = {
    **dict.fromkeys(("SUM", "MAX", "BOR", "LOR"), _MAX),
    **dict.fromkeys(("PRODUCT", "MIN", "BAND", "LAND"), _MIN),
}
_FLOATS = {**_NUMBERS, "AVG": _AVG, "PREMUL_SUM": _SUM}
#: NCCL op for each reduction of complex numbers, which NCCL reduces as pairs of real numbers.
_COMPLEX = {"SUM": _SUM, "AVG": _AVG, "PREMUL_SUM": _SUM}
_FLOATING = ("float16", "float32", "float64", "bfloat16")


class Tools(NamedTuple):
    """The arguments of NCCL calls: the libraries, the communicator, the stream.

    Attributes:
        cuda: the CUDA runtime.
        nccl: the NCCL library.
        end: this rank's end of the communicator.
        rank: this rank.
        stream: stream of the calls.
        after: functions to call once the calls are on the stream, in reverse order.
        grouped: whether the calls are part of an NCCL group already.
    """

    cuda: Cuda
    nccl: Nccl
    end: NcclCommunicator
    rank: int
    stream: int
    after: list[Callable[[], None]]
    grouped: bool = False


#: A function that enqueues a call. Its arguments are the call's arrays, in the order of the plan's buffers, and
#: `Tools`.
Enqueue = Callable[[Sequence[DeviceArray | None], Tools], None]


class Native(NamedTuple):
    """A collective that NCCL carries out: its enqueue function and its arrays.

    Attributes:
        enqueue: result of `make_enqueue` for its plan.
        arrays: numbered as the plan's buffers.
    """

    enqueue: Enqueue
    arrays: Sequence[DeviceArray | None]


def way_of(plan: Plan, float8: bool) -> int:
    """Return the method for a call of a group that uses NCCL; the method is the same on all ranks.

    Args:
        plan: plan of the call.
        float8: whether NCCL and the devices of all ranks can reduce float8.
    """
    signature, spec = plan.signature, plan.signature.spec
    if spec.native is None:
        return STAGED
    if spec.reduces and (_reduction(signature) is None or (signature.dtype in _FLOAT8 and not float8)):
        return STAGED
    if spec.native not in ("all_gather", "reduce_scatter"):
        return PACKED
    return PACKED if len(set(signature.counts)) == 1 else GROUPED


def carry_out(calls: Sequence[Native], tools: Tools) -> None:
    """Enqueue collectives by NCCL; this may block until the other ranks enqueue them, too.

    Several calls form one NCCL group, and one kernel if NCCL supports it. So no call may write to memory that another
    call reads or writes.

    Raises:
        DeviceError: CUDA or NCCL has refused.
    """
    try:
        if len(calls) == 1:
            enqueue, arrays = calls[0]
            enqueue(arrays, tools)
            return
        with _group_calls(tools):
            for enqueue, arrays in calls:
                enqueue(arrays, tools._replace(grouped=True))
    finally:
        if tools.after:
            _call_all(tools.after)


def _call_all(after: list[Callable[[], None]]) -> None:
    """Call all functions in `after`, even if some of them fail."""
    with ExitStack() as stack:
        for call in after:
            stack.callback(call)
        after.clear()


def make_enqueue(plan: Plan, method: int) -> Enqueue:
    """Return the function that enqueues the calls of `plan` by the method `GROUPED` or `PACKED`."""
    signature = plan.signature
    spec, root = signature.spec, signature.root or 0
    match spec.native:
        case "all_reduce":
            return partial(_all_reduce, _Reduction.of(signature), plan.op)
        case "reduce":
            return partial(_reduce, _Reduction.of(signature), root)
        case "broadcast":
            return partial(_broadcast, root)
        case "all_gather":
            return partial(_all_gather, method)
        case "reduce_scatter":
            return partial(_reduce_scatter, _Reduction.of(signature), method)
        case "send_recv":
            return partial(_send_recv, spec, signature)
        case _:
            raise ValueError(f"NCCL cannot carry out {spec.kind}: stage it")


def _reduction(signature: Signature) -> int | None:
    """Return NCCL's number for a call's reduction op; None if NCCL cannot do this op on the dtype."""
    dtype, reduce = signature.dtype or "", signature.reduce or ""
    if dtype not in _TYPES:
        return None
    if reduce == "PREMUL_SUM" and signature.spec.native != "all_reduce":
        return None  # scaling would overwrite an array that is no output
    if dtype.startswith("complex"):
        return _COMPLEX.get(reduce)
    return (_LOGICAL if dtype == "bool" else _FLOATS if dtype in _FLOATING else _NUMBERS).get(reduce)


class _Reduction(NamedTuple):
    """The reduction op and dtype of a call, as NCCL's numbers.

    Attributes:
        each: number of NCCL elements per array element.
        dtype: number of the dtype.
        op: number of the op.
    """

    each: int
    dtype: int
    op: int

    @staticmethod
    def of(signature: Signature) -> _Reduction:
        """Return the reduction op and dtype of a call that NCCL can carry out."""
        dtype, op = signature.dtype or "", _reduction(signature)
        assert op is not None
        return _Reduction(2 if dtype.startswith("complex") else 1, _TYPES[dtype], op)


def _all_reduce(reduction: _Reduction, op: ReduceOp | None, arrays: Sequence[DeviceArray | None], tools: Tools) -> None:
    array = arrays[0]
    assert array is not None
    each, dtype, number = reduction
    if op is not None and op.factor is not None:
        tools.cuda.kernels.scale(array.ptr, array.ptr, array.size, array.dtype.name, op.factor, tools.stream)
    tools.end.all_reduce(array.ptr, array.ptr, array.size * each, dtype, number, tools.stream)


def _reduce(reduction: _Reduction, root: int, arrays: Sequence[DeviceArray | None], tools: Tools) -> None:
    array = arrays[0]
    assert array is not None
    each, dtype, number = reduction
    tools.end.reduce(array.ptr, array.ptr, array.size * each, dtype, number, root, tools.stream)


def _broadcast(root: int, arrays: Sequence[DeviceArray | None], tools: Tools) -> None:
    array = arrays[0]
    assert array is not None
    tools.end.broadcast(array.ptr, array.ptr, array.nbytes, _BYTES, root, tools.stream)


def _drop_missing(arrays: Sequence[DeviceArray | None]) -> list[DeviceArray]:
    """Return the arrays in a list that may contain None."""
    return [each for each in arrays if each is not None]


def _all_gather(method: int, arrays: Sequence[DeviceArray | None], tools: Tools) -> None:
    *blocks, source = _drop_missing(arrays)
    if method == PACKED and not _is_packed(blocks):
        whole = _scratch(sum(block.nbytes for block in blocks), tools)
        for address, block in _places(whole, blocks):
            tools.after.append(partial(tools.cuda.copy, block.ptr, address, block.nbytes, tools.stream))
        tools.end.all_gather(source.ptr, whole, source.nbytes, _BYTES, tools.stream)
        return
    given = source.ptr
    if source.size and _overlaps_out_of_place(source, blocks, tools.rank):
        given = _scratch(source.nbytes, tools)
        tools.cuda.copy(given, source.ptr, source.nbytes, tools.stream)
    if method == PACKED:
        tools.end.all_gather(given, blocks[0].ptr, source.nbytes, _BYTES, tools.stream)
        return
    with _group_calls(tools):
        for rank, block in enumerate(blocks):
            if block.size:
                start = given if rank == tools.rank else block.ptr
                tools.end.broadcast(start, block.ptr, block.nbytes, _BYTES, rank, tools.stream)


def _reduce_scatter(reduction: _Reduction, method: int, arrays: Sequence[DeviceArray | None], tools: Tools) -> None:
    *blocks, target = _drop_missing(arrays)
    each, dtype, number = reduction
    starts = [block.ptr for block in blocks]
    if method == PACKED and not _is_packed(blocks):
        whole = _scratch(sum(block.nbytes for block in blocks), tools)
        starts = []
        for address, block in _places(whole, blocks):
            starts.append(address)
            tools.cuda.copy(address, block.ptr, block.nbytes, tools.stream)
    if method == PACKED:
        tools.end.reduce_scatter(starts[0], target.ptr, target.size * each, dtype, number, tools.stream)
        return
    with _group_calls(tools):
        for rank, (start, block) in enumerate(zip(starts, blocks, strict=True)):
            if block.size:
                into = target.ptr if rank == tools.rank else start
                tools.end.reduce(start, into, block.size * each, dtype, number, rank, tools.stream)


def _is_packed(blocks: Sequence[DeviceArray]) -> bool:
    """Return whether equal-sized blocks are adjacent in memory and in rank order, as NCCL requires."""
    step = blocks[0].nbytes
    return all(block.ptr == blocks[0].ptr + rank * step for rank, block in enumerate(blocks))


def _overlaps_out_of_place(own: DeviceArray, blocks: Sequence[DeviceArray], rank: int) -> bool:
    """Return whether the input overlaps the output blocks, other than being this rank's own output block."""
    return any(own.overlaps(block) and (r != rank or own.ptr != block.ptr) for r, block in enumerate(blocks))


def _scratch(nbytes: int, tools: Tools) -> int:
    """Return the address of new scratch memory on the device, freed in stream order after the NCCL calls."""
    address = tools.cuda.scratch(nbytes, tools.stream)
    tools.after.append(partial(tools.cuda.scratch_free, address, tools.stream))
    return address


def _places(start: int, blocks: Sequence[DeviceArray]) -> Iterator[tuple[int, DeviceArray]]:
    """Yield each block with the address that it gets if all blocks are packed from `start` on."""
    for block in blocks:
        yield start, block
        start += block.nbytes


def _send_recv(spec: Spec, signature: Signature, arrays: Sequence[DeviceArray | None], tools: Tools) -> None:
    place = tools.rank, len(signature.sends or signature.receives), signature.root

    def by_peer(buffers: Sequence[int]) -> dict[int, DeviceArray]:
        given = ((buffer, arrays[buffer]) for buffer in buffers)
        return {spec.peer(buffer, *place[1:]): array for buffer, array in given if array is not None}

    _exchange(by_peer(spec.inputs(*place)), by_peer(spec.outputs(*place)), tools)


def _exchange(outgoing: dict[int, DeviceArray], incoming: dict[int, DeviceArray], tools: Tools) -> None:
    """Send an array to each peer, and receive an array from it; copy this rank's own array on the device."""
    own, kept = outgoing.pop(tools.rank, None), incoming.pop(tools.rank, None)
    if own is not None and kept is not None and own.size and own.ptr != kept.ptr:
        tools.cuda.copy(kept.ptr, own.ptr, own.nbytes, tools.stream)
    sends = [(peer, array) for peer, array in outgoing.items() if array.size]
    receives = [(peer, array) for peer, array in incoming.items() if array.size]
    if sends or receives:
        exchange(sends, receives, tools)


def exchange(
    sends: Sequence[tuple[int, DeviceArray]], receives: Sequence[tuple[int, DeviceArray]], tools: Tools
) -> None:
    """Enqueue sends and receives as one NCCL group; messages between two ranks match in list order.

    Args:
        sends: destination rank and array of each send.
        receives: source rank and array of each receive.
        tools: communicator and stream.

    Raises:
        DeviceError: CUDA or NCCL has refused.
    """
    with _group_calls(tools):
        for peer, array in sends:
            tools.end.send(array.ptr, array.nbytes, _BYTES, peer, tools.stream)
        for peer, array in receives:
            tools.end.recv(array.ptr, array.nbytes, _BYTES, peer, tools.stream)


@contextlib.contextmanager
def _group_calls(tools: Tools) -> Iterator[None]:
    """Combine the calls in this ``with`` block into one NCCL group, unless they are already part of a group."""
    if tools.grouped:
        yield
        return
    nccl = tools.nccl
    nccl.group_start()
    try:
        yield
    except BaseException:
        # End the NCCL group even after an error, but raise the first error, which is more useful.
        with contextlib.suppress(DeviceError):
            nccl.group_end()
        raise
    nccl.group_end()
