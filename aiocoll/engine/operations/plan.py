"""A `Plan`: one rank's program of a collective, compiled for one dtype, to be run many times.

Everything that does not depend on the arrays of a call is calculated here once: sizes in bytes, dependencies, the
destinations of arriving messages, and the fingerprint of what all ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aiocoll.algorithms.program import Program, Region, Verb
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

#: Bytes of one message that may be sent before its receiver has entered the operation.
EAGER_WINDOW = SEGMENT

#: Makes the operation of a plan, given: this rank's part in the group, the operation's id, the plan, the flat arrays
#: of the call, and the completion, which has the timeout and the result.
Executor = Callable[["Communicator", int, "Plan", list[Any], Completion], Operation]


class Plan:
    """A compiled program.

    Attributes are parallel tuples indexed by action, as in `Program`, with sizes in bytes; `inbound` finds the action
    of an arriving message by ``peer << 16 | step``; `grants` are the peers that send more than an eager window;
    `round` is the program sorted for `SlotProgram`, if that carries it out; `relay` is what `ShmRing` does;
    `from_slots` are actions of other programs that receive what may be in a slot; `single_copy_from` are bytes of a
    message from which its receiver reads it where it lies, None where the rule for any message holds; `steps` is what
    the accelerator makes of it, None before, False if nothing; `executor` carries it out; `op` is how the call that
    it was made for reduces; `on_device` is what calls on a device know of it. Arrays, `count` and the program are in
    elements of `storage`, of `itemsize` bytes; the signature is in elements of the dtype, which have `unit` of them.
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
            if action.verb in (Verb.RECV, Verb.COMBINE)
        }
        self.sources: tuple[tuple[Region, ...], ...] = tuple(
            action.sources or (action.region,) if action.verb is Verb.COMBINE else action.sources for action in actions
        )
        after, self.follow = self._dependencies()
        self.after = tuple(len(each) for each in after)
        self.dependents = _inverse(after)
        self.followers = _inverse(self.follow)
        self.start = tuple(index for index, each in enumerate(after) if not each)
        self.grants = self._grants()

    def copy(self) -> Plan:
        """Return another plan for the same."""
        program = Program(self.program, self.scratch, self.algorithm)
        made = Plan(self.signature, program, self.dtype, self.kernel, self.executor)
        made.op, made.round, made.relay = self.op, self.round, self.relay
        made.from_slots, made.single_copy_from = self.from_slots, self.single_copy_from
        return made

    def _dependencies(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """An action that follows an empty one waits for its completion: there is no progress to follow."""
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
