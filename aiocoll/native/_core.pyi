"""Types of the accelerator in C. Its docstrings have the same signatures, and a test compares both."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, final

import numpy as np
from _typeshed import ReadableBuffer, WriteableBuffer
from numpy.typing import NDArray

from aiocoll.completion import Completion
from aiocoll.elements.ops import ReduceOp
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.transport.shm.slots import LaneWriter
from aiocoll.work import Work

VERSION: Final[int]
LAYOUT: Final[dict[str, int]]
BUILT_FOR: Final[str]
BUILT_WITH: Final[str]

def configure(
    await_: Callable[[Any], Generator[Any, None, Any]],
    done: Callable[[Any], bool],
    result: Callable[[Any], Any],
    exception: Callable[[Any], BaseException | None],
    make_completion: Callable[..., Completion],
    /,
) -> None: ...

@final
class CommonLane:
    def __init__(
        self,
        memory: WriteableBuffer,
        layout: tuple[int, ...],
        posted: WriteableBuffer,
        ready: WriteableBuffer,
        readers: list[Sequence[LaneWriter]],
        reserve: Callable[[int, int], bool],
        /,
    ) -> None: ...
    def close(self) -> None: ...

@final
class PeerLanes:
    def __init__(
        self,
        memory: WriteableBuffer,
        layout: tuple[int, ...],
        posted: WriteableBuffer,
        ready: WriteableBuffer,
        theirs: ReadableBuffer,
        lane_start: int,
        common_layout: tuple[int, ...],
        lane_layout: tuple[int, ...],
        status: ReadableBuffer,
        reserve: Callable[[int, int], bool],
        poll_soon: Callable[[], None],
        writer: LaneWriter,
        common: CommonLane,
        eventfd: int,
        /,
    ) -> None: ...
    def connect_queues(
        self,
        memory: WriteableBuffer,
        outward: tuple[int, int, int, int, int, int],
        state: WriteableBuffer,
        inward: tuple[int, int, int, int, int, int],
        peer_state: WriteableBuffer,
        reserve: Callable[[], bool],
        /,
    ) -> None: ...
    def retire(self) -> None: ...
    def close(self) -> None: ...

@final
class Steps:
    def __init__(
        self,
        plan: Plan,
        kind: str,
        op: str,
        signature: Signature,
        fingerprint: int,
        storage: np.dtype[Any],
        buffers: int,
        size: int,
        round: tuple[Any, ...],
        ufunc: np.ufunc | None,
        fold: Callable[[Sequence[NDArray[Any]], NDArray[Any]], object] | None,
        /,
    ) -> None: ...
    @property
    def plan(self) -> Plan: ...

class Handle:
    def __init__(self, completion: Completion, /) -> None: ...
    def __await__(self) -> Generator[Any, None, Any]: ...
    @property
    def _completion(self) -> Completion: ...
    def done(self) -> bool: ...
    def result(self) -> Any: ...
    def exception(self) -> BaseException | None: ...

@final
class Calls:
    shift: int
    watches: int
    def __init__(
        self,
        comm: Communicator,
        owner: Any,
        work_type: type[Work[Any]],
        seams: dict[str, Callable[..., Any]],
        folder: str,
        group: int,
        rank: int,
        size: int,
        spin: float,
        crowded: bool,
        /,
    ) -> None: ...
    @property
    def comm(self) -> Communicator: ...
    @property
    def count(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def start(
        self, plan: Plan, arrays: list[Any], shape: tuple[int, ...], result: Any, limit: float, key: str | None, /
    ) -> Work[Any] | tuple[int, int] | None: ...
    def one(
        self, kind: str, tensor: Any, op: ReduceOp | None, root: Any, writable: bool, timeout: Any, key: Any, /
    ) -> Work[Any]: ...
    def parts(
        self, kind: str, whole: Any, other: Any, op: ReduceOp | None, timeout: Any, key: Any, /
    ) -> Work[Any] | None: ...
    def lists(
        self, kind: str, blocks: Any, other: Any, op: ReduceOp | None, root: int | None, timeout: Any, key: Any, /
    ) -> Work[Any] | None: ...
    def barrier(self, timeout: Any, key: Any, /) -> Work[None] | None: ...
    def block(self, recording: Any, /) -> Any: ...
    def look(self) -> bool: ...
    def hand_over(self, identity: int = ..., /) -> None: ...
    def give_up(self) -> None: ...
    def copies(self) -> list[Operation]: ...
    def relink(self) -> None: ...
    def close(self) -> None: ...
