"""Call plans from `pg.plan`: a call is checked once and can then be started many times."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiocoll
from aiocoll import (
    PROC_NULL,
    CallPlan,
    CollectiveMismatchError,
    GroupClosedError,
    GroupError,
    GroupOptions,
    ProcessGroup,
    Recv,
    ReduceOp,
    Send,
    new_group,
    testing,
)
from aiocoll.group.plans import PLANNED
from aiocoll.work import completion_of

from ..internals import Limits, comm_of
from ..ranks import LINKS, parametrize_transports
from .views import recorded_views


def is_quick(plan: CallPlan[Any]) -> bool:
    """Return whether `plan.start` skips all checks."""
    again: Any = plan._start_call
    return again.func.__name__ == "_start_again"


def call_cases(pg: ProcessGroup) -> list[tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any, int], None], bool]]:
    """Return cases: a call, its arguments, a check of its result, and whether a start skips the checks."""
    rank, size = pg.rank(), pg.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    total = size * (size - 1) // 2
    cases: list[Any] = []

    def case(call: Any, args: Any, check: Any, quick: bool = True) -> None:
        cases.append((call, args, check, quick))

    for count in (1, 20_000):

        def make(fill: float = 0.0, n: int = count) -> Any:
            return np.full(n, fill)

        x = make()
        case(pg.allreduce, (x,), lambda got, step: (got == size * step + total).all())
        case(pg.allreduce, (make(), ReduceOp.MAX), lambda got, step: (got == step + size - 1).all())
        case(pg.reduce, (make(), size - 1), lambda got, step: rank < size - 1 or (got == size * step + total).all())
        case(pg.broadcast, (make(), 0), lambda got, step: (got == step).all())
        case(pg.scan, (make(),), lambda got, step: (got == (rank + 1) * step + rank * (rank + 1) // 2).all())
        case(pg.exscan, (make(),), lambda got, step: rank == 0 or (got == rank * step + rank * (rank - 1) // 2).all())
        outs = [make() for _ in range(size)]
        case(pg.allgather, (outs, make()), lambda got, step: all((a == r + step).all() for r, a in enumerate(got)))
        case(
            pg.allgather,
            (None, make()),
            lambda got, step: all((a == r + step).all() for r, a in enumerate(got)),
            False,
        )
        case(
            pg.allgather_into_tensor,
            (np.zeros((size, count)), make()),
            lambda got, step: (got == np.arange(size)[:, None] + step).all(),
        )
        case(
            pg.alltoall_base,
            (np.zeros((size, count)), np.zeros((size, count))),
            lambda got, step: (got == np.arange(size)[:, None] + step).all(),
        )
        case(
            pg.reduce_scatter_tensor,
            (make(), np.zeros((size, count))),
            lambda got, step: (got == size * step + total).all(),
        )
        case(pg.send, (make(), right), lambda got, step: True)
        case(pg.recv, (make(), left), lambda got, step: (got == left + step).all())
        # Strided arrays are copied to a staging buffer at each start, so the current values are sent.
        case(
            pg.allreduce,
            (np.zeros((count, 2))[:, 0],),
            lambda got, step: (got == size * step + total).all(),
            count == 1,
        )
        case(pg.send, (np.zeros((count, 2))[:, 0], right, 1), lambda got, step: True, count == 1)
        case(pg.recv, (np.zeros((count, 2))[:, 0], left, 1), lambda got, step: (got == left + step).all(), count == 1)
    case(pg.barrier, (), lambda got, step: got is None)
    case(pg.allreduce, (rank + 1,), lambda got, step: got == total + size, False)
    case(pg.allgather_object, ([rank],), lambda got, step: got == [[r] for r in range(size)], False)
    case(pg.monitored_barrier, (), lambda got, step: got is None, False)
    a, b = np.zeros(2), np.zeros(2)
    case(pg.batch, ([Send(a, right, 2), Recv(b, left, 2)],), lambda got, step: (got[1] == left + step).all(), False)
    case(
        pg.allreduce_coalesced,
        ([np.zeros(2), np.zeros(3)],),
        lambda got, step: (got[1] == size * step + total).all(),
        False,
    )
    case(pg.send, (np.zeros(2), PROC_NULL), lambda got, step: True, False)
    return cases


def fill_arrays(args: Any, value: float) -> None:
    for each in args:
        if isinstance(each, np.ndarray):
            each[...] = value
        elif isinstance(each, Send):
            each.tensor[...] = value
        elif isinstance(each, list):
            fill_arrays(each, value)


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3)
async def test_started_plan_matches_a_new_call(pg: ProcessGroup) -> None:
    """Start a plan on some ranks, and make the equivalent plain call on the others."""
    rank, size = pg.rank(), pg.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for number, (call, args, check, quick) in enumerate(call_cases(pg)):
        plan: Any = pg.plan(call, *args)
        assert is_quick(plan) == quick, (number, call)
        assert pg.pending() == []
        tag = args[2] if len(args) > 2 else 0
        for step in range(3):
            fill_arrays(args, rank + step)
            work = plan.start() if (rank + step + number) % 2 or step == 2 else call(*args)
            if call.__name__ == "recv":
                await pg.send(np.full(args[0].shape, float(rank + step)), right, tag)
            elif call.__name__ == "send" and args[1] != PROC_NULL:
                assert (await pg.recv(np.zeros(args[0].shape), left, tag) == left + step).all()
            assert check(await work, step), (number, call, step)


@pytest.mark.ranks(1, 2)
async def test_plan_of_many_tensors_changes_no_tensor_before_the_reduction(pg: ProcessGroup) -> None:
    """Use more tensors than one loop iteration can pack."""
    tensors = [np.zeros(1000) for _ in range(1000)]
    plan = pg.plan(pg.allreduce_coalesced, tensors)
    assert pg.pending() == []
    for tensor in tensors:
        tensor[:] = 1
    await asyncio.sleep(0)
    assert all((tensor == 1).all() for tensor in tensors)
    await plan.start()
    assert all((tensor == pg.size()).all() for tensor in tensors)


@pytest.mark.ranks(2)
async def test_plan_takes_sequence_numbers_and_keys_like_calls(pg: ProcessGroup) -> None:
    x, y = np.ones(3), np.ones(3)
    plan, keyed = pg.plan(pg.allreduce, x), pg.plan(pg.allreduce, tensor=y, key="grad", timeout=30)
    assert comm_of(pg).entered == 0
    first = plan.start()
    assert first.seq == 1
    assert await first is x
    one = keyed.start()
    assert (one.key, one.seq, one.op) == ("grad", 1, "ALLREDUCE")
    assert completion_of(one).timeout == 30
    assert await one is y
    assert (await pg.allreduce(np.ones(3)) == 2).all()
    work = plan.start()
    assert work.seq == 3
    await work
    two = keyed.start()
    assert two.seq == 2
    await two
    assert comm_of(pg).entered == 3
    assert (x == 4).all()
    assert (y == 4).all()
    # Reports must show the source line with `start()`.
    started = [plan.start(), pg.plan(pg.send, x, pg.rank()).start(), pg.plan(pg.barrier).start()]
    sites = {completion_of(each).code for each in started}
    assert {code.co_filename for code in sites} == {__file__}
    assert {code.co_name for code in sites} == {"test_plan_takes_sequence_numbers_and_keys_like_calls"}
    for each in started:
        await each
    await pg.recv(np.zeros(3), pg.rank())


@pytest.mark.ranks(2)
async def test_plan_cannot_start_twice_at_once(pg: ProcessGroup) -> None:
    x = np.ones(1)
    plan = pg.plan(pg.allreduce, x)
    other = pg.plan(pg.allreduce, np.ones(1))
    assert repr(plan) == "<CallPlan allreduce, not started>"
    if pg.rank():
        await pg.recv_object(0)
    work = plan.start()
    if pg.rank() == 0:
        assert not work.done()
        with pytest.raises(RuntimeError, match="ALLREDUCE seq=1 pending>> has not ended: await it before the next"):
            plan.start()
        await pg.send_object("go", 1)
    also = other.start()
    await work
    await also
    await plan.start()
    assert x[0] == 4


@pytest.mark.ranks(2)
async def test_plan_checks_its_arguments(pg: ProcessGroup) -> None:
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: pg.plan(pg.allreduce, "text"), TypeError, "tensor must be"),
        (lambda: pg.plan(pg.allreduce, np.ones(1), "SUM"), TypeError, "op must be a ReduceOp"),
        (lambda: pg.plan(pg.broadcast, np.ones(1), 2), ValueError, "root=2 is not a rank"),
        (lambda: pg.plan(pg.broadcast, np.ones(1), root=PROC_NULL), ValueError, "root is PROC_NULL"),
        (lambda: pg.plan(pg.send, np.ones(1), 5), ValueError, "dst=5 is not a rank"),
        (lambda: pg.plan(pg.recv, bytes(3), 0), ValueError, "read-only"),
        (lambda: pg.plan(pg.allreduce, np.ones(1), timeout=-1), ValueError, "timeout=-1"),
        (lambda: pg.plan(pg.allreduce, np.ones(1), key=3), TypeError, "key must be a str"),
        (lambda: pg.plan(pg.allreduce, np.ones(1), wrong=1), TypeError, "wrong"),
        (lambda: pg.plan(pg.send_object, object(), 1), aiocoll.SerializationError, "object"),
        (lambda: pg.plan("allreduce", np.ones(1)), TypeError, "such as pg.allreduce, not str"),
        (lambda: pg.plan(pg.split_group, [0]), TypeError, "not split_group"),
        (lambda: pg.plan(pg.shrink), TypeError, "not shrink"),
        (lambda: pg.plan(ProcessGroup.allreduce, pg, np.ones(1)), TypeError, "of this group"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    group = await pg.split_group([0, 1])
    assert group is not None
    with pytest.raises(TypeError, match="of this group"):
        pg.plan(group.allreduce, np.ones(1))
    assert pg.pending() == []
    assert await pg.allreduce(1) == 2


def test_every_call_that_returns_a_work_can_be_planned() -> None:
    works = {
        name
        for name in dir(ProcessGroup)
        if str(getattr(getattr(ProcessGroup, name), "__annotations__", {}).get("return", "")).startswith("Work[")
    }
    assert works - PLANNED == {"split_group", "probe"}
    assert works >= PLANNED


@pytest.mark.ranks(2)
async def test_plan_of_a_closed_group_cannot_start(pg: ProcessGroup) -> None:
    plans: list[Any] = [pg.plan(pg.allreduce, np.ones(1)), pg.plan(pg.recv, np.ones(1), 0), pg.plan(pg.barrier)]
    await plans[0].start()
    await pg.shutdown()
    for plan in plans:
        with pytest.raises(GroupClosedError):
            plan.start()
    with pytest.raises(GroupClosedError):
        pg.plan(pg.barrier)


@pytest.mark.ranks(2)
async def test_plan_fails_like_the_planned_call(pg: ProcessGroup) -> None:
    plan = pg.plan(pg.allreduce, np.ones(1 + pg.rank()))
    with pytest.raises(CollectiveMismatchError, match="counts"):
        await plan.start()
    with pytest.raises(GroupError):
        plan.start()


@pytest.mark.ranks(1)
async def test_plan_keeps_its_arrays_alive(pg: ProcessGroup) -> None:
    x = np.full(1000, 3.0)
    held = weakref.ref(x)
    plan = pg.plan(pg.allreduce, x)
    del x
    gc.collect()
    assert (await plan.start() == 3).all()
    del plan
    gc.collect()
    assert held() is None


@pytest.mark.ranks(2)
async def test_list_plan_works_in_blocks_with_compared_calls_and_in_dry_runs(pg: ProcessGroup) -> None:
    x, y = np.ones(2), np.ones(3)
    plan = pg.plan(pg.allreduce, x)
    async with pg.coalescing():
        inside = pg.plan(pg.allreduce, y)  # making a plan records no call in the block
        first, second = plan.start(), inside.start()
        assert not first.done()
    assert (first.done(), second.done()) == (True, True)
    assert (x == 2).all()
    assert (y == 2).all()
    with pg.time_estimator() as estimate:
        await plan.start()
        pg.plan(pg.barrier)
    assert [call.op for call in estimate.calls] == ["ALLREDUCE"]
    assert (x == 2).all()


async def test_plan_works_with_compared_calls_and_in_a_dry_run() -> None:
    async def rank(pg: ProcessGroup) -> Any:
        x = np.ones(2)
        plan = pg.plan(pg.allreduce, x)
        await plan.start()
        await pg.allreduce(x) if pg.rank() else await plan.start()
        return x.tolist()

    assert await testing.run_ranks(2, rank, options=GroupOptions(debug="detail")) == [[4, 4]] * 2
    async with new_group("fake", rank=1, world_size=64) as pg:
        plan = pg.plan(pg.allreduce, np.ones(2))
        assert [(await plan.start()).tolist() for _ in range(2)] == [[1, 1]] * 2


@pytest.mark.ranks(1)
async def test_plan_start_does_not_examine_its_arrays_again(pg: ProcessGroup) -> None:
    plans: list[Any] = [pg.plan(pg.allgather_into_tensor, np.zeros(4), np.ones(4)), pg.plan(pg.send, np.ones(1), 0)]
    with recorded_views() as viewed:
        await pg.allgather_into_tensor(np.zeros(8)[::2], np.ones(4))
        await pg.send(np.ones(1), 0)
        assert len(viewed) > 1
        viewed.clear()
        for plan in plans:
            await plan.start()
        assert viewed == []
    await pg.recv(np.zeros(1), 0)
    await pg.recv(np.zeros(1), 0)


@pytest.mark.ranks(2)
async def test_creation_of_a_list_plan_reads_and_writes_no_tensors(pg: ProcessGroup, limits: Limits) -> None:
    """Create the plan of a list call while no time is left for packing."""
    limits(loop_budget=-1)
    x, y = np.zeros(3), np.zeros(2)
    plan = pg.plan(pg.allreduce_coalesced, [x, y])
    assert pg.pending() == []
    x[:], y[:] = 1, 2
    await pg.barrier()
    assert (x.tolist(), y.tolist()) == ([1, 1, 1], [2, 2])
    await plan.start()
    assert (x.tolist(), y.tolist()) == ([2, 2, 2], [4, 4])
    with pg.time_estimator() as estimate:
        pg.allreduce_coalesced([x, y])
    assert [(call.op, call.nbytes) for call in estimate.calls] == [("ALLREDUCE", 40)]
    assert pg.pending() == []
