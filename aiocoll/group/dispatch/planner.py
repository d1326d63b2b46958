"""Planner of a group: it selects the algorithm, program and executor of each call."""

from __future__ import annotations

from typing import Any

from aiocoll.algorithms.program import Program
from aiocoll.algorithms.scale import scaled
from aiocoll.algorithms.select import IN_SLOTS, build, choose, lanes
from aiocoll.algorithms.spec import spec_of
from aiocoll.elements.dtypes import DType, by_name
from aiocoll.elements.ops import Kernel, ReduceOp, kernel
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.plan import Executor, Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.engine.operations.relay import BETWEEN_TWO, LONGEST, ROUND, Relay, messages_between_two
from aiocoll.engine.operations.round import Round
from aiocoll.engine.operations.shm_ring import MOST_PIECES, ShmRing
from aiocoll.engine.operations.signature import Signature
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.transport.frame import SEGMENT

__all__ = ["Planner"]

#: Maximum number of ranks for which every allreduce too large for slots uses the ring of chunk queues. With more ranks,
#: the ring, which takes two steps per rank, is slower for arrays just above this size.
RING_RANKS = 4
#: Maximum number of ranks for which every rank reduces a small tensor itself. With more ranks, one rank reduces for
#: all: this takes a fraction of the CPU time, and is not slower (`bench/RESULTS.md`).
ONESHOT_RANKS = 4
#: Maximum number of ranks for which barriers use slots: notifying each rank takes 1.5 µs.
BARRIER_IN_SLOTS = 64
#: Maximum number of bytes that a rank reads from slots for one call. Reducing this many bytes takes about 150 µs.
READ_AT_ONCE = 2 * SEGMENT

_INT64 = by_name("int64")
#: Maps each collective that can read large messages in place to the algorithm that it then uses. In these algorithms, a
#: rank reads directly from the ranks that have data for it.
_IN_PLACE = {"allreduce": "ring", "reduce_scatter": "ring", "allgather": "direct", "broadcast": "linear"}


