"""The flight recorder's records of operations: calls, times and errors, without references to user objects."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupError, ProcessGroup
from aiocoll.engine.journal import HISTORY, MESSAGES, Journal
from aiocoll.testing.virtual import run_virtual
from aiocoll.transport.frame import SEGMENT
from aiocoll.unretrieved import line_of
from tests.ranks import LINKS, parametrize_transports, run_ranks

from ..internals import comm_of, dispatcher_of


def recorder(pg: ProcessGroup) -> Journal:
    return comm_of(pg).journal


@pytest.mark.ranks(1, 2, 3)
@parametrize_transports(*LINKS)
async def test_recorder_entry_contains_the_source_line_and_times_of_the_call(pg: ProcessGroup) -> None:
    before = dispatcher_of(pg).runtime.stamp()
    await pg.allreduce(np.zeros((2, 3), np.float32))
    line = sys._getframe().f_lineno - 1
    await pg.broadcast(np.zeros(5), 0, key="weights")
    first, second = recorder(pg).snapshot()
    assert (first.op, first.seq, first.key, first.signature.op, first.shape) == (1, 1, None, "ALLREDUCE", (2, 3))
    assert (second.seq, second.key, second.signature.dtype) == (1, "weights", "float64")
    assert first.ended is not None
    assert second.ended is not None
    assert before <= first.entered <= first.ended <= second.entered <= second.ended <= dispatcher_of(pg).runtime.stamp()
    assert first.code is test_recorder_entry_contains_the_source_line_and_times_of_the_call.__code__
    assert line_of(first.code, first.instruction) == line
    assert (first.error, second.error, second.peer) == (None, None, None)
    assert recorder(pg).find(1) == first
    assert recorder(pg).last() == second


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_recorder_keeps_messages_separate_from_collectives(pg: ProcessGroup) -> None:
    await pg.barrier()
    other = 1 - pg.rank()
    for number in range(MESSAGES + 9):
        if pg.rank():
            await pg.recv_anysource(np.zeros(number % 3), tag=7)
        else:
            await pg.send(np.zeros(number % 3), other, tag=7)
    work = pg.recv_object(other, tag=9)
    barrier, *messages, pending = recorder(pg).snapshot()
    assert (barrier.signature.op, len(messages) + 1) == ("BARRIER", MESSAGES)
    for message in messages:
        assert (message.peer, message.seq, message.op >> 32 & 0xFF) == (other, None, 7)
        assert message.ended is not None
        assert message.entered <= message.ended
    assert (pending.ended, pending.peer, pending.started, pending.signature.dtype) == (None, other, None, "object")
    await pg.barrier()
    await pg.send_object("done", other, tag=9)
    await work


@pytest.mark.ranks(2)
@parametrize_transports("unix")
async def test_recorded_start_of_a_message_is_the_time_of_its_first_frame(pg: ProcessGroup) -> None:
    x = np.zeros(3 * SEGMENT, np.uint8)
    await (pg.recv(x, 0) if pg.rank() else pg.send(x, 1))
    await (pg.recv(x[:8], 0) if pg.rank() else pg.send(x[:8], 1))
    long, short = recorder(pg).snapshot()
    assert long.started is not None
    assert long.ended is not None
    assert long.entered <= long.started <= long.ended
    assert short.started is None


@pytest.mark.ranks(2)
async def test_recorded_end_of_a_call_is_the_time_when_its_last_operation_ends(pg: ProcessGroup) -> None:
    async with pg.coalescing():
        pg.allreduce(np.ones(2))
        pg.allreduce(np.ones(2, np.float32))
    (block,) = recorder(pg).snapshot()
    assert block.started is not None
    assert block.ended is not None
    assert block.entered <= block.started <= block.ended


def test_recorded_times_use_the_clock_of_the_group() -> None:
    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(3.0 * pg.rank())
        await pg.barrier()
        (barrier,) = recorder(pg).snapshot()
        assert (barrier.entered, barrier.ended) == (pytest.approx(3.0 * pg.rank()), pytest.approx(3.0))
        assert dispatcher_of(pg).runtime.wall() == dispatcher_of(pg).runtime.time()

    run_virtual(2, rank)


class CoarseClockLoop(asyncio.SelectorEventLoop):
    """A loop whose clock has a resolution of one millisecond, like that of uvloop."""

    def time(self) -> float:
        return super().time() // 0.001 * 0.001


def test_recorded_times_are_finer_than_a_coarse_loop_clock() -> None:
    async def rank(pg: ProcessGroup) -> None:
        for _ in range(20):
            await pg.barrier()
        records = recorder(pg).snapshot()
        assert len({record.entered for record in records}) == len(records)
        assert abs(records[-1].entered - dispatcher_of(pg).runtime.time()) < 1

    with asyncio.Runner(loop_factory=CoarseClockLoop) as runner:
        runner.run(run_ranks(1, rank))


def test_failed_operation_is_recorded_with_its_exception_class() -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        with pytest.raises(CollectiveTimeoutError):
            await pg.recv(np.zeros(1), 1 - pg.rank(), timeout=0.5)
        if pg.rank() == 0:
            with pytest.raises(CollectiveTimeoutError):
                await pg.allreduce(np.zeros(1), timeout=2)
        else:
            await pg.wait_revoked()
        _, message, *rest = recorder(pg).snapshot()
        assert message.error == "CollectiveTimeoutError"
        assert [(each.error, each.entered, each.ended) for each in rest] == (
            [("CollectiveTimeoutError", pytest.approx(0.5), pytest.approx(2.5))] if pg.rank() == 0 else []
        )

    run_virtual(2, rank)


@pytest.mark.ranks(2)
async def test_recorder_entry_keeps_no_objects_of_the_caller_alive(pg: ProcessGroup) -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    arrays = [np.zeros(3).view(Array) for _ in range(4)]
    other = 1 - pg.rank()
    works = [pg.recv(arrays[3], other, tag=1)]
    works += [pg.allreduce(arrays[0]), pg.send(arrays[1], other), pg.recv(arrays[2], other)]
    for work in works[1:]:
        await work
    await pg.barrier()
    pg.abort("to see a failure")
    with pytest.raises(GroupError):
        await works[0]
    refs = [weakref.ref(each) for each in (*arrays, *works)]
    del arrays, works, work
    gc.collect()
    assert [ref() for ref in refs] == [None] * 8
    assert len(recorder(pg).snapshot()) == 5


@pytest.mark.ranks(1, 2)
async def test_recorder_keeps_a_limited_number_of_entries(pg: ProcessGroup) -> None:
    """Fill the recorder with collectives on a single rank, and with collectives and messages on two ranks."""
    world_size = pg.size()
    x = np.zeros(3)
    for _ in range(HISTORY + 9):
        await pg.allreduce(x)
        if world_size == 2:
            await (pg.send if pg.rank() else pg.recv)(x, 1 - pg.rank())
    assert (len(recorder(pg).collectives), len(recorder(pg).messages)) == (HISTORY, MESSAGES * (world_size - 1))
    assert len(recorder(pg).snapshot()) == HISTORY + MESSAGES * (world_size - 1)
