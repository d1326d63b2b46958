"""Log records for failed works whose exception the program never retrieves."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupError, HashStore, ProcessGroup, Recv, Work, new_group
from aiocoll.unretrieved import CallSite
from aiocoll.work import completion_of

from .ranks import run_ranks, wait_until

#: The timeout of receives without a sender, in seconds.
SOON = 0.01


@pytest.fixture
def unretrieved_records(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[logging.LogRecord]]]:
    """Return a function that returns all records about unretrieved failures logged so far."""
    caplog.set_level(logging.WARNING, "aiocoll")

    def records() -> list[logging.LogRecord]:
        gc.collect()
        return [record for record in caplog.records if "was never retrieved" in record.getMessage()]

    return records


def failing_receive(pg: ProcessGroup) -> Work[Any]:
    return pg.recv(np.zeros(1), 1 - pg.rank(), tag=3, timeout=SOON)


async def test_unretrieved_failure_is_logged_once_with_the_line_of_its_call(
    unretrieved_records: Callable[[], list[logging.LogRecord]],
) -> None:
    async def rank(pg: ProcessGroup) -> str:
        if pg.rank() == 0:
            work = failing_receive(pg)
            await wait_until(work.done)
            assert not unretrieved_records(), "logged while the failure can still be retrieved"
            del work
            assert len(unretrieved_records()) == 1
        await pg.barrier()
        return pg.group_name

    name = (await run_ranks(2, rank, allow_unretrieved=True))[0]
    (record,) = unretrieved_records()
    line = inspect.getsourcelines(failing_receive)[1] + 1
    assert record.getMessage() == (
        f"group {name!r}, rank 0: exception of RECV called at {__file__}:{line} was never retrieved: "
        f"CollectiveTimeoutError: rank 0 of group {name!r} received no message with tag 3 from rank 1 within 0.01 s"
    )
    assert (record.levelname, record.group, record.rank) == ("ERROR", name, 0)  # type: ignore[attr-defined]


async def retrieve(work: Work[Any], how: str) -> None:
    """Retrieve the failure of a work in the way that `how` names."""
    match how:
        case "await":
            with pytest.raises(CollectiveTimeoutError):
                await work
        case "late await":
            await wait_until(work.done)
            with pytest.raises(CollectiveTimeoutError):
                await work
        case "join":
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(work.join())
        case "gather":
            await asyncio.gather(work, return_exceptions=True)
        case "future":
            await asyncio.wait([future := work.get_future()])
            assert future.exception() is not None
        case "late future":
            await wait_until(work.done)
            await asyncio.gather(work.get_future(), return_exceptions=True)
        case "callback" | "late callback":
            if how == "late callback":
                await wait_until(work.done)
            called: list[Any] = []
            work.add_done_callback(called.append)
            await wait_until(lambda: called)
        case "result":
            await wait_until(work.done)
            with pytest.raises(CollectiveTimeoutError):
                work.result()
        case "exception":
            await wait_until(work.done)
            assert work.exception() is not None
        case "wait":
            with pytest.raises(CollectiveTimeoutError):
                await asyncio.to_thread(work.wait)
        case "drain":
            with pytest.raises(CollectiveTimeoutError):
                await work.group.drain()


WAYS = ["await", "late await", "join", "gather", "future", "late future", "callback", "late callback", "result"]


@pytest.mark.parametrize("how", [*WAYS, "exception", "wait", "drain"])
async def test_retrieved_failure_is_not_logged(
    how: str, unretrieved_records: Callable[[], list[logging.LogRecord]]
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await retrieve(failing_receive(pg), how)
        await pg.barrier()

    await run_ranks(2, rank)
    assert not unretrieved_records()


async def test_drain_retrieves_the_failures_of_all_works(
    unretrieved_records: Callable[[], list[logging.LogRecord]],
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        works = [failing_receive(pg) for _ in range(3)]
        with pytest.raises(CollectiveTimeoutError):
            await pg.drain()
        assert all(work.done() for work in works)
        await pg.barrier()

    await run_ranks(2, rank)
    assert not unretrieved_records()


async def test_cancelled_await_does_not_mark_a_failure_as_retrieved(
    unretrieved_records: Callable[[], list[logging.LogRecord]],
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        tensor = np.ones(2)
        if pg.rank() == 0:
            work = pg.allreduce(tensor)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(SOON):
                    await work
            future = work.get_future()
            future.cancel()
            await pg.barrier(key="given up")
            await wait_until(work.done)
        else:
            await pg.barrier(key="given up")
            pg.abort("for a test")

    await run_ranks(2, rank, allow_unretrieved=True)
    (record,) = unretrieved_records()
    assert "exception of ALLREDUCE (sequence 1) called at " in record.getMessage()
    assert "GroupError: group " in record.getMessage()


@pytest.mark.parametrize("looks", [False, True])
async def test_unretrieved_failures_with_one_cause_are_logged_in_one_line(
    unretrieved_records: Callable[[], list[logging.LogRecord]], looks: bool
) -> None:
    """Retrieve one of the failures, after which no other is logged, or retrieve none."""

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank():
            works = [pg.allreduce(np.ones(2)) for _ in range(20)]
            works += [pg.barrier(key="k"), pg.batch([Recv(np.ones(1), 0)])]
            await pg.send_object("called", 0)
            if looks:
                with pytest.raises(GroupError):
                    await works[7]
            else:
                await pg.wait_revoked()
        else:
            pg.recv(np.ones(1), 1, tag=2)
            await pg.recv_object(1)
            pg.abort("for a test")

    await run_ranks(2, rank, allow_unretrieved=not looks)
    if looks:
        assert unretrieved_records() == []
        return
    (record,) = unretrieved_records()
    message = record.getMessage()
    assert message.startswith("group ")
    assert ", rank 1: exception of ALLREDUCE (sequence 1) called at " in message
    assert ", ALLREDUCE (sequence 3) called at " in message
    assert " and 19 more was never retrieved: GroupError: group " in message


async def test_unretrieved_failure_of_a_referenced_work_is_logged_when_its_group_ends(
    unretrieved_records: Callable[[], list[logging.LogRecord]],
) -> None:
    store = HashStore()
    async with new_group(store=store, rank=0, world_size=1) as pg:
        work = pg.recv_anysource(np.ones(1), timeout=SOON)
        await wait_until(work.done)
    assert len(unretrieved_records()) == 1
    del work
    assert len(unretrieved_records()) == 1
    await store.aclose()


async def test_failures_caused_by_the_programs_own_abort_are_not_logged(
    unretrieved_records: Callable[[], list[logging.LogRecord]],
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        works = [pg.barrier() if pg.rank() else pg.recv(np.ones(1), 1) for _ in range(3)]
        waiting = asyncio.ensure_future(pg.recv_object().join())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        if pg.rank():
            await pg.send_object("go", 0, tag=1)
            with pytest.raises(GroupError):
                await works[0]
            [work.exception() for work in works]
        else:
            await pg.recv_object(tag=1)
            works[0].abort()

    await run_ranks(2, rank)
    assert not unretrieved_records()


async def test_unretrieved_failure_keeps_no_frames_or_cycles(
    unretrieved_records: Callable[[], list[logging.LogRecord]],
) -> None:
    class Local:
        pass

    def call(pg: ProcessGroup) -> tuple[Work[Any], Any]:
        local = Local()
        return failing_receive(pg), weakref.ref(local)

    async def rank(pg: ProcessGroup) -> None:
        work, local = call(pg)
        assert local() is None
        await wait_until(work.done)
        gone = weakref.ref(work)
        gc.disable()
        try:
            del work
            assert gone() is None
        finally:
            gc.enable()

    await run_ranks(2, rank, allow_unretrieved=True)
    assert len(unretrieved_records()) == 2


CALLS: dict[str, Callable[[ProcessGroup], Work[Any]]] = {
    "allreduce": lambda pg: pg.allreduce(np.ones(1)),
    "scalar": lambda pg: pg.allreduce(1.5),
    "reduce": lambda pg: pg.reduce(np.ones(1), 0),
    "broadcast": lambda pg: pg.broadcast(np.ones(1), 0),
    "allgather": lambda pg: pg.allgather(None, np.ones(1)),
    "allgather_into_tensor": lambda pg: pg.allgather_into_tensor(np.ones(2), np.ones(1)),
    "gather": lambda pg: pg.gather(None, np.ones(1), 0),
    "scatter": lambda pg: pg.scatter(np.ones(1), [np.ones(1)] * 2, 0),
    "reduce_scatter": lambda pg: pg.reduce_scatter(np.ones(1), [np.ones(1)] * 2),
    "reduce_scatter_tensor": lambda pg: pg.reduce_scatter_tensor(np.ones(1), np.ones(2)),
    "alltoall": lambda pg: pg.alltoall([np.ones(1), np.ones(1)], [np.ones(1), np.ones(1)]),
    "alltoall_base": lambda pg: pg.alltoall_base(np.ones(2), np.ones(2)),
    "scan": lambda pg: pg.scan(np.ones(1)),
    "barrier": lambda pg: pg.barrier(),
    "monitored_barrier": lambda pg: pg.monitored_barrier(),
    "allgather_object": lambda pg: pg.allgather_object(None),
    "broadcast_object": lambda pg: pg.broadcast_object(None),
    "send": lambda pg: pg.send(np.ones(1), 1 - pg.rank()),
    "recv": lambda pg: pg.recv(np.ones(1), 1 - pg.rank()),
    "recv_anysource": lambda pg: pg.recv_anysource(np.ones(1), tag=1),
    "send_object": lambda pg: pg.send_object(1, 1 - pg.rank(), tag=1),
    "recv_object": lambda pg: pg.recv_object(1 - pg.rank(), tag=2),
    "batch": lambda pg: pg.batch([Recv(np.ones(1), None, 7)]),
}


@pytest.mark.ranks(2)
async def test_recorded_source_line_of_a_call_is_correct(pg: ProcessGroup) -> None:
    if pg.rank():
        await pg.wait_revoked()
        return
    works = {name: call(pg) for name, call in CALLS.items()}
    pg.abort()
    for name, work in works.items():
        completion = completion_of(work)
        place = str(CallSite("IT", None, completion.code, completion.instruction))
        assert place == f"IT called at {__file__}:{CALLS[name].__code__.co_firstlineno}"
