"""Estimates of how long calls would take, from measurements of this machine; nothing is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiocoll.algorithms.cost import predict
from aiocoll.algorithms.load import Load, seconds_of
from aiocoll.algorithms.spec import Participants, spec_of
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.completion import Completion
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.dispatch.call import Call
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.work import Work

__all__ = ["Estimate", "Estimator", "Predicted"]


class Predicted(NamedTuple):
    """The estimate of one call.

    Attributes:
        op: name of the operation in capitals.
        nbytes: bytes of the whole vector of a collective, as `aiocoll.algorithms.choose` takes them; of a message its
            own bytes.
        algorithm: name of the algorithm that would be used; None if there is only one.
        seconds: from the call to its end.
    """

    op: str
    nbytes: int
    algorithm: str | None
    seconds: float


class Estimate:
    """The estimates of the calls in a block of `ProcessGroup.time_estimator`.

    Attributes:
        calls: each of them, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Predicted] = []

    @property
    def seconds(self) -> float:
        """The total time of the calls, one after the other."""
        return sum(call.seconds for call in self.calls)


class Estimator:
    """Takes the calls of one block, and adds their estimates."""

    moves_nothing = True

    def __init__(self, dispatcher: Dispatcher, estimate: Estimate) -> None:
        self._dispatcher = dispatcher
        self._estimate = estimate

    def take(self, call: Call) -> Work[Any]:
        """Add the estimate of a call."""
        if call.signature is not None and call.signature.device != "cpu":
            raise TypeError(f"{call.op} is on CUDA arrays, of which nothing has been measured: pass host arrays")
        d = self._dispatcher
        self._estimate.calls.append(_prediction(d.comm, call))
        completion = Completion(d.endpoint, call.op, None, call.key, d)
        call.expect(completion)
        completion.finish(call.result)
        completion.note_await()  # there is nothing to wait for
        work: Work[Any] = Work(completion)
        return work


def _prediction(comm: Communicator, call: Call) -> Predicted:
    signature, machine, size = call.signature, comm.tuning.machine, len(comm.ranks)
    if signature is None:
        return Predicted(call.op, call.nbytes, None, seconds_of(Load(1, 1, 1, call.nbytes, call.nbytes, 0), machine))
    if call.plan is not None:
        nbytes, algorithm = _whole(signature, comm) * call.plan.unit * call.plan.itemsize, call.plan.algorithm
    elif call.op == "MONITORED_BARRIER":
        nbytes, algorithm = 0, "linear"
    else:
        # Of objects, sparse arrays or counts yet unknown: messages go as those of the collective named first.
        spec = spec_of(call.op.lower().partition("_")[0])
        sends = 0 if spec.receivers is Participants.ROOT else size - 1
        receives = 0 if spec.senders is Participants.ROOT else size - 1
        load = Load(min(size - 1, 1), sends, receives, call.nbytes, 0, 0)
        return Predicted(call.op, call.nbytes, None, seconds_of(load, machine))
    kind, seconds = signature.op.lower(), 0.0
    if (kind, algorithm) in two_level.ALGORITHMS:
        seconds = two_level.predict(algorithm, kind, nbytes, comm.hosts, machine)
    elif size > 1:
        seconds = predict(algorithm, kind, nbytes, size, machine)
    return Predicted(call.op, nbytes, algorithm, seconds)


def _whole(signature: Signature, comm: Communicator) -> int:
    """Return the elements of the whole vector."""
    if signature.counts:
        return sum(signature.counts)
    known = max(sum(signature.sends), sum(signature.receives))
    return known if signature.root in (None, comm.rank) else known * len(comm.ranks)
