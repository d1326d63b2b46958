"""Hooks: each operation calls `on_start` and `on_end` once, and a failing hook affects no operation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiocoll
from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    GroupOptions,
    ProcessGroup,
    Recv,
    Send,
    hooks,
)
from aiocoll.hooks import OperationInfo
from aiocoll.testing import run_ranks

from .internals import set_limits
from .ranks import options, parametrize_transports

SIZES = (1, 2, 3, 4, 7)


class Recorder:
    """A hook that records the information about all started and ended operations."""

    def __init__(self) -> None:
        self.starts: list[OperationInfo] = []
        self.ends: list[OperationInfo] = []

    def on_start(self, info: OperationInfo) -> None:
        self.starts.append(info)

    def on_end(self, info: OperationInfo) -> None:
        self.ends.append(info)

    def ops(self) -> list[str]:
        return [info.op for info in self.starts]


@pytest.fixture
def global_recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    handle = hooks.add_hook(recorder)
    yield recorder
    handle.remove()


async def every_call(pg: ProcessGroup) -> list[str]:
    """Make every kind of call in a group; return the names of the resulting operations."""
    size, rank = pg.size(), pg.rank()
    x = np.ones(3)
    await pg.allreduce(x)
    await pg.allreduce(2.5, key="loss")
    await pg.barrier()
    await pg.broadcast(x, 0)
    await pg.allgather(None, np.ones(rank + 1))
    await pg.allgather_object(rank)
    async with pg.coalescing():
        pg.allreduce(np.ones(2))
        pg.allreduce(np.ones(4))
    ops = ["ALLREDUCE", "ALLREDUCE", "BARRIER", "BROADCAST"]
    ops += ["ALLGATHER" if size == 1 else "ALLGATHER_ALLOCATED", "ALLGATHER_OBJECT", "COALESCED"]
    if size > 1:
        right, left = (rank + 1) % size, (rank - 1) % size
        await pg.batch([Send(np.ones(1), right), Recv(np.zeros(1), left)])
        ops += ["SEND", "RECV"]
    return ops


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("debug", ["off", "detail"])
async def test_hook_receives_one_start_and_one_end_per_call(size: int, debug: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        recorder = Recorder()
        pg.add_hook(recorder)
        ops = await every_call(pg)
        assert recorder.ops() == ops
        assert sorted(info.op for info in recorder.ends) == sorted(ops)
        for start, end in zip(sorted(recorder.starts, key=str), sorted(recorder.ends, key=str), strict=True):
            assert start.seconds is None
            assert end.seconds is not None
            assert end.seconds >= 0
            assert start.error is end.error is None
            assert (start.group, start.rank) == (end.group, end.rank) == (pg.group_name, pg.rank())

    await run_ranks(size, rank, options=GroupOptions(debug=debug))


@pytest.mark.ranks(2)
@parametrize_transports("memory", "unix", "tcp", "shm")
async def test_hook_receives_kind_size_dtype_and_transport_of_an_operation(pg: ProcessGroup, transport: str) -> None:
    recorder = Recorder()
    await pg.allreduce(np.ones(1))  # the first call opens the links
    pg.add_hook(recorder)
    await pg.allreduce(np.ones((2, 3), np.float32), key="grad")
    if pg.rank() == 0:
        await pg.send(np.ones(5, np.int16), 1)
    else:
        await pg.recv(np.ones(5, np.int16), 0)
    reduced, message = recorder.ends
    assert (reduced.kind, reduced.key, reduced.seq) == ("collective", "grad", 1)
    assert (reduced.nbytes, reduced.dtype, reduced.transport) == (24, "float32", transport)
    assert reduced.algorithm == ("oneshot" if transport == "shm" else "exchange")
    assert (message.kind, message.key, message.seq) == ("message", None, None)
    assert (message.nbytes, message.dtype, message.transport) == (10, "int16", transport)
    assert message.op == ("RECV" if pg.rank() else "SEND")


@parametrize_transports("memory", "unix", "tcp", "shm")
async def test_hook_receives_the_transport_of_an_operation_whose_links_have_closed(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, loop_budget=0.0)
    recorder = Recorder()

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()  # the first call opens the links
        if pg.rank() == 0:
            pg.add_hook(recorder)
        await pg.gather_object("a" if pg.rank() == 0 else ["b"] * 200_000, 0)

    await run_ranks(2, rank, options=options(transport))
    assert [end.transport for end in recorder.ends] == [transport]


async def test_global_hook_receives_the_operations_of_all_groups(global_recorder: Recorder) -> None:
    async def rank(pg: ProcessGroup) -> None:
        part = await pg.split_group([0, 1])
        assert part is not None
        await pg.barrier()
        await part.barrier()

    await run_ranks(2, rank)
    assert len(global_recorder.starts) == len(global_recorder.ends) == 4
    assert len({info.group for info in global_recorder.ends}) == 2


@pytest.mark.ranks(2)
async def test_removed_hook_is_not_called(pg: ProcessGroup) -> None:
    recorder, other = Recorder(), Recorder()
    handle = pg.add_hook(recorder)
    work = pg.barrier() if pg.rank() else None
    started = len(recorder.starts)
    handle.remove()
    handle.remove()
    pg.add_hook(other)
    await (work or pg.barrier())
    assert (len(recorder.starts), len(recorder.ends)) == (started, 0)
    # A hook added after the start of an operation receives neither the start nor the end of this operation.
    assert len(other.starts) == len(other.ends) == (0 if pg.rank() else 1)


@pytest.mark.ranks(2)
async def test_hook_receives_the_error_of_a_failed_operation(pg: ProcessGroup) -> None:
    recorder = Recorder()
    pg.add_hook(recorder)
    with pytest.raises((CollectiveMismatchError, GroupError)) as caught:
        await pg.allreduce(np.ones(1 + pg.rank()))
    (end,) = recorder.ends
    assert isinstance(end.error, type(caught.value))
    assert len(recorder.starts) == 1


@pytest.mark.ranks(2)
async def test_hook_receives_the_end_of_timed_out_and_withdrawn_operations(pg: ProcessGroup) -> None:
    recorder = Recorder()
    pg.add_hook(recorder)
    receive = asyncio.ensure_future(pg.recv(np.ones(1), 1 - pg.rank()).join())
    await asyncio.sleep(0)
    receive.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receive
    assert [info.op for info in recorder.ends] == ["RECV"]
    if pg.rank() == 0:
        with pytest.raises(CollectiveTimeoutError):
            await pg.barrier(timeout=0.05)
        assert isinstance(recorder.ends[-1].error, CollectiveTimeoutError)
    else:
        await pg.wait_revoked()
    assert len(recorder.starts) == len(recorder.ends)


async def test_hook_receives_the_end_of_pending_operations_of_a_closed_group() -> None:
    recorder = Recorder()

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            pg.add_hook(recorder)
            pg.recv(np.ones(1), 1, timeout=float("inf"))
            pg.abort("the end")

    await run_ranks(2, rank)
    assert len(recorder.starts) == len(recorder.ends) == 1


async def test_hook_that_raises_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def on_start(self, info: OperationInfo) -> None:
            super().on_start(info)
            raise ArithmeticError("wrong")

    async def rank(pg: ProcessGroup) -> None:
        broken, sound = Broken(), Recorder()
        pg.add_hook(broken)
        pg.add_hook(sound)
        for _ in range(3):
            await pg.barrier()
        assert (len(broken.starts), len(broken.ends)) == (1, 0)
        assert len(sound.starts) == len(sound.ends) == 3

    with caplog.at_level(logging.ERROR, "aiocoll"):
        await run_ranks(2, rank)
    removals = [record for record in caplog.records if "the hook is removed" in record.getMessage()]
    assert len(removals) == 2  # the hook is removed once per rank
    assert all("Broken.on_start raised" in record.getMessage() for record in removals)
    assert all(record.exc_info is not None for record in removals)


CALLS: dict[str, Any] = {
    "allreduce": lambda pg: pg.allreduce(np.ones(1)),
    "send": lambda pg: pg.send(np.ones(1), 1 - pg.rank()),
    "barrier": lambda pg: pg.barrier(),
    "objects": lambda pg: pg.allgather_object(1),
    "abort": lambda pg: pg.abort(),
    "split_group": lambda pg: pg.split_group([0, 1]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", ["on_start", "on_end"])
async def test_call_of_a_hook_to_its_own_group_is_refused(
    call: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        class Caller:
            raised: list[str]

            def on_end(self, info: OperationInfo) -> None:
                if when == "on_end":
                    self.call()

            def on_start(self, info: OperationInfo) -> None:
                if when == "on_start":
                    self.call()

            def call(self) -> None:
                for _ in range(2):
                    with pytest.raises(RuntimeError, match=f"Caller.{when} called group '{pg.group_name}'"):
                        CALLS[call](pg)

        pg.add_hook(Caller())
        assert await pg.allreduce(1) == 2
        assert await pg.allreduce(1) == 2

    await run_ranks(2, rank)
    assert "the hook is removed" not in caplog.text


@pytest.mark.ranks(2)
async def test_hook_can_make_calls_in_another_group(pg: ProcessGroup) -> None:
    part = await pg.split_group([0, 1])
    assert part is not None
    works = []

    class Forwarder:
        def on_end(self, info: OperationInfo) -> None:
            works.append(part.allreduce(1))

    pg.add_hook(Forwarder())
    await pg.barrier()
    assert await works[0] == 2


@pytest.mark.parametrize("wrong", [None, print, "on_start"])
@pytest.mark.ranks(1)
async def test_object_without_hook_methods_is_refused(pg: ProcessGroup, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"hook must have on_start\(info\) or on_end\(info\), not "):
        hooks.add_hook(wrong)
    with pytest.raises(TypeError, match="hook must have"):
        pg.add_hook(wrong)


async def test_operation_info_is_not_built_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(aiocoll.engine.operations.operation_info, "OperationInfo", lambda *fields: made.append(fields))

    class Ends:
        def on_end(self, info: object) -> None:
            pass

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        assert made == []
        pg.add_hook(Ends())
        before = len(made)
        await pg.allreduce(1)
        assert len(made) == before + 1

    await run_ranks(1, rank)
