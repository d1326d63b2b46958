"""Repeated calls, for which the accelerator finds the cached plan without running Python code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.work import Work

from ..internals import Limits, is_native, native_calls_of
from .groups import await_work, group_of_ranks

Arrays = Sequence[np.ndarray]


@pytest.fixture(autouse=True)
def _no_age_checks(limits: Limits) -> None:
    limits(report_after=1000.0, report_strays_after=1000.0)


def two_arrays(shape: tuple[int, ...], value: float = 0.0) -> list[np.ndarray]:
    return [np.full(shape, value + row) for row in range(2)]


class Call:
    """A collective on lists of arrays, with its arguments and its expected results.

    Args:
        make: starts the call with the group and the two arguments of a rank.
        arguments_of: returns both arguments for a rank and a shape.
        has_results: returns whether the arguments of rank 0 hold the expected results.
    """

    def __init__(
        self,
        make: Callable[[ProcessGroup, Any, Any], Work[Any]],
        arguments_of: Callable[[int, tuple[int, ...]], tuple[Any, Any]],
        has_results: Callable[[Any, Any], bool],
    ) -> None:
        self.make, self.arguments_of, self.has_results = make, arguments_of, has_results


def have_values(arrays: Arrays, *values: float) -> bool:
    return all((array == value).all() for array, value in zip(arrays, values, strict=True))


CALLS = {
    "allgather": Call(
        lambda pg, outputs, tensor: pg.allgather(outputs, tensor),
        lambda rank, shape: (two_arrays(shape), np.full(shape, 5.0 + rank)),
        lambda outputs, _: have_values(outputs, 5, 6),
    ),
    "gather": Call(
        lambda pg, outputs, tensor: pg.gather(outputs, tensor, 0),
        lambda rank, shape: (None if rank else two_arrays(shape), np.full(shape, 5.0 + rank)),
        lambda outputs, _: have_values(outputs, 5, 6),
    ),
    "scatter": Call(
        lambda pg, inputs, output: pg.scatter(output, inputs, 1),
        lambda rank, shape: (two_arrays(shape, 7.0) if rank else None, np.zeros(shape)),
        lambda _, output: have_values([output], 7),
    ),
    "reduce_scatter": Call(
        lambda pg, inputs, output: pg.reduce_scatter(output, inputs),
        lambda rank, shape: (two_arrays(shape, 10.0 * rank), np.zeros(shape)),
        lambda _, output: have_values([output], 10),
    ),
    "alltoall": Call(
        lambda pg, inputs, outputs: pg.alltoall(outputs, inputs),
        lambda rank, shape: (two_arrays(shape, 10.0 * rank), two_arrays(shape)),
        lambda _, outputs: have_values(outputs, 0, 10),
    ),
}


def fail_on_plan(*_: Any, **__: Any) -> Any:
    raise AssertionError("Python looked up the plan of a call that equals an earlier one")


def forbid_plans(pgs: Sequence[ProcessGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every later call fail that Python plans or starts."""
    for pg in pgs:
        dispatcher = pg._parts.collectives._dispatcher
        monkeypatch.setattr(dispatcher.plans, "known", {})
        monkeypatch.setattr(type(dispatcher.planner), "plan", fail_on_plan)
        monkeypatch.setattr(type(dispatcher), "start_plan", fail_on_plan)


async def make_checked_call(pgs: Sequence[ProcessGroup], call: Call, shape: tuple[int, ...]) -> list[Work[Any]]:
    """Make a call on both ranks and check the results; return the works of both ranks."""
    given = [call.arguments_of(pg.rank(), shape) for pg in pgs]
    works = [call.make(pg, *arrays) for pg, arrays in zip(pgs, given, strict=True)]
    async with asyncio.timeout(20):
        for work in works:
            await await_work(work)
    assert call.has_results(*given[0])
    return works


