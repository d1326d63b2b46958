"""Fusion of recorded calls: the choice of the calls to fuse, and the plans of the fused operations.

The layout of a list of calls is computed once, and kept for equal lists.

If all ranks run the accelerator, small calls are not fused: packing 100 calls of 4 KiB takes twice as long (bench/).

All ranks must make the same decisions. Therefore these depend only on the parts of the calls that are equal on all
ranks. `Bucket.stamps` detects differences in the other parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from aiocoll.algorithms.spec import Spec
from aiocoll.elements.dtypes import by_name
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.fusion.layout import CHUNK, Bucket, Layout
from aiocoll.engine.operations.manifest import Manifest
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.group.dispatch.planner import Planner

__all__ = ["LARGE", "Fuser"]

#: Bytes of a call's tensor, or of the blocks of all ranks together, from which the call is not fused, because copying
#: would take longer than a separate message. All ranks have the same limit, so that they fuse the same calls. Calls
#: whose counts only two ranks know are always fused.
LARGE = 128 * 1024
#: Maximum number of calls whose arrays are copied in one step.
MOST = 128
#: Maximum number of cached layouts.
LAYOUTS = 16
#: Number of bytes in a stamp, a hash at the start of a fused buffer by which the receiver detects different counts.
STAMP = 8

#: The element type of fused calls on elements that consist of several stored items, such as structured elements.
_BYTES = by_name("uint8")

#: A recorded call: its plan, or its signature if there is no plan.
Called = Plan | Signature


class Fuser:
    """The maker of layouts, which describe how a list of recorded calls is carried out.

    Args:
        comm: this rank's communicator of the group.
        planner: planner of the group.
    """

    def __init__(self, comm: Communicator, planner: Planner) -> None:
        self._rank = comm.rank
        self._size = len(comm.ranks)
        self._planner = planner
        #: True if small calls are not fused: the accelerator carries out each of them in 1 µs, which is less than
        #: packing takes.
        self.has_singles = bool(comm.chunk_nbytes) and self._size > 1 and comm.is_on_all_cards("native")
        self._small = comm.slots.small if self.has_singles else 0
        self._layouts: dict[tuple[bool, bool, tuple[Called, ...]], Layout] = {}

    def layout(self, calls: tuple[Called, ...], together: bool = True, *, allow_singles: bool = False) -> Layout:
        """Return the layout for a list of recorded calls.

        Args:
            calls: the recorded calls.
            together: whether all calls on a device form one bucket, instead of one bucket each.
            allow_singles: whether small calls are not fused, if the group `has_singles`.
        """
        layouts = self._layouts
        key = together, allow_singles, calls
        found = layouts.get(key)
        if found is None:
            if len(layouts) >= LAYOUTS:
                del layouts[next(iter(layouts))]
            found = layouts[key] = self._lay_out(calls, together, allow_singles and self.has_singles)
        return found

    def _lay_out(self, calls: tuple[Called, ...], together: bool, allow_singles: bool) -> Layout:
        names = _SignatureTable()
        entries = [names.entry(call) for call in calls]
        manifest = Manifest([entry.signature for entry in entries])
        fingerprint = crc32(b"".join(entry.hash for entry in entries), crc32(b"coalesced"))
        members: dict[Any, list[int]] = {}
        for position, (call, entry) in enumerate(zip(calls, entries, strict=True)):
            # A call that is not fused gets a bucket of its own.
            bucket: object = position
            if isinstance(call, Signature):
                if together and call.device != "cpu":
                    bucket = call.device
            elif not _is_large(call):
                bucket = *entry.signature[:2], *entry.signature[3:5], allow_singles and self._is_single(call)
            members.setdefault(bucket, []).append(position)
        buckets = [self._bucket(calls, positions, allow_singles) for positions in members.values()]
        singles: list[Plan | None] = [None] * len(calls)
        made: dict[int, Plan] = {}
        for bucket in buckets:
            if bucket.single:
                for position in bucket.members:
                    call = calls[position]
                    assert isinstance(call, Plan)
                    singles[position] = made.get(id(call)) or made.setdefault(id(call), call.copy())
        for plan in (*(bucket.plan for bucket in buckets if not bucket.single), *made.values()):
            if plan is not None:
                plan.signature, plan.fingerprint = plan.signature._replace(members=manifest), fingerprint
        signature = Signature("COALESCED", None, (), None, None, members=manifest)
        return Layout(signature, fingerprint, tuple(buckets), tuple(singles) if made else ())

    def _is_single(self, plan: Plan) -> bool:
        """Return whether a call is small enough to run unfused; always True if only two ranks know its counts."""
        if plan.kernel is not None and (plan.kernel.ufunc is None or not plan.kernel.portable):
            return False  # a Python function carries out the reduction
        if plan.signature.spec.private:
            return True
        longest = max(plan.signature.counts, default=0) * plan.unit * plan.itemsize
        return plan.executor is SlotProgram and longest <= self._small

    def _bucket(self, calls: Sequence[Called], positions: Sequence[int], allow_singles: bool) -> Bucket:
        plans = [call for call in (calls[position] for position in positions) if isinstance(call, Plan)]
        if not plans:
            return Bucket(tuple(positions), None)
        signature, spec = plans[0].signature, plans[0].signature.spec
        reads = spec.inputs(self._rank, self._size, signature.root)
        writes = spec.outputs(self._rank, self._size, signature.root)
        if allow_singles and self._is_single(plans[0]):
            return Bucket(tuple(positions), plans[0], reads=reads, writes=writes, single=True)
        if len(positions) == 1:
            return Bucket(tuple(positions), plans[0].copy(), reads=reads, writes=writes)
        counts = _columns([self._counts(spec, plan) for plan in plans])
        stamps = sources = None
        if spec.private:
            size = -(-STAMP // plans[0].itemsize)
            stamps = {at: _stamp(each, size, plans[0].storage) for at, each in enumerate(counts) if each is not None}
            sources = {buffer: spec.peer(buffer, self._size, signature.root) for buffer in writes}
        bucket = Bucket(
            tuple(positions),
            None,
            counts,
            reads,
            writes,
            stamps,
            sources,
            tuple(_part_bounds(counts, plans[0].itemsize)) if counts else (0, len(plans)),
            all(plan is plans[0] for plan in plans),
            plans[0].kernel is not None and plans[0].kernel.prescale is not None,
        )
        sizes = [bucket.size(buffer) for buffer in range(len(counts))]
        return bucket._replace(plan=self._fused(plans[0], sizes))

    def _fused(self, like: Plan, sizes: Sequence[int | None]) -> Plan:
        """Make the plan of a fused call from calls like `like`, without a prescaling factor: packing applies it."""
        signature, spec, kernel = like.signature, like.signature.spec, like.kernel
        if kernel is not None and kernel.prescale is not None:
            kernel = kernel._replace(prescale=None)
        dtype = _BYTES if like.unit != 1 else like.dtype
        agreed = () if spec.private else None
        given = spec.sizes(sizes, self._rank)
        return self._planner.build_plan(spec.kind, dtype, given, kernel, signature.reduce, signature.root, agreed)

    def _counts(self, spec: Spec, plan: Plan) -> tuple[int | None, ...]:
        """Return the number of elements in each buffer of a fused call, in units of the plan's storage dtype."""
        signature, unit = plan.signature, plan.unit
        counts = spec.counts(signature.counts, signature.sends, signature.receives, self._rank, signature.root)
        return counts if unit == 1 else tuple(None if count is None else count * unit for count in counts)


