"""Information about an operation, as hooks receive it."""

from __future__ import annotations

from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import P2P
from aiocoll.hooks import OperationInfo

__all__ = ["operation_info"]


def operation_info(operation: Operation, error: BaseException | None, seconds: float | None) -> OperationInfo:
    """Build the `OperationInfo` that hooks receive.

    Args:
        operation: the operation that starts or has ended.
        error: the error of the operation; None without one.
        seconds: duration of the operation in seconds; None at its start.
    """
    comm, signature, completion = operation.comm, operation.signature, operation.completion
    return OperationInfo(
        comm.name,
        comm.rank,
        completion.op,
        "message" if operation.id & P2P == P2P else "collective",
        completion.key,
        completion.seq,
        signature.nbytes(completion.shape),
        signature.dtype,
        seconds,
        operation.algorithm(),
        operation.carriers(),
        error,
    )
