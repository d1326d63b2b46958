"""What hooks are told of an operation."""

from __future__ import annotations

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.operation_log import ENDED, ENTERED
from aiocoll.engine.operations.signature import P2P
from aiocoll.hooks import OperationInfo

__all__ = ["told"]


def told(operation: Operation, error: BaseException | None) -> OperationInfo:
    """Return what hooks are told of an operation that starts, or has ended."""
    comm, signature, completion, ended = (
        operation.comm,
        operation.signature,
        operation.completion,
        operation.entry[ENDED],
    )
    return OperationInfo(
        comm.name,
        comm.rank,
        completion.op,
        "message" if operation.id & P2P == P2P else "collective",
        completion.key,
        completion.seq,
        signature.nbytes(completion.shape),
        signature.dtype,
        None if ended is None else ended - operation.entry[ENTERED],
        operation.algorithm(),
        operation.carriers(),
        error,
    )
