"""Plans: one rank's program of a collective, compiled for one dtype, for repeated use.

A plan contains everything that does not depend on the arrays of a call: sizes in bytes, dependencies, the destinations
of arriving messages, and the fingerprint of the signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aiocoll.algorithms.program import ActionKind, Program, Region
from aiocoll.completion import Completion
from aiocoll.elements.dtypes import DType
from aiocoll.elements.ops import Kernel, ReduceOp
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.relay import Relay
from aiocoll.engine.operations.round import Round
from aiocoll.engine.operations.signature import Signature
from aiocoll.transport.frame import SEGMENT

if TYPE_CHECKING:
    from aiocoll.engine.communicator import Communicator
    from aiocoll.native import core

__all__ = ["EAGER_WINDOW", "Executor", "Plan"]

#: Number of bytes of one message that may be sent before the receiver has entered the operation.
EAGER_WINDOW = SEGMENT

#: A function that creates the operation of a plan. Arguments: the communicator, the operation's id, the plan, the flat
#: arrays of the call, and the completion, which holds the timeout and the result.
Executor = Callable[["Communicator", int, "Plan", list[Any], Completion], Operation]


class Plan:
    """A program of a collective for one rank, compiled for one dtype.

    Tuple attributes are indexed by action, as in `Program`, with sizes in bytes. Arrays, `count` and the program are in
    elements of `storage`, of `itemsize` bytes. The signature is in elements of the dtype, each of which has `unit`
    storage elements.

    Attributes:
        inbound: the action of each arriving message, by ``peer << 16 | step``.
        grants: peers that send more than an eager window.
        round: the program sorted for `SlotProgram`; None if another executor carries it out.
        relay: the steps of `ShmRing`; None if another executor carries it out.
        from_slots: actions that receive messages which may arrive in a slot.
        single_copy_from: smallest message in bytes that the receiver reads in place; None for the general limit.
        steps: the accelerator's form of the plan; None before it is made, False if the accelerator cannot run the plan.
        executor: creates the operation that carries out the plan.
        op: reduce op of the call that the plan was made for.
        on_device: data of calls on a device.
    """

    __slots__ = (
        "after",
        "algorithm",
        "count",
        "dependents",
        "dtype",
        "executor",
        "fingerprint",
        "follow",
        "followers",
        "from_slots",
        "grants",
        "inbound",
        "itemsize",
        "kernel",
        "nbytes",
        "on_device",
        "op",
        "program",
        "relay",
        "round",
        "scratch",
        "signature",
        "single_copy_from",
        "sources",
        "start",
        "steps",
        "storage",
        "totals",
        "unit",
        "verbs",
    )

    def __init__(
        self, signature: Signature, program: Program, dtype: DType | None, kernel: Kernel | None, executor: Executor
    ) -> None:
        self.signature = signature
        self.executor = executor
        self.op: ReduceOp | None = None
        self.on_device: Any = None
        self.round: Round | None = None
        self.relay: Relay | None = None
        self.steps: core.Steps | Literal[False] | None = None
        self.from_slots: tuple[int, ...] = ()
        self.single_copy_from: float | None = None
        self.program = program.actions
        self.algorithm = program.algorithm
        self.kernel = kernel
        self.dtype = dtype
        self.storage: np.dtype[Any] = dtype.storage if dtype is not None else np.dtype(np.uint8)
        self.itemsize = self.storage.itemsize
        self.unit = dtype.unit if dtype is not None else 1
        self.count = signature.counts[0] * self.unit if signature.counts else 0
        self.nbytes = self.count * self.itemsize
        self.fingerprint = signature.fingerprint()
        self.scratch = program.scratch
        actions = program.actions
        self.verbs = tuple(action.verb for action in actions)
        self.totals = tuple(action.region.count * self.itemsize for action in actions)
        self.inbound = {
            action.peer << 16 | action.step: index
            for index, action in enumerate(actions)
            if action.verb in (ActionKind.RECV, ActionKind.COMBINE)
        }
        self.sources: tuple[tuple[Region, ...], ...] = tuple(
            action.sources or (action.region,) if action.verb is ActionKind.COMBINE else action.sources
            for action in actions
        )
        after, self.follow = self._dependencies()
        self.after = tuple(len(each) for each in after)
        self.dependents = _inverse(after)
        self.followers = _inverse(self.follow)
        self.start = tuple(index for index, each in enumerate(after) if not each)
        self.grants = self._grants()

    def copy(self) -> Plan:
        """Return another plan with the same content."""
        program = Program(self.program, self.scratch, self.algorithm)
        made = Plan(self.signature, program, self.dtype, self.kernel, self.executor)
        made.op, made.round, made.relay = self.op, self.round, self.relay
        made.from_slots, made.single_copy_from = self.from_slots, self.single_copy_from
        return made

    def _dependencies(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return, for each action, the actions that must end before it, and the actions whose progress it follows.

        An action that would follow an empty one waits for its completion instead, since an empty action has no
        progress.
        """
        after, follow = [], []
        for action, total in zip(self.program, self.totals, strict=True):
            after.append(tuple(dict.fromkeys(action.after if total else action.after + action.follow)))
            follow.append(action.follow if total else ())
        return tuple(after), tuple(follow)

    def _grants(self) -> tuple[int, ...]:
        expected: dict[int, int] = {}
        for index in self.inbound.values():
            peer = self.program[index].peer
            expected[peer] = max(expected.get(peer, 0), self.totals[index])
        return tuple(peer for peer, nbytes in expected.items() if nbytes > EAGER_WINDOW)


def _inverse(links: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    inverse: list[list[int]] = [[] for _ in links]
    for index, targets in enumerate(links):
        for target in targets:
            inverse[target].append(index)
    return tuple(tuple(each) for each in inverse)