class _Entry(NamedTuple):
    signature: Signature
    hash: bytes


class _SignatureTable:
    """A table of the recorded calls' signatures. Different user functions with the same name get numbers."""

    def __init__(self) -> None:
        self._functions: dict[str, list[Any]] = {}
        self._known: dict[int, _Entry] = {}

    def entry(self, call: Called) -> _Entry:
        """Return the signature of a call, and the hash of that signature."""
        known = self._known.get(id(call))
        if known is None:
            signature = call if isinstance(call, Signature) else self._named(call)
            known = self._known[id(call)] = _Entry(signature, signature.fingerprint().to_bytes(4, "little"))
        return known

    def _named(self, plan: Plan) -> Signature:
        signature, op = plan.signature, plan.op
        if op is None or op.function is None:
            return signature
        functions = self._functions.setdefault(op.wire_name, [])
        number = next((at for at, each in enumerate(functions) if each is op.function), len(functions))
        if number == len(functions):
            functions.append(op.function)
        return signature if not number else signature._replace(reduce=f"{signature.reduce}#{number + 1}")


def _is_large(plan: Plan) -> bool:
    return not plan.signature.spec.private and sum(plan.signature.counts) * plan.unit * plan.itemsize >= LARGE


def _columns(rows: Iterable[tuple[int | None, ...]]) -> tuple[tuple[int, ...] | None, ...]:
    """Transpose a table of counts from one row per call to one row per buffer."""
    return tuple(None if column[0] is None else column for column in zip(*rows, strict=True))


def _part_bounds(counts: Sequence[tuple[int, ...] | None], itemsize: int) -> Iterable[int]:
    """Yield the positions that divide calls into parts of at most `CHUNK` bytes (or one call) and `MOST` calls."""
    yield 0
    start = nbytes = 0
    sizes = [sum(each) * itemsize for each in zip(*(column for column in counts if column is not None), strict=True)]
    for position, size in enumerate(sizes):
        if position > start and (nbytes + size > CHUNK or position == start + MOST):
            yield position
            start, nbytes = position, 0
        nbytes += size
    yield len(sizes)


def _stamp(counts: tuple[int, ...], size: int, storage: np.dtype[Any]) -> NDArray[Any]:
    """Return a stamp, the hash of `counts`, as elements for the start of a fused buffer."""
    stamp = np.zeros(size * storage.itemsize, np.uint8)
    stamp[:STAMP] = np.frombuffer(blake2b(repr(counts).encode(), digest_size=STAMP).digest(), np.uint8)
    return stamp.view(storage)
