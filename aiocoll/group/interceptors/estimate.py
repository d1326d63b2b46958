"""Estimates of call durations from measurements of this machine, without sending anything."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiocoll.algorithms.cost import predict
from aiocoll.algorithms.load import Load, seconds_of
from aiocoll.algorithms.select import choose
from aiocoll.algorithms.spec import Method, Participants
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.completion import Completion
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.dispatch.devices import devices
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.prepared_call import FactoryCall, MessageCall, PlannedCall, PreparedCall
from aiocoll.work import Work

__all__ = ["Estimate", "Estimator", "Predicted"]


class Predicted(NamedTuple):
    """The estimated duration of one call.

    Attributes:
        op: name of the operation in capitals.
        nbytes: bytes of the whole vector of a collective, as for `aiocoll.algorithms.choose`; bytes of a message.
        algorithm: name of the algorithm that would be used; None if there is only one.
        seconds: time from the call to its end.
    """

    op: str
    nbytes: int
    algorithm: str | None
    seconds: float


class Estimate:
    """The estimates of all calls in a block of `ProcessGroup.time_estimator`.

    Attributes:
        calls: one estimate per call, in order.
    """

    def __init__(self) -> None:
        self.calls: list[Predicted] = []

    @property
    def seconds(self) -> float:
        """The sum of the estimated durations of all calls."""
        return sum(call.seconds for call in self.calls)


class Estimator:
    """An interceptor that estimates the calls of a block instead of starting them."""

    moves_nothing = True
    records = False
    native = None

    def __init__(self, dispatcher: Dispatcher, estimate: Estimate) -> None:
        self._dispatcher = dispatcher
        self._estimate = estimate

    def take(self, call: PreparedCall) -> Work[Any]:
        """Add the estimate of a call; return a work that has already ended."""
        if call.signature is not None and call.signature.device != "cpu":
            label = devices.get(call.signature.device).label
            raise TypeError(f"{call.op} is on {label} arrays, for which there are no measurements: pass host arrays")
        d = self._dispatcher
        self._estimate.calls.append(_prediction(d.comm, call))
        completion = Completion(d.endpoint, call.op, None, call.key, d)
        call.expect(completion)
        completion.finish(call.result)
        completion.note_await()  # avoid a warning if the program does not await it
        work: Work[Any] = Work(completion)
        return work


def _prediction(comm: Communicator, call: PreparedCall) -> Predicted:
    machine, size = comm.tuning.machine, len(comm.ranks)
    if isinstance(call, MessageCall):
        return Predicted(call.op, call.nbytes, None, seconds_of(Load(1, 1, 1, call.nbytes, call.nbytes, 0), machine))
    if isinstance(call, PlannedCall):
        nbytes = _vector_length(call.signature, comm) * call.plan.unit * call.plan.itemsize
        return _estimate_program(comm, call.op, nbytes, call.plan.algorithm)
    assert isinstance(call, FactoryCall)
    spec = call.signature.spec
    if spec.method is Method.PROGRAM:
        algorithm = choose(spec.kind, call.nbytes, size, tuning=comm.tuning, hosts=comm.hosts)
        return _estimate_program(comm, call.op, call.nbytes, algorithm)
    # Collectives without an algorithm send each message directly from the sender to the receiver.
    sends = 0 if spec.receivers is Participants.ROOT else size - 1
    receives = 0 if spec.senders is Participants.ROOT else size - 1
    load = Load(min(size - 1, 1), sends, receives, call.nbytes, 0, 0)
    return Predicted(call.op, call.nbytes, None, seconds_of(load, machine))


def _estimate_program(comm: Communicator, op: str, nbytes: int, algorithm: str) -> Predicted:
    """Return the estimated duration of a call with the given algorithm."""
    kind, machine, size, seconds = op.lower(), comm.tuning.machine, len(comm.ranks), 0.0
    if (kind, algorithm) in two_level.ALGORITHMS:
        seconds = two_level.predict(algorithm, kind, nbytes, comm.hosts, machine)
    elif size > 1:
        seconds = predict(algorithm, kind, nbytes, size, machine)
    return Predicted(op, nbytes, algorithm, seconds)


def _vector_length(signature: Signature, comm: Communicator) -> int:
    """Return the number of elements in a call's tensor, or in the blocks of all ranks together."""
    if signature.counts:
        return sum(signature.counts)
    known = max(sum(signature.sends), sum(signature.receives))
    return known if signature.root in (None, comm.rank) else known * len(comm.ranks)
