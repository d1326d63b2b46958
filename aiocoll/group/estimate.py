"""How long calls would take: predicted from what was measured of this machine, with nothing sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from aiocoll.algorithms.cost import Load, predict, seconds_of
from aiocoll.algorithms.spec import Ranks, spec_of
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Signature
from aiocoll.group.calls import Call
from aiocoll.group.launch import Launcher
from aiocoll.work import Work

__all__ = ["Estimate", "Estimates", "Predicted"]


class Predicted(NamedTuple):
    """What one call would take.

    Attributes:
        op: name of the operation in capitals.
        nbytes: bytes of the whole vector of a collective, as `aiocoll.algorithms.choose` takes them; of a message its
            own.
        algorithm: name of what would carry it out; None for what has only one way.
        seconds: from the call to the end.
    """

    op: str
    nbytes: int
    algorithm: str | None
    seconds: float


class Estimate:
    """What the calls in a block of `ProcessGroup.time_estimator` would take.

    Attributes:
        calls: each of them, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Predicted] = []

    @property
    def seconds(self) -> float:
        """Of all of them, one after the other."""
        return sum(call.seconds for call in self.calls)


class Estimates(Launcher):
    """The part of a group that predicts."""

    @contextlib.contextmanager
    def time_estimator(self) -> Iterator[Estimate]:
        """Predict how long the calls in this block would take, in place of making them.

            with pg.time_estimator() as estimate:
                pg.allreduce(gradients)
                pg.barrier()
            print(estimate.seconds, estimate.calls)

        The calls check their arguments, send nothing, take no number and leave arrays as they are; their works have
        ended, and yield what they are given (objects: None). It is local: other ranks need not do the same. Tasks
        started in the block predict too; other groups, and other tasks, go on as always.

        What is predicted is a call that all ranks enter together, on a machine that does nothing else: the formulas of
        `aiocoll.algorithms.cost` with the numbers of the machine, which are defaults unless `aiocoll bench --tune` has
        measured them. Calls count one after the other, also where they would overlap. Of objects only the bytes that
        this rank sends are known; of gather and scatter, off the root, those of equal shares. Sparse arrays count as if
        all ranks' were of the same size and sent as they are. Of ranks on several hosts each is taken to be as far from
        any other as the hosts are. What ``debug="detail"`` adds is left out.

        Accuracy, as ``bench/estimate.py`` finds it: good for comparing calls, and for the order of magnitude of one.
        See the table in ``docs/estimates.md``.
        """
        self._check()
        estimate = Estimate()
        with self._scoped(_Estimator(self, estimate)):
            yield estimate


class _Estimator:
    """Takes the calls of one block."""

    def __init__(self, group: Launcher, estimate: Estimate) -> None:
        self._group = group
        self._estimate = estimate

    def take(self, call: Call) -> Work[Any]:
        """Note what the call would take."""
        if call.terms is not None and call.terms.device != "cpu":
            raise TypeError(f"{call.op} is on CUDA arrays, of which nothing has been measured: pass host arrays")
        member = self._group._member
        self._estimate.calls.append(_prediction(member, call))
        work: Work[Any] = Work(member.endpoint, call.op, None, call.key, self._group, 4)
        call.expect(work)
        work._finish(call.result)
        return work


def _prediction(member: Communicator, call: Call) -> Predicted:
    terms, machine, size = call.terms, member.tuning.machine, len(member.ranks)
    if terms is None:
        return Predicted(call.op, call.nbytes, None, seconds_of(Load(1, 1, 1, call.nbytes, call.nbytes, 0), machine))
    if call.plan is not None:
        nbytes, algorithm = _whole(terms, member) * call.plan.itemsize, call.plan.algorithm
    elif call.op == "MONITORED_BARRIER":
        nbytes, algorithm = 0, "linear"
    else:
        # Of objects, or a sparse array: messages go as those of the collective that it is named after.
        spec = spec_of(call.op.lower().removesuffix("_object").removesuffix("_sparse"))
        sends = 0 if spec.receivers is Ranks.ROOT else size - 1
        receives = 0 if spec.senders is Ranks.ROOT else size - 1
        load = Load(min(size - 1, 1), sends, receives, call.nbytes, 0, 0)
        return Predicted(call.op, call.nbytes, None, seconds_of(load, machine))
    kind, seconds = terms.op.lower(), 0.0
    if (kind, algorithm) in two_level.ALGORITHMS:
        seconds = two_level.predict(algorithm, kind, nbytes, member.hosts, machine)
    elif size > 1:
        seconds = predict(algorithm, kind, nbytes, size, machine)
    return Predicted(call.op, nbytes, algorithm, seconds)


def _whole(terms: Signature, member: Communicator) -> int:
    """Return the elements of the whole vector."""
    if terms.counts:
        return sum(terms.counts)
    known = max(sum(terms.sends), sum(terms.receives))
    return known if terms.root in (None, member.rank) else known * len(member.ranks)
