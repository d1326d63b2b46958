"""The call cache: which calls find a cached plan, and the contents of the plans."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.signature import Signature
from aiocoll.group.dispatch.call_cache import PLANS
from aiocoll.group.dispatch.planner import Planner

from ...internals import dispatcher_of, observe_methods

SUM = ReduceOp.SUM
#: Two dtypes that NumPy treats as equal on most platforms, although they are distinct objects.
ONE, OTHER = np.dtype("l"), np.dtype("q")


def one(pg: ProcessGroup, tensor: Any, op: ReduceOp | None = SUM, root: int | None = None) -> Plan | None:
    return dispatcher_of(pg).plans.one("allreduce" if op else "broadcast", tensor, op, root)


@pytest.mark.ranks(1)
async def test_equal_calls_share_a_cached_plan(pg: ProcessGroup) -> None:
    plan = one(pg, np.ones((2, 3)))
    assert plan is not None
    assert (plan.signature.op, plan.count) == ("ALLREDUCE", 6)
    assert one(pg, np.zeros((2, 3))) is plan
    others = [one(pg, np.ones(6)), one(pg, np.ones((2, 3), "f4")), one(pg, np.ones((2, 3)), ReduceOp.MAX)]
    others += [one(pg, np.ones((2, 3)), None, 0)]
    assert len({id(each) for each in (plan, *others)}) == 5


@pytest.mark.ranks(2)
async def test_calls_with_different_roots_have_separate_plans(pg: ProcessGroup) -> None:
    first, second = (one(pg, np.ones(3), None, root) for root in range(2))
    assert first is not None
    assert second is not None
    assert [first.signature.root, second.signature.root] == [0, 1]


def read_only() -> Any:
    tensor = np.ones(4)
    tensor.flags.writeable = False
    return tensor


class Array(np.ndarray):
    """An array of a subclass of `np.ndarray`."""


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "tensor",
    [
        np.ones(8)[::2],
        np.ones((3, 4)).T,
        read_only(),
        np.ones(4).view(Array),
        np.frombuffer(bytearray(33), np.uint8)[1:].view(np.float64),
        np.ones(4, ">f8"),
        np.ones(4, object),
        np.ones(2, [("value", "f8"), ("index", "i8")]),
        2.5,
        [1.0],
    ],
    ids=[
        "strided",
        "transposed",
        "read-only",
        "subclass",
        "unaligned",
        "swapped",
        "objects",
        "record",
        "number",
        "list",
    ],
)
async def test_calls_on_unusual_arrays_are_not_cached(pg: ProcessGroup, tensor: Any) -> None:
    assert one(pg, tensor) is None
    assert not dispatcher_of(pg).plans.known


@pytest.mark.ranks(1)
async def test_array_whose_dtype_is_only_equal_to_the_cached_dtype_misses_the_call_cache(pg: ProcessGroup) -> None:
    aliases = [dtype for dtype in (ONE, OTHER) if np.dtype(np.int64) is not dtype]
    if ONE.itemsize != OTHER.itemsize or not aliases:
        pytest.skip("all dtypes of this width are one")
    (alias,) = aliases
    assert one(pg, np.ones(3, alias)) is None
    plan = one(pg, np.ones(3, np.int64))
    assert plan is not None
    assert one(pg, np.ones(3, alias)) is None  # which is equal, so it finds that plan
    plans = dispatcher_of(pg).plans
    assert plans.parts("allgather", np.ones(3, alias), np.ones(3, alias), None) is None
    assert plans.lists("allgather", [np.ones(3, alias)], np.ones(3, alias)) is None
    found = plans.parts("allgather", np.ones(3, np.int64), np.ones(3, np.int64), None)
    assert found is not None
    assert found[0].storage is np.dtype(np.int64)
    tensor = np.ones(3, alias)
    assert (await pg.allreduce(tensor)) is tensor


@pytest.mark.ranks(1)
async def test_cached_plan_keeps_its_op_alive(pg: ProcessGroup) -> None:
    """Check that the plan references its op; otherwise, another op could get the same id."""
    op = ReduceOp.PREMUL_SUM(2.0)
    alive = weakref.ref(op) if hasattr(op, "__weakref__") else None
    plan = one(pg, np.ones(3), op)
    identity = id(op)
    del op
    gc.collect()
    assert plan is not None
    assert id(plan.op) == identity
    assert alive is None or alive() is plan.op
    for factor in range(50):
        assert (await pg.allreduce(np.ones(1), ReduceOp.PREMUL_SUM(float(factor)))).tolist() == [factor]


@pytest.mark.ranks(2)
async def test_call_cache_keeps_a_limited_number_of_plans(pg: ProcessGroup) -> None:
    known = dispatcher_of(pg).plans.known
    for length in (*range(1, PLANS), 1, 2, 3, 4, 5):
        assert (await pg.allreduce(np.ones(length))).tolist() == [2] * length
        assert (await pg.allreduce(np.ones(2 * length)[::2])).tolist() == [2] * length
        assert (await pg.allgather_into_tensor(np.ones(2 * length), np.ones(length))).tolist() == [1] * 2 * length
        assert len(known) <= PLANS


@pytest.mark.ranks(1)
async def test_repeated_call_does_not_call_the_planner_again(pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    observe_methods(monkeypatch, Planner, plan=lambda *args, **_: planned.append(args[1]))
    signature = Signature("ALLGATHER_ALLOCATED", "float64", (), None, None)
    calls: dict[str, Callable[[], Any]] = {
        "array": lambda: pg.allreduce(np.ones(3)),
        "strided": lambda: pg.allreduce(np.ones(6)[::2]),
        "number": lambda: pg.allreduce(1.0),
        "parts": lambda: pg.allgather_into_tensor(np.ones(3), np.ones(3)),
        "lists": lambda: pg.alltoall([np.ones(3)], [np.ones(3)]),
        "barrier": lambda: pg.barrier(),
        "counting": lambda: dispatcher_of(pg).plans.counting_plan(signature),
    }
    for name, call in calls.items():
        call()
        before = len(planned)
        call()
        assert len(planned) == before, name
    assert planned == ["allreduce", "allreduce", "allreduce", "allgather", "alltoall", "barrier"]


@pytest.mark.ranks(1)
async def test_inlined_cache_lookup_agrees_with_the_call_cache(pg: ProcessGroup) -> None:
    """Compare `Dispatcher.one`, which contains an inlined `CallCache.one`, with the original."""
    plans = dispatcher_of(pg).plans
    for tensor in (np.ones(3), np.ones((2, 2), "f4"), np.ones(4)[::2], np.ones(3, ONE), np.ones(3, OTHER)):
        plans.known.clear()
        await pg.allreduce(tensor)
        (key,) = plans.known
        found = plans.one("allreduce", tensor, SUM, None)
        assert found is None or plans.known == {key: found}


@pytest.mark.ranks(2)
async def test_plan_of_a_gather_stores_no_counts_of_other_ranks(pg: ProcessGroup) -> None:
    """Compare with an allgather, where every rank knows the counts of all ranks."""
    plans = dispatcher_of(pg).plans
    outputs = [np.ones(3), np.ones(3)]
    found = plans.lists("gather", outputs if pg.rank() == 0 else None, np.ones(3), root=0)
    assert found is not None
    assert found[0].signature.counts == ()
    found = plans.lists("allgather", outputs, np.ones(3))
    assert found is not None
    assert found[0].signature.counts == (3, 3)