class Planner:
    """The maker of plans for one group. The group's `CallCache` keeps the plans.

    Args:
        comm: this rank's communicator of the group.
        dry: whether this is a dry run. Its plans have no steps, since some algorithms have one step per rank.
    """

    def __init__(self, comm: Communicator, *, dry: bool) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._size = len(comm.ranks)
        self._dry = dry
        # The algorithm for small allreduces and barriers in shared memory.
        self._small = "oneshot" if self._size <= ONESHOT_RANKS else "central"

    def plan(
        self,
        kind: str,
        dtype: DType | None,
        sizes: tuple[Any, ...],
        *,
        op: ReduceOp | None = None,
        root: int | None = None,
        agreed: tuple[int, ...] | None = None,
    ) -> Plan:
        """Make the plan of a call.

        Args:
            kind: name of the collective, as in `algorithms.select`.
            dtype: dtype of the elements; None for a barrier.
            sizes: numbers of elements, in the form of `algorithms.select.build`.
            op: op of a reduction; None otherwise.
            root: root of the call; None without one.
            agreed: the counts that must be equal on all ranks; by default all of `sizes`.
        """
        # Make the kernel first, because that checks the op.
        made = kernel(op, dtype, self._size) if spec_of(kind).reduces else None  # type: ignore[arg-type]
        if made is not None and made.of_one is not None and kind == "exscan":
            made = made._replace(prescale=made.of_one)  # rank 1's result is the contribution of rank 0 alone
        name = None if op is None else op.wire_name
        plan = self.build_plan(kind, dtype, sizes, made, name, root, agreed)
        plan.op = op
        return plan

    def build_plan(
        self,
        kind: str,
        dtype: DType | None,
        sizes: tuple[Any, ...],
        made: Kernel | None,
        reduce: str | None,
        root: int | None,
        agreed: tuple[int, ...] | None = None,
    ) -> Plan:
        """Make a plan as the method `plan` does, but from a kernel and the op's name instead of the op."""
        counts = _flat(sizes)
        signature = Signature(
            kind.upper(),
            None if dtype is None else dtype.name,
            counts if agreed is None else agreed,
            root,
            reduce,
            *spec_of(kind).lengths(sizes, self._rank, root),
        )
        nbytes = (sum(sizes[0]) if sizes and isinstance(sizes[0], tuple) else sum(sizes)) * (
            0 if dtype is None else dtype.itemsize
        )
        if kind == "allreduce" and self._size == 1 and made is not None and made.prescale is made.of_one is None:
            # With a single rank, the result is the input. Running the reduction would double the time of the call.
            return Plan(signature, Program((), (), "alone"), dtype, made, ProgramExecutor)
        algorithm = choose(
            kind,
            nbytes,
            self._size,
            ordered=made is not None and made.ordered,
            portable=made is None or self._is_portable(made),
            tuning=self._comm.tuning,
            hosts=self._comm.hosts,
        )
        executor: Executor = ProgramExecutor
        relays = self._uses_chunk_queues(kind, algorithm, nbytes, made)
        if not relays and dtype is not None and (made is None or made.prescale is None):
            relays = self._uses_native_queues(kind, sizes, dtype.itemsize, root or 0, made)
        in_place = not (relays and self._comm.is_on_all_cards("native")) and self._can_read_in_place(
            kind, nbytes, sizes, made
        )
        if in_place:
            algorithm = _IN_PLACE[kind]
        elif made is None or made.prescale is None:
            if (name := self._slot_algorithm(kind, nbytes, sizes, made)) is not None:
                algorithm, executor = name, SlotProgram
            elif relays:
                algorithm, executor = "relay", ShmRing
        if dtype is not None and (unit := dtype.unit) != 1:  # a program counts elements of the storage dtype
            sizes = tuple(
                tuple(each * unit for each in size) if isinstance(size, tuple) else size * unit for size in sizes
            )
        if executor is ShmRing:
            plan = Plan(signature, Program((), (), algorithm), dtype, made, executor)
            chunk = self._comm.chunk_nbytes // plan.itemsize
            plan.relay = Relay.of(kind, sizes, self._rank, self._size, root or 0, chunk)
            return plan
        program = self._program(kind, algorithm, sizes, root, made)
        private = spec_of(kind).private
        if private and self._is_small(program, dtype):
            executor = SlotProgram
        plan = Plan(signature, program, dtype, made, executor)
        if executor is SlotProgram:
            ways = lanes(kind, program.algorithm, self._size)
            plan.round = Round.of(program, plan.itemsize, ways, self._comm.slots.small, private=private)
        elif private:
            plan.from_slots = tuple(
                index for index in plan.inbound.values() if plan.totals[index] <= self._comm.slots.largest
            )
        if in_place or private:
            plan.single_copy_from = self._comm.tuning.single_copy.limit(kind, self._size, reduces=made is not None)
        return plan

    def counting_plan(self, signature: Signature) -> Plan:
        """Make the plan with which a collective first gathers one integer from each rank."""
        counts = (1,) * self._size
        nbytes = _INT64.itemsize * self._size
        algorithm = choose("allgather", nbytes, self._size, tuning=self._comm.tuning, hosts=self._comm.hosts)
        return Plan(
            signature, self._program("allgather", algorithm, (counts,), None, None), _INT64, None, ProgramExecutor
        )

    def _program(
        self, kind: str, algorithm: str, sizes: tuple[Any, ...], root: int | None, made: Kernel | None
    ) -> Program:
        """Return this rank's program for an algorithm."""
        if self._dry:
            return Program((), (), algorithm)
        program = build(kind, algorithm, self._rank, self._size, *sizes, root=root or 0, hosts=self._comm.hosts)
        return program if made is None or made.prescale is None else self._scaled(program, kind, sizes, root)

    def _slot_algorithm(self, kind: str, nbytes: int, sizes: tuple[Any, ...], made: Kernel | None) -> str | None:
        """Return the algorithm for a call through slots; None if the contributions do not fit into slots."""
        if not self._comm.chunk_nbytes or self._size == 1:
            return None
        if kind == "barrier":
            return self._small if self._size <= BARRIER_IN_SLOTS else None
        if not nbytes or (kind, "oneshot") not in IN_SLOTS:
            return None
        longest = nbytes // sum(sizes[0]) * max(sizes[0]) if isinstance(sizes[0], tuple) else nbytes
        if not self._fits_in_slots(longest):
            return None
        if kind != "allreduce":
            return "oneshot"
        return self._small if made is not None and self._is_portable(made) else None

    def _uses_chunk_queues(self, kind: str, algorithm: str, nbytes: int, made: Kernel | None) -> bool:
        """Return whether a call uses the ring of chunk queues, which also works without the accelerator."""
        piece = self._comm.chunk_nbytes
        if not piece or self._size == 1 or not nbytes or (made is not None and (made.ordered or made.prescale)):
            return False
        if kind != "allreduce":
            return False
        pieces = 2 * (self._size - 1) * (nbytes // (self._size * piece) + 2)
        return (self._size <= RING_RANKS or algorithm == "ring") and pieces < MOST_PIECES

    def _uses_native_queues(
        self, kind: str, sizes: tuple[Any, ...], itemsize: int, root: int, made: Kernel | None
    ) -> bool:
        """Return whether a call uses chunk queues in a way that requires the accelerator on all ranks."""
        comm = self._comm
        kinds = BETWEEN_TWO if self._size == 2 else ROUND
        if kind not in kinds or self._size == 1 or not comm.chunk_nbytes or (made is not None and made.ordered):
            return False
        if kind == "scan" and made is not None and (made.finalize or made.of_one):
            return False  # rank 0 would have to transform its own data in place
        if self._size == 2:
            messages = messages_between_two(kind, sizes, self._rank, root)
        else:
            messages = _flat(sizes)
            if len(set(messages)) > 1 or (messages[0] * itemsize > LONGEST and comm.is_on_all_cards("reads")):
                return False
        longest = max(messages) * itemsize
        if longest <= comm.slots.largest or longest // comm.chunk_nbytes + 2 >= MOST_PIECES:
            return False
        return comm.is_on_all_cards("native")

    def can_relay_blocks(self) -> bool:
        """Return whether large blocks whose sizes only sender and receiver know can use chunk queues."""
        return self._size == 2 and bool(self._comm.chunk_nbytes) and self._comm.is_on_all_cards("native")

    def _is_portable(self, made: Kernel) -> bool:
        """Return whether all ranks compute the same bits for an element, even in NaNs."""
        return made.portable and (not made.nan_varies or self._comm.makes_same_nans)

    def _can_read_in_place(self, kind: str, nbytes: int, sizes: tuple[Any, ...], made: Kernel | None) -> bool:
        """Return whether all messages of a call are large enough for the peer to read them in place."""
        comm = self._comm
        if not comm.chunk_nbytes or self._size == 1 or kind not in _IN_PLACE or (made and made.ordered):
            return False
        if kind == "allreduce":
            nbytes //= self._size
        elif kind != "broadcast":
            nbytes = nbytes // max(sum(sizes[0]), 1) * min(sizes[0])
        limit = comm.tuning.single_copy.limit(kind, self._size, reduces=made is not None)
        return not self._fits_in_slots(nbytes) and nbytes >= limit and comm.is_on_all_cards("reads")

    def _is_small(self, program: Program, dtype: DType | None) -> bool:
        """Return whether all messages of a program fit into slots. Only sender and receiver know their sizes."""
        itemsize, largest = 1 if dtype is None else dtype.storage.itemsize, self._comm.slots.largest
        blocks = [action.region.count * itemsize for action in program.actions if action.peer >= 0]
        return bool(blocks) and max(blocks) <= largest

    def _fits_in_slots(self, nbytes: int) -> bool:
        """Return whether contributions of `nbytes` fit into slots, and can all be read in one callback."""
        return nbytes <= self._comm.slots.largest and nbytes * (self._size - 1) <= READ_AT_ONCE

    def _scaled(self, program: Program, kind: str, sizes: tuple[Any, ...], root: int | None) -> Program:
        spec, rank = spec_of(kind), self._rank
        counts = spec.counts(_flat(sizes), (), (), rank, root)
        inputs = spec.inputs(rank, self._size, root)
        in_place = inputs == spec.outputs(rank, self._size, root)
        return scaled(program, {buffer: counts[buffer] or 0 for buffer in inputs}, len(counts), in_place)


def _flat(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    flat: list[int] = []
    for size in sizes:
        flat.extend(size if isinstance(size, tuple) else (size,))
    return tuple(flat)
