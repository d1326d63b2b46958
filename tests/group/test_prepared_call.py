"""Prepared calls: the objects that describe calls to interceptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupOptions, ProcessGroup, Recv, Send, new_group, testing
from aiocoll.algorithms.load import Load, seconds_of
from aiocoll.algorithms.spec import SPECS, Method
from aiocoll.completion import Completion
from aiocoll.group.prepared_call import FactoryCall, MessageCall, PlannedCall, PreparedCall
from aiocoll.work import Work, completion_of

from ..internals import comm_of, dispatcher_of


class KeepingInterceptor:
    """An interceptor that keeps all calls, and can start them later."""

    moves_nothing = False
    records = True

    def __init__(self, pg: ProcessGroup) -> None:
        self.pg = pg
        self.calls: list[tuple[PreparedCall, Work[Any]]] = []

    def take(self, call: PreparedCall) -> Work[Any]:
        completion = Completion(comm_of(self.pg).endpoint, call.op, None, call.key, dispatcher_of(self.pg))
        call.expect(completion)
        work: Work[Any] = Work(completion)
        self.calls.append((call, work))
        return work

    def start(self) -> None:
        """Start all kept calls without changes."""
        d = dispatcher_of(self.pg)
        for call, work in self.calls:
            completion = completion_of(work)
            identity, completion.seq = (2 << 62, None) if call.signature is None else d.numbered(call.key)
            d.enter(call.operation(d.comm, identity, completion))


def interceptor_with(pg: ProcessGroup, *calls: Callable[[], Any]) -> KeepingInterceptor:
    """Return an interceptor that keeps the given calls."""
    keeping = KeepingInterceptor(pg)
    with dispatcher_of(pg).scoped(keeping):
        for call in calls:
            call()
    return keeping


@pytest.mark.ranks(2)
async def test_prepared_call_on_arrays_contains_its_plan_and_arrays(pg: ProcessGroup) -> None:
    tensor = np.arange(6.0).reshape(2, 3)
    keeping = interceptor_with(pg, lambda: pg.allreduce(tensor, timeout=7.0, key="k"))
    ((call, work),) = keeping.calls
    assert type(call) is PlannedCall
    assert (call.op, call.signature, call.key, call.limit) == ("ALLREDUCE", call.plan.signature, "k", 7.0)
    assert (call.shape, call.result is tensor, call.unwrap, call.is_on_device) == ((2, 3), True, None, False)
    assert [array.shape for array in call.arrays] == [(6,)]
    assert np.shares_memory(call.arrays[0], tensor)
    keeping.start()
    assert await work is tensor
    assert tensor.ravel().tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.ranks(2)
async def test_prepared_call_on_a_number_or_staged_array_returns_the_callers_type(pg: ProcessGroup) -> None:
    keeping = interceptor_with(pg, lambda: pg.allreduce(2.5), lambda: pg.allreduce(np.ones(4)[::2]))
    assert all(call.unwrap is not None for call, _ in keeping.calls)
    keeping.start()
    assert await keeping.calls[0][1] == 5.0
    assert (await keeping.calls[1][1]).tolist() == [2, 2]


@pytest.mark.ranks(2)
async def test_prepared_object_call_creates_its_operation_by_a_factory(pg: ProcessGroup) -> None:
    keeping = interceptor_with(
        pg, lambda: pg.allgather_object(pg.rank()), lambda: pg.allgather(None, np.ones(pg.rank() + 1))
    )
    objects, unsized = (call for call, _ in keeping.calls)
    assert isinstance(objects, FactoryCall)
    assert isinstance(unsized, FactoryCall)
    assert [objects.op, unsized.op] == ["ALLGATHER_OBJECT", "ALLGATHER_ALLOCATED"]
    assert objects.nbytes > 0 < unsized.nbytes == 8 * (pg.rank() + 1)
    keeping.start()
    assert await keeping.calls[0][1] == [0, 1]
    assert [each.tolist() for each in await keeping.calls[1][1]] == [[1], [1, 1]]


@pytest.mark.ranks(2)
async def test_prepared_message_call_contains_peers_and_no_signature(pg: ProcessGroup) -> None:
    other, tensor = 1 - pg.rank(), np.zeros(3)
    keeping = interceptor_with(
        pg, lambda: pg.batch([Send(np.full(3, float(pg.rank())), other, 5), Recv(tensor, None, 5)])
    )
    send, receive = (call for call, _ in keeping.calls)
    assert isinstance(send, MessageCall)
    assert isinstance(receive, MessageCall)
    assert (send.signature, send.key, receive.signature, receive.key) == (None,) * 4
    assert (send.ends, receive.ends) == (("dst", other, 5), ("src", None, 5))
    assert (send.nbytes, receive.nbytes, receive.result is tensor) == (24, 24, True)
    keeping.start()
    await keeping.calls[1][1]
    assert tensor.tolist() == [other] * 3


@pytest.mark.ranks(1)
async def test_repeated_starts_of_a_prepared_call_do_not_share_their_array_list(pg: ProcessGroup) -> None:
    """Check that each start has its own list of arrays, because an operation may append to the list."""
    planned = PlannedCall(dispatcher_of(pg).plans.plan("barrier", None, ()), [], (3,), "result", 2.0, "key", list)
    again = planned.prepare_again()
    assert again.arrays == []
    assert again.arrays is not planned.arrays
    for name in ("plan", "shape", "result", "limit", "key", "unwrap"):
        assert getattr(again, name) == getattr(planned, name)
    (message, _), *_ = interceptor_with(pg, lambda: pg.send(np.ones(1), 0)).calls
    assert message.prepare_again() is message


@pytest.mark.ranks(2)
async def test_plan_started_from_a_prepared_call_equals_a_plan_started_from_arguments(pg: ProcessGroup) -> None:
    works: list[Work[Any]] = []
    d = dispatcher_of(pg)
    for key, from_record in ((None, True), (None, False), ("k", True), ("k", False)):
        tensor = np.ones(3)
        plan = d.plans.one("broadcast", tensor, None, 0)
        assert plan is not None
        arguments = plan, [tensor], (3,), tensor, 5.0, key, tensor.tolist
        works.append(d.start(PlannedCall(*arguments)) if from_record else d.start_plan(*arguments))
    assert [await work for work in works] == [[1, 1, 1]] * 4
    assert [(work.op, work.seq, work.key) for work in works] == [
        ("BROADCAST", 1, None), ("BROADCAST", 2, None), ("BROADCAST", 1, "k"), ("BROADCAST", 2, "k")
    ]  # fmt: skip
    assert len({(completion_of(work).shape, completion_of(work).timeout) for work in works}) == 1


# -- calls without a schedule, described by their specifications


def sparse(pg: ProcessGroup) -> Any:
    return pytest.importorskip("scipy.sparse").coo_array(np.eye(4))


#: Functions that start each call that has no schedule, except messages.
COMPOSITE: dict[str, Callable[[ProcessGroup], Any]] = {
    "allreduce_sparse": lambda pg: pg.allreduce(sparse(pg)),
    "reduce_sparse": lambda pg: pg.reduce(sparse(pg), 0),
    "broadcast_sparse": lambda pg: pg.broadcast(sparse(pg), 0),
    "allgather_sparse": lambda pg: pg.allgather(None, sparse(pg)),
    "gather_sparse": lambda pg: pg.gather(None, sparse(pg), 0),
    "allgather_allocated": lambda pg: pg.allgather(None, np.ones(2 + pg.rank())),
    "broadcast_object": lambda pg: pg.broadcast_object("x", 0),
    "allgather_object": lambda pg: pg.allgather_object("x"),
    "gather_object": lambda pg: pg.gather_object("x", 0),
    "scatter_object": lambda pg: pg.scatter_object(["x"] * pg.size() if pg.rank() == 0 else None, 0),
    "alltoall_object": lambda pg: pg.alltoall_object(["x"] * pg.size()),
}
TO_ROOT = {"reduce_sparse", "gather_sparse", "gather_object"}
FROM_ROOT = {"broadcast_sparse", "broadcast_object", "scatter_object"}
rows = pytest.mark.parametrize("kind", COMPOSITE)


def test_composite_call_table_covers_every_specification_without_a_schedule() -> None:
    others = {kind for kind, spec in SPECS.items() if spec.method in (Method.STEPS, Method.PARCELS)}
    assert others == set(COMPOSITE)
    rest = {kind for kind, spec in SPECS.items() if spec.method is Method.MESSAGES}
    assert rest == {"send_sparse", "recv_sparse", "halo"}


@rows
@pytest.mark.ranks(2)
async def test_specification_of_a_prepared_call_is_found_by_its_signature(pg: ProcessGroup, kind: str) -> None:
    ((call, work),) = interceptor_with(pg, lambda: COMPOSITE[kind](pg)).calls
    assert call.signature is not None
    assert call.signature.spec is SPECS[kind]
    completion_of(work).finish(None)


@rows
@pytest.mark.ranks(2)
async def test_estimate_counts_the_senders_and_receivers_of_the_specification(pg: ProcessGroup, kind: str) -> None:
    with pg.time_estimator() as estimate:
        async with pg.coalescing():  # outside of a block, this would be an allgather with equal counts
            COMPOSITE[kind](pg)
    (one,) = estimate.calls
    assert (one.op, one.algorithm) == (kind.upper(), None)
    load = Load(1, int(kind not in TO_ROOT), int(kind not in FROM_ROOT), one.nbytes, 0, 0)
    assert one.seconds == seconds_of(load, comm_of(pg).tuning.machine)


@rows
@pytest.mark.ranks(2)
async def test_block_records_calls_whose_specification_allows_recording(pg: ProcessGroup, kind: str) -> None:
    assert SPECS[kind].recordable
    async with pg.coalescing():
        work = COMPOSITE[kind](pg)
        assert not work.done()
        assert work in pg.pending()
    assert work.done()
    assert pg.stats().operations[0].op == "COALESCED"


@rows
@pytest.mark.ranks(2)
async def test_statistics_count_the_bytes_of_calls_with_known_sizes(pg: ProcessGroup, kind: str) -> None:
    await COMPOSITE[kind](pg)
    (row,) = [each for each in pg.stats().operations if each.op == kind.upper()]
    assert (row.calls, row.nbytes > 0) == (1, SPECS[kind].sized)


@rows
async def test_prepared_call_is_compared_between_ranks(kind: str) -> None:
    async def rank(pg: ProcessGroup) -> Any:
        await COMPOSITE[kind](pg)
        return [each.op for each in pg.stats().operations]

    assert await testing.run_ranks(2, rank, options=GroupOptions(debug="detail")) == [[kind.upper()]] * 2


@rows
async def test_prepared_call_completes_at_once_in_a_dry_run(kind: str) -> None:
    async with new_group("fake", rank=0, world_size=3) as pg:
        work = COMPOSITE[kind](pg)
        assert work.done()
        await work
