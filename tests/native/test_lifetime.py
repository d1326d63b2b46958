"""Native works that outlive their group, and calls on a closed group."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupClosedError, ProcessGroup
from aiocoll.native import core
from aiocoll.work import Work

from ..engine.test_slot_program import jobs
from ..internals import comm_of, native_calls_of
from ..ranks import wait_until
from .groups import group_of_ranks, pending_in_python

pytestmark = pytest.mark.skipif(core is None, reason="needs the accelerator in C")


async def finished_works() -> tuple[list[ProcessGroup], list[Work[Any]]]:
    """Return the ranks of a closed group, and native works that finished before the group was closed."""
    async with jobs(2) as [pgs]:
        works = [pg.allreduce(np.full(4, 1.0 + pg.rank())) for pg in pgs]
        await wait_until(lambda: all(work.done() for work in works))
        assert not any(native_calls_of(pg).count for pg in pgs)
        return pgs, works


async def test_finished_native_work_can_be_awaited_after_its_group_is_closed() -> None:
    _, works = await finished_works()
    assert (await works[0]).tolist() == [3.0] * 4
    assert works[1].result().tolist() == [3.0] * 4


async def test_finished_native_work_can_be_inspected_after_its_group_is_closed() -> None:
    pgs, works = await finished_works()
    assert "ALLREDUCE" in repr(works[0])
    assert works[0].group is pgs[0]
    assert await works[0].join() is works[0].result()


async def test_native_call_on_a_closed_group_is_refused() -> None:
    pgs, _ = await finished_works()
    with pytest.raises(GroupClosedError):
        pgs[0].allreduce(np.ones(4))
    with pytest.raises(GroupClosedError):
        pgs[0].allgather_into_tensor(np.ones(8), np.ones(4))


async def test_accelerator_object_of_a_closed_group_declines_calls_and_lists_none() -> None:
    async with jobs(2) as [pgs]:
        native = native_calls_of(pgs[0])
    assert native.start(None, [], (), None, 1.0, None) is None
    assert native.parts("allgather", np.ones(8), np.ones(4), None, None, None) is None
    assert native.lists("gather", None, np.ones(4), None, 1, None, None) is None
    assert native.barrier(None, None) is None
    assert native.look() is False
    assert native.copies() == []
    native.hand_over()
    native.close()


async def test_group_is_freed_together_with_a_reference_cycle_that_holds_its_work() -> None:
    pgs, works = await finished_works()
    comm = weakref.ref(comm_of(pgs[0]))
    cycle: list[Any] = [works[0]]
    cycle.append(cycle)
    pgs.clear()
    works.clear()
    del cycle
    gc.collect()
    assert comm() is None


def test_uninitialized_accelerator_objects_raise_errors() -> None:
    assert core is not None
    calls, lanes, common = (each.__new__(each) for each in (core.Calls, core.PeerLanes, core.CommonLane))
    with pytest.raises(RuntimeError, match="not initialized"):
        calls.one("allreduce", np.ones(1), None, None, True, None, None)
    assert calls.look() is False
    for each in (calls, lanes, common):
        each.close()
    with pytest.raises(RuntimeError, match="not initialized"):
        Work.__new__(Work).result()


async def test_thread_that_waits_for_a_work_gets_the_result() -> None:
    async with jobs(2) as [pgs]:
        for _ in range(50):
            array = np.ones(4)
            work = pgs[0].allreduce(array)
            found: list[Any] = []
            thread = threading.Thread(target=lambda work=work, found=found: found.append(work.wait(10)))
            thread.start()
            other = pgs[1].allreduce(np.ones(4))
            await work
            await other
            await wait_until(lambda thread=thread: not thread.is_alive())
            assert found == [array]
            assert array.tolist() == [2.0] * 4


async def test_post_that_the_accelerator_has_seen_is_read_by_python_after_the_link_closes() -> None:
    async with group_of_ranks([True] * 3) as pgs:
        arrays = [np.full(4, 2.0 ** pg.rank()) for pg in pgs]
        works = [pgs[1].allreduce(arrays[1]), pgs[0].allreduce(arrays[0])]
        assert not works[1].done(), "rank 0 finished before rank 2 made its call"
        shared = comm_of(pgs[0]).channels[1].shared
        assert shared is not None
        shared.native.close()
        works.append(pgs[2].allreduce(arrays[2]))
        native_calls_of(pgs[0]).look()
        assert pending_in_python(pgs[0]) == 1
        for work in works:
            await work
        assert all((array == 7).all() for array in arrays)


async def test_polling_list_keeps_no_operation_of_a_closed_group() -> None:
    async with group_of_ranks([True, False]) as (zero, one):
        polling, work = comm_of(one).polling, one.allreduce(np.ones(4))
        polling._scan = list(polling.readers)
        assert len(polling._scan) == 1
        await zero.allreduce(np.ones(4))
        await work
    assert polling._scan == []