@pytest.mark.parametrize("shape", [(3,), (2, 3), ()])
@pytest.mark.parametrize("kind", CALLS)
async def test_repeated_native_list_call_runs_no_python_planning(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group_of_ranks([True, True]) as pgs:
        works = await make_checked_call(pgs, CALLS[kind], shape)
        assert all(map(is_native, works))
        with monkeypatch.context() as patch:
            forbid_plans(pgs, patch)
            works = await make_checked_call(pgs, CALLS[kind], shape)
        assert all(map(is_native, works))


async def test_repeated_native_call_without_a_list_runs_no_python_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of_ranks([True, True]) as pgs:

        def call(pg: ProcessGroup) -> list[Work[Any]]:
            one, two = np.ones(1), np.ones(2)
            return [
                pg.allreduce(one),
                pg.broadcast(one.copy(), 1),
                pg.reduce(one.copy(), 0),
                pg.scan(one.copy()),
                pg.exscan(one.copy()),
                pg.barrier(),
                pg.allgather_into_tensor(np.ones(2), one.copy()),
                pg.reduce_scatter_tensor(one.copy(), two),
                pg.alltoall_base(np.ones(2), two.copy()),
            ]

        first = [work for pg in pgs for work in call(pg)]
        for work in first:
            await await_work(work)
        with monkeypatch.context() as patch:
            forbid_plans(pgs, patch)
            again = [work for pg in pgs for work in call(pg)]
            for work in again:
                await await_work(work)
        assert all(map(is_native, first + again))


async def test_native_list_calls_return_lists() -> None:
    async with group_of_ranks([True, True]) as (zero, one):
        for make in (list, tuple):
            outputs = make(two_arrays((2,)))
            work = zero.allgather(outputs, np.ones(2)), one.allgather(two_arrays((2,)), np.ones(2))
            result = await await_work(work[0])
            assert (result is outputs) is (make is list)
            assert all(array is output for array, output in zip(result, outputs, strict=True))
            gathers = zero.gather(outputs, np.ones(2), 0), one.gather(None, np.ones(2), 0)
            result = await await_work(gathers[0])
            assert type(result) is list
            assert result is not outputs
            assert await await_work(gathers[1]) is None
            exchanges = [pg.alltoall(make(two_arrays((2,))), make(two_arrays((2,)))) for pg in (zero, one)]
            assert type(await await_work(exchanges[0])) is list
            await await_work(exchanges[1])


async def test_native_call_with_irregular_lists_is_declined() -> None:
    """Pass lists with arrays of several shapes, a wrong number of arrays, or objects that are not arrays."""
    async with group_of_ranks([True, True]) as pgs:
        native = native_calls_of(pgs[0])
        one = np.ones(2)
        for blocks in ([one.copy(), np.ones(3)], [one.copy()], [one.copy()] * 3, {0: one}, [one.copy(), None], None):
            assert native.lists("allgather", blocks, one, None, None, None, None) is None
        assert native.lists("allgather", two_arrays((2,)), np.ones(2, np.float32), None, None, None, None) is None
        assert native.lists("allgather", two_arrays((2,)), one, None, None, None, "key") is None
        uneven = [pg.allgather([np.ones(2), np.ones(3)], np.ones(2 + pg.rank())) for pg in pgs]
        assert [len(each) for each in await await_work(uneven[0])] == [2, 3]
        await await_work(uneven[1])


@pytest.mark.parametrize("kind", CALLS)
async def test_native_call_with_overlapping_output_arrays_is_declined(kind: str) -> None:
    async with group_of_ranks([True, True]) as pgs:
        await make_checked_call(pgs, CALLS[kind], (4,))
        memory = np.zeros(12)
        parts = [memory[:4], memory[2:6]]
        alone = np.zeros(4)
        native = native_calls_of(pgs[1])
        root = 1 if kind in ("gather", "scatter") else None
        op = None
        for blocks, other in (
            (parts, alone) if kind in ("gather", "allgather") else ([alone, alone.copy()], alone),
            (two_arrays((4,)), parts) if kind == "alltoall" else ([memory[:4], memory[4:8]], memory[6:10]),
        ):
            if kind == "alltoall" and type(other) is not list:
                continue
            assert native.lists(kind, blocks, other, op, root, None, None) is None
        assert native.count == 0


@pytest.mark.parametrize("kind", CALLS)
async def test_native_list_call_is_handed_over_with_flat_arrays(kind: str) -> None:
    call = CALLS[kind]
    async with group_of_ranks([True, True]) as pgs:
        await make_checked_call(pgs, call, (2, 3))
        given = [call.arguments_of(pg.rank(), (2, 3)) for pg in pgs]
        late = 0 if kind == "scatter" else 1  # a scatter's root waits for no rank, so rank 0 is late there
        first = call.make(pgs[1 - late], *given[1 - late])
        if not first.done():
            native_calls_of(pgs[1 - late]).hand_over()
            assert not is_native(first)
        second = call.make(pgs[late], *given[late])
        for work in (first, second):
            await await_work(work)
        assert call.has_results(*given[0])


async def test_list_on_a_rank_other_than_the_root_is_detected_in_a_repeated_native_call() -> None:
    """Check that lists on ranks other than the root are refused, and that a root without a list gets a new list."""
    async with group_of_ranks([True, True]) as pgs:
        await make_checked_call(pgs, CALLS["gather"], (4,))
        await make_checked_call(pgs, CALLS["scatter"], (4,))
        with pytest.raises(ValueError, match="outputs"):
            pgs[1].gather(two_arrays((4,)), np.ones(4), 0)
        with pytest.raises(ValueError, match="inputs"):
            pgs[0].scatter(np.ones(4), two_arrays((4,)), 1)
        works = [pg.gather(None, np.full(4, 5.0 + pg.rank()), 0) for pg in pgs]
        assert have_values(await await_work(works[0]), 5, 6)
        assert await await_work(works[1]) is None
