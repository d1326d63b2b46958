"""Native calls of a group: conditions for using the C accelerator, and the takeover of its calls by Python.

The accelerator carries out small collectives in shared memory if they need nothing special. It uses the schedules, ids
and memory of `SlotProgram`, so ranks with and without it work together. A native call that later needs something
special continues as a `SlotProgram` that has posted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

from aiocoll.completion import Completion
from aiocoll.engine.native_reasons import log_obstacle, log_reasons, obstacle
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.relay import Relay
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.errors import ProtocolError
from aiocoll.native import core

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator

__all__ = ["native_calls"]

#: Maximum seconds for which native calls wait for a free slot: a few kernel time slices on a busy host.
MAX_WAIT: Final = 10e-3

_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


def native_calls(comm: Communicator, owner: Any, work_type: type[Any], scope: Callable[[], Any]) -> core.Calls | None:
    """Return the C accelerator's object for a group. If the group cannot use the accelerator, log why and return None.

    Args:
        comm: this rank's part in the group.
        owner: the dispatcher of the group, to which completions refer; not kept.
        work_type: `Work`.
        scope: returns the block around a call, of any group.
    """
    if core is None:
        return None
    if reason := obstacle(comm, owner.options.debug):
        log_obstacle(comm, reason)
        return None
    seams = _NativeCallbacks(comm)
    polling = comm.polling
    calls = core.Calls(
        comm,
        owner,
        work_type,
        {
            "resolve": comm.slots.native_lanes,
            "make_steps": seams.make_steps,
            "guard": owner.failures.guard,
            "overwritten": seams.overwritten,
            "find_one": owner.plans.one,
            "find_parts": owner.plans.plan_of_parts,
            "find_lists": owner.plans.plan_of_lists,
            "find_barrier": owner.plans.barrier,
            "flatten": owner.plans.flatten,
            "operation": seams.operation,
            "remember": comm.in_flight.remember,
            "scope": scope,
            "stop_polling": polling.stop_until_next_iteration,
            "quiet": comm.context.run_quietly,
            "wait": seams.wait,
        },
        _FOLDER,
        comm.id,
        comm.rank,
        len(comm.ranks),
        polling.spin_seconds,
        polling.crowded,
    )
    comm.in_flight.native = calls
    polling.readers[calls] = None
    log_reasons(comm)
    return calls


class _NativeCallbacks:
    """Python functions of one group that the C accelerator calls."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # Whether native calls wait for free slots, and the time at which the wait started.
        self._is_waiting = False
        self._since = 0.0

    def make_steps(self, plan: Plan) -> core.Steps | Literal[False]:
        """Compile a plan for the C accelerator; return False if the accelerator cannot carry the plan out."""
        plan.steps = False
        step = plan.round
        kernel = plan.kernel
        if plan.relay is not None:
            return self._make_relay(plan, plan.relay)
        if step is None or plan.executor is not SlotProgram or (kernel is not None and not kernel.is_builtin):
            return False
        arrays = [each.buffer for each in (*step.first, *step.last) if each.nbytes]
        arrays += [buffer for _, buffer in (*step.own, *step.moves)]
        arrays += [buffer for pair in step.copies for buffer in pair]
        arrays += [] if step.fold is None else [step.fold]
        # For a single element, NumPy uses another code path and rounds a complex product differently.
        ufunc = None if kernel is None or not kernel.portable else kernel.ufunc
        return self._make(plan, max(arrays, default=-1) + 1, tuple(step), ufunc)

    def _make_relay(self, plan: Plan, relay: Relay) -> core.Steps | Literal[False]:
        """Compile a plan for large arrays for the C accelerator; return False if it cannot carry the plan out."""
        kernel, ends = plan.kernel, {region.count % relay.chunk for region in relay.sources}
        # For a single element, NumPy uses another code path and produces different NaNs.
        if relay.sources and (kernel is None or kernel.ufunc is None or not kernel.is_builtin or 1 in ends):
            return False
        ways = relay.puts, relay.takes, relay.sources, relay.copy or ()
        regions = [tuple((each.buffer, each.start, each.stop) for each in way) for way in ways]
        buffers = 1 + max(buffer for way in regions for buffer, _, _ in way)
        return self._make(
            plan, buffers, (relay.chunk, relay.behind, *regions), None if kernel is None else kernel.ufunc
        )

    def _make(self, plan: Plan, buffers: int, step: tuple[Any, ...], ufunc: Any) -> core.Steps:
        assert core is not None
        kernel, signature = plan.kernel, plan.signature
        described = plan, signature.op.lower(), signature.op, signature, plan.fingerprint, plan.storage
        fold = None if kernel is None else kernel.fold
        plan.steps = steps = core.Steps(*described, buffers, len(self._comm.ranks), step, ufunc, fold)
        return steps

    def operation(
        self, identity: int, plan: Plan, arrays: list[Any], completion: Completion, entered: float
    ) -> Operation:
        """Return a Python operation equal to a native call. Its method `adopt` takes the call over."""
        operation = plan.executor(self._comm, identity, plan, arrays, completion)
        operation.entered = entered
        return operation

    def overwritten(self, peer: int) -> None:
        """Raise an error: a peer that no longer waits for this rank has overwritten the slot that this rank reads.

        Raises:
            ProtocolError: always.
        """
        rank = self._comm.ranks[peer]
        raise ProtocolError(f"rank {rank} no longer waits for this rank, and has overwritten the slot being read")

    def wait(self) -> None:
        """Look for free slots in every loop iteration, because native calls wait for slots."""
        self._since = self._comm.runtime.ticks()
        if not self._is_waiting:
            self._is_waiting = True
            self._comm.call_soon(self._look_for_slots)

    def _look_for_slots(self) -> None:
        comm = self._comm
        self._is_waiting = False
        native, now = comm.in_flight.native, comm.runtime.ticks()
        if native is None:
            return
        before = native.waiting
        native.look()
        if native.waiting == before and now - self._since > MAX_WAIT:
            native.give_up()
        if not native.waiting:
            return
        if native.waiting < before:
            self._since = now
        else:
            os.sched_yield()  # yield the core, which the rank that must free the slot may need
        self._is_waiting = True
        comm.call_soon(self._look_for_slots)
